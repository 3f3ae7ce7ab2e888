"""Comparing what a target gave with what it should have given: pure functions over arrays.

Three comparisons, one a tier of the numerics: as bits, within a bound, and by the
signal-to-quantisation-noise ratio (SQNR) paired with the oracle's. Each returns a
`Comparison`: how many values it compared and, when some were wrong, the lines that say which.
Nothing is formatted while all is well: the suite makes tens of thousands of comparisons.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

#: Element types that numpy lacks, by the name that torch and ml_dtypes share.
EXTENSION_DTYPES = (
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
_FLOATS = ("float16", "float32", "float64")
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
#: An ndarray of these carries values: it is compared with any float dtype that can hold them.
_CARRIERS = ("float32", "float64")

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one comparison found.

    Attributes:
        compared: How many values were compared.
        wrong: How many of them were wrong.
        lines: When some were: the first wrong element, how many, and how far off.
    """

    compared: int
    wrong: int = 0
    lines: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was wrong."""
        return self.wrong == 0


@dataclass(frozen=True, slots=True)
class Elements:
    """The elements of a tensor or an array, as bits.

    Attributes:
        bits: Unsigned integers of the elements' width, in the tensor's shape.
        dtype: The element type, as numpy, ml_dtypes and torch name it.
        carrier: Whether this is an ndarray of float32 or float64, which carries values that
            may belong to a narrower type.
    """

    bits: Array
    dtype: str
    carrier: bool = False

    def values(self) -> Array:
        """The elements as float64, exactly (64-bit integers beyond 2^53 excepted)."""
        if self.dtype in EXTENSION_DTYPES:
            if self.bits.dtype == np.uint8:
                decoded: Array = _decoded(self.dtype)[self.bits]
                return decoded
            # bfloat16 is the upper half of float32
            return (self.bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return self.bits.view(np.dtype(self.dtype)).astype(np.float64)

    def nan(self) -> Array:
        """Where the elements are NaN, whatever the payload."""
        if self.dtype in EXTENSION_DTYPES or self.dtype in _FLOATS:
            return np.isnan(self.values())
        return np.zeros(self.bits.shape, dtype=bool)


@cache
def _decoded(dtype: str) -> Array:
    """The 256 values of an 8-bit format, as float64."""
    codes = np.arange(256, dtype=np.uint8)
    values: Array = codes.view(getattr(ml_dtypes, dtype)).astype(np.float64)
    return values


def elements(data: object, fmt: str | None = None) -> Elements:
    """Read a torch tensor, an ndarray or a number.

    Args:
        data: A tensor on any device, with any strides; or what numpy makes an array of.
        fmt: When `data` has uint8 elements: the 8-bit format whose codes they are
            (``"e4m3fn"`` or ``"float8_e4m3fn"``).

    Raises:
        TypeError: `data` is of a type without a bit representation here (complex, object).
    """
    torch = sys.modules.get("torch")  # a tensor can only come from a torch that is loaded
    tensor = torch is not None and isinstance(data, torch.Tensor)
    bits, dtype = _from_torch(data, torch) if tensor else _from_numpy(data)
    if fmt is not None and dtype == "uint8":
        dtype = fmt if fmt.startswith("float8_") else f"float8_{fmt}"
        if dtype not in EXTENSION_DTYPES:
            msg = f"fmt must name an 8-bit format, got {fmt!r}; known: {EXTENSION_DTYPES[1:]}"
            raise ValueError(msg)
    return Elements(bits, dtype, carrier=not tensor and dtype in _CARRIERS)


def _from_torch(data: Any, torch: Any) -> tuple[Array, str]:
    dtype = str(data.dtype).removeprefix("torch.")
    tensor = data.detach().cpu()
    if dtype in EXTENSION_DTYPES:  # numpy knows none of them; a view of equal width is free
        tensor = tensor.view(torch.uint8 if tensor.itemsize == 1 else torch.int16)
    array = tensor.numpy()
    return array.view(_UNSIGNED[array.itemsize]), dtype


def _from_numpy(data: object) -> tuple[Array, str]:
    array = np.asarray(data)
    dtype = array.dtype.name
    if array.itemsize not in _UNSIGNED or (
        array.dtype.kind not in "biuf" and dtype not in EXTENSION_DTYPES
    ):
        msg = f"can't compare elements of type {array.dtype} ({type(data).__name__})"
        raise TypeError(msg)
    return array.view(_UNSIGNED[array.itemsize]), dtype


def bitwise(got: object, expected: object, fmt: str | None = None) -> Comparison:
    """Compare as bits; a NaN equals every NaN of its format; None equals None.

    Args:
        got: A tensor, an array, None, or a list of these.
        expected: As `got`. An ndarray of float32 or float64 holds values: it is compared
            with a narrower float `got` after both are widened to float64, which is exact and
            keeps signed zeros apart. Any other difference of dtype is an error found.
        fmt: The format of uint8 codes on either side.
    """
    if isinstance(got, list | tuple) and isinstance(expected, list | tuple):
        return _bitwise_list(got, expected, fmt)
    if got is None or expected is None:
        if got is expected:
            return Comparison(1)
        return Comparison(1, 1, (f"expected {_kind(expected)}, got {_kind(got)}",))
    return _same_bits(elements(got, fmt), elements(expected, fmt))


def _same_bits(ours: Elements, theirs: Elements) -> Comparison:
    if ours.bits.shape != theirs.bits.shape:
        return _of_different_shape(ours, theirs)
    first, second = ours, theirs
    if ours.dtype != theirs.dtype:
        if not (_is_float(ours) and _is_float(theirs) and (ours.carrier or theirs.carrier)):
            size = max(1, ours.bits.size)
            return Comparison(size, size, (f"dtype: expected {theirs.dtype}, got {ours.dtype}",))
        first, second = (Elements(e.values().view(np.uint64), "float64") for e in (ours, theirs))
    if np.array_equal(first.bits, second.bits):
        return Comparison(ours.bits.size)
    wrong = (first.bits != second.bits) & ~(first.nan() & second.nan())
    return _elementwise(wrong, ours, theirs)


def _bitwise_list(
    got: list[Any] | tuple[Any, ...], expected: list[Any] | tuple[Any, ...], fmt: str | None
) -> Comparison:
    if len(got) != len(expected):
        line = f"expected {len(expected)} tensors, got {len(got)}"
        return Comparison(1, 1, (line,))
    parts = [bitwise(g, e, fmt) for g, e in zip(got, expected, strict=True)]
    compared = sum(part.compared for part in parts)
    for number, part in enumerate(parts):
        if not part.ok:
            where = f"in tensor {number} of {len(parts)}, the first that is wrong"
            return Comparison(compared, sum(p.wrong for p in parts), (where, *part.lines))
    return Comparison(compared)


def within(got: object, expected: object, bound: object) -> Comparison:
    """Compare in float64: |got − expected| ≤ bound, elementwise.

    Where `expected` isn't finite, `got` must be the same NaN or infinity.

    Args:
        got: A tensor or an array of shape S.
        expected: As `got`, of shape S.
        bound: Absolute, of a shape that broadcasts to S; finite and ≥ 0 wherever `expected`
            is finite.

    Raises:
        ValueError: A bound that every value would meet, or none.
    """
    ours, theirs, limit = elements(got), elements(expected), elements(bound).values()
    if ours.bits.shape != theirs.bits.shape:
        return _of_different_shape(ours, theirs)
    value, truth = ours.values(), theirs.values()
    limit = np.broadcast_to(limit, truth.shape)
    with np.errstate(invalid="ignore"):  # inf − inf: such elements are settled below
        error = np.abs(value - truth)
    met = error <= limit
    if met.all() and np.isfinite(limit).all():
        return Comparison(truth.size)
    finite = np.isfinite(truth)
    if (finite & ~(np.isfinite(limit) & (limit >= 0))).any():
        msg = "bound must be finite and >= 0 wherever expected is finite: anything else can't fail"
        raise ValueError(msg)
    wrong: Array = np.where(finite, ~(np.isfinite(value) & met), ~_same_special(value, truth))
    if not wrong.any():
        return Comparison(truth.size)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio: Array = np.where(wrong & finite & np.isfinite(value), error / limit, -np.inf)
    lines: tuple[str, ...] = ()
    if ratio.max() > 0:
        at = np.unravel_index(int(ratio.argmax()), ratio.shape)
        times = f"{ratio[at]:.6g} times its bound {limit[at]:.6g}"
        lines = (f"worst error: {error[at]:.6g}, {times}, at {_index(at)}",)
    return _elementwise(wrong, ours, theirs, lines)


@dataclass(frozen=True, slots=True)
class QualityLimits:
    """How far SQNR(target) − SQNR(oracle) may be from zero, either way, in dB.

    accumulation: noise that the target's accumulator may add to a row, as an amplitude relative to
    the row's norm; the limits widen by what that is beside the oracle's own noise.
    aligned: whether that noise may point the same way in every row, as where the same large product
    dominates them: overall its amplitude then adds to the oracle's noise, else its power does.
    """

    overall: float
    row: float
    accumulation: float = 0.0
    aligned: bool = False


#: Noise to signal below which two results are equally good, 100 dB: a float32 sum of K = 170 terms
#: may itself be off by (K + 4) * 2^-24, and the oracle's float64 is not. Float8 has 20 to 30 dB.
NOISE_FLOOR = 1e-10


def quality(got: object, oracle: object, exact: object, limits: QualityLimits) -> Comparison:
    """Compare the SQNR of `got` against `exact` with the oracle's, overall and per row.

    SQNR = 10·log10(Σ exact² / Σ (x − exact)²). Two of them over the same `exact` differ by
    10·log10 of the ratio of their noises, so no signal, however small, gets in the way. Rows
    (the last axis) whose `exact` is all zero have no SQNR: they must equal the oracle's.
    Elements that aren't finite for the oracle must be the same NaN or infinity; they are left
    out of the sums.

    Args:
        got: A tensor or an array of shape (..., N).
        oracle: As `got`: the oracle's result under the same recipe and output dtype.
        exact: float64, the same shape: the result without any quantisation.
        limits: Two-sided limits in dB.
    """
    ours, theirs, unquantised = elements(got), elements(oracle), elements(exact)
    for other in (theirs, unquantised):
        if ours.bits.shape != other.bits.shape:
            return _of_different_shape(ours, other)
    value, truth, signal = (_rows(e.values()) for e in (ours, theirs, unquantised))
    if np.array_equal(value, truth):
        return Comparison(value.size)
    special = ~(np.isfinite(value) & np.isfinite(truth))
    differs = special & ~_same_special(value, truth)
    if differs.any():
        return _elementwise(differs.reshape(ours.bits.shape), ours, theirs)
    left_out = special | ~np.isfinite(signal)
    value, truth, signal = (np.where(left_out, 0.0, a) for a in (value, truth, signal))
    zero: Array = np.all(signal == 0, axis=1)
    unequal = zero[:, None] & (value != truth)
    if unequal.any():
        return _elementwise(unequal.reshape(ours.bits.shape), ours, theirs)
    power = (signal**2).sum(axis=1)
    noise = np.maximum(((value - signal) ** 2).sum(axis=1), power * NOISE_FLOOR)
    noise_of_oracle = np.maximum(((truth - signal) ** 2).sum(axis=1), power * NOISE_FLOOR)
    delta = _decibels(noise_of_oracle, noise)
    delta_overall = float(_decibels(noise_of_oracle.sum(), noise.sum()))
    with np.errstate(divide="ignore", invalid="ignore"):
        # Noise of relative amplitude a, all one way, added to noise of amplitude sqrt(n).
        added = 20 * np.log10(1 + limits.accumulation / np.sqrt(noise_of_oracle / power))
    row_limit = limits.row + np.where(zero, 0.0, added)
    bad = ~zero & ~(np.abs(delta) <= row_limit)
    ratio = noise_of_oracle.sum() / power.sum() if power.any() else 1.0
    relative = limits.accumulation / np.sqrt(max(ratio, NOISE_FLOOR))
    # Over rows that it leaves every way the powers add, over rows it leaves one way the amplitudes.
    overall_limit = limits.overall + (
        20 * np.log10(1 + relative) if limits.aligned else 10 * np.log10(1 + relative**2)
    )
    lines = []
    if not abs(delta_overall) <= overall_limit:
        lines.append(
            f"SQNR overall: oracle {_decibels(power.sum(), noise_of_oracle.sum()):.4f} dB, got "
            f"{_decibels(power.sum(), noise.sum()):.4f} dB: {delta_overall:+.4f} dB, "
            f"limit ±{overall_limit:.3g} dB"
        )
    if bad.any():
        first, worst = int(bad.argmax()), int(np.abs(delta * ~zero).argmax())
        lines += [
            f"{name} row: [{row}] oracle {_decibels(power[row], noise_of_oracle[row]):.4f} dB, got "
            f"{_decibels(power[row], noise[row]):.4f} dB: {delta[row]:+.4f} dB, "
            f"limit ±{row_limit[row]:.3g} dB"
            for name, row in (("first wrong", first), ("worst", worst))
        ]
        lines.append(f"wrong: {np.count_nonzero(bad)} of {bad.size} rows")
    return Comparison(value.size, max(len(lines) > 0, int(np.count_nonzero(bad))), tuple(lines))


def sqnr(got: object, exact: object) -> float:
    """10·log10(Σ exact² / Σ (got − exact)²) in dB; inf where nothing is wrong."""
    value, truth = elements(got).values(), elements(exact).values()
    noise = ((value - truth) ** 2).sum()
    return float(_decibels((truth**2).sum(), noise)) if noise else float("inf")


def _decibels(signal: Any, noise: Any) -> Any:
    """10·log10(signal / noise); equal (also zero over zero) is 0 dB."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.equal(signal, noise), 0.0, 10 * np.log10(signal / noise))


def _rows(values: Array) -> Array:
    return values.reshape(-1, values.shape[-1]) if values.ndim else values.reshape(1, 1)


def _same_special(value: Array, truth: Array) -> Array:
    """Where both are NaN, or both the same infinity (or the same number)."""
    same: Array = (np.isnan(value) & np.isnan(truth)) | (value == truth)
    return same


def _is_float(data: Elements) -> bool:
    return data.dtype in EXTENSION_DTYPES or data.dtype in _FLOATS


def _of_different_shape(got: Elements, expected: Elements) -> Comparison:
    size = max(1, got.bits.size)
    line = f"shape: expected {expected.bits.shape}, got {got.bits.shape}"
    return Comparison(size, size, (line,))


def _elementwise(
    wrong: Array, got: Elements, expected: Elements, more: tuple[str, ...] = ()
) -> Comparison:
    """Describe the elements where `wrong`; none of them is a pass."""
    count = int(np.count_nonzero(wrong))
    if count == 0:
        return Comparison(wrong.size)
    at = np.unravel_index(int(wrong.argmax()), wrong.shape)
    wanted, found = _element(expected, at), _element(got, at)
    first = f"first wrong element: {_index(at)} expected {wanted}, got {found}"
    count_line = f"wrong: {count} of {wrong.size} elements"
    return Comparison(wrong.size, count, (first, count_line, *more))


def _index(at: tuple[Any, ...]) -> str:
    return "[" + ", ".join(str(int(i)) for i in at) + "]"


def _element(data: Elements, at: tuple[Any, ...]) -> str:
    value = data.values()[at] if _is_float(data) else data.bits.view(np.dtype(data.dtype))[at]
    digits = 2 * data.bits.itemsize
    if _is_float(data) and not data.carrier:
        return f"{value!s} (code 0x{int(data.bits[at]):0{digits}x}, {data.dtype})"
    return str(value)


def _kind(data: object) -> str:
    return "None" if data is None else f"a {type(data).__name__}"
