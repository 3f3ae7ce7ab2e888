"""One adapter a stack: finding a target by name, and loading it only when it was chosen.

A target is a built-in name, an entry point of the group `fp8.targets`, or `package.module:object`.
What the name leads to is called with the device (`factory(device)`) and returns a `Target`.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from fp8.targets.base import Target

#: the entry-point group in which third parties register theirs
GROUP = "fp8.targets"

_BUILT_IN = {
    "reference[emulated]": "fp8.targets.reference:emulated",
    "reference[torch]": "fp8.targets.reference:torch_backend",
    "torch": "fp8.targets.torch_native:target",
    "torchao": "fp8.targets.torchao:target",
}

#: what is judged when nobody chooses
DEFAULT = ("reference[emulated]", "reference[torch]")


class UnknownTargetError(ValueError):
    """No target has that name, or what the name leads to cannot be loaded."""


def known() -> list[str]:
    """The names that `load` takes, besides `package.module:object`."""
    return [*_BUILT_IN, *sorted(point.name for point in entry_points(group=GROUP))]


def load(spec: str, device: str | torch.device = "cpu") -> Target:
    """The target that `spec` names, on `device`.

    Raises UnknownTargetError for a name that leads nowhere (it lists the known ones) and for a
    stack that cannot be imported here (it says why).
    """
    import torch

    # "cuda" means the current device: tensors say "cuda:0", and the two are not equal.
    target = _factory(spec)(torch.empty(0, device=device).device)
    target.name = spec
    return target


def _factory(spec: str) -> Callable[[torch.device], Target]:
    registered = {point.name: point for point in entry_points(group=GROUP)}
    if spec in _BUILT_IN:
        point = EntryPoint(name=spec, value=_BUILT_IN[spec], group=GROUP)
    elif spec in registered:
        point = registered[spec]
    elif ":" in spec:
        point = EntryPoint(name=spec, value=spec, group=GROUP)
    else:
        raise UnknownTargetError(
            f"target: got {spec!r}, needs one of {', '.join(known())} or package.module:object"
        )
    try:
        factory: Callable[[torch.device], Target] = point.load()
    except (ImportError, AttributeError) as error:
        raise UnknownTargetError(
            f"target: {spec!r} ({point.value}) cannot be loaded: {error}"
        ) from error
    return factory
