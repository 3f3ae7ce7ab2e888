"""Training steps: the models of pytorch/ao#2262 and a block of Llama 3, eager and compiled."""

from __future__ import annotations

import pytest

from fp8.testing.perf import catalogue
from fp8.testing.perf.catalogue import benches


@pytest.mark.law("P02", "P14", "P21", "P26")
@pytest.mark.parametrize("bench", benches(*catalogue.STEPS))
def test_steps(bench, measure):
    """Time, first call, peak memory and bytes saved for backward, with every gradient."""
    measure(bench)
