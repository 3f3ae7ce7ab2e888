"""What inductor makes of a layer has eager's bits; where fusion may skip a rounding, a bound.

With `emulate_precision_casts` inductor rounds wherever eager code does, so that every bit must
agree: that is how a miscompiled kernel is told from one that merely rounds less. Without it, as
users run it, the difference has a bound.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from torch._inductor import config, metrics

from fp8.testing import models
from fp8.testing.comparing import sqnr
from fp8.testing.compiled_runs import Compile, as_it_is, in_graphs
from fp8.testing.linear_runs import judge_exact, make_layer, run_layer
from fp8.testing.strategies import as_tensor, exact_arrays

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("inductor")

M, K, N = 36, 52, 44

#: dB. A rounding to bfloat16 that is skipped moves a value by up to half an ulp, 2^-8 of it. It
#: moves the codes of as many values as have an edge between two codes in that interval: a share of
#: 2^-8 / s, where s is the distance of two codes, and by s each. Relative to the signal that is a
#: noise of 2^-8 * s in power: s = 2^-3 for e4m3 and 2^-2 for e5m2 at the bottom of a binade, so
#: 2^-11 (33 dB) and 2^-10 (30 dB) for each operand. A gradient of a model of two layers has at most
#: four such operands behind it, two of them e5m2: 2^-11 + 2^-11 + 2^-10 + 2^-10 = 3 * 2^-10.
FUSED_SQNR = 25.3
#: dB, float32: what is summed in another order, db, over M = 36 tokens: 36 * 2^-24 of it at most,
#: 113 dB, and as a rule the root of that.
FLOAT32_SUM_SQNR = 110.0


def emulating() -> AbstractContextManager[None]:
    """Inductor rounds wherever eager code does."""
    patched: AbstractContextManager[None] = config.patch(emulate_precision_casts=True)
    return patched


def timed(judge, recipe: str, calls: dict[str, Callable[[], None]]) -> None:
    """Run what compiles and what doesn't any more, and record what each took; nothing is judged."""
    for label, call in calls.items():
        began = time.perf_counter()
        call()
        judge.record(f"{recipe} {label}", time.perf_counter() - began, "seconds")


@pytest.mark.law("P09", "P10", "P05", "P08")
def test_linear(target, recipe, judge, fp8_seed):
    """One layer: eager's bits on drawn values, the exact result on exact operands."""
    judge.example(recipe=recipe, dtype="bfloat16", backend="inductor")
    m, k, n = models.aligned(target, M, K, N)
    exact = exact_arrays(m, k, n, recipe, "bfloat16", True, 100 + fp8_seed)
    layer = make_layer(target, recipe, exact.w, exact.bias, "bfloat16")
    pairs = [
        [as_tensor(a, "bfloat16", target.device) for a in (exact.x, exact.g)],
        [
            models.values(seed + fp8_seed, m, extent, dtype="bfloat16", device=target.device)
            for seed, extent in ((101, k), (102, n))
        ],
    ]
    results = []

    def run(compile_: Compile):
        forward = compile_(layer)
        timed(
            judge,
            recipe,
            {
                label: lambda pair=pair: results.append(run_layer(forward, *pair))
                for label, pair in zip(("first call", "second call"), pairs, strict=True)
            }
            | {"third call": lambda: run_layer(forward, *pairs[0])},
        )
        return True

    metrics.reset()
    with emulating():
        if not in_graphs(judge, run, backend="inductor"):
            return
    judge.record(f"{recipe} generated kernels", metrics.generated_kernel_count, "count")
    on_exact, on_drawn = results
    eager = run_layer(layer, *pairs[1])
    for name in ("y", "dx", "dw", "db"):
        judge.bitwise("P09", f"{name} compiled", getattr(on_drawn, name), getattr(eager, name))
    judge_exact(judge, target, on_exact, exact, "bfloat16")


def one_pass(target, recipe: str, make: Callable[[], nn.Module], x: Tensor, g: Tensor):
    """From a compiler to a pass through a new model."""

    def run(compile_: Compile) -> models.Pass:
        return models.one_pass(compile_(target.convert(make(), recipe)), x, g)

    return run


@pytest.mark.law("P09", "P10")
def test_float32(target, recipe, judge, fp8_seed):
    """One layer of float32: the products' bits; what is summed, db, to a few roundings."""
    judge.example(recipe=recipe, dtype="float32", backend="inductor")
    m, k, n = models.aligned(target, M, K, N)
    x, g = (
        models.values(seed + fp8_seed, m, extent, dtype="float32", device=target.device)
        for seed, extent in ((103, k), (104, n))
    )
    run = one_pass(target, recipe, lambda: models.linear(target, k, n, dtype="float32"), x, g)
    got = in_graphs(judge, run, backend="inductor")
    if got is None:
        return
    for name, expected in run(as_it_is).tensors().items():
        ours = got.tensors()[name]
        if name == "grad 0.bias":
            close_as(judge, f"{name} compiled", ours, expected, FLOAT32_SUM_SQNR)
        else:
            judge.bitwise("P09", f"{name} compiled", ours, expected)


def close_as(judge, check: str, got: Tensor, expected: Tensor, least: float) -> None:
    """Their difference is at least so many dB below them."""
    measured = sqnr(got, expected)
    message = f"expected at least {least} dB, got {measured:.1f} dB"
    judge.true("P09", check, measured >= least, message)


@pytest.mark.thorough
@pytest.mark.law("P09", "P10")
def test_block(target, recipe, judge, fp8_seed):
    """A transformer block, where more can be fused, has eager's bits."""
    judge.example(recipe=recipe, dtype="bfloat16", backend="inductor", model="block")
    x, g = models.block_batch(target, dtype="bfloat16", seed=105 + fp8_seed)
    run = one_pass(target, recipe, lambda: models.block(target, dtype="bfloat16"), x, g)
    with emulating():
        got = in_graphs(judge, run, backend="inductor")
    if got is None:
        return
    models.same_pass(judge, "P09", "compiled", got, run(as_it_is))


@pytest.mark.thorough
@pytest.mark.law("P09", "P10")
def test_fused(target, recipe, judge, fp8_seed):
    """As users run it: an activation that is fused with the cast skips a rounding, and no more."""
    judge.example(recipe=recipe, dtype="bfloat16", backend="inductor", model="mlp")
    x, g = models.mlp_batch(target, dtype="bfloat16", seed=106 + fp8_seed)
    run = one_pass(target, recipe, lambda: models.mlp(target, dtype="bfloat16"), x, g)
    got = in_graphs(judge, run, backend="inductor")
    if got is None:
        return
    for name, expected in run(as_it_is).tensors().items():
        close_as(judge, f"{name} compiled", got.tensors()[name], expected, FUSED_SQNR)
        judge.record(f"{recipe} {name} fused", sqnr(got.tensors()[name], expected), "sqnr")
