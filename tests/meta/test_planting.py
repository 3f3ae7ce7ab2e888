"""Planting: a fault is there from a test's first fixture to its last, and nowhere else."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

from fp8.testing.planting import planted

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    Run = Callable[..., pytest.RunResult]

CAUGHT = """
    @pytest.mark.law("P05")
    def test_doubles(judge, target):
        judge.equal("P05", "y", target.double(1), 2)
"""

ORDER = """
    import fake

    @pytest.fixture(scope="module")
    def made():
        yield fake.factor
        print("seen: torn down at", fake.factor)

    @pytest.fixture
    def doubled(target, made):
        print("seen: set up at", target.double(1), made)
        yield
        print("seen: left at", target.double(1))

    def test_one(doubled):
        print("seen: runs at", fake.factor)

    def test_two(doubled):
        print("seen: runs at", fake.factor)

    def pytest_runtest_logfinish():
        print("seen: afterwards", fake.factor)
"""


def seen(result: pytest.RunResult) -> list[str]:
    return [line.split("seen: ")[1] for line in result.outlines if "seen: " in line]


def test_fault_is_there_from_the_first_fixture_to_the_last(
    run: Run, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest(
        "import fake\ndef pytest_runtest_logstart():\n    print('seen: before', fake.factor)"
    )
    once = ["before 3", "set up at 3 3", "runs at 3", "left at 3", "torn down at 3"]
    # before: another plug-in's hook inside the protocol; what is made ends with its test
    result = run(ORDER, "-s", "--fp8-plant=fake:triples")
    result.assert_outcomes(passed=2)
    assert seen(result) == once * 2


def test_without_a_fault_fixtures_live_as_long_as_ever(run: Run) -> None:
    once = ["set up at 2 2", "runs at 2", "left at 2"]
    assert seen(run(ORDER, "-s")) == [*once, *once, "torn down at 2"]


def test_fault_is_gone_after_the_tests(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "import fake\ndef pytest_sessionfinish():\n    print('seen: finally', fake.factor)"
    )
    result = run(CAUGHT, "-s", "--fp8-plant=fake:triples")
    result.assert_outcomes(failed=1)  # and it was caught
    assert seen(result) == ["finally 2"]


def test_fault_can_be_planted_again_in_a_child_process(run: Run) -> None:
    result = run(
        """
        import subprocess, sys
        CHILD = "import sys, fake; from fp8.testing.planting import planted\\n" \\
                "with planted(sys.argv[1] or None): print(fake.factor)"
        def test_child(fp8_plant):
            done = subprocess.run([sys.executable, "-c", CHILD, fp8_plant or ""],
                                  capture_output=True, text=True, check=True)
            print("seen: child", done.stdout.strip())
        """,
        "-s",
        "--fp8-plant=fake:triples",
    )
    result.assert_outcomes(passed=1)
    assert seen(result) == ["child 3"]


def test_dynamo_forgets_on_the_way_in_and_out(monkeypatch: pytest.MonkeyPatch) -> None:
    resets = []
    monkeypatch.setitem(
        sys.modules, "torch._dynamo", SimpleNamespace(reset=lambda: resets.append(1))
    )
    with planted("contextlib:nullcontext"):
        assert len(resets) == 1
    assert len(resets) == 2
    with planted(None):
        assert len(resets) == 2
