"""The runner of mutation testing: which mutants count, what a trial runs, what is reported."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("cosmic_ray", reason="the extra `mutation` is not installed")

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"
sys.path.append(str(TOOLS))  # scripts find their neighbours there, and so do their tests

import mutant_report  # noqa: E402
import mutant_trial  # noqa: E402
import mutants  # noqa: E402
import mutate  # noqa: E402

PROGRAM = """\
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os

class A:
    width: int | None = 3

    def f(self, x: int | float) -> float | None:
        if x < 0:
            raise ValueError(f"x: got {x}, needs at least {0}")
        return x + self.width
"""


# --- which mutants count ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("width: int | None", "width: int & None"),
        ("x: int | float", "x: int - float"),
        ("-> float | None", "-> float + None"),
        ("if TYPE_CHECKING", "if not TYPE_CHECKING"),
        ("{0}", "{1}"),
        ("width: int | None = 3", "width: int | None = (2 + 1)"),
    ],
)
def test_what_no_run_shows_is_the_same_program(old, new):
    assert old in PROGRAM
    assert mutants.canonical(PROGRAM.replace(old, new)) == mutants.canonical(PROGRAM)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("= 3", "= 4"),
        ("x < 0", "x <= 0"),
        ("x +", "x -"),
        ("return x", "return 0.0 * x"),
        ("ValueError", "TypeError"),
    ],
)
def test_what_a_run_shows_is_another_program(old, new):
    assert old in PROGRAM
    assert mutants.canonical(PROGRAM.replace(old, new)) != mutants.canonical(PROGRAM)


def test_a_number_is_not_the_equal_number_of_another_type():
    assert mutants.canonical("x = 1") != mutants.canonical("x = 1.0")
    assert mutants.canonical("x = 0.0") != mutants.canonical("x = -0.0")


def test_what_is_no_python_has_no_bytecode():
    assert mutants.canonical("def f(+): pass") is None


def test_a_sample_is_drawn_by_its_seed():
    drawn = mutants.draw(5, 6, ("formats", "quantize"))
    assert drawn == mutants.draw(5, 6, ("formats", "quantize"))
    assert drawn.mutants != mutants.draw(6, 6, ("formats", "quantize")).mutants
    assert len({m.source for m in drawn.mutants}) == 6
    assert {m.place.module for m in drawn.mutants} <= {"formats", "quantize"}


def test_a_change_elsewhere_leaves_the_sample(monkeypatch):
    before = {m.key for m in mutants.draw(5, 20, ("formats",)).mutants}
    longer = mutants.source_of("formats").replace("@data", "assert 1 != 2\n\n\n@data", 1)
    monkeypatch.setattr(mutants, "source_of", lambda _: longer)
    after = {m.key for m in mutants.draw(5, 20, ("formats",)).mutants}
    assert len(before & after) >= 15


def test_all_mutants_of_a_module_are_different_programs():
    drawn = mutants.draw(0, None, ("recipes",))
    codes = [mutants.canonical(m.source) for m in drawn.mutants]
    assert None not in codes
    assert len({*codes, mutants.canonical(mutants.source_of("recipes"))}) == len(codes) + 1
    assert len(codes) + sum(drawn.left_out.values()) == len(mutants.places_of("recipes"))
    assert drawn.left_out[mutants.UNSEEN]  # Operand | None


def test_definitions_have_qualified_names():
    found = mutants.definitions(PROGRAM + "LIMIT: int = 3\n")
    assert [(d.name, d.first, d.last) for d in found] == [
        ("A", 6, 12),
        ("A.f", 9, 12),
        ("LIMIT", 13, 13),
    ]


def test_a_mutant_names_its_line_and_function():
    (mutant,) = [
        m
        for m in mutants.draw(0, None, ("recipes",)).mutants
        if m.place.operator == "core/ReplaceComparisonOperator_NotEq_Eq"
    ]
    assert mutant.name == "Product.__post_init__"
    assert mutant.line == "if (self.a is None) != (self.b is None):"
    assert mutant.becomes == "if (self.a is None) == (self.b is None):"
    assert mutants.source_of("recipes").splitlines()[mutant.number - 1].strip() == mutant.line


# --- known survivors ----------------------------------------------------------------------------


def test_known_survivors_are_of_lines_that_are_there():
    for module, name, line, becomes in mutants.known():
        source = mutants.source_of(module)
        (found,) = [d for d in mutants.definitions(source) if d.name == name]
        text = " ".join(source.splitlines()[found.first - 1 : found.last])
        assert line in " ".join(text.split()), f"{module}.{name}: {line}"
        assert becomes != line


def test_each_known_survivor_is_explained_once():
    entries = tomllib.loads(mutants.KNOWN.read_text(encoding="utf-8"))["mutant"]
    assert len(mutants.known()) == sum(len(entry["becomes"]) for entry in entries)
    assert all(mutants.known().values())


# --- a trial ------------------------------------------------------------------------------------

TRIALS = """
import multiprocessing
import sys
sys.path.insert(0, {tools!r})
import mutant_trial
import mutants

source = mutants.source_of("recipes")
wrong = source.replace("_E5M2_TENSORWISE = Operand(E5M2,", "_E5M2_TENSORWISE = Operand(E4M3FN,")
context = multiprocessing.get_context("fork")  # a server takes longer to start than this takes
for name, text in {{"same": source, "wrong": wrong, "broken": source + "1 / 0"}}.items():
    tests = ("tests/meta/test_recipe_table.py",)
    trial = mutant_trial.Trial("recipes", text, {root!r}, tests=tests)
    reader, writer = context.Pipe(duplex=False)
    context.Process(target=mutant_trial.run, args=(trial, writer)).start()
    kind, what, *_ = reader.recv()
    print(name, kind, what if kind == "killed" else len(what))
"""


def test_a_trial_judges_the_mutant_and_nothing_else(tmp_path):
    """The library's own source passes, by way of the same import; a wrong one is found out."""
    script = tmp_path / "script.py"
    script.write_text(TRIALS.format(tools=str(TOOLS), root=str(ROOT)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert said.keys() == {"same", "wrong", "broken"}, done.stderr[-3000:]
    assert said["same"].startswith("survived ")
    assert said["wrong"].startswith("killed tests/meta/test_recipe_table.py::")
    assert said["broken"].startswith("killed ")
    assert "::" not in said["broken"]


def test_what_a_trial_is_about_is_there():
    assert mutant_trial.ABOUT.keys() == set(mutants.MODULES)
    for names in mutant_trial.ABOUT.values():
        assert all((ROOT / "tests" / "numerics" / f"test_{name}.py").exists() for name in names)
    assert all((ROOT / path).exists() for path in mutant_trial.TESTS)


# --- the report ---------------------------------------------------------------------------------

MUTANT = mutants.Mutant(mutants.Place("scaling", "core/AddNot", 2, ""), "amax", 7, "a", "b", "")


@pytest.mark.parametrize(
    ("said", "killed_by", "seconds"),
    [
        ([("survived", {"test": 1.0}, 30.0)], "", 30.0),
        ([("killed", "test_it", "E: wrong", 2.0)], "test_it", 2.0),
        ([("late", 99.0)], "time", 99.0),
        ([], "death", 0.0),
    ],
    ids=["survived", "killed", "late", "dead"],
)
def test_results_of_trials(said, killed_by, seconds):
    result = mutate.result_of(MUTANT, said, 99.0)
    assert (result.killed_by, result.seconds) == (killed_by, seconds)
    assert str(result) == "fp8/scaling.py:7 amax: a  ->  b"


B0 = ("scaling", "amax", "a", "b0")


def _report(*results):
    made = [
        mutant_report.Result("scaling", "amax", 7, "a", f"b{i}", "core/AddNot", by, "", 1.0, why)
        for i, (by, why) in enumerate(results)
    ]
    return mutant_report.Report(0, tuple(made), {"not Python": 3}, 120.0)


def test_survivors_must_be_explained_and_the_explained_must_survive():
    good = _report(("test_it", ""), ("", "equal"))
    assert good.score == 50.0
    assert good.errors(least=50.0) == []
    assert good.errors(least=50.1) == ["the score is 50.0 %, needs 50.1 %"]
    bad = _report(("test_it", "equal"), ("", ""))
    assert bad.errors(least=0.0) == [
        "survives: fp8/scaling.py:7 amax: a  ->  b1",
        "is said to survive, equal: fp8/scaling.py:7 amax: a  ->  b0",
    ]


def test_explanations_are_found_by_key():
    report = mutant_report.explained(_report(("", ""), ("", "old")), {MUTANT.key: "no", B0: "why"})
    assert [r.why for r in report.results] == ["why", ""]


def test_markdown_has_the_score_and_the_survivors():
    page = mutant_report.as_markdown(_report(("tests/x.py::test_it", ""), ("", "it | is equal")))
    assert "1 of 2 mutants killed, 50.0 %; 1 of 1 survivors explained; 2 minutes. Seed 0." in page
    assert "| fp8/scaling.py | 2 | 1 | 50 % |" in page
    assert "| tests/x.py | 1 |" in page
    assert "| `scaling.amax` | `a` | `b1` | it \\| is equal |" in page
    assert "Left out, 3. 3: not Python." in page


def test_survivors_are_tried_again_alone():
    before = _report(("test_it", ""), ("", ""), ("", ""))
    assert mutant_report.from_json(mutant_report.as_json(before)) == before
    after = _report(("test_new", ""), ("", "equal"))
    both = mutant_report.merged(before, after)
    assert [r.killed_by for r in both.results] == ["test_it", "test_new", ""]
    assert both.seconds == 1.0 + after.seconds
    assert both.left_out == before.left_out


def test_the_page_explains_survivors_as_the_table_does():
    page = (ROOT / "docs" / "mutants.md").read_text(encoding="utf-8")
    known = mutants.known()
    rows = page.partition("| where | line | becomes | why it survives |")[2].splitlines()[2:]
    assert rows
    for row in rows:
        _, where, line, becomes, why, _ = (
            cell.replace("\\|", "|").strip(" `") for cell in re.split(r"(?<!\\)\|", row)
        )
        module, _, name = where.partition(".")
        assert known[module, name, line, becomes] == why
