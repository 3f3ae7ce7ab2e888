"""Values that lie more than 2^31 elements into their storage are read where they are.

A strided view of an empty tensor has such offsets and touches almost no memory: rows, or columns,
so far apart that the last one begins 2^31 elements after the first.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from fp8.formats import FORMATS
from fp8.testing import oracle
from fp8.testing.linear_runs import make_layer, run_layer
from fp8.testing.strategies import as_tensor, exact_arrays, to_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OFFSET = 2**31
#: A copy of the storage would be 4 GiB or more. What the tests make is a few MiB, and a first call
#: loads libraries.
GROWTH = 300 * 2**20

ways = pytest.mark.parametrize("way", ["rows", "columns"])


@pytest.fixture
def far(target, judge) -> Callable[[np.ndarray, str, str], torch.Tensor]:
    """Makes a tensor of these values whose last row, or column, begins at offset 2^31."""

    def make(x: np.ndarray, dtype: str, way: str) -> torch.Tensor:
        values = as_tensor(x, dtype, target.device)
        apart, adjacent = values.shape if way == "rows" else values.shape[::-1]
        stride = -(-OFFSET // (apart - 1))
        size = (apart - 1) * stride + adjacent
        if target.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(target.device)
            needed = 2 * size * values.itemsize
            judge.require(free > needed, "2^31 elements: not enough free memory on the GPU")
        try:
            # On a CPU these are addresses: memory comes when they are written to.
            storage = torch.empty(size, dtype=values.dtype, device=target.device)
        except RuntimeError:
            judge.require(False, "2^31 elements: the system does not grant that many addresses")
        strides = (stride, 1) if way == "rows" else (1, stride)
        return storage.as_strided(values.shape, strides).copy_(values)

    return make


@contextmanager
def little_memory(judge, target) -> Iterator[None]:
    """What runs inside makes no copy of the storage: on a CPU, where the storage is addresses."""
    if target.device.type == "cuda":  # there it is memory itself
        yield
        return
    before = peak_memory()
    yield
    grown = peak_memory() - before
    message = f"took {grown / 2**20:.0f} MiB, needs less than {GROWTH / 2**20:.0f}"
    judge.true("P24", "memory", grown < GROWTH, message)


def peak_memory() -> int:
    """The most bytes of memory that this process has held so far."""
    resource = pytest.importorskip("resource", reason="2^31 elements: no peak memory to ask for")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes elsewhere


@pytest.mark.thorough
@pytest.mark.law("P24")
@ways
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_cast_and_quantize(target, judge, far, fp8_seed, way, dtype):
    """Codes and scales are those of the same values side by side."""
    capabilities = target.capabilities()
    formats, operands = sorted(capabilities.formats), sorted(capabilities.operands, key=str)
    judge.require(bool(formats or operands), "cast, quantize: none")
    # Each row of another magnitude: the last one would be missed.
    rows = np.random.default_rng(fp8_seed).standard_normal((3, 4096)) * [[1], [4], [16]]
    x = to_dtype(rows if way == "rows" else rows.T, dtype)
    with little_memory(judge, target):
        apart, together = far(x, dtype, way), as_tensor(x, dtype, target.device)
        for name in formats:
            judge.example(way=way, dtype=dtype, format=name)
            got, want = (target.cast(t, FORMATS[name]) for t in (apart, together))
            judge.bitwise("P24", "cast", got, want)
        for operand in operands:
            judge.example(way=way, dtype=dtype, operand=str(operand))
            q, wanted = (target.quantize(t, operand) for t in (apart, together))
            judge.bitwise(
                "P24", "codes and scale", [q.codes, q.scale], [wanted.codes, wanted.scale]
            )


@pytest.mark.thorough
@pytest.mark.law("P24")
@ways
@pytest.mark.parametrize("recipe", oracle.RECIPES)
def test_layer(target, judge, far, fp8_seed, recipe, way):
    """Output and gradients of an input and a grad_output whose rows, or columns, are far apart.

    In exact arithmetic: for a product in high precision other strides may mean another kernel, and
    with it another order of the sum.
    """
    judge.require(recipe in target.capabilities().recipes, f"convert: no recipe {recipe}")
    M, K, N = {"rows": (32, 80, 48), "columns": (48, 32, 32)}[way]
    judge.example(recipe=recipe, way=way, dtype="bfloat16", M=M, K=K, N=N)
    operands = exact_arrays(M, K, N, recipe, "bfloat16", False, fp8_seed)
    layer = make_layer(target, recipe, operands.w, None, "bfloat16")
    x, g = (as_tensor(values, "bfloat16", target.device) for values in (operands.x, operands.g))
    want = run_layer(layer, x, g)
    with little_memory(judge, target):
        far_x, far_g = (far(values, "bfloat16", way) for values in (operands.x, operands.g))
        for check, inputs in (
            ("input far apart", (far_x, g)),
            ("grad_output far apart", (x, far_g)),
            ("both far apart", (far_x, far_g)),
        ):
            ran, run = judge.attempt("P24", check, lambda inputs=inputs: run_layer(layer, *inputs))
            if ran:
                # A zero sum may have either sign.
                got, wanted = ([r.y + 0, r.dx + 0, r.dw + 0] for r in (run, want))
                judge.bitwise("P24", check, got, wanted)
