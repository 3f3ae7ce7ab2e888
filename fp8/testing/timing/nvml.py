"""What NVML says of a GPU: clocks, power, temperature, reasons for a lower clock, processes.

Containers and virtual machines hide some of it, each its own part: what can't be read is None.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fp8.testing.timing.results import Reading

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Bits of nvmlClocksEventReasons (nvml.h, driver 535 and later; the older
#: nvmlClocksThrottleReasons are the same). Idle and the application's clock setting are no news.
REASONS = MappingProxyType(
    {
        0x004: "SW power cap",
        0x008: "HW slowdown",
        0x010: "sync boost",
        0x020: "SW thermal",
        0x040: "HW thermal",
        0x080: "HW power brake",
        0x100: "display clock",
    }
)
_SM, _MEMORY = 1, 2  # nvmlClockType_t
_GPU = 0  # nvmlTemperatureSensors_t


class Monitor:
    """Reads one GPU.

    Args:
        nvml: The module pynvml, or None: then nothing can be read.
        handle: The GPU.
        missing: Why nothing can be read.
    """

    def __init__(self, nvml: Any = None, handle: Any = None, missing: str = "") -> None:
        self._nvml = nvml
        self._handle = handle
        self.missing = missing

    def read(self) -> Reading:
        """Look at the GPU once."""
        power = self._ask("nvmlDeviceGetPowerUsage")
        bits = self._ask("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:  # its name before driver 535
            bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return Reading(
            sm_mhz=self._ask("nvmlDeviceGetClockInfo", _SM),
            memory_mhz=self._ask("nvmlDeviceGetClockInfo", _MEMORY),
            power_w=None if power is None else power / 1000,
            temperature_c=self._ask("nvmlDeviceGetTemperature", _GPU),
            reasons=None if bits is None else reasons(bits),
        )

    def foreign(self) -> tuple[int, ...] | None:
        """Ids of the other processes that compute on the GPU; None when that can't be said."""
        processes = self._ask("nvmlDeviceGetComputeRunningProcesses")
        return None if processes is None else foreign([p.pid for p in processes], os.getpid())

    def _ask(self, function: str, *args: Any) -> Any:
        """Call a function of NVML on the GPU; None where it is missing or refuses."""
        if not hasattr(self._nvml, function):
            return None
        try:
            return getattr(self._nvml, function)(self._handle, *args)
        except self._nvml.NVMLError:
            return None


def reasons(bits: int) -> frozenset[str]:
    """The names of the reasons whose bits are set."""
    return frozenset(name for bit, name in REASONS.items() if bits & bit)


def foreign(pids: list[int], own: int) -> tuple[int, ...] | None:
    """Who else is in a list of processes that should hold our own.

    In a container NVML may list ids of another namespace, or nobody. Then our own id is missing:
    an empty list says nothing, and of several one is ours, but nobody knows which.
    """
    if own in pids:
        return tuple(sorted(set(pids) - {own}))
    if not pids:
        return None
    return (0,) * (len(set(pids)) - 1)


@contextmanager
def monitor(uuid: str) -> Iterator[Monitor]:
    """A monitor of the GPU with this UUID, which reads nothing where NVML can't be had."""
    try:
        import pynvml
    except ModuleNotFoundError:
        yield Monitor(missing="nvidia-ml-py is not installed")
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield Monitor(missing=str(error))
        return
    try:
        yield _of(pynvml, uuid)
    finally:
        pynvml.nvmlShutdown()


def _of(nvml: Any, uuid: str) -> Monitor:
    try:
        return Monitor(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError as error:
        return Monitor(missing=str(error))
