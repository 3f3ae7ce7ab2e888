"""Why a case is slow: what it could be, where its time goes, which regime it is in, what to do.

Everything comes from the record's entry, so that a report can be made long after the run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fp8 import regimes
from fp8.testing.speed_verdicts import GRAVE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

#: Families whose ratio is one to bfloat16, of what a model is made of.
_LAYERS = ("linear", "step")


def is_bad(entry: Mapping[str, Any]) -> bool:
    """Whether an entry of the record has a verdict that is not green."""
    return entry["value"]["verdict"] in {str(verdict) for verdict in GRAVE}


def is_slow(entry: Mapping[str, Any]) -> bool:
    """Whether a layer or a step is surely slower than in bfloat16."""
    high = entry["value"]["high"]
    return entry["facts"]["family"] in _LAYERS and high is not None and high < 1


def explained(entry: Mapping[str, Any]) -> Iterator[str]:
    """Lines about a case: what it is, what it was held to, where its time goes, what to do."""
    value = entry["value"]
    yield f"{entry['name']}: {ratio(value)} {value['verdict']}"
    if value["predicted"] is not None:
        yield f"  by the roofline {value['predicted']:.2f}"
    if value["reason"]:
        yield f"  {value['reason']}"
    where = parts(value)
    if where:
        yield f"  ms (of the baseline): {where}"
    yield from (f"  {line}" for line in remedies([entry]))


def remedies(entries: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """What to do about the regimes that these cases are in, one line for each."""
    inside = {name for entry in entries for name in entry["value"]["regimes"]}
    for regime in regimes.load():
        if regime.id in inside:
            yield f"in {regime.id}: {regime.remedy}"


def ratio(value: Mapping[str, Any]) -> str:
    """A ratio with its interval, or without where it has none."""
    if value["ratio"] is None:
        return "no result"
    if value["low"] == value["high"]:
        return f"{value['ratio']:.3g}"
    return f"{value['ratio']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def parts(value: Mapping[str, Any]) -> str:
    """Where the GPU's time goes and how long it waits, ms, with the baseline's in brackets."""
    subject, baseline = value["subject"], value["baseline"]
    ours, theirs = subject["kernels"], baseline["kernels"]
    if ours is None or theirs is None:
        return ""
    # What bfloat16 does besides its products, float8 does too: the rest of the rest is quantising.
    other = min(theirs["rest_us"], ours["rest_us"])
    found = {
        "products": (_products_us(ours), _products_us(theirs)),
        "quantising": (ours["rest_us"] - other, 0.0),
        "other": (other, theirs["rest_us"]),
        "waiting for the host": (1000 * _waiting(subject), 1000 * _waiting(baseline)),
    }
    shown = [f"{name} {us / 1000:.3g} ({base / 1000:.3g})" for name, (us, base) in found.items()]
    return f"{', '.join(shown)}; {ours['kernels']:g} kernels ({theirs['kernels']:g})"


def _products_us(kernels: Mapping[str, Any]) -> float:
    total: float = kernels["float8_us"] + kernels["product_us"]
    return total


def _waiting(one: Mapping[str, Any]) -> float:
    """How long the GPU waits in one call, ms: a call's time less the device's."""
    if one["call_ms"] is None or one["device_ms"] is None:
        return 0.0
    wait: float = max(0.0, one["call_ms"] - one["device_ms"])
    return wait
