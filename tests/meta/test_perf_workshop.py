"""The callables that are timed on a GPU: each runs here, small, on the CPU and without inductor."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fp8 import targets
from fp8.testing.perf import benches, cases, catalogue
from fp8.testing.perf.benches import Casts, Ceilings, Steps
from fp8.testing.perf.workshop import TorchWorkshop
from fp8.testing.tracing import trace_products

TARGETS = ("reference[torch]", "torchao")


def small(bench: benches.Bench) -> benches.Bench:
    """The same bench with extents of 16, 32, …; their order stays, and K and N are multiples."""
    if isinstance(bench, Ceilings):
        return replace(bench, shape=(32, 48, 64), tensor=(16, 32))
    if isinstance(bench, Casts):
        return replace(bench, rows=32, columns=48)
    if isinstance(bench, Steps):
        scenario = bench.scenario
        if scenario.block is not None:
            block = replace(scenario.block, width=64, hidden=96, heads=4, groups=2, sequence=16)
            return replace(bench, scenario=replace(scenario, tokens=32, block=block))
        widths = tuple(32 + 16 * number for number in range(len(scenario.widths)))
        return replace(bench, scenario=replace(scenario, tokens=32, widths=widths))
    changes = {"shape": (32, 48, 64), "of": "", "new": 48}
    return replace(bench, **{k: v for k, v in changes.items() if hasattr(bench, k)})  # type: ignore[type-var]


#: The catalogue's benches, made small: most differ in nothing else.
SMALL = tuple(dict.fromkeys(small(bench) for bench in catalogue.order()))


def stack_of(name: str) -> tuple[TorchWorkshop, cases.Stack]:
    target = targets.load(name)
    workshop = TorchWorkshop(target, rotate_bytes=10_000, backend="aot_eager")
    return workshop, cases.stack_of(target, "NVIDIA H200")


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.thorough
@pytest.mark.parametrize("tiny", SMALL, ids=lambda b: f"{type(b).__name__}-{b.name}")
def test_every_callable_runs_and_runs_the_products_that_are_due(
    name: str, tiny: benches.Bench
) -> None:
    workshop, stack = stack_of(name)
    if tiny.obstacle(stack):
        assert name == "torchao"
        return
    found = tiny.cases(stack)
    assert found
    try:
        for stage in workshop.stages(tiny, found):
            own = [case for case in found if case.stage == stage.name]
            assert own
            for subject in stage.subjects.values():
                subject()
            for case in own:
                assert {case.subject, case.baseline} <= set(stage.subjects)
                if case.float8_products and case.facts.get("mode") != "compiled":
                    ran = trace_products(stage.subjects[case.subject])
                    float8 = [product for product in ran if "float8" in product.a]
                    assert len(float8) == case.float8_products
                    plain = trace_products(stage.subjects[case.baseline])
                    assert case.family == "regime" or not any("float8" in p.a for p in plain)
    finally:
        workshop.clean_up()
