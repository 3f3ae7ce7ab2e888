"""``fp8 diff``: what changed between two records."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import click

from fp8.commands.files import FILE, load

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from rich.console import Console

    from fp8.testing.diffing import Difference


@click.command()
@click.argument("old", type=FILE, metavar="OLD.json")
@click.argument("new", type=FILE, metavar="NEW.json")
@click.option("--markdown", type=FILE, metavar="FILE", help="Write it to this file, too.")
@click.pass_context
def diff(context: click.Context, old: Path, new: Path, markdown: Path | None) -> NoReturn:
    """Compare two records that pytest wrote with --fp8-record.

    Hashes, byte counts, counts and texts must be the same; SQNRs may differ by less than
    0.01 dB, which is what two correct implementations differ by. Speed-ups must have the same
    verdict, and the 99 % interval of their change must not lie beyond 2 %. A measurement or a law
    that only OLD has counts as a change; one that only NEW has does not. Differences of the
    environment are shown first and are not judged, nor is whether the speed-ups agree as those of
    two runs of the same code should: no verdict changed, and for 97 % of the cases the interval of
    the change covers zero.

    \b
    Exit status:
      0  nothing changed
      1  something changed or is missing
      2  a file can't be used
    """  # noqa: D301 - click reads the escape, not the reader
    from rich.console import Console

    from fp8.testing.diffing import compare

    difference = compare(load(old), load(new))
    if markdown is not None:
        from fp8.testing.diff_markdown import as_markdown

        markdown.write_text(as_markdown(difference), encoding="utf-8")
    _show(Console(), difference)
    context.exit(0 if difference.same else 1)


def _show(console: Console, difference: Difference) -> None:
    """Environment first, since it may explain the rest; then what is judged."""
    _table(
        console,
        "environment",
        ("", "old", "new"),
        [(e.name, e.old or "-", e.new or "-") for e in difference.environment],
    )
    _table(
        console,
        "changed",
        ("target", "test", "measurement", "kind", "old", "new"),
        [(c.target, c.test, c.name, c.kind, c.old, c.new) for c in difference.changed],
    )
    _table(
        console,
        "missing: only in the old record",
        ("target", "test", "measurement"),
        difference.missing,
    )
    _table(
        console,
        "no longer checked: laws that only the old run compared for",
        ("target", "law"),
        difference.unchecked,
    )
    _table(
        console,
        "new: only in the new record",
        ("target", "test", "measurement"),
        difference.added,
    )
    if difference.speed is not None:
        moved = [(key, pair) for key, pair in difference.speed.pairs.items() if not pair.same]
        _table(
            console,
            "speed: new over old, where it changed",
            ("target", "case", "change"),
            [(key[0], pair.new.case, str(pair.change or "-")) for key, pair in moved],
        )
        console.print(str(difference.speed), highlight=False, soft_wrap=True)
    verdict = "PASS" if difference.same else "CHANGED"
    console.print(
        f"{verdict}: {difference.unchanged} unchanged, {len(difference.changed)} changed, "
        f"{len(difference.missing)} missing, {len(difference.added)} new, "
        f"{len(difference.unchecked)} laws no longer checked",
        style="bold green" if difference.same else "bold red",
        highlight=False,
        soft_wrap=True,
    )


def _table(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]
) -> None:
    """A table whose cells are folded, never cut off; nothing when there are no rows."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        # escaped: the brackets of a test's parameters look like rich's markup
        table.add_row(*map(escape, row))
    if table.row_count:
        console.print(table)
