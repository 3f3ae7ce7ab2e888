"""tests/perf as a whole: without a GPU, and on a simulated one, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

#: a plug-in that puts a simulated GPU into the place of the real one
PLUGIN = """
from contextlib import contextmanager

from fp8.testing import thresholds
from fp8.testing.perf import session
from fp8.testing.perf.judging import standard
from fp8.testing.perf.simulated import SimulatedWorkshop
from fp8.testing.timing.simulated import SimulatedDevice


def speed(case):
    if case.known is not None and (case.known.M, case.known.N) == (1024, 1024):
        raise RuntimeError("this bench can't be run")
    if case.family == "regime" or case.facts.get("mode") == "eager":
        return 0.7
    extents = [case.facts.get(name) or 9999 for name in "MKN"]
    return 0.7 if min(extents) <= 1024 else 1.4


@contextmanager
def opened(folder, budget_s):
    device = SimulatedDevice(seed=0, name="NVIDIA H200")
    known = thresholds.load(folder, device.name)
    yield session.PerfSession(
        device,
        lambda target: SimulatedWorkshop(speed),
        standard({}, device.name),
        str(known),
        budget_s,
        device.now,
    )


session.available = lambda device: True
session.opened = opened
"""


def run(*args: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), *([] if folder is None else [str(folder)])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "200"}
    words = [sys.executable, "-m", "pytest", "-m", "perf", "tests/perf", *args]
    return subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def simulated(tmp_path: Path) -> Path:
    (tmp_path / "simulated_gpu.py").write_text(PLUGIN, encoding="utf-8")
    return tmp_path


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_every_test_skips_for_one_reason_and_the_status_is_0() -> None:
    done = run()
    assert done.returncode == 0, done.stdout
    assert " passed" not in done.stdout
    reasons = [line for line in done.stdout.splitlines() if " x " in line]
    assert len(reasons) == 2  # two targets
    assert {line.partition(" x ")[2] for line in reasons} == {
        "speed is measured on an NVIDIA GPU: --fp8-device cuda"
    }


@pytest.mark.thorough
def test_the_whole_on_a_simulated_gpu(simulated: Path) -> None:
    """All of it runs; a bench that raises fails alone; record, JUnit and tables hold every case."""
    record, junit = simulated / "record.json", simulated / "junit.xml"
    done = run(
        "-p", "simulated_gpu", "--fp8-target=reference[torch]", "--fp8-target=torchao",
        f"--fp8-record={record}", f"--junit-xml={junit}", "--deselect", "tests/perf/test_regimes.py"
        "::test_fast_accumulation", folder=simulated,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert failed
    assert all("this bench can't be run" in line and "1024x1024" in line for line in failed)
    made = json.loads(record.read_text(encoding="utf-8"))["measurements"]
    timed = [one for one in made if one["kind"] == "timing"]
    assert len(timed) > 150
    assert {one["facts"]["family"] for one in timed} == {
        *("ceiling", "product", "cast", "linear", "step", "regime")
    }
    assert len({one["name"] for one in timed}) >= len(timed) - 2  # the ceilings, once a target
    text = junit.read_text(encoding="utf-8")
    assert 'name="step/toy/torchao-tensorwise/compiled/random"' in text
    assert "fp8: speed" in done.stdout
    assert f"{len(timed)} cases: " in done.stdout
    progress = [line for line in done.stdout.splitlines() if line.startswith("perf ")]
    assert progress
    assert all(" left: " in line for line in progress)
    first = [line.partition("left: ")[2].partition("[")[0] for line in progress]
    assert first[0] == "test_ceilings"


def test_when_the_budget_is_spent_the_rest_skips_and_says_so(simulated: Path) -> None:
    done = run(
        "-p", "simulated_gpu", "--fp8-target=torchao", "--fp8-budget=0.1", "-k", "not 1024",
        folder=simulated,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "x the budget of 0.1 minutes is spent (--fp8-budget)" in done.stdout
    assert " passed, " in done.stdout


def test_the_quick_profile_is_the_short_selection(simulated: Path) -> None:
    done = run(
        "-p", "simulated_gpu", "--fp8-target=torchao", "--fp8-profile=quick", "-v", folder=simulated
    )
    ran = [line.split()[0] for line in done.stdout.splitlines() if " PASSED" in line]
    assert [test.partition("::")[2] for test in ran] == [
        "test_ceilings[torchao-ceilings]",
        "test_casts[torchao-8192x8192-eager]",
        "test_linears[torchao-eager-8192x8192x8192]",
        "test_linears[torchao-eager-4096x4096x4096]",
    ]


@pytest.mark.parametrize("value", ["0", "-1", "soon", "inf"])
def test_a_budget_is_a_number_of_minutes(value: str) -> None:
    done = run(f"--fp8-budget={value}")
    assert done.returncode == 4
    assert f"must be a number of minutes above 0, got '{value}'" in done.stderr
