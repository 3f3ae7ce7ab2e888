"""The proof on a GPU: every planted slow-down is seen, and the same code twice is alike.

A planted and a clean layer are measured interleaved, in one run: that is how a regression between
two versions shows best, and what `fp8.testing.timing.compare` does for users.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from fp8 import conversion
from fp8.regimes import RegimeWarning
from fp8.testing.faults.base import replaced
from fp8.testing.slowdowns import SLOWDOWNS, Slowdown
from fp8.testing.timing.analysis import Comparison, Verdict, compared
from fp8.testing.timing.plan import Plan
from fp8.testing.timing.protocol import measure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from contextlib import AbstractContextManager

    from fp8.testing.timing.protocol import Device

    Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer of the reference, tensorwise, with a bias, compiled."""

    M: int
    K: int
    N: int

    def __str__(self) -> str:
        return f"{self.M}x{self.K}x{self.N}"


#: For what costs the device time: some 3 ms a step by fp8.roofline, so that the launch of a wait,
#: 2 µs, hides in none of the six casts; and a bias is 4 % of it: 4MN bytes beside 6MKN operations.
LARGE = Layer(16384, 4096, 8192)
#: For what costs the host time: short enough that the GPU soon waits for it, long enough that it
#: does not wait already.
SHORT = Layer(4096, 4096, 4096)


@dataclass(frozen=True, slots=True)
class Finding:
    """One comparison, and what it should have said.

    Attributes:
        what: The slow-down's id and summary, or that it is the same code.
        layer: What was measured.
        expected: The verdict that proves it.
        comparison: Against the clean layer.
    """

    what: str
    layer: Layer
    expected: Verdict
    comparison: Comparison

    @property
    def proved(self) -> bool:
        """Whether the verdict is the expected one."""
        return self.comparison.verdict == self.expected


def training_step(layer: Layer, device: str, backend: str) -> Step:
    """Forward and backward of a layer of its own, random data and a random upstream gradient."""
    torch.manual_seed(0)
    made = {"device": device, "dtype": torch.bfloat16}
    model = nn.Sequential(nn.Linear(layer.K, layer.N, **made))  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", RegimeWarning
        )  # how slow it is against bfloat16 is no matter
        conversion.convert(model, "tensorwise", backend="torch")
    # Static: the second shape of one code object would be compiled for any.
    run = torch.compile(model, backend=backend, dynamic=False)
    x = torch.randn(layer.M, layer.K, requires_grad=True, **made)  # type: ignore[call-overload]
    grad = torch.randn(layer.M, layer.N, **made)  # type: ignore[call-overload]

    def step() -> None:
        x.grad = None
        model.zero_grad()
        run(x).backward(grad)

    return step


def inside(plant: Callable[[], AbstractContextManager[None]], step: Step) -> Step:
    """The step as it runs while something is planted; dynamo's guards keep the versions apart."""

    def planted() -> None:
        with plant():
            step()

    return planted


def unchanged() -> AbstractContextManager[None]:
    """Plants a step in its own place: a clean step pays the host for planting, too."""
    return replaced("fp8.linear.product", lambda product: product)


def prove(
    device: Device[Step],
    chosen: Iterable[Slowdown] = tuple(SLOWDOWNS.values()),
    *,
    alike: int = 10,
    layers: tuple[Layer, Layer] = (LARGE, SHORT),
    on: str = "cuda",
    backend: str = "inductor",
) -> Iterator[Finding]:
    """Measure slow-downs against the clean layer, then clean layers against each other.

    Args:
        device: What to measure on.
        chosen: The slow-downs.
        alike: How many times to compare two clean layers.
        layers: For slow-downs that the device sees, and for those that only a call sees.
        on: Where the tensors are.
        backend: torch.compile's.
    """
    chosen = tuple(chosen)
    large, short = layers
    # All versions of a step are entries of one code object, which may have eight by default.
    with torch._dynamo.config.patch(recompile_limit=4 * len(SLOWDOWNS)):  # noqa: SLF001
        # Events for calls: a host that waits can't be captured, and the profiler takes long.
        plans = ((large, Plan(quantity="device")), (short, Plan(quantity="call", method="events")))
        for layer, plan in plans:
            plants = [one for one in chosen if one.seen_by == plan.quantity]
            if plants:
                yield from _slower(device, layer, plants, plan, on, backend)
        if alike:
            steps = {
                name: inside(unchanged, training_step(large, on, backend))
                for name in ("clean", "again")
            }
            for _ in range(alike):
                result = compared(measure(device, steps, Plan(quantity="device")), "again")
                yield Finding("the same code twice", large, Verdict.ALIKE, result)


def _slower(
    device: Device[Step], layer: Layer, plants: list[Slowdown], plan: Plan, on: str, backend: str
) -> Iterator[Finding]:
    steps = {"clean": inside(unchanged, training_step(layer, on, backend))}
    for one in plants:
        steps[one.id] = inside(one, training_step(layer, on, backend))
    measurement = measure(device, steps, plan)
    for one in plants:
        what = f"{one.id}: {one.summary}"
        yield Finding(what, layer, Verdict.SLOWER, compared(measurement, one.id))
