"""Codes and scales of compiled casts are eager's bits: every 16-bit value, every binade's edge.

An eager cast and a compiled one are different code on every backend, and have disagreed over
overflow (pytorch/ao#1912), over the amax of a bfloat16 tensor (pytorch#136181) and over exponents
taken from a logarithm (pytorch#179570).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp8.formats import FORMATS
from fp8.scaling import ROWWISE
from fp8.testing.compiled_runs import Compile, as_it_is, in_graphs
from fp8.testing.probes import amax_probes, float32_sample, matrix_of_amaxes, sixteen_bit
from fp8.testing.quantize_checks import chosen, facts
from fp8.testing.strategies import DTYPES, as_tensor

BACKENDS = ("aot_eager", "inductor")
#: formats of one graph: NVIDIA's, AMD's, and that of scales
FORMAT_GROUPS = (("e4m3fn", "e5m2"), ("e4m3fnuz", "e5m2fnuz"), ("e8m0fnu",))


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "inductor":
        request.getfixturevalue("inductor")
    return request.param


def every_value(dtype: str, device: torch.device) -> torch.Tensor:
    """All 16-bit values, or a sample of float32 values with their neighbours."""
    if dtype == "float32":
        return torch.from_numpy(float32_sample()).to(device)
    return sixteen_bit(dtype).to(device)


@pytest.mark.law("P09", "P10")
@pytest.mark.parametrize("formats", FORMAT_GROUPS, ids="-".join)
@pytest.mark.parametrize("dtype", DTYPES)
# torch makes a signalling NaN of the fnuz formats' NaN; numpy is loud about it when it widens it.
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
def test_cast(target, backend, dtype, formats, judge):
    """A cast of every 16-bit value, and of float32's decisive ones."""
    judge.example(dtype=dtype, backend=backend, formats="-".join(formats))
    able = target.capabilities().formats
    judge.require(able >= set(formats), f"cast: not to {', '.join(formats)}")
    x = every_value(dtype, target.device)

    def cast(x: torch.Tensor) -> list[torch.Tensor]:
        return [target.cast(x, FORMATS[name]) for name in formats]

    got = in_graphs(judge, lambda compile_: compile_(cast)(x), backend=backend)
    if got is None:
        return
    for name, ours, expected in zip(formats, got, cast(x), strict=True):
        judge.bitwise("P09", f"cast to {name}", ours, expected)


def edges(device: torch.device) -> torch.Tensor:
    """Rows (float32) with the amaxes at which a rule for e4m3fn decides, up to 2 ulp around."""
    amaxes = [p.amax for p in amax_probes("e4m3fn", "float32") if p.edge != "not finite"]
    rows = matrix_of_amaxes(np.concatenate(amaxes), ROWWISE.block, "float32", seed=3)
    return as_tensor(rows, "float32", device)


@pytest.mark.law("P09", "P10")
def test_quantize(target, backend, judge):
    """Every scale rule and every granularity of e4m3fn, and e5m2, in one graph."""
    able = target.capabilities().operands
    operands = chosen(able, format="e4m3fn", granularity="rowwise")
    operands += chosen(able, format="e4m3fn", rule="torchao_pow2")
    operands += chosen(able, format="e5m2", granularity="rowwise", rule="torchao")
    judge.require(bool(operands), "quantize: no operand")
    x = edges(target.device)

    def quantize(x: torch.Tensor) -> list[torch.Tensor]:
        found = [target.quantize(x, operand) for operand in operands]
        return [part for q in found for part in (q.codes, q.scale)]

    def run(compile_: Compile) -> list[torch.Tensor]:
        return compile_(quantize)(x)

    judge.example(backend=backend, dtype="float32")
    got = in_graphs(judge, run, backend=backend)
    if got is None:
        return
    eager = run(as_it_is)
    for number, operand in enumerate(operands):
        judge.example(backend=backend, dtype="float32", **facts(operand))
        for part, offset in (("codes", 0), ("scale", 1)):
            at = 2 * number + offset
            judge.bitwise("P09", f"{part} compiled", got[at], eager[at])
