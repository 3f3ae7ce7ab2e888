"""From outcomes to the judge: every case is recorded, then held to the laws that it is about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fp8.testing.laws import LawViolation
from fp8.testing.perf import values
from fp8.testing.perf.explaining import explained
from fp8.testing.speed_verdicts import GRAVE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fp8.testing.laws import Judge
    from fp8.testing.perf.outcomes import Outcome


def entries(outcomes: Iterable[Outcome], gpu: str) -> list[dict[str, Any]]:
    """The record's entries, without the target and the test, which the judge adds."""
    return [
        {
            "name": outcome.case.id,
            "kind": "timing",
            "value": values.value(outcome),
            "facts": {"family": outcome.case.family, "gpu": gpu, **outcome.case.facts},
        }
        for outcome in outcomes
    ]


def judge_all(judge: Judge, outcomes: Iterable[Outcome], gpu: str) -> None:
    """Record every case, then judge every case; fails with all that was wrong.

    Raises:
        LawViolation: At least one case broke P02 (its time), P14 (what it saves), P21 (too few
            valid pairs to say anything) or P26 (it did not run in float8).
    """
    __tracebackhide__ = True
    both = [(outcome, entry) for outcome in outcomes for entry in entries([outcome], gpu)]
    for _, entry in both:
        judge.example(**entry["facts"])
        judge.record(entry["name"], entry["value"], entry["kind"])
    broken: list[str] = []
    for outcome, entry in both:
        judge.example(case=entry["name"], **entry["facts"])
        for check in (_valid, _float8, _verdict):
            _collect(broken, check, judge, outcome, entry)
    if broken:
        raise LawViolation("\n\n".join(broken))


def _collect(broken: list[str], check: Callable[..., object], *args: Any) -> None:
    __tracebackhide__ = True
    try:
        check(*args)
    except LawViolation as violation:
        broken.append(str(violation))


def _valid(judge: Judge, outcome: Outcome, entry: dict[str, Any]) -> None:
    if outcome.case.ratio == "speed-up":
        measured = outcome.measured
        judge.true("P21", "enough valid pairs", not measured.too_few, measured.comparison.reason)


def _float8(judge: Judge, outcome: Outcome, entry: dict[str, Any]) -> None:
    if outcome.case.float8_products:
        fell_back = outcome.measured.fell_back
        judge.true("P26", "float8 products ran", not fell_back, fell_back)


def _verdict(judge: Judge, outcome: Outcome, entry: dict[str, Any]) -> None:
    if outcome.judgement is None:
        return
    law = "P14" if outcome.case.ratio == "saved bytes" else "P02"
    good = outcome.judgement.verdict not in GRAVE
    judge.true(law, outcome.case.ratio, good, "\n".join(explained(entry)))
