"""Faults of what must be refused: missing checks, wrong verdicts, errors that say nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8.formats import E5M2
from fp8.testing.faults.base import BOTH, fault

if TYPE_CHECKING:
    from fp8.quantize import Quantized

CHECK = "fp8.matmul.check_operands"
LINEAR = "fp8.linear.linear"
CAST = "fp8.quantize.cast"
QUANTIZE = "fp8.quantize.quantize"

Check = Callable[..., None]


def _forgiving(check: Check, forgiven: Callable[[str], bool]) -> Check:
    """check, without the errors whose message `forgiven` accepts."""

    def wrong(a: Any, b: Any, **rest: Any) -> None:
        try:
            check(a, b, **rest)
        except (TypeError, ValueError) as error:
            if not forgiven(str(error)):
                raise

    return wrong


@fault("F61", law="P04", naive=True, step=CHECK)
def scale_shape_unchecked(check: Check) -> Check:
    """The shape of a scale is not checked."""
    return _forgiving(check, lambda text: "scale: got shape" in text)


@fault("F201", law="P04", naive=True, step=CHECK)
def scale_dtype_unchecked(check: Check) -> Check:
    """The dtype of a scale is not checked."""
    return _forgiving(check, lambda text: "scale: got torch." in text)


@fault("F202", law="P04", naive=True, step=CHECK)
def bias_dtype_unchecked(check: Check) -> Check:
    """The dtype of a bias is not checked."""
    return _forgiving(check, lambda text: text.startswith("bias: got torch."))


@fault("F203", law="P04", naive=True, step=CHECK)
def accumulation_unchecked(check: Check) -> Check:
    """An unknown accumulation is taken for a known one."""
    return _forgiving(check, lambda text: text.startswith("accumulation"))


@fault("F204", law="P04", naive=True, step="fp8.matmul.FORMAT_PAIRS")
def e5m2_times_e5m2(pairs: tuple[Any, ...]) -> tuple[Any, ...]:
    """e5m2 times e5m2, which no hardware multiplies, is emulated."""
    return (*pairs, (E5M2, E5M2))


@fault("F205", law="P04", naive=True, step=CHECK)
def error_without_names(check: Check) -> Check:
    """What a product refuses is refused by an error that names nothing."""

    def wrong(a: Any, b: Any, **rest: Any) -> None:
        try:
            check(a, b, **rest)
        except (TypeError, ValueError) as error:
            raise type(error)("unsupported operands") from error

    return wrong


@fault("F206", law="P04", naive=True, step=CHECK)
def wrong_kind_of_error(check: Check) -> Check:
    """What a product refuses raises AssertionError."""

    def wrong(a: Any, b: Any, **rest: Any) -> None:
        try:
            check(a, b, **rest)
        except (TypeError, ValueError) as error:
            raise AssertionError(str(error)) from error

    return wrong


@fault("F207", law="P04", naive=True, step=CAST)
def integers_cast(cast: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Integers are cast to float8 as if they were float32."""

    def wrong(x: Any, format: Any) -> Tensor:
        whole = isinstance(x, Tensor) and not x.dtype.is_floating_point
        return cast(x.to(torch.float32) if whole else x, format)

    return wrong


@fault("F208", law="P04", naive=True, step=QUANTIZE)
def codes_quantised_again(quantize: Callable[..., Quantized]) -> Callable[..., Quantized]:
    """Codes are quantised again, without their scale."""

    def wrong(x: Any, operand: Any) -> Quantized:
        if isinstance(x, Tensor) and x.dtype.itemsize == 1 and x.dtype.is_floating_point:
            x = x.to(torch.float32)
        return quantize(x, operand)

    return wrong


@fault("F209", law="P04", naive=True, step=QUANTIZE)
def vectors_quantised(quantize: Callable[..., Quantized]) -> Callable[..., Quantized]:
    """A vector is quantised as a matrix of one row."""

    def wrong(x: Any, operand: Any) -> Quantized:
        return quantize(x[None] if isinstance(x, Tensor) and x.dim() == 1 else x, operand)

    return wrong


@fault("F210", law="P04", naive=True, step=LINEAR, targets=BOTH)
def features_reshaped(linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An input of another shape with as many values is reshaped, not refused."""

    def wrong(x: Any, weight: Tensor, *args: Any, **rest: Any) -> Tensor:
        # On a CPU: without one, torch aborts in an emulated world where it asks for a stream.
        fits = isinstance(x, Tensor) and x.dim() > 0 and x.shape[-1] != weight.shape[1]
        if fits and x.is_cpu and x.numel() % weight.shape[1] == 0:
            x = x.reshape(-1, weight.shape[1])
        return linear(x, weight, *args, **rest)

    return wrong


@fault("F211", law="P04", naive=True, step=LINEAR)
def dtypes_mixed(linear: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Without autocast, an input of another dtype than the weight is silently cast."""

    def wrong(x: Any, weight: Tensor, *args: Any, **rest: Any) -> Tensor:
        if isinstance(x, Tensor) and x.is_floating_point() and x.dtype.itemsize > 1:
            x = x if torch.is_autocast_enabled(weight.device.type) else x.to(weight.dtype)
        return linear(x, weight, *args, **rest)

    return wrong


@fault("F212", law="P04", naive=True, step=QUANTIZE)
def float64_rounded(quantize: Callable[..., Quantized]) -> Callable[..., Quantized]:
    """float64 is silently rounded to float32."""

    def wrong(x: Any, operand: Any) -> Quantized:
        if isinstance(x, Tensor) and x.dtype == torch.float64:
            x = x.to(torch.float32)
        return quantize(x, operand)

    return wrong
