"""Mutation testing: does the suite fail on small wrong versions of the library?

    python tools/mutate.py                      # 300 of Cosmic Ray's mutants, drawn by seed 0
    python tools/mutate.py --sample 20 --seed 3
    python tools/mutate.py --all -n 2           # all of them; hours

docs/mutants.md has the last score. The extra `mutation` brings Cosmic Ray.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

# Nothing of the library here: the process of a trial imports this file, too, before the mutant.
import mutant_trial
from mutant_report import (
    Report,
    Result,
    as_json,
    as_markdown,
    explained,
    from_json,
    merged,
    summary,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mutants import Drawn, Mutant
    from rich.console import Console

ROOT = Path(__file__).parent.parent
#: percent of the mutants that the suite must kill
LEAST = 90.0
#: seconds for the library as it is, which takes about 40 on one core of its own
PLAIN_S = 900.0
#: a mutant may take so many times what the library took, and so many seconds more: what loops for
#: ever is killed, what shares its core with other work is not
TIMES, MORE_S = 4.0, 60.0
_IN = click.Path(exists=True, dir_okay=False, path_type=Path)
_OUT = click.Path(dir_okay=False, path_type=Path)


class _UnusableError(click.ClickException):
    """Not 1, which says that something survived."""

    exit_code = 2


@click.command()
@click.option("--sample", type=click.IntRange(1), default=300, show_default=True, help="How many.")
@click.option("--all", "everything", is_flag=True, help="Every mutant rather than a sample.")
@click.option("--seed", default=0, show_default=True, help="Draws the sample.")
@click.option("-n", "workers", default=1, show_default=True, help="Trials at a time.")
@click.option("--again", type=_IN, help="Only the survivors that this JSON file of a run has.")
@click.option("--least", default=LEAST, show_default=True, help="The score that is needed, in %.")
@click.option("--markdown", type=_OUT, help="Write the report to this file.")
@click.option("--json", "json_file", type=_OUT, help="Write all that was found to this file.")
@click.pass_context
def command(
    context: click.Context,
    sample: int,
    everything: bool,
    seed: int,
    workers: int,
    again: Path | None,
    least: float,
    markdown: Path | None,
    json_file: Path | None,
) -> None:
    """Run the suite on mutants of the library, and show which survive.

    The quick profile runs first; what survives it meets the tests marked thorough, too.

    \b
    Exit status:
      0  enough were killed, and each survivor is explained in tools/surviving_mutants.toml
      1  too few were killed, a survivor is not explained, or an explained one was killed
      2  the suite fails on the library as it is
    """  # noqa: D301 - click's \\b is the character
    import mutants
    from rich.console import Console

    console = Console()
    with console.status("drawing mutants"):
        drawn = mutants.draw(seed, None if everything else sample)
    before = None if again is None else from_json(again.read_text(encoding="utf-8"))
    if before is not None:
        left = {(r.key, r.number) for r in before.survivors}
        tried = tuple(m for m in drawn.mutants if (m.key, m.number) in left)
        if len(tried) < len(left):
            raise _UnusableError(f"{again}: not of this library, or of another sample")
        drawn = replace(drawn, mutants=tried)
    with _progress(console) as progress:

        def tell(stage: str, result: Result) -> None:
            if not result.killed_by:
                console.print(f"survives the {stage}: {result}", markup=False, highlight=False)

        report = execute(drawn, seed, workers, progress, tell)
    report = explained(report if before is None else merged(before, report), mutants.known())
    if markdown is not None:
        markdown.write_text(as_markdown(report), encoding="utf-8")
    if json_file is not None:
        json_file.write_text(as_json(report), encoding="utf-8")
    for error in report.errors(least):
        console.print(f"ERROR: {error}", style="red", markup=False, highlight=False)
    console.print(summary(report), style="bold", highlight=False)
    context.exit(1 if report.errors(least) else 0)


def execute(
    drawn: Drawn,
    seed: int,
    workers: int,
    progress: Callable[[str, int, int], None],
    tell: Callable[[str, Result], None],
) -> Report:
    """Try every mutant with the quick profile, and what survives with the thorough tests, too.

    Tells of each result, with the stage, as soon as it is known.
    """
    results: dict[int, Result] = {}
    total = 0.0
    left = dict(enumerate(drawn.mutants))
    for thorough in (False, True):
        if not left:
            break
        stage = "thorough tests" if thorough else "quick profile"
        plain = mutant_trial.Trial("", "", str(ROOT), thorough=thorough)
        ((_, said),) = _run_all(f"{stage}, the library as it is", {"": plain}, 1, PLAIN_S, progress)
        kind, *news = said[-1] if said else ("ended", "without a result")
        if kind != "survived":
            raise _UnusableError(f"the library as it is: {kind}: {news}")
        order, took = news
        todo = {
            number: replace(plain, module=m.place.module, source=m.source, seconds=order)
            for number, m in left.items()
        }
        limit = TIMES * took + MORE_S
        total += took
        for number, said in _run_all(f"{stage}, mutants", todo, workers, limit, progress):
            results[number] = result_of(left[number], said, limit)
            total += results[number].seconds
            tell(stage, results[number])
        left = {number: m for number, m in left.items() if not results[number].killed_by}
    ordered = tuple(results[number] for number in sorted(results))
    return Report(seed, ordered, dict(drawn.left_out), total)


def result_of(mutant: Mutant, said: list[Any], limit: float) -> Result:
    """What a trial's only message says; a mutant that says nothing is killed, too."""
    kind, *news = said[-1] if said else ("ended",)
    if kind == "survived":
        killed_by, error, seconds = "", "", news[1]
    elif kind == "killed":
        killed_by, error, seconds = news
    elif kind == "late":
        killed_by, error, seconds = "time", f"no result after {limit:.0f} s", limit
    else:
        killed_by, error, seconds = "death", "the process ended without a result", 0.0
    place = mutant.place
    return Result(
        place.module,
        mutant.name,
        mutant.number,
        mutant.line,
        mutant.becomes,
        place.operator,
        killed_by,
        error,
        seconds,
    )


def _run_all(
    stage: str,
    todo: dict[Any, mutant_trial.Trial],
    workers: int,
    limit: float,
    progress: Callable[[str, int, int], None],
) -> Iterator[tuple[Any, list[Any]]]:
    from fp8.testing.trials import run_all

    preload = mutant_trial.PRELOAD
    return run_all(stage, mutant_trial.run, todo, workers, limit, progress, preload)


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each stage, with the time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Left

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, Left(elapsed_when_finished=True), console=console) as bars:
        tasks = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield progress


if __name__ == "__main__":
    command()
