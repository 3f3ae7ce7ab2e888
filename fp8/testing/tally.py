"""What a session counted, in plain data that adds up over processes.

One `Tally` a process; under pytest-xdist each worker's travels to the controller as JSON and is
merged there, so every number of the summary is the same with and without it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any


@dataclass(slots=True)
class LawCount:
    """What was compared for one law."""

    comparisons: int = 0
    values: int = 0
    examples: int = 0


@dataclass(slots=True)
class TargetTally:
    """What was counted for one target.

    Attributes:
        declared: The laws that its collected tests declare: those that can be checked.
        laws: What was compared, by law.
        violated: Laws with an unexpected failure, and the tests that found it.
        tests: How many of its tests ran (those skipped by capability didn't).
        examples: How many examples they drew; a test that draws none is one example.
        skipped: Tests skipped by capability, by reason.
        deviations: Expected deviations met, by the id of their expectation.
        notes: Lines for the summary, such as a measured accumulator width.
    """

    declared: set[str] = field(default_factory=set)
    laws: dict[str, LawCount] = field(default_factory=dict)
    violated: dict[str, set[str]] = field(default_factory=dict)
    tests: int = 0
    examples: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    deviations: Counter[str] = field(default_factory=Counter)
    notes: set[str] = field(default_factory=set)

    @property
    def values(self) -> int:
        """How many values were compared, over all laws."""
        return sum(count.values for count in self.laws.values())

    def law(self, law_id: str) -> LawCount:
        """The count of a law, made when there is none yet."""
        count = self.laws.get(law_id)
        if count is None:
            count = self.laws[law_id] = LawCount()
        return count

    def merge(self, other: TargetTally) -> None:
        """Add what another process counted."""
        self.declared |= other.declared
        self.notes |= other.notes
        self.tests += other.tests
        self.examples += other.examples
        self.skipped.update(other.skipped)
        self.deviations.update(other.deviations)
        for law_id, tests in other.violated.items():
            self.violated.setdefault(law_id, set()).update(tests)
        for law_id, theirs in other.laws.items():
            ours = self.law(law_id)
            ours.comparisons += theirs.comparisons
            ours.values += theirs.values
            ours.examples += theirs.examples


@dataclass(slots=True)
class Tally:
    """What one session, or one worker of it, counted.

    Attributes:
        targets: By the target's name.
        matched: Comparisons that an expectation matched and that passed, by its id.
        examples_run: Expectations whose own example ran to its end.
        examples_missing: Expectations whose example isn't among the tests.
        measurements: What `Judge.record` was given.
        workers_lost: Worker processes that died with their counts.
    """

    targets: dict[str, TargetTally] = field(default_factory=dict)
    matched: Counter[str] = field(default_factory=Counter)
    examples_run: set[str] = field(default_factory=set)
    examples_missing: set[str] = field(default_factory=set)
    measurements: list[dict[str, Any]] = field(default_factory=list)
    workers_lost: int = 0

    def target(self, name: str) -> TargetTally:
        """The tally of a target, made when there is none yet."""
        return self.targets.setdefault(name, TargetTally())

    def merge(self, other: Tally) -> None:
        """Add what another process counted."""
        for name, theirs in other.targets.items():
            self.target(name).merge(theirs)
        self.matched.update(other.matched)
        self.examples_run |= other.examples_run
        self.examples_missing |= other.examples_missing
        self.measurements += other.measurements
        self.workers_lost += other.workers_lost

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries, lists, strings and integers."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Tally:
        """The inverse of `to_json`."""
        return cls(
            targets={name: _target_from_json(d) for name, d in data["targets"].items()},
            matched=Counter(data["matched"]),
            examples_run=set(data["examples_run"]),
            examples_missing=set(data["examples_missing"]),
            measurements=list(data["measurements"]),
            workers_lost=data["workers_lost"],
        )


def _target_from_json(data: dict[str, Any]) -> TargetTally:
    return TargetTally(
        declared=set(data["declared"]),
        laws={law_id: LawCount(**count) for law_id, count in data["laws"].items()},
        violated={law_id: set(tests) for law_id, tests in data["violated"].items()},
        tests=data["tests"],
        examples=data["examples"],
        skipped=Counter(data["skipped"]),
        deviations=Counter(data["deviations"]),
        notes=set(data["notes"]),
    )


def _plain(value: Any) -> Any:
    """Dataclasses and counters as dictionaries, sets as sorted lists: JSON has none of them."""
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, set):
        return sorted(value)
    return value
