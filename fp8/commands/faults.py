"""``fp8 faults``: plants every fault of the catalogue and shows which law catches it."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from fp8.testing.killing import Plan, Report
    from fp8.testing.trials import Progress

_OUT = click.Path(dir_okay=False, path_type=Path)


class _UnusableError(click.ClickException):
    """Not 1, which says that something survived."""

    exit_code = 2


@click.command("faults")
@click.option("-n", "workers", default=1, show_default=True, help="Trials at a time.")
@click.option("--full", is_flag=True, help="Try every law against every fault: the kill matrix.")
@click.option("--only", "ids", metavar="ID", multiple=True, help="This one alone. Repeatable.")
@click.option("--sample", metavar="N", type=click.IntRange(1), help="N faults, drawn by --seed.")
@click.option("--seed", type=int, help="Draw other examples: what --fp8-seed does.")
@click.option(
    "--seeds", type=click.IntRange(1), default=1, help="Try each fault with so many seeds."
)
@click.option("--markdown", type=_OUT, help="Write the report to this file.")
@click.option("--json", "as_json", type=_OUT, help="Write all that was found to this file.")
@click.option(
    "--tests",
    multiple=True,
    default=("tests/numerics", "tests/compile"),
    show_default=True,
    help="The tests, below the current folder.",
)
@click.pass_context
def command(
    context: click.Context,
    workers: int,
    full: bool,
    ids: tuple[str, ...],
    sample: int | None,
    seed: int | None,
    seeds: int,
    markdown: Path | None,
    as_json: Path | None,
    tests: tuple[str, ...],
) -> NoReturn:
    """Plant every fault in the reference and see which law catches it.

    The law that claims a fault is tried first, in the quick profile; if it doesn't catch it, the
    others are. Benign variants are tried, too: nothing may object to them.

    \b
    Exit status:
      0  every fault was caught by its law, nothing objected to a benign variant or the reference
      1  something survived, or was objected to
      2  the project's tests are not here, or there is no such fault
    """  # noqa: D301 - click's \\b is the character
    from rich.console import Console

    from fp8.testing import kill_report, killing

    plan = _plan(workers, full, ids, sample, seed, seeds, tests)
    console = Console()
    with _progress(console) as progress:
        report = killing.execute(plan, progress)
    if markdown is not None:
        markdown.write_text(kill_report.as_markdown(report), encoding="utf-8")
    if as_json is not None:
        as_json.write_text(kill_report.as_json(report), encoding="utf-8")
    _show(console, report)
    context.exit(1 if report.all_errors() else 0)


def _plan(
    workers: int,
    full: bool,
    ids: tuple[str, ...],
    sample: int | None,
    seed: int | None,
    seeds: int,
    tests: tuple[str, ...],
) -> Plan:
    from fp8.testing import killing
    from fp8.testing.faults import BENIGN, FAULTS

    root = Path.cwd()
    missing = [name for name in (*tests, "pyproject.toml") if not (root / name).exists()]
    if missing:
        raise _UnusableError(f"{root} has no {missing[0]}: run this in the project's folder")
    if ids:
        try:
            faults, benign = killing.chosen(ids)
        except KeyError as error:
            raise _UnusableError(f"--only: {error.args[0]}") from error
    elif sample is not None:
        faults, benign = killing.sample(seed or 0, sample, -(-sample // 4))
    else:
        faults, benign = tuple(FAULTS.values()), tuple(BENIGN.values())
    drawn: tuple[int | None, ...] = (seed,)
    if seeds > 1:
        drawn = tuple(range(seed or 0, (seed or 0) + seeds))
    return killing.Plan(
        faults,
        benign,
        str(root),
        tests,
        drawn,
        full,
        whole=not ids and sample is None,
        workers=workers,
    )


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """A bar for each stage, with the time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Bars(*columns, console=console) as bars:
        tasks = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield progress


def _show(console: Console, report: Report) -> None:
    from rich.markup import escape
    from rich.table import Table

    from fp8.testing import kill_report
    from fp8.testing.faults import FAULTS

    table = Table(title="faults", title_justify="left")
    for column in ("fault", "law", "caught by", "examples", "s", "naive test"):
        table.add_column(column, overflow="fold")
    for result in report.faults:
        law = FAULTS[result.id].law
        kill = result.kills.get(law) or next(iter(result.kills.values()), None)
        naive = {None: "", True: "misses", False: "sees"}[result.naive]
        if kill is None:
            table.add_row(result.id, law, "nothing", "", "", naive, style="red")
        else:
            test = f"{kill.law}: {kill.test.rpartition('/')[2]}: {kill.check}"
            cells = (escape(test), str(kill.examples), f"{kill.seconds:.1f}")
            table.add_row(result.id, law, *cells, naive)
    if table.row_count:
        console.print(table)
    if report.untested_laws:
        console.print(f"laws that no test here declares: {', '.join(report.untested_laws)}")
    for error in report.all_errors():
        console.print(f"ERROR: {error}", style="red", markup=False, highlight=False)
    good = not report.all_errors()
    style = "bold green" if good else "bold red"
    console.print(kill_report.summary(report), style=style, highlight=False)
