"""The measuring protocol: interleaved blocks of callables on a device, until they say enough.

It knows nothing of GPUs. What a device must do is `Device`; `fp8.testing.timing.cuda` has the real
one, `fp8.testing.timing.simulated` one with known properties.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fp8.testing.timing import analysis
from fp8.testing.timing.results import Block, Measurement, Round, Start, WarmUp

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fp8.testing.timing.plan import Plan, Quantity

Subject = TypeVar("Subject")
Subject_contra = TypeVar("Subject_contra", contravariant=True)


class Prepared(Protocol):
    """A callable that has been called twice and can be measured."""

    @property
    def start(self) -> Start:
        """How it began."""
        ...

    def block(self) -> Block:
        """Measure one block."""
        ...


class Device(Protocol[Subject_contra]):
    """What the protocol measures on."""

    @property
    def name(self) -> str:
        """The device's name."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of its numbers should know."""
        ...

    def now(self) -> float:
        """A clock, in seconds."""
        ...

    def prepare(self, subject: Subject_contra, plan: Plan) -> Prepared:
        """Call it twice, and find out how to measure it."""
        ...


def measure(device: Device[Subject], subjects: Mapping[str, Subject], plan: Plan) -> Measurement:
    """Measure all subjects, interleaved.

    Each is called twice, one after the other. Then all warm up in turn until each has been steady,
    and ABBA rounds follow until every comparison with the first subject is narrow enough, has all
    its pairs, or the time is spent.

    Raises:
        ValueError: There are no subjects.
    """
    if not subjects:
        raise ValueError("subjects must hold at least one, got none")
    prepared = {name: device.prepare(subject, plan) for name, subject in subjects.items()}
    begun = device.now()
    # A third for warming up: what is left must do for several rounds.
    budget = math.inf if plan.budget_s is None else plan.budget_s
    warm_ups = _warm_up(device, prepared, plan, begun + budget / 3)
    rounds: list[Round] = []
    while not (stopped := _stop(rounds, tuple(subjects), plan)):
        round_begun = device.now()
        rounds.append(_round(prepared))
        now = device.now()
        if now + (now - round_begun) > begun + budget:
            stopped = _stop(rounds, tuple(subjects), plan) or "the time was spent"
            break
    return Measurement(
        device=device.name,
        plan=plan,
        starts={name: one.start for name, one in prepared.items()},
        warm_ups=warm_ups,
        rounds=tuple(rounds),
        seconds=device.now() - begun,
        stopped=stopped,
        notes=device.notes,
    )


def _warm_up(
    device: Device[Any], prepared: Mapping[str, Prepared], plan: Plan, deadline: float
) -> dict[str, WarmUp]:
    """Blocks of all in turn, as they will be measured, until each has been steady once."""
    blocks: dict[str, list[Block]] = {name: [] for name in prepared}
    steady: set[str] = set()
    for _ in range(plan.max_warm_up):
        for name, one in prepared.items():
            blocks[name].append(one.block())
            if is_steady(blocks[name], plan.quantity, plan.steady):
                steady.add(name)
        if len(steady) == len(prepared) or device.now() >= deadline:
            break
    return {name: WarmUp(tuple(made), name in steady) for name, made in blocks.items()}


def is_steady(blocks: Sequence[Block], quantity: Quantity, within: float) -> bool:
    """Whether the last three medians agree and nothing compiled in them."""
    last = blocks[-3:]
    if len(last) < 3 or any(block.compiles for block in last):
        return False
    medians = [block.ms(quantity) for block in last]
    return max(medians) <= min(medians) * (1 + within)


def _round(prepared: Mapping[str, Prepared]) -> Round:
    """One round: A B C, then C B A. A drift that is even over the round cancels."""
    first = {name: one.block() for name, one in prepared.items()}
    second = {name: prepared[name].block() for name in reversed(list(prepared))}
    return {name: (first[name], second[name]) for name in prepared}


def _stop(rounds: Sequence[Round], names: tuple[str, ...], plan: Plan) -> str:
    """Why no more rounds are needed, or an empty string."""
    if len(rounds) >= plan.max_rounds:
        return f"{len(rounds)} pairs were measured"
    if len(rounds) < plan.start_pairs:
        return ""
    baseline, *others = names
    widths = []
    for name in others:
        ratios = analysis.valid_ratios(rounds, baseline, name, plan.quantity)
        few = len(ratios) < plan.start_pairs
        if few or analysis.too_many_void(len(ratios), len(rounds), plan):
            return ""
        narrow = analysis.estimated(ratios, plan.look_confidence).half_width <= plan.half_width
        if not narrow and len(ratios) < plan.max_pairs:
            return ""
        widths.append(narrow)
    return "the intervals are narrow enough" if all(widths) else f"{plan.max_pairs} pairs are valid"
