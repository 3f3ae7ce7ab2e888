"""The real device: one NVIDIA GPU, locked and watched while it is measured.

How device time is taken depends on the callable:

``events``
    Events around many launches. They measure the GPU's time line, gaps included, so they are right
    when the GPU is the slower one: a linear in eager mode, 0.50 ms of work, shows 0.89 ms of host.
``graph``
    The launches are captured once and replayed, so that the host has no part in it.
``profiler``
    The time in which at least one kernel ran, for callables that can't be captured.

``auto`` takes events for long calls that the GPU is slower at than the host, else a graph, else the
profiler.
"""

from __future__ import annotations

import gc
import math
import os
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

import torch

from fp8.testing.timing import compiles, gpu_lock, kernels, nvml
from fp8.testing.timing.results import Block, Conditions, Start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fp8.testing.timing.plan import Plan
    from fp8.testing.timing.results import Reading

#: Events resolve 0.5 µs (CUDA Runtime API, cudaEventElapsedTime) and have launch gaps of that size
#: between them: from 100 µs on that is 0.5 % at most.
EVENTS_FROM_MS = 0.1
#: The GPU never waits for a host that is faster by this; long calls vary by 10 to 20 %.
_HOST_SLACK = 1.25
#: A few launches vary more: 0.13 to 0.31 ms for one callable in one run on an H200, so that a call
#: that waits for the host may look twice as long as it. Below so many ms it needs another slack.
_SHORT_MS, _SHORT_SLACK = 2.0, 3.0
#: Calls after the second until nothing compiles: dynamic shapes take one more, autotuning another.
_SETTLING = 8
#: Calls in one graph at most: capturing a thousand short ones takes some ten ms.
_GRAPH_CALLS = 1000
#: Calls in one profile at most: reading an event takes the profiler some 50 µs.
_PROFILED_CALLS = 20
#: Between two looks at the GPU.
_WATCH_S = 0.002


@dataclass(frozen=True, slots=True)
class _Timed:
    """Launches that were timed: ms of a launch for each sample, ms to queue one, readings."""

    ms: tuple[float, ...]
    host_ms: float
    readings: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One GPU; `open_gpu` makes it.

    Attributes:
        index: As torch counts.
        uuid: As NVML writes it.
        name: The model.
        l2_bytes: The size of its L2 cache.
        monitor: Reads its clocks.
        compiles: Gives the number of compile events so far.
    """

    index: int
    uuid: str
    name: str
    l2_bytes: int
    monitor: nvml.Monitor
    compiles: Callable[[], int]

    @property
    def rotate_bytes(self) -> int:
        """Operands that hold more than this are out of L2 when their turn comes again.

        Three times L2: a cache that replaces blocks at random keeps e^-3, 5 %, of what was read
        before three times its size.
        """
        return 3 * self.l2_bytes

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not available here."""
        if self.monitor.missing:
            return (f"clocks, power, throttling: not available ({self.monitor.missing})",)
        return ()

    def now(self) -> float:
        """Seconds of a clock that only goes forward."""
        return time.monotonic()

    def prepare(self, subject: Callable[[], object], plan: Plan) -> _Prepared:
        """Call it until nothing compiles, and find out how to measure it.

        Raises:
            RuntimeError: ``plan.method`` is ``graph`` and it can't be captured, or ``profiler``
                and there are no kernels.
        """
        first_ms = self._wall_ms(subject)
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
        second_ms = self._wall_ms(subject)
        peak_bytes = torch.cuda.max_memory_allocated() - allocated
        usual_ms, notes = self._settle(subject)
        probe = self.timed(subject, *layout(usual_ms, plan.sample_ms, plan.sample_ms, 3))
        call_ms = median(probe.ms)
        graph = None
        method = plan.method
        if method == "auto":
            method = "events" if events_suffice(call_ms, probe.host_ms) else "graph"
        if method == "graph":
            try:
                graph = self._captured(subject, call_ms, plan)
            except RuntimeError as error:
                if plan.method == "graph":
                    raise
                method = "profiler"
                notes = (*notes, "no CUDA graph: " + str(error).partition("\n")[0])
        calls, samples = layout(call_ms, plan.sample_ms, plan.block_ms, plan.min_samples)
        start = Start(first_ms, second_ms, peak_bytes, method, (*notes, *_hot(subject, graph)))
        return _Prepared(self, subject, start, calls, samples, graph)

    def timed(self, launch: Callable[[], object], calls: int, samples: int) -> _Timed:
        """Time so many samples of so many launches, after one sample that is thrown away."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(samples + 2)]
        host = []
        torch.cuda.synchronize()
        marks[0].record()
        for mark in marks[1:]:
            for _ in range(calls):
                begun = time.perf_counter()
                launch()
                host.append(time.perf_counter() - begun)
            mark.record()
        readings = [self.monitor.read()]  # all is queued: looking costs the host nothing now
        while not marks[-1].query():
            time.sleep(_WATCH_S)
            readings.append(self.monitor.read())
        torch.cuda.synchronize()
        times = [a.elapsed_time(b) / calls for a, b in pairwise(marks)]
        # The lowest of three: the first call finds cold caches, and once some thousand kernels are
        # queued the host waits for the GPU.
        return _Timed(tuple(times[1:]), 1000 * min(host[:3]), tuple(readings))

    def _wall_ms(self, call: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - begun)

    def _settle(self, call: Callable[[], object]) -> tuple[float, tuple[str, ...]]:
        """Call until nothing compiles; the last call's wall time, ms, and notes."""
        for _ in range(_SETTLING):
            before = self.compiles()
            wall_ms = self._wall_ms(call)
            if self.compiles() == before:
                return wall_ms, ()
        return wall_ms, (f"still compiling after {_SETTLING + 2} calls",)

    def _captured(self, call: Callable[[], object], call_ms: float, plan: Plan) -> _Graph:
        """A graph of as many calls as a sample takes, and as it takes to use all the operands."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), warnings.catch_warnings():
            # Of a callable that keeps its loss alive; then capturing fails, which is dealt with.
            warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream")
            for _ in range(3):  # as torch asks for before capturing: lazy set-up must be over
                call()
        torch.cuda.current_stream().wait_stream(stream)
        period = getattr(call, "period", 1)
        calls = graph_calls(plan.sample_ms / call_ms, period)
        graph = _record(call, calls)
        replay_ms = median(self.timed(graph.replay, 1, 3).ms)
        if replay_ms < plan.sample_ms / 2:  # the host made calls look longer than they are
            calls = graph_calls(calls * plan.sample_ms / replay_ms, period)
            graph = _record(call, calls)
            replay_ms = median(self.timed(graph.replay, 1, 3).ms)
        samples = max(plan.min_samples, round(plan.block_ms / replay_ms))
        return _Graph(graph, calls, samples)


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    calls: int
    samples: int


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A callable, how it began, and how it is measured."""

    device: CudaDevice
    call: Callable[[], object]
    start: Start
    calls: int
    samples: int
    graph: _Graph | None

    def block(self) -> Block:
        """Measure one block: calls as they are, then the device alone where that differs."""
        compiled = self.device.compiles()
        with _no_garbage_collection():
            called = self.device.timed(self.call, self.calls, self.samples)
            device_ms, readings = called.ms, called.readings
            if self.graph is not None:
                replayed = self.device.timed(self.graph.graph.replay, 1, self.graph.samples)
                device_ms = tuple(ms / self.graph.calls for ms in replayed.ms)
                readings += replayed.readings
            elif self.start.method == "profiler":
                calls = min(self.calls * self.samples, _PROFILED_CALLS)
                device_ms = (kernels.busy_us(kernels.profiled(self.call, calls)) / 1000 / calls,)
        return Block(
            device_ms=device_ms,
            call_ms=called.ms,
            host_ms=called.host_ms,
            compiles=self.device.compiles() - compiled,
            conditions=Conditions.of(readings, self.device.monitor.foreign()),
        )


def layout(call_ms: float, sample_ms: float, block_ms: float, min_samples: int) -> tuple[int, int]:
    """Calls of a sample and samples of a block, for calls that take `call_ms`."""
    calls = max(1, math.ceil(sample_ms / call_ms))
    return calls, max(min_samples, round(block_ms / (calls * call_ms)))


def events_suffice(call_ms: float, host_ms: float) -> bool:
    """Whether events around launches show the device's time."""
    slack = _HOST_SLACK if call_ms >= _SHORT_MS else _SHORT_SLACK
    return call_ms >= EVENTS_FROM_MS and call_ms >= slack * host_ms


def graph_calls(wanted: float, period: int) -> int:
    """Calls to capture: at least so many, and every set of operands equally often if it can be."""
    calls = max(1, math.ceil(wanted))
    return min(_GRAPH_CALLS, math.ceil(calls / period) * period)


def _record(call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The CUDA Graph is empty")
        try:
            with torch.cuda.graph(graph):
                for _ in range(calls):
                    call()
        except UserWarning as warning:
            if "Graph is empty" not in str(warning):
                raise
            raise ValueError("a callable must run something on the GPU, got none") from warning
    return graph


def _hot(call: Callable[[], object], graph: _Graph | None) -> tuple[str, ...]:
    """A note when a graph is too short for all the operands."""
    period = getattr(call, "period", 1)
    if graph is None or period <= graph.calls:
        return ()
    return (f"the graph uses {graph.calls} of {period} sets of operands: L2 may hold them",)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """As timeit does: a collection of Python's garbage would be charged to whoever runs then."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def open_gpu(index: int | None = None, lock_folder: Path | None = None) -> Iterator[CudaDevice]:
    """The GPU to time on, locked and watched until the context ends.

    Args:
        index: As torch counts; the current device when left out.
        lock_folder: Where the lock file is; the system's folder for temporary files when left out.

    Raises:
        TimingUnavailableError: There is no GPU, or this is one of several pytest workers.
        GpuBusyError: Another run is timing on it.
    """
    gpu_lock.refuse_xdist(os.environ)
    _require_gpu()
    chosen = torch.cuda.current_device() if index is None else index
    properties = torch.cuda.get_device_properties(chosen)
    uuid = f"GPU-{properties.uuid}"
    with (
        torch.cuda.device(chosen),
        gpu_lock.locked(uuid, lock_folder),
        nvml.monitor(uuid) as monitor,
        compiles.counted() as count,
    ):
        yield CudaDevice(chosen, uuid, properties.name, properties.L2_cache_size, monitor, count)


def _require_gpu() -> None:
    if torch.cuda.is_available():
        return
    cause = "this torch is built without CUDA"
    if torch.version.cuda is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        cause = "torch sees none" + (
            "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        )
    msg = f"timing needs an NVIDIA GPU: torch {torch.__version__}, {cause}; a CPU is never timed"
    raise gpu_lock.TimingUnavailableError(msg)
