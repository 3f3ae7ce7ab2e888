"""``fp8 report``: a record's speeds as tables, or as Markdown for a CI job's summary."""

from __future__ import annotations

from pathlib import Path

import click

_FILE = click.Path(dir_okay=False, path_type=Path)


class _UnusableFileError(click.ClickException):
    """Not 1, which is a verdict elsewhere."""

    exit_code = 2


@click.command()
@click.argument("record", type=_FILE, metavar="RECORD.json")
@click.option("--markdown", type=_FILE, help="Write the report to this file instead.")
def report(record: Path, markdown: Path | None) -> None:
    """Show what pytest -m perf measured and wrote with --fp8-record.

    \b
    Exit status:
      0  it is shown, whatever the verdicts are
      2  the file can't be used, or holds no speeds
    """  # noqa: D301 - click reads the escape, not the reader
    from rich.console import Console

    from fp8.testing.perf import tables
    from fp8.testing.records import RecordError, load_record

    try:
        loaded = load_record(record)
    except RecordError as error:
        raise _UnusableFileError(str(error)) from error
    entries = tables.timings(loaded.measurements)
    if not entries:
        raise _UnusableFileError(f"{record}: holds no speeds: write it with pytest -m perf")
    if markdown is not None:
        markdown.write_text(tables.markdown(entries, loaded.environment), encoding="utf-8")
        return
    tables.show(Console(), entries)
