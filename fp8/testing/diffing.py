"""Comparing two records: what changed between two runs, and whether that matters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8.testing.records import SQNR_TOLERANCE_DB

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fp8.testing.agreement import Agreement
    from fp8.testing.records import Record

Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class EnvironmentChange:
    """One line of the environment that differs; None where a run doesn't have it."""

    name: str
    old: str | None
    new: str | None


@dataclass(frozen=True, slots=True)
class MeasurementChange:
    """One measurement that differs."""

    target: str
    test: str
    name: str
    kind: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Difference:
    """What two records say together.

    Attributes:
        environment: What differs in the environments: told, not judged.
        changed: Measurements that aren't what they were.
        missing: (target, test, name) of measurements that only the old record has.
        added: As `missing`, of those that only the new record has: told, not judged.
        unchecked: (target, law) of laws that only the old run compared anything for.
        unchanged: How many measurements are the same.
        speed: The timings that both have; None if there are none.
    """

    environment: tuple[EnvironmentChange, ...]
    changed: tuple[MeasurementChange, ...]
    missing: tuple[Key, ...]
    added: tuple[Key, ...]
    unchecked: tuple[tuple[str, str], ...]
    unchanged: int
    speed: Agreement | None

    @property
    def same(self) -> bool:
        """Whether nothing changed and nothing is missing."""
        return not (self.changed or self.missing or self.unchecked)


def compare(old: Record, new: Record) -> Difference:
    """Compare two records: exact things exactly, SQNRs within `SQNR_TOLERANCE_DB`.

    Timings are the same if their verdicts are and their change isn't beyond the margin for certain.
    """
    before, after = _by_key(old), _by_key(new)
    shared = [key for key in before if key in after]
    speed = _speed(old, new)
    slow = {} if speed is None else speed.pairs
    differing = [
        key
        for key in shared
        if not (slow[key].same if key in slow else _same(before[key], after[key]))
    ]
    names = dict.fromkeys([*old.environment, *new.environment])
    return Difference(
        environment=tuple(
            EnvironmentChange(name, old.environment.get(name), new.environment.get(name))
            for name in names
            if old.environment.get(name) != new.environment.get(name)
        ),
        changed=tuple(_change(key, before[key], after[key]) for key in differing),
        missing=tuple(key for key in before if key not in after),
        added=tuple(key for key in after if key not in before),
        unchecked=tuple(
            (target, law)
            for target, laws in old.laws.items()
            for law, values in laws.items()
            if values and not new.laws.get(target, {}).get(law)
        ),
        unchanged=len(shared) - len(differing),
        speed=speed,
    )


def _speed(old: Record, new: Record) -> Agreement | None:
    if not all(any(one["kind"] == "timing" for one in r.measurements) for r in (old, new)):
        return None
    from fp8.testing.agreement import agreement  # needs scipy, which other records do without

    return agreement(old, new)


def _by_key(record: Record) -> dict[Key, Mapping[str, Any]]:
    return {(one["target"], one["test"], one["name"]): one for one in record.measurements}


def _same(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    if old["kind"] != new["kind"]:
        return False
    if old["value"] == new["value"] or old["kind"] == "seconds":
        return True
    # NaN and differing infinities have no difference that is small
    return (
        old["kind"] == "sqnr" and abs(float(old["value"]) - float(new["value"])) < SQNR_TOLERANCE_DB
    )


def _change(key: Key, old: Mapping[str, Any], new: Mapping[str, Any]) -> MeasurementChange:
    kind = old["kind"] if old["kind"] == new["kind"] else f"{old['kind']} → {new['kind']}"
    return MeasurementChange(*key, kind, _shown(old), _shown(new))


def _shown(one: Mapping[str, Any]) -> str:
    """A value as a person reads it: of a hash the first digits, which is enough to differ."""
    value = one["value"]
    if one["kind"] == "sqnr":
        return f"{float(value):.4f} dB"
    if one["kind"] == "timing":
        from fp8.testing.agreement import timed

        return str(timed(one))
    if one["kind"] == "hash":
        described, _, digest = str(value).partition("sha256:")
        return described + digest[:12]
    return str(value)
