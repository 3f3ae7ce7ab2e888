"""What an element code means, and which code or 16-bit value a number rounds to."""

from __future__ import annotations

import functools
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Mapping

Array = npt.NDArray[Any]
Codes = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

quiet = np.errstate(all="ignore")
"""Decorator: non-finite values are data here and propagate as IEEE 754 says, without warnings."""


# --- Elements: what a code means, and which code a value rounds to -------------------------------


class _Layout(NamedTuple):
    """The fields of an element format; a code is sign, exponent, mantissa from the top bit."""

    mantissa_bits: int
    bias: int
    finite: int  # magnitude codes 0 … finite-1 are the finite values, in ascending order
    infinity: int | None
    nans: tuple[int, ...]  # the first one is what encode() writes


_LAYOUTS: Mapping[str, _Layout] = MappingProxyType(
    {
        # OFP8 1.0, table 1: no infinities, S.1111.111 is NaN.
        "e4m3fn": _Layout(3, 7, 0x7F, None, (0x7F, 0xFF)),
        # OFP8 1.0, table 1: as IEEE 754; 0x7e is its quiet NaN.
        "e5m2": _Layout(2, 15, 0x7C, 0x7C, (0x7E, 0x7D, 0x7F, 0xFD, 0xFE, 0xFF)),
        # Graphcore/AMD (arXiv 2206.02915): one zero, one NaN at the code of -0, bias one larger.
        "e4m3fnuz": _Layout(3, 8, 0x80, None, (0x80,)),
        "e5m2fnuz": _Layout(2, 16, 0x80, None, (0x80,)),
    }
)
FORMATS = (*_LAYOUTS, "e8m0fnu")


def _layout(fmt: str) -> _Layout:
    if fmt not in _LAYOUTS:
        msg = f"fmt is {fmt!r}, need one of {', '.join(_LAYOUTS)}"
        raise ValueError(msg)
    return _LAYOUTS[fmt]


def _magnitudes(layout: _Layout, count: int) -> F64:
    """The values of magnitude codes 0 … count-1, as if each of them was a finite number."""
    code = np.arange(count)
    exponent, mantissa = code >> layout.mantissa_bits, code & ((1 << layout.mantissa_bits) - 1)
    fraction = mantissa + np.where(exponent > 0, 1 << layout.mantissa_bits, 0)
    scale = np.maximum(exponent, 1) - layout.bias - layout.mantissa_bits
    return np.asarray(np.ldexp(fraction.astype(np.float64), scale))


@functools.cache
def _decoded(fmt: str) -> F64:
    if fmt == "e8m0fnu":  # MX 1.0, section 5.4.1: 2^(code - 127), 255 is NaN
        values = np.ldexp(1.0, np.arange(256) - 127)
    else:
        layout = _layout(fmt)
        half = _magnitudes(layout, 128)
        if layout.infinity is not None:
            half[layout.infinity] = np.inf
        values = np.concatenate([half, -half])
    values[list(nan_codes(fmt))] = np.nan
    values.flags.writeable = False
    return values


def decode(codes: Codes, fmt: str) -> F64:
    """The float64 values of uint8 `codes`, any shape."""
    if codes.dtype != np.uint8:
        msg = f"codes has dtype {codes.dtype}, need uint8"
        raise TypeError(msg)
    return np.asarray(_decoded(fmt)[codes])


def nan_codes(fmt: str) -> tuple[int, ...]:
    """Every NaN code of `fmt`; the first one is what `encode` writes."""
    return (255,) if fmt == "e8m0fnu" else _layout(fmt).nans


@functools.cache
def fmax(fmt: str) -> float:
    """The largest finite value of `fmt`."""
    values = _decoded(fmt)
    return float(values[np.isfinite(values)].max())


def _decision_values(fmt: str) -> F64:
    """Ascending midpoints of neighbouring magnitudes; the last one is where overflow begins."""
    layout = _layout(fmt)
    # One more value than there are finite codes: rounding comes before the test for overflow, as
    # if the exponent range had no end (IEEE 754-2019, 7.4).
    values = _magnitudes(layout, layout.finite + 1)
    return (values[:-1] + values[1:]) / 2


def midpoints(fmt: str) -> F32:
    """Float32 values halfway between neighbouring finite codes, the overflow midpoint, both signs.

    For e8m0fnu, whose cast ignores the sign, also ±2^-127: its lowest decision isn't a midpoint.
    """
    if fmt == "e8m0fnu":
        positive = np.concatenate([[2.0**-127], np.ldexp(1.5, np.arange(-127, 128))])
    else:
        positive = _decision_values(fmt)
    return np.concatenate([positive, -positive]).astype(np.float32)


def _encode_e8m0(bits: npt.NDArray[np.uint32]) -> Codes:
    """The exponent of |x| rounded to nearest, as torch casts; measured, not deduced.

    Torch 2.13 (CPU) on all 2^32 float32 values: the sign is ignored; halfway (1.5·2^k) goes up, to
    2^(k+1); 1.5·2^127 and above, infinity and NaN give 255; zero and everything to 2^-127 give
    code 0. Between 2^-127 and 2^-126 torch doesn't round to nearest: every value strictly above
    2^-127 gives 2^-126. ml_dtypes 0.6 agrees on all positive values but zero (which it makes NaN).
    """
    magnitude = bits & np.uint32(0x7FFFFFFF)
    exponent, mantissa = magnitude >> 23, magnitude & np.uint32(0x7FFFFF)
    up = (mantissa >= 0x400000) & (magnitude != 0x400000)
    return np.where(exponent == 255, 255, exponent + up).astype(np.uint8)


@functools.cache
@quiet
def _encoding(fmt: str, overflow: str) -> Codes:
    """A table from the high 16 bits of a float32, and whether any low bit is set, to the code.

    Every decision value has few enough significant bits to be a bfloat16. So the code is the same
    for all float32 values strictly between two bfloat16 neighbours, and entry 2i+1, built for the
    middle of that interval, stands for all of them; entry 2i is the bfloat16 itself.
    """
    bits = np.arange(1 << 17, dtype=np.uint32) << np.uint32(15)
    if fmt == "e8m0fnu":
        return _encode_e8m0(bits)
    layout = _layout(fmt)
    nan, largest = layout.nans[0], layout.finite - 1
    beyond = {"saturate": largest, "nan": nan, "inf": layout.infinity}.get(overflow)
    if beyond is None:
        choices = "saturate, nan" + (", inf" if layout.infinity is not None else "")
        msg = f"overflow is {overflow!r}, need one of {choices} for {fmt}"
        raise ValueError(msg)
    x = bits.view(np.float32).astype(np.float64)
    decisions = _decision_values(fmt)
    low = np.searchsorted(decisions, np.abs(x), side="left")
    tie = np.searchsorted(decisions, np.abs(x), side="right") != low
    # A tie goes to the even mantissa, which is the even code.
    magnitude = low + (tie & (low % 2 == 1))
    code = np.where(magnitude > largest, beyond, magnitude) | np.where(np.signbit(x), 0x80, 0)
    if layout.nans == (0x80,):  # fnuz: -0 doesn't exist, its code is the NaN
        code[magnitude == 0] = 0
    if overflow == "nan":
        code[magnitude > largest] = nan
    code[np.isnan(x)] = nan
    return code.astype(np.uint8)


@quiet
def exact_float32(x: Array, name: str = "x") -> F32:
    """`x` as float32, refusing to round: a second rounding would hide in it."""
    x = np.asarray(x)
    if x.dtype == np.float32:
        return x
    narrow = x.astype(np.float32)
    if x.dtype.itemsize > 4 and not np.array_equal(narrow, x, equal_nan=True):
        msg = f"{name} is {x.dtype} with values that float32 can't hold, need float32"
        raise ValueError(msg)
    return narrow


def encode(x: Array, fmt: str, overflow: str = "saturate") -> Codes:
    """The codes of `x` (float32, any shape), rounded to nearest, ties to even.

    `overflow` says what finite overflow and ±infinity become: "saturate" ±max, "nan" NaN, "inf"
    ±infinity (e5m2 only). NaN of any sign gives `nan_codes(fmt)[0]`. Signed zeros are kept, except
    that fnuz formats have only +0. e8m0fnu has one behaviour, whatever `overflow` is.
    """
    bits = exact_float32(x).view(np.uint32)
    index = (bits >> np.uint32(16) << np.uint32(1)) | ((bits & np.uint32(0xFFFF)) != 0)
    return np.asarray(_encoding(fmt, overflow)[index])


# --- Compute dtypes: rounding once ---------------------------------------------------------------

_PRECISION: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"bfloat16": (8, -126), "float16": (11, -14), "float32": (24, -126)}
)
"""Significant bits, exponent of the smallest normal (the largest exponent is 1 minus it)."""


def _precision(dtype: str) -> tuple[int, int]:
    if dtype not in _PRECISION:
        msg = f"dtype is {dtype!r}, need one of {', '.join(_PRECISION)}"
        raise ValueError(msg)
    return _PRECISION[dtype]


def unit_roundoff(dtype: str) -> float:
    """u: half the distance from 1 to the next value; rounding a normal x errs by at most u·|x|."""
    return 2.0 ** -_precision(dtype)[0]


def smallest_subnormal(dtype: str) -> float:
    """The distance between subnormals; rounding one errs by at most half of it."""
    significant, lowest = _precision(dtype)
    return 2.0 ** (lowest - significant + 1)


@quiet
def round_to(x: Array, dtype: str) -> F64:
    """`x` (float64, any shape) rounded once to `dtype`, ties to even; still float64.

    Directly from float64: by way of float32, 1 + 2^-8 + 2^-40 would become 1 in bfloat16 instead
    of 1 + 2^-7.
    """
    significant, lowest = _precision(dtype)
    x = np.asarray(x, dtype=np.float64)
    if dtype == "float32":
        return x.astype(np.float32).astype(np.float64)
    dropped = 53 - significant
    bits = x.view(np.uint64)
    odd = (bits >> np.uint64(dropped)) & np.uint64(1)
    mask = np.uint64((1 << dropped) - 1)
    out = ((bits + (mask >> np.uint64(1)) + odd) & ~mask).view(np.float64)
    largest = (2.0 - 2.0 ** (1 - significant)) * 2.0 ** (1 - lowest)
    out = np.where(np.abs(out) > largest, np.copysign(np.inf, x), out)
    tiny = np.abs(x) < 2.0**lowest
    if tiny.any():
        step = smallest_subnormal(dtype)
        out = np.where(tiny, np.rint(x / step) * step, out)
    return np.where(np.isfinite(x), out, x)
