"""What the terminal shows: the header before the tests and the summary after them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8.testing.law_table import LAWS
from fp8.testing.records import version_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fp8.testing.session import Session
    from fp8.testing.tally import TargetTally

_VERSIONS = ("fp8", "torch", "torchao", "transformer_engine", "triton", "numpy", "ml_dtypes")


#: reasons to skip that the summary lists, the most frequent first
SKIPS_SHOWN = 6


def header(session: Session) -> list[str]:
    """Targets, versions, device, profile, seed and plant."""
    options = session.options
    seed = "derandomised" if options.seed is None else str(options.seed)
    how = f"device {options.device}, profile {options.profile}, seed {seed}"
    versions = ((name, version_of(name)) for name in _VERSIONS)
    found = ", ".join(f"{name} {version}" for name, version in versions if version is not None)
    lines = [
        f"fp8: targets {', '.join(options.targets)}",
        f"fp8: {how}, plant {options.plant or 'none'}",
        f"fp8: versions {found}",
    ]
    if options.expectations is not None:
        count = len(session.expectations.entries)
        lines.append(f"fp8: expectations {options.expectations} ({count})")
    lines += [f"fp8: tensors {path}" for path in options.tensors]
    return lines


def summary(session: Session) -> list[str]:
    """What was checked, for each target; then what else there is to know."""
    lines: list[str] = []
    for name, counts in sorted(session.tally.targets.items()):
        lines += _of_target(session, name, counts)
    if not session.tally.targets:
        lines.append("no test judged a target")
    lost = session.tally.workers_lost
    if lost:
        lines.append(f"{lost} worker processes died: what they counted is missing above")
    if session.options.record is not None:
        count = len(session.tally.measurements)
        lines.append(f"record: {count} measurements in {session.options.record}")
    return lines


def _of_target(session: Session, name: str, counts: TargetTally) -> list[str]:
    checked = [law for law in LAWS if law in counts.laws]
    able = counts.declared | counts.laws.keys()
    others = [law for law in LAWS if law in able and law not in counts.laws]
    names = f" ({', '.join(checked)})" if checked else ""
    lines = [f"{name}: {len(checked)} of {len(checked) + len(others)} laws checked{names}"]
    if others:
        lines.append(f"  not checked: {', '.join(others)}")
    if counts.violated:
        broken = [
            f"{law} ({_count(len(tests), 'test')})"
            for law, tests in sorted(counts.violated.items())
        ]
        lines.append(f"  broken: {', '.join(broken)}")
    lines.append(
        f"  {_count(counts.tests, 'test')}, {_count(counts.examples, 'example')}, "
        f"{_count(counts.values, 'value')} compared"
    )
    lines.append(f"  skipped by capability: {counts.skipped.total()}")
    reasons_to_skip = _listed((n, reason) for reason, n in counts.skipped.items())
    lines += reasons_to_skip[:SKIPS_SHOWN]
    if len(reasons_to_skip) > SKIPS_SHOWN:
        lines.append(f"    … {len(reasons_to_skip) - SKIPS_SHOWN} more reasons: pytest -rs")
    lines.append(f"  expected deviations: {counts.deviations.total()}")
    reasons = {entry.id: entry.reason for entry in session.expectations.entries}
    lines += _listed((n, f"{entry}: {reasons[entry]}") for entry, n in counts.deviations.items())
    # a note may be a table: its lines stay below one another
    lines += [f"  note: {text}".replace("\n", "\n    ") for text in sorted(counts.notes)]
    return lines


def _listed(counted: Iterable[tuple[int, str]]) -> list[str]:
    ordered = sorted(counted, key=lambda c: (-c[0], c[1]))
    return [f"    {count:,} x {text}" for count, text in ordered]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
