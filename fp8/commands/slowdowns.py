"""``fp8 slowdowns``: shows on a GPU that planted slow-downs are seen, and that nothing else is."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

    from fp8.testing.slowdowns.proof import Finding


class _UnusableError(click.ClickException):
    """Not 1, which says that something was not seen."""

    exit_code = 2


@click.command("slowdowns")
@click.option("--only", "ids", metavar="ID", multiple=True, help="This one alone. Repeatable.")
@click.option(
    "--alike",
    type=click.IntRange(0),
    default=10,
    show_default=True,
    metavar="N",
    help="Compare the same code with itself N times.",
)
@click.pass_context
def command(context: click.Context, ids: tuple[str, ...], alike: int) -> NoReturn:
    """Plant slow-downs in the reference and see whether timing notices them.

    A compiled linear layer, forward and backward, is measured beside the same layer with a
    slow-down: each must be SLOWER. Then the same code is measured beside itself: it must be ALIKE
    each time. Needs a GPU with float8 products.

    \b
    Exit status:
      0  every slow-down was seen, and there was no false alarm
      1  something was not seen, or was seen where there is nothing, or is unresolved
      2  there is no GPU to time on, or no such slow-down
    """  # noqa: D301 - click's \\b is the character
    from rich.console import Console

    from fp8.testing.slowdowns import SLOWDOWNS
    from fp8.testing.slowdowns.proof import prove
    from fp8.testing.timing import TimingUnavailableError, open_gpu

    unknown = [name for name in ids if name not in SLOWDOWNS]
    if unknown:
        raise _UnusableError(f"--only: got {unknown[0]!r}, needs one of {', '.join(SLOWDOWNS)}")
    chosen = [one for one in SLOWDOWNS.values() if not ids or one.id in ids]
    try:
        with open_gpu() as device:
            findings = list(prove(device, chosen, alike=alike))
    except TimingUnavailableError as error:
        raise _UnusableError(str(error)) from error
    console = Console()
    console.print(_table(findings))
    failed = [one for one in findings if not one.proved]
    console.print(
        f"{'FAIL' if failed else 'PASS'}: {len(findings) - len(failed)} of {len(findings)}"
        f" comparisons are as they should be, on {device.name}",
        style="bold red" if failed else "bold green",
        highlight=False,
        soft_wrap=True,
    )
    context.exit(1 if failed else 0)


def _table(findings: Iterable[Finding]) -> Table:
    from rich.table import Table

    table = Table(title="against the clean layer", title_justify="left")
    for column in ("what", "MxKxN", "by", "time", "99 % interval", "pairs", "verdict", "needs"):
        table.add_column(column, overflow="fold")
    for one in findings:
        c, e = one.comparison, one.comparison.estimate
        cells = ("", "", "")
        if e is not None:  # of the speed-up, whose inverse is the time
            interval = f"{1 / e.high - 1:+.1%} to {1 / e.low - 1:+.1%}"
            cells = (f"{1 / e.ratio - 1:+.1%}", interval, str(e.pairs))
        verdict = c.verdict if one.proved else f"{c.verdict}: {c.reason}"
        style = "" if one.proved else "red"
        table.add_row(
            one.what, str(one.layer), c.quantity, *cells, verdict, one.expected, style=style
        )
    return table
