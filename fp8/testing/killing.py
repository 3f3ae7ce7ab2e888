"""Which laws catch which faults: the plan of trials, and the report they fill.

The claiming law comes first: a fault is killed when that law objects. If it doesn't, all the others
are asked, and a kill by one of them says that the claim is wrong. A kill counts only if the test
that objected has nothing to object to in the reference as it is.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fp8.testing import naive, trials
from fp8.testing.faults import BENIGN, FAULTS, Benign, Fault, Variant, find
from fp8.testing.law_table import LAWS
from fp8.testing.trials import Kill, Outcome, Progress, Trial

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

#: laws of which no fault can be planted on a CPU: speed, the suite itself, timing, 2^31 elements
NOT_PLANTED = frozenset({"P02", "P20", "P21", "P24"})
#: seconds after which a trial of one law, and one of all laws, counts as hanging
ONE_LAW_S = 240.0
ALL_LAWS_S = 1800.0


@dataclass(frozen=True)
class Plan:
    """What to try.

    Attributes:
        faults: The faults.
        benign: The benign variants.
        root: The project's folder.
        tests: Files or folders of tests, relative to it.
        seeds: The seeds that each fault is tried with; None draws the same examples every time.
        full: Whether every law is tried against every fault.
        whole: Whether the selection is the whole catalogue: the reference then runs all tests.
        workers: How many trials run at a time.
    """

    faults: tuple[Fault, ...]
    benign: tuple[Benign, ...]
    root: str
    tests: tuple[str, ...] = ("tests/numerics", "tests/compile")
    seeds: tuple[int | None, ...] = (None,)
    full: bool = False
    whole: bool = True
    workers: int = 1


@dataclass
class Result:
    """What became of one fault or variant.

    Attributes:
        id: Its id.
        kills: By law, how it was caught, with the first seed.
        survived: The seeds with which the claiming law did not catch it.
        naive: Whether the naive accuracy test misses it; None where it wasn't tried.
        seconds: How long its trials took.
        errors: What is wrong with it.
    """

    id: str
    kills: dict[str, Kill] = field(default_factory=dict)
    survived: list[int | None] = field(default_factory=list)
    naive: bool | None = None
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)


@dataclass
class Report:
    """What the trials found, by the id of the fault or variant.

    Attributes:
        full: Whether every law was tried against every fault.
        results: By id.
        laws: The laws that some test declares.
        reference: What the reference as it is violated: `law: test: check`.
        errors: What is wrong with the run as a whole.
    """

    full: bool
    results: dict[str, Result] = field(default_factory=dict)
    laws: set[str] = field(default_factory=set)
    reference: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[Result]:
        """The results of faults."""
        return [r for r in self.results.values() if r.id in FAULTS]

    @property
    def benign(self) -> list[Result]:
        """The results of benign variants."""
        return [r for r in self.results.values() if r.id in BENIGN]

    @property
    def caught(self) -> int:
        """How many faults some law caught."""
        return sum(bool(r.kills) for r in self.faults)

    @property
    def caught_by_naive(self) -> int:
        """How many faults the naive accuracy test catches."""
        return sum(r.naive is False for r in self.faults)

    @property
    def idle_laws(self) -> list[str]:
        """The laws that have tests and kill nothing although they could; full runs only."""
        killing = {law for r in self.faults for law in r.kills}
        return [law for law in LAWS if law in self.laws - killing - NOT_PLANTED]

    @property
    def untested_laws(self) -> list[str]:
        """The laws that no test of this selection declares."""
        return [law for law in LAWS if law not in self.laws]

    def all_errors(self) -> list[str]:
        """Everything that makes the run a failure."""
        found = [*self.errors, *(f"the reference as it is: {line}" for line in self.reference)]
        found += [f"{r.id}: {error}" for r in self.results.values() for error in r.errors]
        if self.full:
            found += [f"law {law} catches no fault" for law in self.idle_laws]
        return found


def sample(seed: int, faults: int, benign: int) -> tuple[tuple[Fault, ...], tuple[Benign, ...]]:
    """As many faults and benign variants, drawn by the seed."""
    rng = random.Random(seed)  # noqa: S311 - a sample, no secret
    some = rng.sample(list(FAULTS.values()), min(faults, len(FAULTS)))
    others = rng.sample(list(BENIGN.values()), min(benign, len(BENIGN)))
    return tuple(some), tuple(others)


def execute(plan: Plan, progress: Progress = lambda *_: None) -> Report:
    """Try every fault and variant of the plan."""
    report = Report(plan.full, {v.id: Result(v.id) for v in (*plan.faults, *plan.benign)})
    known = _Known()
    if plan.whole or plan.full:
        known = _reference(plan, report, progress)
    for seed in plan.seeds:
        _faults(plan, report, seed, known, progress)
    _benign(plan, report, known, progress)
    if not (plan.whole or plan.full):
        _killing_tests(plan, report, progress)
    _naive(plan, report, progress)
    return report


# --- the reference as it is ---------------------------------------------------------------------


@dataclass
class _Known:
    """What the reference's own run told: how long each test took, and which steps it reached."""

    seconds: dict[str, float] = field(default_factory=dict)
    reached: dict[str, list[str]] = field(default_factory=dict)

    def past(self, step: str) -> frozenset[str]:
        """The tests that ran without reaching a step: they can't show what is planted there.

        Tests that did not run on the reference as it is, such as `thorough` ones, are not among
        them.
        """
        if step in _TABLES:
            return frozenset()
        return frozenset(test for test, steps in self.reached.items() if step not in steps)


#: steps that are no functions: whether a test looks at them is not seen
_TABLES = ("fp8.recipes.RECIPES", "fp8.matmul.FORMAT_PAIRS")


def _reference(plan: Plan, report: Report, progress: Progress) -> _Known:
    """Every test, on the targets that the plan has."""
    targets = sorted({t for v in (*plan.faults, *plan.benign) for t in v.targets})
    everything = _trial(plan, None, None, (), seed=plan.seeds[0], all_laws=True)
    everything = replace(everything, note_steps=plan.full)
    todo = {target: replace(everything, targets=(target,)) for target in targets}
    known = _Known()
    for target, found in _conduct("reference", todo, plan.workers, ALL_LAWS_S, progress):
        _note_reference(report, found, target)
        known.seconds |= found.seconds
        known.reached |= found.reached
    return known


def _note_reference(report: Report, found: Outcome, target: str) -> None:
    report.laws.update(found.laws)
    report.errors += [line for line in found.unusable if line not in report.errors]
    report.reference += [f"{k.law}: {k.test}: {k.check}" for k in found.kills.values()]
    if found.error:
        report.errors.append(f"{target}: {found.error}")


def _killing_tests(plan: Plan, report: Report, progress: Progress) -> None:
    """Only the tests that objected: a kill counts if they don't object to the reference."""
    tests: dict[str, set[str]] = {}
    for result in report.faults:
        for kill in result.kills.values():
            for target in find(result.id).targets:
                if target in kill.test:
                    tests.setdefault(target, set()).add(kill.test)
    todo = {
        target: _trial(plan, None, None, (target,), tests=tuple(sorted(ids)), all_laws=True)
        for target, ids in tests.items()
    }
    for target, found in _conduct("reference", todo, plan.workers, ALL_LAWS_S, progress):
        _note_reference(report, found, target)


# --- faults -------------------------------------------------------------------------------------


def _faults(
    plan: Plan, report: Report, seed: int | None, known: _Known, progress: Progress
) -> None:
    first = seed == plan.seeds[0]
    stage = "faults" if len(plan.seeds) == 1 else f"faults, seed {seed}"
    everything = plan.full and first
    todo = {
        f.id: _trial(
            plan, f.id, None if everything else (f.law,), f.targets, seed, known, everything
        )
        for f in plan.faults
    }
    limit = ALL_LAWS_S if everything else ONE_LAW_S
    unclaimed = []
    for name, found in _conduct(stage, todo, plan.workers, limit, progress):
        result, law = report.results[name], FAULTS[name].law
        _note(report, result, found)
        if first:
            result.kills |= found.kills
        if law not in found.kills:
            result.survived.append(seed)
            unclaimed.append(name)
    if not first:
        for name in unclaimed:
            _disclaim(report.results[name], seed)
        return
    if not plan.full and unclaimed:
        todo = {
            name: _trial(plan, name, None, FAULTS[name].targets, seed, known) for name in unclaimed
        }
        for name, found in _conduct("other laws", todo, plan.workers, ALL_LAWS_S, progress):
            _note(report, report.results[name], found)
            report.results[name].kills |= found.kills
    for name in unclaimed:
        _disclaim(report.results[name], seed)


def _disclaim(result: Result, seed: int | None) -> None:
    """Say why a fault that its law did not catch is an error."""
    law = FAULTS[result.id].law
    where = "" if seed is None else f" with seed {seed}"
    if any(error.startswith("no result") for error in result.errors):
        return
    if result.kills:
        others = ", ".join(sorted(result.kills))
        result.errors.append(f"claim wrong{where}: {law} does not catch it; caught by {others}")
    else:
        result.errors.append(f"survives{where}: nothing catches it (claimed by {law})")


def _note(report: Report, result: Result, found: Outcome) -> None:
    report.laws.update(found.laws)
    result.seconds += sum(found.seconds.values())
    if found.error:
        result.errors.append(f"no result: {found.error}")


# --- benign variants ----------------------------------------------------------------------------


def _benign(plan: Plan, report: Report, known: _Known, progress: Progress) -> None:
    """Every law in a full run; otherwise those that watch over the same step."""
    todo = {
        f"{v.id} on {target}": _trial(
            plan,
            v.id,
            None if plan.full else _laws_of_step(v),
            (target,),
            plan.seeds[0],
            known,
            True,
        )
        for v in plan.benign
        for target in v.targets
    }
    for key, found in _conduct("benign", todo, plan.workers, ALL_LAWS_S, progress):
        result = report.results[key.partition(" ")[0]]
        _note(report, result, found)
        result.kills |= found.kills
        result.errors += [
            f"benign, but {k.law} objects: {k.test}: {k.check}" for k in found.kills.values()
        ]


def _laws_of_step(variant: Variant) -> tuple[str, ...]:
    """The laws that faults of the variant's step are claimed by."""
    return tuple(sorted({f.law for f in FAULTS.values() if f.step == variant.step}))


# --- the naive accuracy test --------------------------------------------------------------------


def _naive(plan: Plan, report: Report, progress: Progress) -> None:
    todo = {f.id: f.id for f in plan.faults}
    for name, said in trials.run_all(
        "naive test", naive.naive, todo, plan.workers, ONE_LAW_S, progress
    ):
        result = report.results[name]
        if not said or said[-1][0] == "late":
            result.errors.append("no result of the naive test")
            continue
        result.naive = not said[-1][0]
        if result.naive != FAULTS[name].naive:
            was = "misses" if result.naive else "sees"
            result.errors.append(f"naive is {FAULTS[name].naive}: the naive test {was} it")


# --- processes ----------------------------------------------------------------------------------


def _trial(
    plan: Plan,
    plant: str | None,
    laws: tuple[str, ...] | None,
    targets: tuple[str, ...],
    seed: int | None = None,
    known: _Known | None = None,
    all_laws: bool = False,
    tests: tuple[str, ...] | None = None,
) -> Trial:
    known = known or _Known()
    return Trial(
        plant,
        laws,
        targets,
        _files(plan, laws, plant) if tests is None else tests,
        plan.root,
        seed,
        known.seconds,
        all_laws,
        past=frozenset() if plant is None else known.past(find(plant).step),
    )


def _files(plan: Plan, laws: tuple[str, ...] | None, plant: str | None) -> tuple[str, ...]:
    """The files of tests that can object: the others needn't be collected.

    They name one of the laws. What is wrong in eager code is the tests of eager code's to find:
    those of compiled code hold it to eager code, which is wrong the same way.
    """
    if plant is None:
        return plan.tests
    fault = FAULTS.get(plant)
    compiled = fault is not None and fault.compiled
    root = Path(plan.root)
    files = [
        path
        for name in plan.tests
        for path in ([root / name] if (root / name).is_file() else (root / name).rglob("test_*.py"))
        if (path.parent.name == "compile") == compiled
    ]
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(files)}
    named = [
        path
        for path, text in texts.items()
        if laws is None or any(f'"{law}"' in text for law in laws)
    ]
    return tuple(str(path.relative_to(root)) for path in named) or plan.tests


def _conduct(
    stage: str, todo: dict[str, Trial], workers: int, timeout: float, progress: Progress
) -> Iterator[tuple[str, Outcome]]:
    for key, said in trials.run_all(stage, trials.run, todo, workers, timeout, progress):
        yield key, trials.outcome(said)


def chosen(ids: Sequence[str]) -> tuple[tuple[Fault, ...], tuple[Benign, ...]]:
    """The faults and the variants of these ids. Raises KeyError for an unknown one."""
    found = [find(name) for name in ids]
    return (
        tuple(v for v in found if isinstance(v, Fault)),
        tuple(v for v in found if isinstance(v, Benign)),
    )
