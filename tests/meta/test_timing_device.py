"""What the real device is made of, as far as it goes without a GPU: every part with a stand-in."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fp8.testing.timing import GpuBusyError, TimingUnavailableError, compiles, rotated
from fp8.testing.timing.cuda import (
    CudaDevice,
    _no_garbage_collection,
    events_suffice,
    graph_calls,
    layout,
    open_gpu,
)
from fp8.testing.timing.gpu_lock import locked, refuse_xdist
from fp8.testing.timing.kernels import Kernel, busy_us, kernels_of
from fp8.testing.timing.nvml import Monitor
from fp8.testing.timing.operands import Rotated

if TYPE_CHECKING:
    from pathlib import Path

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")

# ------------------------------------------------------------------------- who may time at all


@needs_no_gpu
def test_without_a_gpu_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    with (
        pytest.raises(TimingUnavailableError, match="timing needs an NVIDIA GPU: torch "),
        open_gpu(),
    ):
        pass


def test_a_worker_with_neighbours_is_refused() -> None:
    refuse_xdist({})
    refuse_xdist({"PYTEST_XDIST_WORKER": "gw0", "PYTEST_XDIST_WORKER_COUNT": "1"})
    with pytest.raises(TimingUnavailableError, match="got 2 pytest workers: leave out -n"):
        refuse_xdist({"PYTEST_XDIST_WORKER": "gw0", "PYTEST_XDIST_WORKER_COUNT": "2"})


def test_a_worker_with_neighbours_is_refused_before_the_gpu_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "4")
    with pytest.raises(TimingUnavailableError, match="4 pytest workers"), open_gpu():
        pass


def test_one_run_at_a_time_has_a_gpu(tmp_path: Path) -> None:
    with locked("GPU-1", tmp_path) as path:
        with pytest.raises(GpuBusyError, match=rf"GPU-1 is being timed .* holds {path}"):
            locked("GPU-1", tmp_path).__enter__()
        with locked("GPU-2", tmp_path):
            pass
    with locked("GPU-1", tmp_path) as again:
        assert again == path


def test_another_process_holds_the_lock_until_it_ends(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from fp8.testing.timing.gpu_lock import locked\n"
        "with locked('GPU-1', pathlib.Path(sys.argv[1])):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(GpuBusyError), locked("GPU-1", tmp_path):
            pass
        holder.kill()  # however it ends
    with locked("GPU-1", tmp_path):
        pass


def test_a_lock_file_that_may_only_be_read_is_enough(tmp_path: Path) -> None:
    with locked("GPU-1", tmp_path) as path:
        pass
    path.chmod(0o444)
    with locked("GPU-1", tmp_path), pytest.raises(GpuBusyError), locked("GPU-1", tmp_path):
        pass


# -------------------------------------------------------------------------------- compile events


def test_compilations_are_counted_and_calls_are_not() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")
    with compiles.counted() as count:
        before = count()
        compiled(torch.ones(3))
        first = count()
        assert first > before
        compiled(torch.ones(3))
        assert count() == first
        compiled(torch.ones(4))  # dynamic shapes: once more
        assert count() > first
    torch._dynamo.reset()


def test_tritons_own_compilations_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton").knobs.compilation
    heard: list[object] = []
    monkeypatch.setattr(knobs, "listener", lambda *args, **_: heard.append(args))
    mine = knobs.listener
    with compiles.counted() as count:
        before = count()
        knobs.listener("kernel", metadata={})
        assert count() == before + 1
    assert heard == [("kernel",)]
    assert knobs.listener is mine


def test_without_triton_dynamos_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with compiles.counted() as count:
        assert count() == compiles.dynamo_events()


def test_without_dynamo_nothing_has_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    assert compiles.dynamo_events() == 0


# ---------------------------------------------------------------------------- operands, kernels


def test_operands_take_turns() -> None:
    seen: list[tuple[int, str]] = []
    call = Rotated(lambda *operands: seen.append(operands), [(1, "a"), (2, "b"), (3, "c")])
    for _ in range(4):
        call()
    assert seen == [(1, "a"), (2, "b"), (3, "c"), (1, "a")]
    assert call.period == 3


def test_sets_are_made_until_they_hold_more_than_is_asked_for() -> None:
    made = []

    def make(seed: int) -> tuple[Any, ...]:
        made.append(seed)
        return torch.zeros(10, dtype=torch.bfloat16), torch.zeros(5), "a flag"  # 20 + 20 bytes

    assert rotated(print, make, over_bytes=79).period == 2
    assert rotated(print, make, over_bytes=80).period == 3
    assert made == [0, 1, 0, 1, 2]


def test_operands_without_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="make must return tensors"):
        rotated(print, lambda _: ("x",), over_bytes=1)
    with pytest.raises(ValueError, match="at least one set"):
        Rotated(print, [])


@pytest.mark.parametrize(
    ("kernels", "busy"),
    [
        ([], 0.0),
        ([(0, 2), (5, 6)], 3.0),
        ([(5, 6), (0, 2)], 3.0),
        ([(0, 4), (1, 2), (3, 6)], 6.0),  # another stream's overlap
        ([(0, 10), (2, 3), (12, 13)], 11.0),
    ],
)
def test_busy_time_is_that_of_the_union(kernels: list[tuple[int, int]], busy: float) -> None:
    assert busy_us([Kernel("k", begin, end) for begin, end in kernels]) == busy


def test_ranges_that_people_name_are_no_kernels() -> None:
    @dataclass
    class Span:
        start: float
        end: float

    @dataclass
    class Event:
        name: str
        device_type: torch.autograd.DeviceType
        time_range: Span
        is_user_annotation: bool = False

    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [
        Event("cudaLaunchKernel", cpu, Span(0, 1)),
        Event("second", cuda, Span(5, 6)),
        Event("first", cuda, Span(2, 3)),
        Event("forward", cuda, Span(2, 6), is_user_annotation=True),
    ]
    assert kernels_of(events) == (Kernel("first", 2.0, 3.0), Kernel("second", 5.0, 6.0))


def test_the_profiler_says_what_this_torch_says() -> None:
    """The fields that are read are there: the profiler's events on the CPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(3) + 1
    events = profile.events()
    assert events
    assert kernels_of(events) == ()
    assert {event.device_type.name for event in events} == {"CPU"}
    assert all(event.time_range.end >= event.time_range.start for event in events)
    assert not any(event.is_user_annotation for event in events)


# ------------------------------------------------------------------------- what suits a callable


@pytest.mark.parametrize(
    ("call_ms", "host_ms", "suffice"),
    [
        (10.0, 1.0, True),
        (0.09, 0.01, False),  # too short
        (0.89, 0.88, False),  # a linear whose host is the slower one
        (24.0, 20.0, False),
        (25.0, 20.0, True),
        (0.26, 0.13, False),  # 0.005 ms of work; the host was twice as fast once in three calls
        (0.4, 0.1, True),
    ],
)
def test_when_events_suffice(call_ms: float, host_ms: float, suffice: bool) -> None:
    assert events_suffice(call_ms, host_ms) is suffice


@pytest.mark.parametrize(
    ("call_ms", "calls", "samples"),
    [(0.02, 50, 20), (0.3, 4, 17), (1.0, 1, 20), (5.0, 1, 4), (400.0, 1, 3)],
)
def test_the_layout_of_a_block(call_ms: float, calls: int, samples: int) -> None:
    assert layout(call_ms, sample_ms=1.0, block_ms=20.0, min_samples=3) == (calls, samples)


@pytest.mark.parametrize(
    ("wanted", "period", "calls"),
    [(0.1, 1, 1), (49.2, 1, 50), (50, 40, 80), (3, 40, 40), (5000, 1, 1000), (3, 9000, 1000)],
)
def test_calls_in_a_graph(wanted: float, period: int, calls: int) -> None:
    assert graph_calls(wanted, period) == calls


def test_three_times_l2_is_rotated() -> None:
    device = CudaDevice(0, "GPU-1", "H200", 50 * 2**20, Monitor(missing="no NVML"), lambda: 0)
    assert device.rotate_bytes == 150 * 2**20
    assert device.notes == ("clocks, power, throttling: not available (no NVML)",)
    assert device.now() <= device.now()


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_is_not_collected_and_the_setting_comes_back(enabled: bool) -> None:
    import gc

    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with _no_garbage_collection():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
