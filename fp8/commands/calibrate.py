"""``fp8 calibrate``: measures this GPU and writes the thresholds that it is held to."""

from __future__ import annotations

import datetime as dt
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fp8.testing.records import Record

_FILE = click.Path(dir_okay=False, path_type=Path)
_FOLDER = Path("tests/perf/thresholds")


class _UnusableError(click.ClickException):
    """Not 1, which is a verdict elsewhere."""

    exit_code = 2


@click.command()
@click.argument("records", nargs=-1, type=_FILE, metavar="[RECORD.json]...")
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True, help="Runs to make.")
@click.option("--target", "targets", multiple=True, help="As --fp8-target. Repeatable.")
@click.option("--budget", type=float, help="Minutes for each run, as --fp8-budget.")
@click.option("--out", type=_FILE, help=f"Write this file rather than one in {_FOLDER}.")
def calibrate(
    records: tuple[Path, ...],
    runs: int,
    targets: tuple[str, ...],
    budget: float | None,
    out: Path | None,
) -> None:
    """Measure this GPU, or take records that were measured on one, and write its thresholds.

    Each run is a process of its own: what differs between processes is what a threshold has to
    allow for. Provisional thresholds are confirmed or replaced; those of cases that were not
    measured stay.

    \b
    Exit status:
      0  the file is written
      2  a run measured nothing, or the records can't be used together
    """  # noqa: D301 - click's \\b is the character
    from fp8.testing import thresholds
    from fp8.testing.perf import calibration

    try:
        loaded = [_load(path) for path in records] or list(_measured(runs, targets, budget))
        made = calibration.calibrated(loaded, dt.datetime.now(tz=dt.UTC).date())
    except calibration.CalibrationError as error:
        raise _UnusableError(str(error)) from error
    known = thresholds.load(_FOLDER, made.gpu) if _FOLDER.is_dir() else None
    before = {} if known is None else known.by_case
    for line in calibration.compared_with(made, before):
        click.echo(line)
    for case, why in made.left_out.items():
        click.echo(f"{case}: no threshold: {why}")
    path = out or (known.path if known is not None else None) or _FOLDER / _name(made.gpu)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = thresholds.text(made.gpu, calibration.merged(made, before))
    path.write_text(text, encoding="utf-8")
    click.echo(f"{path}: {len(made.thresholds)} thresholds measured on {made.gpu}")


def _measured(runs: int, targets: tuple[str, ...], budget: float | None) -> Iterator[Record]:
    """Run the suite in fresh processes and give what each recorded."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(runs):
            path = Path(folder) / f"{number}.json"
            words = [sys.executable, "-m", "pytest", "-m", "perf", "--fp8-device=cuda"]
            words += [f"--fp8-target={target}" for target in targets]
            words += [] if budget is None else [f"--fp8-budget={budget}"]
            click.echo(f"run {number + 1} of {runs}")
            # What the cases were held to until now does not matter: only what they measured.
            subprocess.run([*words, f"--fp8-record={path}"], check=False)  # noqa: S603
            yield _load(path)


def _load(path: Path) -> Record:
    from fp8.testing.records import RecordError, load_record

    try:
        return load_record(path)
    except RecordError as error:
        raise _UnusableError(str(error)) from error


def _name(gpu: str) -> str:
    """The file's name: the hardware file's, or one made of the GPU's."""
    from fp8 import hardware

    known = hardware.find(gpu)
    return f"{known.id if known else re.sub(r'[^a-z0-9]+', '_', gpu.lower())}.toml"
