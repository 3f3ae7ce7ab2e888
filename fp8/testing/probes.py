"""The inputs on which casts and scales show their faults: decisions, binade edges, layouts, tails.

Nothing here is random: these are the places where a rounding, a range or a loop can go wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from fp8.testing import oracle

if TYPE_CHECKING:
    from torch import Tensor

Floats = NDArray[np.float32]

_STEPS = (-2, -1, 0, 1, 2)


# --- casts --------------------------------------------------------------------------------------

#: What float32 bits below a bfloat16's can do to a decision: nothing, just above it, around a
#: bfloat16's own tie (rounding twice would show), and just below the next one.
_LOW_HALVES = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)


def sixteen_bit(dtype: str) -> Tensor:
    """All 65,536 values of "bfloat16" or "float16", every NaN among them; (65536,)."""
    bits = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16))
    return bits.view(getattr(torch, dtype))


@cache
def decisions(fmt: str) -> Floats:
    """Where a float32 cast decides: one vector of values, each with its neighbours up to 2 ulp.

    Every midpoint, every value of the format, every power of two of float32, the ends of float32,
    infinities and NaNs of both signs. A float32 cast that decides wrongly anywhere decides wrongly
    next to a midpoint or a binade edge of its own or of float32.
    """
    exponents = np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32)
    finite = oracle.decode(np.arange(256, dtype=np.uint8), fmt)
    finite = finite[np.isfinite(finite)].astype(np.float32)
    ends = np.array([0, np.finfo(np.float32).max, 3e38, 1e30, 1e-45, 1e-38], np.float32)
    centres = np.concatenate([np.abs(oracle.midpoints(fmt)), np.abs(finite), exponents, ends])
    near = _neighbours(np.unique(centres), "float32").ravel()
    near = np.unique(near[np.isfinite(near)])
    # Infinity, a signalling NaN, a quiet one and the last: as bits, since arithmetic quietens NaN.
    specials = np.array([0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF], np.uint32)
    positive = np.concatenate([near.view(np.uint32), specials])
    both: Floats = np.concatenate([positive, positive | np.uint32(1 << 31)]).view(np.float32)
    return both


def mixed_decisions(fmt: str, dtype: str) -> Tensor:
    """`decisions` in an order that mixes all kinds; for a 16-bit dtype those that it holds."""
    values = torch.from_numpy(np.random.default_rng(0).permutation(decisions(fmt)))
    narrow = values.to(getattr(torch, dtype))
    return narrow[(narrow == values) | values.isnan()]


@cache
def float32_sample() -> Floats:
    """Every upper half of a float32 with six lower halves: 393,216 values, (393216,)."""
    upper = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    sample: Floats = (upper[:, None] | np.array(_LOW_HALVES, np.uint32)).view(np.float32).ravel()
    return sample


#: how a vector of values may lie, so that each of the cast's loops sees all of it: vectors from an
#: aligned and from a misaligned address, single elements at a stride of two, rows too short for a
#: vector (nothing but tails), and a matrix whose columns are adjacent
LANES = ("contiguous", "misaligned", "strided", "rows of 5", "transposed")


def lay(x: Tensor, lane: str) -> tuple[Tensor, Tensor]:
    """(the values of x (n,) lying as `lane` says, the index into x of each of them).

    Both have one shape: (n,), or two dimensions that hold the first few values again to fill up.
    What lies between the values is NaN.
    """
    columns = {"rows of 5": 5, "transposed": 16}.get(lane)
    if columns is None:
        index = torch.arange(x.numel())
    else:
        index = (torch.arange(-(-x.numel() // columns) * columns) % x.numel()).view(-1, columns)
    if lane == "transposed":
        index = index.t()
    values = x[index.to(x.device)]
    if lane == "misaligned":
        buffer = torch.cat([values[:1], values])
        values = buffer[1:]
    elif lane == "strided":
        values = torch.stack([values, torch.full_like(values, float("nan"))], dim=1)[:, 0]
    elif lane == "rows of 5":
        values = torch.nn.functional.pad(values, (0, 3), value=float("nan"))[:, :5]
    elif lane == "transposed":
        values = values.t().contiguous().t()
    elif lane != "contiguous":
        raise ValueError(f"lane: got {lane!r}, needs one of {', '.join(LANES)}")
    return values, index


# --- scales -------------------------------------------------------------------------------------

_KINDS: dict[str, tuple[Any, type[np.unsignedinteger[Any]]]] = {
    "float32": (np.float32, np.uint32),
    "bfloat16": (ml_dtypes.bfloat16, np.uint16),
    "float16": (np.float16, np.uint16),
}
_LARGEST = {
    "float32": (2 - 2.0**-23) * 2.0**127,
    "bfloat16": (2 - 2.0**-7) * 2.0**127,
    "float16": (2 - 2.0**-10) * 2.0**15,
}


@dataclass(frozen=True)
class AmaxProbes:
    """Magnitudes at and around one kind of edge: `amax` (n,) float32, exact in the dtype."""

    edge: str
    amax: Floats


@cache
def amax_probes(fmt: str, dtype: str) -> tuple[AmaxProbes, ...]:
    """Amaxes at which a scale rule decides, by edge; every one is a value of `dtype`.

    At a power of two the amax's own binade begins. At the format's maximum times a power of two the
    quotient is a power of two, so just above it lie the quotients just below one, where
    exp2(floor(log2(quotient))) rounds up. The floors are torchao's 1e-12 and DeepGEMM's 1e-4. The
    ends are zero, the smallest and the largest values, infinity and NaN.
    """
    powers = np.ldexp(1.0, np.arange(-149, 128))
    edges = {
        "power of two": powers,
        "maximum times a power of two": powers * (oracle.fmax(fmt) / _binade(oracle.fmax(fmt))),
        "floor": np.array([1e-12, 1e-4]),
    }
    found = []
    for edge, centres in edges.items():
        representable = centres[oracle.round_to(centres, dtype) == centres]
        inside = np.unique(oracle.round_to(centres, dtype) if edge == "floor" else representable)
        near = _neighbours(inside[(inside > 0) & np.isfinite(inside)].astype(np.float32), dtype)
        for step, values in zip(_STEPS, near.T, strict=True):
            kept = values[np.isfinite(values) & (values > 0)]
            if kept.size:
                found.append(AmaxProbes(f"{edge}, {step:+d} ulp", kept))
    largest = _LARGEST[dtype]
    finite = np.array([0.0, oracle.smallest_subnormal(dtype), largest, 3.0 * largest / 4])
    found.append(AmaxProbes("end", oracle.round_to(finite, dtype).astype(np.float32)))
    found.append(AmaxProbes("not finite", np.array([np.inf, np.nan], np.float32)))
    return tuple(found)


def _binade(x: float) -> float:
    return float(2.0 ** np.floor(np.log2(x)))


def _neighbours(x: Floats, dtype: str) -> Floats:
    """(n, 5): the values of `dtype` from 2 ulp below to 2 ulp above each x >= 0, NaN below zero."""
    kind, unsigned = _KINDS[dtype]
    bits = x.astype(kind).view(unsigned).astype(np.int64)[:, None] + np.array(_STEPS)
    values = np.where(bits < 0, 0, bits).astype(unsigned).view(kind).astype(np.float32)
    near: Floats = np.where(bits < 0, np.float32(np.nan), values)
    return near


def matrix_of_amaxes(
    amaxes: Floats, block: tuple[int | None, int | None], dtype: str, seed: int
) -> NDArray[np.float64]:
    """A matrix whose groups have these amaxes, in row-major order of the groups; exact in `dtype`.

    Each group holds its amax once, at a drawn place and with a drawn sign; every other value is at
    most half of it. `block` is the granularity's; (None, None) has one group and takes one amax.
    128x128 blocks get 3 rows: their edge is ragged.
    """
    rng = np.random.default_rng(seed)
    downwards = block[0] is not None and block[1] in (None, 1)
    rows = 3 if block[0] is None or (block[0] > 1 and not downwards) else block[0]
    columns = 3 if block[1] is None else block[1]
    number = np.arange(len(amaxes))
    grid = (len(amaxes), 1) if downwards else (1, len(amaxes))
    tops, lefts = (number * rows, 0) if downwards else (0, number * columns)
    spread = np.repeat(np.repeat(amaxes.reshape(grid), rows, axis=0), columns, axis=1)
    spread = np.where(np.isfinite(spread), spread, 1.0)
    x = spread * rng.choice([0.0, 0.5, -0.5, 0.25, -0.125, 2.0**-9], spread.shape)
    places = (
        tops + rng.integers(rows, size=number.size),
        lefts + rng.integers(columns, size=number.size),
    )
    x[places] = amaxes * rng.choice([-1.0, 1.0], number.size)
    return oracle.round_to(x, dtype)
