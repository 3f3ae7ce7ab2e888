"""Claims that need a measurement of their own: against the remedy, and of accuracy.

The claims about a layer's or a step's time against bfloat16 are held in test_linears.py and
test_steps.py, by the cases that are in the regime.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp8 import regimes
from fp8.recipes import TENSORWISE_RECIPE
from fp8.regimes import Case
from fp8.testing import captured
from fp8.testing.perf import catalogue
from fp8.testing.perf.catalogue import benches
from fp8.testing.speed_verdicts import GRAVE, Interval, of_claim

SAMPLE = Path(__file__).parents[1] / "numerics" / "data" / "minilm.safetensors"


@pytest.mark.law("P02", "P21", "P26")
@pytest.mark.parametrize("bench", benches(*catalogue.REGIMES))
def test_regimes(bench, measure):
    """A bad setting is as much slower than its remedy as claimed."""
    measure(bench)


def drift(target, x: torch.Tensor, w: torch.Tensor) -> float:
    """By how much fast accumulation makes outputs too small: the mean error in their direction.

    x (M, K), w (N, K). Against float64 on the same codes, relative to the mean magnitude.
    """
    how = TENSORWISE_RECIPE.output
    a, b = target.quantize(x, how.a), target.quantize(w, how.b)
    exact = a.dequantize().double() @ b.dequantize().double().t()
    got = target.scaled_mm(a, b, bias=None, out_dtype=torch.float32, accumulation="fast").double()
    lost = ((exact - got) * exact.sign()).mean() / exact.abs().mean()
    return lost.item()


@pytest.mark.thorough
@pytest.mark.law("F-ACC")
@pytest.mark.parametrize("K", [1024, 4096, 16384])
def test_fast_accumulation(gpu, target, judge, K):
    """Sums of one sign come out too small from K = 4096 on, as claimed; shorter ones don't."""
    stack = gpu.stack(target)
    judge.require(
        stack.multiplies and stack.quantises, "no scaled product that can be called alone"
    )
    generator = torch.Generator(target.device).manual_seed(0)
    x, w = (
        torch.rand(256, K, generator=generator, device=target.device).add(0.5).bfloat16()
        for _ in range(2)
    )
    known = Case(subject="values", K=K, accumulation="fast", data="same-sign", gpu=stack.gpu)
    judge.example(recipe="tensorwise", K=K, data="same-sign")
    held(judge, known, drift(target, x, w))


@pytest.mark.thorough
@pytest.mark.law("F-ACC")
@pytest.mark.parametrize("name", captured.layer_names(SAMPLE))
def test_fast_accumulation_of_real_activations(gpu, target, judge, name):
    """On the operands of a real model it loses no more than the claim says of the rest."""
    stack = gpu.stack(target)
    judge.require(
        stack.multiplies and stack.quantises, "no scaled product that can be called alone"
    )
    layer = captured.load(SAMPLE)[name]
    x, w = layer.x.to(target.device), layer.w.to(target.device)
    K = x.shape[1]
    for data, (left, right) in {
        "real": (x, w),
        # as after a ReLU, and with weights that don't let its sums cancel: the worst of this model
        "real, same-sign": (x.relu(), w.abs()),
    }.items():
        judge.example(recipe="tensorwise", K=K, data=data, layer=name)
        sign = "same-sign" if "same-sign" in data else "random"
        known = Case(subject="values", K=K, accumulation="fast", data=sign, gpu=stack.gpu)
        held(judge, known, drift(target, left, right))


def held(judge, known: Case, error: float) -> None:
    """In the regime the error is as claimed; outside it is smaller than the claim's."""
    (claim,) = [regime for regime in regimes.load() if regime.id == "fast-accumulation"]
    judge.record("fast accumulation", f"{error:.4f}", "text")
    if claim in regimes.of(known):
        judgement = of_claim(Interval(error, error, error), claim)
        judge.true("F-ACC", claim.id, judgement.verdict not in GRAVE, judgement.reason)
    else:
        message = f"outputs are {error:.1%} too small, outside the regime {claim.id}"
        judge.true("F-ACC", "outside the regime", abs(error) < claim.at_least, message)
