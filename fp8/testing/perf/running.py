"""Measuring a bench: its stages, their cases, the evidence; and again what looked wrong."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fp8.testing.perf.outcomes import Measured
from fp8.testing.speed_verdicts import GRAVE
from fp8.testing.timing import compared, measure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from fp8.testing.perf.benches import Bench
    from fp8.testing.perf.cases import Case, Stack
    from fp8.testing.perf.evidence import Breakdown
    from fp8.testing.perf.judging import Standard
    from fp8.testing.perf.outcomes import Outcome
    from fp8.testing.perf.workshop import Stage, Workshop
    from fp8.testing.timing.plan import Plan
    from fp8.testing.timing.results import Measurement

#: Calls that are profiled, as many as last this long, ms, and at most so many: the profiler takes
#: some 50 µs for an event, and a layer in eager mode has a hundred kernels.
_PROFILED_MS, _PROFILED_CALLS = 2.0, 5


def run(
    bench: Bench,
    stack: Stack,
    device: Any,
    workshop: Workshop,
    standard: Standard,
    *,
    has_time: Callable[[], bool] = lambda: True,
) -> tuple[Outcome, ...]:
    """Measure and judge all cases of a bench; a case with a bad verdict is measured once more.

    The second measurement has twice the pairs and counts alone: what was slow by chance is not slow
    twice. (Of a rare event with probability p the first alone would be a false alarm in p of all
    cases, both in p².) `has_time` says whether there is time for it.
    """
    try:
        return _stages(bench, stack, device, workshop, standard, has_time)
    finally:
        workshop.clean_up()  # when nothing holds the callables any more


def _stages(
    bench: Bench,
    stack: Stack,
    device: Any,
    workshop: Workshop,
    standard: Standard,
    has_time: Callable[[], bool],
) -> tuple[Outcome, ...]:
    outcomes: list[Outcome] = []
    for stage in workshop.stages(bench, bench.cases(stack)):
        cases = [case for case in bench.cases(stack) if case.stage == stage.name]
        outcomes += _stage(bench.plan, stage, cases, device, workshop, standard, has_time)
    return tuple(outcomes)


def _stage(
    plan: Plan,
    stage: Stage,
    cases: Sequence[Case],
    device: Any,
    workshop: Workshop,
    standard: Standard,
    has_time: Callable[[], bool],
) -> list[Outcome]:
    measurement = measure(device, stage.subjects, plan)
    breakdowns = _breakdowns(stage, cases, measurement, workshop)
    saved = _saved(stage, cases, workshop)

    def judged(found: Measurement, attempts: int) -> list[Outcome]:
        return [
            standard.judge(
                Measured(
                    case,
                    found,
                    compared(found, case.subject, case.quantity, baseline=case.baseline),
                    breakdowns,
                    saved,
                ),
                attempts,
            )
            for case in cases
        ]

    first = judged(measurement, 1)
    if not any(_worth_another(outcome) for outcome in first) or not has_time():
        return first
    second = judged(measure(device, stage.subjects, longer(plan)), 2)
    return [
        again if _worth_another(outcome) else outcome
        for outcome, again in zip(first, second, strict=True)
    ]


def longer(plan: Plan) -> Plan:
    """The plan of a second measurement: twice the pairs from the start, twice the time."""
    budget = None if plan.budget_s is None else 2 * plan.budget_s
    return replace(
        plan,
        start_pairs=2 * plan.start_pairs,
        max_pairs=2 * plan.max_pairs,
        budget_s=budget,
    )


def _worth_another(outcome: Outcome) -> bool:
    """Whether a second measurement could change what it says."""
    by_blocks = outcome.case.ratio == "speed-up"
    return by_blocks and outcome.judgement is not None and outcome.judgement.verdict in GRAVE


def _breakdowns(
    stage: Stage, cases: Iterable[Case], measurement: Measurement, workshop: Workshop
) -> dict[str, Breakdown]:
    """Of every subject that must have run in float8, and of what it is compared with."""
    asked = [
        name for case in cases if case.float8_products for name in (case.baseline, case.subject)
    ]
    found = {}
    for name in dict.fromkeys(asked):
        ms = measurement.ms(name, "call") or _PROFILED_MS
        calls = max(1, min(_PROFILED_CALLS, round(_PROFILED_MS / ms)))
        # Where kernels can't be seen, times are still worth keeping: the case fails for want of
        # evidence (`Measured.fell_back`).
        with suppress(RuntimeError):
            found[name] = workshop.breakdown(stage.subjects[name], calls)
    return found


def _saved(stage: Stage, cases: Iterable[Case], workshop: Workshop) -> dict[str, int]:
    asked = [
        name
        for case in cases
        if case.ratio == "saved bytes"
        for name in (case.baseline, case.subject)
    ]
    return {name: workshop.saved_bytes(stage.subjects[name]) for name in dict.fromkeys(asked)}
