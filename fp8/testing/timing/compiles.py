"""How often something was compiled: by torch.compile or by Triton."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def dynamo_events() -> int:
    """All that dynamo, AOTAutograd and Inductor have counted in this process.

    Every compilation, also one that ends in a cache, a graph break or a fall-back, raises some of
    their counters; a call of compiled code raises none. 0 while nothing has been compiled.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", {})
    return sum(sum(group.values()) for group in counters.values())


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Yields a function that gives the number of compile events so far.

    Triton's own compilations, of kernels that torch.compile knows nothing about, are heard by its
    listener where this Triton has one; a listener that is there already goes on hearing them.
    """
    knobs = _triton_knobs()
    heard = 0
    if knobs is None:
        yield dynamo_events
        return
    before = knobs.listener

    def listen(*args: Any, **kwargs: Any) -> None:
        nonlocal heard
        heard += 1
        if before is not None:
            before(*args, **kwargs)

    knobs.listener = listen
    try:
        yield lambda: dynamo_events() + heard
    finally:
        knobs.listener = before


def _triton_knobs() -> Any:
    """Triton's settings of compilation, or None without Triton or in one that has no listener."""
    try:
        from triton import knobs
    except ImportError:
        return None
    return knobs.compilation if hasattr(knobs.compilation, "listener") else None
