"""Faults of autograd: each gradient, what is computed for nobody, what is saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8 import linear as library
from fp8 import quantize as quantizing
from fp8.formats import E5M2
from fp8.quantize import Operand
from fp8.scaling import TENSORWISE, TORCHAO
from fp8.testing.faults.base import BOTH, fault

Forward = Callable[..., Tensor]
Backward = Callable[..., tuple[Tensor | None, ...]]
Gradients = tuple[Tensor | None, ...]

FORWARD = "fp8.linear._Linear.forward"
BACKWARD = "fp8.linear._Linear.backward"
LINEAR = "fp8.linear.linear"
PRODUCT = "fp8.linear.product"
SUM = "fp8.linear.sum_over_tokens"


# --- each gradient ------------------------------------------------------------------------------


@fault("F29", law="P26", naive=True, step=BACKWARD)
def weight_quantised_twice(backward: Backward) -> Backward:
    """The input's gradient quantises a weight that was quantised for the output already."""

    def wrong(ctx: Any, *grad_outputs: Tensor) -> Gradients:
        grads = backward(ctx, *grad_outputs)
        _, weight = ctx.saved_tensors
        how = ctx.recipe.output.b
        if grads[0] is None or how is None:
            return grads
        once = quantizing.quantize(weight, how).dequantize().to(weight.dtype)
        grad_x = library.product(
            grad_outputs[0],
            once.t(),
            ctx.recipe.grad_input,
            out_dtype=ctx.x_dtype,
            backend=ctx.backend,
        )
        return grad_x, *grads[1:]

    return wrong


@fault("F32", law="P08", naive=False, step=BACKWARD)
def square_weight_gradient_transposed(backward: Backward) -> Backward:
    """The gradient of a square weight is returned transposed."""

    def wrong(ctx: Any, *grad_outputs: Tensor) -> Gradients:
        grad_x, grad_weight, *rest = backward(ctx, *grad_outputs)
        if grad_weight is not None and grad_weight.shape[0] == grad_weight.shape[1]:
            grad_weight = grad_weight.t().contiguous()
        return grad_x, grad_weight, *rest

    return wrong


@fault("F40", law="P08", naive=True, step=SUM, targets=BOTH)
def bias_gradient_twice(total: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The bias's gradient is counted twice."""
    return lambda g: total(g) * 2


@fault("F42", law="P08", naive=True, step=SUM)
def bias_gradient_in_bfloat16(total: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The bias's gradient is summed in bfloat16, 32 tokens at a time."""

    def wrong(g: Tensor) -> Tensor:
        summed = torch.zeros(g.shape[1], dtype=torch.bfloat16, device=g.device)
        for rows in g.split(32):
            summed = summed + rows.sum(dim=0, dtype=torch.float32).to(torch.bfloat16)
        return summed.to(g.dtype)

    return wrong


@fault("F155", law="P08", naive=True, step=SUM)
def bias_gradient_of_codes(total: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The bias's gradient is the sum of the quantised gradient, not of the gradient."""

    def wrong(g: Tensor) -> Tensor:
        how = Operand(E5M2, TENSORWISE, TORCHAO)
        return total(quantizing.quantize(g, how).dequantize()).to(g.dtype)

    return wrong


@fault("F156", law="P08", naive=False, step=BACKWARD)
def input_gradient_is_zero(backward: Backward) -> Backward:
    """The input's gradient is returned as zeros."""

    def wrong(ctx: Any, *grad_outputs: Tensor) -> Gradients:
        grad_x, *rest = backward(ctx, *grad_outputs)
        return None if grad_x is None else torch.zeros_like(grad_x), *rest

    return wrong


@fault("F157", law="P08", naive=True, step=BACKWARD)
def input_gradient_of_a_frozen_layer(backward: Backward) -> Backward:
    """Where the weight is frozen, the input's gradient is zero."""

    def wrong(ctx: Any, *grad_outputs: Tensor) -> Gradients:
        grad_x, *rest = backward(ctx, *grad_outputs)
        if grad_x is not None and not ctx.needs_input_grad[1]:
            grad_x = torch.zeros_like(grad_x)
        return grad_x, *rest

    return wrong


@fault("F158", law="P19", naive=True, step=BACKWARD)
def input_gradient_by_the_weights_flag(backward: Backward) -> Backward:
    """Where the weight is frozen, the input gets no gradient."""

    def wrong(ctx: Any, *grad_outputs: Tensor) -> Gradients:
        grad_x, *rest = backward(ctx, *grad_outputs)
        return grad_x if ctx.needs_input_grad[1] else None, *rest

    return wrong


@fault("F159", law="P08", naive=True, step=BACKWARD)
def bias_gradient_by_the_weights_flag(backward: Backward) -> Backward:
    """Where the weight is frozen, the bias gets no gradient."""

    def wrong(ctx: Any, *grad_outputs: Tensor) -> Gradients:
        grad_x, grad_weight, grad_bias, *rest = backward(ctx, *grad_outputs)
        return grad_x, grad_weight, grad_bias if ctx.needs_input_grad[1] else None, *rest

    return wrong


@fault("F160", law="P08", naive=True, step=BACKWARD)
def float32_gradient_through_bfloat16(backward: Backward) -> Backward:
    """A float32 weight's gradient has the precision of bfloat16."""

    def wrong(ctx: Any, *grad_outputs: Tensor) -> Gradients:
        grad_x, grad_weight, *rest = backward(ctx, *grad_outputs)
        if grad_weight is not None and grad_weight.dtype == torch.float32:
            grad_weight = grad_weight.to(torch.bfloat16).to(torch.float32)
        return grad_x, grad_weight, *rest

    return wrong


@fault("F161", law="P08", naive=True, step="fp8.linear.high_precision_product")
def high_precision_is_bfloat16(product: Forward) -> Forward:
    """A product in high precision multiplies in bfloat16 whatever the dtype."""

    def wrong(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
        return product(a, b, bias, out_dtype)

    return wrong


@fault("F162", law="P18", naive=True, step=BACKWARD)
def expanded_gradient(backward: Backward) -> Backward:
    """A grad_output of stride 0 is taken for one that arrives once."""

    def wrong(ctx: Any, *grad_outputs: Tensor) -> Gradients:
        (g,) = grad_outputs
        if g.shape[0] > 1 and g.stride(0) == 0:
            g = torch.cat([g[:1], torch.zeros_like(g[1:])])
        return backward(ctx, g)

    return wrong


@fault("F163", law="P08", naive=True, step=PRODUCT)
def gradient_of_half_the_tokens(product: Forward) -> Forward:
    """Beyond 128 tokens, the weight's gradient leaves out the last ones of an odd number."""

    def wrong(a: Tensor, b: Tensor, how: Any, **rest: Any) -> Tensor:
        tokens = a.shape[1]
        backward = torch._C._current_graph_task_id() >= 0  # noqa: SLF001 - -1 outside backward
        if backward and a.stride(0) == 1 and tokens > 128 and tokens % 2:
            a, b = a[:, :-1], b[:, :-1]
        return product(a, b, how, **rest)

    return wrong


@fault("F177", law="P08", naive=True, step=BACKWARD)
def last_row_without_bias(backward: Backward) -> Backward:
    """Without a bias, the last row of the weight's gradient is lost."""

    def wrong(ctx: Any, *grad_outputs: Tensor) -> Gradients:
        grad_x, grad_weight, grad_bias, *rest = backward(ctx, *grad_outputs)
        if grad_bias is None and grad_weight is not None and grad_weight.shape[0] > 1:
            grad_weight = torch.cat([grad_weight[:-1], torch.zeros_like(grad_weight[-1:])])
        return grad_x, grad_weight, grad_bias, *rest

    return wrong


# --- what is computed and saved -----------------------------------------------------------------


@fault("F52", law="P19", naive=True, step=BACKWARD)
def product_for_a_frozen_weight(backward: Backward) -> Backward:
    """Backward runs a product for a frozen weight and throws it away."""

    def wrong(ctx: Any, *grad_outputs: Tensor) -> Gradients:
        grads = backward(ctx, *grad_outputs)
        if not ctx.needs_input_grad[1]:
            (g,) = grad_outputs
            how = ctx.recipe.grad_weight
            library.product(g.t(), g.t(), how, out_dtype=ctx.x_dtype, backend=ctx.backend)
        return grads

    return wrong


class _Keep(torch.autograd.Function):
    """Hands its first argument on, and keeps its second until backward."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(kept)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grad_outputs[0], None


def _keeping(linear: Forward, more: Callable[[Tensor, Tensor], Tensor]) -> Forward:
    """linear, with one tensor more in the graph."""

    def wrong(x: Tensor, weight: Tensor, *args: Any, **rest: Any) -> Tensor:
        out = linear(x, weight, *args, **rest)
        kept: Tensor = _Keep.apply(out, more(x.detach(), weight.detach()))  # type: ignore[no-untyped-call]
        return kept

    return wrong


@fault("F64", law="P14", naive=True, step=LINEAR)
def both_layouts_of_the_weight(linear: Forward) -> Forward:
    """A transposed copy of the weight is kept until backward."""
    return _keeping(linear, lambda _, weight: weight.t().contiguous())


@fault("F164", law="P14", naive=True, step=LINEAR)
def float32_copy_of_the_input(linear: Forward) -> Forward:
    """The input is kept until backward in float32 as well."""
    return _keeping(linear, lambda x, _: x.to(torch.float32, copy=True))


@fault("F213", law="P14", naive=True, step=FORWARD)
def codes_beside_the_saved(forward: Forward) -> Forward:
    """The graph holds the weight's codes besides what it saves, where no hook sees them."""

    def wrong(ctx: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        ctx.codes = weight.detach().t().to(torch.float8_e4m3fn)
        return forward(ctx, x, weight, *rest)

    return wrong


@fault("F165", law="P14", naive=True, step=FORWARD)
def input_saved_for_a_frozen_weight(forward: Forward) -> Forward:
    """The input is saved although the weight is frozen."""

    def wrong(ctx: Any, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        out = forward(ctx, x, weight, *rest)
        ctx.save_for_backward(x, weight)
        return out

    return wrong


@fault("F166", law="P14", naive=True, step=PRODUCT)
def operands_pile_up(product: Forward) -> Forward:
    """Every product's first operand is kept for ever."""
    kept: list[Tensor] = []

    def wrong(a: Tensor, b: Tensor, how: Any, **rest: Any) -> Tensor:
        kept.append(a.detach().clone())
        return product(a, b, how, **rest)

    return wrong
