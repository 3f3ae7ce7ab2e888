"""The report of planted faults as Markdown and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from fp8.testing.faults import BENIGN, FAULTS
from fp8.testing.law_table import LAWS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fp8.testing.killing import Report, Result


def as_json(report: Report) -> str:
    """Everything that was found."""
    data = {
        "full": report.full,
        "faults": len(report.faults),
        "caught": report.caught,
        "caught_by_the_naive_test": report.caught_by_naive,
        "errors": report.all_errors(),
        "laws_without_tests": report.untested_laws,
        "results": {name: asdict(result) for name, result in report.results.items()},
    }
    return json.dumps(data, indent=2) + "\n"


def summary(report: Report) -> str:
    """One sentence: how many were caught, and how many a naive test catches."""
    naive = sum(r.naive is not None for r in report.faults)
    text = f"{report.caught} of {len(report.faults)} faults caught"
    if naive:
        text += f"; the naive accuracy test catches {report.caught_by_naive} of {naive}"
    objected = sum(bool(r.kills) for r in report.benign)
    return f"{text}; {objected} of {len(report.benign)} benign variants objected to"


def as_markdown(report: Report) -> str:
    """The matrix and the tables beside it."""
    parts = [f"{summary(report)}.", _faults(report), _benign(report)]
    if report.full:
        parts.insert(1, _matrix(report))
    if report.untested_laws:
        parts.append(f"Laws that no test here declares: {', '.join(report.untested_laws)}.")
    if report.all_errors():
        parts.append("Errors:\n\n" + "\n".join(f"- {_cell(e)}" for e in report.all_errors()))
    return "\n\n".join(part for part in parts if part) + "\n"


def _matrix(report: Report) -> str:
    """Fault by law: the examples that a law needed; bold for the law that claims the fault."""
    laws = [law for law in LAWS if any(law in r.kills for r in report.faults)]
    rows = []
    for result in report.faults:
        cells = []
        for law in laws:
            kill = result.kills.get(law)
            text = "" if kill is None else str(kill.examples)
            cells.append(f"**{text}**" if text and FAULTS[result.id].law == law else text)
        rows.append([result.id, *cells])
    totals = ["all", *(str(sum(law in r.kills for r in report.faults)) for law in laws)]
    return "### Matrix\n\n" + _table(["fault", *laws], [*rows, totals])


def _faults(report: Report) -> str:
    rows = [
        [r.id, FAULTS[r.id].summary, FAULTS[r.id].step, FAULTS[r.id].law, *_kill(r), _naive(r)]
        for r in report.faults
    ]
    head = ["fault", "what is wrong", "step", "law", "caught by", "examples", "s", "naive test"]
    return "### Faults\n\n" + _table(head, rows) if rows else ""


def _kill(result: Result) -> list[str]:
    if not result.kills:
        return ["nothing", "", ""]
    claimed = result.kills.get(FAULTS[result.id].law)
    kill = claimed or min(result.kills.values(), key=lambda k: k.seconds)
    test = kill.test.rpartition("/")[2]
    return [f"`{test}`: {kill.check}", str(kill.examples), f"{kill.seconds:.1f}"]


def _naive(result: Result) -> str:
    if result.naive is None:
        return ""
    return "misses" if result.naive else "sees"


def _benign(report: Report) -> str:
    rows = [
        [r.id, BENIGN[r.id].summary, BENIGN[r.id].step, ", ".join(sorted(r.kills)) or "nobody"]
        for r in report.benign
    ]
    head = ["variant", "what is different", "step", "who objects"]
    return "### Benign variants\n\n" + _table(head, rows) if rows else ""


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
