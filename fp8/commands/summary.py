"""``fp8 summary``: what a record says of speed, in Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from fp8.commands.files import FILE, load

if TYPE_CHECKING:
    from pathlib import Path


@click.command()
@click.argument("record", type=FILE, metavar="RECORD.json")
@click.option("--since", type=FILE, metavar="OLD.json", help="Say what changed since this record.")
@click.option(
    "--out", type=FILE, metavar="FILE", help="Write to this file instead of the terminal."
)
def summary(record: Path, since: Path | None, out: Path | None) -> None:
    """Summarise the speed-ups of a record that pytest wrote with --fp8-record, in Markdown.

    Verdicts are counted and what is not green is listed with its interval. `fp8 diff` is for
    deciding whether something changed: this always exits with 0 if the files can be read.
    """
    from fp8.testing.speed_report import as_markdown

    text = as_markdown(load(record), None if since is None else load(since))
    if out is None:
        click.echo(text, nl=False)
    else:
        out.write_text(text, encoding="utf-8")
