"""What an implementation under test looks like: the target protocol and the types it speaks in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor, nn

    from fp8.formats import Format
    from fp8.quantize import Operand, Quantized

#: how a target sums; each has its own error bound, derived in fp8/testing/bounds.py
AccumulationModel = Literal[
    "float64",  # emulation
    "float32",  # one float32 accumulator, any order
    "cpu_scaled_mm",  # the same, with the scales multiplied into the operands first
    "hopper_fast",  # Hopper's tensor-core accumulator throughout
    "hopper_precise",  # the same, promoted to float32 every 128 values
]


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Where correct stacks legitimately differ: what this one does, so that it can be asserted."""

    #: format name -> what `cast` makes of overflow and infinity: "saturate", "nan" or "inf"
    overflow: Mapping[str, str]
    #: whether the bias is added before the output's one rounding, or to the rounded output
    bias_rounding: Literal["before", "after"] = "before"
    #: accumulation mode ("fast", "precise") -> how it sums
    accumulation: Mapping[str, AccumulationModel] = field(
        default_factory=lambda: {"fast": "float32", "precise": "float32"}
    )


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a target can do on its device. A test asks before it calls; a lie is a failure."""

    #: names of the formats that `cast` takes
    formats: frozenset[str] = frozenset()
    #: operands that `quantize` takes
    operands: frozenset[Operand] = frozenset()
    #: pairs of operands that `scaled_mm` multiplies, a x b, contraction last
    products: frozenset[tuple[Operand, Operand]] = frozenset()
    #: names of the recipes that `convert` takes
    recipes: frozenset[str] = frozenset()
    #: dtypes of inputs, parameters and outputs
    dtypes: frozenset[torch.dtype] = frozenset()
    #: (bias's and output's) dtypes that `scaled_mm` takes a bias for
    bias_dtypes: frozenset[torch.dtype] = frozenset()
    #: what K and N of `scaled_mm` must be multiples of (M is free), and M, K and N of a converted
    #: layer, whose backward contracts over M
    alignment: int = 1
    #: products run in kernels that torch's dispatcher does not see, so that nothing can trace them
    hidden_products: bool = False
    #: the report of `convert` says what was converted and why not
    reports_conversion: bool = False
    #: bad input is refused with an error that names the argument
    refuses_bad_input: bool = False


@dataclass(frozen=True)
class ProductTrace:
    """One matrix product that really ran."""

    #: torch dtype names of the operands, e.g. "float8_e4m3fn" or "bfloat16"
    a: str
    b: str
    #: "fast", "precise" or "" for a product in high precision
    accumulation: str
    #: the shape of the output
    shape: tuple[int, ...]
    #: name of the operator, or of the kernel on a GPU
    operator: str


@runtime_checkable
class Target(Protocol):
    """An implementation under test.

    Every operation is optional: one that `capabilities` does not declare is never called, and the
    tests that need it are skipped by capability. Tensors come and go on the target's device.
    """

    name: str
    device: torch.device
    policy: Policy

    def capabilities(self) -> Capabilities:
        """What this target can do on its device."""

    def cast(self, x: Tensor, format: Format) -> Tensor:
        """Round x (any shape) to float8 without a scale; returns the format's dtype."""

    def quantize(self, x: Tensor, operand: Operand) -> Quantized:
        """Codes and dequantising float32 scales of x (rows, columns): x ~ codes * scale."""

    def scaled_mm(
        self,
        a: Quantized,
        b: Quantized,
        *,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        accumulation: str,
    ) -> Tensor:
        """a (M, K) . b (N, K)^T + bias (N,), in out_dtype (M, N)."""

    def convert(self, module: nn.Module, recipe: str) -> nn.Module:
        """A converted copy of the module, or the module itself, converted in place."""
