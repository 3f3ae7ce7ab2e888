"""Running a target's linear layer, forward and backward, on drawn operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fp8.testing import oracle
from fp8.testing.strategies import Array, LinearArrays, as_tensor

if TYPE_CHECKING:
    from fp8.targets.base import Target
    from fp8.testing.laws import Judge


#: result of a layer -> the product of its recipe that makes it
PRODUCTS = {"y": "output", "dx": "grad_input", "dw": "grad_weight"}


def accumulation(target: Target, recipe: str, result: str) -> str:
    """How `target` sums the product that makes "y", "dx", "dw" or "db" under `recipe`.

    The bias's gradient and products in high precision keep a float32 accumulator.
    """
    if result not in PRODUCTS:
        return "float32"
    a, _, mode = oracle.RECIPES[recipe][PRODUCTS[result]]
    return "float32" if a is None else target.policy.accumulation[mode]


def judge_exact(
    judge: Judge, target: Target, run: LinearRun, operands: LinearArrays, dtype: str
) -> None:
    """y, dX, dW and db equal float64's result, rounded once, as bits (P05; db P08).

    The sign of a zero sum is left out: it depends on where the sum begins.
    """
    ideal = oracle.exact_linear(operands.x, operands.w, operands.bias, operands.g)
    wanted = {name: getattr(ideal, name) for name in ("y", "dx", "dw", "db")}
    rounded = {n: None if want is None else want.rounded(dtype) for n, want in wanted.items()}
    if operands.bias is not None and target.policy.bias_rounding == "after":
        product = oracle.exact_linear(operands.x, operands.w, None, None).y
        rounded["y"] = oracle.round_to(product.rounded(dtype) + operands.bias, dtype)
    for name, want in rounded.items():
        if want is not None:
            law = "P08" if name == "db" else "P05"
            got = getattr(run, name)
            judge.bitwise(law, f"{name} exact", got + 0, as_tensor(want, dtype, "cpu") + 0)


@dataclass(frozen=True)
class LinearRun:
    """What a layer gave: y (M, N), dx (M, K), dw (N, K), db (N,); None where there is none.

    y and dx are flattened to matrices; `shapes` are those that they came in.
    """

    y: Tensor
    dx: Tensor | None
    dw: Tensor | None
    db: Tensor | None
    shapes: dict[str, tuple[int, ...]]


def make_layer(
    target: Target, recipe: str, weight: Array, bias: Array | None, dtype: str
) -> nn.Module:
    """A converted nn.Linear that holds these values: weight (N, K), bias (N,) or None."""
    rows, columns = weight.shape
    layer = nn.Linear(
        columns, rows, bias is not None, device=target.device, dtype=getattr(torch, dtype)
    )
    with torch.no_grad():
        layer.weight.copy_(as_tensor(weight, dtype, target.device))
        if bias is not None:
            layer.bias.copy_(as_tensor(bias, dtype, target.device))
    # In a container, since what is converted in place needs a parent.
    return target.convert(nn.Sequential(layer), recipe)


def run_linear(
    target: Target,
    recipe: str,
    operands: LinearArrays,
    dtype: str,
    *,
    layout: str = "contiguous",
    leading: tuple[int, ...] | None = None,
) -> LinearRun:
    """One forward and backward pass of a converted layer.

    layout: how x and grad_output lie in memory. leading: the leading dimensions of x, whose product
    is M; (M,) by default.
    """
    layer = make_layer(target, recipe, operands.w, operands.bias, dtype)
    x = as_tensor(operands.x, dtype, target.device, layout)
    g = as_tensor(operands.g, dtype, target.device, layout)
    if leading is not None:
        x, g = x.reshape(*leading, x.shape[1]), g.reshape(*leading, g.shape[1])
    return run_layer(layer, x, g)


def run_layer(layer: nn.Module, x: Tensor, g: Tensor) -> LinearRun:
    """y and the gradients of `layer` at x (..., K) and grad_output g (..., N), as matrices."""
    layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(g.to(y.dtype))
    parameters = dict(layer.named_parameters())

    def grad(name: str) -> Tensor | None:
        owner = next((p for n, p in parameters.items() if n.split(".")[-1] == name), None)
        return None if owner is None else owner.grad

    assert x.grad is not None, "x is a leaf that requires grad"  # noqa: S101 - for the type checker
    shapes = {"y": tuple(y.shape), "dx": tuple(x.grad.shape)}
    y, dx = y.detach(), x.grad
    return LinearRun(
        y.reshape(-1, y.shape[-1]),
        dx.reshape(-1, dx.shape[-1]),
        grad("weight"),
        grad("bias"),
        shapes,
    )
