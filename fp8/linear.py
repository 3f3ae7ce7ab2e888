"""Float8Linear: a linear layer whose three products run in float8, and its autograd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8 import matmul, quantize
from fp8.quantize import HIGH_PRECISION
from fp8.recipes import Product, Recipe
from fp8.recipes import get as get_recipe

if TYPE_CHECKING:
    from fp8.matmul import Backend


class Float8Linear(nn.Linear):
    """`nn.Linear` with its products in float8: the same parameters, the same state_dict.

    x: (..., in_features), any number of leading dimensions and any strides, no tokens included.
    Under autocast x and the bias are cast to the autocast dtype, as nn.Linear's are; the weight is
    quantised from the dtype it has. Every product is rounded once, to x's dtype, and a gradient is
    cast to its parameter's dtype. Nothing is kept between calls: each one quantises afresh, forward
    and backward, so that no step can see the scale of another.
    """

    recipe: Recipe
    backend: Backend

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | str = "tensorwise",
        backend: Backend = "emulated",
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.recipe = get_recipe(recipe)
        self.backend = backend

    def forward(self, input: Tensor) -> Tensor:
        """The output (..., out_features) of input (..., in_features); see `linear`."""
        return linear(input, self.weight, self.bias, recipe=self.recipe, backend=self.backend)

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}, backend={self.backend}"


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, recipe: Recipe, backend: Backend
) -> Tensor:
    """x . weight^T + bias by `recipe`, differentiable in all three.

    x: (..., K). weight: (N, K). bias: (N,) or None. Returns (..., N) of x's dtype (the autocast
    dtype under autocast). Raises TypeError and ValueError that name the argument.
    """
    _check_tensor("input", x)
    if x.device != weight.device:
        raise ValueError(f"input: got device {x.device}, needs {weight.device}, the weight's")
    autocast = _autocast_dtype(x.device.type)
    _check_dtypes(x, weight, may_differ=autocast is not None)
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"input: got shape {tuple(x.shape)}, needs (..., {weight.shape[1]})")
    compute = autocast or x.dtype
    rows = x.to(compute).reshape(-1, weight.shape[1])
    cast_bias = None if bias is None else bias.to(compute)
    out: Tensor = _Linear.apply(rows, weight, cast_bias, recipe, backend)  # type: ignore[no-untyped-call]
    if x.dim() == 2:
        return out
    # Not a view, as nn.Linear's output is none: fully_shard hangs a hook on the output, which an
    # in-place operation on a view would silently drop.
    shape = [*x.shape[:-1], weight.shape[0]]
    unflattened: Tensor = torch.ops.aten._unsafe_view(out, shape)  # noqa: SLF001 - its only name
    return unflattened


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    if _knows_autocast(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


@torch.compiler.assume_constant_result  # torch 2.11's dynamo cannot trace the question
def _knows_autocast(device_type: str) -> bool:
    # Some devices, meta among them, know no autocast and raise when asked whether it is on.
    return torch.amp.is_autocast_available(device_type)


def _check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, needs a tensor")


def _check_dtypes(x: Tensor, weight: Tensor, *, may_differ: bool) -> None:
    for name, tensor in (("input", x), ("weight", weight)):
        if tensor.dtype not in HIGH_PRECISION:
            raise TypeError(f"{name}: got {tensor.dtype}, needs float32, bfloat16 or float16")
    if x.dtype != weight.dtype and not may_differ:
        raise TypeError(f"input: got {x.dtype}, needs {weight.dtype}, the weight's dtype")


class _Linear(torch.autograd.Function):
    """The three products. Saves x only for the weight's gradient and the weight only for x's."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        recipe: Recipe,
        backend: Backend,
    ) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.recipe, ctx.backend = recipe, backend
        ctx.x_dtype, ctx.weight_dtype = x.dtype, weight.dtype
        return product(x, weight, recipe.output, bias=bias, out_dtype=x.dtype, backend=backend)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grad_outputs
        x, weight = ctx.saved_tensors
        recipe, backend, dtype = ctx.recipe, ctx.backend, ctx.x_dtype
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = product(g, weight.t(), recipe.grad_input, out_dtype=dtype, backend=backend)
        if ctx.needs_input_grad[1]:
            grad_weight = product(
                g.t(), x.t(), recipe.grad_weight, out_dtype=dtype, backend=backend
            ).to(ctx.weight_dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = sum_over_tokens(g)
        return grad_x, grad_weight, grad_bias, None, None


def product(
    a: Tensor,
    b: Tensor,
    how: Product,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype,
    backend: Backend,
) -> Tensor:
    """a (M, K) . b (N, K)^T + bias as `how` says, in float8 or in high precision."""
    if how.a is None or how.b is None:
        return high_precision_product(a, b, bias, out_dtype)
    return matmul.scaled_mm(
        quantize.quantize(a, how.a),
        quantize.quantize(b, how.b),
        bias=bias,
        out_dtype=out_dtype,
        accumulation=how.accumulation,
        backend=backend,
    )


def high_precision_product(
    a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """a (M, K) . b (N, K)^T + bias in `out_dtype`, no float8."""
    a, b = a.to(out_dtype), b.to(out_dtype)
    return a @ b.t() if bias is None else torch.addmm(bias, a, b.t())


def sum_over_tokens(g: Tensor) -> Tensor:
    """The bias's gradient, (M, N) to (N,): summed in float32, rounded once."""
    return g.sum(dim=0, dtype=torch.float32).to(g.dtype)
