"""One adapter a stack: finding a target by name, and loading it only when it was chosen.

A target is a built-in name, an entry point of the group `fp8.targets`, or `package.module:object`.
What the name leads to is a `Target`, or is called with the device and returns one.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    found = _resolve(spec)
    target: Target = found(torch.empty(0, device=device).device) if callable(found) else found
    target.name = spec
    return target


def _resolve(spec: str) -> Any:
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
        return point.load()
    except (ImportError, AttributeError) as error:
        raise UnknownTargetError(
            f"target: {spec!r} ({point.value}) cannot be loaded: {error}"
        ) from error
