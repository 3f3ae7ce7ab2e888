"""What the kernels' names say: that products ran in float8, and where the time went.

Names are what the profiler shows. A float8 product is one of:

- cuBLASLt on Hopper: ``nvjet_sm90_qqtst_…``, a letter for each operand: q is e4m3, r is e5m2,
  t bfloat16, h float16, s float32 (seen on an H200 with torch 2.11 and CUDA 13);
- cuBLASLt before that, and CUTLASS: the formats in words, ``sm90_xmma_gemm_e4m3bf16_e4m3f32_…``,
  ``cutlass::device_kernel<…float_e4m3_t…>``;
- a Triton kernel that says so: ``…scaled_mm…`` of a template, DeepGEMM's ``fp8_gemm…``.

Casts have such words in their names, too (``float8_copy_kernel``, ``Float8_e4m3fn``), and are no
products: a kernel is a product first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8.testing.timing.kernels import busy_us

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fp8.testing.timing.kernels import Kernel

#: Elementwise kernels and reductions of torch and of Inductor; what gathers the parts of a split
#: product; attention, whose products are never in float8 here.
_NO_PRODUCT = re.compile(
    r"at::native::|^triton_(poi|red|per|for)_|reduce|sdpa|flash|fmha|attention", re.IGNORECASE
)
_PRODUCT = re.compile(
    r"nvjet|gemm|gmma|cutlass|xmma|cublas|scaled_mm|triton_(tem|mm)", re.IGNORECASE
)
_FLOAT8 = re.compile(
    r"nvjet_(sm\d+[a-z]?_)?[qr]{2}|e4m3|e5m2|float8|fp8|f8f6f4|qgmma|scaled_mm", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where the GPU's time for one call went.

    Attributes:
        float8_us: In float8 products, µs.
        product_us: In other products.
        rest_us: In everything else that ran: quantising, norms, updates.
        float8: How many float8 products ran.
        products: How many others.
        kernels: How many kernels in all.
        names: The products' names, shortened, each with how often it ran.
    """

    float8_us: float
    product_us: float
    rest_us: float
    float8: float
    products: float
    kernels: float
    names: tuple[tuple[str, int], ...]


def is_product(name: str) -> bool:
    """Whether a kernel multiplies matrices."""
    return bool(_PRODUCT.search(name)) and not _NO_PRODUCT.search(name)


def is_float8_product(name: str) -> bool:
    """Whether a kernel multiplies float8 matrices."""
    return is_product(name) and bool(_FLOAT8.search(name))


def breakdown(kernels: Sequence[Kernel], calls: int) -> Breakdown:
    """Sort the kernels of so many calls."""
    float8 = [k for k in kernels if is_float8_product(k.name)]
    others = [k for k in kernels if is_product(k.name) and not is_float8_product(k.name)]
    float8_us, product_us = _total_us(float8), _total_us(others)
    names: dict[str, int] = {}
    for kernel in (*float8, *others):
        names[_short(kernel.name)] = names.get(_short(kernel.name), 0) + 1
    return Breakdown(
        float8_us=float8_us / calls,
        product_us=product_us / calls,
        rest_us=max(0.0, busy_us(kernels) - float8_us - product_us) / calls,
        float8=len(float8) / calls,
        products=len(others) / calls,
        kernels=len(kernels) / calls,
        names=tuple(names.items()),
    )


def _total_us(kernels: Sequence[Kernel]) -> float:
    return sum(kernel.end_us - kernel.begin_us for kernel in kernels)


def _short(name: str) -> str:
    """Enough of a name to know the kernel: CUTLASS's have a thousand characters."""
    return name if len(name) <= 100 else f"{name[:60]}…{name[-39:]}"
