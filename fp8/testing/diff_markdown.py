"""The difference of two records in Markdown, as a summary of a CI job shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from fp8.testing.diffing import Difference

_NONE = "–"  # noqa: RUF001 - a dash for what there is not


def as_markdown(difference: Difference) -> str:
    """Environment first, since it may explain the rest; then what changed and what is missing."""
    return "\n".join(_lines(difference)) + "\n"


def _lines(difference: Difference) -> Iterator[str]:
    yield "# What changed"
    yield ""
    yield (
        f"**{difference.unchanged} unchanged, {len(difference.changed)} changed,"
        f" {len(difference.missing)} missing, {len(difference.added)} new**"
    )
    if difference.speed is not None:
        yield ""
        yield f"{difference.speed}."
    changes = {} if difference.speed is None else difference.speed.pairs
    yield from _table(
        ("environment", "old", "new"),
        [(e.name, e.old or _NONE, e.new or _NONE) for e in difference.environment],
    )
    rows = []
    for one in difference.changed:
        pair = changes.get((one.target, one.test, one.name))
        change = None if pair is None else pair.change
        rows.append((one.target, one.name, one.old, one.new, str(change or _NONE)))
    yield from _table(("target", "changed", "old", "new", "change"), rows)
    yield from _table(("target", "missing"), [(key[0], key[2]) for key in difference.missing])


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table after an empty line; nothing when there are no rows."""
    lines = [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        for row in (heading, ["---"] * len(heading), *rows)
    ]
    if len(lines) > 2:
        yield ""
        yield from lines
