"""What a measured ratio means for its case: held to its threshold, and to the claims about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fp8.regimes import Against, Metric, Regime
    from fp8.testing.thresholds import Threshold


class Verdict(StrEnum):
    """What became of a case. In order of gravity; REGRESSED, STALE and UNRESOLVED are not green."""

    #: it is slower than its threshold allows
    REGRESSED = "REGRESSED"
    #: it is in a bad regime and better than the claim says: the claim has to go
    STALE = "STALE"
    #: the measurement can't tell
    UNRESOLVED = "UNRESOLVED"
    #: its threshold was not measured by this suite: reported, fails nothing
    PROVISIONAL = "PROVISIONAL"
    #: as fast as it must be; in a bad regime, as slow as claimed
    PASS = "PASS"  # noqa: S105 - no password


#: Not green.
GRAVE = (Verdict.REGRESSED, Verdict.STALE, Verdict.UNRESOLVED)

#: A relative difference up to this is none: it is the margin of `fp8.testing.timing.Plan`.
NO_DIFFERENCE = 0.02


@dataclass(frozen=True, slots=True)
class Interval:
    """A ratio and its confidence interval, ends included.

    Attributes:
        ratio: The time of the alternative (bfloat16, or the remedy) over that of the case.
        low: Its lower end.
        high: Its upper end.
    """

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.ratio:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and the sentence that explains it."""

    verdict: Verdict
    reason: str


def of_threshold(measured: Interval | None, threshold: Threshold) -> Judgement:
    """Hold a case to its threshold.

    measured: None when too many blocks were void to say anything. It passes when the whole interval
    is at or above the floor, and regresses when the whole interval is below it.
    """
    if measured is None:
        return _void()
    floor = f"{threshold.floor:.3f} ({threshold.ratio:.3f} less {threshold.margin:.0%})"
    if threshold.provisional:
        reached = "reaches" if measured.low >= threshold.floor else "does not surely reach"
        why = f"{measured} {reached} {floor}, which is {threshold.source.kind}, not measured here"
        return Judgement(Verdict.PROVISIONAL, why)
    if measured.low >= threshold.floor:
        return Judgement(Verdict.PASS, f"{measured} reaches {floor}")
    if measured.high < threshold.floor:
        return Judgement(Verdict.REGRESSED, f"{measured} is below {floor}")
    return Judgement(Verdict.UNRESOLVED, f"{measured} may be on either side of {floor}")


def of_claim(measured: Interval | None, regime: Regime) -> Judgement | None:
    """Hold a case to the claim about its regime; None when the claim has no number.

    measured: of the regime's own metric, against its own alternative.
    """
    if regime.at_most is None and regime.at_least is None:
        return None
    if measured is None:
        return _void()
    most = float("inf") if regime.at_most is None else regime.at_most
    least = float("-inf") if regime.at_least is None else regime.at_least
    ends = (("at least", regime.at_least), ("at most", regime.at_most))
    claim = f"{regime.id}: " + ", ".join(f"{word} {end:g}" for word, end in ends if end is not None)
    if least <= measured.low and measured.high <= most:
        return Judgement(Verdict.PASS, f"{measured} is as claimed ({claim})")
    if measured.low > most or measured.high < least:
        why = f"{measured} is better than claimed ({claim}): take the claim back"
        return Judgement(Verdict.STALE, why)
    return Judgement(Verdict.UNRESOLVED, f"{measured} may be on either side of the claim ({claim})")


def of_remedy(measured: Interval | None) -> Judgement:
    """Hold what was set right to not being slower than bfloat16, within `NO_DIFFERENCE`."""
    if measured is None:
        return _void()
    least = 1 / (1 + NO_DIFFERENCE)
    if measured.low >= least:
        return Judgement(Verdict.PASS, f"{measured}: with the remedy not slower than bfloat16")
    if measured.high < least:
        return Judgement(Verdict.REGRESSED, f"{measured}: slower than bfloat16 with the remedy")
    return Judgement(Verdict.UNRESOLVED, f"{measured} may be slower than bfloat16")


def of_case(
    measured: Interval | None,
    threshold: Threshold | None,
    regimes: Iterable[Regime],
    *,
    metric: Metric = "time",
    against: Against = "bfloat16",
    remedied: bool = False,
) -> Judgement | None:
    """The gravest judgement on a case; None when nothing is known of it.

    Args:
        measured: The case's ratio; None when it could not be measured.
        threshold: What it is held to, or None.
        regimes: Those that the case is in.
        metric: What the ratio is of: a claim about another is not this case's business.
        against: What the case is compared with; likewise.
        remedied: Whether it must not be slower than bfloat16: see `of_remedy`.
    """
    claims = [r for r in regimes if (r.metric, r.against) == (metric, against)]
    found = [of_claim(measured, regime) for regime in claims]
    if threshold is not None:
        found.append(of_threshold(measured, threshold))
    if remedied:
        found.append(of_remedy(measured))
    if measured is None:
        found.append(_void())
    gravity = list(Verdict)
    known = [judgement for judgement in found if judgement is not None]
    return min(known, key=lambda judgement: gravity.index(judgement.verdict), default=None)


def _void() -> Judgement:
    return Judgement(Verdict.UNRESOLVED, "too few valid blocks")
