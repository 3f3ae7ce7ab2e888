"""For users: measure callables side by side and see what is faster, and whether that is sure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8.testing.timing.plan import Plan
from fp8.testing.timing.protocol import measure
from fp8.testing.timing.report import Report, rendered, reported

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fp8.testing.timing.cuda import CudaDevice


def compare(
    callables: Mapping[str, Callable[[], object]],
    *,
    plan: Plan | None = None,
    device: CudaDevice | None = None,
    show: bool = True,
) -> Report:
    """Measure callables on the GPU, interleaved, and print the table.

    A callable takes no arguments and does the whole of what is to be timed: one training step with
    zero_grad, forward, backward and update, or one product. It is called many times and may be
    compiled or not. Give it random data and a random upstream gradient: constant data runs up to
    17 % faster at the power limit. Kernels whose operands fit into L2 need `rotated` operands.

    Args:
        callables: By name; the first is what the others are compared with.
        plan: How much to measure; ``Plan()`` when left out.
        device: A GPU that is open already; the current one is opened when left out.
        show: Whether to print the report.

    Returns:
        The report: ``str()`` of it is the table, ``comparisons["fp8"].estimate`` the speed-up.

    Raises:
        TimingUnavailableError: There is no GPU, or this is one of several pytest workers.
        GpuBusyError: Another run is timing on this GPU.
        ValueError: There are fewer than two callables.
    """
    if len(callables) < 2:
        raise ValueError(f"callables must hold two or more, got {list(callables)}")
    chosen = plan if plan is not None else Plan()
    if device is None:
        from fp8.testing.timing.cuda import open_gpu  # imports torch

        with open_gpu() as opened:
            report = reported(measure(opened, callables, chosen))
    else:
        report = reported(measure(device, callables, chosen))
    if show:
        from rich.console import Console

        Console().print(rendered(report))
    return report
