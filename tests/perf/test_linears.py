"""A linear layer, forward and backward, quantising included: the map of speed-ups."""

from __future__ import annotations

import pytest

from fp8.testing.perf import catalogue
from fp8.testing.perf.catalogue import benches


@pytest.mark.law("P02", "P21", "P26")
@pytest.mark.parametrize("bench", benches(*catalogue.LINEARS))
def test_linears(bench, measure):
    """As fast as the threshold says; in a bad regime as slow as the claim says, and no faster."""
    measure(bench)
