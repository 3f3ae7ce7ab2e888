"""Faults of the whole layer: shapes, autocast, memory of earlier calls, recomputation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fp8.testing.faults.base import fault

if TYPE_CHECKING:
    from fp8.quantize import Operand, Quantized

Forward = Callable[..., Tensor]
Backward = Callable[..., tuple[Tensor | None, ...]]
Gradients = tuple[Tensor | None, ...]

FORWARD = "fp8.linear._Linear.forward"
BACKWARD = "fp8.linear._Linear.backward"
LINEAR = "fp8.linear.linear"


# --- shapes and dtypes --------------------------------------------------------------------------


@fault("F167", law="P03", naive=True, step=LINEAR)
def leading_dimensions_mixed(linear: Forward) -> Forward:
    """With four dimensions or more, the first two change places in the result."""

    def wrong(x: Tensor, *args: Any, **rest: Any) -> Tensor:
        out = linear(x, *args, **rest)
        if x.dim() < 4 or x.shape[0] == x.shape[1] == 1:
            return out
        return out.transpose(0, 1).reshape(out.shape)

    return wrong


@fault("F168", law="P03", naive=True, step=LINEAR)
def a_vector_becomes_a_matrix(linear: Forward) -> Forward:
    """A one-dimensional input gives a matrix of one row."""

    def wrong(x: Tensor, *args: Any, **rest: Any) -> Tensor:
        out = linear(x, *args, **rest)
        return out[None] if x.dim() == 1 else out

    return wrong


@fault("F169", law="P23", naive=True, step=LINEAR)
def weight_cast_by_autocast(linear: Forward) -> Forward:
    """Under autocast, the weight is rounded to the autocast dtype before it is quantised."""

    def wrong(x: Tensor, weight: Tensor, bias: Tensor | None, **rest: Any) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            weight = weight.to(torch.get_autocast_dtype(x.device.type))
        return linear(x, weight, bias, **rest)

    return wrong


@fault("F170", law="P23", naive=True, step=LINEAR)
def output_of_the_inputs_dtype(linear: Forward) -> Forward:
    """Under autocast, the output has the input's dtype."""

    def wrong(x: Tensor, *args: Any, **rest: Any) -> Tensor:
        return linear(x, *args, **rest).to(x.dtype)

    return wrong


@fault("F171", law="P23", naive=True, step=LINEAR)
def autocast_ignored_by_float32(linear: Forward) -> Forward:
    """Under autocast, a float32 layer computes in float32 and its output is cast afterwards."""

    def wrong(x: Tensor, weight: Tensor, *args: Any, **rest: Any) -> Tensor:
        kind = x.device.type
        if not torch.is_autocast_enabled(kind) or x.dtype != weight.dtype:
            return linear(x, weight, *args, **rest)
        with torch.autocast(kind, enabled=False):
            return linear(x, weight, *args, **rest).to(torch.get_autocast_dtype(kind))

    return wrong


# --- memory of earlier calls --------------------------------------------------------------------


def _with_cached_weight(forward: Forward, version: Callable[[Tensor], object]) -> Forward:
    """forward, with the values that the weight had when `version` last changed."""

    def wrong(ctx: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        known = getattr(weight, "_fp8_cached", None)
        if known is None or known[0] != version(weight):
            known = (version(weight), weight.detach().clone())
            weight._fp8_cached = known  # type: ignore[attr-defined]  # noqa: SLF001
        return forward(ctx, x, known[1], *rest)

    return wrong


@fault("F46", law="P07", naive=True, step=FORWARD)
def cached_weight(forward: Forward) -> Forward:
    """The weight of the first call is used for ever, in forward and backward."""
    return _with_cached_weight(forward, lambda _: 0)


@fault("F172", law="P07", naive=True, step=FORWARD)
def cached_by_version(forward: Forward) -> Forward:
    """The weight is cached until its version counter moves, which `.data` does not do."""
    return _with_cached_weight(forward, lambda weight: weight._version)  # noqa: SLF001


@fault("F173", law="P07", naive=True, step=BACKWARD)
def first_microbatch_only(backward: Backward) -> Backward:
    """Only the first microbatch of a step contributes to the weight's gradient."""

    def wrong(ctx: Any, *grad_outputs: Tensor) -> Gradients:
        grad_x, grad_weight, *rest = backward(ctx, *grad_outputs)
        _, weight = ctx.saved_tensors
        if grad_weight is not None and weight is not None and weight.grad is not None:
            grad_weight = torch.zeros_like(grad_weight)
        return grad_x, grad_weight, *rest

    return wrong


@fault("F48", law="P07", naive=True, step=LINEAR)
def amax_of_evaluation(linear: Forward) -> Forward:
    """What was seen without gradients counts into the amax of the training that follows."""
    seen: dict[int, Tensor] = {}

    def wrong(x: Tensor, weight: Tensor, *args: Any, **rest: Any) -> Tensor:
        if x.dim() == 0 or x.numel() == 0:
            return linear(x, weight, *args, **rest)
        amax, key = x.detach().abs().amax().float(), id(weight)
        if not torch.is_grad_enabled():
            seen[key] = amax
        elif key in seen and bool(seen[key] > amax):
            factor = 448 / seen[key]
            codes = (x.detach().float() * factor).to(torch.float8_e4m3fn)
            x = x + ((codes.float() / factor).to(x.dtype) - x).detach()
        return linear(x, weight, *args, **rest)

    return wrong


@fault("F44", law="P15", naive=True, step="fp8.linear.Float8Linear.forward")
def attribute_written_in_forward(forward: Forward) -> Forward:
    """Forward counts its calls in an attribute of the module."""

    def wrong(self: Any, input: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return forward(self, input)

    return wrong


@fault("F174", law="P14", naive=True, step="fp8.linear.Float8Linear.forward")
def output_kept(forward: Forward) -> Forward:
    """The module keeps its last output."""

    def wrong(self: Any, input: Tensor) -> Tensor:
        out = forward(self, input)
        self.__dict__["last"] = out.detach().clone()
        return out

    return wrong


@fault("F175", law="P15", naive=True, step="fp8.quantize.quantize")
def recomputed_otherwise(
    quantize: Callable[[Tensor, Operand], Quantized],
) -> Callable[[Tensor, Operand], Quantized]:
    """What is quantised while backward runs, recomputed forwards too, is rounded to bfloat16."""

    def wrong(x: Tensor, operand: Operand) -> Quantized:
        backward = torch._C._current_graph_task_id() >= 0  # noqa: SLF001 - -1 outside backward
        if backward and x.dtype == torch.float32:
            x = x.to(torch.bfloat16).to(torch.float32)
        return quantize(x, operand)

    return wrong


@fault("F176", law="P19", naive=True, step=LINEAR)
def graph_without_gradients(linear: Forward) -> Forward:
    """Under no_grad, a graph is built nevertheless."""

    def wrong(x: Tensor, *args: Any, **rest: Any) -> Tensor:
        with torch.enable_grad():
            return linear(x, *args, **rest)

    return wrong
