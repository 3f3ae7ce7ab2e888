"""Faults that eager code does not show: what breaks, repeats or changes a compiled graph.

A compiler traces the layer's Python, so a fault of the compiler is planted as Python that only does
wrong while it is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fp8.testing.faults import base

if TYPE_CHECKING:
    from fp8.formats import Format
    from fp8.linear import Float8Linear
    from fp8.quantize import Operand, Quantized
    from fp8.recipes import Product
    from fp8.scaling import Granularity, ScaleRule

Function = Callable[..., Any]

fault = partial(base.fault, compiled=True, naive=True)

QUANTIZE = "fp8.quantize.quantize"
BACKWARD = "fp8.linear._Linear.backward"
MODULE = "fp8.linear.Float8Linear.forward"
PRODUCT = "fp8.linear.product"


# --- graph breaks and synchronisation -----------------------------------------------------------


@fault("F301", law="P10", step="fp8.scaling.amax")
def amax_read_by_the_host(amax: Function) -> Function:
    """Whether anything is to be scaled is asked on the host: a break, and on a GPU a wait."""

    def wrong(x: Tensor, granularity: Granularity) -> Tensor:
        found: Tensor = amax(x, granularity)
        if found.numel() and found.max().item() == 0.0:
            return torch.zeros_like(found)
        return found

    return wrong


@fault("F302", law="P10", step=BACKWARD)
def backward_prints(backward: Function) -> Function:
    """The backward prints where it is."""

    def wrong(ctx: Any, *grad_outputs: Tensor) -> Any:
        print(end="")  # noqa: T201 - that is the fault
        return backward(ctx, *grad_outputs)

    return wrong


@fault("F303", law="P10", step=QUANTIZE)
def quantising_kept_from_the_compiler(quantize: Function) -> Function:
    """Quantising is opted out of the compiler, as Transformer Engine's modules are."""
    return cast("Function", torch.compiler.disable(quantize))


@fault("F304", law="P10", step="fp8.quantize.cast")
def branch_on_the_values(cast: Function) -> Function:
    """A cast looks for NaN first."""

    def wrong(x: Tensor, format: Format) -> Tensor:
        if torch.isnan(x).any():
            x = torch.nan_to_num(x, nan=float("nan"))
        out: Tensor = cast(x, format)
        return out

    return wrong


@fault("F305", law="P10", step="fp8.linear.linear")
def storages_logged(linear: Function) -> Function:
    """The process remembers where inputs lie in memory, which a traced tensor can't say."""
    log: set[int] = set()

    def wrong(x: Tensor, *args: Any, **rest: Any) -> Tensor:
        log.add(x.data_ptr())
        out: Tensor = linear(x, *args, **rest)
        return out

    return wrong


# --- recompilations and state -------------------------------------------------------------------


@fault("F306", law="P10", step=MODULE)
def calls_counted_on_the_layer(forward: Function) -> Function:
    """The layer counts its calls in an attribute, and quantises differently in the first."""

    def wrong(self: Float8Linear, input: Tensor) -> Tensor:
        calls = getattr(self, "calls", 0)
        self.calls = calls + 1  # type: ignore[assignment]
        out: Tensor = forward(self, input)
        return out if calls >= 0 else out.clone()

    return wrong


@fault("F307", law="P10", step=MODULE)
def steps_remembered_in_the_process(forward: Function) -> Function:
    """A list of the process remembers the shape of each call."""
    seen: list[int] = []

    def wrong(self: Float8Linear, input: Tensor) -> Tensor:
        seen.append(len(seen))
        out: Tensor = forward(self, input)
        return out

    return wrong


@fault("F308", law="P10", step="fp8.linear.linear")
def path_by_number_of_tokens(linear: Function) -> Function:
    """Few tokens take another way through the code."""

    def wrong(x: Tensor, *args: Any, **rest: Any) -> Tensor:
        out: Tensor = linear(x, *args, **rest)
        return out.contiguous() if x.shape[0] > 128 else out

    return wrong


@fault("F309", law="P10", step="fp8.scaling.amax")
def tokens_counted_in_python(amax: Function) -> Function:
    """The largest magnitude is looked for row by row, in Python, up to a hundred rows."""

    def wrong(x: Tensor, granularity: Granularity) -> Tensor:
        found: Tensor = amax(x, granularity)
        for _ in range(min(int(x.shape[0]), 100) // 50):
            found = found.clone()
        return found

    return wrong


@fault("F310", law="P10", step=MODULE)
def a_graph_for_each_layer(forward: Function) -> Function:
    """What a layer does depends on which layer it is, so that layers share no graph."""

    def wrong(self: Float8Linear, input: Tensor) -> Tensor:
        out: Tensor = forward(self, input)
        return out if id(self) else out.clone()

    return wrong


# --- what the graph holds -----------------------------------------------------------------------


@fault("F311", law="P26", step=PRODUCT)
def backward_in_fast_accumulation(product: Function) -> Function:
    """When compiled, all three products accumulate fast."""

    def wrong(a: Tensor, b: Tensor, how: Product, **rest: Any) -> Tensor:
        if torch.compiler.is_compiling() and how.accumulation == "precise":
            how = replace(how, accumulation="fast")
        out: Tensor = product(a, b, how, **rest)
        return out

    return wrong


@fault("F312", law="P26", step=PRODUCT)
def gradients_in_high_precision(product: Function) -> Function:
    """When compiled, products without a bias (the gradients, mostly) don't run in float8."""

    def wrong(a: Tensor, b: Tensor, how: Product, **rest: Any) -> Tensor:
        if torch.compiler.is_compiling() and rest.get("bias") is None:
            return (a.to(rest["out_dtype"]) @ b.to(rest["out_dtype"]).t()).clone()
        out: Tensor = product(a, b, how, **rest)
        return out

    return wrong


@fault("F313", law="P26", step=PRODUCT)
def every_product_twice(product: Function) -> Function:
    """When compiled, each product runs twice, and the larger of two equal results is kept."""

    def wrong(a: Tensor, b: Tensor, how: Product, **rest: Any) -> Tensor:
        out: Tensor = product(a, b, how, **rest)
        if torch.compiler.is_compiling():
            return torch.maximum(out, product(a, b, how, **rest))
        return out

    return wrong


@fault("F314", law="P26", step=QUANTIZE)
def every_operand_cast_twice(quantize: Function) -> Function:
    """When compiled, an operand is quantised again from what it was quantised to."""

    def wrong(x: Tensor, operand: Operand) -> Quantized:
        q: Quantized = quantize(x, operand)
        if not torch.compiler.is_compiling():
            return q
        again = q.codes.to(torch.float32).clone().to(operand.format.dtype)
        return q._replace(codes=again)

    return wrong


@fault("F315", law="P26", step=PRODUCT)
def product_stored_in_float32(product: Function) -> Function:
    """When compiled, a product is written in float32 and rounded afterwards, by a kernel more."""

    def wrong(a: Tensor, b: Tensor, how: Product, **rest: Any) -> Tensor:
        if torch.compiler.is_compiling() and rest.get("bias") is None:
            wide = product(a, b, how, **{**rest, "out_dtype": torch.float32})
            return cast("Tensor", wide.to(rest["out_dtype"]))
        out: Tensor = product(a, b, how, **rest)
        return out

    return wrong


@fault("F316", law="P14", step="fp8.linear.linear")
def output_kept(linear: Function) -> Function:
    """When compiled, the output is kept for the backward, which has no use for it."""

    def wrong(*args: Any, **rest: Any) -> Tensor:
        out: Tensor = linear(*args, **rest)
        return out + 0.0 * torch.tanh(out) if torch.compiler.is_compiling() else out

    return wrong


# --- other numbers than eager code --------------------------------------------------------------


@fault("F317", law="P09", step="fp8.linear.sum_over_tokens")
def rounding_in_the_sum(sum_over_tokens: Function) -> Function:
    """When compiled, the bias's gradient is summed in two halves, each rounded."""

    def wrong(g: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            return cast("Tensor", sum_over_tokens(g))
        half = g.shape[0] // 2
        return cast("Tensor", sum_over_tokens(g[:half]) + sum_over_tokens(g[half:]))

    return wrong


@fault("F318", law="P09", step=QUANTIZE)
def stride_misread(quantize: Function) -> Function:
    """When compiled, a transposed operand is read as if it lay row by row."""

    def wrong(x: Tensor, operand: Operand) -> Quantized:
        if torch.compiler.is_compiling() and x.dim() == 2 and not x.is_contiguous():
            x = x.t().reshape(x.shape)
        q: Quantized = quantize(x, operand)
        return q

    return wrong


@fault("F319", law="P09", step=BACKWARD)
def every_fourth_column_zero(backward: Function) -> Function:
    """When compiled, every fourth column of grad_weight is zero (pytorch#188841)."""

    def wrong(ctx: Any, *grad_outputs: Tensor) -> Any:
        grad_x, grad_weight, *rest = backward(ctx, *grad_outputs)
        if torch.compiler.is_compiling() and grad_weight is not None:
            columns = torch.arange(grad_weight.shape[1], device=grad_weight.device)
            grad_weight = torch.where(columns % 4 == 3, 0.0, grad_weight)
        return grad_x, grad_weight, *rest

    return wrong


@fault("F320", law="P09", step="fp8.scaling.round_down_to_power_of_two")
def exponent_by_logarithm(round_down: Function) -> Function:
    """When compiled, a power of two is taken from a logarithm (pytorch#179570)."""

    def wrong(x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.exp2(torch.floor(torch.log2(x)))
        return cast("Tensor", round_down(x))

    return wrong


@fault("F321", law="P09", step="fp8.quantize.cast")
def nan_saturates(cast: Function) -> Function:
    """When compiled, a NaN becomes the largest value (triton-lang/triton#8322 has its like)."""

    def wrong(x: Tensor, format: Format) -> Tensor:
        if torch.compiler.is_compiling():
            x = torch.nan_to_num(x, nan=format.max)
        out: Tensor = cast(x, format)
        return out

    return wrong


@fault("F322", law="P09", step="fp8.scaling.multiplier_and_scale")
def scale_by_reciprocal(multiplier_and_scale: Function) -> Function:
    """When compiled, a quotient is a product with a float32 reciprocal, which rounds twice."""

    def wrong(amax: Tensor, format: Format, rule: ScaleRule) -> tuple[Tensor, Tensor]:
        multiplier, scale = multiplier_and_scale(amax, format, rule)
        if torch.compiler.is_compiling() and not rule.power_of_two:
            multiplier = 1.0 / (amax.clamp(min=1e-12) * (1.0 / 448.0))
            scale = multiplier.reciprocal()
        return multiplier, scale

    return wrong
