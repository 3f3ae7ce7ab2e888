"""Paired log-ratios: the interval is scipy's, and each verdict follows from it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from fp8.testing.timing.analysis import Estimate, Verdict, compared, estimated, judged, log_ratio
from fp8.testing.timing.plan import Plan
from fp8.testing.timing.results import Block, Conditions, Measurement, Reading, Start, WarmUp

#: looks once, so that the interval has the plan's own confidence
ONE_LOOK = Plan(quantity="device", start_pairs=5, max_pairs=5)


def block(ms: float, *reasons: str, host: float = 0.01, compiles: int = 0) -> Block:
    conditions = Conditions(reasons=frozenset(reasons))
    return Block((ms, ms / 2, ms * 3), (2 * ms,), host, compiles, conditions)


def measurement(plan: Plan, *rounds: dict[str, tuple[Block, Block]]) -> Measurement:
    starts = {name: Start(1.0, 1.0, 0, "events") for name in rounds[0]}
    warm_ups = {name: WarmUp((), steady=True) for name in rounds[0]}
    return Measurement("none", plan, starts, warm_ups, rounds, 1.0, "enough")


def test_the_interval_is_scipys() -> None:
    ratios = np.random.default_rng(3).normal(0.4, 0.02, 7).tolist()
    ours = estimated(ratios, 0.99)
    theirs = stats.ttest_1samp(ratios, 0.0).confidence_interval(0.99)
    assert math.log(ours.low) == pytest.approx(theirs.low, rel=1e-9)
    assert math.log(ours.high) == pytest.approx(theirs.high, rel=1e-9)
    assert ours.ratio == pytest.approx(math.exp(np.mean(ratios)))
    assert (ours.pairs, ours.sd) == (7, pytest.approx(np.std(ratios, ddof=1)))


def test_a_round_compares_each_sides_geometric_mean_of_block_medians() -> None:
    base, other = (block(2.0), block(8.0)), (block(1.0), block(1.0))
    assert log_ratio(base, other, "device") == pytest.approx(math.log(4.0))
    assert log_ratio(base, other, "call") == pytest.approx(math.log(4.0))
    assert log_ratio(base, other, "host") == 0.0


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.03, 1.05, Verdict.FASTER),
        (1.01, 1.03, Verdict.UNRESOLVED),
        (0.985, 1.015, Verdict.ALIKE),
        (0.97, 1.03, Verdict.UNRESOLVED),
        (0.97, 0.99, Verdict.UNRESOLVED),
        (0.95, 0.97, Verdict.SLOWER),
        (0.50, 2.00, Verdict.UNRESOLVED),
    ],
)
def test_verdicts(low: float, high: float, verdict: Verdict) -> None:
    # a half-width of t·sd/√5 = (log high − log low)/2
    t = stats.t.ppf(0.995, 4)
    sd = math.log(high / low) / 2 * math.sqrt(5) / t
    estimate = Estimate(math.log(low * high) / 2, sd, 5, 0.99)
    assert (estimate.low, estimate.high) == (pytest.approx(low), pytest.approx(high))
    assert judged(estimate, 5, 5, ONE_LOOK)[0] is verdict


def test_too_few_pairs_and_too_many_void_ones_are_unresolved() -> None:
    sure = Estimate(1.0, 0.001, 5, 0.99)
    assert judged(sure, 5, 5, ONE_LOOK)[0] is Verdict.FASTER
    assert judged(sure, 4, 5, ONE_LOOK) == (Verdict.UNRESOLVED, "4 of the 5 pairs that it needs")
    assert judged(sure, 5, 7, ONE_LOOK) == (Verdict.UNRESOLVED, "2 of 7 pairs are void")
    assert judged(sure, 8, 10, ONE_LOOK)[0] is Verdict.FASTER  # just the share that may be void
    assert judged(None, 1, 1, ONE_LOOK)[0] is Verdict.UNRESOLVED
    assert judged(None, 0, 0, ONE_LOOK)[0] is Verdict.UNRESOLVED


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (block(9.0, "HW thermal"), "HW thermal"),
        (block(9.0, "HW slowdown"), "HW slowdown"),
        (block(9.0, "SW thermal"), "SW thermal"),
        (block(9.0, "HW power brake"), "HW power brake"),
        (block(9.0, compiles=1), "compiled"),
        (replace(block(9.0), conditions=Conditions(foreign=(7,))), "foreign process"),
    ],
)
@pytest.mark.parametrize("side", ["bf16", "fp8"])
def test_a_pair_with_a_void_block_is_left_out_and_told(bad: Block, cause: str, side: str) -> None:
    good = {"bf16": (block(2.0), block(2.0)), "fp8": (block(1.0), block(1.0))}
    other = {"bf16": "fp8", "fp8": "bf16"}[side]
    broken = {side: (good[side][0], bad), other: good[other]}
    made = measurement(ONE_LOOK, *[good] * 5, broken)
    comparison = compared(made, "fp8")
    assert comparison.void == {cause: 1}
    assert comparison.estimate is not None
    assert comparison.estimate.ratio == pytest.approx(2.0)
    assert comparison.verdict is Verdict.FASTER
    worse = compared(measurement(ONE_LOOK, *[good] * 5, broken, broken), "fp8")
    assert worse.verdict is Verdict.UNRESOLVED


@pytest.mark.parametrize(
    "fine",
    [
        block(1.0, "SW power cap", "sync boost"),
        replace(block(1.0), conditions=Conditions()),  # nothing could be read
        replace(block(1.0), conditions=Conditions(foreign=())),
    ],
)
def test_the_power_cap_and_what_cannot_be_read_void_nothing(fine: Block) -> None:
    assert fine.void == ()


def test_a_third_callables_void_block_costs_only_its_own_pair() -> None:
    good = {name: (block(2.0), block(2.0)) for name in ("a", "b", "c")}
    made = measurement(ONE_LOOK, *[good] * 5, {**good, "c": (block(2.0, "HW thermal"),) * 2})
    assert compared(made, "b").void == {}
    assert compared(made, "c").void == {"HW thermal": 1}


def test_what_was_not_measured_is_refused() -> None:
    good = {"a": (block(2.0), block(2.0))}
    with pytest.raises(KeyError, match="'z' was not measured; measured: a"):
        compared(measurement(ONE_LOOK, good), "z")


def test_conditions_of_a_block_join_its_readings() -> None:
    readings = [
        Reading(1900, 3201, 500.0, 60, frozenset({"SW power cap"})),
        Reading(1700, 3201, 690.0, 63, frozenset()),
        Reading(1800, None, None, None, None),
    ]
    assert Conditions.of(readings, (4,)) == Conditions(
        1800, 3201, 690.0, 63, frozenset({"SW power cap"}), (4,)
    )
    assert Conditions.of([Reading()], None) == Conditions()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"quantity": "wall"}, "quantity must be one of device, call, host, got 'wall'"),
        ({"method": "guess"}, "method must be one of auto, events, graph, profiler"),
        ({"confidence": 99.0}, "confidence must be between 0 and 1, got 99.0"),
        ({"margin": -0.1}, "margin must be 0 or more"),
        ({"half_width": 0.0}, "half_width must be more than 0"),
        ({"start_pairs": 1}, "start_pairs must be 2 or more"),
        ({"start_pairs": 9, "max_pairs": 8}, "max_pairs must be start_pairs or more, got 8"),
        ({"void_share": 1.0}, "void_share must be"),
        ({"max_warm_up": 2}, "max_warm_up must be 3 or more"),
        ({"min_samples": 0}, "min_samples must be 1 or more"),
        ({"block_ms": 0.5}, "block_ms must be sample_ms or more, got 0.5"),
    ],
)
def test_a_plan_that_cannot_work_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**wrong)  # type: ignore[arg-type]
