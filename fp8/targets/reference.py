"""The reference implementation as a target, one for each backend of its products."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fp8 import conversion, matmul, quantize
from fp8.formats import FORMATS, Format
from fp8.quantize import HIGH_PRECISION, Operand, Quantized
from fp8.recipes import RECIPES, Recipe
from fp8.regimes import RegimeWarning
from fp8.scaling import GRANULARITIES, SCALE_RULES
from fp8.targets.base import AccumulationModel, Capabilities, Policy

if TYPE_CHECKING:
    from fp8.matmul import Backend


@dataclass
class ReferenceTarget:
    """`fp8` itself, with one backend for its products."""

    backend: Backend
    device: torch.device
    name: str = field(init=False)
    policy: Policy = field(init=False)

    def __post_init__(self) -> None:
        self.name = f"reference[{self.backend}]"
        self.policy = Policy(
            # e8m0fnu is for scales: infinity has no scale.
            overflow={name: "nan" if name == "e8m0fnu" else "saturate" for name in FORMATS},
            bias_rounding="before",
            accumulation=_accumulation(self.backend, self.device),
        )

    def capabilities(self) -> Capabilities:
        """Everything: the emulated backend on any device, torch's where its operator does."""
        return self._capabilities

    @cached_property
    def _capabilities(self) -> Capabilities:
        elements = [f for f in FORMATS.values() if f.name != "e8m0fnu"]
        operands = frozenset(
            Operand(fmt, granularity, rule)
            for fmt in elements
            for granularity in GRANULARITIES.values()
            for rule in SCALE_RULES.values()
        )
        return Capabilities(
            formats=frozenset(FORMATS),
            operands=operands,
            products=frozenset(
                (a, b)
                for a in operands
                for b in operands
                if a.rule == b.rule
                and matmul.supports(a, b, backend=self.backend, device=self.device)
            ),
            recipes=frozenset(name for name, r in RECIPES.items() if self._runs(r)),
            dtypes=frozenset(HIGH_PRECISION),
            bias_dtypes=frozenset(HIGH_PRECISION),
            reports_conversion=True,
            refuses_bad_input=True,
        )

    def _runs(self, recipe: Recipe) -> bool:
        products = (recipe.output, recipe.grad_input, recipe.grad_weight)
        return all(
            p.a is None
            or p.b is None
            or matmul.supports(p.a, p.b, backend=self.backend, device=self.device)
            for p in products
        )

    def cast(self, x: Tensor, format: Format) -> Tensor:
        """`fp8.quantize.cast`."""
        return quantize.cast(x, format)

    def quantize(self, x: Tensor, operand: Operand) -> Quantized:
        """`fp8.quantize.quantize`."""
        return quantize.quantize(x, operand)

    def scaled_mm(
        self,
        a: Quantized,
        b: Quantized,
        *,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        accumulation: str,
    ) -> Tensor:
        """`fp8.matmul.scaled_mm`."""
        return matmul.scaled_mm(
            a,
            b,
            bias=bias,
            out_dtype=out_dtype,
            accumulation=accumulation,  # type: ignore[arg-type]  # it is checked there
            backend=self.backend,
        )

    def convert(self, module: nn.Module, recipe: str) -> nn.Module:
        """`fp8.convert`, in place."""
        # The suite's layers are tiny on purpose: how slow they would be is not what is judged.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RegimeWarning)
            conversion.convert(module, recipe, backend=self.backend)
        return module


def _accumulation(backend: Backend, device: torch.device) -> dict[str, AccumulationModel]:
    if backend == "emulated":
        return {"fast": "float64", "precise": "float64"}
    return torch_accumulation(device)


def torch_accumulation(device: torch.device) -> dict[str, AccumulationModel]:
    """How `torch._scaled_mm` sums on `device`."""
    if device.type == "cpu":
        return {"fast": "cpu_scaled_mm", "precise": "cpu_scaled_mm"}
    if torch.cuda.get_device_capability(device)[0] == 9:
        return {"fast": "hopper_fast", "precise": "hopper_precise"}
    return {"fast": "float32", "precise": "float32"}


def emulated(device: torch.device) -> ReferenceTarget:
    """The target `reference[emulated]`."""
    return ReferenceTarget("emulated", device)


def torch_backend(device: torch.device) -> ReferenceTarget:
    """The target `reference[torch]`."""
    return ReferenceTarget("torch", device)
