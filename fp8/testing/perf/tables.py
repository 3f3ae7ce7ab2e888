"""A table for each family, from the record's entries: for the terminal, and as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fp8.testing.perf.explaining import explained, is_bad, is_slow, parts, ratio, remedies
from fp8.testing.speed_verdicts import GRAVE, Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console
    from rich.table import Table

#: One entry of a record: see `fp8.testing.perf.values`.
Entry = Mapping[str, Any]
Cell = Callable[[Entry], str]

TITLES = {
    "ceiling": "what this GPU reaches today",
    "step": "training steps",
    "linear": "linear layers, forward and backward",
    "product": "products, their operands quantised before",
    "cast": "casts and quantising",
    "regime": "claims about other ratios",
}
#: The heading above `slow`.
SLOW = "Slower than bfloat16: ms (of bfloat16), and why"
_NONE = "–"  # noqa: RUF001 - a dash for what there is not
_STYLES = {**dict.fromkeys(map(str, GRAVE), "bold red"), str(Verdict.PASS): "green"}


@dataclass(frozen=True, slots=True)
class Shown:
    """A family's table as text.

    Attributes:
        family: One of `TITLES`.
        headings: Of the columns. The first is the case, the last its verdict, the others numbers.
        rows: Cells.
    """

    family: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Reached:
    """What the same run reached at most: TFLOP/s and TB/s; None where it was not measured."""

    bf16: float | None = None
    fp8: float | None = None
    copy: float | None = None


def timings(measurements: Iterable[Entry]) -> list[Entry]:
    """The entries of a record that are cases of this suite."""
    return [one for one in measurements if one["kind"] == "timing"]


def shown(entries: Sequence[Entry]) -> list[Shown]:
    """The tables in the order of `TITLES`; a family without entries has none."""
    reached = _reached(entries)
    found = []
    for family in TITLES:
        own = [one for one in entries if one["facts"]["family"] == family]
        if own:
            columns = _columns(family, reached)
            rows = tuple(tuple(cell(one) for cell in columns.values()) for one in own)
            found.append(Shown(family, tuple(columns), rows))
    return found


def counted(entries: Iterable[Entry]) -> str:
    """How many cases have which verdict, in one line."""
    verdicts = Counter(one["value"]["verdict"] for one in entries)
    order = [*map(str, Verdict), *sorted(verdicts)]
    listed = [f"{verdicts[v]} {v}" for v in dict.fromkeys(order) if verdicts[v]]
    return f"{verdicts.total()} cases: {', '.join(listed)}" if listed else "no case was measured"


def bad(entries: Iterable[Entry]) -> list[str]:
    """Lines about every case whose verdict is not green."""
    return [line for one in entries if is_bad(one) for line in explained(one)]


def slow(entries: Iterable[Entry]) -> list[str]:
    """One line about every layer and step that is slower than in bfloat16; then what to do."""
    found = [one for one in entries if is_slow(one) and not is_bad(one)]
    lines = [
        f"{one['name']} {one['value']['ratio']:.2f}: {parts(one['value']) or 'not profiled'}"
        f"; {', '.join(one['value']['regimes']) or 'in no known regime'}"
        for one in found
    ]
    return [*lines, *remedies(found)]


# --- how they look ------------------------------------------------------------------------------


def rendered(table: Shown) -> Table:
    """A table for rich."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    made = Table(
        title=TITLES[table.family],
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    for number, heading in enumerate(table.headings):
        text = number in {0, len(table.headings) - 1}
        made.add_column(
            heading, justify="left" if text else "right", overflow="fold", no_wrap=not text
        )
    for row in table.rows:
        *cells, verdict = map(escape, row)
        style = _STYLES.get(verdict)
        made.add_row(*cells, f"[{style}]{verdict}[/]" if style else verdict)
    return made


def show(console: Console, entries: Sequence[Entry]) -> None:
    """Print the tables, what is slow and why, and the count of verdicts."""
    for table in shown(entries):
        console.print(rendered(table), "")
    for title, lines in (("Not green", bad(entries)), (SLOW, slow(entries))):
        for line in ([title, *(f"  {line}" for line in lines), ""]) if lines else ():
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(counted(entries), highlight=False)


def markdown(entries: Sequence[Entry], environment: Mapping[str, str]) -> str:
    """The whole report as Markdown, as a summary of a CI job shows it."""
    kept = ("GPU", "GPU driver", "torch", "CUDA of torch", "triton", "torchao", "fp8")
    told = [f"{name} {environment[name]}" for name in kept if name in environment]
    found = ["# Speed of float8 training", ", ".join(told), f"**{counted(entries)}**"]
    for title, lines in (("Not green", bad(entries)), (SLOW, slow(entries))):
        if lines:
            found += [f"## {title}", "\n".join(["```text", *lines, "```"])]
    for table in shown(entries):
        rule = ["---"] + ["---:"] * (len(table.headings) - 2) + ["---"]
        rows = [_row(cells) for cells in (table.headings, rule, *table.rows)]
        found += [f"## {TITLES[table.family].capitalize()}", "\n".join(rows)]
    return "\n\n".join(found) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


# --- columns ------------------------------------------------------------------------------------


def _columns(family: str, reached: Reached) -> dict[str, Cell]:
    """Heading -> cell."""
    verdict: dict[str, Cell] = {"verdict": lambda one: one["value"]["verdict"]}
    if family == "ceiling":
        middle: dict[str, Cell] = {
            "": lambda one: (
                f"{one['value']['subject']['name']}, {one['value']['baseline']['name']}"
            ),
            "rate": partial(_rate, which="subject"),
            "baseline": partial(_rate, which="baseline"),
            "ratio": _ratio,
        }
        return {"case": _name, **middle, **verdict}
    if family == "product":
        middle = {
            "bf16": partial(_rate, which="baseline"),
            "float8": partial(_rate, which="subject"),
            "of reached": lambda one: _share(rate(one, "subject"), reached.fp8),
            "speed-up": _ratio,
            "roofline": _predicted,
        }
    elif family == "cast":
        middle = {
            "ms": partial(_ms, which="subject", key="device_ms"),
            "host ms": partial(_ms, which="subject", key="host_ms"),
            "rate": partial(_rate, which="subject"),
            "of copy": lambda one: _share(
                rate(one, "subject"), reached.copy or rate(one, "baseline")
            ),
        }
    elif family == "linear":
        middle = {
            "bf16 ms": partial(_ms, which="baseline", key="device_ms"),
            "float8 ms": partial(_ms, which="subject", key="device_ms"),
            "host ms": partial(_ms, which="subject", key="host_ms"),
            "speed-up": _ratio,
            "roofline": _predicted,
            "regimes": lambda one: ", ".join(one["value"]["regimes"]) or _NONE,
        }
    elif family == "step":
        middle = {
            "bf16 ms": partial(_ms, which="baseline", key="call_ms"),
            "float8 ms": partial(_ms, which="subject", key="call_ms"),
            "device ms": partial(_ms, which="subject", key="device_ms"),
            "1st call ms": partial(_ms, which="subject", key="first_ms"),
            "peak MiB (bf16)": partial(_mebibytes, key="peak_bytes"),
            "speed-up": _ratio,
            "roofline": _predicted,
        }
    else:
        middle = {
            "of": lambda one: one["value"]["of"],
            "baseline / subject": _ratio,
            "MiB (bf16)": partial(_mebibytes, key="saved_bytes"),
            "1st call ms": partial(_ms, which="subject", key="first_ms"),
            "regimes": lambda one: ", ".join(one["value"]["regimes"]) or _NONE,
        }
    return {"case": _name, **middle, **verdict}


def _name(one: Entry) -> str:
    """The id without what the table's title says."""
    name: str = one["name"]
    return name.removeprefix(f"{one['facts']['family']}/")


def _ratio(one: Entry) -> str:
    return ratio(one["value"])


def _predicted(one: Entry) -> str:
    predicted = one["value"]["predicted"]
    return _NONE if predicted is None else f"{predicted:.2f}"


def _ms(one: Entry, *, which: str, key: str) -> str:
    ms = one["value"][which][key]
    if ms is None:
        return _NONE
    return f"{ms:,.0f}" if ms >= 1000 else f"{ms:.4g}"


def _mebibytes(one: Entry, *, key: str) -> str:
    ours, theirs = (one["value"][which][key] for which in ("subject", "baseline"))
    if ours is None or theirs is None:
        return _NONE
    return f"{ours / 2**20:,.0f} ({theirs / 2**20:,.0f})"


def rate(one: Entry, which: str) -> float | None:
    """TFLOP/s of a case that has operations, TB/s of one that moves bytes; by device time."""
    value = one["value"]
    ms = value[which]["device_ms"]
    work = value["flop"] or value["moved" if which == "subject" else "baseline_moved"]
    return work / ms / 1e9 if ms and work else None


def _rate(one: Entry, *, which: str) -> str:
    found = rate(one, which)
    if found is None:
        return _NONE
    return f"{found:.0f} TFLOP/s" if one["value"]["flop"] else f"{found:.2f} TB/s"


def _share(part: float | None, whole: float | None) -> str:
    return f"{part / whole:.0%}" if part and whole else _NONE


def _reached(entries: Iterable[Entry]) -> Reached:
    by_name = {one["name"]: one for one in entries}
    fp8, amax = by_name.get("ceiling/fp8"), by_name.get("ceiling/amax")
    return Reached(
        bf16=rate(fp8, "baseline") if fp8 else None,
        fp8=rate(fp8, "subject") if fp8 else None,
        copy=rate(amax, "baseline") if amax else None,
    )
