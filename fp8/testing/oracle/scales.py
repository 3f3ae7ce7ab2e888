"""How an amax becomes a scale, and a matrix becomes codes and scales."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .formats import F32, F64, Array, Codes, decode, encode, exact_float32, fmax, quiet

Block = tuple[int | None, int | None]
"""(rows, columns) that share one scale; None is the whole extent."""


def need_matrix(x: Array, name: str) -> None:
    """ValueError unless `x` has two dimensions."""
    if x.ndim != 2:
        msg = f"{name} has shape {x.shape}, need a matrix"
        raise ValueError(msg)


def _group_starts(extent: int, size: int) -> npt.NDArray[np.intp]:
    if size < 1:
        msg = f"block has size {size}, need a positive number or None"
        raise ValueError(msg)
    return np.arange(0, extent, size)


def group_amax(x: Array, block: Block) -> F32:
    """max|x| of each group of `x` (R, C), float32 (ceil(R/rows), ceil(C/columns)); NaN wins.

    Groups at the edges may be smaller. None makes one group, also of nothing: its amax is 0.
    """
    need_matrix(x, "x")
    amax = np.abs(exact_float32(x))
    for axis in (1, 0):  # along the contiguous axis first: less is left for the other
        size, extent = block[axis], amax.shape[axis]
        if size is None:
            amax = amax.max(axis=axis, keepdims=True, initial=0)
        elif size != 1 and extent:
            amax = np.maximum.reduceat(amax, _group_starts(extent, size), axis=axis)
    return amax


def _clear_mantissa(x: F32) -> F32:
    """A positive float32 rounded down to a power of two; zero, infinity and NaN stay."""
    floor = (x.view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
    return np.where(np.isnan(x), x, floor)


def _one_over(x: F32) -> F32:
    return np.divide(np.float32(1), x, dtype=np.float32)


@quiet
def multiplier_and_scale(amax: F32, fmt: str, rule: str, pow2: bool) -> tuple[F32, F32]:
    """(multiplier into the range of `fmt`, dequantising scale), both float32, from float32 `amax`.

    torchao (float8_utils.amax_to_scale): max / max(amax, 1e-12) in float64, then float32.
    transformer_engine (recipe_common.cuh, compute_scale_from_amax): max / amax in float32, FLT_MAX
    where that overflows, 1 where amax is 0, infinite or NaN.
    Both then clear the mantissa if `pow2`, and the scale is the float32 reciprocal.
    deepgemm (utils/math.py): scale = max(amax, 1e-4) / max in float32, multiplier its reciprocal.
    """
    amax = np.asarray(amax)
    if amax.dtype != np.float32:
        msg = f"amax has dtype {amax.dtype}, need float32"
        raise TypeError(msg)
    largest = np.float32(fmax(fmt))
    if rule == "deepgemm":
        if pow2:
            msg = "pow2 is True, need False: deepgemm rounds another number, upwards"
            raise ValueError(msg)
        floored = np.maximum(amax, np.float32(1e-4))
        scale: F32 = np.divide(floored, largest, dtype=np.float32)
        return _one_over(scale), scale
    if rule == "torchao":
        multiplier = (fmax(fmt) / np.maximum(amax.astype(np.float64), 1e-12)).astype(np.float32)
    elif rule == "transformer_engine":
        multiplier = np.minimum(largest / amax, np.finfo(np.float32).max)
        multiplier = np.where((amax == 0) | ~np.isfinite(amax), np.float32(1), multiplier)
    else:
        msg = f"rule is {rule!r}, need one of torchao, transformer_engine, deepgemm"
        raise ValueError(msg)
    if pow2:
        multiplier = _clear_mantissa(multiplier)
    return multiplier, _one_over(multiplier)


def expand(scale: Array, block: Block, shape: tuple[int, ...]) -> Array:
    """`scale`, one value a group, spread over the elements of `shape` (R, C); a read-only view."""
    groups = tuple(
        1 if size is None else len(_group_starts(extent, size))
        for extent, size in zip(shape, block, strict=True)
    )
    if scale.shape != groups:
        msg = f"scale has shape {scale.shape}, need {groups} for {shape} in {block}"
        raise ValueError(msg)
    for axis, size in enumerate(block):
        if size is not None and size > 1:
            spread = np.repeat(scale, size, axis=axis)
            scale = spread[: shape[0]] if axis == 0 else spread[:, : shape[1]]
    return np.broadcast_to(scale, shape)


@quiet
def quantize(x: Array, fmt: str, block: Block, rule: str, pow2: bool) -> tuple[Codes, F32]:
    """(codes, scale) of `x` (R, C): one float32 product with the multiplier, then one rounding.

    Values beyond the range saturate. `x` ≈ `dequantize(codes, scale, fmt, block)`.
    """
    x = exact_float32(x)
    multiplier, scale = multiplier_and_scale(group_amax(x, block), fmt, rule, pow2)
    return encode(x * expand(multiplier, block, x.shape), fmt), scale


@quiet
def dequantize(codes: Codes, scale: F32, fmt: str, block: Block) -> F64:
    """Code value times scale in float64, exactly: (3 or 4) + 24 bits fit."""
    return decode(codes, fmt) * expand(scale, block, codes.shape).astype(np.float64)
