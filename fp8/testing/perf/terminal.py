"""What the terminal shows of a perf session: a line after each bench, the tables at the end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fp8.testing.perf import tables

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

    from fp8.testing.perf.session import PerfSession

#: How wide tables are where nothing knows the terminal: a CI job's log.
_WIDTH = 160


class Shows:
    """A pytest plug-in that follows one session.

    Attributes:
        session: The perf session; None until a GPU was opened.
        entries: The record's entries so far, in the order in which they were measured.
        latest: What the bench that just ran gave.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.session: PerfSession | None = None
        self.entries: list[tables.Entry] = []
        self.latest: Sequence[tables.Entry] = ()
        self._config = config
        self._items: set[str] = set()
        self._done = 0
        self._begun: float | None = None

    def expects(self, items: Sequence[pytest.Item]) -> None:
        """The perf items that will run."""
        self._items = {item.nodeid for item in items}

    def took(self, entries: Sequence[tables.Entry]) -> None:
        """Note what a bench gave."""
        self.latest = entries
        self.entries += entries

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No dot for a bench: it has a line of its own."""
        if report.nodeid in self._items and report.passed and report.when == "call":
            return "passed", "", "PASSED"
        return None

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """The time left is estimated from the benches, not from what ran before them."""
        if nodeid in self._items and self._begun is None:
            self._begun = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """One line for each bench that was measured: how far, what it gave, the time left."""
        if nodeid not in self._items:
            return
        self._done += 1
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None or not self.latest:
            return
        test = nodeid.rpartition("::")[2]
        line = (
            f"perf {self._done}/{len(self._items)}, {self._left()}: {test}: {_brief(self.latest)}"
        )
        reporter.ensure_newline()
        reporter.write_line(line)
        self.latest = ()

    def _left(self) -> str:
        """The time left, by what the benches so far took and by the budget."""
        begun = time.monotonic() if self._begun is None else self._begun
        each = (time.monotonic() - begun) / max(1, self._done)
        estimated = each * (len(self._items) - self._done)
        budget = None if self.session is None else self.session.left_s()
        if budget is not None:
            estimated = min(estimated, budget)
        return f"about {int(estimated) // 60}:{int(estimated) % 60:02d} left"

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The tables, what is slow and why, and what it was held to."""
        if not self.entries:
            return
        from rich.console import Console

        terminalreporter.write_sep("=", "fp8: speed")
        out = terminalreporter._tw  # noqa: SLF001 - pytest gives its file and width nowhere else
        width = out.fullwidth if out.hasmarkup else _WIDTH
        console = Console(file=out._file, width=max(width, _WIDTH), force_terminal=out.hasmarkup)  # noqa: SLF001
        tables.show(console, self.entries)
        if self.session is not None:
            terminalreporter.write_line(self.session.thresholds)


def _brief(entries: Sequence[tables.Entry]) -> str:
    """What a bench gave, in a few words."""
    from fp8.testing.perf.explaining import ratio

    first, *rest = entries
    more = f", {len(rest)} more" if rest else ""
    return f"{ratio(first['value'])} {first['value']['verdict']}{more}"
