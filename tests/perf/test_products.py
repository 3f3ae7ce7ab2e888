"""Bare products and casts: what the GPU reaches, and how near each stack's kernels come."""

from __future__ import annotations

import pytest

from fp8.testing.perf import catalogue
from fp8.testing.perf.catalogue import benches


@pytest.mark.law("P02", "P21", "P26")
@pytest.mark.parametrize("bench", benches(catalogue.CEILINGS))
def test_ceilings(bench, measure):
    """The largest products, a copy and an amax: what fractions are fractions of."""
    measure(bench)


@pytest.mark.law("P02", "P21", "P26")
@pytest.mark.parametrize("bench", benches(*catalogue.PRODUCTS))
def test_products(bench, measure):
    """Products of quantised operands against bfloat16's."""
    measure(bench)


@pytest.mark.law("P02", "P21")
@pytest.mark.parametrize("bench", benches(*catalogue.CASTS))
def test_casts(bench, measure):
    """Casting and quantising against a copy of the tensor."""
    measure(bench)
