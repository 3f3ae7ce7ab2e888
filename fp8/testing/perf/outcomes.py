"""What became of a case: its measured ratio, the evidence, what it was held to, the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8.testing.speed_verdicts import Interval
from fp8.testing.timing import analysis

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fp8.regimes import Regime
    from fp8.testing.perf.cases import Case
    from fp8.testing.perf.evidence import Breakdown
    from fp8.testing.speed_verdicts import Judgement
    from fp8.testing.thresholds import Threshold
    from fp8.testing.timing.analysis import Comparison
    from fp8.testing.timing.results import Measurement


@dataclass(frozen=True, slots=True)
class Measured:
    """A case's measurement.

    Attributes:
        case: The case.
        measurement: Of all the callables of its stage.
        comparison: Of its subject with its baseline, by its quantity.
        breakdowns: Where the GPU's time goes, by callable; none for a case that asks for no
            float8 product.
        saved: Bytes kept for backward, by callable, where the case asks for them.
    """

    case: Case
    measurement: Measurement
    comparison: Comparison
    breakdowns: Mapping[str, Breakdown]
    saved: Mapping[str, int]

    @property
    def interval(self) -> Interval | None:
        """The case's ratio; None where too few pairs are valid."""
        subject, baseline = self.case.subject, self.case.baseline
        if self.case.ratio == "saved bytes":
            return _point(self.saved[baseline] / self.saved[subject])
        if self.case.ratio == "first call":
            steady = self.measurement.ms(subject, "call")
            first = self.measurement.starts[subject].first_ms
            return None if steady is None else _point(steady / first)
        estimate = self.comparison.estimate
        if estimate is None or self.too_few:
            return None
        return Interval(estimate.ratio, estimate.low, estimate.high)

    @property
    def too_few(self) -> bool:
        """Whether too many pairs were void, or too few measured, to say anything."""
        rounds, plan = self.measurement.rounds, self.measurement.plan
        valid = 0 if self.comparison.estimate is None else self.comparison.estimate.pairs
        return analysis.too_many_void(valid, len(rounds), plan) or valid < plan.start_pairs

    @property
    def fell_back(self) -> str:
        """What shows that it was not float8, or ""."""
        due = self.case.float8_products
        found = self.breakdowns.get(self.case.subject)
        if not due or (found is not None and found.float8 >= due):
            return ""
        if found is None:
            return f"{due} float8 products are due, and which kernels ran was not seen"
        ran = ", ".join(f"{count} x {name}" for name, count in found.names) or "none at all"
        return f"{due} float8 products are due, {found.float8:g} ran; products that ran: {ran}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A measured case and what it means.

    Attributes:
        measured: See there.
        regimes: Those that the case is in.
        threshold: What it is held to; None where there is none.
        judgement: The gravest; None for a case of which nothing is known.
        predicted: The ratio by the roofline; None where it has nothing to say.
        attempts: How often it was measured: what looked wrong is measured again.
    """

    measured: Measured
    regimes: tuple[Regime, ...]
    threshold: Threshold | None
    judgement: Judgement | None
    predicted: float | None
    attempts: int = 1

    @property
    def case(self) -> Case:
        """The case."""
        return self.measured.case


def _point(ratio: float) -> Interval:
    """Of what was counted, or happens once: without an interval."""
    return Interval(ratio, ratio, ratio)
