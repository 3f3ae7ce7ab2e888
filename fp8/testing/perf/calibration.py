"""Thresholds from records: what a GPU was measured to do, and how that differs between runs."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from fp8.claims import Provenance
from fp8.testing.thresholds import Threshold

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Mapping, Sequence

    from fp8.testing.records import Record

#: Families whose speed-ups are gated, besides the bytes that are saved for backward. The ceilings
#: are no stack's; the others are for the regimes.
GATED = ("product", "cast", "linear", "step")
#: A case that differs by more than this from run to run gates nothing: three times it is a third.
_NOISIEST = 0.1
#: Of a step that waits for the host the GPU is busy for a smaller share of the time than this.
_BUSY = 0.8
_VERSIONS = (
    "GPU driver",
    "torch",
    "CUDA of torch",
    "triton",
    "torchao",
    "transformer_engine",
    "fp8",
)


class CalibrationError(ValueError):
    """Records that no thresholds can be made of; the message says why."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was made of records.

    Attributes:
        gpu: As torch names it.
        thresholds: One for each case that every record has.
        left_out: Case to why there is none.
    """

    gpu: str
    thresholds: tuple[Threshold, ...]
    left_out: Mapping[str, str]


def calibrated(records: Sequence[Record], today: dt.date) -> Calibration:
    """The thresholds of one GPU from one record or more.

    A ratio is the mean over the runs; its SD is that between them, of the log-ratio. With one run
    that is not known, and the SD from pair to pair within it stands in. That is no bound of it
    (addresses and chosen algorithms differ from process to process), but it tells the noisy cases
    from the quiet ones, which the 5 % of every threshold are for.

    Raises:
        CalibrationError: The records are of no GPU, of several, or of different software.
    """
    gpu, versions = _one(records)
    found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        for one in record.measurements:
            if one["kind"] == "timing" and _is_gated(one):
                found[one["name"]].append(one["value"])
    runs = f"{len(records)} runs of the suite (fp8 calibrate)"
    if len(records) == 1:
        runs = "one run of the suite (fp8 calibrate): each SD is that from pair to pair within it"
    source = Provenance("measured", runs, date=today, versions=versions)
    left_out = {case: why for case, values in found.items() if (why := _unfit(values, records))}
    kept = [
        Threshold(case, math.exp(fmean(map(_log, values))), source, sd=_sd(values))
        for case, values in found.items()
        if case not in left_out
    ]
    if not kept:
        reasons = "; ".join(f"{case}: {why}" for case, why in left_out.items())
        raise CalibrationError(f"no case can be held to anything: {reasons or 'none was measured'}")
    return Calibration(gpu, tuple(kept), left_out)


def merged(calibration: Calibration, known: Mapping[str, Threshold]) -> list[Threshold]:
    """The calibration's thresholds, and those of cases that it did not measure."""
    measured = {threshold.case for threshold in calibration.thresholds}
    others = [threshold for case, threshold in known.items() if case not in measured]
    return [*calibration.thresholds, *others]


def compared_with(calibration: Calibration, known: Mapping[str, Threshold]) -> list[str]:
    """What became of the provisional thresholds that were measured now, one line each."""
    lines = []
    for threshold in calibration.thresholds:
        old = known.get(threshold.case)
        if old is not None and old.provisional:
            reached = threshold.ratio >= old.floor
            what = "confirmed" if reached else "replaced, it is not reached"
            lines.append(f"{threshold.case}: {old.ratio:.3g} {what}: {threshold.ratio:.3g}")
    return lines


def _one(records: Sequence[Record]) -> tuple[str, str]:
    """The GPU and the versions that all the records share."""
    gpus = {
        one["facts"]["gpu"]
        for record in records
        for one in record.measurements
        if one["kind"] == "timing"
    }
    if len(gpus) != 1:
        raise CalibrationError(f"the records must be of one GPU, got {sorted(gpus) or 'none'}")
    (gpu,) = gpus
    described = {
        ", ".join(f"{name} {r.environment[name]}" for name in _VERSIONS if name in r.environment)
        for r in records
    }
    if len(described) != 1:
        raise CalibrationError(f"the records are of different software: {sorted(described)}")
    return gpu, f"{gpu}, {described.pop()}"


def _is_gated(one: Mapping[str, Any]) -> bool:
    return one["facts"]["family"] in GATED or one["value"]["of"] == "saved bytes"


def _unfit(values: Sequence[Mapping[str, Any]], records: Sequence[Record]) -> str:
    """Why a case gets no threshold, or ""."""
    if len(values) < len(records):
        return f"measured in {len(values)} of {len(records)} records"
    for value in values:
        if value["ratio"] is None:
            return f"no result: {value['reason']}"
        if value["fell_back"]:
            return value["fell_back"]  # type: ignore[no-any-return]
        if value["quantity"] == "call" and value["of"] == "speed-up" and _waits(value):
            return "it waits for the host, whose speed is not the GPU's"
    sd = _sd(values)
    what = "run to run" if len(values) > 1 else "pair to pair"
    return "" if sd <= _NOISIEST else f"it differs by {sd:.0%} from {what}"


def _waits(value: Mapping[str, Any]) -> bool:
    sides = (value["subject"], value["baseline"])
    return any(side["device_ms"] < _BUSY * side["call_ms"] for side in sides)


def _sd(values: Sequence[Mapping[str, Any]]) -> float:
    if len(values) > 1:
        return stdev(map(_log, values))
    (value,) = values
    sd: float = value["sd"]
    return sd


def _log(value: Mapping[str, Any]) -> float:
    return math.log(value["ratio"])
