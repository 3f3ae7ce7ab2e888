"""``fp8 map``: the speed-up map of a record as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from fp8.commands.files import FILE, UnusableFileError, load

if TYPE_CHECKING:
    from pathlib import Path

SUFFIXES = (".svg", ".png")


@click.command("map")
@click.argument("record", type=FILE, metavar="RECORD.json")
@click.option(
    "--out",
    "paths",
    type=FILE,
    multiple=True,
    required=True,
    metavar="FILE",
    help="The picture to write, .svg or .png. Repeatable.",
)
def command(record: Path, paths: tuple[Path, ...]) -> None:
    """Draw which linear layers pay in float8.

    A heat map of the speed-up over bfloat16, forward and backward, M against K and N, for each
    target, recipe and mode in a record that pytest wrote with --fp8-record. What is known to be
    slow is hatched. Needs matplotlib, which the extra "perf" brings.
    """
    wrong = [path for path in paths if path.suffix not in SUFFIXES]
    if wrong:
        raise click.BadParameter(f"needs .svg or .png, got {wrong[0]}", param_hint="--out")
    found = load(record)
    from fp8.testing.speed_map import MapError, save, speed_map

    try:
        drawn = speed_map(found)
    except MapError as error:
        raise UnusableFileError(f"{record}: {error}") from error
    save(drawn, paths)
    click.echo(f"{len(drawn.panels)} panels: {', '.join(map(str, paths))}")
