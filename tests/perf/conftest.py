"""What the tests of speed share: one GPU, one budget, the order, and what the terminal shows.

Every test skips, each for itself, where there is no GPU: pytest's exit status is 0 then.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from fp8.testing.options import read_options
from fp8.testing.perf import session as perf_session
from fp8.testing.perf.cases import is_emulated
from fp8.testing.perf.catalogue import order
from fp8.testing.perf.terminal import Shows
from fp8.testing.perf.under_law import entries, judge_all

FOLDER = Path(__file__).parent
_SHOWS = pytest.StashKey[Shows]()


def pytest_configure(config: pytest.Config) -> None:
    """Follow the session."""
    config.stash[_SHOWS] = Shows(config)
    config.pluginmanager.register(config.stash[_SHOWS], "fp8-perf")


def pytest_itemcollected(item: pytest.Item) -> None:
    """A warning of torch's is no error here: what is judged is speed.

    Inductor, the profiler and the capturing of graphs warn of what depends on the machine.
    """
    item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.hookimpl(trylast=True)  # after pytest has grouped the tests by target
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The most informative first, whatever its target; tests of other folders before."""
    turns = order()

    def turn(item: pytest.Item) -> int:
        callspec = getattr(item, "callspec", None)
        return turns.get(callspec.params.get("bench"), 0) if callspec is not None else 0

    ours = sorted((item for item in items if is_ours(item)), key=turn)
    items[:] = [item for item in items if not is_ours(item)] + ours


def pytest_collection_finish(session: pytest.Session) -> None:
    """For the progress line."""
    session.config.stash[_SHOWS].expects([item for item in session.items if is_ours(item)])


def is_ours(item: pytest.Item) -> bool:
    return item.path.is_relative_to(FOLDER)


@pytest.fixture(scope="session")
def perf(request, device):
    """The session on the GPU, or None where there is none."""
    if not perf_session.available(device):
        yield None
        return
    config = request.config
    minutes = read_options(config).budget
    with ExitStack() as stack:
        opened = perf_session.opened(
            FOLDER / "thresholds", None if minutes is None else 60 * minutes
        )
        config.stash[_SHOWS].session = session = stack.enter_context(opened)
        yield session


@pytest.fixture
def gpu(perf, target, judge):
    """The session for a target whose speed means something."""
    judge.require(perf is not None, "speed is measured on an NVIDIA GPU: --fp8-device cuda")
    judge.require(
        not is_emulated(target), "its products are emulated: their speed stands for no hardware"
    )
    return perf


@pytest.fixture
def measure(gpu, target, judge, request, record_property):
    """Measures a bench, records and judges its cases."""

    def measure(bench) -> None:
        __tracebackhide__ = True
        minutes = read_options(request.config).budget
        judge.require(gpu.has_time(), f"the budget of {minutes} minutes is spent (--fp8-budget)")
        obstacle = bench.obstacle(gpu.stack(target))
        judge.require(not obstacle, obstacle)
        outcomes = gpu.run(bench, target)
        made = entries(outcomes, gpu.device.name)
        request.config.stash[_SHOWS].took(made)
        for entry in made:
            value = entry["value"]
            record_property(entry["name"], f"{value['ratio']} {value['verdict']}")
        judge_all(judge, outcomes, gpu.device.name)

    return measure
