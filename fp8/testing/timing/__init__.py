"""Timing on a GPU that can be believed: `compare` for users, the protocol for the suite.

docs/timing.md says how it measures and why.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fp8.testing.timing.analysis import Comparison, Estimate, Verdict, compared
from fp8.testing.timing.gpu_lock import GpuBusyError, TimingUnavailableError
from fp8.testing.timing.operands import Rotated, rotated
from fp8.testing.timing.plan import Plan
from fp8.testing.timing.protocol import measure
from fp8.testing.timing.report import Report, as_json, reported
from fp8.testing.timing.results import Measurement
from fp8.testing.timing.side_by_side import compare

if TYPE_CHECKING:
    from fp8.testing.timing.cuda import CudaDevice, open_gpu

__all__ = [
    "Comparison",
    "CudaDevice",
    "Estimate",
    "GpuBusyError",
    "Measurement",
    "Plan",
    "Report",
    "Rotated",
    "TimingUnavailableError",
    "Verdict",
    "as_json",
    "compare",
    "compared",
    "measure",
    "open_gpu",
    "reported",
    "rotated",
]


def __getattr__(name: str) -> Any:
    if name not in {"CudaDevice", "open_gpu"}:  # they need torch
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(f"{__name__}.cuda"), name)
