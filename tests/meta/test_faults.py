"""Planted faults are caught, benign variants are not objected to, and the steps are really used.

A seeded sample runs each time; the whole catalogue is marked slow (`fp8 faults` is quicker: it runs
several at a time and shows the matrix).
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from fp8.commands.faults import command
from fp8.testing import kill_report, killing
from fp8.testing.faults import BENIGN, FAULTS, STEPS, replaced
from fp8.testing.faults.base import BOTH, Benign, owner_of
from fp8.testing.law_table import LAWS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "faults.md"
SEED = 0
SAMPLED = {v.id for drawn in killing.sample(SEED, 20, 5) for v in drawn}


def _cases(catalogue):
    return [
        pytest.param(v, id=name, marks=() if name in SAMPLED else pytest.mark.slow)
        for name, v in catalogue.items()
    ]


def _plan(faults=(), benign=()):
    return killing.Plan(faults, benign, str(ROOT), whole=False)


# --- caught, and not objected to ----------------------------------------------------------------


@pytest.mark.parametrize("fault", _cases(FAULTS))
def test_caught_by_its_law(fault):
    """The claiming law objects, to the fault and not to the reference; the naive flag is right."""
    report = killing.execute(_plan(faults=(fault,)))
    result = report.results[fault.id]
    assert not report.all_errors(), "\n".join(report.all_errors())
    kill = result.kills[fault.law]
    naive = "misses" if result.naive else "sees"
    _say(f"{fault.id}: {fault.law} after {kill.examples} examples: {kill.test}: {kill.check}")
    _say(f"{fault.id}: the naive accuracy test {naive} it")


def _say(line):
    sys.stdout.write(line + "\n")


@pytest.mark.parametrize("variant", _cases(BENIGN))
def test_not_objected_to(variant):
    report = killing.execute(_plan(benign=(variant,)))
    assert not report.all_errors(), "\n".join(report.all_errors())


def test_survivors_are_errors():
    """What its law doesn't catch is an error, which says whether another law does."""
    kept = FAULTS["F187"]  # of conversion: no test of casts can show it
    claim = dataclasses.replace(kept, law="P06")
    with mock.patch.dict(FAULTS, {kept.id: claim}):
        plan = dataclasses.replace(_plan((claim,)), tests=("tests/numerics/test_formats.py",))
        survived = killing.execute(plan).all_errors()
        plan = dataclasses.replace(plan, tests=("tests/numerics/test_convert_report.py",))
        wrong = killing.execute(plan).all_errors()
    assert survived == ["F187: survives: nothing catches it (claimed by P06)"]
    assert wrong == ["F187: claim wrong: P06 does not catch it; caught by P13"]


def test_objections_to_benign_variants_are_errors():
    """What a law objects to isn't benign."""
    cast = FAULTS["F06"]
    other = Benign(cast.id, cast.summary, cast.step, cast.plant, cast.targets)
    with mock.patch.dict(BENIGN, {cast.id: other}), mock.patch.dict(FAULTS):
        del FAULTS[cast.id]
        plan = dataclasses.replace(
            _plan(benign=(other,)), tests=("tests/numerics/test_formats.py",)
        )
        errors = killing.execute(plan).all_errors()
    assert len(errors) == 1
    assert errors[0].startswith("F06: benign, but P06 objects: tests/numerics/test_formats.py::")


# --- the catalogue ------------------------------------------------------------------------------


def test_size():
    assert len(FAULTS) >= 80
    assert len(BENIGN) >= 15


def test_both_numbers():
    """What the project is for: most of the faults go past the usual accuracy test."""
    seen = [f.id for f in FAULTS.values() if not f.naive]
    _say(f"the naive accuracy test sees {len(seen)} of {len(FAULTS)} faults: {', '.join(seen)}")
    assert 0 < len(seen) < len(FAULTS) / 2


@pytest.mark.parametrize("variant", [*FAULTS.values(), *BENIGN.values()], ids=lambda v: v.id)
def test_description(variant):
    assert re.fullmatch(r"[FB]\d{2,3}", variant.id)
    assert variant.step in STEPS
    assert variant.targets
    assert set(variant.targets) <= set(BOTH)
    assert re.fullmatch(r"\S.*\.", variant.summary)
    if variant.id in FAULTS:
        assert variant.law in LAWS
        assert variant.law not in {"P02", "P20", "P21"}  # speed, the suite itself, timing


def test_summaries_differ():
    summaries = [v.summary for v in (*FAULTS.values(), *BENIGN.values())]
    assert len(set(summaries)) == len(summaries)


@pytest.mark.parametrize("variant", [*FAULTS.values(), *BENIGN.values()], ids=lambda v: v.id)
def test_planting_restores_what_it_replaced(variant):
    def held():
        return {step: inspect.getattr_static(*owner_of(step)) for step in STEPS}

    before = held()
    with variant():
        changed = {step for step, value in held().items() if value is not before[step]}
    assert changed == {variant.step}
    assert all(value is before[step] for step, value in held().items())


def test_every_step_has_a_variant():
    used = {v.step for v in (*FAULTS.values(), *BENIGN.values())}
    assert used == set(STEPS)


def test_faults_are_found_by_name():
    from fp8.testing.planting import PlantError, resolve

    assert resolve(FAULTS["F06"].spec) is FAULTS["F06"]
    with pytest.raises(PlantError, match="F999"):
        resolve("fp8.testing.faults:F999")


# --- the steps ----------------------------------------------------------------------------------

#: what a pass of these recipes and backends runs
PASSES = (("tensorwise", "torch"), ("rowwise_with_gw_hp", "emulated"), ("blockwise", "emulated"))


@pytest.mark.parametrize("mode", ["eager", "compiled"])
# dynamo itself instantiates torch.autograd.Function while it traces one (torch 2.13).
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::fp8.regimes.RegimeWarning")  # tiny layers, on purpose
def test_steps_of_a_pass_are_on_its_path(mode):
    """Each step that runs in every pass is looked up anew, in eager code and when compiling."""
    wanted = {step for step, (when, _) in STEPS.items() if when == "pass"}
    reached: set[str] = set()
    with ExitStack() as stack:
        for step in wanted:
            stack.enter_context(replaced(step, partial(_counted, reached, step)))
        for recipe, backend in PASSES:
            _one_pass(recipe, backend, mode)
    assert wanted - reached == set()


def _counted(reached, step, original):
    @torch.compiler.assume_constant_result  # called while tracing, as a constant of the graph
    def mark():
        reached.add(step)
        return 0

    def counted(*args, **kwargs):
        mark()
        return original(*args, **kwargs)

    return counted


def _one_pass(recipe, backend, mode):
    import fp8

    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(48, 24, dtype=torch.bfloat16))
    fp8.convert(model, recipe, backend=backend)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if mode == "compiled" else model
    x = torch.randn(20, 48, dtype=torch.bfloat16, requires_grad=True)
    run(x).backward(torch.randn(20, 24, dtype=torch.bfloat16))
    torch._dynamo.reset()


# --- the command --------------------------------------------------------------------------------


def _invoke(*args):
    return CliRunner(env={"COLUMNS": "200"}).invoke(command, args)


def test_command(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    markdown, data = tmp_path / "report.md", tmp_path / "report.json"
    result = _invoke("--only", "F06", "--markdown", str(markdown), "--json", str(data))
    assert result.exit_code == 0, result.output
    assert "1 of 1 faults caught; the naive accuracy test catches 1 of 1" in result.output
    assert (
        "| F06 | The cast rounds towards zero. | fp8.quantize.cast | P06 |" in markdown.read_text()
    )
    found = json.loads(data.read_text())
    assert found["errors"] == []
    assert found["results"]["F06"]["kills"]["P06"]["examples"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--only", "F999"), "F999"), (("--tests", "tests/nowhere"), "tests/nowhere")],
)
def test_command_without_what_it_needs(monkeypatch, arguments, message):
    monkeypatch.chdir(ROOT)
    result = _invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_matrix():
    """Every law against a fault: who objects, who doesn't."""
    fault = FAULTS["F198"]  # copies lose their recipe
    plan = dataclasses.replace(_plan((fault,)), full=True, tests=("tests/numerics/test_saving.py",))
    report = killing.execute(plan)
    assert set(report.results["F198"].kills) == {"P17"}
    assert report.untested_laws
    assert "| F198 | **" in kill_report.as_markdown(report)


# --- the documentation --------------------------------------------------------------------------


def test_documented_steps():
    documented = re.findall(
        r"^\| `(fp8\.[\w.]+)` \| (\w+) \| (.*) \|$", DOCS.read_text(), re.MULTILINE
    )
    assert {step: (when, what) for step, when, what in documented} == STEPS


def test_documented_example(tmp_path):
    """The example of a third party's fault, word for word: caught, and it alone is to blame."""
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(code.strip().splitlines()) <= 10
    (plant,) = re.findall(r"--fp8-plant (my_\S+)", DOCS.read_text())
    (tmp_path / f"{plant.partition(':')[0]}.py").write_text(code)
    assert _pytest(tmp_path, "--fp8-plant", plant) == 1
    assert _pytest(tmp_path) == 0


def _pytest(folder, *options):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    command += ["--fp8-profile=quick", "--fp8-target=reference[emulated]"]
    command += ["tests/numerics/test_formats.py", "-k", "sixteen and e4m3fn-bfloat16"]
    path = os.pathsep.join([str(folder), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False, capture_output=True)
    return done.returncode
