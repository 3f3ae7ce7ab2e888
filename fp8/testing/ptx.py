"""What Triton makes of a kernel for a chosen NVIDIA GPU, on a machine that has none.

Triton compiles to PTX without a device, so that a machine in CI can see which instructions a cast
or a product becomes on Ada, Hopper and Blackwell.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

#: threads of a warp, on every NVIDIA GPU
_WARP = 32


def compiled(
    kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any], architecture: int
) -> str:
    """The PTX of a Triton kernel.

    Args:
        kernel: What ``@triton.jit`` made.
        signature: Triton's type of each argument, such as ``*fp8e4nv``; "constexpr" for constants.
        constants: The values of these.
        architecture: 89 (Ada), 90 (Hopper) or 100 (Blackwell).

    Raises:
        ModuleNotFoundError: Triton is not installed.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn=kernel, signature=dict(signature), constexprs=dict(constants))
    found = triton.compile(source, target=GPUTarget("cuda", architecture, _WARP))
    ptx: str = found.asm["ptx"]
    return ptx


def conversions(ptx: str) -> set[str]:
    """The kinds of conversions that PTX has, such as ``cvt.rn.satfinite.e4m3x2.f32``."""
    return set(re.findall(r"\bcvt\.[\w.]+", ptx))


def products(ptx: str) -> set[str]:
    """The kinds of matrix instructions that PTX has."""
    return set(re.findall(r"\b(?:wgmma\.mma_async|tcgen05\.mma|mma\.sync)[\w.:]*", ptx))
