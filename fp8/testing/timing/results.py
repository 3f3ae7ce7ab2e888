"""What was measured: blocks with the conditions they ran under, raw samples kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fp8.testing.timing.plan import Plan, Quantity

#: Reasons for a lower clock that make a block void. The software power cap is not among them: a
#: large product runs at the power limit, and its own consumption is part of its speed.
SLOWDOWNS = frozenset({"HW slowdown", "HW thermal", "HW power brake", "SW thermal"})


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at the GPU; None for what could not be read."""

    sm_mhz: float | None = None
    memory_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    reasons: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a block ran under; None for what could not be read.

    Attributes:
        sm_mhz: Median clock of the multiprocessors.
        memory_mhz: Median clock of the memory.
        power_w: Largest power.
        temperature_c: Largest temperature.
        reasons: All the reasons for a lower clock that were seen.
        foreign: Process ids of others that use the GPU (0 for one whose id is not visible here).
    """

    sm_mhz: float | None = None
    memory_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    reasons: frozenset[str] | None = None
    foreign: tuple[int, ...] | None = None

    @classmethod
    def of(cls, readings: Sequence[Reading], foreign: tuple[int, ...] | None) -> Conditions:
        """Join the readings of a block."""
        reasons = [r.reasons for r in readings if r.reasons is not None]
        return cls(
            sm_mhz=_over(median, (r.sm_mhz for r in readings)),
            memory_mhz=_over(median, (r.memory_mhz for r in readings)),
            power_w=_over(max, (r.power_w for r in readings)),
            temperature_c=_over(max, (r.temperature_c for r in readings)),
            reasons=frozenset().union(*reasons) if reasons else None,
            foreign=foreign,
        )


def _over(statistic: Any, values: Iterable[float | None]) -> float | None:
    """The statistic of what could be read."""
    known = [value for value in values if value is not None]
    return statistic(known) if known else None


@dataclass(frozen=True, slots=True)
class Block:
    """One uninterrupted stretch of calls of one callable.

    Attributes:
        device_ms: The GPU's time for one call, ms; one number for each sample.
        call_ms: The time of one call among others, ms; one number for each sample.
        host_ms: The time until a call was queued, ms.
        compiles: Compile events during the block.
        conditions: What it ran under.
    """

    device_ms: tuple[float, ...]
    call_ms: tuple[float, ...]
    host_ms: float
    compiles: int = 0
    conditions: Conditions = Conditions()

    def ms(self, quantity: Quantity) -> float:
        """The block's median of a quantity, ms."""
        if quantity == "host":
            return self.host_ms
        return median(self.device_ms if quantity == "device" else self.call_ms)

    @property
    def void(self) -> tuple[str, ...]:
        """Why the block says nothing; empty if it does."""
        causes = []
        if self.compiles:
            causes.append("compiled")
        causes += sorted(SLOWDOWNS & (self.conditions.reasons or frozenset()))
        if self.conditions.foreign:
            causes.append("foreign process")
        return tuple(causes)


#: A callable's two blocks in one round, one before and one after the others'.
Side: TypeAlias = tuple[Block, Block]
#: One ABBA round: each callable's side.
Round: TypeAlias = Mapping[str, Side]


@dataclass(frozen=True, slots=True)
class Start:
    """How a callable began.

    Attributes:
        first_ms: Wall time of the first call, compilation included, ms.
        second_ms: Wall time of the second call, ms.
        peak_bytes: Most memory that the second call had allocated above what was there before it.
        method: How its device time is taken.
        notes: What its reader should know.
    """

    first_ms: float
    second_ms: float
    peak_bytes: int
    method: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Blocks of one callable before measuring, and whether it reached its steady state."""

    blocks: tuple[Block, ...]
    steady: bool


@dataclass(frozen=True, slots=True)
class Measurement:
    """All that was measured of callables that ran interleaved.

    Attributes:
        device: The GPU's name.
        plan: How it was measured.
        starts: First calls, by callable; the first callable is the baseline.
        warm_ups: Warm-ups, by callable.
        rounds: ABBA rounds in the order in which they ran.
        seconds: How long it took, first calls left out.
        stopped: Why there were no more rounds.
        notes: What its reader should know about the device.
    """

    device: str
    plan: Plan
    starts: Mapping[str, Start]
    warm_ups: Mapping[str, WarmUp]
    rounds: tuple[Round, ...]
    seconds: float
    stopped: str
    notes: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The callables, the baseline first."""
        return tuple(self.starts)

    @property
    def baseline(self) -> str:
        """The callable that the others are compared with."""
        return self.names[0]

    def blocks(self, name: str) -> tuple[Block, ...]:
        """A callable's blocks in the order in which they ran, void ones included."""
        return tuple(block for one in self.rounds for block in one[name])

    def ms(self, name: str, quantity: Quantity) -> float | None:
        """Median over the medians of a callable's valid blocks, ms; None without any."""
        valid = [block.ms(quantity) for block in self.blocks(name) if not block.void]
        return median(valid) if valid else None

    def host_bound(self, name: str) -> bool | None:
        """Whether Python needs longer to queue a call than the GPU to run it."""
        host, device = self.ms(name, "host"), self.ms(name, "device")
        return None if host is None or device is None else host > device

    def conditions(self, name: str) -> Conditions:
        """A callable's mean clocks and power, highest temperature, and every reason seen."""
        found = [block.conditions for block in self.blocks(name)]
        reasons = [c.reasons for c in found if c.reasons is not None]
        foreign = [c.foreign for c in found if c.foreign is not None]
        return Conditions(
            sm_mhz=_over(fmean, (c.sm_mhz for c in found)),
            memory_mhz=_over(fmean, (c.memory_mhz for c in found)),
            power_w=_over(fmean, (c.power_w for c in found)),
            temperature_c=_over(max, (c.temperature_c for c in found)),
            reasons=frozenset().union(*reasons) if reasons else None,
            foreign=tuple(sorted(set().union(*foreign))) if foreign else None,
        )
