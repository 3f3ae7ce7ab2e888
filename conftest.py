"""Which tests run, and how many examples they draw.

The folder decides the marker, so that no test can be forgotten; `perf` and `slow` run only when
somebody asks. What is said here concerns this project's own tests: the plug-in is in
`fp8/testing/plugin.py` and is registered by its entry point.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

pytest_plugins = ("pytester",)  # tests/meta run pytest on projects of a few lines

FOLDERS = ("numerics", "compile", "perf", "meta")
_TESTS = Path(__file__).parent / "tests"

#: Examples of a Hypothesis test that doesn't say otherwise. Nightly is ten times the default.
EXAMPLES = {"quick": 4, "default": 40, "nightly": 400}
#: The same in quick while a fault is planted, which also brings back the `thorough` tests: what
#: looks for one fault may take longer than what looks whether there is any.
EXAMPLES_PLANTED = 8

if "PYTEST_XDIST_WORKER" in os.environ:
    # One thread a worker, or n workers start n x cores of them. Here, before anything imports
    # torch: OpenMP reads it once.
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["MKL_NUM_THREADS"] = "1"


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads its own options
def pytest_configure(config: pytest.Config) -> None:
    """Choose the Hypothesis profile; pass ``--fp8-seed`` on as Hypothesis's seed."""
    from hypothesis import HealthCheck, settings

    seed = _option(config, "seed")
    counts = dict(EXAMPLES)
    if _option(config, "plant"):
        counts["quick"] = EXAMPLES_PLANTED
    for name, examples in counts.items():
        settings.register_profile(
            f"fp8-{name}",
            max_examples=examples,
            deadline=None,  # the first call of an operator takes seconds, the second none
            derandomize=seed is None,
            database=None,  # the same examples everywhere, whatever failed here before
            print_blob=True,
            suppress_health_check=[
                # `judge` and `target` are meant to be shared by a test's examples: the judge
                # counts over all of them.
                HealthCheck.function_scoped_fixture,
                # Making tensors and multiplying them takes as long as it takes.
                HealthCheck.too_slow,
            ],
        )
    settings.load_profile(f"fp8-{_option(config, 'profile') or 'default'}")
    if seed is not None and config.getoption("hypothesis_seed") is None:
        config.option.hypothesis_seed = seed


def pytest_sessionstart(session: pytest.Session) -> None:
    """Tell a torch that was imported already, too."""
    if "PYTEST_XDIST_WORKER" in os.environ and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Refuse tests in no known folder: no marker would select them."""
    if _folder(module_path) not in FOLDERS:
        path = module_path.relative_to(_TESTS.parent)
        msg = f"{path}: tests are in tests/{{{','.join(FOLDERS)}}}, nowhere else"
        raise pytest.Collector.CollectError(msg)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Don't collect other folders when ``-m`` names one: that imports whatever they test."""
    asked, folder = config.option.markexpr, _folder(collection_path)
    other = asked in FOLDERS and folder in FOLDERS and folder != asked
    return True if other else None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Add the marker of the test's folder."""
    folder = _folder(item.path)
    if folder is not None:
        item.add_marker(folder)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out `perf` and `slow` unless they were asked for; a ``-m`` selects from the rest.

    The quick profile leaves out `thorough`, too.
    """
    named = set(re.findall(r"\w+", config.option.markexpr or ""))
    left_out = {"perf", "slow"} - named
    profile = _option(config, "profile")
    if profile == "nightly":
        left_out.discard("slow")
    if profile == "quick" and not _option(config, "plant"):
        left_out.add("thorough")
    kept, dropped = [], []
    for item in items:
        (dropped if any(item.get_closest_marker(m) for m in left_out) else kept).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def _folder(path: Path) -> str | None:
    """The folder under tests/ that a test is in."""
    return path.relative_to(_TESTS).parts[0] if _TESTS in path.parents else None


def _option(config: pytest.Config, name: str) -> str | None:
    """An option of the plug-in, or its ini twin, before the plug-in has read it."""
    value: str | None = config.getoption(f"fp8_{name}")
    return config.getini(f"fp8_{name}") if value is None else value
