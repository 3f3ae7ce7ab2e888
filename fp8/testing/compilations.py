"""What dynamo did while something ran: graphs, graph breaks, and the guards that failed.

Dynamo counts graphs and graph breaks and keeps a record of each compilation, in which it says which
guard of the graph before had failed. Where a break is, and in whose code, it only logs, and only to
who listens.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch._dynamo
from torch._dynamo import utils

if TYPE_CHECKING:
    from collections.abc import Iterator

#: where dynamo reports graph breaks (torch 2.11 to 2.14)
_BREAKS = "torch._dynamo.symbolic_convert.__graph_breaks"
#: what it says of a break that it has reported before
_AGAIN = "duplicate graph break"
#: how many lines of a reason, and how many frames of user code, are worth showing
_REASON_LINES = 4
_FRAMES = 3


class Compilations:
    """Counts since the context was entered; they go on while it lasts."""

    def __init__(self) -> None:
        self._reported: list[str] = []

    @property
    def graphs(self) -> int:
        """How many graphs dynamo captured, a recompiled one counted again."""
        return int(utils.counters["stats"]["unique_graphs"])

    @property
    def breaks(self) -> list[str]:
        """Each graph break: where, why, and the user code that led there."""
        counted = utils.counters["graph_break"]
        if sum(counted.values()) <= len(self._reported):
            # A break in a callee is met again by each of its callers.
            return [_brief(text) for text in self._reported if _AGAIN not in text]
        # It counted more than it reported: the reasons at least, without the place.
        return [_brief(reason) for reason in counted]

    @property
    def recompilations(self) -> list[str]:
        """Each time a function was compiled again: its name, and the guard that failed."""
        return [
            f"{found.co_name}: {found.recompile_reason}"
            for found in utils.get_compilation_metrics()
            if found.is_forward and found.recompile_reason
        ]


@contextmanager
def watched() -> Iterator[Compilations]:
    """Forget what was compiled, and watch what is compiled from now on."""
    torch._dynamo.reset()  # noqa: SLF001 - torch.compiler.reset is another name of it
    utils.counters.clear()
    utils.clear_compilation_metrics()
    found = Compilations()
    listener = _Listener(found._reported)  # noqa: SLF001 - its own
    logger = logging.getLogger(_BREAKS)
    before = logger.level, logger.propagate
    logger.addHandler(listener)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield found
    finally:
        logger.removeHandler(listener)
        logger.level, logger.propagate = before
        torch._dynamo.reset()  # noqa: SLF001


class _Listener(logging.Handler):
    def __init__(self, texts: list[str]) -> None:
        super().__init__()
        self._texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self._texts.append(record.getMessage())


def _brief(report: str) -> str:
    """A report of dynamo's without advice: the place, the reason, the last frames of user code."""
    head, _, trace = report.partition("User code traceback:")
    lines = [line.strip() for line in head.splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith(("Hint:", "For more details"))]
    frames = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    shown = kept[: _REASON_LINES + 1]
    return "\n    ".join([*shown, *(f"from {frame}" for frame in frames[-_FRAMES:])])
