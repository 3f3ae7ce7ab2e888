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

`when` names facts of the example that is being compared: equal to the value, or to one of a
list. Versions of packages are PEP 440 specifiers. An empty `when` always holds. `example` is a
test that always draws the case: with or without the brackets that pytest adds.

An entry is *stale* when its example ran and no comparison that it matches failed: what it
excuses is gone. It is *expired* after `expires`; it still excuses, and says so.
"""

from __future__ import annotations

import datetime as dt
import tomllib
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from fp8.testing.law_table import LAWS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

SCHEMA = 1
#: Facts that are versions: `when` holds a PEP 440 specifier for them.
VERSION_FACTS = frozenset({"python", "torch", "torchao", "transformer_engine", "triton"})


class ExpectationError(ValueError):
    """The expectations file can't be used; the message says where and why."""


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
        chosen = self.when if names is None else {n: self.when[n] for n in names if n in self.when}
        return all(_fact_holds(name, wanted, facts) for name, wanted in chosen.items())

    def is_example(self, nodeid: str) -> bool:
        """Whether `nodeid` is this entry's example."""
        return nodeid == self.example or nodeid.startswith(self.example + "[")


def _fact_holds(name: str, wanted: object, facts: Mapping[str, object]) -> bool:
    if name not in facts:
        return False
    fact = facts[name]
    if name in VERSION_FACTS:
        # prereleases: a nightly build of torch is what the condition is about, too
        return SpecifierSet(str(wanted)).contains(str(fact), prereleases=True)
    options = wanted if isinstance(wanted, list) else [wanted]
    # bool is int in Python: M = 1 must not match a switch that is on
    return any(fact == o and isinstance(fact, bool) is isinstance(o, bool) for o in options)


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
        ExpectationError: It can't be read, isn't TOML, has another schema, an unknown or a
            missing key, a value of a wrong type, an unknown law, or an id twice.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        msg = f"{path}: {error}"
        raise ExpectationError(msg) from error
    unknown = sorted(data.keys() - {"schema", "expectation"})
    if unknown:
        msg = f"{path}: unknown key {unknown[0]!r}; known: schema, expectation"
        raise ExpectationError(msg)
    if data.get("schema") != SCHEMA:
        msg = f"{path}: schema must be {SCHEMA}, got {data.get('schema')!r}"
        raise ExpectationError(msg)
    tables = data.get("expectation", [])
    if not isinstance(tables, list):
        msg = f"{path}: expectation must be an array of tables: write [[expectation]]"
        raise ExpectationError(msg)
    entries: dict[str, Expectation] = {}
    for number, table in enumerate(tables, start=1):
        where = f"{path}: expectation {number} ({table.get('id', 'without id')})"
        entry = _entry(table, where)
        if entry.id in entries:
            msg = f"{where}: this id was used before"
            raise ExpectationError(msg)
        entries[entry.id] = entry
    return Expectations(tuple(entries.values()))


def _entry(table: dict[str, Any], where: str) -> Expectation:
    known = [f.name for f in fields(Expectation)]
    for name in sorted(table.keys() - set(known)):
        msg = f"{where}: unknown key {name!r}; known: {', '.join(known)}"
        raise ExpectationError(msg)
    wanted: dict[str, type] = dict.fromkeys(known, str)
    wanted |= {"when": dict, "expires": dt.date}
    table = {"when": {}, **table}
    for name, kind in wanted.items():
        if name not in table:
            msg = f"{where}: {name} is missing"
            raise ExpectationError(msg)
        if not isinstance(table[name], kind) or table[name] == "":
            msg = f"{where}: {name} must be a {kind.__name__}, got {table[name]!r}"
            raise ExpectationError(msg)
    if isinstance(table["expires"], dt.datetime):
        msg = f"{where}: expires must be a date without a time, got {table['expires']}"
        raise ExpectationError(msg)
    if table["law"] not in LAWS:
        msg = f"{where}: law {table['law']!r} is unknown; known: {', '.join(LAWS)}"
        raise ExpectationError(msg)
    for name, value in table["when"].items():
        _check_condition(name, value, where)
    return Expectation(**table)


def _check_condition(name: str, value: object, where: str) -> None:
    if name in VERSION_FACTS:
        try:
            SpecifierSet(value if isinstance(value, str) else "not a string")
        except InvalidSpecifier as error:
            msg = f"{where}: when.{name} must be a PEP 440 specifier, got {value!r}"
            raise ExpectationError(msg) from error
        return
    options = value if isinstance(value, list) else [value]
    if not options or not all(isinstance(o, str | int | float) for o in options):
        msg = f"{where}: when.{name} must be a string, a number, a boolean or a list of these"
        raise ExpectationError(msg)
