"""Which matrix products really ran, with their operands: seen through torch's dispatcher.

An operator is recorded where it reaches the dispatcher, so a stack is traced whatever Python it is
made of, forward and backward. Products inside a custom operator are that operator's own business:
`fp8::scaled_mm` is one product, whatever its backend does. So are products of kernels that are
launched past the dispatcher: such a target declares `Capabilities.hidden_products`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8.targets.base import ProductTrace

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


class _Operands(NamedTuple):
    """What a product multiplied; both operands lie with the contraction last, (..., M or N, K)."""

    a: Tensor
    b: Tensor
    accumulation: str = ""
    a_scale: Tensor | None = None
    b_scale: Tensor | None = None


@dataclass(frozen=True, eq=False)
class RecordedProduct:
    """One product: what `trace` says, and the tensors.

    a: (M, K) and b: (N, K), float8 codes or high precision, the contraction last whatever the
    operator wants. a_scale, b_scale: the dequantising scales that the operator was given, in the
    layout of a and b ((1, 1) or () for a tensor, (rows, 1) for rows); None in high precision.
    output: (M, N).
    """

    trace: ProductTrace
    a: Tensor
    b: Tensor
    a_scale: Tensor | None
    b_scale: Tensor | None
    output: Tensor


def trace_products(fn: Callable[[], object]) -> list[ProductTrace]:
    """Run `fn` and list its matrix products, in the order in which they ran."""
    return [product.trace for product in record_products(fn)[1]]


def record_products(fn: Callable[[], Any]) -> tuple[Any, list[RecordedProduct]]:
    """Run `fn`; returns what it returned, and its products in the order in which they ran."""
    with _Recorder() as recorder:
        value = fn()
    return value, recorder.products


def is_product(operator: str) -> bool:
    """Whether an operator, by its schema's name, multiplies matrices."""
    return operator in _READERS


def product_of(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
) -> RecordedProduct | None:
    """A call as the product that it is, or None; the tensors may be fake ones of a graph."""
    schema = func._schema  # noqa: SLF001 - the only way to the arguments' names
    reader = _READERS.get(schema.name)
    if reader is None:
        return None
    return _recorded(schema.name, reader(_arguments(schema, args, kwargs)), out)


class OperatorWatch(TorchDispatchMode):
    """Calls `saw` for every operator that ran on plain tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, then look at it."""
        if any(t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for t in types):  # type: ignore[attr-defined]
            # A tensor subclass takes the operator apart: what it calls comes here again.
            return NotImplemented
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.saw(func, args, kwargs, out)
        return out

    def saw(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """One call and what it returned."""
        raise NotImplementedError


class _Recorder(OperatorWatch):
    def __init__(self) -> None:
        super().__init__()
        self.products: list[RecordedProduct] = []

    def saw(
        self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        product = product_of(func, args, kwargs, out)
        if product is not None:
            self.products.append(product)


def _recorded(operator: str, operands: _Operands, out: Tensor) -> RecordedProduct:
    trace = ProductTrace(
        a=_dtype_name(operands.a),
        b=_dtype_name(operands.b),
        accumulation=operands.accumulation,
        shape=tuple(out.shape),
        operator=operator,
    )
    return RecordedProduct(
        trace, operands.a, operands.b, operands.a_scale, operands.b_scale, out.detach()
    )


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _arguments(
    schema: torch._C.FunctionSchema, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Every argument of a call by its name in the schema, defaults included."""
    given = {spec.name: value for spec, value in zip(schema.arguments, args, strict=False)}
    defaults = {s.name: s.default_value for s in schema.arguments if s.has_default_value()}
    return defaults | given | kwargs


# --- what each operator calls its operands ------------------------------------------------------


def _reference(call: dict[str, Any]) -> _Operands:
    return _Operands(call["a"], call["b"], call["accumulation"], call["a_scale"], call["b_scale"])


def _scaled_mm(call: dict[str, Any]) -> _Operands:
    a_scale, b_scale = call["scale_a"], call["scale_b"]
    # The functional form takes lists: one level of scales each, for float8.
    a_scale, b_scale = (s[0] if isinstance(s, list) else s for s in (a_scale, b_scale))
    return _Operands(
        call["self"],
        call["mat2"].t(),
        "fast" if call["use_fast_accum"] else "precise",
        a_scale,
        b_scale.t() if b_scale.dim() == 2 else b_scale,
    )


def _pair(a: str, b: str) -> Callable[[dict[str, Any]], _Operands]:
    def reader(call: dict[str, Any]) -> _Operands:
        return _Operands(call[a], call[b].transpose(-2, -1))

    return reader


def _linear(call: dict[str, Any]) -> _Operands:
    return _Operands(call["input"], call["weight"])


_READERS: dict[str, Callable[[dict[str, Any]], _Operands]] = {
    "fp8::scaled_mm": _reference,
    "aten::_scaled_mm": _scaled_mm,
    "aten::_scaled_mm_v2": _scaled_mm,
    "aten::mm": _pair("self", "mat2"),
    "aten::addmm": _pair("mat1", "mat2"),
    "aten::bmm": _pair("self", "mat2"),
    "aten::baddbmm": _pair("batch1", "batch2"),
    # Under inference_mode nothing takes these two apart before they come here.
    "aten::matmul": _pair("self", "other"),
    "aten::linear": _linear,
}
