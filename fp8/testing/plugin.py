"""The pytest plug-in: options, fixtures, header and summary. Wiring only; the rest is elsewhere.

In a run that neither gives an ``--fp8-…`` option (or its ini twin) nor uses the fixtures, it
prints nothing and imports neither torch nor numpy.
"""

from __future__ import annotations

import json
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from fp8.testing.options import add_options, read_options
from fp8.testing.planting import PlantError, planted, resolve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from fp8.testing.laws import Judge
    from fp8.testing.options import Options
    from fp8.testing.session import Session

_OPTIONS = pytest.StashKey["Options"]()
_SESSION = pytest.StashKey["Session"]()
_JUDGE = pytest.StashKey["Judge"]()
#: Fixtures of wider scope that were set up while a fault was planted.
_WIDE = pytest.StashKey[list[tuple[Any, Any]]]()
_OUTPUT = "fp8_tally"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option group ``fp8`` and the ini twins."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Read the options."""
    config.addinivalue_line("markers", "law(*ids): the laws that the test compares for")
    config.stash[_OPTIONS] = read_options(config)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Load what was asked for, so that a mistake in it shows before any test runs.

    Not earlier: ``pytest --help`` and ``--version`` need no target.
    """
    config = session.config
    options = config.stash[_OPTIONS]
    config.pluginmanager.register(_target_fixture(options), "fp8-target")
    if not options.asked:
        return
    if options.plant is not None:
        try:
            resolve(options.plant)
        except PlantError as error:
            raise pytest.UsageError(f"--fp8-plant: {error}") from error
    state = _session(config)
    state.load_targets()
    if not _is_worker(config):
        _warn_of_expired(config, state)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Show what is judged, with what."""
    if not config.stash[_OPTIONS].asked:
        return []
    from fp8.testing.summary import header

    return header(_session(config))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Refuse a law that doesn't exist."""
    marks = list(metafunc.definition.iter_markers("law"))
    if not marks:
        return
    from fp8.testing.law_table import LAWS

    for law in (law for mark in marks for law in mark.args):
        if law not in LAWS:
            msg = (
                f"{metafunc.definition.nodeid} declares law {law!r}, which is unknown; "
                f"known: {', '.join(LAWS)}"
            )
            raise pytest.Collector.CollectError(msg)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Look for the examples of the expectations before anybody's hook deselects anything."""
    chosen_by_name = any("::" in argument for argument in config.args)
    if config.stash[_OPTIONS].asked and not chosen_by_name:
        _session(config).look_for_examples(items)
    return (yield)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note which laws can be checked."""
    if any("target" in getattr(item, "fixturenames", ()) for item in session.items):
        _session(session.config).declare(session.items)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Plant the fault before the test's fixtures are set up, and take it out after them.

    Fixtures of wider scope end with the test, too: what they made under the fault (converted,
    compiled) must not outlive it.
    """
    plant = item.config.stash[_OPTIONS].plant
    if plant is None:
        return (yield)
    wide = item.config.stash[_WIDE] = []
    with planted(plant):
        try:
            return (yield)
        finally:
            for fixturedef, request in reversed(wide):
                fixturedef.finish(request)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Iterator[None]:
    """Remember fixtures that would outlive their test."""
    wide = request.config.stash.get(_WIDE, None)
    if wide is not None and fixturedef.scope != "function":
        wide.append((fixturedef, request))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Count the test unless it skips; fail it if it passes without having compared a value."""
    judge = pyfuncitem.stash.get(_JUDGE, None)
    if judge is None:
        return (yield)
    skipped = False
    try:
        result = yield
    except pytest.skip.Exception:
        skipped = True
        raise
    finally:
        if not skipped:
            judge.finish()
    judge.check_compared()
    _session(pyfuncitem.config).passed(pyfuncitem)
    return result


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's, which need not be there
def pytest_testnodedown(node: Any) -> None:
    """Add a worker's counts to the controller's."""
    state = _session(node.config)
    output = getattr(node, "workeroutput", {}).get(_OUTPUT)
    if output is not None:
        from fp8.testing.tally import Tally

        state.tally.merge(Tally.from_json(json.loads(output)))
    elif state.options.asked:
        state.tally.workers_lost += 1


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker hands over its counts; the others judge the expectations and write the record."""
    config = session.config
    state = config.stash.get(_SESSION, None)
    if state is None or not state.used:
        return
    if _is_worker(config):
        config.workeroutput[_OUTPUT] = json.dumps(state.tally.to_json())  # type: ignore[attr-defined]
        return
    if state.problems() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    state.write_record()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Show what was checked."""
    state = config.stash.get(_SESSION, None)
    if state is None or not state.used or config.option.collectonly:
        return
    from fp8.testing.summary import summary

    terminalreporter.write_sep("=", "fp8: what was checked")
    for line in summary(state):
        terminalreporter.write_line(line)
    for problem in state.problems():
        terminalreporter.write_line(f"ERROR: {problem}", red=True, bold=True)


@pytest.fixture
def judge(request: pytest.FixtureRequest, target: Any) -> Judge:
    """Compares what the target gave with what it should have given, and counts."""
    made = _session(request.config).judge(request.node, target)
    request.node.stash[_JUDGE] = made
    return made


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Where the tensors are: ``cpu`` or ``cuda`` (``--fp8-device``)."""
    return request.config.stash[_OPTIONS].device


@pytest.fixture(scope="session")
def profile(request: pytest.FixtureRequest) -> str:
    """How many examples: ``quick``, ``default`` or ``nightly`` (``--fp8-profile``)."""
    return request.config.stash[_OPTIONS].profile


@pytest.fixture(scope="session")
def fp8_seed(request: pytest.FixtureRequest) -> int:
    """The base of the tensors' seeds (``--fp8-seed``), 0 by default."""
    return request.config.stash[_OPTIONS].base_seed


@pytest.fixture(scope="session")
def fp8_plant(request: pytest.FixtureRequest) -> str | None:
    """The planted fault's name (``--fp8-plant``): a child process plants it again."""
    return request.config.stash[_OPTIONS].plant


@pytest.fixture(scope="session")
def fp8_tensors(request: pytest.FixtureRequest) -> tuple[Path, ...]:
    """The files of captured operands (``--fp8-tensors``)."""
    return request.config.stash[_OPTIONS].tensors


def _target_fixture(options: Options) -> ModuleType:
    """A plug-in with the fixture `target`, whose parameters are known only now.

    A fixture rather than `pytest_generate_tests`: a project with a fixture of its own by that
    name overrides it, as ever.
    """

    @pytest.fixture(scope="session", params=options.targets, ids=options.targets)
    def target(request: pytest.FixtureRequest) -> Any:
        """The implementation under test; a test runs once for each (``--fp8-target``)."""
        return _session(request.config).target(request.param)

    plugin = ModuleType("fp8.testing.plugin.target")
    plugin.target = target  # type: ignore[attr-defined]
    return plugin


def _session(config: pytest.Config) -> Session:
    """The session's state, made when first needed: a run without it pays nothing."""
    if _SESSION not in config.stash:
        from fp8.testing.session import Session

        config.stash[_SESSION] = Session(config.stash[_OPTIONS])
    return config.stash[_SESSION]


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _warn_of_expired(config: pytest.Config, state: Session) -> None:
    from fp8.testing.expectations import ExpiredExpectationWarning

    for entry in state.expired:
        warning = ExpiredExpectationWarning(
            f"expectation {entry.id!r} expired on {entry.expires}: see whether {entry.link} "
            "still stands, then renew or delete it"
        )
        try:
            config.issue_config_time_warning(warning, stacklevel=2)
        except ExpiredExpectationWarning as error:  # -W error, or filterwarnings of the project
            raise pytest.UsageError(str(error)) from error
