"""Planting a fault: entered before a test's fixtures are set up, left after them.

A fault is named ``package.module:attribute`` and is a callable without arguments that returns a
context manager; inside it, the implementation under test has a defect. A test that starts a
process of its own plants the fault again in there::

    from fp8.testing.planting import planted

    with planted(spec):  # spec: the fixture fp8_plant of the parent; None plants nothing
        ...
"""

from __future__ import annotations

import importlib
import sys
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Fault = Callable[[], AbstractContextManager[Any]]


class PlantError(ValueError):
    """A fault's name doesn't lead to a fault; the message says why."""


def resolve(spec: str) -> Fault:
    """Find the fault that `spec` names.

    Args:
        spec: ``package.module:attribute``; the attribute may have dots.

    Raises:
        PlantError: No such form, module or attribute, or it can't be called.
    """
    module_name, colon, path = spec.partition(":")
    if not (module_name and colon and path):
        msg = f"a fault is named package.module:fault, got {spec!r}"
        raise PlantError(msg)
    try:
        found: Any = importlib.import_module(module_name)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        msg = f"can't plant {spec!r}: {error}"
        raise PlantError(msg) from error
    if not callable(found):
        msg = f"can't plant {spec!r}: a {type(found).__name__} can't be called"
        raise PlantError(msg)
    fault: Fault = found
    return fault


@contextmanager
def planted(spec: str | None) -> Iterator[None]:
    """Plant a fault for as long as the context lasts; None plants nothing.

    Code that torch.compile made before the fault was planted would run without it, and code
    made under the fault would keep it: dynamo forgets everything on the way in and out.
    """
    if spec is None:
        yield
        return
    fault = resolve(spec)
    _forget_compiled()
    try:
        with fault():
            yield
    finally:
        _forget_compiled()


def _forget_compiled() -> None:
    dynamo = sys.modules.get("torch._dynamo")  # not imported: nothing was compiled
    if dynamo is not None:
        dynamo.reset()
