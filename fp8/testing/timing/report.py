"""A measurement, shown: a table and its remarks for people, JSON with raw samples for programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fp8.testing.timing.analysis import compared

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType
    from rich.table import Table

    from fp8.testing.timing.analysis import Comparison
    from fp8.testing.timing.plan import Quantity
    from fp8.testing.timing.results import Conditions, Measurement

_NONE = "–"  # noqa: RUF001 - a dash for what there is not


@dataclass(frozen=True, slots=True)
class Report:
    """A measurement and what it says.

    Attributes:
        measurement: All that was measured.
        comparisons: Each callable but the first against the first, by the plan's quantity.
    """

    measurement: Measurement
    comparisons: dict[str, Comparison]

    def __str__(self) -> str:
        """The table and the remarks, without colour."""
        from io import StringIO

        from rich.console import Console

        text = StringIO()
        Console(file=text, width=140, color_system=None).print(table(self.measurement))
        drawn = [line.rstrip() for line in text.getvalue().splitlines()]
        return "\n".join([*drawn, *lines(self)])


def reported(measurement: Measurement) -> Report:
    """Compare every callable with the first."""
    others = measurement.names[1:]
    return Report(measurement, {name: compared(measurement, name) for name in others})


def rendered(report: Report) -> RenderableType:
    """The report for rich."""
    from rich.console import Group
    from rich.text import Text

    return Group(table(report.measurement), *(Text(line) for line in lines(report)))


def lines(report: Report) -> tuple[str, ...]:
    """What stands below the table: verdicts, then remarks."""
    return (*verdicts(report), *remarks(report.measurement))


def table(measurement: Measurement) -> Table:
    """One row for each callable; times in ms, speed-ups with their intervals."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    made = Table(
        title=f"times in ms; speed-up against {escape(measurement.baseline)}",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    made.add_column("", overflow="fold")
    headings = ("device", "host", "call", "1st call", "2nd call", "peak MiB")
    for heading in (*headings, "speed-up, device", "speed-up, call"):
        made.add_column(heading, justify="right", no_wrap=True)
    for name in measurement.names:
        start = measurement.starts[name]
        ratios = [_NONE] * 2
        if name != measurement.baseline:
            ratios = [_ratio(measurement, name, by) for by in ("device", "call")]
        made.add_row(
            escape(name),
            *(_ms(measurement.ms(name, by)) for by in ("device", "host", "call")),
            _ms(start.first_ms),
            _ms(start.second_ms),
            f"{start.peak_bytes / 2**20:,.1f}",
            *ratios,
        )
    return made


def verdicts(report: Report) -> Iterator[str]:
    """One line for each comparison."""
    for one in report.comparisons.values():
        line = f"{one.name}: {one.verdict}"
        if one.estimate is not None:
            e = one.estimate
            width = f"{report.measurement.plan.confidence:.0%} interval of {e.pairs} pairs"
            line += f", {e.ratio:.3f} times as fast as {one.baseline} by {one.quantity} time"
            line += f" [{e.low:.3f}, {e.high:.3f}] ({width})"
        yield f"{line}: {one.reason}"


def remarks(measurement: Measurement) -> Iterator[str]:
    """What a reader of the table should know, line by line."""
    rounds = len(measurement.rounds)
    yield (
        f"{measurement.device}: {rounds} ABBA rounds in {measurement.seconds:.1f} s;"
        f" {measurement.stopped}"
    )
    yield from measurement.notes
    for name in measurement.names:
        start, warm_up = measurement.starts[name], measurement.warm_ups[name]
        facts = [f"device time by {start.method}"]
        facts += _conditions(measurement.conditions(name))
        yield f"{name}: {', '.join(facts)}"
        if measurement.host_bound(name):
            yield f"{name}: HOST-BOUND: Python queues a call more slowly than the GPU runs it"
        if not warm_up.steady:
            yield f"{name}: NOT STEADY after {len(warm_up.blocks)} blocks of warm-up"
        void = Counter(cause for block in measurement.blocks(name) for cause in block.void)
        for cause, count in sorted(void.items()):
            yield f"{name}: {count} of {2 * rounds} blocks are VOID: {cause}"
        for note in start.notes:
            yield f"{name}: {note}"


def _conditions(found: Conditions) -> list[str]:
    shown = [
        ("SM", found.sm_mhz, "MHz"),
        ("memory", found.memory_mhz, "MHz"),
        ("", found.power_w, "W"),
        ("", found.temperature_c, "°C"),
    ]
    facts = [
        f"{what} {value:.0f} {unit}".strip() for what, value, unit in shown if value is not None
    ]
    if found.reasons is None:
        facts.append("throttling not available")
    elif found.reasons:
        facts.append(f"clock limited by {', '.join(sorted(found.reasons))}")
    if found.foreign is None:
        facts.append("other processes not available")
    return facts


def _ratio(measurement: Measurement, name: str, quantity: Quantity) -> str:
    estimate = compared(measurement, name, quantity).estimate
    if estimate is None:
        return _NONE
    return f"{estimate.ratio:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _ms(value: float | None) -> str:
    """Four digits."""
    if value is None:
        return _NONE
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def as_json(measurement: Measurement) -> dict[str, Any]:
    """All that was measured as JSON values, raw samples included."""
    plain: dict[str, Any] = _plain(asdict(measurement))
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
