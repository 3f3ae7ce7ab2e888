"""Which kernels a callable runs on the GPU and for how long, by torch.profiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel (or copy, or fill) that ran, with its begin and end, µs."""

    name: str
    begin_us: float
    end_us: float


def profiled(call: Callable[[], object], calls: int) -> tuple[Kernel, ...]:
    """The kernels of so many calls, in the order in which they began.

    Raises:
        RuntimeError: There were none: nothing ran on the GPU, or it may not be profiled here.
    """
    import torch

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    found = kernels_of(profile.events() or ())
    if not found:
        msg = "the profiler saw no kernel: the callable runs none, or CUPTI is not allowed here"
        raise RuntimeError(msg)
    return found


def kernels_of(events: Iterable[Any]) -> tuple[Kernel, ...]:
    """The kernels among the profiler's events.

    Ranges that people name (record_function) are shown on the GPU's time line, too; they reach
    across the gaps between kernels.
    """
    kernels = [
        Kernel(event.name, float(event.time_range.start), float(event.time_range.end))
        for event in events
        if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
    ]
    return tuple(sorted(kernels, key=lambda kernel: kernel.begin_us))


def busy_us(kernels: Iterable[Kernel]) -> float:
    """How long at least one of them ran, µs: kernels of several streams overlap."""
    total, end = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.begin_us):
        total += max(0.0, kernel.end_us - max(kernel.begin_us, end))
        end = max(end, kernel.end_us)
    return total
