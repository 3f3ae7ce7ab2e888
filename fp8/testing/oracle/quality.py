"""The signal-to-quantisation-noise ratio, measured and predicted, in dB."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from .formats import F64, Array, quiet

if TYPE_CHECKING:
    from collections.abc import Mapping

ELEMENT_SQNR: Mapping[str, float] = MappingProxyType(
    {"e4m3fn": 31.5, "e4m3fnuz": 31.5, "e5m2": 25.5, "e5m2fnuz": 25.5}
)
"""One Gaussian operand: E[x²] / E[step²/12], averaged over where the amax falls in its binade.

Each mantissa bit is worth 6.02 dB, so bfloat16 has 55.6.
"""


@quiet
def _ratio(signal: Array, noise: Array) -> F64:
    db = 10 * np.log10(signal / noise)
    return np.where(noise == 0, np.inf, db)


def _squares(got: Array, exact: Array) -> tuple[F64, F64]:
    got, exact = np.asarray(got, dtype=np.float64), np.asarray(exact, dtype=np.float64)
    if got.shape != exact.shape:
        msg = f"got has shape {got.shape} and exact {exact.shape}, need equal shapes"
        raise ValueError(msg)
    with np.errstate(all="ignore"):
        return exact**2, (got - exact) ** 2


@quiet
def sqnr(got: Array, exact: Array) -> float:
    """Signal over noise of the whole, dB: infinite without error, NaN if anything isn't finite."""
    signal, noise = _squares(got, exact)
    return float(_ratio(signal.sum(), noise.sum()))


@quiet
def row_sqnr(got: Array, exact: Array) -> F64:
    """`sqnr` of each row of (R, C) arrays; -inf where a row of zeros came out as something else."""
    signal, noise = _squares(got, exact)
    return _ratio(signal.sum(axis=-1), noise.sum(axis=-1))


def predicted_sqnr(fmt_a: str | None, fmt_b: str | None) -> float:
    """The SQNR of a product of two Gaussian operands, dB; None is a high-precision operand.

    The relative noise powers of the operands add. It holds for large contractions: with one scale
    for few elements the amax itself, which is exact, lifts it (30.0 for rowwise e4m3 at K = 16).
    """
    noise = 0.0
    for fmt in (fmt_a, fmt_b):
        if fmt is not None:
            if fmt not in ELEMENT_SQNR:
                msg = f"format is {fmt!r}, need one of {', '.join(ELEMENT_SQNR)}"
                raise ValueError(msg)
            noise += 10 ** (-ELEMENT_SQNR[fmt] / 10)
    return float(-10 * np.log10(noise)) if noise else float("inf")
