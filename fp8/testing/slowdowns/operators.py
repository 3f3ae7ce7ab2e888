"""Operators that cost time and change nothing: opaque, so that no compiler removes the cost.

Each takes the scales of a step, which are few, and returns a copy: a compiler keeps an operator
whose result is used, and puts it where the scales are made.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fp8.formats import E4M3FN

#: What the wait is a share of, at most. No GPU is idle for so long between two casts of one case,
#: but it is between two cases: a share of that says nothing about a case.
LIMIT_NS = 100_000_000
_BLOCK = 1024


@torch.library.custom_op(
    "fp8_slowdowns::wait", mutates_args=(), schema="(Tensor scales, int permille) -> Tensor"
)
def wait(scales: Tensor, permille: int) -> Tensor:
    """Wait on the device for `permille` of the time since it last ended. A CPU does not wait."""
    if not scales.is_cuda:
        return scales.clone(memory_format=torch.contiguous_format)
    from fp8.testing.slowdowns.waiting import wait_and_copy

    source = scales.contiguous()
    target = torch.empty_like(source)
    programs = -(-source.numel() // _BLOCK)
    wait_and_copy[(programs,)](
        source,
        target,
        _ended(source.device),
        source.numel(),
        permille,
        LIMIT_NS,
        _BLOCK,
        num_warps=1,
    )
    return target


@cache
def _ended(device: torch.device) -> Tensor:
    """When the last wait on a device ended, kept there: a captured graph writes and reads it."""
    return torch.zeros(1, dtype=torch.int64, device=device)


@torch.library.custom_op(
    "fp8_slowdowns::cast_again", mutates_args=(), schema="(Tensor scales, Tensor x) -> Tensor"
)
def cast_again(scales: Tensor, x: Tensor) -> Tensor:
    """Cast x (any shape) to float8 in one kernel, and throw the codes away."""
    x.to(E4M3FN.dtype)
    return scales.clone(memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "fp8_slowdowns::synchronize", mutates_args=(), schema="(Tensor scales) -> Tensor"
)
def synchronize(scales: Tensor) -> Tensor:
    """Let the host wait until the GPU has done all that is queued. A CPU has nothing queued.

    Raises:
        RuntimeError: A graph is being captured. CUDA would refuse, too, and spoil the capture.
    """
    if scales.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a host that waits can't be captured")
        torch.cuda.synchronize(scales.device)
    return scales.clone(memory_format=torch.contiguous_format)


@wait.register_fake
def _(scales: Tensor, permille: int) -> Tensor:
    return _copy(scales)


@cast_again.register_fake
def _(scales: Tensor, x: Tensor) -> Tensor:
    return _copy(scales)


@synchronize.register_fake
def _(scales: Tensor) -> Tensor:
    return _copy(scales)


def _copy(scales: Tensor) -> Tensor:
    return torch.empty_like(scales, memory_format=torch.contiguous_format)
