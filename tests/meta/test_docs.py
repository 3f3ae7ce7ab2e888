"""The documentation is true: its examples run, and what it names is there."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import pytest
from click.testing import CliRunner

from fp8 import regimes
from fp8.cli import main
from fp8.targets.base import AccumulationModel, Capabilities, Policy
from fp8.testing import bounds, laws, oracle, strategies
from fp8.testing.expectations import Expectation
from fp8.testing.options import DEVICES, PROFILES

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]
#: the heading of the table of bounds in docs/numerics.md
GAMMA = "accumulation | \N{GREEK SMALL LETTER GAMMA} | K = 128 | K = 4096"
OPTIONS = (
    "target",
    "device",
    "profile",
    "seed",
    "plant",
    "expectations",
    "record",
    "tensors",
    "budget",
)

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def files_of(page: Path) -> dict[str, str]:
    """The blocks that are files, by name: those under a comment ``file: NAME``."""
    return dict(re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", text_of(page), re.DOTALL))


def commands_of(page: Path, program: str) -> list[list[str]]:
    """The words of each command in the page's code that begins with `program`."""
    whole = text_of(page).replace("\\\n", " ")
    found = re.findall(rf"^(?:\$ )?({program} .*)$|`({program} [^`]*)`", whole, re.MULTILINE)
    return [shlex.split(line or inline, comments=True) for line, inline in found]


def table(page: Path, heading: str) -> list[list[str]]:
    """The cells of each row of the table with this heading, code marks removed."""
    pattern = rf"^\| {re.escape(heading)} \|\n\|[ -|]*\n((?:\|.*\n)+)"
    rows = re.search(pattern, text_of(page), re.MULTILINE)
    assert rows is not None, f"{page.name} has no table with the heading {heading!r}"
    lines = [line.strip("|").replace("`", "") for line in rows[1].splitlines()]
    return [[cell.strip() for cell in line.split(" | ")] for line in lines]


def first_column(page: Path, heading: str) -> list[str]:
    return [row[0] for row in table(page, heading)]


# --- the target of docs/targets.md --------------------------------------------------------------


def judge_target(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run some of the suite on the target that docs/targets.md shows, from files in `folder`."""
    command = [
        *(sys.executable, "-m", "pytest", *arguments, "-q", "-p", "no:cacheprovider"),
        *("--color=no", "--fp8-target=mystack_target:Target", "--fp8-profile=quick"),
        f"--fp8-expectations={folder / 'mystack.toml'}",
    ]
    # A worker of pytest-xdist passes its own variables on; this is no worker.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=inherited | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    """A folder with the files of docs/targets.md."""
    for name, text in files_of(DOCS / "targets.md").items():
        tmp_path.joinpath(name).write_text(text, encoding="utf-8")
    return tmp_path


def test_the_target_is_green_with_its_one_deviation(stack: Path) -> None:
    subjects = ("linear", "gradients", "matmul", "scaling", "bad_input", "convert", "memory")
    done = judge_target(stack, *(f"tests/numerics/test_{name}.py" for name in subjects))
    assert done.returncode == 0, done.stdout[-5000:]
    summary = done.stdout[done.stdout.index("fp8: what was checked") :]
    checked = re.search(r"mystack_target:Target: \d+ of \d+ laws checked \((.*)\)", summary)
    assert checked is not None
    wanted = {"P03", "P05", "P08", "P11", "P13", "P14", "P19", "P23", "P26", "P27", "F-ACC"}
    assert wanted <= set(checked[1].split(", "))
    assert "  expected deviations: 1\n    1 x mystack-integers: " in summary


def test_a_defect_in_its_stack_is_found(stack: Path) -> None:
    path = stack / "mystack.py"
    right, wrong = "amax.clamp(min=1e-12)).float()", "amax.clamp(min=1e-12)).bfloat16().float()"
    assert path.read_text(encoding="utf-8").count(right) == 1
    path.write_text(path.read_text(encoding="utf-8").replace(right, wrong), encoding="utf-8")
    done = judge_target(stack, "tests/numerics/test_scaling.py", "-x")
    assert done.returncode == 1, done.stdout[-5000:]
    assert "LawViolation" in done.stdout
    assert "check: scale" in done.stdout


@pytest.mark.parametrize(
    ("heading", "owner"),
    [("field | meaning | default", Capabilities), ("key | meaning", Expectation)],
)
def test_tables_of_the_target_page_have_every_field(heading: str, owner: type) -> None:
    listed = first_column(DOCS / "targets.md", heading)
    assert {name for name in listed if name != "schema"} == {field.name for field in fields(owner)}


def test_policy_tables() -> None:
    page = DOCS / "targets.md"
    assert first_column(page, "field | meaning") == [field.name for field in fields(Policy)]
    models = set(get_args(AccumulationModel))
    assert set(first_column(page, "accumulation | the sum")) == models
    assert set(first_column(DOCS / "numerics.md", GAMMA)) == models


# --- the README's examples ----------------------------------------------------------------------


def test_python_examples_print_what_the_readme_shows() -> None:
    text = text_of(README)
    examples = re.findall(r"(?<!-->)\n```python\n(.*?)```\n\n```text\n(.*?)```", text, re.DOTALL)
    assert examples
    for code, shown in examples:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == shown
    files = files_of(README)
    assert len(examples) + len(files) == text.count("```python\n"), "a block that nothing runs"


def test_the_capture_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in files_of(README).items():
        tmp_path.joinpath(name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (command,) = [words for words in commands_of(README, "fp8 capture") if len(words) > 2]
    done = CliRunner().invoke(main, command[1:])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    assert done.exit_code == 0, done.output
    shown = re.search(r"^mine\.safetensors: .*$", text_of(README), re.MULTILINE)
    assert shown is not None
    assert shown[0] in done.output


# --- what the pages name ------------------------------------------------------------------------

LINK = re.compile(r"\]\(([^)\s]+)\)")
ENVIRONMENT = re.compile(r"tox -e ([\w-]+)")
MARKER = re.compile(r"pytest -m (\w+)")
FILE = re.compile(r"(?<![\w/.-])((?:fp8|tests|tools|docs)/[\w/.-]*\w/?)(?:::(\w+))?")


def test_names_are_found() -> None:
    """Of the patterns below, on the page that has them all: a pattern that finds nothing passes."""
    text = text_of(README)
    assert {words[1] for words in commands_of(README, "fp8")} >= {"diff", "capture"}
    assert {"LICENSE", "docs/targets.md"} <= set(LINK.findall(text))
    assert ("tests/numerics/test_linear.py", "test_tight") in FILE.findall(text)
    assert {"numerics", "numerics-torch214", "numerics-torchao"} <= set(ENVIRONMENT.findall(text))
    assert "numerics" in MARKER.findall(text)


@every_page
def test_options_are_there(page: Path) -> None:
    named = set(re.findall(r"--fp8-([a-z]+)", text_of(page)))
    named |= set(re.findall(r"`fp8_([a-z]+)`", text_of(page)))
    assert named <= set(OPTIONS)
    for device in re.findall(r"--fp8-device[ =](\w+)", text_of(page)):
        assert device in (*DEVICES, "DEVICE")
    for profile in re.findall(r"--fp8-profile[ =](\w+)", text_of(page)):
        assert profile in (*PROFILES, "PROFILE")


def test_the_readme_has_every_option_and_its_ini_twin() -> None:
    rows = table(README, "option | ini key | meaning")
    assert [row[0].replace("=", " ").split()[0] for row in rows] == [f"--fp8-{o}" for o in OPTIONS]
    assert [row[1] for row in rows] == [f"fp8_{option}" for option in OPTIONS]


def test_options_are_those_of_the_plugin(pytestconfig: pytest.Config) -> None:
    known = {name.removeprefix("fp8_") for name in vars(pytestconfig.option) if "fp8_" in name}
    assert known == set(OPTIONS)


def environments() -> set[str]:
    """The names of the environments of tox.ini, factors spelt out."""
    names = set()
    for section in re.findall(r"^\[testenv:(.*)\]$", text_of(ROOT / "tox.ini"), re.MULTILINE):
        parts = re.split(r"\{(.*?)\}", section)
        choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
        names |= {"".join(chosen) for chosen in product(*choices)}
    return names


@every_page
def test_tox_environments_are_there(page: Path) -> None:
    assert set(ENVIRONMENT.findall(text_of(page))) <= environments()


@every_page
def test_markers_are_there(page: Path) -> None:
    config = tomllib.loads(text_of(ROOT / "pyproject.toml"))["tool"]["pytest"]["ini_options"]
    markers = {marker.partition(":")[0] for marker in config["markers"]}
    assert set(MARKER.findall(text_of(page))) <= markers


@every_page
def test_subcommands_are_there(page: Path) -> None:
    for words in commands_of(page, "fp8"):
        assert words[1] in main.commands, " ".join(words)
        known = {name for param in main.commands[words[1]].params for name in param.opts}
        given = {word.partition("=")[0] for word in words[2:] if word.startswith("-")}
        assert given <= known | {"--help", "-h"}, " ".join(words)


@pytest.mark.parametrize("command", [(), ("diff",), ("capture",)], ids=str)
def test_help_runs(command: tuple[str, ...]) -> None:
    code = "from fp8.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *command, "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Usage: " in done.stdout


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(text_of(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in slugs(found), target


def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.replace("`", "").lower()).replace(" ", "-") for h in headings}


@every_page
def test_files_and_tests_are_there(page: Path) -> None:
    for name, test in FILE.findall(text_of(page)):
        assert (ROOT / name).exists(), name
        assert not test or f"def {test}(" in text_of(ROOT / name), f"{name}::{test}"


@every_page
def test_no_path_of_one_machine(page: Path) -> None:
    assert not re.findall(r"(?<![\w.~$)])/(?:home|root|tmp|usr|work|opt)\b.*", text_of(page))


# --- docs/laws.md, docs/regimes.md and docs/numerics.md ---------------------------------------


def tool(name: str) -> ModuleType:
    """A script of tools/, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_laws_page_is_what_the_table_and_the_tests_say() -> None:
    made = tool("make_laws_page").page(laws.LAWS, ROOT)
    assert text_of(DOCS / "laws.md") == made, "run: python tools/make_laws_page.py"


def test_the_regimes_page_is_what_the_file_says() -> None:
    made = tool("make_regimes_page").page(regimes.load())
    assert text_of(DOCS / "regimes.md") == made, "run: python tools/make_regimes_page.py"


def test_markers_are_read_as_pytest_reads_them() -> None:
    source = '@pytest.mark.law("P05", "P08")\ndef test_a(): "@pytest.mark.law(\'P01\')"\n'
    assert tool("make_laws_page").declared_in(source) == {"P05", "P08"}


def test_bounds_are_those_of_the_suite() -> None:
    for model, _, *shown in table(DOCS / "numerics.md", GAMMA):
        assert shown == [f"{bounds.gamma(model, K):.1e}" for K in (128, 4096)], model


def test_predictions_are_the_oracles() -> None:
    formats = {"high precision": None, "e4m3": "e4m3fn", "e5m2": "e5m2"}
    for pair, shown in table(DOCS / "numerics.md", "operands | predicted SQNR"):
        a, b = (formats[name] for name in re.split(r" \W ", pair))
        assert shown == f"{oracle.predicted_sqnr(a, b):.1f}"


def test_limits_are_the_judges() -> None:
    overall, row = laws.QUALITY_OVERALL_DB, laws.QUALITY_ROW_DB
    assert f"≤ {overall:g} dB over all elements, ≤ {row:g} dB for any row" in text_of(
        DOCS / "numerics.md"
    )


def test_what_is_drawn_is_listed() -> None:
    page = DOCS / "numerics.md"
    assert first_column(page, "values | what they are like") == list(strategies.VALUES)
    heading = "magnitudes | powers of two for x, W and grad_output"
    shown = {name: powers.partition(":")[0] for name, powers in table(page, heading)}
    assert shown == {
        name: ", ".join(str(power).replace("-", "\N{MINUS SIGN}") for power in powers)
        for name, powers in strategies.MAGNITUDES.items()
    }
