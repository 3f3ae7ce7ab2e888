"""Planted slow-downs: what a suite that measures speed must notice.

Each takes the place of one step of the reference, in eager and in compiled code, as a fault of
`fp8.testing.faults` does: ``--fp8-plant fp8.testing.slowdowns:S1`` plants one, and `SLOWDOWNS`
holds them by id. `fp8.testing.slowdowns.proof` shows on a GPU that each is seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8 import linear, matmul, quantize
from fp8.testing.faults.base import replaced
from fp8.testing.slowdowns import operators

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor

    from fp8.quantize import Operand, Quantized
    from fp8.recipes import Product
    from fp8.testing.faults.base import Make
    from fp8.testing.timing.plan import Quantity

    Multiply = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Slowdown:
    """One step of the reference, made slower.

    Attributes:
        id: How reports and ``--fp8-plant fp8.testing.slowdowns:ID`` name it.
        summary: What is different.
        step: What it replaces: a key of `fp8.testing.faults.STEPS`.
        make: From the step to the slower one.
        seen_by: The quantity in which it shows: a host that waits costs the device nothing.
        exact: Whether every number stays the same, bit for bit.
    """

    id: str
    summary: str
    step: str
    make: Make
    seen_by: Quantity = "device"
    exact: bool = True

    def __call__(self) -> AbstractContextManager[None]:
        """A context manager that plants it: what ``--fp8-plant`` asks for."""
        return replaced(self.step, self.make)


def _waits(permille: int) -> Make:
    """The step that makes the factors of a cast waits for a share of all the case's time."""

    def make(factors: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def slow(*args: Any) -> tuple[Tensor, Tensor]:
            multiplier, scale = factors(*args)
            return operators.wait(multiplier, permille), scale

        return slow

    return make


def _casts_again(quantized: Callable[..., Quantized]) -> Callable[..., Quantized]:
    def slow(x: Tensor, operand: Operand) -> Quantized:
        made = quantized(x, operand)
        return made._replace(scale=operators.cast_again(made.scale, x))

    return slow


def _in_output(slow: Multiply) -> Make:
    """`slow` in the place of the output product alone: no other is given a bias, be it None."""

    def make(product: Multiply) -> Multiply:
        def other(a: Tensor, b: Tensor, how: Product, **rest: Any) -> Tensor:
            if "bias" not in rest or how.a is None or how.b is None:
                return product(a, b, how, **rest)
            return slow(a, b, how, **rest)

        return other

    return make


def _in_high_precision(a: Tensor, b: Tensor, how: Product, **rest: Any) -> Tensor:
    return linear.high_precision_product(a, b, rest["bias"], rest["out_dtype"])


def _bias_after(a: Tensor, b: Tensor, how: Product, *, bias: Tensor | None, **rest: Any) -> Tensor:
    # Not given at all rather than as None: this is not replaced again.
    out = linear.product(a, b, how, **rest)
    return out if bias is None else out + bias


def _synchronized(a: Tensor, b: Tensor, how: Product, **rest: Any) -> Tensor:
    left = quantize.quantize(a, how.a)  # type: ignore[arg-type]  # `_in_output` looked
    right = quantize.quantize(b, how.b)  # type: ignore[arg-type]
    left = left._replace(scale=operators.synchronize(left.scale))
    return matmul.scaled_mm(left, right, accumulation=how.accumulation, **rest)


_FACTORS = "fp8.scaling.multiplier_and_scale"
_PRODUCT = "fp8.linear.product"

SLOWDOWNS = {
    one.id: one
    for one in (
        Slowdown(
            "S1", "5 % of the time is waited in the casts, on the device", _FACTORS, _waits(50)
        ),
        Slowdown("S2", "15 % of the time is waited in the casts", _FACTORS, _waits(150)),
        Slowdown("S3", "a second cast kernel for each cast", "fp8.quantize.quantize", _casts_again),
        Slowdown(
            "S4",
            "the output product is in bfloat16",
            _PRODUCT,
            _in_output(_in_high_precision),
            exact=False,
        ),
        Slowdown(
            "S5",
            "the bias is added by a kernel of its own",
            _PRODUCT,
            _in_output(_bias_after),
            exact=False,
        ),
        Slowdown(
            "S6",
            "the host waits for the GPU once in each layer",
            _PRODUCT,
            _in_output(_synchronized),
            seen_by="call",
        ),
    )
}


def __getattr__(name: str) -> Slowdown:
    if name not in SLOWDOWNS:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return SLOWDOWNS[name]
