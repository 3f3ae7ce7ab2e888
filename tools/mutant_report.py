"""What became of each mutant, as a score, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True)
class Result:
    """What became of one mutant.

    Attributes:
        module: The module.
        name: The qualified name of the function, class or constant, or "".
        number: The number of the line.
        line: The line as it is in the library.
        becomes: The line as it is in the mutant.
        operator: Cosmic Ray's name for the change.
        killed_by: The test that failed first, or what went wrong instead; "" for a survivor.
        error: How it failed.
        seconds: How long the trial took.
        why: Why it is known to survive; "" where nobody expects it to.
    """

    module: str
    name: str
    number: int
    line: str
    becomes: str
    operator: str
    killed_by: str
    error: str
    seconds: float
    why: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What names the mutant even when lines move."""
        return (self.module, self.name, self.line, self.becomes)

    def __str__(self) -> str:
        where = f"fp8/{self.module}.py:{self.number} {self.name}".rstrip()
        return f"{where}: {self.line}  ->  {self.becomes}"


@dataclass(frozen=True)
class Report:
    """What a run found.

    Attributes:
        seed: What drew the sample.
        results: One for each mutant.
        left_out: How many mutants did not count, by reason.
        seconds: How long the trials took, as if one ran after the other.
    """

    seed: int
    results: tuple[Result, ...]
    left_out: dict[str, int]
    seconds: float

    @property
    def killed(self) -> list[Result]:
        """Those that something failed on."""
        return [r for r in self.results if r.killed_by]

    @property
    def survivors(self) -> list[Result]:
        """Those that nothing failed on."""
        return [r for r in self.results if not r.killed_by]

    @property
    def score(self) -> float:
        """Percent of the mutants that were killed."""
        return 100.0 * len(self.killed) / len(self.results)

    def errors(self, least: float) -> list[str]:
        """What makes the run a failure, where `least` percent must be killed."""
        found = [f"survives: {r}" for r in self.survivors if not r.why]
        found += [f"is said to survive, {r.why}: {r}" for r in self.killed if r.why]
        if self.score < least:
            found.append(f"the score is {self.score:.1f} %, needs {least:g} %")
        return found


def explained(report: Report, known: Mapping[tuple[str, str, str, str], str]) -> Report:
    """The report with why each mutant of `known` survives, or should."""
    results = (replace(r, why=known.get(r.key, "")) for r in report.results)
    return replace(report, results=tuple(results))


def summary(report: Report) -> str:
    """One sentence."""
    explained = sum(bool(r.why) for r in report.survivors)
    return (
        f"{len(report.killed)} of {len(report.results)} mutants killed, {report.score:.1f} %; "
        f"{explained} of {len(report.survivors)} survivors explained; "
        f"{report.seconds / 60:.0f} minutes"
    )


def as_json(report: Report) -> str:
    """Everything that was found."""
    data = asdict(report) | {"score": report.score}
    return json.dumps(data, indent=2) + "\n"


def from_json(text: str) -> Report:
    """The report that `as_json` wrote."""
    data = json.loads(text)
    results = tuple(Result(**result) for result in data["results"])
    return Report(data["seed"], results, data["left_out"], data["seconds"])


def merged(before: Report, after: Report) -> Report:
    """The report of a run on `before`'s survivors alone, with what was killed before."""
    seconds = sum(r.seconds for r in before.killed) + after.seconds
    return replace(before, results=(*before.killed, *after.results), seconds=seconds)


def as_markdown(report: Report) -> str:
    """The score by module, and the survivors."""
    parts = [f"{summary(report)}. Seed {report.seed}.", _modules(report), _killers(report)]
    if report.left_out:
        counted = "; ".join(f"{count}: {reason}" for reason, count in report.left_out.items())
        parts.append(f"Left out, {sum(report.left_out.values())}. {counted}.")
    if report.survivors:
        found = sorted(report.survivors, key=lambda r: (r.module, r.number))
        rows = [(_name(r), f"`{r.line}`", f"`{r.becomes}`", r.why) for r in found]
        head = ("where", "line", "becomes", "why it survives")
        parts.append("### Survivors\n\n" + _table(head, rows))
    return "\n\n".join(parts) + "\n"


def _name(result: Result) -> str:
    return f"`{result.module}.{result.name}`" if result.name else f"`{result.module}`"


def _modules(report: Report) -> str:
    total = Counter(r.module for r in report.results)
    killed = Counter(r.module for r in report.killed)
    rows = [
        (f"fp8/{name}.py", f"{count}", f"{killed[name]}", f"{100 * killed[name] / count:.0f} %")
        for name, count in sorted(total.items())
    ]
    return _table(("module", "mutants", "killed", "score"), rows)


def _killers(report: Report) -> str:
    """Which files had the tests that failed first."""
    files = Counter(r.killed_by.partition("::")[0] for r in report.killed)
    return _table(("killed first by", "mutants"), [(n, f"{c}") for n, c in files.most_common()])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )
