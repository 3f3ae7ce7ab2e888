"""What a fault is, and how it takes the place of one step of the library.

A step is a function (or a method, or a table) that the library looks up each time it uses it, as
``module.step``; `STEPS` lists them. A fault is written as a function from the original step to the
wrong one::

    @fault("F09", law="P06", naive=True, step="fp8.quantize.cast")
    def subnormals_flushed(cast):
        \"\"\"Subnormals are flushed to zero.\"\"\"
        def wrong(x, format):
            ...
        return wrong
"""

from __future__ import annotations

import inspect
import pkgutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    #: from the original step to its replacement
    Make = Callable[[Any], Any]

EMULATED = "reference[emulated]"
TORCH = "reference[torch]"
BOTH = (EMULATED, TORCH)

#: Every replaceable step: what it is, and when it runs: in every pass through a layer ("pass"),
#: when a model is converted ("convert"), when a layer is copied or loaded ("copy"), or in other
#: calls of the library ("call"). tests/meta/test_faults.py shows that those of a pass run in eager
#: and in compiled code.
STEPS: dict[str, tuple[str, str]] = {
    "fp8.scaling.amax": ("pass", "the largest magnitude of each group"),
    "fp8.scaling.multiplier_and_scale": ("pass", "the factors into the format's range and back"),
    "fp8.scaling.round_down_to_power_of_two": ("pass", "a power-of-two rule's rounding"),
    "fp8.scaling.expand": ("pass", "each group's factor at each of its values"),
    "fp8.quantize.cast": ("pass", "rounding to float8"),
    "fp8.quantize.quantize": ("pass", "a matrix to codes and scales"),
    "fp8.quantize.Quantized.dequantize": ("call", "codes times scales"),
    "fp8.quantize.Quantized.t": ("call", "the transposed operand"),
    "fp8.recipes.RECIPES": ("convert", "the table of recipes"),
    "fp8.matmul.scaled_mm": ("pass", "a product of two quantised operands, whatever the backend"),
    "fp8.matmul.check_operands": ("pass", "what no product takes"),
    "fp8.matmul.FORMAT_PAIRS": ("call", "the pairs of formats that a product takes"),
    "fp8.matmul.emulated_product": ("pass", "the emulated product, inside the operator"),
    "fp8.matmul.round_once": ("pass", "its rounding to the output's dtype"),
    "fp8.matmul.torch_product": ("pass", "torch's product, inside the operator"),
    "fp8.matmul.pad_operands": ("pass", "its padding to multiples of 16"),
    "fp8.linear.linear": ("pass", "the whole layer: shapes, dtypes, autocast"),
    "fp8.linear.product": ("pass", "quantising both operands and multiplying them"),
    "fp8.linear.high_precision_product": ("pass", "a product that a recipe keeps out of float8"),
    "fp8.linear.sum_over_tokens": ("pass", "the bias's gradient"),
    "fp8.linear._Linear.forward": ("pass", "what autograd runs and saves"),
    "fp8.linear._Linear.backward": ("pass", "the three gradients"),
    "fp8.linear.Float8Linear.forward": ("pass", "the module's call"),
    "fp8.linear.Float8Linear.__setstate__": ("copy", "what a copy or an unpickled layer restores"),
    "fp8.conversion._linears": ("convert", "the layers of a model, with their names"),
    "fp8.conversion._obstacle": ("convert", "why a layer cannot be converted"),
    "fp8.conversion._pays": ("convert", "whether a layer pays at so many tokens"),
    "fp8.conversion._swap": ("convert", "making one layer float8"),
    "fp8.conversion.convert": ("convert", "converting a model, and its report"),
    "fp8.conversion.Watch.idle": ("call", "which converted layers did not run"),
}


@dataclass(frozen=True)
class Variant:
    """One step of the library, replaced.

    Attributes:
        id: How reports and ``--fp8-plant fp8.testing.faults:ID`` name it.
        summary: One sentence: what is different.
        step: The key of `STEPS` that it replaces.
        plant: Makes the context in which the step is replaced.
        targets: The targets in which it shows.
    """

    id: str
    summary: str
    step: str
    plant: Callable[[], AbstractContextManager[None]]
    targets: tuple[str, ...]

    def __call__(self) -> AbstractContextManager[None]:
        """A context manager that plants it: what ``--fp8-plant`` asks of a fault."""
        return self.plant()

    @property
    def spec(self) -> str:
        """What ``--fp8-plant`` takes."""
        return f"fp8.testing.faults:{self.id}"


@dataclass(frozen=True)
class Fault(Variant):
    """A small defect.

    Attributes:
        law: The law that must catch it.
        naive: Whether the naive accuracy test misses it (see `fp8.testing.trials.naive`).
        compiled: Whether only compiled code shows it: the tests of tests/compile are asked.
    """

    law: str
    naive: bool
    compiled: bool = False


@dataclass(frozen=True)
class Benign(Variant):
    """A different way to do the same: no law may object."""


FAULTS: dict[str, Fault] = {}
BENIGN: dict[str, Benign] = {}

AnyMake = TypeVar("AnyMake", bound="Make")


def fault(
    id: str,
    *,
    law: str,
    naive: bool,
    step: str,
    targets: tuple[str, ...] = (EMULATED,),
    compiled: bool = False,
) -> Callable[[AnyMake], AnyMake]:
    """Put the decorated function, from the step to a wrong one, into the catalogue."""

    def register(make: AnyMake) -> AnyMake:
        _check_new(id, step)
        FAULTS[id] = Fault(
            id, _summary(make), step, _plant(step, make), targets, law, naive, compiled
        )
        return make

    return register


def benign(id: str, *, step: str, targets: tuple[str, ...] = BOTH) -> Callable[[AnyMake], AnyMake]:
    """Put the decorated function, from the step to another right one, into the catalogue."""

    def register(make: AnyMake) -> AnyMake:
        _check_new(id, step)
        BENIGN[id] = Benign(id, _summary(make), step, _plant(step, make), targets)
        return make

    return register


def _check_new(id: str, step: str) -> None:
    if id in FAULTS or id in BENIGN:
        raise ValueError(f"id: got {id!r} twice")
    if step not in STEPS:
        raise ValueError(f"step: got {step!r}, needs one of {', '.join(STEPS)}")


def _summary(make: Make) -> str:
    summary = inspect.getdoc(make)
    if summary is None:
        raise ValueError(f"{make}: got no docstring, needs one sentence")
    return " ".join(summary.split())


def _plant(step: str, make: Make) -> Callable[[], AbstractContextManager[None]]:
    return lambda: replaced(step, make)


def owner_of(step: str) -> tuple[Any, str]:
    """The module or class that holds a step, and the step's name in it."""
    path, _, name = step.rpartition(".")
    return pkgutil.resolve_name(path), name


@contextmanager
def replaced(step: str, make: Make) -> Iterator[None]:
    """`step`, a dotted name such as ``fp8.quantize.cast``, is make(original) in this context."""
    owner, name = owner_of(step)
    wrong = make(getattr(owner, name))
    held = inspect.getattr_static(owner, name)
    if isinstance(held, staticmethod):
        wrong = staticmethod(wrong)
    elif isinstance(held, property):
        wrong = property(wrong)
    with mock.patch.object(owner, name, wrong):
        yield
