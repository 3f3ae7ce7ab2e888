"""What importing costs: nothing of torch, numpy or Hypothesis until it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fp8.testing

HEAVY = ("torch", "numpy", "hypothesis", "ml_dtypes", "rich")


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after `code`."""
    report = "; import sys; print(' '.join({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", code + report], capture_output=True, text=True, check=True
    )
    return set(done.stdout.splitlines()[-1].split())


LIGHT = (
    *("fp8", "fp8.cli", "fp8.claims", "fp8.hardware", "fp8.regimes", "fp8.roofline"),
    *("fp8.testing", "fp8.testing.plugin", "fp8.testing.thresholds", "fp8.testing.speed_verdicts"),
)


@pytest.mark.parametrize("module", LIGHT)
def test_imports_nothing_heavy(module: str) -> None:
    loaded = loaded_by(f"import {module}")
    assert "fp8" in loaded
    assert not loaded & set(HEAVY)


def test_oracle_imports_no_torch_and_nothing_that_it_judges() -> None:
    report = "import fp8.testing.oracle, sys; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", report], capture_output=True, text=True, check=True
    )
    loaded = done.stdout.split()
    assert "numpy" in loaded
    assert "torch" not in loaded
    judged = [
        name for name in loaded if name.startswith("fp8.") and not name.startswith("fp8.testing")
    ]
    assert judged == []


def test_a_project_that_does_not_use_the_plugin_pays_nothing(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        f"""
        import sys
        def pytest_unconfigure():
            print("heavy:", *sorted(set({HEAVY}) & set(sys.modules)), "end")
        """
    )
    pytester.makepyfile("def test_something():\n    assert True\n")
    # without Hypothesis's own plug-in, which imports Hypothesis
    result = pytester.runpytest_subprocess("-p", "no:hypothesispytest")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["heavy: end"])
    result.stdout.no_fnmatch_line("*fp8:*")


@pytest.mark.parametrize("name", fp8.testing.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(fp8.testing, name) is not None
    assert name in dir(fp8.testing)


def test_another_name_is_not_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        fp8.testing.nothing  # noqa: B018
