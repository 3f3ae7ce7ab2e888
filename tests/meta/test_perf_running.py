"""The perf suite's verdicts, on a simulated GPU: every way from a speed to a test's end."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from fp8.claims import Provenance
from fp8.testing.laws import Judge, LawViolation
from fp8.testing.perf import catalogue, running
from fp8.testing.perf.benches import Linears, Steps
from fp8.testing.perf.judging import standard
from fp8.testing.perf.simulated import SimulatedWorkshop, simulated_stack
from fp8.testing.perf.under_law import entries, judge_all
from fp8.testing.tally import Tally
from fp8.testing.thresholds import Threshold
from fp8.testing.timing.results import Conditions
from fp8.testing.timing.simulated import SimulatedDevice

if TYPE_CHECKING:
    from collections.abc import Callable

    from fp8.testing.perf.benches import Bench
    from fp8.testing.perf.cases import Case
    from fp8.testing.perf.outcomes import Outcome

GPU = "NVIDIA H200"
MEASURED = Provenance("measured", "a run", date=dt.date(2026, 12, 1), versions="NVIDIA H200")
GOOD = Linears((8192, 8192, 8192), "compiled", ("tensorwise",))
NARROW = Linears((8192, 16384, 128), "compiled", ("tensorwise",))
NAME = "linear/torchao-tensorwise/compiled/8192x8192x8192"
NORMAL = Conditions()
HOT = Conditions(reasons=frozenset({"HW thermal"}))


def ran(
    bench: Bench,
    speed: float | Callable[[Case], float],
    *known: Threshold,
    workshop: SimulatedWorkshop | None = None,
    conditions: Conditions = NORMAL,
    name: str = "torchao",
    **how: Any,
) -> tuple[Outcome, ...]:
    made = workshop or SimulatedWorkshop(speed if callable(speed) else lambda _: speed)
    return running.run(
        bench,
        simulated_stack(name),
        SimulatedDevice(seed=0, conditions=lambda _: conditions),
        made,
        standard({threshold.case: threshold for threshold in known}, GPU),
        **how,
    )


def verdict(outcomes: tuple[Outcome, ...]) -> str:
    (outcome,) = outcomes
    return "none" if outcome.judgement is None else str(outcome.judgement.verdict)


def judged(outcomes: tuple[Outcome, ...]) -> tuple[Judge, Tally]:
    """Through the judge, as a test does it."""
    tally = Tally()
    laws = ("P02", "P14", "P21", "P26")
    judge = Judge(target="torchao", laws=laws, tally=tally, test="t")
    judge_all(judge, outcomes, GPU)
    return judge, tally


# --- verdicts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speed", "expected", "attempts"),
    [(1.4, "PASS", 1), (1.3, "REGRESSED", 2), (1.33, "UNRESOLVED", 2)],
)
def test_a_threshold(speed: float, expected: str, attempts: int) -> None:
    """The floor is 1.4 less 5 %, 1.33."""
    outcomes = ran(GOOD, speed, Threshold(NAME, 1.4, MEASURED))
    assert verdict(outcomes) == expected
    assert outcomes[0].attempts == attempts
    if expected == "PASS":
        judged(outcomes)
    else:
        with pytest.raises(LawViolation, match=rf"P02 .*\n.*\n.*\n.*{NAME}: 1\.3.* {expected}"):
            judged(outcomes)


def test_a_provisional_threshold_fails_nothing() -> None:
    outcomes = ran(GOOD, 1.0, Threshold(NAME, 1.4, MEASURED, provisional=True))
    assert verdict(outcomes) == "PROVISIONAL"
    judged(outcomes)


@pytest.mark.parametrize(
    ("speed", "expected"), [(0.5, "PASS"), (1.2, "STALE"), (1.0, "UNRESOLVED")]
)
def test_a_claim(speed: float, expected: str) -> None:
    outcomes = ran(NARROW, speed)
    assert verdict(outcomes) == expected
    if expected == "STALE":
        with pytest.raises(LawViolation, match=r"small-n: at most 1.*take the claim back"):
            judged(outcomes)


def test_a_case_that_nothing_is_known_of_is_recorded_and_held_to_its_evidence() -> None:
    outcomes = ran(GOOD, 1.1)
    assert verdict(outcomes) == "none"
    judge, tally = judged(outcomes)
    assert judge.compared == 2  # enough pairs, and that it was float8
    (entry,) = tally.measurements
    assert entry["value"]["verdict"] == "RECORDED"


def test_void_blocks_are_never_green() -> None:
    outcomes = ran(GOOD, 2.0, Threshold(NAME, 1.4, MEASURED), conditions=HOT)
    assert verdict(outcomes) == "UNRESOLVED"
    with pytest.raises(LawViolation, match=r"(?s)P21.*pairs are void.*P02.*UNRESOLVED"):
        judged(outcomes)
    # nor is one that nothing is known of
    assert verdict(ran(GOOD, 2.0, conditions=HOT)) == "UNRESOLVED"


def test_a_silent_fall_back_fails_however_fast() -> None:
    workshop = SimulatedWorkshop(lambda _: 1.5, fell_back=lambda _: True)
    outcomes = ran(GOOD, 1.5, Threshold(NAME, 1.4, MEASURED), workshop=workshop)
    assert verdict(outcomes) == "PASS"
    text = r"3 float8 products are due, 0 ran; products that ran: 3 x nvjet_sm90_tst_128x256"
    with pytest.raises(LawViolation, match=rf"P26[^\0]*{text}"):
        judged(outcomes)


def test_what_ran_must_be_seen_and_times_are_kept_anyway() -> None:
    class Blind(SimulatedWorkshop):
        def breakdown(self, subject: Any, calls: int) -> Any:  # noqa: ARG002 - as its base
            raise RuntimeError("the profiler saw no kernel")

    outcomes = ran(GOOD, 1.5, Threshold(NAME, 1.4, MEASURED), workshop=Blind(lambda _: 1.5))
    assert verdict(outcomes) == "PASS"
    with pytest.raises(LawViolation, match="which kernels ran was not seen"):
        judged(outcomes)


def test_a_remedy_that_does_not_help_fails() -> None:
    scenario = next(s.scenario for s in catalogue.STEPS if s.name == "deep_head_filtered")

    def slow(case: Case) -> float:
        return 0.6 if case.facts["mode"] == "eager" else 0.9

    outcomes = ran(Steps(scenario), slow)
    bad = [o.case.id for o in outcomes if o.judgement and o.judgement.verdict == "REGRESSED"]
    assert bad == ["step/deep_head_filtered/torchao-tensorwise/compiled/random"]
    with pytest.raises(LawViolation, match="slower than bfloat16 with the remedy"):
        judged(outcomes)


def test_bytes_saved_for_backward_are_held_to_their_claim_in_eager_mode() -> None:
    bench = next(s for s in catalogue.STEPS if s.name == "toy")
    for saved, expected in ((100, "PASS"), (99, "STALE")):
        workshop = SimulatedWorkshop(
            lambda _: 0.5, saved=lambda name, saved=saved: saved if name else 100
        )
        outcomes = ran(bench, 0.5, workshop=workshop)
        memory = [o for o in outcomes if o.case.ratio == "saved bytes"]
        verdicts = {o.case.facts["mode"]: o.judgement and str(o.judgement.verdict) for o in memory}
        assert verdicts == {"eager": expected, "compiled": None}


def test_bytes_saved_by_compiled_code_are_held_to_their_threshold() -> None:
    bench = next(s for s in catalogue.STEPS if s.name == "toy")
    name = "memory/toy/torchao-tensorwise/compiled"
    for saved, expected in ((75, "PASS"), (100, "REGRESSED")):
        workshop = SimulatedWorkshop(
            lambda _: 0.5, saved=lambda name, saved=saved: saved if name else 100
        )
        outcomes = ran(bench, 0.5, Threshold(name, 4 / 3, MEASURED), workshop=workshop)
        (compiled,) = [o for o in outcomes if o.case.id == name]
        assert str(compiled.judgement and compiled.judgement.verdict) == expected


def test_first_calls_are_held_to_their_claim() -> None:
    bench = next(s for s in catalogue.STEPS if s.name == "llama3_8b_block")
    outcomes = ran(bench, lambda case: 0.6 if case.facts["mode"] == "eager" else 1.2)
    first = [o for o in outcomes if o.case.ratio == "first call"]
    (outcome,) = first  # one scenario for each target: it takes long
    assert outcome.measured.interval is not None
    assert outcome.measured.interval.ratio == pytest.approx(2 / 1.2 / 1000, rel=0.01)
    assert str(outcome.judgement and outcome.judgement.verdict) == "PASS"


# --- how it is measured -------------------------------------------------------------------------


def test_what_looked_slow_by_chance_is_measured_again_with_twice_the_pairs() -> None:
    outcomes = ran(GOOD, 1.3, Threshold(NAME, 1.4, MEASURED))
    measurement = outcomes[0].measured.measurement
    assert measurement.plan == running.longer(GOOD.plan)
    assert len(measurement.rounds) >= 10
    assert verdict(outcomes) == "REGRESSED"


def test_there_is_no_second_attempt_without_time() -> None:
    outcomes = ran(GOOD, 1.3, Threshold(NAME, 1.4, MEASURED), has_time=lambda: False)
    assert outcomes[0].attempts == 1


def test_each_mode_is_compared_with_its_own_baseline() -> None:
    bench = next(s for s in catalogue.STEPS if s.name == "toy")
    outcomes = ran(bench, lambda case: 0.6 if case.facts["mode"] == "eager" else 1.2)
    pairs = {(o.case.subject, o.measured.comparison.baseline) for o in outcomes}
    assert pairs == {("tensorwise eager", "bf16 eager"), ("tensorwise compiled", "bf16 compiled")}
    assert {o.case.stage for o in outcomes} == {"random", "ones"}


def test_the_workshop_is_left_clean_even_by_a_bench_that_raises() -> None:
    def raises(case: Case) -> float:
        raise RuntimeError("no kernel image")

    workshop = SimulatedWorkshop(raises)
    with pytest.raises(RuntimeError, match="no kernel image"):
        ran(GOOD, 1.0, workshop=workshop)
    assert workshop.left == 1


def test_the_roofline_predicts_compiled_layers_and_products_only() -> None:
    (compiled,) = ran(GOOD, 1.4)
    assert compiled.predicted == pytest.approx(1.66, abs=0.1)  # H200, sustained figures
    (eager,) = ran(replace(GOOD, mode="eager"), 0.6)
    assert eager.predicted is None
    (product, *_) = ran(catalogue.PRODUCTS[0], 1.9, name="reference[torch]")
    assert product.predicted == pytest.approx(1.92, abs=0.02)


# --- the record ---------------------------------------------------------------------------------


def test_the_entry_is_json_and_has_what_its_readers_need() -> None:
    outcomes = ran(GOOD, 1.4, Threshold(NAME, 1.4, MEASURED))
    (entry,) = json.loads(json.dumps(entries(outcomes, GPU), allow_nan=False))
    assert entry["name"] == NAME
    assert entry["kind"] == "timing"
    assert entry["facts"] == {
        "family": "linear",
        "gpu": GPU,
        "recipe": "tensorwise",
        "mode": "compiled",
        "M": 8192,
        "K": 8192,
        "N": 8192,
        "bias": False,
        "of": "",
    }
    value = entry["value"]
    assert value["low"] <= value["ratio"] <= value["high"]
    assert value["threshold"] == {
        "ratio": 1.4,
        "floor": pytest.approx(1.33),
        "provisional": False,
        "source": "measured",
    }
    assert value["flop"] == 6 * 8192**3
    assert value["subject"]["kernels"]["float8"] == 3
    for side in ("subject", "baseline"):
        samples = value[side]["samples"]
        assert len(samples) == value["rounds"]
        assert all(len(blocks) == 2 and all(blocks) for blocks in samples)
