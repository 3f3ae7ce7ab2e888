"""Running something compiled: one graph or the list of what broke it, and the result.

It is compiled as users do, without fullgraph: a break then shows, with all the others, where
fullgraph would stop at the first, and would take `.item()` into the graph, which waits for the
device all the same. No break, and so many graphs as are due, is what fullgraph promises.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fp8.testing.compilations import watched

if TYPE_CHECKING:
    from fp8.testing.compilations import Compilations
    from fp8.testing.laws import Judge

Result = TypeVar("Result")
#: compiles a callable, or leaves it as it is
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def compiling(backend: Any, **options: Any) -> Compile:
    """torch.compile with these options."""
    return partial(torch.compile, backend=backend, **options)


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """Not compiled."""
    return function


def in_graphs(
    judge: Judge,
    run: Callable[[Compile], Result],
    *,
    backend: Any = "aot_eager",
    graphs: int = 1,
    reason: str = "each captured piece is one graph",
    **options: Any,
) -> Result | None:
    """What `run` returns when it is given a compiler; judges P10: no break, so many graphs.

    Args:
        judge: Whose test this is.
        run: Compiles with what it is given, runs, and returns the result.
        backend: torch.compile's.
        graphs: How many graphs are allowed, and due.
        reason: Why so many; a failure says it.
        **options: torch.compile's others.

    Returns:
        The result; None where it doesn't compile, which is then an expected deviation.
    """
    __tracebackhide__ = True
    with watched() as seen:
        ran, result = judge.attempt("P10", "compiles", partial(run, compiling(backend, **options)))
        if not ran:
            return None
        count_graphs(judge, seen, graphs, reason)
    found: Result = result
    return found


def count_graphs(judge: Judge, seen: Compilations, graphs: int, reason: str) -> None:
    """Judge how many graphs there are by now; a failure names the guards that failed."""
    __tracebackhide__ = True
    judge.true("P10", "no graph break", not seen.breaks, _listed("graph breaks", seen.breaks))
    judge.true(
        "P10",
        "number of graphs",
        seen.graphs == graphs,
        f"expected {graphs} ({reason}), got {seen.graphs}\n  "
        + _listed("recompilations", seen.recompilations),
    )


def _listed(what: str, found: list[str]) -> str:
    lines = [f"{what}: {len(found)}", *(f"  {number}. {text}" for number, text in enumerate(found))]
    return "\n  ".join(lines)
