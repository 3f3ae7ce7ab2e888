"""One trial: the suite in a process of its own, on a mutant of the library.

The process has imported torch and pytest, but nothing of this project: it imports the mutant in
place of the module, so that every test, target and fault sees it. A process that a test starts
imports the library as it is.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from multiprocessing.connection import Connection
    from types import CodeType, ModuleType

#: what the fork server imports once for all trials; what the tests use and is not under test
PRELOAD = ("torch", "torch._dynamo", "torch.nn", "pytest", "hypothesis", "ml_dtypes", "numpy")

#: the tests of the suite itself that judge the library: what it says about itself and what it
#: chooses on a GPU
JUDGES = {
    "formats": "tests/meta/test_format_descriptions.py",
    "scaling": "tests/meta/test_scale_rules.py",
    "quantize": "tests/meta/test_copies.py",
    "recipes": "tests/meta/test_recipe_table.py",
    "matmul": "tests/meta/test_device_choices.py",
}
#: what a mutant has to get past
TESTS = (*JUDGES.values(), "tests/numerics")
#: the files of tests/numerics that are about a module: they run first
ABOUT = {
    "formats": ("formats",),
    "scaling": ("scaling", "quantize"),
    "quantize": ("quantize", "formats", "bad_input"),
    "recipes": ("recipe_trace", "linear"),
    "matmul": ("matmul", "bad_products", "linear"),
    "linear": ("linear", "gradients", "bad_input", "state"),
    "conversion": ("convert_report", "convert"),
}


@dataclass(frozen=True)
class Trial:
    """What to run.

    Attributes:
        module: The module that is replaced; "" for the library as it is.
        source: What it is replaced by.
        root: The folder of the project.
        seconds: How long the tests took on the library as it is, by node id.
        tests: Files or folders of tests.
        thorough: Whether it is the turn of the tests that the quick profile leaves out.
    """

    module: str
    source: str
    root: str
    seconds: dict[str, float] = field(default_factory=dict)
    tests: tuple[str, ...] = TESTS
    thorough: bool = False

    def arguments(self) -> list[str]:
        """pytest's command line."""
        words = [*self.tests, "-q", "-p", "no:cacheprovider", "--fp8-profile=quick"]
        # Modules that are imported already cannot be rewritten, and pytest would warn of each.
        words += ["--assert=plain", "--tb=line", "-rN", *(["-x"] if self.module else [])]
        if self.thorough:
            # The suite looks closer where a fault is planted. This one plants nothing: the fault is
            # in the library already.
            words += ["-m", "thorough", "--fp8-plant=contextlib:nullcontext"]
        return [*words, f"--rootdir={self.root}", "-c", str(Path(self.root) / "pyproject.toml")]


def run(trial: Trial, connection: Connection) -> None:
    """Run a trial in this process, which ends with it; what came out goes through the connection.

    Sends ("survived", seconds by test, seconds) or ("killed", test, error, seconds).
    """
    import torch

    began = time.monotonic()
    torch.set_num_threads(1)
    os.chdir(trial.root)
    # This project's folder is where the tests are, too; pytest must not find another copy.
    sys.path.insert(0, trial.root)
    stale = [name for name in sys.modules if name == "fp8" or name.startswith("fp8.")]
    if stale:
        raise RuntimeError(f"{stale} were imported before the mutant could be")
    if trial.module:
        sys.meta_path.insert(0, Replacing(f"fp8.{trial.module}", trial.source))
    watch = Watch(trial)
    with tempfile.TemporaryFile("w+") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        status = pytest.main(trial.arguments(), plugins=[watch])
        sys.stdout.flush()
        output.seek(0)
        text = output.read()
    took = time.monotonic() - began
    if status == pytest.ExitCode.OK:
        connection.send(("survived", watch.seconds, took))
    else:
        test, error = watch.failed or ("pytest", f"exit status {int(status)}: {text[-500:]}")
        connection.send(("killed", test, error, took))


class Replacing(MetaPathFinder, Loader):
    """Imports a module from a source that is not its file's."""

    def __init__(self, name: str, source: str) -> None:
        self.name = name
        self.source = source

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        """This loader, for the one module."""
        return importlib.util.spec_from_loader(name, self) if name == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        """Run the source in the module."""
        exec(self._code(), vars(module))  # noqa: S102 - what importing is

    def _code(self) -> CodeType:
        with warnings.catch_warnings():
            # A comparison by `is` is a mutant like others: no warning shall kill it.
            warnings.simplefilter("ignore", SyntaxWarning)
            return compile(self.source, f"<{self.name}>", "exec", dont_inherit=True)


class Watch:
    """Runs what is likely to fail first; notes the first failure."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.seconds: dict[str, float] = {}
        self.failed: tuple[str, str] | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        """Don't shrink a failing example: it only takes time."""
        from fp8.testing.trial_plugin import dont_shrink

        dont_shrink()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """The tests about the module first; among them cheap ones and different ones."""
        from fp8.testing.trial_plugin import in_order

        # Tests that start a process would compare the mutant with the library as it is there.
        elsewhere = [item for item in items if "fp8_plant" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=elsewhere)
        about = {f"test_{name}.py" for name in ABOUT.get(self.trial.module, ())}
        about.add(Path(JUDGES.get(self.trial.module, "")).name)
        kept = in_order([item for item in items if item not in elsewhere], self.trial.seconds)
        items[:] = sorted(kept, key=lambda item: item.path.name not in about)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that can't be imported."""
        if report.failed:
            self._note(report.nodeid, str(report.longrepr))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how long a test took, and the first that failed."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self._note(report.nodeid, str(report.longrepr))

    def _note(self, test: str, text: str) -> None:
        self.failed = self.failed or (test, text[-500:])
