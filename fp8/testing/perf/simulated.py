"""A workshop whose callables exist in arithmetic alone: the suite is run and tested anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fp8.testing.perf.cases import Stack
from fp8.testing.perf.evidence import Breakdown
from fp8.testing.perf.workshop import Stage
from fp8.testing.timing.simulated import SimulatedKernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from fp8.testing.perf.benches import Bench
    from fp8.testing.perf.cases import Case

#: What every baseline takes, ms: longer than a sample, so that a simulated call is one.
BASELINE_MS = 2.0


def simulated_stack(name: str, gpu: str | None = "h200") -> Stack:
    """A stack that is able to what the reference (by its name) or torchao is able to."""
    reference = name.startswith("reference")
    recipes = {"tensorwise", "rowwise", "rowwise_with_gw_hp"}
    return Stack(
        name=name,
        recipes=frozenset(recipes | ({"blockwise"} if reference else set())),
        bias_fused=reference,
        multiplies=reference,
        quantises=True,
        gpu=gpu,
    )


@dataclass(slots=True)
class SimulatedWorkshop:
    """Makes `SimulatedKernel`s.

    Attributes:
        speed: Case -> how many times as fast as its baseline its subject is.
        noise: Log-SD from block to block.
        fell_back: Case -> whether its products run in bfloat16 instead.
        saved: Callable's name -> what it saves for backward, bytes.
        left: How often it was cleaned up.
    """

    speed: Callable[[Case], float]
    noise: float = 0.002
    fell_back: Callable[[Case], bool] = lambda _: False
    saved: Callable[[str], int] = lambda _: 2**20
    left: int = 0
    _of: dict[int, Case] = field(default_factory=dict)

    def stages(self, bench: Bench, cases: tuple[Case, ...]) -> Iterator[Stage]:  # noqa: ARG002
        """The callables of a bench, stage by stage."""
        for name in dict.fromkeys(case.stage for case in cases):
            own = [case for case in cases if case.stage == name and case.ratio == "speed-up"]
            yield Stage(name, self._subjects(own or list(cases)))

    def _subjects(self, cases: list[Case]) -> Mapping[str, SimulatedKernel]:
        self._of.clear()
        made = {case.baseline: self._kernel(BASELINE_MS) for case in cases}
        for case in cases:
            made[case.subject] = self._kernel(BASELINE_MS / self.speed(case))
            self._of[id(made[case.subject])] = case
        return made

    def _kernel(self, ms: float) -> SimulatedKernel:
        return SimulatedKernel(ms, block_noise=self.noise, sample_noise=self.noise)

    def breakdown(self, subject: SimulatedKernel, calls: int) -> Breakdown:  # noqa: ARG002
        """As if the products took half of the time."""
        case = self._of.get(id(subject))
        half = 500 * subject.ms
        if case is None or self.fell_back(case):
            return Breakdown(0.0, half, half, 0, 3, 6, (("nvjet_sm90_tst_128x256", 3),))
        due = case.float8_products
        return Breakdown(half, 0.0, half, due, 0, 2 * due, (("nvjet_sm90_qqtst_128x256", due),))

    def saved_bytes(self, subject: SimulatedKernel) -> int:
        """What a step keeps between forward and backward, bytes."""
        case = self._of.get(id(subject))
        return self.saved("" if case is None else case.subject)

    def clean_up(self) -> None:
        """Count it."""
        self.left += 1
