"""One trial: a pytest run in a process of its own, with a fault planted, that notes what objects.

Processes come from multiprocessing's fork server, which imports torch, pytest and this project
once; a trial costs a fork, a collection and the tests that it runs. In a trial the judge records a
violation and goes on, so that one run tells which laws catch a fault; a test is over when every law
that it declares has spoken, and the run when every law that was asked for has.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import numpy as np
import pytest
import torch
from torch import Tensor, nn

# Imported by the tests, and therefore here: the fork server imports this module alone.
import fp8.targets.reference
import fp8.testing.bounds
import fp8.testing.linear_runs
import fp8.testing.models
import fp8.testing.oracle
import fp8.testing.session
import fp8.testing.strategies
import fp8.testing.summary
import fp8.testing.tracing
import fp8.testing.worlds  # noqa: F401
from fp8.testing import laws
from fp8.testing.faults import find
from fp8.testing.laws import LawViolation
from fp8.testing.session import declared_laws

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext

    from fp8.testing.comparing import Comparison

#: pytest's exit statuses after which a trial has run: all passed, some failed, none selected
_RAN = (0, 1, 5)


@dataclass(frozen=True)
class Trial:
    """What to run.

    Attributes:
        plant: Id of the fault or variant; None for the reference as it is.
        laws: The laws that are asked; with None every law is, and the trial ends with the tests.
        targets: What ``--fp8-target`` says.
        tests: Files or folders of tests, relative to `root`.
        root: The folder of the project.
        seed: What ``--fp8-seed`` says; None draws the same examples every time.
        order: Seconds that tests took before, by node id: cheap ones run first.
        all_laws: Whether to go on until every law has spoken, rather than the first.
    """

    plant: str | None
    laws: tuple[str, ...] | None
    targets: tuple[str, ...]
    tests: tuple[str, ...]
    root: str
    seed: int | None = None
    order: dict[str, float] = field(default_factory=dict)
    all_laws: bool = False

    def arguments(self) -> list[str]:
        """pytest's command line."""
        words = [*self.tests, "-m", "numerics", "-q", "-p", "no:cacheprovider"]
        words.append("--fp8-profile=quick")
        # Modules that are imported already cannot be rewritten, and pytest would warn of each.
        words += ["--assert=plain", "--tb=short", "-rN"]
        # A file that can't be imported is noted: it must not silence the others.
        words.append("--continue-on-collection-errors")
        words += [f"--rootdir={self.root}", "-c", str(Path(self.root) / "pyproject.toml")]
        words += [f"--fp8-target={target}" for target in self.targets]
        if self.plant is not None:
            words.append(f"--fp8-plant=fp8.testing.faults:{self.plant}")
        if self.seed is not None:
            words.append(f"--fp8-seed={self.seed}")
        return words


@dataclass(frozen=True)
class Kill:
    """How one law caught a fault.

    Attributes:
        law: The law.
        test: Node id of the test.
        check: The check's name, or the error where the test broke instead of failing.
        examples: How many examples the tests of this law had drawn until then.
        seconds: How long the trial's tests had run until then.
    """

    law: str
    test: str
    check: str
    examples: int
    seconds: float


@dataclass
class Outcome:
    """What a trial found.

    Attributes:
        kills: By law, the first violation.
        laws: The laws that at least one collected test declares.
        tests: How many tests ran.
        seconds: How long they took, by node id.
        unusable: Files of tests that could not be collected.
        error: Why the trial has no result; empty when it has.
    """

    kills: dict[str, Kill] = field(default_factory=dict)
    laws: tuple[str, ...] = ()
    tests: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    unusable: list[str] = field(default_factory=list)
    error: str = ""


class _Enough(Exception):  # noqa: N818 - no error
    """Every law that this test declares has spoken."""


class _Watch:
    """The plug-in of a trial: which tests run, in which order, until when; what they found."""

    def __init__(self, trial: Trial, send: Callable[[object], None]) -> None:
        self.trial = trial
        self.send = send
        self.wanted: set[str] = set(trial.laws or ())
        self.kills: dict[str, Kill] = {}
        self.examples: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self.broken: set[str] = set()
        self.began = time.perf_counter()

    # --- selecting ------------------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Draw examples as the profile says, but don't shrink a failing one: it only takes time."""
        del config
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile(
            "fp8-trial", hypothesis.settings.default, phases=phases, report_multiple_bugs=False
        )
        hypothesis.settings.load_profile("fp8-trial")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keep the tests of the laws that are asked, cheap ones and different ones first."""
        declared = {law for item in items for law in declared_laws(item)}
        if self.trial.laws is None:
            self.wanted = set(declared)
        self.send(("laws", sorted(declared)))
        kept = [item for item in items if declared_laws(item) & self.wanted]
        dropped = [item for item in items if not declared_laws(item) & self.wanted]
        config.hook.pytest_deselected(items=dropped)
        items[:] = _in_order(kept, self.trial.order)
        self.began = time.perf_counter()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that can't be collected."""
        if report.failed:
            self.send(("unusable", f"{report.nodeid}: {report.longrepr}"[-500:]))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Leave out a test whose laws have all spoken."""
        if not declared_laws(item) & self.wanted:
            return True
        return None

    # --- noting ---------------------------------------------------------------------------------

    def violated(self, judge: laws.Judge, declared: frozenset[str], law: str, check: str) -> None:
        """Note a violation; end the test if it has nothing more to say."""
        self.broken.add(judge.test)
        self._kill(law, judge.test, check, judge.examples)
        if not declared & self.wanted:
            raise _Enough

    def _kill(self, law: str, test: str, check: str, examples: int) -> None:
        if law not in self.wanted:
            return
        self.wanted.discard(law)
        drawn = self.examples.get(law, 0) + examples
        kill = Kill(law, test, check, drawn, time.perf_counter() - self.began)
        self.kills[law] = kill
        self.send(("kill", asdict(kill)))

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Iterator[None]:
        """A test that broke without a violation objects, too, in the name of all its laws."""
        began = time.perf_counter()
        try:
            return (yield)
        except pytest.skip.Exception:
            raise
        except BaseException as error:
            if not isinstance(error, Exception | pytest.fail.Exception):
                raise
            if not isinstance(error, _Enough) and pyfuncitem.nodeid not in self.broken:
                for law in sorted(declared_laws(pyfuncitem)):
                    self._kill(law, pyfuncitem.nodeid, f"{type(error).__name__}: {error}"[:300], 1)
            raise
        finally:
            self.seconds[pyfuncitem.nodeid] = time.perf_counter() - began
            judge = pyfuncitem.funcargs.get("judge")
            for law in declared_laws(pyfuncitem):
                self.examples[law] = self.examples.get(law, 0) + getattr(judge, "examples", 0)
            if self.over():
                pyfuncitem.session.shouldstop = "every law has spoken"

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A fixture that broke: the test never ran, and objects."""
        if report.when == "setup" and report.failed:
            for law in sorted(self.wanted & _laws_of(report)):
                self._kill(law, report.nodeid, "a fixture broke", 1)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Let the report of a broken fixture know the laws."""
        item.user_properties.append(("fp8-laws", sorted(declared_laws(item))))

    def over(self) -> bool:
        """Whether there is nothing left to find out."""
        return not self.wanted or bool(self.kills and not self.trial.all_laws)


def _laws_of(report: pytest.TestReport) -> set[str]:
    return {law for name, value in report.user_properties if name == "fp8-laws" for law in value}  # type: ignore[attr-defined]


def _in_order(items: list[pytest.Item], seconds: dict[str, float]) -> list[pytest.Item]:
    """A few variants of every test, then a few more of each; among them the quick ones first.

    A fault of one recipe, format or dtype shows in one variant, one of them all in the first. The
    variants of a test are shuffled (by their names, the same way every time), so that its first
    few differ in all their parameters.
    """
    numbers: dict[str, int] = {}
    ranked = []
    for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode())):
        function = item.nodeid.partition("[")[0]
        number = numbers[function] = numbers.get(function, -1) + 1
        draws = hasattr(getattr(item, "obj", None), "hypothesis")
        cost = seconds.get(item.nodeid, 1.0 if draws else 0.1)
        ranked.append((number // 4, round(cost, 1), item))
    return [item for *_, item in sorted(ranked, key=lambda entry: entry[:2])]


def _noting(watch: _Watch) -> type[laws.Judge]:
    """A judge that notes violations and goes on, as it does after an expected deviation."""

    class Noting(laws.Judge):
        """Goes on after a violation."""

        def _settle(
            self, law_id: str, check: str, found: Comparison, cause: Exception | None = None
        ) -> bool:
            __tracebackhide__ = True
            try:
                return super()._settle(law_id, check, found, cause)
            except LawViolation:
                watch.violated(self, self._laws, law_id, check)
                return False

    return Noting


def run(trial: Trial, connection: Connection) -> None:
    """Run a trial in this process, which ends with it; the outcome goes through the connection."""
    torch.set_num_threads(1)
    os.chdir(trial.root)
    watch = _Watch(trial, connection.send)
    laws.Judge = _noting(watch)  # type: ignore[misc]
    with tempfile.TemporaryFile("w+") as output:
        _redirect(output.fileno())
        status = pytest.main(trial.arguments(), plugins=[watch])
        sys.stdout.flush()
        sys.stderr.flush()
        output.seek(0)
        text = output.read()
    ran = status in _RAN or (status == pytest.ExitCode.INTERRUPTED and watch.over())
    error = "" if ran else f"pytest: exit status {int(status)}\n{text[-3000:]}"
    seconds = watch.seconds
    connection.send(("done", {"tests": len(seconds), "seconds": seconds, "error": error}))


def _redirect(descriptor: int) -> None:
    """What this process prints, and its children, goes there."""
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


# --- the naive accuracy test --------------------------------------------------------------------

#: what the usual accuracy test asks for
NAIVE_DB = 20.0
_NAIVE_EXTENT = 256


def naive(plant: str, connection: Connection) -> None:
    """Whether random 256 x 256 x 256 operands show the fault: SQNR of y, dX, dW below 20 dB.

    Every recipe of the fault's targets is tried, in bfloat16, with a bias and a random grad_output.
    """
    torch.set_num_threads(1)
    variant = find(plant)
    try:
        with variant():
            found = any(_naive_sees(target) for target in variant.targets)
    except Exception as error:  # noqa: BLE001 - whatever breaks, a naive test sees it
        connection.send((True, f"{type(error).__name__}: {error}"))
        return
    connection.send((found, ""))


def _naive_sees(name: str) -> bool:
    from fp8 import targets

    target = targets.load(name)
    rng = np.random.default_rng(0)
    n = _NAIVE_EXTENT
    x, w, g = (torch.from_numpy(rng.standard_normal((n, n))).to(torch.bfloat16) for _ in range(3))
    bias = torch.from_numpy(rng.standard_normal(n)).to(torch.bfloat16)
    for recipe in sorted(target.capabilities().recipes):
        layer = nn.Linear(n, n, dtype=torch.bfloat16)
        with torch.no_grad():
            layer.weight.copy_(w)
            layer.bias.copy_(bias)
        model = target.convert(nn.Sequential(layer), recipe)
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.backward(g)
        exact = (x.double() @ w.double().t() + bias.double(), g.double() @ w.double())
        weight = g.double().t() @ x.double()
        pairs = zip((y, leaf.grad, layer.weight.grad), (*exact, weight), strict=True)
        if any(not _sqnr(got, want) >= NAIVE_DB for got, want in pairs):
            return True
    return False


def _sqnr(got: Tensor | None, want: Tensor) -> float:
    if got is None:
        return -torch.inf
    noise = (got.detach().double() - want).square().sum()
    return float(10 * torch.log10(want.square().sum() / noise))


# --- processes ----------------------------------------------------------------------------------


class Running:
    """A process that runs `function(argument, connection)`, and what it has said so far."""

    def __init__(self, function: Callable[..., None], argument: object, timeout: float) -> None:
        context = fork_server()
        self.reader, writer = context.Pipe(duplex=False)
        self.process = context.Process(target=function, args=(argument, writer), daemon=False)
        self.process.start()
        writer.close()
        self.deadline = time.monotonic() + timeout
        self.timeout = timeout
        self.said: list[Any] = []

    def receive(self) -> bool:
        """Take in what was said; returns whether the process is still at work."""
        with suppress(EOFError):
            while self.reader.poll():
                self.said.append(self.reader.recv())
            if time.monotonic() < self.deadline:
                return True
            self.said.append(("late", self.timeout))
        self.close()
        return False

    def close(self) -> None:
        """End the process if it runs, and forget it."""
        if self.process.is_alive() and time.monotonic() >= self.deadline:
            self.process.kill()
        self.process.join()
        self.reader.close()


def fork_server() -> ForkServerContext:
    """The context whose processes have imported this module already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fp8.testing.trials"])
    return context


def outcome(said: list[Any]) -> Outcome:
    """What a trial's messages amount to."""
    found = Outcome(error="the process ended without a result")
    for kind, value in said:
        if kind == "laws":
            found.laws = tuple(value)
        elif kind == "kill":
            found.kills[value["law"]] = Kill(**value)
        elif kind == "unusable":
            found.unusable.append(value)
        elif kind == "late":
            found.error = f"no result after {value:.0f} s"
        else:
            found.tests, found.seconds = value["tests"], value["seconds"]
            found.error = value["error"]
    return found


def conduct(trial: Trial, timeout: float) -> Outcome:
    """Run one trial and wait for its outcome."""
    running = Running(run, trial, timeout)
    while running.receive():
        running.reader.poll(0.2)
    return outcome(running.said)


def conduct_naive(plant: str, timeout: float = 120) -> tuple[bool, str]:
    """Whether the naive accuracy test sees the fault, and the error if that is how."""
    running = Running(naive, plant, timeout)
    while running.receive():
        running.reader.poll(0.2)
    found = running.said[-1] if running.said else (True, "the process died")
    return bool(found[0]), str(found[1])
