"""Do two runs agree on speed? For each case the difference of two speed-ups, with its interval.

A speed-up is a ratio of two times in one run, so that of another day, or of another version, can be
compared with it. The difference of the two log-ratios has Welch's t interval: each run has its own
spread and its own number of pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scipy import special

from fp8.testing.timing.analysis import Estimate
from fp8.testing.timing.plan import Plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fp8.testing.records import Record

Key = tuple[str, str, str]

CONFIDENCE = 0.99
#: What two runs of the same code may differ by beyond their intervals, which know nothing of what
#: differs between processes: see `Plan.margin`.
MARGIN = Plan().margin
#: Of the intervals of two runs of the same code so many must cover zero. 99 % would if nothing
#: differed between processes; over 100 cases 97 or more then do in 98 % of all pairs of runs
#: (binomial), and what differs between processes is what this is to find out.
COVERING = 0.97


@dataclass(frozen=True, slots=True)
class Timed:
    """The speed of one case in one record.

    Attributes:
        case: The case's name, such as ``linear/torchao-rowwise/compiled/8192x8192x8192``.
        ratio: What was measured: for most cases the speed-up over bfloat16; None if the run
            couldn't tell.
        estimate: The ratio with its spread; None where it is not a mean of pairs of blocks.
        verdict: What the run said of it.
        regimes: The ids of the regimes it is in.
        facts: What the case is.
    """

    case: str
    ratio: float | None
    estimate: Estimate | None
    verdict: str
    regimes: tuple[str, ...]
    facts: Mapping[str, Any]

    @property
    def measured(self) -> str:
        """The ratio with its interval."""
        if self.ratio is None:
            return "nothing"
        e = self.estimate
        return f"{self.ratio:.3f}" + ("" if e is None else f" [{e.low:.3f}, {e.high:.3f}]")

    def __str__(self) -> str:
        return f"{self.verdict} {self.measured}"


def timed(measurement: Mapping[str, Any]) -> Timed:
    """Read a measurement of kind ``timing``."""
    value = measurement["value"]
    ratio, pairs = value["ratio"], value["pairs"]
    estimate = None
    if ratio is not None and pairs >= 2:
        estimate = Estimate(math.log(ratio), value["sd"], pairs, value["confidence"])
    return Timed(
        case=measurement["name"],
        ratio=ratio,
        estimate=estimate,
        verdict=value["verdict"],
        regimes=tuple(value.get("regimes", ())),
        facts=measurement.get("facts", {}),
    )


def timings(record: Record) -> dict[Key, Timed]:
    """All of a record's timings by (target, test, name)."""
    return {
        (one["target"], one["test"], one["name"]): timed(one)
        for one in record.measurements
        if one["kind"] == "timing"
    }


@dataclass(frozen=True, slots=True)
class Change:
    """A new speed-up over an old one, as logs.

    Attributes:
        log_ratio: log(new / old): above 0 the new run is faster.
        half_width: Of its interval.
    """

    log_ratio: float
    half_width: float

    @property
    def covers_zero(self) -> bool:
        """Whether there may be no change at all."""
        return abs(self.log_ratio) <= self.half_width

    @property
    def beyond_margin(self) -> bool:
        """Whether the whole interval lies further from no change than `MARGIN`."""
        return abs(self.log_ratio) - self.half_width > math.log1p(MARGIN)

    def __str__(self) -> str:
        low, high = self.log_ratio - self.half_width, self.log_ratio + self.half_width
        middle, *ends = (math.expm1(x) for x in (self.log_ratio, low, high))
        return f"{middle:+.1%} [{ends[0]:+.1%}, {ends[1]:+.1%}]"


def change(old: Estimate, new: Estimate, confidence: float = CONFIDENCE) -> Change:
    """The difference of two log-ratios with its interval (Welch 1947).

    Its standard error is √(s₁²/n₁ + s₂²/n₂), with (Σ sᵢ²/nᵢ)² / Σ (sᵢ²/nᵢ)²/(nᵢ-1) degrees of
    freedom.
    """
    parts = [(e.sd**2 / e.pairs, e.pairs - 1) for e in (old, new)]
    variance = sum(part for part, _ in parts)
    half_width = 0.0
    if variance:
        freedom = variance**2 / sum(part**2 / pairs for part, pairs in parts)
        half_width = float(special.stdtrit(freedom, (1 + confidence) / 2)) * math.sqrt(variance)
    return Change(new.log_ratio - old.log_ratio, half_width)


@dataclass(frozen=True, slots=True)
class Pair:
    """One case in two records."""

    old: Timed
    new: Timed

    @property
    def change(self) -> Change | None:
        """The difference; None where one of the runs has no estimate."""
        if self.old.estimate is None or self.new.estimate is None:
            return None
        return change(self.old.estimate, self.new.estimate)

    @property
    def flipped(self) -> bool:
        """Whether the verdict changed."""
        return self.old.verdict != self.new.verdict

    @property
    def same(self) -> bool:
        """Whether the verdict is the same and no change is surely beyond the margin."""
        change = self.change
        return not self.flipped and (change is None or not change.beyond_margin)


@dataclass(frozen=True, slots=True)
class Agreement:
    """What two records say together of the cases that both have.

    Attributes:
        pairs: By (target, test, name).
    """

    pairs: Mapping[Key, Pair]

    @property
    def changes(self) -> list[Change]:
        """Of the cases with an estimate in both."""
        return [change for pair in self.pairs.values() if (change := pair.change) is not None]

    @property
    def flips(self) -> list[Pair]:
        """Cases whose verdict changed."""
        return [pair for pair in self.pairs.values() if pair.flipped]

    @property
    def covering(self) -> float | None:
        """The share of intervals that cover zero; None where there is none."""
        changes = self.changes
        return sum(c.covers_zero for c in changes) / len(changes) if changes else None

    @property
    def agrees(self) -> bool:
        """Whether two runs of the same code agree: no flip, and `COVERING` reached."""
        return not self.flips and self.covering is not None and self.covering >= COVERING

    def __str__(self) -> str:
        """One line."""
        changes, flips = self.changes, len(self.flips)
        covering = sum(change.covers_zero for change in changes)
        share = f" ({covering / len(changes):.1%})" if changes else ""
        return (
            f"speed: {'the runs agree' if self.agrees else 'the runs do not agree'}: the"
            f" {CONFIDENCE:.0%} interval of the change covers zero for {covering} of"
            f" {len(changes)} cases{share}, {flips} verdict{'s' * (flips != 1)} changed"
        )


def agreement(old: Record, new: Record) -> Agreement:
    """Compare the timings that two records share."""
    before, after = timings(old), timings(new)
    return Agreement({key: Pair(before[key], after[key]) for key in before if key in after})
