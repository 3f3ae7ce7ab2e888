"""Claims in TOML: how expectations, regimes, thresholds and hardware files are read and checked.

A claim is what somebody holds to be true until it is shown otherwise: a value, where it comes from,
when it applies, when it ends. Every such file begins with ``schema = 1`` and holds arrays of tables
with unique ids. A key that nobody knows is an error: a misspelt condition would widen a claim.

Conditions are data: a table from the name of a fact to what must hold of it ::

    when = { recipe = "rowwise", M = [0, 1], N = { at_most = 2048 }, torch = ">=2.12" }

A value, one of a list, a range (`at_least`, `at_most` or both, ends included), or for the version
of a package a PEP 440 specifier.
"""

from __future__ import annotations

import datetime as dt
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from packaging.specifiers import InvalidSpecifier, SpecifierSet

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from importlib.resources.abc import Traversable
    from pathlib import Path

SCHEMA = 1
#: Facts that are versions: a condition on them is a PEP 440 specifier.
VERSION_FACTS = frozenset({"python", "torch", "torchao", "transformer_engine", "triton"})

#: "measured": by this project, with date and versions. "published": by somebody else, with a link.
#: "derived": from other numbers, by the formula that its text gives.
Kind = Literal["measured", "published", "derived"]

_RANGE = ("at_least", "at_most")


class ClaimError(ValueError):
    """A file of claims can't be used; the message says where and why."""


# --- where a claim comes from -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a claim or a number comes from.

    Attributes:
        kind: See `Kind`.
        text: What was measured, what the source says, or the formula.
        link: The source's address; every published claim has one.
        date: When it was measured; every measurement has one.
        versions: What was measured on: the GPU and what ran there; every measurement has them.
    """

    kind: Kind
    text: str
    link: str = ""
    date: dt.date | None = None
    versions: str = ""


def provenance(table: object, where: str) -> Provenance:
    """A provenance from its TOML table. Raises ClaimError when it lacks what its kind needs."""
    found = checked(
        table,
        where,
        required={"kind": str, "text": str},
        optional={"link": str, "date": dt.date, "versions": str},
    )
    if found["kind"] not in get_args(Kind):
        raise ClaimError(
            f"{where}: kind must be one of {', '.join(get_args(Kind))}, got {found['kind']!r}"
        )
    needs = {"measured": ("date", "versions"), "published": ("link",), "derived": ()}
    for name in needs[found["kind"]]:
        if name not in found:
            raise ClaimError(f"{where}: {name} is missing: what is {found['kind']} has one")
    return Provenance(**found)


# --- files and tables ---------------------------------------------------------------------------


def read(path: Path | Traversable, *keys: str) -> dict[str, Any]:
    """The top-level tables of a file, which has ``schema = 1`` and no other keys than `keys`.

    Raises ClaimError: it can't be read, isn't TOML, has another schema or an unknown key.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ClaimError(f"{path}: {error}") from error
    _refuse_unknown(data, ("schema", *keys), str(path))
    if data.get("schema") != SCHEMA:
        raise ClaimError(f"{path}: schema must be {SCHEMA}, got {data.get('schema')!r}")
    return data


def entries(
    data: Mapping[str, Any], key: str, path: object, *, id_key: str = "id"
) -> Iterator[tuple[dict[str, Any], str]]:
    """The tables of the array `key`, each with where it stands, for messages.

    Raises ClaimError when `key` is no array of tables, or an id was used before.
    """
    tables = data.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ClaimError(f"{path}: {key} must be an array of tables: write [[{key}]]")
    seen = set()
    for number, table in enumerate(tables, start=1):
        name = table.get(id_key)
        where = f"{path}: {key} {number} ({name or f'without {id_key}'})"
        if name is not None and name in seen:
            raise ClaimError(f"{where}: this {id_key} was used before")
        seen.add(name)
        yield table, where


def checked(
    table: object,
    where: str,
    required: Mapping[str, type],
    optional: Mapping[str, type] | None = None,
) -> dict[str, Any]:
    """The table itself, once it has all required keys, no unknown ones, and values of their types.

    A string must not be empty; an integer serves where a float is wanted. Raises ClaimError.
    """
    if not isinstance(table, dict):
        raise ClaimError(f"{where}: must be a table, got {table!r}")
    kinds = {**required, **(optional or {})}
    _refuse_unknown(table, kinds, where)
    for name, kind in kinds.items():
        if name in table:
            _check_type(f"{where}: {name}", table[name], kind)
        elif name in required:
            raise ClaimError(f"{where}: {name} is missing")
    return table


def _refuse_unknown(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    unknown = sorted(table.keys() - set(known))
    if unknown:
        raise ClaimError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(known)}")


def _check_type(name: str, value: object, kind: type) -> None:
    # bool is int in Python, and a date with a time is a date
    fits = isinstance(value, (int, float) if kind is float else kind)
    if isinstance(value, bool) and kind is not bool:
        fits = False
    if not fits or value == "":
        raise ClaimError(f"{name} must be a {kind.__name__}, got {value!r}")
    if kind is dt.date and isinstance(value, dt.datetime):
        raise ClaimError(f"{name} must be a date without a time, got {value}")


# --- conditions ---------------------------------------------------------------------------------


def check_conditions(when: object, where: str, known: Collection[str] = ()) -> None:
    """Raise ClaimError for a condition that could never be decided. `where` ends in its name.

    known: the facts that there are; none given, there may be any.
    """
    if not isinstance(when, dict):
        raise ClaimError(f"{where} must be a table, got {when!r}")
    if known:
        _refuse_unknown(when, known, where)
    for name, wanted in when.items():
        if name in VERSION_FACTS:
            try:
                SpecifierSet(wanted if isinstance(wanted, str) else "not a string")
            except InvalidSpecifier as error:
                raise ClaimError(
                    f"{where}.{name} must be a PEP 440 specifier, got {wanted!r}"
                ) from error
        elif not _is_decidable(wanted):
            raise ClaimError(
                f"{where}.{name} must be a string, a number, a boolean or a list of these, or a "
                f"range of at_least and at_most, got {wanted!r}"
            )


def _is_decidable(wanted: object) -> bool:
    if isinstance(wanted, dict):
        ends = wanted.values()
        return bool(wanted) and wanted.keys() <= set(_RANGE) and all(map(_is_number, ends))
    options = wanted if isinstance(wanted, list) else [wanted]
    return bool(options) and all(isinstance(o, str | int | float) for o in options)


def holds(
    when: Mapping[str, object], facts: Mapping[str, object], names: Iterable[str] | None = None
) -> bool:
    """Whether all conditions hold for the facts, or those that speak of `names`.

    A condition on a fact that isn't there does not hold.
    """
    chosen = when if names is None else {name: when[name] for name in names if name in when}
    return all(_fact_holds(name, wanted, facts) for name, wanted in chosen.items())


def _fact_holds(name: str, wanted: object, facts: Mapping[str, object]) -> bool:
    if name not in facts:
        return False
    fact = facts[name]
    if name in VERSION_FACTS:
        # prereleases: a nightly build of torch is what the condition is about, too
        return SpecifierSet(str(wanted)).contains(str(fact), prereleases=True)
    if isinstance(wanted, dict):
        least, most = (wanted.get(end) for end in _RANGE)
        return _is_number(fact) and (
            (least is None or fact >= least) and (most is None or fact <= most)
        )
    options = wanted if isinstance(wanted, list) else [wanted]
    # bool is int in Python: M = 1 must not match a switch that is on
    return any(fact == o and isinstance(fact, bool) is isinstance(o, bool) for o in options)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
