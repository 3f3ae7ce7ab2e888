"""Faults of a product's extents: tails, empty ones, masks, padding, strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8.quantize import Quantized
from fp8.testing.faults.base import BOTH, TORCH, fault

Product = Callable[..., Tensor]
Padding = Callable[..., tuple[Quantized, Quantized, Tensor | None]]

SCALED_MM = "fp8.matmul.scaled_mm"
TORCH_PRODUCT = "fp8.matmul.torch_product"
PAD = "fp8.matmul.pad_operands"


# --- tails --------------------------------------------------------------------------------------


@fault("F130", law="P05", naive=True, step=SCALED_MM, targets=BOTH)
def tail_of_the_contraction_lost(product: Product) -> Product:
    """From K = 128 on, what is beyond the last multiple of 16 is not multiplied."""

    def wrong(a: Quantized, b: Quantized, **rest: Any) -> Tensor:
        columns = a.codes.shape[1]
        if columns > 128 and columns % 16:
            kept = torch.arange(columns, device=a.codes.device) < columns // 16 * 16
            coded = torch.where(kept, a.codes.contiguous().view(torch.uint8), 0).to(torch.uint8)
            a = a._replace(codes=coded.view(a.codes.dtype))
        return product(a, b, **rest)

    return wrong


@fault("F56", law="P05", naive=True, step=SCALED_MM)
def store_mask_swapped(product: Product) -> Product:
    """The mask of the store has its axes swapped: elements beyond a square are not written."""

    def wrong(a: Quantized, b: Quantized, **rest: Any) -> Tensor:
        out = product(a, b, **rest)
        side = min(out.shape)
        written = torch.zeros_like(out)
        written[:side, :side] = out[:side, :side]
        return written

    return wrong


@fault("F33", law="P05", naive=True, step=SCALED_MM)
def last_row_not_written(product: Product) -> Product:
    """The last row of the output stays zero when the number of rows is above 16."""

    def wrong(a: Quantized, b: Quantized, **rest: Any) -> Tensor:
        out = product(a, b, **rest)
        if out.shape[0] > 16:
            out[-1] = 0
        return out

    return wrong


@fault("F131", law="P03", naive=True, step=SCALED_MM)
def empty_is_refused(product: Product) -> Product:
    """A product of no rows is refused."""

    def wrong(a: Quantized, b: Quantized, **rest: Any) -> Tensor:
        if a.codes.numel() == 0:
            raise ValueError("a: got no values, needs some")
        return product(a, b, **rest)

    return wrong


@fault("F132", law="P03", naive=True, step=SCALED_MM)
def empty_contraction_is_garbage(product: Product) -> Product:
    """A contraction of length 0 gives ones rather than zeros."""

    def wrong(a: Quantized, b: Quantized, **rest: Any) -> Tensor:
        out = product(a, b, **rest)
        return out + 1 if a.codes.shape[1] == 0 else out

    return wrong


@fault("F133", law="P05", naive=True, step=SCALED_MM)
def contraction_of_one(product: Product) -> Product:
    """With K = 1 the result is halved."""

    def wrong(a: Quantized, b: Quantized, **rest: Any) -> Tensor:
        out = product(a, b, **rest)
        return out / 2 if a.codes.shape[1] == 1 else out

    return wrong


# --- padding ------------------------------------------------------------------------------------


def _beyond(operand: Quantized, columns: int, code: int) -> Quantized:
    """`operand` with `code` in the columns from `columns` on."""
    coded = operand.codes.view(torch.uint8).clone()
    coded[:, columns:] = code
    return operand._replace(codes=coded.view(operand.codes.dtype))


@fault("F141", law="P22", naive=True, step=PAD, targets=(TORCH,))
def contraction_padded_with_ones(pad: Padding) -> Padding:
    """The contraction is padded with ones rather than zeros."""

    def wrong(a: Quantized, b: Quantized, bias: Tensor | None, **rest: int) -> Any:
        columns = a.codes.shape[1]
        a, b, bias = pad(a, b, bias, **rest)
        return _beyond(a, columns, 0x38), _beyond(b, columns, 0x38), bias

    return wrong


@fault("F142", law="P22", naive=True, step=PAD, targets=(TORCH,))
def padding_is_nan(pad: Padding) -> Padding:
    """The padding of one operand is not cleared, and holds NaN."""

    def wrong(a: Quantized, b: Quantized, bias: Tensor | None, **rest: int) -> Any:
        columns = a.codes.shape[1]
        a, b, bias = pad(a, b, bias, **rest)
        return a, _beyond(b, columns, 0x7F), bias

    return wrong


@fault("F143", law="P05", naive=True, step=PAD, targets=(TORCH,))
def bias_not_padded_right(pad: Padding) -> Padding:
    """A bias is padded at its beginning, where N is no multiple of 16."""

    def wrong(a: Quantized, b: Quantized, bias: Tensor | None, **rest: int) -> Any:
        rows = b.codes.shape[0]
        a, b, bias = pad(a, b, bias, **rest)
        return a, b, None if bias is None else bias.roll(-rows % 16)

    return wrong


@fault("F144", law="P05", naive=True, step=TORCH_PRODUCT, targets=(TORCH,))
def last_columns_not_cut(product: Product) -> Product:
    """Where N is no multiple of 16, the last column of the padding is returned for the last one."""

    def wrong(
        a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype, *, fast: bool
    ) -> Tensor:
        out = product(a, b, bias, out_dtype, fast=fast)
        if out.numel() and out.shape[1] % 16:
            out = torch.cat([out[:, :-1], torch.zeros_like(out[:, -1:])], dim=1)
        return out

    return wrong


@fault("F145", law="P18", naive=True, step=TORCH_PRODUCT, targets=(TORCH,))
def stride_of_codes_ignored(product: Product) -> Product:
    """Codes are read as if their rows lay one after another."""

    def wrong(
        a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype, *, fast: bool
    ) -> Tensor:
        codes = a.codes
        if codes.numel() and not codes.is_contiguous():
            flat = torch.as_strided(codes, codes.shape, (codes.shape[1], 1))
            a = a._replace(codes=flat)
        return product(a, b, bias, out_dtype, fast=fast)

    return wrong
