"""The plug-in: every option, the header, the summary, and what makes a session fail."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., pytest.RunResult]

GOOD = """
    @pytest.mark.law("P05", "P08")
    def test_doubles(judge, target):
        for n in (1, 2):
            judge.example(n=n)
            judge.bitwise("P05", "y", target.double(np.ones(n)), np.full(n, 2.0))
"""

MIXED = """
    @pytest.mark.law("P05", "P08")
    @pytest.mark.parametrize("n", [1, 2, 3])
    def test_doubles(judge, target, n):
        judge.example(n=n)
        judge.bitwise("P05", "y", target.double(np.ones(n)), np.full(n, 2.0))
        judge.note(f"measured at {n // 3}")

    @pytest.mark.law("P24")
    def test_large(judge, target):
        judge.require(False, "no tensors of more than 2^31 elements")

    @pytest.mark.law("P27")
    def test_wrong(judge, target):
        judge.example(K=16)
        judge.equal("P27", "bias", target.double(1), 3)
"""

MEASURES = """
    @pytest.mark.law("P05")
    @pytest.mark.parametrize("n", [2, 1])
    def test_measures(judge, target, n):
        for k in (n, 10 * n):
            judge.example(k=k)
            judge.equal("P05", "y", target.double(k), 2 * k)
            judge.record("doubled", target.double(k), "count")
"""


def tail_of(result: pytest.RunResult) -> list[str]:
    """The lines of the plug-in's summary."""
    lines = result.outlines
    start = next(i for i, line in enumerate(lines) if "fp8: what was checked" in line)
    return [line for line in lines[start + 1 :] if not line.startswith(("=", "FAILED", "SKIPPED"))]


# ------------------------------------------------------------------- header and summary


def test_header_says_what_is_judged(run: Run) -> None:
    result = run(GOOD)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "fp8: targets fake:target",
            "fp8: device cpu, profile default, seed derandomised, plant none",
            "fp8: versions fp8 0.*, torch *, numpy *, ml_dtypes *",
        ]
    )


def test_header_says_what_was_chosen(run: Run) -> None:
    result = run(
        GOOD, "--fp8-seed=7", "--fp8-profile=quick", "--fp8-device=cpu",
        "--fp8-plant=contextlib:nullcontext",
    )  # fmt: skip
    result.stdout.fnmatch_lines(
        ["fp8: device cpu, profile quick, seed 7, plant contextlib:nullcontext"]
    )


def test_summary_counts(run: Run) -> None:
    result = run(MIXED)
    result.assert_outcomes(passed=3, failed=1, skipped=1)
    assert tail_of(result) == [
        "fake:target: 2 of 4 laws checked (P05, P27)",
        "  not checked: P08, P24",
        "  broken: P27 (1 test)",
        "  4 tests, 4 examples, 7 values compared",
        "  skipped by capability: 1",
        "    1 x no tensors of more than 2^31 elements",
        "  expected deviations: 0",
        "  note: measured at 0",
        "  note: measured at 1",
    ]


def test_summary_and_record_are_the_same_under_xdist(run: Run, pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    source = MIXED + MEASURES
    together = tail_of(run(source, "-n2", "--fp8-record=record.json"))
    record = json.loads(pytester.path.joinpath("record.json").read_text())
    assert together == tail_of(run(source, "--fp8-record=record.json"))
    assert record == json.loads(pytester.path.joinpath("record.json").read_text())
    assert len(record["measurements"]) == 4


def test_a_test_runs_once_for_each_target(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(other="from fake import Target as target")
    result = run(GOOD, "--fp8-target=other:target", "--fp8-target=fake:target", "-v")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        ["fp8: targets fake:target, other:target",
         "test_it.py::test_doubles?fake:target? PASSED*",
         "test_it.py::test_doubles?other:target? PASSED*"]
    )  # fmt: skip
    assert [line for line in tail_of(result) if "laws" in line] == [
        "fake:target: 1 of 2 laws checked (P05)",
        "other:target: 1 of 2 laws checked (P05)",
    ]


def test_deselected_tests_do_not_count_as_checkable(run: Run) -> None:
    assert tail_of(run(MIXED, "-k", "test_doubles"))[:2] == [
        "fake:target: 1 of 2 laws checked (P05)",
        "  not checked: P08",
    ]


def test_examples_of_hypothesis_are_counted_over_the_whole_test(run: Run) -> None:
    result = run(
        """
        from hypothesis import HealthCheck, given, settings, strategies as st
        @pytest.mark.law("P05")
        @settings(max_examples=20, database=None, suppress_health_check=list(HealthCheck))
        @given(n=st.integers(0, 1000))
        def test_doubles(judge, target, n):
            judge.example(n=n)
            judge.equal("P05", "y", target.double(n), 2 * n)
        """
    )
    assert "  1 test, 20 examples, 20 values compared" in tail_of(result)


def test_a_project_with_its_own_fixtures_is_left_alone(run: Run) -> None:
    result = run(
        """
        @pytest.fixture(params=[1, 2])
        def target(request):
            return request.param
        @pytest.fixture
        def judge():
            return "mine"
        def test_mine(target, judge):
            assert judge == "mine" and target in (1, 2)
        """,
        target=None,
    )
    result.assert_outcomes(passed=2)
    result.stdout.no_fnmatch_line("*fp8:*")


# ------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--fp8-target=nothing"], "*got 'nothing', needs one of reference?emulated?, *"),
        (["--fp8-target=fake:nothing"], "*fake:nothing*cannot be loaded*known: reference*"),
        (["--fp8-target=no_such_module:x"], "*no_such_module*known: reference?emulated?*"),
        (["--fp8-device=tpu"], "ERROR: --fp8-device: 'tpu' is unknown; known: cpu, cuda"),
        (
            ["--fp8-profile=fast"],
            "*--fp8-profile: 'fast' is unknown; known: quick, default*",
        ),
        (["--fp8-seed=x"], "ERROR: --fp8-seed: must be an integer, got 'x'"),
        (["--fp8-plant=nothing"], "*a fault is named package.module:fault, got 'nothing'"),
        (["--fp8-plant=fake:nothing"], "*can't plant 'fake:nothing': *no attribute 'nothing'*"),
        (["--fp8-plant=fake:factor"], "*can't plant 'fake:factor': a int can't be called"),
        (["--fp8-expectations=none.toml"], "*--fp8-expectations: there is no file *none.toml"),
        (["--fp8-tensors=none.safetensors"], "*--fp8-tensors: there is no file *none.safetensors"),
    ],
)
def test_a_mistaken_option_stops_before_any_test(run: Run, args: list[str], message: str) -> None:
    result = run(GOOD, *args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])
    result.stdout.no_fnmatch_line("*test_it.py*")


def test_cuda_must_be_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = run(GOOD, "--fp8-device=cuda")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --fp8-device: cuda: this torch sees no CUDA device; known here: cpu"]
    )


SHOWS = """
    def test_shows(device, profile, fp8_seed, fp8_plant, fp8_tensors):
        print("shown:", device, profile, fp8_seed, fp8_plant, *[p.name for p in fp8_tensors], ".")
"""


def test_options_by_default(run: Run) -> None:
    run(SHOWS, "-s", target=None).stdout.fnmatch_lines(["*shown: cpu default 0 None ."])


def test_options_from_the_command_line(run: Run, pytester: pytest.Pytester) -> None:
    for name in ("a", "b"):
        pytester.path.joinpath(f"{name}.safetensors").touch()
    result = run(
        SHOWS, "-s", "--fp8-device=cpu", "--fp8-profile=nightly", "--fp8-seed=-3",
        "--fp8-plant=contextlib:nullcontext", "--fp8-tensors=a.safetensors",
        "--fp8-tensors=b.safetensors",
    )  # fmt: skip
    result.stdout.fnmatch_lines(
        ["*shown: cpu nightly -3 contextlib:nullcontext a.safetensors b.safetensors ."]
    )


def test_options_from_the_ini_file(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makefile(".toml", expectations="schema = 1")
    pytester.path.joinpath("a.safetensors").touch()
    pytester.makepyprojecttoml(
        """
        [tool.pytest.ini_options]
        fp8_target = ["fake:target"]
        fp8_device = "cpu"
        fp8_profile = "quick"
        fp8_seed = "5"
        fp8_plant = "contextlib:nullcontext"
        fp8_expectations = "expectations.toml"
        fp8_record = "record.json"
        fp8_tensors = ["a.safetensors"]
        """
    )
    result = run(SHOWS + GOOD, "-s", target=None)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        ["fp8: targets fake:target",
         "fp8: device cpu, profile quick, seed 5, plant contextlib:nullcontext",
         "fp8: expectations *expectations.toml (0)",
         "fp8: tensors *a.safetensors",
         "*shown: cpu quick 5 contextlib:nullcontext a.safetensors ."]
    )  # fmt: skip
    assert pytester.path.joinpath("record.json").is_file()
    # the command line wins
    run(SHOWS, "-s", "--fp8-seed=6", target=None).stdout.fnmatch_lines(["*shown: cpu quick 6 *"])


def test_help_lists_every_option(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest("--help")
    for name in (
        "target", "device", "profile", "seed", "plant", "expectations", "record", "tensors",
    ):  # fmt: skip
        result.stdout.fnmatch_lines([f"*--fp8-{name}=*", f"  fp8_{name} (*"])


# ----------------------------------------------------------------- what fails a test


def test_failure_can_be_reproduced_from_its_own_message(
    run: Run, pytester: pytest.Pytester
) -> None:
    result = run(
        MIXED, "--fp8-seed=4", "--fp8-plant=fake:triples", "--fp8-record=r.json", "-k", "doubles"
    )
    command = (
        'python -m pytest "test_it.py::test_doubles[fake:target-2]" --fp8-target=fake:target '
        "--fp8-seed=4 --fp8-plant=fake:triples"
    )
    result.stdout.fnmatch_lines(
        [
            'E*LawViolation: P05 "Exact arithmetic" is broken by fake:target',
            "E*check: y",
            "E*case: n=2 device=cpu python=3.*",
            "E*first wrong element: ?0? expected 2.0, got 3.0",
            "E*wrong: 2 of 2 elements",
            "E*law: Small integers*",
            f"E*reproduce: {command.replace('[', '?').replace(']', '?')}",
        ]
    )
    # the frames of the judge are no part of the traceback
    result.stdout.no_fnmatch_line("*laws.py*")
    words = re.findall(r'"[^"]*"|\S+', command)[3:]
    again = pytester.runpytest("-o", "pythonpath=.", *(word.strip('"') for word in words))
    again.assert_outcomes(failed=1)


def test_comparing_nothing_fails(run: Run) -> None:
    result = run(
        """
        @pytest.mark.law("P05")
        def test_empty(judge, target):
            judge.bitwise("P05", "y", np.ones((0, 3)), np.ones((0, 3)))
        @pytest.mark.law("P05")
        def test_only_ran(judge, target):
            judge.attempt("P05", "y", lambda: target.double(1))
        @pytest.mark.law("P05")
        def test_skips(judge, target):
            pytest.skip("for a reason of its own")
        """
    )
    result.assert_outcomes(failed=2, skipped=1)
    result.stdout.fnmatch_lines(
        ["compared nothing: test_it.py::test_empty?fake:target? passed without comparing a value"]
    )
    assert "  2 tests, 2 examples, 0 values compared" in tail_of(result)


def test_an_undeclared_law_is_an_error_of_the_test(run: Run) -> None:
    result = run(
        """
        @pytest.mark.law("P05")
        def test_undeclared(judge):
            judge.equal("P08", "n", 1, 1)
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E*LawUsageError: test_it.py::test_undeclared*compares for law P08 without declaring it*"]
    )


def test_an_unknown_law_stops_collection(run: Run) -> None:
    result = run('@pytest.mark.law("P05", "P99")\ndef test_unknown(judge):\n    pass')
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*test_unknown declares law 'P99', which is unknown; known: P01*"])


# ------------------------------------------------------------------------------- records


def test_record_holds_what_was_measured(run: Run, pytester: pytest.Pytester) -> None:
    result = run(MEASURES, "--fp8-record=out/record.json", "--fp8-seed=9")
    result.stdout.fnmatch_lines(["record: 4 measurements in *record.json"])
    data = json.loads(pytester.path.joinpath("out/record.json").read_text())
    assert data["schema"] == 1
    assert data["environment"]["seed"] == "9"
    assert data["laws"] == {"fake:target": {"P05": 4}}
    assert [(m["test"], m["name"], m["value"], m["facts"]) for m in data["measurements"]] == [
        ("test_it.py::test_measures[fake:target-1]", "doubled", 2, {"k": 1}),
        ("test_it.py::test_measures[fake:target-1]", "doubled #2", 20, {"k": 10}),
        ("test_it.py::test_measures[fake:target-2]", "doubled", 4, {"k": 2}),
        ("test_it.py::test_measures[fake:target-2]", "doubled #2", 40, {"k": 20}),
    ]
