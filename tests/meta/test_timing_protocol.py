"""The protocol on a simulated device: its order, when it begins and stops, what it leaves out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

import pytest

from fp8.testing.timing.analysis import Verdict, compared
from fp8.testing.timing.plan import Plan
from fp8.testing.timing.protocol import is_steady, measure
from fp8.testing.timing.results import Block, Conditions, Start
from fp8.testing.timing.simulated import SimulatedDevice, SimulatedKernel

if TYPE_CHECKING:
    from collections.abc import Callable

PLAN = Plan(quantity="device")
STILL = SimulatedKernel(1.0, block_noise=0.0, sample_noise=0.0)
USUAL = SimulatedKernel(1.0)


class OrderedDevice:
    """Writes down whose blocks it measures; each takes a second."""

    name = "ordered"
    notes = ("a note",)

    def __init__(self) -> None:
        self.order: list[str] = []

    def now(self) -> float:
        return float(len(self.order))

    def prepare(self, subject: str, plan: Plan) -> OrderedPrepared:  # noqa: ARG002 - a Device's
        return OrderedPrepared(self, subject)


@dataclass
class OrderedPrepared:
    device: OrderedDevice
    name: str

    @property
    def start(self) -> Start:
        return Start(1.0, 1.0, 0, "none")

    def block(self) -> Block:
        self.device.order.append(self.name)
        return Block((1.0,), (1.0,), 1.0)


# -------------------------------------------------------------------------- order and steady state


def test_blocks_alternate_and_each_round_is_its_own_mirror_image() -> None:
    device = OrderedDevice()
    made = measure(device, {"a": "a", "b": "b", "c": "c"}, PLAN)
    assert "".join(device.order) == "abc" * 3 + "abccba" * 5
    assert made.names == ("a", "b", "c")
    assert made.baseline == "a"
    assert (made.device, made.notes) == ("ordered", ("a note",))
    assert len(made.blocks("b")) == 10
    assert made.stopped == "the intervals are narrow enough"


def test_one_callable_alone_is_measured_too() -> None:
    device = OrderedDevice()
    measure(device, {"a": "a"}, PLAN)
    assert "".join(device.order) == "aaa" + "aa" * 5


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one, got none"):
        measure(OrderedDevice(), {}, PLAN)


def blocks(*ms: float, compiled: int | None = None) -> list[Block]:
    return [Block((m,), (m,), m, compiles=int(i == compiled)) for i, m in enumerate(ms)]


@pytest.mark.parametrize(
    ("made", "steady"),
    [
        (blocks(1.0, 1.0), False),
        (blocks(1.0, 1.0, 1.0), True),
        (blocks(1.0, 1.01, 1.005), True),
        (blocks(1.0, 1.011, 1.005), False),
        (blocks(2.0, 1.0, 1.0, 1.0), True),
        (blocks(1.0, 1.0, 1.0, 2.0), False),
        (blocks(1.0, 1.0, 1.0, compiled=0), False),
        (blocks(1.0, 1.0, 1.0, 1.0, compiled=0), True),
    ],
)
def test_steady_is_three_medians_that_agree_and_nothing_compiled(
    made: list[Block], steady: bool
) -> None:
    assert is_steady(made, "device", 0.01) is steady


def test_warm_up_lasts_until_each_is_steady() -> None:
    late = SimulatedKernel(1.0, block_noise=0.0, sample_noise=0.0, compiles=frozenset({0, 4}))
    made = measure(SimulatedDevice(seed=0), {"a": STILL, "b": late}, PLAN)
    assert [len(w.blocks) for w in made.warm_ups.values()] == [4, 4]  # 1, 2 and 3 compile nothing
    assert all(w.steady for w in made.warm_ups.values())


def test_what_never_gets_steady_is_said() -> None:
    noisy = SimulatedKernel(1.0, block_noise=0.2)
    made = measure(SimulatedDevice(seed=0), {"a": STILL, "b": noisy}, PLAN)
    assert len(made.warm_ups["b"].blocks) == PLAN.max_warm_up
    assert made.warm_ups["a"].steady
    assert not made.warm_ups["b"].steady


# ------------------------------------------------------------------------------------- how long


def test_pairs_follow_the_cases_own_spread() -> None:
    def pairs(noise: float) -> float:
        kernel = SimulatedKernel(1.0, block_noise=noise, sample_noise=0.0)
        made = [
            measure(SimulatedDevice(seed), {"a": kernel, "b": kernel}, PLAN) for seed in range(10)
        ]
        return fmean(len(one.rounds) for one in made)

    assert pairs(0.001) == PLAN.start_pairs
    # A pair's SD is that of one block; t(99.75 %, n - 1)·0.8 %/√n falls to 1 % at n = 10.
    assert PLAN.start_pairs < pairs(0.008) < PLAN.max_pairs
    assert pairs(0.05) == PLAN.max_pairs


@pytest.mark.parametrize("budget", [10.0, 30.0, 60.0])
def test_the_budget_is_kept(budget: float) -> None:
    device = OrderedDevice()
    plan = Plan(quantity="device", budget_s=budget, start_pairs=12)
    made = measure(device, {"a": "a", "b": "b"}, plan)
    assert made.seconds <= budget
    assert made.seconds + 4 > budget or made.stopped == "the intervals are narrow enough"


def test_too_little_time_is_unresolved() -> None:
    device = OrderedDevice()
    made = measure(device, {"a": "a", "b": "b"}, Plan(quantity="device", budget_s=18.0))
    assert made.stopped == "the time was spent"
    comparison = compared(made, "b")
    assert (len(made.rounds), comparison.verdict) == (3, Verdict.UNRESOLVED)
    assert comparison.reason == "3 of the 5 pairs that it needs"


def test_first_calls_are_not_in_the_budget() -> None:
    slow = SimulatedKernel(1.0, first_ms=60_000.0)
    made = measure(SimulatedDevice(seed=0), {"a": slow, "b": slow}, Plan(budget_s=3.0))
    assert made.starts["a"].first_ms == 60_000.0
    assert made.seconds <= 3.0
    assert len(made.rounds) >= 5


# ---------------------------------------------------------------------- what the device may do


def test_a_drift_cancels_where_one_after_the_other_is_fooled() -> None:
    def warming(seconds: float) -> float:
        return 1 + 0.1 * seconds  # 10 % a second

    plan = Plan(quantity="device", start_pairs=10, max_pairs=10)
    made = measure(SimulatedDevice(seed=0, drift=warming), {"a": STILL, "b": STILL}, plan)
    times = [median(b.device_ms) for one in made.rounds for b in one["a"]]
    assert times[-1] / times[0] > 1.05  # the drift is there
    comparison = compared(made, "b")
    assert comparison.verdict is Verdict.ALIKE
    assert comparison.estimate is not None
    # Even drift cancels to the first order; what the logarithm bends is the square of what one
    # round drifts, 4 blocks of 20 ms at 10 %/s: (0.8 %)² = 6e-5.
    assert abs(comparison.estimate.log_ratio) < 6e-5

    device = SimulatedDevice(seed=0, drift=warming)
    alone = [device.prepare(STILL, plan) for _ in range(2)]
    a, b = ([one.block().ms("device") for _ in range(20)] for one in alone)
    assert abs(math.log(fmean(a) / fmean(b))) > 0.03  # 20 blocks of 20 ms at 10 %/s: 4 %


def test_outliers_move_means_and_not_the_result() -> None:
    spiky = SimulatedKernel(1.0, outliers=0.05)
    device = SimulatedDevice(seed=2, wander=0.01)
    made = measure(device, {"a": USUAL, "b": spiky}, PLAN)
    comparison = compared(made, "b")
    assert comparison.verdict is Verdict.ALIKE
    means = {name: fmean(fmean(b.device_ms) for b in made.blocks(name)) for name in made.names}
    assert means["b"] / means["a"] > 1.2  # 5 % of ten times: 1.45 on average


def test_a_kernel_with_two_speeds_has_a_wide_interval() -> None:
    bimodal = SimulatedKernel(1.0, modes=(1.0, 1.15))
    widths, verdicts = [], []
    for seed in range(20):
        made = measure(SimulatedDevice(seed=seed), {"a": bimodal, "b": bimodal}, PLAN)
        comparison = compared(made, "b")
        assert comparison.estimate is not None
        assert comparison.estimate.pairs == PLAN.max_pairs
        widths.append(comparison.estimate.half_width)
        verdicts.append(comparison.verdict)
    # A pair's SD is that of one block, log(1.15)/2 = 7 %; t(99.5 %, 19) = 3.2 of 7 %/√20 is 5 %.
    assert 0.04 < median(widths) < 0.06
    assert set(verdicts) == {Verdict.UNRESOLVED}


# -------------------------------------------------------------------------------- void blocks


def hot_between(begin: float, end: float) -> Callable[[float], Conditions]:
    """Thermal throttling from one moment to another."""

    def conditions(seconds: float) -> Conditions:
        hot = begin <= seconds < end
        return Conditions(reasons=frozenset({"SW power cap"} | ({"HW thermal"} if hot else set())))

    return conditions


def test_throttled_blocks_are_void_and_measured_again() -> None:
    # Warm-up of 3 x 2 blocks ends at 2.002 + 6 x 0.02 = 2.122 s; the third round begins at 2.282 s.
    device = SimulatedDevice(
        seed=0,
        drift=lambda seconds: 1.3 if 2.285 <= seconds < 2.31 else 1.0,
        conditions=hot_between(2.29, 2.33),
    )
    made = measure(device, {"a": STILL, "b": STILL}, PLAN)
    comparison = compared(made, "b")
    assert comparison.void == {"HW thermal": 1}
    assert comparison.estimate is not None
    assert (len(made.rounds), comparison.estimate.pairs) == (6, 5)
    assert comparison.verdict is Verdict.ALIKE
    assert comparison.estimate.ratio == pytest.approx(1.0)


@pytest.mark.parametrize("other", [STILL, SimulatedKernel(0.5, 0.0, 0.0)])
def test_too_many_throttled_blocks_are_unresolved_however_clear_the_rest(
    other: SimulatedKernel,
) -> None:
    device = SimulatedDevice(seed=0, conditions=hot_between(2.2, math.inf))
    made = measure(device, {"a": STILL, "b": other}, PLAN)
    comparison = compared(made, "b")
    assert comparison.verdict is Verdict.UNRESOLVED
    assert "pairs are void" in comparison.reason
    assert len(made.rounds) == PLAN.max_rounds  # it went on as long as it may


def test_what_the_device_recovers_from_is_resolved() -> None:
    device = SimulatedDevice(seed=0, conditions=hot_between(2.21, 2.4))  # three rounds of 0.08 s
    made = measure(device, {"a": STILL, "b": STILL}, PLAN)
    comparison = compared(made, "b")
    assert comparison.void == {"HW thermal": 3}
    assert comparison.verdict is Verdict.ALIKE
    assert len(made.rounds) == 15  # until three are a fifth


def test_a_compilation_voids_its_pair() -> None:
    # blocks 0 to 2 warm up, 3 and 4 are the first round
    compiling = SimulatedKernel(1.0, 0.0, 0.0, compiles=frozenset({4}))
    made = measure(SimulatedDevice(seed=0), {"a": STILL, "b": compiling}, PLAN)
    assert [bool(block.void) for block in made.blocks("b")[:3]] == [False, True, False]
    comparison = compared(made, "b")
    assert comparison.void == {"compiled": 1}
    assert comparison.estimate is not None
    assert (len(made.rounds), comparison.estimate.pairs) == (6, 5)


def test_what_compiles_in_every_block_is_never_resolved() -> None:
    compiling = SimulatedKernel(1.0, 0.0, 0.0, compiles=frozenset(range(1000)))
    made = measure(SimulatedDevice(seed=0), {"a": STILL, "b": compiling}, PLAN)
    assert not made.warm_ups["b"].steady
    assert compared(made, "b").verdict is Verdict.UNRESOLVED
    assert compared(made, "b").estimate is None
