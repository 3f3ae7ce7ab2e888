"""Faults of the scaled product: scales, codes, accumulation, rounding, bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8.formats import E4M3FN, E5M2
from fp8.scaling import BLOCK_1X128, ROWWISE, TENSORWISE
from fp8.testing.faults.base import BOTH, TORCH, fault

if TYPE_CHECKING:
    from fp8.quantize import Quantized

Product = Callable[..., Tensor]

SCALED_MM = "fp8.matmul.scaled_mm"
EMULATED_PRODUCT = "fp8.matmul.emulated_product"
TORCH_PRODUCT = "fp8.matmul.torch_product"
ROUND = "fp8.matmul.round_once"


# --- scales -------------------------------------------------------------------------------------


@fault("F24", law="P05", naive=False, step=SCALED_MM)
def first_scale_for_every_block(product: Product) -> Product:
    """Every block of the contraction gets the first block's scale of a."""

    def wrong(a: Quantized, b: Quantized, **rest: Any) -> Tensor:
        if a.operand.granularity.block[1] == 128 and a.codes.numel():
            a = a._replace(scale=a.scale[:, :1].expand(a.scale.shape).contiguous())
        return product(a, b, **rest)

    return wrong


@fault("F123", law="P05", naive=False, step=SCALED_MM, targets=BOTH)
def scales_swapped_when_square(product: Product) -> Product:
    """When M = N, rowwise scales of a and b change places."""

    def wrong(a: Quantized, b: Quantized, **rest: Any) -> Tensor:
        rowwise = a.operand.granularity == b.operand.granularity == ROWWISE
        if rowwise and a.scale.shape == b.scale.shape:
            a, b = a._replace(scale=b.scale), b._replace(scale=a.scale)
        return product(a, b, **rest)

    return wrong


@fault("F124", law="P05", naive=True, step=SCALED_MM)
def scale_of_a_short_block_lost(product: Product) -> Product:
    """A last block that is at most half full gets the scale of the block before it."""

    def wrong(a: Quantized, b: Quantized, **rest: Any) -> Tensor:
        columns = a.codes.shape[1]
        if a.operand.granularity == BLOCK_1X128 and columns > 128 and 0 < columns % 128 <= 64:
            a = a._replace(scale=torch.cat([a.scale[:, :-1], a.scale[:, -2:-1]], dim=1))
        return product(a, b, **rest)

    return wrong


@fault("F125", law="P05", naive=True, step=SCALED_MM)
def one_row_scale_for_all(product: Product) -> Product:
    """When a is tensorwise and b rowwise, b's first scale serves all its rows."""

    def wrong(a: Quantized, b: Quantized, **rest: Any) -> Tensor:
        mixed = a.operand.granularity == TENSORWISE and b.operand.granularity == ROWWISE
        if mixed and b.scale.numel():
            b = b._replace(scale=b.scale[:1].expand(b.scale.shape).contiguous())
        return product(a, b, **rest)

    return wrong


@fault("F126", law="P05", naive=True, step=SCALED_MM, targets=BOTH)
def scale_of_one_column_lost(product: Product) -> Product:
    """With one output column, the scale of b is taken to be 1."""

    def wrong(a: Quantized, b: Quantized, **rest: Any) -> Tensor:
        if b.codes.shape[0] == 1:
            b = b._replace(scale=torch.ones_like(b.scale))
        return product(a, b, **rest)

    return wrong


# --- codes --------------------------------------------------------------------------------------


def _recoded(operand: Quantized, old: tuple[int, ...], new: tuple[int, ...]) -> Quantized:
    coded = operand.codes.contiguous().view(torch.uint8)
    for before, after in zip(old, new, strict=True):
        coded = torch.where(coded == before, after, coded).to(torch.uint8)
    return operand._replace(codes=coded.view(operand.codes.dtype))


@fault("F127", law="P05", naive=True, step=EMULATED_PRODUCT)
def largest_code_misread(product: Product) -> Product:
    """In e4m3fn, the largest code is read as the one below it."""

    def wrong(a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        a, b = (
            _recoded(o, (0x7E, 0xFE), (0x7D, 0xFD)) if o.operand.format == E4M3FN else o
            for o in (a, b)
        )
        return product(a, b, bias, out_dtype)

    return wrong


@fault("F128", law="P05", naive=True, step=EMULATED_PRODUCT)
def smallest_code_misread(product: Product) -> Product:
    """The smallest subnormal is read as zero, in the product alone."""

    def wrong(a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        a, b = (_recoded(o, (0x01, 0x81), (0x00, 0x80)) for o in (a, b))
        return product(a, b, bias, out_dtype)

    return wrong


@fault("F129", law="P26", naive=False, step=SCALED_MM)
def e5m2_read_as_e4m3(product: Product) -> Product:
    """The bytes of an e5m2 operand are read as e4m3fn."""

    def wrong(a: Quantized, b: Quantized, **rest: Any) -> Tensor:
        if a.operand.format == E5M2:
            codes = a.codes.view(E4M3FN.dtype)
            a = a._replace(codes=codes, operand=_as_e4m3(a))
        return product(a, b, **rest)

    return wrong


def _as_e4m3(operand: Quantized) -> Any:
    how = operand.operand
    return type(how)(E4M3FN, how.granularity, how.rule)


@fault("F146", law="P05", naive=True, step="fp8.matmul.emulated_product")
def scales_in_float16(product: Product) -> Product:
    """Where the contraction is above 64, scales reach the product in float16."""

    def wrong(a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        if a.codes.shape[1] > 64:
            a, b = (o._replace(scale=o.scale.half().float()) for o in (a, b))
        return product(a, b, bias, out_dtype)

    return wrong


# --- accumulation and rounding ------------------------------------------------------------------


def _in_slices(
    product: Product, a: Quantized, b: Quantized, width: int, between: Callable[[Tensor], Tensor]
) -> Tensor:
    """The sum of the products of slices of the contraction, rounded by `between` after each."""
    left, right = a.dequantize(), b.dequantize()
    total = torch.zeros(left.shape[0], right.shape[0], dtype=torch.float64, device=left.device)
    for start in range(0, left.shape[1], width):
        part = (
            left[:, start : start + width].double() @ right[:, start : start + width].t().double()
        )
        total = between(total + part)
    return total


@fault("F34", law="P27", naive=True, step=EMULATED_PRODUCT)
def sums_in_bfloat16(product: Product) -> Product:
    """The running sum is rounded to bfloat16 every 32 products."""

    def wrong(a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        total = _in_slices(product, a, b, 32, lambda s: s.to(torch.bfloat16).to(torch.float64))
        return (total if bias is None else total + bias.double()).to(out_dtype)

    return wrong


@fault("F134", law="F-ACC", naive=True, step=EMULATED_PRODUCT)
def sums_of_14_bits(product: Product) -> Product:
    """The running sum keeps 14 bits, as in Hopper's fast mode, whatever the mode."""

    def narrow(total: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(total)
        return torch.ldexp(torch.trunc(mantissa * 2**14) / 2**14, exponent)

    def wrong(a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        total = _in_slices(product, a, b, 32, narrow)
        return (total if bias is None else total + bias.double()).to(out_dtype)

    return wrong


@fault("F135", law="P05", naive=False, step=EMULATED_PRODUCT)
def overflows_before_scaling(product: Product) -> Product:
    """Codes are summed in float16 before they are scaled: large sums overflow."""

    def wrong(a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        flat = all(o.operand.granularity in (TENSORWISE, ROWWISE) for o in (a, b))
        if not flat:
            return product(a, b, bias, out_dtype)
        sums = (a.codes.double() @ b.codes.double().t()).to(torch.float16).double()
        total = sums * a.scale.double() * b.scale.double().t()
        return (total if bias is None else total + bias.double()).to(out_dtype)

    return wrong


@fault("F136", law="P05", naive=True, step=ROUND)
def rounded_twice(round_once: Product) -> Product:
    """float64 goes to bfloat16 and float16 through float32: twice rounded at a midpoint."""
    return lambda x, dtype: x.to(torch.float32).to(dtype)


@fault("F137", law="P05", naive=True, step=ROUND)
def output_truncated(round_once: Product) -> Product:
    """A bfloat16 output is cut, not rounded."""

    def wrong(x: Tensor, dtype: torch.dtype) -> Tensor:
        if dtype != torch.bfloat16:
            return round_once(x, dtype)
        cut = x.to(torch.float32).view(torch.int32) & -0x1_0000
        return cut.view(torch.float32).to(dtype)

    return wrong


@fault("F138", law="P05", naive=True, step=SCALED_MM, targets=BOTH)
def output_through_bfloat16(product: Product) -> Product:
    """A float32 output has the precision of bfloat16."""

    def wrong(a: Quantized, b: Quantized, **rest: Any) -> Tensor:
        out = product(a, b, **rest)
        return out.to(torch.bfloat16).to(out.dtype) if out.dtype == torch.float32 else out

    return wrong


@fault("F139", law="P25", naive=True, step=EMULATED_PRODUCT)
def one_row_by_another_kernel(product: Product) -> Product:
    """A single row is summed in bfloat16, another kernel than for many rows."""

    def wrong(a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        if a.codes.shape[0] != 1:
            return product(a, b, bias, out_dtype)
        total = _in_slices(product, a, b, 16, lambda s: s.to(torch.bfloat16).to(torch.float64))
        return (total if bias is None else total + bias.double()).to(out_dtype)

    return wrong


# --- bias ---------------------------------------------------------------------------------------


@fault("F37", law="P05", naive=True, step=SCALED_MM)
def bias_dropped(product: Product) -> Product:
    """The bias is not added."""
    return lambda a, b, **rest: product(a, b, **{**rest, "bias": None})


@fault("F39", law="P27", naive=True, step=SCALED_MM)
def bias_after_rounding(product: Product) -> Product:
    """The bias is added after the product was rounded: rounded twice."""

    def wrong(a: Quantized, b: Quantized, *, bias: Tensor | None = None, **rest: Any) -> Tensor:
        out = product(a, b, **rest)
        return out if bias is None else out + bias

    return wrong


@fault("F140", law="P05", naive=True, step=TORCH_PRODUCT, targets=(TORCH,))
def bias_lost_in_float32(product: Product) -> Product:
    """A bias is not added to a float32 output, the one that no epilogue serves."""

    def wrong(
        a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype, *, fast: bool
    ) -> Tensor:
        kept = None if out_dtype == torch.float32 else bias
        return product(a, b, kept, out_dtype, fast=fast)

    return wrong
