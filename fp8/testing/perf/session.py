"""One perf session: the GPU that is held, the time that is left, and the cases measured so far."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fp8.testing import thresholds
from fp8.testing.perf import running
from fp8.testing.perf.cases import stack_of
from fp8.testing.perf.judging import standard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fp8.targets.base import Target
    from fp8.testing.perf.benches import Bench
    from fp8.testing.perf.cases import Stack
    from fp8.testing.perf.judging import Standard
    from fp8.testing.perf.outcomes import Outcome
    from fp8.testing.perf.workshop import Workshop


@dataclass(slots=True)
class PerfSession:
    """What the tests of one session share.

    Attributes:
        device: What times are taken on; `fp8.testing.timing.open_gpu` opens the real one.
        workshop: Target -> what makes its callables.
        held_to: What the GPU's cases are held to.
        thresholds: One line about it.
        budget_s: Seconds until no bench is begun any more; None for no limit.
        clock: Seconds.
        seconds: What each bench took, by its name, for whoever wants to know.
    """

    device: Any
    workshop: Callable[[Target], Workshop]
    held_to: Standard
    thresholds: str
    budget_s: float | None = None
    clock: Callable[[], float] = time.monotonic
    seconds: dict[str, float] = field(default_factory=dict)
    _begun: float | None = None

    def stack(self, target: Target) -> Stack:
        """What the suite needs to know of a target."""
        return stack_of(target, self.device.name)

    def spent_s(self) -> float:
        """Seconds since the first question about time."""
        if self._begun is None:
            self._begun = self.clock()
        return self.clock() - self._begun

    def left_s(self) -> float | None:
        """Seconds that are left; None where there is no limit."""
        return None if self.budget_s is None else max(0.0, self.budget_s - self.spent_s())

    def has_time(self) -> bool:
        """Whether another bench may begin. The one at hand is always finished."""
        return self.left_s() != 0

    def run(self, bench: Bench, target: Target) -> tuple[Outcome, ...]:
        """Measure and judge a bench of a target."""
        begun = self.clock()
        try:
            return running.run(
                bench,
                self.stack(target),
                self.device,
                self.workshop(target),
                self.held_to,
                has_time=self.has_time,
            )
        finally:
            self.seconds[f"{target.name} {bench.name}"] = self.clock() - begun


def available(device: str) -> bool:
    """Whether times can be taken on a device of torch's."""
    return device == "cuda"


@contextmanager
def opened(folder: Path, budget_s: float | None) -> Iterator[PerfSession]:
    """The session on this machine's GPU, which is locked until it ends.

    Args:
        folder: Of the files of thresholds.
        budget_s: Seconds until no bench is begun any more; None for no limit.

    Raises:
        TimingUnavailableError: There is no GPU, or this is one of several pytest workers.
        GpuBusyError: Another run is timing on it.
    """
    from fp8.testing.perf.workshop import TorchWorkshop
    from fp8.testing.timing import open_gpu

    with open_gpu() as gpu:
        known = thresholds.load(folder, gpu.name)
        yield PerfSession(
            gpu,
            lambda target: TorchWorkshop(target, gpu.rotate_bytes),
            standard(known.by_case, gpu.name),
            str(known),
            budget_s,
        )
