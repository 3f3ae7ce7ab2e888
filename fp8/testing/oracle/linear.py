"""Products, the recipes' own table, and the linear layer with its gradients, in float64."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from .formats import F32, F64, Array, Codes, quiet, round_to
from .scales import Block, dequantize, need_matrix, quantize

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

OperandSpec = tuple[str, Block, str, bool]
"""(format, block, scale rule, power of two)."""
ProductSpec = tuple[OperandSpec | None, OperandSpec | None, str]
"""(operand a, operand b, accumulation mode); None is high precision."""


@dataclass(frozen=True, eq=False)
class Exact:
    """A float64 result before it is rounded to the compute dtype."""

    value: F64
    _magnitude: Callable[[], F64] = field(repr=False)

    @functools.cached_property
    def magnitude(self) -> F64:
        """The same sum over absolute values: what an accumulation error is proportional to."""
        with np.errstate(all="ignore"):
            return self._magnitude()

    def rounded(self, dtype: str) -> F64:
        """`value` rounded once to `dtype`."""
        return round_to(self.value, dtype)


@dataclass(frozen=True, eq=False)
class Quantized:
    """One operand of one product, laid out with the contraction last."""

    codes: Codes
    scale: F32
    fmt: str
    block: Block

    def dequantize(self) -> F64:
        """The values that the product sees."""
        return dequantize(self.codes, self.scale, self.fmt, self.block)


Operands = tuple[Quantized | None, Quantized | None]


@dataclass(frozen=True, eq=False)
class LinearResult:
    """A linear layer's output (M, N) and gradients dx (M, K), dw (N, K), db (N,).

    `operands` maps "output", "grad_input", "grad_weight" to the two quantised operands of that
    product, None where it is in high precision. Gradients are None without a grad_output; db also
    without a bias.
    """

    y: Exact
    dx: Exact | None
    dw: Exact | None
    db: Exact | None
    operands: Mapping[str, Operands]


@quiet
def product(a: Array, b: Array) -> tuple[F64, F64]:
    """(a @ b.T, |a| @ |b|.T) in float64, for a (M, K) and b (N, K)."""
    exact = _product(np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64))
    return exact.value, exact.magnitude


def _product(a: F64, b: F64) -> Exact:
    need_matrix(a, "a")
    need_matrix(b, "b")
    if a.shape[1] != b.shape[1]:
        msg = f"a has shape {a.shape} and b {b.shape}, need equal last dimensions"
        raise ValueError(msg)
    return Exact(a @ b.T, lambda: np.asarray(np.abs(a) @ np.abs(b).T))


_WHOLE: Block = (None, None)
_ROW: Block = (1, None)
_STRIP: Block = (1, 128)
_TILE: Block = (128, 128)
_E4M3: OperandSpec = ("e4m3fn", _WHOLE, "torchao", False)
_E5M2: OperandSpec = ("e5m2", _WHOLE, "torchao", False)
_E4M3_POW2: OperandSpec = ("e4m3fn", _WHOLE, "torchao", True)
_E4M3_ROW: OperandSpec = ("e4m3fn", _ROW, "torchao", True)
_E4M3_STRIP: OperandSpec = ("e4m3fn", _STRIP, "torchao", False)
_E4M3_TILE: OperandSpec = ("e4m3fn", _TILE, "torchao", False)

RECIPES: Mapping[str, Mapping[str, ProductSpec]] = MappingProxyType(
    {
        "tensorwise": {
            "output": (_E4M3, _E4M3, "fast"),
            "grad_input": (_E5M2, _E4M3, "precise"),
            "grad_weight": (_E5M2, _E4M3, "precise"),
        },
        "rowwise": {
            "output": (_E4M3_ROW, _E4M3_ROW, "fast"),
            "grad_input": (_E4M3_ROW, _E4M3_ROW, "precise"),
            "grad_weight": (_E4M3_ROW, _E4M3_ROW, "precise"),
        },
        "rowwise_with_gw_hp": {
            "output": (_E4M3_ROW, _E4M3_ROW, "fast"),
            "grad_input": (_E4M3_ROW, _E4M3_POW2, "precise"),
            "grad_weight": (None, None, "precise"),
        },
        "blockwise": {
            "output": (_E4M3_STRIP, _E4M3_TILE, "precise"),
            "grad_input": (_E4M3_STRIP, _E4M3_TILE, "precise"),
            "grad_weight": (_E4M3_STRIP, _E4M3_STRIP, "precise"),
        },
    }
)
"""Recipe → product → operands and accumulation, each operand laid out with the contraction last.

Products are a @ b.T with, for M tokens, K inputs and N outputs: output a = x (M, K), b = W (N, K);
grad_input a = g (M, N), b = W.T (K, N); grad_weight a = g.T (N, M), b = x.T (K, M). The
accumulation mode is the target's business: float64 has no modes.
"""


def _specs(recipe: str) -> Mapping[str, ProductSpec]:
    if recipe not in RECIPES:
        msg = f"recipe is {recipe!r}, need one of {', '.join(RECIPES)}"
        raise ValueError(msg)
    return RECIPES[recipe]


def _check(x: Array, w: Array, bias: Array | None, g: Array | None) -> None:
    need_matrix(x, "x")
    need_matrix(w, "w")
    if x.shape[1] != w.shape[1]:
        msg = f"x has shape {x.shape} and w {w.shape}, need equal last dimensions"
        raise ValueError(msg)
    if bias is not None and bias.shape != w.shape[:1]:
        msg = f"bias has shape {bias.shape}, need {w.shape[:1]}"
        raise ValueError(msg)
    if g is not None and g.shape != (len(x), len(w)):
        msg = f"g has shape {g.shape}, need {(len(x), len(w))}"
        raise ValueError(msg)


def _scaled_product(spec: ProductSpec, a: Array, b: Array, dtype: str) -> tuple[Exact, Operands]:
    values: list[F64] = []
    operands: list[Quantized | None] = []
    for x, operand in zip((a, b), spec[:2], strict=True):
        if operand is None:
            operands.append(None)
            values.append(round_to(x, dtype))
        else:
            quantized = Quantized(*quantize(x, *operand), fmt=operand[0], block=operand[1])
            operands.append(quantized)
            values.append(quantized.dequantize())
    return _product(*values), (operands[0], operands[1])


@quiet
def linear_output(
    x: Array,
    w: Array,
    bias: Array | None,
    recipe: str,
    *,
    dtype: str,
    bias_rounding: str = "before",
) -> tuple[Exact, Operands]:
    """The output of `linear` alone, and the operands of its product."""
    spec = _specs(recipe)["output"]
    if bias_rounding not in ("before", "after"):
        msg = f"bias_rounding is {bias_rounding!r}, need before or after"
        raise ValueError(msg)
    y, operands = _scaled_product(spec, _narrow(x, dtype), w, dtype)
    if bias is not None:
        y = _add_bias(y, round_to(bias, dtype), dtype if bias_rounding == "after" else None)
    return y, operands


def _narrow(x: Array, dtype: str) -> F32:
    return round_to(x, dtype).astype(np.float32)


def _add_bias(y: Exact, bias: F64, rounded_first_to: str | None) -> Exact:
    value = y.value if rounded_first_to is None else y.rounded(rounded_first_to)
    return Exact(value + bias, lambda: y.magnitude + np.abs(bias))


@quiet
def linear_gradients(
    x: Array, w: Array, g: Array, recipe: str, *, dtype: str
) -> tuple[Exact, Exact, Exact, Mapping[str, Operands]]:
    """The gradients of `linear` alone: dx, dw, db and the operands of both products."""
    specs = _specs(recipe)
    x, g = _narrow(x, dtype), _narrow(g, dtype)
    dx, grad_input = _scaled_product(specs["grad_input"], g, w.T, dtype)
    dw, grad_weight = _scaled_product(specs["grad_weight"], g.T, x.T, dtype)
    return dx, dw, _sum_tokens(g), {"grad_input": grad_input, "grad_weight": grad_weight}


def _sum_tokens(g: Array) -> Exact:
    g = g.astype(np.float64)
    return Exact(g.sum(axis=0), lambda: np.asarray(np.abs(g).sum(axis=0)))


def linear(
    x: Array,
    w: Array,
    bias: Array | None,
    g: Array | None,
    recipe: str,
    *,
    dtype: str,
    bias_rounding: str = "before",
) -> LinearResult:
    """A linear layer's output and gradients under `recipe`, each before its rounding to `dtype`.

    x (M, K) and grad_output g (M, N) are rounded to the compute `dtype` first, as autocast does;
    the weight w (N, K) is quantised from its own values; the bias (N,) is rounded to `dtype`. A
    high-precision operand is in `dtype`. With `bias_rounding` "before" the bias is added to the
    unrounded product, with "after" to the product rounded to `dtype`: `y.rounded(dtype)` is the
    layer's output either way (but after "after" an accumulation error may also have turned the
    first rounding: up to 2·u·|product| more).
    """
    _check(x, w, bias, g)
    y, output = linear_output(x, w, bias, recipe, dtype=dtype, bias_rounding=bias_rounding)
    operands = {"output": output}
    if g is None:
        return LinearResult(y, None, None, None, operands)
    dx, dw, db, others = linear_gradients(x, w, g, recipe, dtype=dtype)
    return LinearResult(y, dx, dw, None if bias is None else db, operands | dict(others))


@quiet
def exact_linear(x: Array, w: Array, bias: Array | None, g: Array | None) -> LinearResult:
    """The same layer without any rounding: float64 on the values as given."""
    _check(x, w, bias, g)
    x, w = np.asarray(x, dtype=np.float64), np.asarray(w, dtype=np.float64)
    y = _product(x, w)
    if bias is not None:
        y = _add_bias(y, np.asarray(bias, dtype=np.float64), None)
    if g is None:
        return LinearResult(y, None, None, None, {})
    g = np.asarray(g, dtype=np.float64)
    db = None if bias is None else _sum_tokens(g)
    return LinearResult(y, _product(g, w.T), _product(g.T, x.T), db, {})


def bf16_linear(x: Array, w: Array, bias: Array | None, g: Array | None) -> LinearResult:
    """The bfloat16 baseline: inputs rounded to bfloat16, float64 sums, results rounded once."""

    def narrow(tensor: Array | None) -> Array | None:
        return None if tensor is None else round_to(tensor, "bfloat16")

    def rounded(exact: Exact | None) -> Exact | None:
        return None if exact is None else replace(exact, value=exact.rounded("bfloat16"))

    wide = exact_linear(round_to(x, "bfloat16"), round_to(w, "bfloat16"), narrow(bias), narrow(g))
    y = replace(wide.y, value=wide.y.rounded("bfloat16"))
    return LinearResult(y, rounded(wide.dx), rounded(wide.dw), rounded(wide.db), {})
