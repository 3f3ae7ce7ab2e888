"""Running something compiled: one graph or the list of what broke it, and the result.

A callable is compiled with fullgraph, so that a break is an error; the error is then explained by
compiling once more without, which lists every break rather than the first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._dynamo.exc import Unsupported

from fp8.testing.compilations import watched

if TYPE_CHECKING:
    from fp8.testing.compilations import Compilations
    from fp8.testing.laws import Judge

Result = TypeVar("Result")
#: compiles a callable, or leaves it as it is
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def compiling(backend: Any, **options: Any) -> Compile:
    """torch.compile with these options, one graph or an error."""
    return partial(torch.compile, backend=backend, fullgraph=True, **options)


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
        try:
            ran, result = judge.attempt(
                "P10", "compiles", partial(_passing_breaks, run, compiling(backend, **options))
            )
        except _BrokenError as broken:
            breaks = _breaks(run, backend, options) or [str(broken.__cause__)]
            judge.true("P10", "no graph break", False, _listed("graph breaks", breaks))
            return None
        if not ran:
            return None
        judge.true("P10", "no graph break", not seen.breaks, _listed("graph breaks", seen.breaks))
        count_graphs(judge, seen, graphs, reason)
    found: Result = result
    return found


def count_graphs(judge: Judge, seen: Compilations, graphs: int, reason: str) -> None:
    """Judge how many graphs there are by now; a failure names the guards that failed."""
    __tracebackhide__ = True
    judge.true(
        "P10",
        "number of graphs",
        seen.graphs == graphs,
        f"expected {graphs} ({reason}), got {seen.graphs}\n  "
        + _listed("recompilations", seen.recompilations),
    )


class _BrokenError(BaseException):
    """There is a graph break. No Exception, so that an attempt lets it pass."""


def _passing_breaks(run: Callable[[Compile], Result], compiler: Compile) -> Result:
    try:
        return run(compiler)
    except Unsupported as error:
        raise _BrokenError from error


def _breaks(run: Callable[[Compile], object], backend: Any, options: dict[str, Any]) -> list[str]:
    with watched() as seen:
        run(partial(torch.compile, backend=backend, fullgraph=False, **options))
        return seen.breaks


def _listed(what: str, found: list[str]) -> str:
    lines = [f"{what}: {len(found)}", *(f"  {number}. {text}" for number, text in enumerate(found))]
    return "\n  ".join(lines)
