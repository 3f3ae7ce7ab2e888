"""What is read from NVML, and what is not when a machine hides it: on a stand-in for pynvml."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import pytest

from fp8.testing.timing.nvml import Monitor, foreign, monitor, reasons
from fp8.testing.timing.results import Reading


@dataclass
class Process:
    pid: int


class FakeNvml:
    """As much of pynvml as is asked for; what is None is refused."""

    class NVMLError(Exception):
        pass

    def __init__(self, **answers: Any) -> None:
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        if name not in self._answers:
            raise AttributeError(name)

        def function(handle: str, *args: object) -> Any:
            assert handle == "gpu"
            answer = self._answers[name]
            if answer is None:
                raise self.NVMLError("Not Supported")
            return answer[args[0]] if args else answer

        return function


WHOLE = {
    "nvmlDeviceGetClockInfo": {1: 1755, 2: 3201},
    "nvmlDeviceGetPowerUsage": 693_500,
    "nvmlDeviceGetTemperature": {0: 64},
    "nvmlDeviceGetCurrentClocksEventReasons": 0x24,
}


def test_a_reading() -> None:
    expected = Reading(1755, 3201, 693.5, 64, frozenset({"SW power cap", "SW thermal"}))
    assert Monitor(FakeNvml(**WHOLE), "gpu").read() == expected


def test_the_older_name_of_the_reasons_is_asked_for() -> None:
    older = dict(WHOLE)
    older["nvmlDeviceGetCurrentClocksThrottleReasons"] = 0x8
    for events in (None, "absent"):
        older["nvmlDeviceGetCurrentClocksEventReasons"] = events
        nvml = FakeNvml(**{name: answer for name, answer in older.items() if answer != "absent"})
        assert Monitor(nvml, "gpu").read().reasons == {"HW slowdown"}


@pytest.mark.parametrize("hidden", WHOLE)
def test_what_is_hidden_is_none_and_the_rest_is_read(hidden: str) -> None:
    read = Monitor(FakeNvml(**{**WHOLE, hidden: None}), "gpu").read()
    values = [read.sm_mhz, read.power_w, read.temperature_c, read.reasons]
    assert [value is None for value in values] == [name == hidden for name in WHOLE]


def test_without_nvml_nothing_is_read_and_the_cause_is_kept() -> None:
    blind = Monitor(missing="because")
    assert blind.read() == Reading()
    assert blind.foreign() is None
    assert blind.missing == "because"


@pytest.mark.parametrize(
    ("bits", "names"),
    [
        (0x000, set()),
        (0x001, set()),  # idle
        (0x004, {"SW power cap"}),
        (0x008, {"HW slowdown"}),
        (0x020, {"SW thermal"}),
        (0x0C8, {"HW slowdown", "HW thermal", "HW power brake"}),
    ],
)
def test_reasons(bits: int, names: set[str]) -> None:
    assert reasons(bits) == names


@pytest.mark.parametrize(
    ("pids", "others"),
    [
        ([7], ()),
        ([9, 7, 8], (8, 9)),
        ([], None),  # a container that shows nobody
        ([8], ()),  # ours, by an id of another namespace
        ([8, 9], (0,)),  # one of them is ours
    ],
)
def test_foreign_processes(pids: list[int], others: tuple[int, ...] | None) -> None:
    assert foreign(pids, own=7) == others


def test_foreign_processes_are_nvmls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getpid", lambda: 7)
    nvml = FakeNvml(nvmlDeviceGetComputeRunningProcesses=[Process(7), Process(8)])
    assert Monitor(nvml, "gpu").foreign() == (8,)
    assert Monitor(FakeNvml(nvmlDeviceGetComputeRunningProcesses=None), "gpu").foreign() is None


def test_a_machine_without_nvidia_ml_py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with monitor("GPU-1") as blind:
        assert blind.missing == "nvidia-ml-py is not installed"


class NvmlModule(FakeNvml):
    """The module itself: what is called before there is a handle."""

    def __init__(self, fails: str = "") -> None:
        super().__init__(**WHOLE)
        self.fails = fails
        self.calls: list[str] = []

    def _call(self, name: str) -> str:
        self.calls.append(name)
        if name == self.fails:
            raise self.NVMLError(f"{name} failed")
        return "gpu"

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name
        self._call("init")

    def nvmlShutdown(self) -> None:  # noqa: N802 - NVML's name
        self._call("shutdown")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802 - NVML's name
        return self._call(uuid)


@pytest.mark.parametrize(
    ("fails", "calls"),
    [
        ("", ["init", "GPU-1", "shutdown"]),
        ("init", ["init"]),
        ("GPU-1", ["init", "GPU-1", "shutdown"]),
    ],
)
def test_nvml_is_opened_and_closed(
    monkeypatch: pytest.MonkeyPatch, fails: str, calls: list[str]
) -> None:
    module = NvmlModule(fails)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with monitor("GPU-1") as opened:
        assert opened.missing == (f"{fails} failed" if fails else "")
        assert (opened.read() == Reading()) is bool(fails)
    assert module.calls == calls
