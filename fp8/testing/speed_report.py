"""What a record says of speed, and what changed since another, in Markdown."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from fp8.testing.agreement import timings
from fp8.testing.diffing import compare
from fp8.testing.speed_verdicts import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from fp8.testing.diffing import Difference
    from fp8.testing.records import Record

#: Of the environment: what a speed may depend on, and what a reader wants to know first.
_ENVIRONMENT = ("GPU", "GPU driver", "torch", "CUDA of torch", "triton", "torchao", "fp8", "plant")
_RED = (Verdict.REGRESSED, Verdict.STALE, Verdict.UNRESOLVED)


def as_markdown(record: Record, since: Record | None = None) -> str:
    """The record's cases: verdicts counted, what isn't green in full; then what changed.

    Args:
        record: What to report on.
        since: What to compare it with.
    """
    lines = [*_run(record)]
    if since is not None:
        lines += ["", *_changes(compare(since, record))]
    return "\n".join(lines) + "\n"


def _run(record: Record) -> Iterator[str]:
    found = [
        f"{name} {record.environment[name]}" for name in _ENVIRONMENT if name in record.environment
    ]
    yield f"**Speed** on {', '.join(found) or 'an unknown machine'}"
    yield ""
    timed = list(timings(record).values())
    if not timed:
        yield "Nothing was timed."
        return
    counts = Counter(one.verdict for one in timed)
    yield f"{len(timed)} cases: " + ", ".join(
        f"{count} {verdict}" for verdict, count in sorted(counts.items())
    )
    red = [one for one in timed if one.verdict in _RED]
    if red:
        yield ""
        yield from _table(
            ("case", "verdict", "ratio"), [(f"`{t.case}`", t.verdict, t.measured) for t in red]
        )


def _changes(difference: Difference) -> Iterator[str]:
    yield "**Since the last record**"
    yield ""
    if difference.environment:
        rows = [(e.name, e.old or "–", e.new or "–") for e in difference.environment]  # noqa: RUF001
        yield from _table(("environment", "old", "new"), rows)
        yield ""
    if difference.speed is None:
        yield "No case was timed in both."
    else:
        yield f"{difference.speed}."
        moved = [pair for pair in difference.speed.pairs.values() if not pair.same]
        if moved:
            yield ""
            yield from _table(
                ("case", "old", "new", "change"),
                [
                    (f"`{p.new.case}`", str(p.old), str(p.new), str(p.change or "–"))  # noqa: RUF001
                    for p in moved
                ],
            )
    if difference.missing:
        yield ""
        yield f"No longer measured: {', '.join(f'`{name}`' for _, _, name in difference.missing)}"


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for row in (heading, ["---"] * len(heading), *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
