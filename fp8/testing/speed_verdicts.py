"""What a measured ratio means for its case: held to its threshold, and to the claims about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fp8.regimes import Regime
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


def of_case(
    measured: Interval | None, threshold: Threshold | None, regimes: Iterable[Regime]
) -> Judgement | None:
    """The gravest judgement on a case's time against bfloat16; None when nothing is known of it.

    regimes: those that the case is in; a claim about another ratio (memory, the time against the
    remedy) is for whoever measures that ratio, by `of_claim`.
    """
    claims = [r for r in regimes if (r.metric, r.against) == ("time", "bfloat16")]
    found = [of_claim(measured, regime) for regime in claims]
    if threshold is not None:
        found.append(of_threshold(measured, threshold))
    gravity = list(Verdict)
    known = [judgement for judgement in found if judgement is not None]
    return min(known, key=lambda judgement: gravity.index(judgement.verdict), default=None)


def _void() -> Judgement:
    return Judgement(Verdict.UNRESOLVED, "too few valid blocks")
