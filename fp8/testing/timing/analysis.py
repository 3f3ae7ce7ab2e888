"""From rounds to ratios: paired log-ratios, their t interval, and a verdict.

The unit is the pair of blocks: one ABBA round, in which each side has two blocks, one before and
one after the other side's. A clock that drifts evenly adds the same to both sides of a round. The
samples of a block are not independent of each other, so they never count as observations: a test on
pooled samples raises a false alarm in more than half of all A/A comparisons.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from scipy import special

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fp8.testing.timing.plan import Plan, Quantity
    from fp8.testing.timing.results import Measurement, Round, Side


class Verdict(StrEnum):
    """What a comparison says about the callable, against the baseline."""

    FASTER = "FASTER"
    SLOWER = "SLOWER"
    ALIKE = "ALIKE"
    UNRESOLVED = "UNRESOLVED"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio estimated from pairs.

    Attributes:
        log_ratio: Mean of the log-ratios.
        sd: Their standard deviation: the spread of one pair.
        pairs: How many there were.
        confidence: Of the interval, two-sided.
    """

    log_ratio: float
    sd: float
    pairs: int
    confidence: float

    @property
    def half_width(self) -> float:
        """Of the interval of the log-ratio: t(confidence, pairs - 1)·sd/√pairs."""
        t = float(special.stdtrit(self.pairs - 1, (1 + self.confidence) / 2))
        return t * self.sd / math.sqrt(self.pairs)

    @property
    def ratio(self) -> float:
        """The estimate: above 1 is a speed-up."""
        return math.exp(self.log_ratio)

    @property
    def low(self) -> float:
        """Lower end of the interval of the ratio."""
        return math.exp(self.log_ratio - self.half_width)

    @property
    def high(self) -> float:
        """Upper end of the interval of the ratio."""
        return math.exp(self.log_ratio + self.half_width)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One callable against the baseline, by one quantity.

    Attributes:
        name: The callable.
        baseline: What it is compared with.
        quantity: What was compared.
        estimate: The speed-up, time of the baseline over time of the callable; None without two
            valid pairs.
        verdict: What follows from it.
        reason: Why, in words.
        void: Causes of void pairs, counted by pair.
    """

    name: str
    baseline: str
    quantity: Quantity
    estimate: Estimate | None
    verdict: Verdict
    reason: str
    void: Mapping[str, int]


def estimated(log_ratios: Sequence[float], confidence: float) -> Estimate:
    """The mean of two or more log-ratios with its t interval."""
    return Estimate(fmean(log_ratios), stdev(log_ratios), len(log_ratios), confidence)


def log_ratio(base: Side, other: Side, quantity: Quantity) -> float:
    """The log of a speed-up in one round: each side's mean over its two blocks."""
    times = [fmean(math.log(block.ms(quantity)) for block in side) for side in (base, other)]
    return times[0] - times[1]


def causes_of(base: Side, other: Side) -> frozenset[str]:
    """Why a pair is void: any of its four blocks is."""
    return frozenset(cause for block in (*base, *other) for cause in block.void)


def valid_ratios(
    rounds: Sequence[Round],
    baseline: str,
    name: str,
    quantity: Quantity,
) -> list[float]:
    """The log-ratios of the pairs that are not void."""
    return [
        log_ratio(one[baseline], one[name], quantity)
        for one in rounds
        if not causes_of(one[baseline], one[name])
    ]


def compared(
    measurement: Measurement,
    name: str,
    quantity: Quantity | None = None,
    *,
    baseline: str | None = None,
) -> Comparison:
    """Compare one callable with the baseline.

    Args:
        measurement: What was measured.
        name: The callable.
        quantity: By what to compare; the plan's when left out.
        baseline: What to compare it with; the measurement's first callable when left out.

    Raises:
        KeyError: `name` or `baseline` was not measured.
    """
    plan = measurement.plan
    baseline = measurement.baseline if baseline is None else baseline
    for wanted in (name, baseline):
        if wanted not in measurement.names:
            msg = f"{wanted!r} was not measured; measured: {', '.join(measurement.names)}"
            raise KeyError(msg)
    by = quantity if quantity is not None else plan.quantity
    ratios = valid_ratios(measurement.rounds, baseline, name, by)
    void = Counter(
        cause for one in measurement.rounds for cause in causes_of(one[baseline], one[name])
    )
    estimate = estimated(ratios, plan.look_confidence) if len(ratios) >= 2 else None
    verdict, reason = judged(estimate, len(ratios), len(measurement.rounds), plan)
    return Comparison(name, baseline, by, estimate, verdict, reason, void)


def judged(estimate: Estimate | None, valid: int, measured: int, plan: Plan) -> tuple[Verdict, str]:
    """The verdict, and why.

    Args:
        estimate: The speed-up.
        valid: Pairs that are not void.
        measured: All pairs.
        plan: What is needed.
    """
    if too_many_void(valid, measured, plan):
        return Verdict.UNRESOLVED, f"{measured - valid} of {measured} pairs are void"
    if estimate is None or valid < plan.start_pairs:
        return Verdict.UNRESOLVED, f"{valid} of the {plan.start_pairs} pairs that it needs"
    margin = math.log1p(plan.margin)
    low = estimate.log_ratio - estimate.half_width
    high = estimate.log_ratio + estimate.half_width
    if low > margin:
        return Verdict.FASTER, f"by more than {plan.margin:.0%}"
    if high < -margin:
        return Verdict.SLOWER, f"by more than {plan.margin:.0%}"
    if -margin < low and high < margin:
        return Verdict.ALIKE, f"within {plan.margin:.0%}"
    return Verdict.UNRESOLVED, f"the interval reaches across {plan.margin:.0%}"


def too_many_void(valid: int, measured: int, plan: Plan) -> bool:
    """Whether so many pairs were void that the rest can't be trusted either."""
    return measured - valid > plan.void_share * measured
