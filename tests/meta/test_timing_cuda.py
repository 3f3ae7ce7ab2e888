"""The real device's ways of timing, on a stand-in for torch.cuda in virtual time."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from fp8.testing.timing import Plan, compared, cuda, measure
from fp8.testing.timing.kernels import Kernel
from fp8.testing.timing.nvml import Monitor
from fp8.testing.timing.results import Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LAUNCH_MS = 0.005  # to replay a graph


@dataclass
class World:
    """A host that queues work and a GPU that runs it in order; times in ms."""

    host: float = 0.0
    gpu: float = 0.0
    capturing: list[float] | None = None
    compiled: int = 0
    looks: int = 0
    memory: int = 100

    def launch(self, host_ms: float, device_ms: float) -> None:
        """Queue a kernel."""
        self.host += host_ms
        if self.capturing is not None:
            self.capturing.append(device_ms)
        else:
            self.gpu = max(self.gpu, self.host) + device_ms

    def synchronize(self) -> None:
        """Wait for the GPU."""
        self.host = max(self.host, self.gpu)

    def sleep(self, seconds: float) -> None:
        """Let the host wait."""
        self.host += 1000 * seconds

    def look(self) -> Reading:
        """Read NVML."""
        self.looks += 1
        return Reading(sm_mhz=1700)


@dataclass
class Work:
    """A callable: what it costs the host and the GPU."""

    world: World
    host_ms: float
    device_ms: float
    capturable: bool = True
    compile_calls: int = 1
    calls: int = 0
    period: int = 1

    def __call__(self) -> None:
        self.calls += 1
        if self.calls <= self.compile_calls:
            self.world.compiled += 1
            self.world.host += 1000
        if self.world.capturing is not None and not self.capturable:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        self.world.launch(self.host_ms, self.device_ms)


@dataclass
class Graph:
    """A captured graph."""

    world: World
    kernels: list[float] = field(default_factory=list)

    def replay(self) -> None:
        """Queue all of it."""
        self.world.launch(LAUNCH_MS, sum(self.kernels))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """In place of torch.cuda and the clock."""
    made = World()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = max(made.host, made.gpu)

        def elapsed_time(self, later: Event) -> float:
            return later.at - self.at

        def query(self) -> bool:
            return made.host >= self.at

    @contextlib.contextmanager
    def capture(graph: Graph) -> Iterator[None]:
        made.capturing = graph.kernels
        try:
            yield
        finally:
            made.capturing = None

    stream = SimpleNamespace(wait_stream=lambda _: None)
    fake = SimpleNamespace(
        Event=Event,
        synchronize=made.synchronize,
        CUDAGraph=lambda: Graph(made),
        graph=capture,
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda _: contextlib.nullcontext(),
        reset_peak_memory_stats=lambda: None,
        memory_allocated=lambda: made.memory,
        max_memory_allocated=lambda: made.memory + 64,
    )
    monkeypatch.setattr(cuda, "torch", SimpleNamespace(cuda=fake))
    clock = SimpleNamespace(
        perf_counter=lambda: made.host / 1000,
        monotonic=lambda: made.host / 1000,
        sleep=made.sleep,
    )
    monkeypatch.setattr(cuda, "time", clock)

    def profiled(call: Callable[[], object], calls: int) -> list[Kernel]:
        begun = made.gpu
        for _ in range(calls):
            call()
        made.synchronize()
        assert isinstance(call, Work)
        busy = calls * call.device_ms * 1000
        return [Kernel("k", begun, begun + busy)]

    monkeypatch.setattr(cuda.kernels, "profiled", profiled)
    return made


@pytest.fixture
def device(world: World) -> cuda.CudaDevice:
    monitor = Monitor()
    monitor.read = world.look  # type: ignore[method-assign]
    return cuda.CudaDevice(0, "GPU-1", "a stand-in", 2**20, monitor, lambda: world.compiled)


@pytest.mark.parametrize(
    ("host_ms", "device_ms", "capturable", "method"),
    [
        (0.2, 3.0, True, "events"),
        (0.2, 300.0, True, "events"),
        (0.01, 0.02, True, "graph"),
        (0.9, 0.5, True, "graph"),
        (0.9, 0.5, False, "profiler"),
        (0.01, 0.02, False, "profiler"),
    ],
)
def test_each_way_finds_the_devices_time_and_the_hosts(
    world: World,
    device: cuda.CudaDevice,
    host_ms: float,
    device_ms: float,
    capturable: bool,
    method: str,
) -> None:
    work = Work(world, host_ms, device_ms, capturable)
    prepared = device.prepare(work, Plan())
    assert prepared.start.method == method
    assert prepared.start.first_ms == pytest.approx(1000 + host_ms + device_ms)
    assert prepared.start.second_ms == pytest.approx(host_ms + device_ms)
    assert prepared.start.peak_bytes == 64
    block = prepared.block()
    # A graph's launch is in its sample of a millisecond when the GPU has to wait for it.
    assert block.ms("device") == pytest.approx(device_ms, rel=0.01)
    assert block.ms("call") == pytest.approx(max(host_ms, device_ms), rel=0.01)
    assert block.host_ms == pytest.approx(host_ms)
    assert block.compiles == 0
    assert block.conditions.sm_mhz == 1700
    assert world.looks > 0
    notes = ("no CUDA graph: operation not permitted when stream is capturing",)
    assert prepared.start.notes == (notes if method == "profiler" else ())


def test_a_short_call_is_timed_together_with_others(world: World, device: cuda.CudaDevice) -> None:
    prepared = device.prepare(Work(world, 0.01, 0.02), Plan())
    assert prepared.graph is not None
    assert prepared.graph.calls in {50, 51}  # a millisecond, and what sums of 0.02 round to
    assert len(prepared.block().device_ms) == 20  # twenty milliseconds


def test_a_graph_of_what_the_host_is_slow_at_still_lasts_a_sample(
    world: World, device: cuda.CudaDevice
) -> None:
    prepared = device.prepare(Work(world, 0.9, 0.1), Plan())
    assert prepared.graph is not None
    assert prepared.graph.calls >= 10  # 10 x 0.1 ms; the host's time would have asked for 2


def test_a_graph_has_every_set_of_operands(world: World, device: cuda.CudaDevice) -> None:
    prepared = device.prepare(Work(world, 0.01, 0.02, period=40), Plan())
    assert prepared.graph is not None
    assert prepared.graph.calls == 80
    assert prepared.start.notes == ()
    many = device.prepare(Work(world, 0.01, 0.02, period=9000), Plan())
    assert many.start.notes == ("the graph uses 1000 of 9000 sets of operands: L2 may hold them",)


def test_it_calls_until_nothing_compiles(world: World, device: cuda.CudaDevice) -> None:
    prepared = device.prepare(Work(world, 0.2, 3.0, compile_calls=4), Plan())
    assert prepared.start.notes == ()
    assert prepared.block().compiles == 0
    restless = device.prepare(Work(world, 0.2, 3.0, compile_calls=10_000), Plan())
    assert restless.start.notes == ("still compiling after 10 calls",)
    assert restless.block().void == ("compiled",)


@pytest.mark.parametrize("method", ["events", "graph", "profiler"])
def test_a_way_can_be_chosen(world: World, device: cuda.CudaDevice, method: Any) -> None:
    prepared = device.prepare(Work(world, 0.2, 3.0), Plan(method=method))
    assert prepared.start.method == method
    assert prepared.block().ms("device") == pytest.approx(3.0, rel=0.01)


def test_a_graph_that_was_asked_for_and_fails_is_an_error(
    world: World, device: cuda.CudaDevice
) -> None:
    with pytest.raises(RuntimeError, match="not permitted"):
        device.prepare(Work(world, 0.2, 3.0, capturable=False), Plan(method="graph"))


def test_the_whole_on_the_stand_in(world: World, device: cuda.CudaDevice) -> None:
    calls: dict[str, Any] = {
        "bf16": Work(world, 0.3, 1.0),
        "fp8": Work(world, 2.0, 0.5),  # twice as fast on the device, and half as fast in a loop
    }
    made = measure(device, calls, Plan())
    assert [start.method for start in made.starts.values()] == ["events", "graph"]
    assert compared(made, "fp8", "device").verdict == "FASTER"
    assert compared(made, "fp8", "call").verdict == "SLOWER"
    assert [made.host_bound(name) for name in made.names] == [False, True]
    ratio = compared(made, "fp8", "device").estimate
    assert ratio is not None
    assert ratio.ratio == pytest.approx(2.0, rel=0.01)
