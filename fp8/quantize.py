"""Tensor to codes and scales, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fp8 import scaling
from fp8.formats import E8M0FNU, FORMATS, Format

if TYPE_CHECKING:
    from fp8.scaling import Granularity, ScaleRule

#: what may be quantised
HIGH_PRECISION = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Operand:
    """How one input of one product is quantised."""

    format: Format
    granularity: Granularity
    rule: ScaleRule

    def __post_init__(self) -> None:
        if self.format == E8M0FNU:
            raise ValueError("format: got e8m0fnu, a format of scales, needs one of elements")

    def __str__(self) -> str:
        return f"{self.format.name}/{self.granularity.name}/{self.rule.name}"

    @property
    def transposed(self) -> Operand:
        """The operand that the transposed tensor is."""
        return Operand(self.format, self.granularity.transposed, self.rule)


class Quantized(NamedTuple):
    """A quantised operand: x ~ codes * scale.

    codes: (R, C), the float8 dtype of `operand.format`. scale: float32, shape
    `operand.granularity.scale_shape(R, C)`.
    """

    codes: Tensor
    scale: Tensor
    operand: Operand

    def dequantize(self) -> Tensor:
        """codes * scale, float32 (R, C): one rounding a value, none for a power-of-two scale."""
        factors = scaling.expand(self.scale, self.operand.granularity, *self.codes.shape)
        return self.codes.to(torch.float32) * factors

    def t(self) -> Quantized:
        """The transposed operand: the same values, and scales along the other axis."""
        return Quantized(self.codes.t(), self.scale.t(), self.operand.transposed)


def cast(x: Tensor, format: Format) -> Tensor:
    """Round `x` to the nearest float8 value, ties to even, without a scale.

    x: any shape, float32, bfloat16 or float16. Finite overflow and infinities saturate; NaN stays
    NaN; a zero keeps its sign where the format has two. (The clamp comes first because torch's own
    conversion changed: NaN above 464 before torch 2.12, +-448 since; pytorch#178817.) For e8m0fnu
    it is torch's conversion: the sign is dropped, a tie goes up, infinity and overflow are NaN.
    Raises TypeError for another dtype.
    """
    _check_high_precision("x", x)
    if format == E8M0FNU:
        return x.to(format.dtype)
    largest = scaling.constant(format.max_text)
    return x.clamp(-largest, largest).to(format.dtype)


def quantize(x: Tensor, operand: Operand) -> Quantized:
    """Quantise `x` by groups: codes = cast(float32(x) * multiplier).

    x: (R, C), float32, bfloat16 or float16, any strides. The product with the multiplier is one
    float32 rounding, the cast a second. Codes come row-major. Raises TypeError for another dtype
    (float8 included), ValueError for another rank.
    """
    _check_high_precision("x", x)
    if x.dim() != 2:
        raise ValueError(f"x: got {x.dim()} dimensions {tuple(x.shape)}, needs 2: (rows, columns)")
    amax = scaling.amax(x, operand.granularity)
    multiplier, scale = scaling.multiplier_and_scale(amax, operand.format, operand.rule)
    factors = scaling.expand(multiplier, operand.granularity, *x.shape)
    codes = cast(x.to(torch.float32) * factors, operand.format)
    return Quantized(codes.contiguous(), scale, operand)


def _check_high_precision(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, needs a tensor")
    if x.dtype not in HIGH_PRECISION:
        hint = " (it is quantised already)" if str(x.dtype)[13:] in FORMATS else ""
        raise TypeError(f"{name}: got {x.dtype}{hint}, needs float32, bfloat16 or float16")
