"""Faults of quantising a matrix: order of operations, strides, tails, memory of earlier calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fp8 import quantize as library
from fp8 import scaling
from fp8.formats import E4M3FN
from fp8.quantize import Operand, Quantized
from fp8.scaling import ROWWISE, TENSORWISE
from fp8.testing.faults.base import BOTH, fault

Quantize = Callable[[Tensor, Operand], Quantized]
QUANTIZE = "fp8.quantize.quantize"


def _factors(x: Tensor, operand: Operand) -> tuple[Tensor, Tensor]:
    amax = scaling.amax(x, operand.granularity)
    return scaling.multiplier_and_scale(amax, operand.format, operand.rule)


def _expanded(factor: Tensor, x: Tensor, operand: Operand) -> Tensor:
    return scaling.expand(factor, operand.granularity, x.shape[0], x.shape[1])


@fault("F05", law="P11", naive=True, step=QUANTIZE)
def clamped_before_scaling(quantize: Quantize) -> Quantize:
    """Values are clamped to the format's range before they are scaled."""

    def wrong(x: Tensor, operand: Operand) -> Quantized:
        return quantize(x.clamp(-operand.format.max, operand.format.max), operand)

    return wrong


@fault("F03", law="P05", naive=False, step=QUANTIZE)
def scales_of_other_rows(quantize: Quantize) -> Quantize:
    """Rowwise scales are one row off."""

    def wrong(x: Tensor, operand: Operand) -> Quantized:
        codes, scale, how = quantize(x, operand)
        return Quantized(codes, scale.roll(1, 0) if how.granularity == ROWWISE else scale, how)

    return wrong


@fault("F109", law="P11", naive=True, step=QUANTIZE)
def scaled_in_bfloat16(quantize: Quantize) -> Quantize:
    """bfloat16 values are scaled in bfloat16, which rounds once more."""

    def wrong(x: Tensor, operand: Operand) -> Quantized:
        whole = quantize(x, operand)
        if x.dtype != torch.bfloat16:
            return whole
        multiplier, scale = _factors(x, operand)
        scaled = x * _expanded(multiplier, x, operand).to(x.dtype)
        return Quantized(library.cast(scaled, operand.format).contiguous(), scale, operand)

    return wrong


@fault("F110", law="P11", naive=True, step=QUANTIZE)
def multiplier_of_the_inputs_dtype(quantize: Quantize) -> Quantize:
    """For bfloat16 values the multiplier is rounded to bfloat16."""

    def wrong(x: Tensor, operand: Operand) -> Quantized:
        whole = quantize(x, operand)
        if x.dtype != torch.bfloat16:
            return whole
        multiplier = _factors(x, operand)[0].to(x.dtype).to(torch.float32)
        codes = library.cast(x.float() * _expanded(multiplier, x, operand), operand.format)
        return Quantized(codes.contiguous(), multiplier.reciprocal(), operand)

    return wrong


@fault("F111", law="P11", naive=True, step=QUANTIZE)
def divided_by_scale(quantize: Quantize) -> Quantize:
    """Values are divided by the scale, not multiplied by the multiplier."""

    def wrong(x: Tensor, operand: Operand) -> Quantized:
        _, scale, how = quantize(x, operand)
        codes = library.cast(x.float() / _expanded(scale, x, operand), operand.format)
        return Quantized(codes.contiguous(), scale, how)

    return wrong


@fault("F54", law="P18", naive=False, step=QUANTIZE)
def leading_stride_ignored(quantize: Quantize) -> Quantize:
    """A matrix is read as if its rows lay one after another."""

    def wrong(x: Tensor, operand: Operand) -> Quantized:
        if x.dim() == 2 and x.numel() and min(x.stride()) > 0:
            x = torch.as_strided(x, x.shape, (x.shape[1], 1))
        return quantize(x, operand)

    return wrong


@fault("F112", law="P18", naive=True, step=QUANTIZE)
def offset_ignored(quantize: Quantize) -> Quantize:
    """A matrix is read from the beginning of its storage."""

    def wrong(x: Tensor, operand: Operand) -> Quantized:
        if x.dim() == 2 and x.storage_offset() == 1:
            x = torch.as_strided(x, x.shape, x.stride(), 0)
        return quantize(x, operand)

    return wrong


@fault("F58", law="P24", naive=True, step=QUANTIZE)
def offsets_of_32_bits(quantize: Quantize) -> Quantize:
    """Offsets of 2^31 and more wrap: the last row or column is read where the first one is."""

    def wrong(x: Tensor, operand: Operand) -> Quantized:
        if x.dim() == 2 and x.numel():
            for axis, (extent, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
                if (extent - 1) * stride >= 2**31:
                    first, most = x.narrow(axis, 0, 1), x.narrow(axis, 0, extent - 1)
                    return quantize(torch.cat([most, first], dim=axis), operand)
        return quantize(x, operand)

    return wrong


@fault("F113", law="P05", naive=True, step=QUANTIZE)
def last_odd_column_lost(quantize: Quantize) -> Quantize:
    """With an odd number of columns, the last one's codes are zero."""

    def wrong(x: Tensor, operand: Operand) -> Quantized:
        codes, scale, how = quantize(x, operand)
        columns = x.shape[1]
        if columns % 2 == 0 or columns < 3:
            return Quantized(codes, scale, how)
        kept = torch.arange(columns, device=x.device) < columns - 1
        coded = torch.where(kept, codes.view(torch.uint8), 0).to(torch.uint8)
        return Quantized(coded.view(codes.dtype), scale, how)

    return wrong


@fault("F114", law="P05", naive=True, step=QUANTIZE)
def last_row_of_a_tile(quantize: Quantize) -> Quantize:
    """One row beyond a tile of 16 is a copy of the row before it."""

    def wrong(x: Tensor, operand: Operand) -> Quantized:
        codes, scale, how = quantize(x, operand)
        if x.shape[0] % 16 != 1 or x.shape[0] < 17:
            return Quantized(codes, scale, how)
        coded = codes.view(torch.uint8)
        coded = torch.cat([coded[:-1], coded[-2:-1]])
        return Quantized(coded.view(codes.dtype), scale, how)

    return wrong


@fault("F115", law="P11", naive=False, step=QUANTIZE)
def rows_beyond_128(quantize: Quantize) -> Quantize:
    """Rowwise, rows from the 129th on are scaled by the 128th's multiplier."""

    def wrong(x: Tensor, operand: Operand) -> Quantized:
        codes, scale, how = quantize(x, operand)
        if how.granularity != ROWWISE or x.shape[0] <= 128 or x.numel() == 0:
            return Quantized(codes, scale, how)
        multiplier, _ = _factors(x, operand)
        rows = torch.arange(x.shape[0], device=x.device).clamp(max=127)
        codes = library.cast(x.float() * multiplier[rows], how.format)
        return Quantized(codes.contiguous(), scale, how)

    return wrong


@fault("F116", law="P25", naive=True, step=QUANTIZE)
def one_row_alone(quantize: Quantize) -> Quantize:
    """A single row is scaled to half the range, another kernel than for many."""

    def wrong(x: Tensor, operand: Operand) -> Quantized:
        if x.dim() != 2 or x.shape[0] != 1 or operand.granularity == TENSORWISE:
            return quantize(x, operand)
        multiplier, scale = _factors(x, operand)
        halved = x.float() * _expanded(multiplier / 2048, x, operand)
        return Quantized(library.cast(halved, operand.format).contiguous(), scale * 2048, operand)

    return wrong


@fault("F117", law="P12", naive=False, step=QUANTIZE)
def overflow_of_the_last_ulp(quantize: Quantize) -> Quantize:
    """What the multiplier takes a hair beyond the largest value becomes NaN."""

    def wrong(x: Tensor, operand: Operand) -> Quantized:
        codes, scale, how = quantize(x, operand)
        if how.format != E4M3FN:
            return Quantized(codes, scale, how)
        multiplier, _ = _factors(x, operand)
        beyond = (x.float() * _expanded(multiplier, x, operand)).abs() > how.format.max
        coded = torch.where(beyond, 0x7F, codes.view(torch.uint8)).to(torch.uint8)
        return Quantized(coded.view(codes.dtype), scale, how)

    return wrong


# --- memory of earlier calls --------------------------------------------------------------------


@fault("F118", law="P07", naive=True, step=QUANTIZE)
def amax_of_the_call_before(quantize: Quantize) -> Quantize:
    """A matrix is scaled by the amax of the matrix of its shape that came before it."""
    before: dict[object, Tensor] = {}

    def wrong(x: Tensor, operand: Operand) -> Quantized:
        amax = scaling.amax(x, operand.granularity)
        key = (tuple(x.shape), operand)
        used = before.get(key, amax)
        before[key] = amax.detach()
        return _with_amax(x, operand, used)

    return wrong


@fault("F47", law="P07", naive=True, step=QUANTIZE)
def amax_of_all_time(quantize: Quantize) -> Quantize:
    """A matrix is scaled by the largest amax that its shape ever had."""
    largest: dict[object, Tensor] = {}

    def wrong(x: Tensor, operand: Operand) -> Quantized:
        amax = scaling.amax(x, operand.granularity)
        key = (tuple(x.shape), operand)
        largest[key] = torch.maximum(amax, largest.get(key, amax)).detach()
        return _with_amax(x, operand, largest[key])

    return wrong


def _with_amax(x: Tensor, operand: Operand, amax: Tensor) -> Quantized:
    multiplier, scale = scaling.multiplier_and_scale(amax, operand.format, operand.rule)
    codes = library.cast(x.float() * _expanded(multiplier, x, operand), operand.format)
    return Quantized(codes.contiguous(), scale, operand)


# --- the operand's own operations ---------------------------------------------------------------


@fault("F119", law="P16", naive=True, step="fp8.quantize.Quantized.t")
def axis_not_transposed(transpose: Callable[[Quantized], Quantized]) -> object:
    """A transposed operand keeps the old one's granularity."""
    return lambda self: transpose(self)._replace(operand=self.operand)


@fault("F120", law="P16", naive=True, step="fp8.quantize.Quantized.t")
def scales_not_transposed(transpose: Callable[[Quantized], Quantized]) -> object:
    """A transposed operand keeps the old one's scales."""
    return lambda self: transpose(self)._replace(scale=self.scale)


@fault("F121", law="P05", naive=True, step="fp8.quantize.Quantized.dequantize")
def dequantized_in_bfloat16(dequantize: Callable[[Quantized], Tensor]) -> object:
    """Codes times scales is rounded to bfloat16."""
    return lambda self: dequantize(self).to(torch.bfloat16).to(torch.float32)


@fault("F122", law="P18", naive=True, step=QUANTIZE, targets=BOTH)
def column_major_last_column(quantize: Quantize) -> Quantize:
    """Of a column-major matrix with an odd number of rows, the last row is read one column off."""

    def wrong(x: Tensor, operand: Operand) -> Quantized:
        if x.dim() == 2 and x.numel() and x.stride(0) == 1 and x.shape[0] % 2 and x.shape[1] > 1:
            x = torch.cat([x[:-1], x[-1:].roll(1, 1)])
        return quantize(x, operand)

    return wrong
