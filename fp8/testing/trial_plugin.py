"""The plug-in of a trial: what runs, in which order, until when; and what objected to what."""

from __future__ import annotations

import time
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from fp8.testing import laws
from fp8.testing.faults import STEPS
from fp8.testing.laws import LawViolation
from fp8.testing.session import declared_laws

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fp8.testing.comparing import Comparison


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
        note_steps: Whether to note which steps each test reaches.
        past: The node ids of tests that can't show it: they are left out.
    """

    plant: str | None
    laws: tuple[str, ...] | None
    targets: tuple[str, ...]
    tests: tuple[str, ...]
    root: str
    seed: int | None = None
    order: dict[str, float] = field(default_factory=dict)
    all_laws: bool = False
    note_steps: bool = False
    past: frozenset[str] = frozenset()

    def arguments(self) -> list[str]:
        """pytest's command line."""
        words = [*self.tests, "-m", "numerics or compile", "-q", "-p", "no:cacheprovider"]
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
        reached: The steps that each test reached, by node id, where they were noted.
        unusable: Files of tests that could not be collected.
        error: Why the trial has no result; empty when it has.
    """

    kills: dict[str, Kill] = field(default_factory=dict)
    laws: tuple[str, ...] = ()
    tests: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    reached: dict[str, list[str]] = field(default_factory=dict)
    unusable: list[str] = field(default_factory=list)
    error: str = ""


class _Enough(Exception):  # noqa: N818 - no error
    """Every law that this test declares has spoken."""


class Watch:
    """Which tests run, in which order, until when; what they found."""

    def __init__(self, trial: Trial, send: Callable[[object], None]) -> None:
        self.trial = trial
        self.send = send
        self.wanted: set[str] = set(trial.laws or ())
        self.kills: dict[str, Kill] = {}
        self.examples: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self.broken: set[str] = set()
        self.reached: dict[str, list[str]] = {}
        self.reaching: set[str] = set()
        self.began = time.perf_counter()

    # --- selecting ------------------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Draw examples as the profile says."""
        del config
        dont_shrink()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keep the tests of the laws that are asked, cheap ones and different ones first."""
        declared = {law for item in items for law in declared_laws(item)}
        if self.trial.laws is None:
            self.wanted = set(declared)
        self.send(("laws", sorted(declared)))
        kept: list[pytest.Item] = []
        dropped: list[pytest.Item] = []
        for item in items:
            asked = declared_laws(item) & self.wanted and item.nodeid not in self.trial.past
            (kept if asked else dropped).append(item)
        config.hook.pytest_deselected(items=dropped)
        items[:] = in_order(kept, self.trial.order)
        self.began = time.perf_counter()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that can't be collected."""
        if report.failed:
            self.send(("unusable", f"{report.nodeid}: {report.longrepr}"[-500:]))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Leave out a test whose laws have all spoken."""
        asked = sorted(declared_laws(item) & self.wanted)
        if not asked:
            return True
        # Said beforehand: if the process dies, this is the test that it died in.
        self.send(("test", (item.nodeid, asked, time.perf_counter() - self.began)))
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
            # What a child process reaches is not seen here.
            elsewhere = "fp8_plant" in pyfuncitem.fixturenames
            self.reached[pyfuncitem.nodeid] = list(STEPS if elsewhere else self.reaching)
            self.reaching.clear()
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


def dont_shrink() -> None:
    """Let Hypothesis draw as its profile says, but not shrink what fails: it only takes time."""
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile(
        "fp8-trial", hypothesis.settings.default, phases=phases, report_multiple_bugs=False
    )
    hypothesis.settings.load_profile("fp8-trial")


def in_order(items: list[pytest.Item], seconds: dict[str, float]) -> list[pytest.Item]:
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
        cost = seconds.get(item.nodeid, _guess(item))
        ranked.append((number // 4, round(cost, 1), item))
    return [item for *_, item in sorted(ranked, key=lambda entry: entry[:2])]


def _guess(item: pytest.Item) -> float:
    """Seconds that a test may take, where nobody has measured."""
    if "inductor" in getattr(item, "fixturenames", ()):
        return 10.0
    if item.get_closest_marker("thorough"):
        return 3.0
    return 1.0 if hasattr(getattr(item, "obj", None), "hypothesis") else 0.1


def noting(watch: Watch) -> type[laws.Judge]:
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


def noted_step(reaching: set[str], step: str, original: Any) -> Any:
    """The step, which adds its name when it is called; tables are taken to be always in use."""
    if isinstance(original, property):
        return noted_step(reaching, step, original.fget)
    if not callable(original):
        return original

    def noted(*args: Any, **rest: Any) -> Any:
        reaching.add(step)
        return original(*args, **rest)

    return noted
