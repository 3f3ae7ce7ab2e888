"""The catalogue of planted faults and of benign variants, by the step of the library they replace.

``FAULTS`` and ``BENIGN`` hold them by id, ``STEPS`` the steps that can be replaced. Each is an
attribute of this module, too, so that ``--fp8-plant fp8.testing.faults:F12`` names one. Where a
fault has a number up to 67, it is one that was once planted in a NumPy emulation of a float8
layer, of which 32 of 42 went past an accuracy test on random square matrices.
"""

from __future__ import annotations

# Each of these modules puts its faults into the catalogue when it is imported.
from fp8.testing.faults import (
    amaxes,
    benign,
    casts,
    compiled,
    conversion,
    extents,
    gradients,
    layers,
    operands,
    products,
    recipes,
    refusals,
    scales,
)
from fp8.testing.faults.base import BENIGN, FAULTS, STEPS, Benign, Fault, Variant, replaced

__all__ = ["BENIGN", "FAULTS", "STEPS", "Benign", "Fault", "Variant", "find", "replaced"]

_FILES = (
    amaxes,
    benign,
    casts,
    compiled,
    conversion,
    extents,
    gradients,
    layers,
    operands,
    products,
    recipes,
    refusals,
    scales,
)


def find(id: str) -> Variant:
    """The fault or the benign variant of that id. Raises KeyError that lists the ids."""
    known: dict[str, Variant] = {**FAULTS, **BENIGN}
    if id not in known:
        raise KeyError(f"id: got {id!r}, needs one of {', '.join(known)}")
    return known[id]


def __getattr__(name: str) -> Variant:
    try:
        return find(name)
    except KeyError as error:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from error
