"""Operands that are not in the cache: as many copies as it takes, each call the next one.

A kernel whose operands lie in L2 from the last call reads them several times as fast as it would in
a model, where others have been there in between.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Rotated:
    """A callable without arguments that calls `fn` with the next operands each time.

    Args:
        fn: The callable.
        sets: The operands, one tuple for each call until they repeat.

    Attributes:
        period: After how many calls they repeat.
    """

    def __init__(self, fn: Callable[..., object], sets: Sequence[tuple[Any, ...]]) -> None:
        if not sets:
            raise ValueError("sets must hold at least one set of operands, got none")
        self._fn = fn
        self._sets = tuple(sets)
        self._next = 0
        self.period = len(self._sets)

    def __call__(self) -> object:
        """Call `fn` with the next operands."""
        operands = self._sets[self._next]
        self._next = (self._next + 1) % self.period
        return self._fn(*operands)


def rotated(
    fn: Callable[..., object], make: Callable[[int], tuple[Any, ...]], over_bytes: int
) -> Rotated:
    """`fn` with as many sets of operands as hold more than `over_bytes` together: see `enough`."""
    return Rotated(fn, enough(make, over_bytes))


def enough(make: Callable[[int], tuple[Any, ...]], over_bytes: int) -> list[tuple[Any, ...]]:
    """Make sets of operands until they hold more than `over_bytes` together.

    Args:
        make: Number of the set (a seed) -> the set; its tensors are counted by their ``nbytes``.
        over_bytes: More than three times L2: `fp8.testing.timing.CudaDevice.rotate_bytes`.

    Raises:
        ValueError: A set holds no bytes, so no number of sets is enough.
    """
    sets: list[tuple[Any, ...]] = []
    total = 0
    for number in count():
        one = make(number)
        held = sum(getattr(operand, "nbytes", 0) for operand in one)
        if not held:
            raise ValueError(f"make must return tensors, got none that holds bytes in {one!r}")
        sets.append(one)
        total += held
        if total > over_bytes:
            break
    return sets
