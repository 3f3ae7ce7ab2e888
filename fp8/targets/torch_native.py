"""torch's own operators as a target: casts and scaled products; it has neither amax nor layers.

Tensorwise and rowwise products only: blockwise ones want rows, blocks and scales padded by their
caller, and are judged through `reference[torch]`, which does that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import torch
from packaging.version import Version
from torch import Tensor
from torch.nn import functional

from fp8.formats import E4M3FN, E5M2, FORMATS, Format
from fp8.matmul import cpu_multiplies_rowwise
from fp8.quantize import HIGH_PRECISION, Operand, Quantized
from fp8.scaling import (
    ROWWISE,
    SCALE_RULES,
    TENSORWISE,
    Granularity,
)
from fp8.targets.base import Capabilities, Policy
from fp8.targets.reference import torch_accumulation

#: e4m3fn overflow and infinity became NaN before this version and +-448 since: pytorch#178817
_SATURATES_SINCE = Version("2.12.dev0")
#: cuBLASLt takes K and N in multiples of 16 (ScaledBlas.cpp); the CPU kernel takes any
_CUDA_ALIGNMENT = 16

_PAIRS: tuple[tuple[Granularity, Granularity], ...] = (
    (TENSORWISE, TENSORWISE),
    (ROWWISE, ROWWISE),
)


@dataclass
class TorchTarget:
    """`Tensor.to`, `torch._scaled_mm` and `torch.nn.functional.scaled_mm`, with nothing around."""

    device: torch.device
    name: str = "torch"
    policy: Policy = field(init=False)

    def __post_init__(self) -> None:
        self.policy = Policy(
            overflow=_overflow(Version(torch.__version__)),
            bias_rounding="before",
            accumulation=torch_accumulation(self.device),
        )

    def capabilities(self) -> Capabilities:
        """What this torch multiplies on the device."""
        cuda = self.device.type == "cuda"
        # CUDA adds a bias to 16-bit outputs only, and its rowwise and blockwise kernels were not
        # seen to write float16.
        return Capabilities(
            formats=frozenset(FORMATS),
            products=self._products(),
            dtypes=frozenset((torch.bfloat16, torch.float32) if cuda else HIGH_PRECISION),
            bias_dtypes=frozenset((torch.bfloat16,) if cuda else HIGH_PRECISION),
            alignment=_CUDA_ALIGNMENT if cuda else 1,
        )

    def _products(self) -> frozenset[tuple[Operand, Operand]]:
        if self.device.type == "cuda":
            capability = torch.cuda.get_device_capability(self.device)
            if capability < (8, 9):
                return frozenset()
            formats: tuple[tuple[Format, Format], ...] = (
                (E4M3FN, E4M3FN),
                (E5M2, E4M3FN),
                (E4M3FN, E5M2),
            )
        else:
            elements = [f for f in FORMATS.values() if f.mantissa_bits > 0]
            formats = tuple(product(elements, elements))
        rowwise = self.device.type == "cuda" or cpu_multiplies_rowwise()
        pairs = _PAIRS if rowwise else _PAIRS[:1]
        # The rule made the scale; a product does not know it.
        return frozenset(
            (Operand(a, left, rule), Operand(b, right, rule))
            for (a, b), (left, right) in product(formats, pairs)
            for rule in SCALE_RULES.values()
        )

    def cast(self, x: Tensor, format: Format) -> Tensor:
        """torch's own conversion: see the policy for its overflow."""
        return x.to(format.dtype)

    def scaled_mm(
        self,
        a: Quantized,
        b: Quantized,
        *,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        accumulation: str,
    ) -> Tensor:
        """a (M, K) . b (N, K)^T + bias, in `out_dtype`; torch's errors come through as they are."""
        fast = accumulation == "fast"
        a_codes, b_codes = _row_major(a.codes), _row_major(b.codes).t()
        a_scale, b_scale = _laid_out_scale(a), _laid_out_scale(b).t()
        if hasattr(torch, "_scaled_mm"):
            return torch._scaled_mm(  # noqa: SLF001 - the only name that every version has
                a_codes,
                b_codes,
                scale_a=a_scale,
                scale_b=b_scale,
                bias=bias,
                out_dtype=out_dtype,
                use_fast_accum=fast,
            )
        how = _scaling_type(a.operand.granularity)
        out: Tensor = functional.scaled_mm(
            a_codes,
            b_codes,
            scale_a=a_scale,
            scale_recipe_a=how,
            scale_b=b_scale,
            scale_recipe_b=how,
            bias=bias,
            output_dtype=out_dtype,
            use_fast_accum=fast,
        )
        return out


def _overflow(version: Version) -> dict[str, str]:
    return {
        "e4m3fn": "saturate" if version >= _SATURATES_SINCE else "nan",
        "e5m2": "inf",
        "e4m3fnuz": "nan",
        "e5m2fnuz": "nan",
        "e8m0fnu": "nan",
    }


def _scaling_type(granularity: Granularity) -> functional.ScalingType:
    types = functional.ScalingType
    return types.TensorWise if granularity == TENSORWISE else types.RowWise


def _laid_out_scale(operand: Quantized) -> Tensor:
    # (rows, 1) with strides (1, 1): a stride of 0 along the one column is refused, too.
    return operand.scale.reshape(-1).contiguous()[:, None]


def _row_major(codes: Tensor) -> Tensor:
    """Codes as cuBLASLt takes them: rows one after the other, from a multiple of 16 bytes."""
    # A single row counts as contiguous whatever its stride says, and cuBLASLt reads the stride.
    codes = codes.contiguous().view(-1).view(codes.shape)
    return codes if codes.storage_offset() % 16 == 0 else codes.clone()


def target(device: torch.device) -> TorchTarget:
    """The target `torch`."""
    return TorchTarget(device)
