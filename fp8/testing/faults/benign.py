"""Benign variants: other ways to do the same, about which no law may complain."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8 import matmul, scaling
from fp8 import quantize as quantizing
from fp8.formats import E8M0FNU, Format
from fp8.testing.faults.base import EMULATED, TORCH, benign

if TYPE_CHECKING:
    from fp8.quantize import Operand, Quantized
    from fp8.scaling import Granularity, ScaleRule

Product = Callable[..., Tensor]


@benign("B01", step="fp8.matmul.emulated_product", targets=(EMULATED,))
def summed_backwards(product: Product) -> Product:
    """The emulated product sums in the opposite order."""

    def other(a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        left, right = (_exactly(o).flip(1) for o in (a, b))
        total = left @ right.t()
        return matmul.round_once(total if bias is None else total + bias.double(), out_dtype)

    return other


def _exactly(operand: Quantized) -> Tensor:
    shape = operand.codes.shape
    factors = scaling.expand(operand.scale, operand.operand.granularity, shape[0], shape[1])
    return operand.codes.double() * factors.double()


@benign("B02", step="fp8.matmul.emulated_product", targets=(EMULATED,))
def summed_in_blocks(product: Product) -> Product:
    """The emulated product sums blocks of 48 and then the blocks."""

    def other(a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        left, right = _exactly(a), _exactly(b)
        total = torch.zeros(left.shape[0], right.shape[0], dtype=torch.float64, device=left.device)
        for x, y in zip(left.split(48, dim=1), right.split(48, dim=1), strict=True):
            total += x @ y.t()
        return matmul.round_once(total if bias is None else total + bias.double(), out_dtype)

    return other


@benign("B03", step="fp8.matmul.emulated_product", targets=(EMULATED,))
def bias_first(product: Product) -> Product:
    """The emulated product begins its sums with the bias."""

    def other(a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        left, right = _exactly(a), _exactly(b)
        if bias is None:
            return matmul.round_once(left @ right.t(), out_dtype)
        return matmul.round_once(torch.addmm(bias.double(), left, right.t()), out_dtype)

    return other


@benign("B04", step="fp8.matmul.torch_product", targets=(TORCH,))
def split_accumulation(product: Product) -> Product:
    """torch's product is computed in two halves of the contraction, added in float32."""

    def other(
        a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype, *, fast: bool
    ) -> Tensor:
        half = a.codes.shape[1] // 2
        if half == 0:
            return product(a, b, bias, out_dtype, fast=fast)
        first, second = (
            product(_columns(a, at), _columns(b, at), None, torch.float32, fast=fast)
            for at in (slice(None, half), slice(half, None))
        )
        total = first + second
        return (total if bias is None else total + bias.float()).to(out_dtype)

    return other


def _columns(operand: Quantized, at: slice) -> Quantized:
    return operand._replace(codes=operand.codes[:, at])


@benign("B05", step="fp8.matmul.pad_operands", targets=(TORCH,))
def padded_scales_are_two(pad: Callable[..., Any]) -> Callable[..., Any]:
    """The scales of rows that are padding, and cut off again, are 2 rather than 1."""

    def other(a: Quantized, b: Quantized, bias: Tensor | None, **rest: int) -> Any:
        rows = b.codes.shape[0]
        a, b, bias = pad(a, b, bias, **rest)
        scale = b.scale.clone()
        scale[rows:] = 2
        return a, b._replace(scale=scale), bias

    return other


@benign("B06", step="fp8.matmul.scaled_mm")
def operands_copied(product: Product) -> Product:
    """Codes and scales are copied before they are multiplied."""

    def other(a: Quantized, b: Quantized, **rest: Any) -> Tensor:
        matmul.check_operands(
            a, b, **{"bias": None, "accumulation": "precise", "backend": "torch", **rest}
        )
        a, b = (o._replace(codes=o.codes.clone(), scale=o.scale.clone()) for o in (a, b))
        return product(a, b, **rest)

    return other


@benign("B07", step="fp8.quantize.quantize")
def contiguous_first(
    quantize: Callable[[Tensor, Operand], Quantized],
) -> Callable[[Tensor, Operand], Quantized]:
    """A matrix is made contiguous before it is quantised."""

    def other(x: Any, operand: Operand) -> Quantized:
        return quantize(x.contiguous() if isinstance(x, Tensor) else x, operand)

    return other


@benign("B08", step="fp8.quantize.quantize")
def float32_first(
    quantize: Callable[[Tensor, Operand], Quantized],
) -> Callable[[Tensor, Operand], Quantized]:
    """bfloat16 and float16 are converted to float32 before amax, which rounds nothing."""

    def other(x: Any, operand: Operand) -> Quantized:
        half = isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)
        return quantize(x.to(torch.float32) if half else x, operand)

    return other


@benign("B09", step="fp8.quantize.cast")
def clamped_in_float32(cast: Callable[[Tensor, Format], Tensor]) -> Callable[..., Tensor]:
    """16-bit values are cast by way of float32, which holds them exactly."""

    def other(x: Any, format: Format) -> Tensor:
        half = isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)
        return cast(x.to(torch.float32) if half else x, format)

    return other


@benign("B10", step="fp8.quantize.cast")
def rounded_by_hand(cast: Callable[[Tensor, Format], Tensor]) -> Callable[..., Tensor]:
    """Values are rounded to the format's grid by integer arithmetic before the conversion."""

    def other(x: Tensor, format: Format) -> Tensor:
        codes = cast(x, format)
        if format == E8M0FNU:
            return codes
        wide = x.to(torch.float64)
        _, exponent = torch.frexp(wide)
        smallest, _ = _exponent(format.smallest_normal)
        granule = torch.ldexp(
            torch.ones_like(wide), exponent.clamp(min=smallest) - 1 - format.mantissa_bits
        )
        grid = torch.where(torch.isfinite(wide), torch.round(wide / granule) * granule, wide)
        return cast(torch.copysign(grid, wide).to(torch.float32), format)

    return other


def _exponent(x: float) -> tuple[int, float]:
    mantissa, exponent = math.frexp(x)
    return exponent, mantissa


@benign("B11", step="fp8.scaling.multiplier_and_scale")
def divided_in_float32(factors: Callable[..., Any]) -> Callable[..., Any]:
    """torchao's quotient is a float32 division where amax is above the floor: the same bits."""

    def other(amax: Tensor, format: Format, rule: ScaleRule) -> tuple[Tensor, Tensor]:
        exact = factors(amax, format, rule)
        single = factors(amax, format, replace(rule, division="float32"))
        above = amax > rule.amax_floor
        return (
            torch.where(above, single[0], exact[0]),
            torch.where(above, single[1], exact[1]),
        )

    return other


@benign("B12", step="fp8.scaling.amax")
def amax_by_extremes(amax: Callable[[Tensor, Granularity], Tensor]) -> Callable[..., Tensor]:
    """amax is the larger of max(x) and max(-x)."""

    def other(x: Tensor, how: Granularity) -> Tensor:
        return torch.maximum(amax(x.clamp(min=0), how), amax((-x).clamp(min=0), how))

    return other


@benign("B13", step="fp8.scaling.expand")
def expanded_in_full(expand: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Each value gets a factor of its own in memory, none by broadcasting."""

    def other(scale: Tensor, how: Granularity, rows: int, columns: int) -> Tensor:
        return expand(scale, how, rows, columns).expand(rows, columns).contiguous()

    return other


@benign("B14", step="fp8.scaling.round_down_to_power_of_two")
def power_of_two_by_frexp(down: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The power of two is made of the exponent that frexp gives."""

    def other(x: Tensor) -> Tensor:
        _, exponent = torch.frexp(x)
        powers = torch.ldexp(torch.ones_like(x), exponent - 1)
        normal = torch.isfinite(x) & (x >= torch.finfo(torch.float32).tiny)
        return torch.where(normal, powers, down(x))

    return other


@benign("B15", step="fp8.linear._Linear.backward")
def gradient_made_contiguous(backward: Callable[..., Any]) -> Callable[..., Any]:
    """grad_output is made contiguous first."""
    return lambda ctx, g: backward(ctx, g.contiguous())


@benign("B16", step="fp8.linear._Linear.backward")
def gradients_cast_by_autograd(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients are returned in float32 and cast by autograd."""

    def other(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        grads = backward(ctx, *grad_outputs)
        return tuple(None if g is None else g.to(torch.float32) for g in grads)

    return other


@benign("B17", step="fp8.linear.product")
def operands_in_the_other_order(product: Product) -> Product:
    """The second operand is quantised first."""

    def other(a: Tensor, b: Tensor, how: Any, **rest: Any) -> Tensor:
        if how.a is None or how.b is None:
            return product(a, b, how, **rest)
        right = quantizing.quantize(b, how.b)
        left = quantizing.quantize(a, how.a)
        return matmul.scaled_mm(left, right, accumulation=how.accumulation, **rest)

    return other


@benign("B18", step="fp8.linear.sum_over_tokens")
def bias_gradient_in_float64(total: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The bias's gradient is summed in float64 and rounded once."""

    def other(g: Tensor) -> Tensor:
        return matmul.round_once(g.sum(dim=0, dtype=torch.float64), g.dtype)

    return other


@benign("B19", step="fp8.linear.high_precision_product")
def high_precision_with_a_bias_of_zeros(product: Product) -> Product:
    """A product in high precision is added to a bias of zeros where there is none."""

    def other(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        zeros = torch.zeros(b.shape[0], dtype=out_dtype, device=b.device)
        return product(a, b, zeros if bias is None else bias, out_dtype)

    return other


@benign("B20", step="fp8.conversion._swap")
def swapped_twice(swap: Callable[..., None]) -> Callable[..., None]:
    """A layer's class is changed by way of nn.Linear's own again: the same object, the same end."""

    def other(layer: nn.Linear, *args: Any) -> None:
        kind = type(layer)
        swap(layer, *args)
        layer.__class__ = kind
        swap(layer, *args)

    return other


@benign("B21", step="fp8.matmul.round_once")
def rounded_from_longer(round_once: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """float64 that bfloat16 or float16 holds exactly is converted directly."""

    def other(x: Tensor, dtype: torch.dtype) -> Tensor:
        direct = x.to(dtype)
        return torch.where(direct.to(torch.float64) == x, direct, round_once(x, dtype))

    return other
