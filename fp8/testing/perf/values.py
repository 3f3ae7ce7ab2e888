"""The record's entry of a case: plain JSON with everything that a table, a picture or a gate needs.

Its kind is ``timing``, its name the case's id, its facts ``family``, ``gpu`` (as torch names it)
and what distinguishes the case: ``recipe``, ``mode``, ``M``, ``K``, ``N``, ``scenario``,
``gradient``, …. The target stands beside them, as in every entry. Its value::

    {"of": "speed-up",            # what the ratio is of: see fp8.testing.perf.cases.Ratio
     "quantity": "device",        # by which time: device, call
     "ratio": 1.31, "low": 1.30, "high": 1.32,     # null without enough valid pairs; 1.31 is faster
     "sd": 0.004, "pairs": 5, "confidence": 0.995,  # of one pair's log-ratio; of the interval
     "verdict": "PASS",           # or RECORDED, where nothing is known that it could be held to
     "reason": "...",
     "threshold": {"ratio": 1.3, "floor": 1.235, "provisional": false, "source": "measured"},
     "fell_back": "",             # what shows that it was not float8
     "regimes": ["small-n"],      # that it is in
     "predicted": 1.4,            # the ratio by the roofline, or null
     "flop": 0,                   # operations of one call, of either callable
     "moved": 0, "baseline_moved": 0,  # bytes that one call has to move at least
     "attempts": 1,               # 2: the first gave a bad verdict, this is the second
     "subject": {...}, "baseline": {...},
     "rounds": 5, "void": {"compiled": 1}, "seconds": 1.2, "stopped": "...", "notes": ["..."]}

`subject` and `baseline`, the two callables, each have ::

    {"name": "tensorwise",
     "device_ms": 1.0, "call_ms": 1.0, "host_ms": 0.1,   # medians of valid blocks
     "first_ms": 9000.0, "second_ms": 2.0, "peak_bytes": 0, "saved_bytes": null, "steady": true,
     "method": "graph",
     "kernels": {"float8_us": 1.0, "product_us": 0.0, "rest_us": 1.0, "float8": 3, "products": 0,
                 "kernels": 9, "names": [["nvjet_...", 3]]},   # or null
     "sm_mhz": 1700, "power_w": 690, "temperature_c": 60, "reasons": ["SW power cap"],
     "samples": [[[1.0, 1.0], [1.0]], ...]}   # ms, of `quantity`: by round, both blocks' samples
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8.testing.perf.outcomes import Measured, Outcome

#: Of a case that nothing is known of: it is measured and held to nothing.
RECORDED = "RECORDED"
#: Digits of a sample that mean something: events resolve half a microsecond of a millisecond.
_DIGITS = 5


def value(outcome: Outcome) -> dict[str, Any]:
    """The value of a case's entry."""
    measured, case = outcome.measured, outcome.case
    interval, estimate = measured.interval, measured.comparison.estimate
    measurement, threshold = measured.measurement, outcome.threshold
    judgement = outcome.judgement
    by_blocks = case.ratio == "speed-up" and estimate is not None
    return {
        "of": case.ratio,
        "quantity": case.quantity,
        "ratio": None if interval is None else interval.ratio,
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
        "sd": estimate.sd if by_blocks and estimate else 0.0,
        "pairs": estimate.pairs if by_blocks and estimate else 0,
        "confidence": measurement.plan.look_confidence,
        "verdict": RECORDED if judgement is None else str(judgement.verdict),
        "reason": "" if judgement is None else judgement.reason,
        "threshold": None
        if threshold is None
        else {
            "ratio": threshold.ratio,
            "floor": threshold.floor,
            "provisional": threshold.provisional,
            "source": threshold.source.kind,
        },
        "fell_back": measured.fell_back,
        "regimes": [regime.id for regime in outcome.regimes],
        "predicted": outcome.predicted,
        "flop": case.flop,
        "moved": case.moved,
        "baseline_moved": case.baseline_moved,
        "attempts": outcome.attempts,
        "subject": _callable(measured, case.subject),
        "baseline": _callable(measured, case.baseline),
        "rounds": len(measurement.rounds),
        "void": dict(measured.comparison.void),
        "seconds": measurement.seconds,
        "stopped": measurement.stopped,
        "notes": list(measurement.notes),
    }


def _callable(measured: Measured, name: str) -> dict[str, Any]:
    measurement = measured.measurement
    start, conditions = measurement.starts[name], measurement.conditions(name)
    breakdown = measured.breakdowns.get(name)
    quantity = measured.case.quantity
    by_blocks = measured.case.ratio == "speed-up"
    return {
        "name": name,
        "device_ms": measurement.ms(name, "device"),
        "call_ms": measurement.ms(name, "call"),
        "host_ms": measurement.ms(name, "host"),
        "first_ms": start.first_ms,
        "second_ms": start.second_ms,
        "peak_bytes": start.peak_bytes,
        "saved_bytes": measured.saved.get(name),
        "steady": measurement.warm_ups[name].steady,
        "method": start.method,
        "kernels": None if breakdown is None else _listed(asdict(breakdown)),
        "sm_mhz": conditions.sm_mhz,
        "power_w": conditions.power_w,
        "temperature_c": conditions.temperature_c,
        "reasons": sorted(conditions.reasons or ()),
        "samples": [
            [
                [_rounded(ms) for ms in (b.device_ms if quantity == "device" else b.call_ms)]
                for b in one[name]
            ]
            for one in measurement.rounds
        ]
        if by_blocks
        else [],
    }


def _listed(breakdown: dict[str, Any]) -> dict[str, Any]:
    """Tuples as lists, as they come back from JSON."""
    return {**breakdown, "names": [list(pair) for pair in breakdown["names"]]}


def _rounded(ms: float) -> float:
    return float(f"{ms:.{_DIGITS}g}")
