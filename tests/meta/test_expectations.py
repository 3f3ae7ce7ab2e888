"""Expected deviations: the file, what an entry matches, and when it has outlived its reason."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

import pytest

from fp8.claims import ClaimError
from fp8.testing.expectations import Expectations, load_expectations
from fp8.testing.laws import Judge, LawViolation
from fp8.testing.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., pytest.RunResult]

ENTRY = {
    "id": '"tripled"',
    "target": '"fake:target"',
    "law": '"P05"',
    "check": '"y"',
    "when": "{ n = [1, 2] }",
    "reason": '"it triples small numbers"',
    "link": '"https://example.org/issues/1"',
    "expires": "2999-12-31",
    "example": '"test_it.py::test_doubles"',
}


def write(path: Path, *entries: dict[str, str], head: str = "schema = 1") -> Path:
    """An expectations file; an entry's key with the value "" is left out."""
    text = head
    for entry in entries:
        lines = [f"{key} = {value}" for key, value in (ENTRY | entry).items() if value]
        text += "\n[[expectation]]\n" + "\n".join(lines)
    path.write_text(text + "\n", encoding="utf-8")
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "expectations.toml"


# ------------------------------------------------------------------------------ the file


def test_all_fields_are_read(file: Path) -> None:
    (entry,) = load_expectations(write(file, {})).entries
    assert entry.id == "tripled"
    assert entry.when == {"n": [1, 2]}
    assert entry.expires == dt.date(2999, 12, 31)


def test_this_projects_own_file_is_good(pytestconfig: pytest.Config) -> None:
    load_expectations(pytestconfig.rootpath / "expectations.toml")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"severity": '"high"'},
            "expectation 1 .tripled.: unknown key 'severity'; known: id",
        ),
        ({"reason": ""}, "reason is missing"),
        ({"example": ""}, "example is missing"),
        ({"expires": ""}, "expires is missing"),
        ({"reason": '""'}, "reason must be a str, got ''"),
        ({"check": "3"}, "check must be a str, got 3"),
        ({"expires": '"2999-12-31"'}, "expires must be a date, got '2999-12-31'"),
        ({"expires": "2999-12-31T00:00:00"}, "expires must be a date without a time"),
        ({"law": '"P99"'}, "law 'P99' is unknown; known: P01"),
        ({"when": "{ torch = '2.13' }"}, "when.torch must be a PEP 440 specifier, got '2.13'"),
        ({"when": "{ torch = 2 }"}, "when.torch must be a PEP 440 specifier, got 2"),
        ({"when": "{ M = [] }"}, "when.M must be a string, a number, a boolean or a list"),
        ({"when": "{ M = { min = 3 } }"}, "when.M must be .* or a range of at_least and at_most"),
        ({"when": "{ M = {} }"}, "when.M must be .* or a range of at_least and at_most"),
        ({"when": "{ M = { at_most = '3' } }"}, "when.M must be .* or a range of at_least"),
    ],
)
def test_a_wrong_entry_is_refused(file: Path, entry: dict[str, str], message: str) -> None:
    with pytest.raises(ClaimError, match=message):
        load_expectations(write(file, entry))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "schema must be 1, got None"),
        ("schema = 2", "schema must be 1, got 2"),
        ("schema = 1\nwaiver = 3", "unknown key 'waiver'; known: schema, expectation"),
        ("schema = 1\n[expectation]", "must be an array of tables"),
        ("schema = ", "expectations.toml: "),
    ],
)
def test_a_wrong_file_is_refused(file: Path, text: str, message: str) -> None:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ClaimError, match=message):
        load_expectations(file)


def test_an_id_must_be_unique(file: Path) -> None:
    with pytest.raises(ClaimError, match=r"expectation 2 .tripled.: this id was used before"):
        load_expectations(write(file, {}, {}))


# ------------------------------------------------------------------------------ matching


@pytest.mark.parametrize(
    ("when", "facts", "holds"),
    [
        ("{}", {}, True),
        ("{ M = 0 }", {"M": 0}, True),
        ("{ M = 0 }", {"M": 1}, False),
        ("{ M = 0 }", {"K": 0}, False),
        ("{ M = 0 }", {"M": False}, False),
        ("{ bias = true }", {"bias": True}, True),
        ("{ bias = true }", {"bias": 1}, False),
        ("{ M = [0, 1], recipe = 'rowwise' }", {"M": 1, "recipe": "rowwise"}, True),
        ("{ M = [0, 1], recipe = 'rowwise' }", {"M": 1, "recipe": "tensorwise"}, False),
        ("{ M = { at_most = 16 } }", {"M": 16}, True),
        ("{ M = { at_most = 16 } }", {"M": 17}, False),
        ("{ M = { at_least = 16 } }", {"M": 16}, True),
        ("{ M = { at_least = 16 } }", {"M": 15}, False),
        ("{ M = { at_least = 1, at_most = 2 } }", {"M": 3}, False),
        ("{ M = { at_most = 16 } }", {"M": False}, False),
        ("{ M = { at_most = 16 } }", {"M": "few"}, False),
        ("{ M = { at_most = 16 } }", {}, False),
        ("{ torch = '>=2.12' }", {"torch": "2.13.0+cpu"}, True),
        ("{ torch = '<2.13' }", {"torch": "2.13.0+cpu"}, False),
        ("{ torch = '==2.13.0' }", {"torch": "2.13.0+cpu"}, True),
        ("{ torch = '>=2.12' }", {"torch": "2.14.0.dev20260901"}, True),
        ("{ torchao = '>=0.17' }", {"torch": "2.13.0"}, False),
    ],
)
def test_when(file: Path, when: str, facts: dict[str, object], holds: bool) -> None:
    (entry,) = load_expectations(write(file, {"when": when})).entries
    assert entry.holds(facts) is holds


def test_target_law_and_check_must_agree(file: Path) -> None:
    write(file, {"check": '"grad_*"', "when": "{}"})
    expectations = load_expectations(file)

    def found(target: str = "fake:target", law: str = "P05", check: str = "grad_input") -> bool:
        return expectations.find(target, law, check, {}) is not None

    assert found()
    assert not found(target="reference[torch]")
    assert not found(law="P08")
    assert not found(check="y")


def test_a_check_with_brackets_matches_itself(file: Path) -> None:
    (entry,) = load_expectations(write(file, {"check": '"y[0]"', "when": "{}"})).entries
    assert entry.matches("y[0]", {})


def judge_with(expectations: Expectations, tally: Tally) -> Judge:
    return Judge(target="fake:target", laws=["P05"], tally=tally, expectations=expectations)


def test_a_deviation_is_counted_and_the_test_goes_on(file: Path) -> None:
    tally = Tally()
    judge = judge_with(load_expectations(write(file, {})), tally)
    judge.example(n=1)
    assert judge.equal("P05", "y", 2, 3) is False
    assert judge.attempt("P05", "y", lambda: 1 // 0) == (False, None)
    assert judge.raises("P05", "y", lambda: 1, ValueError) is False
    assert judge.equal("P05", "y", 3, 3) is True
    judge.check_compared()
    with pytest.raises(LawViolation):
        judge.equal("P05", "another check", 2, 3)
    judge.example(n=3)
    with pytest.raises(LawViolation):
        judge.equal("P05", "y", 2, 3)
    assert tally.target("fake:target").deviations == {"tripled": 3}
    assert tally.matched == {"tripled": 1}


# --------------------------------------------------------------------------- in a session

DOUBLES = """
    @pytest.mark.law("P05")
    def test_doubles(judge, target):
        for n in (1, 2, 3):
            judge.example(n=n)
            judge.equal("P05", "y", target.double(n), 3 * n if n < 3 else 6)

    @pytest.mark.law("P05")
    def test_right(judge, target):
        judge.example(n=1)
        judge.equal("P05", "y", target.double(1), 2)
"""
RIGHT = DOUBLES.replace("3 * n if n < 3 else 6", "2 * n")


@pytest.fixture
def run_with(run: Run, pytester: pytest.Pytester) -> Run:
    """Run a test file with one expectation."""

    def run_with(source: str, *args: str, **entry: str) -> pytest.RunResult:
        write(pytester.path / "expectations.toml", entry)
        return run(source, "--fp8-expectations=expectations.toml", *args)

    return run_with


def test_expected_deviations_are_in_the_summary(run_with: Run) -> None:
    result = run_with(DOUBLES)
    result.assert_outcomes(passed=2)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["fp8: expectations *expectations.toml (1)",
         "  expected deviations: 2",
         "    2 x tripled: it triples small numbers"]
    )  # fmt: skip


def test_without_the_entry_the_test_fails(run: Run) -> None:
    run(DOUBLES).assert_outcomes(passed=1, failed=1)


def test_a_stale_entry_fails_the_session(run_with: Run) -> None:
    result = run_with(RIGHT)
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    why = "its example ran and all 3 comparisons that it matches passed"
    result.stdout.fnmatch_lines(
        [f"ERROR: expectation 'tripled' is stale: {why}; delete it from *expectations.toml"]
    )


def test_an_entry_that_matches_nothing_is_stale_too(run_with: Run) -> None:
    result = run_with(DOUBLES.replace("(1, 2, 3)", "(3,)"), "-k", "doubles")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["ERROR: *'tripled' is stale: its example ran and it matched none*"]
    )


def test_an_entry_is_not_stale_while_its_example_did_not_run(run_with: Run) -> None:
    result = run_with(RIGHT, "-k", "right")
    result.assert_outcomes(passed=1, deselected=1)
    assert result.ret == 0


@pytest.mark.parametrize(
    "entry", [{"when": "{ n = 1, torch = '<1' }"}, {"target": '"torchao"'}], ids=["when", "target"]
)
def test_an_entry_for_something_else_is_not_stale(run_with: Run, entry: dict[str, str]) -> None:
    assert run_with(RIGHT, **entry).ret == 0


def test_a_planted_fault_makes_nothing_stale(run_with: Run) -> None:
    # what is wrong without the fault is right with it
    result = run_with(
        DOUBLES.replace("else 6", "else 9"), "--fp8-plant=fake:triples", "-k", "doubles"
    )
    result.assert_outcomes(passed=1, deselected=1)
    assert result.ret == 0


def test_an_example_must_exist(run_with: Run) -> None:
    result = run_with(DOUBLES, example='"test_it.py::test_renamed"')
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["ERROR: expectation 'tripled' names an example that isn't there: test_it.py::test_renamed"]
    )


def test_an_expired_entry_warns_and_still_excuses(run_with: Run) -> None:
    result = run_with(DOUBLES, expires="2020-01-01")
    result.assert_outcomes(passed=2, warnings=1)
    assert result.ret == 0
    said = "'tripled' expired on 2020-01-01: see whether https://example.org/issues/1 still stands"
    result.stdout.fnmatch_lines([f"*ExpiredExpectationWarning: expectation {said}*"])


def test_an_expired_entry_is_an_error_where_warnings_are(run_with: Run) -> None:
    result = run_with(DOUBLES, "-Werror", expires="2020-01-01")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: expectation 'tripled' expired on 2020-01-01*"])


def test_a_wrong_file_stops_before_any_test(run_with: Run) -> None:
    result = run_with(DOUBLES, law='"P99"')
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *expectations.toml: expectation 1*'P99' is unknown*"])
