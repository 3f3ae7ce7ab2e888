"""Known deviations of a target: loaded from TOML, matched per comparison, with reason and expiry.

The file has ``schema = 1`` and any number of entries::

    [[expectation]]
    id = "torchao-bias"                    # unique
    target = "torchao"                     # the target's name
    law = "P27"
    check = "bias*"                        # the check's name, or a pattern as of fnmatch
    when = { recipe = "rowwise", M = [0, 1], torch = ">=2.12" }
    reason = "the bias is added after the output was rounded"
    link = "https://github.com/pytorch/ao/issues/1549"
    expires = 2027-01-01
    example = "tests/numerics/test_linear.py::test_bias_is_rounded_once"

`when` names facts of the example that is being compared; `fp8.claims` explains the conditions. An
empty `when` always holds. `example` is a test that always draws the case: with or without the
brackets that pytest adds.

An entry is *stale* when its example ran and no comparison that it matches failed: what it
excuses is gone. It is *expired* after `expires`; it still excuses, and says so.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from fp8 import claims
from fp8.claims import ClaimError
from fp8.testing.law_table import LAWS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path


class ExpiredExpectationWarning(UserWarning):
    """An expectation is past its date: look whether its reason still stands."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """One known deviation; the module's docstring explains the fields."""

    id: str
    target: str
    law: str
    check: str
    reason: str
    link: str
    expires: dt.date
    example: str
    when: Mapping[str, Any] = field(default_factory=dict)

    def matches(self, check: str, facts: Mapping[str, object]) -> bool:
        """Whether a comparison of this entry's target and law is the one it speaks of."""
        same = check == self.check or fnmatchcase(check, self.check)
        return same and self.holds(facts)

    def holds(self, facts: Mapping[str, object], names: Iterable[str] | None = None) -> bool:
        """Whether `when` holds for the facts: all of it, or what it says of `names`."""
        return claims.holds(self.when, facts, names)

    def is_example(self, nodeid: str) -> bool:
        """Whether `nodeid` is this entry's example."""
        return nodeid == self.example or nodeid.startswith(self.example + "[")


@dataclass(frozen=True, slots=True)
class Expectations:
    """All entries, found by target and law."""

    entries: tuple[Expectation, ...] = ()
    _index: Mapping[tuple[str, str], tuple[Expectation, ...]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        index: dict[tuple[str, str], tuple[Expectation, ...]] = {}
        for entry in self.entries:
            key = (entry.target, entry.law)
            index[key] = (*index.get(key, ()), entry)
        object.__setattr__(self, "_index", index)

    def find(
        self, target: str, law: str, check: str, facts: Mapping[str, object]
    ) -> Expectation | None:
        """The first entry that matches a comparison, or None."""
        for entry in self._index.get((target, law), ()):
            if entry.matches(check, facts):
                return entry
        return None

    def expired(self, today: dt.date) -> tuple[Expectation, ...]:
        """The entries past their date."""
        return tuple(entry for entry in self.entries if entry.expires < today)


def load_expectations(path: Path) -> Expectations:
    """Read an expectations file.

    Raises:
        ClaimError: It can't be read, isn't TOML, has another schema, an unknown or a missing
            key, a value of a wrong type, an unknown law, or an id twice.
    """
    data = claims.read(path, "expectation")
    tables = claims.entries(data, "expectation", path)
    return Expectations(tuple(_entry(table, where) for table, where in tables))


def _entry(table: dict[str, Any], where: str) -> Expectation:
    required: dict[str, type] = dict.fromkeys((f.name for f in fields(Expectation)), str)
    del required["when"]
    claims.checked(table, where, required | {"expires": dt.date}, {"when": dict})
    if table["law"] not in LAWS:
        raise ClaimError(f"{where}: law {table['law']!r} is unknown; known: {', '.join(LAWS)}")
    claims.check_conditions(table.get("when", {}), f"{where}: when")
    return Expectation(**table)
