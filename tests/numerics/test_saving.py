"""What is saved and restored: copies, state_dicts, files, other processes give the same bits.

A converted layer's state is nn.Linear's, nothing less and nothing more, so it goes through every
way of saving a module, and to and from a model that was never converted.
"""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch

from fp8.testing import models, oracle


@pytest.fixture(params=tuple(oracle.RECIPES))
def recipe(request, target, judge):
    return models.require_recipe(judge, target, request.param)


def _through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def _through_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": _through_pickle,
    "torch.save": _through_torch_save,
}


@pytest.mark.law("P17")
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("when", ["before the first pass", "after a pass"])
def test_copies_are_the_same(target, recipe, how, when, judge, fp8_seed):
    """A copy has the same keys and bits, gives the same pass, and stands on its own."""
    judge.example(recipe=recipe, dtype="bfloat16", copy=how, when=when)
    model = target.convert(models.mlp(target, dtype="bfloat16"), recipe)
    x, g = models.mlp_batch(target, dtype="bfloat16", seed=70 + fp8_seed)
    if when == "after a pass":
        models.one_pass(model, x, g)
    copied = COPIES[how](model)
    original, state = model.state_dict(), copied.state_dict()
    judge.equal("P17", "keys of a copy", list(state), list(original))
    judge.bitwise("P17", "weights of a copy", list(state.values()), list(original.values()))
    judge.equal("P17", "repr of a copy", repr(copied), repr(model))
    expected = models.one_pass(model, x, g)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    models.same_pass(judge, "P17", "pass of a copy", models.one_pass(copied, x, g), expected)


@pytest.mark.law("P17")
def test_state_dict_is_nn_linears(target, recipe, judge, fp8_seed):
    """The state_dict is nn.Linear's: plain tensors under the same keys, and it loads either way."""
    judge.example(recipe=recipe, dtype="bfloat16")
    plain = models.mlp(target, dtype="bfloat16", seed=1)
    converted = target.convert(models.mlp(target, dtype="bfloat16", seed=2), recipe)
    x, g = models.mlp_batch(target, dtype="bfloat16", seed=80 + fp8_seed)
    models.one_pass(converted, x, g)
    state = converted.state_dict()
    judge.equal("P17", "keys", list(state), list(plain.state_dict()))
    judge.equal("P17", "plain tensors", {type(t) for t in state.values()}, {torch.Tensor})
    judge.equal("P17", "dtypes", [t.dtype for t in state.values()], [torch.bfloat16] * len(state))
    # To nn.Linear.
    loaded = models.mlp(target, dtype="bfloat16", seed=3)
    loaded.load_state_dict(state, strict=True)
    unconverted = models.mlp(target, dtype="bfloat16", seed=2)
    models.same_pass(
        judge,
        "P17",
        "to nn.Linear",
        models.one_pass(loaded, x, g),
        models.one_pass(unconverted, x, g),
    )
    # And from it.
    converted.load_state_dict(plain.state_dict(), strict=True)
    expected = models.fresh_mlp(target, recipe, "bfloat16", plain.state_dict())
    models.same_pass(
        judge,
        "P17",
        "from nn.Linear",
        models.one_pass(converted, x, g),
        models.one_pass(expected, x, g),
    )


@pytest.mark.law("P17")
@pytest.mark.parametrize("optimizer", models.OPTIMIZERS)
def test_resume_equals_uninterrupted(target, recipe, optimizer, judge, fp8_seed):
    """Two steps, a checkpoint file, a new model, two more steps: as four steps without a break."""
    judge.example(recipe=recipe, dtype="float32", optimizer=optimizer)

    def train(model, stepper, steps) -> models.Pass:
        for step in steps:
            x, g = models.mlp_batch(target, dtype="float32", seed=90 + step + fp8_seed)
            run = models.one_pass(model, x, g)
            stepper.step()
        return run

    def start(seed: int):
        model = target.convert(models.mlp(target, dtype="float32", seed=seed), recipe)
        return model, models.OPTIMIZERS[optimizer](model.parameters())

    uninterrupted = train(*start(1), range(4))
    model, stepper = start(1)
    train(model, stepper, range(2))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": stepper.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model, stepper = start(2)
    model.load_state_dict(saved["model"])
    stepper.load_state_dict(saved["optimizer"])
    models.same_pass(judge, "P17", "resumed", train(model, stepper, range(2, 4)), uninterrupted)


#: Runs in a fresh process: what was saved there must be enough to give the same bits here.
_CHILD = """
import json, sys
from pathlib import Path

import torch

from fp8.targets import load
from fp8.testing import models
from fp8.testing.planting import planted

folder = Path(sys.argv[1])
task = json.loads((folder / "task.json").read_text())
torch.set_num_threads(task["threads"])
with planted(task["plant"]):
    target = load(task["target"], task["device"])
    for recipe in task["recipes"]:
        saved = torch.load(folder / f"{recipe}.pt", weights_only=True)
        model = target.convert(models.mlp(target, dtype="bfloat16", seed=5), recipe)
        model.load_state_dict(saved["state"], strict=True)
        unpickled = torch.load(folder / f"{recipe}.model.pt", weights_only=False)
        passes = {
            name: models.one_pass(m, saved["x"], saved["g"]).tensors()
            for name, m in (("weights", model), ("module", unpickled))
        }
        torch.save(passes, folder / f"{recipe}.out.pt")
"""


def _in_child(folder, target, recipes, plant) -> subprocess.CompletedProcess[str]:
    task = {
        "target": target.name,
        "device": str(target.device),
        "recipes": recipes,
        "plant": plant,
        "threads": torch.get_num_threads(),
    }
    (folder / "task.json").write_text(json.dumps(task))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-c", _CHILD, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.law("P17")
def test_restored_in_a_fresh_process(target, judge, profile, fp8_plant, fp8_seed, tmp_path):
    """weights_only loading, and a pickled module, give the same output and gradients elsewhere.

    One process for all recipes: it is the import of torch that takes the time.
    """
    recipes = sorted(target.capabilities().recipes)
    judge.require(bool(recipes), "convert: no recipe")
    skip = profile == "quick" and fp8_plant is None
    judge.require(not skip, "profile quick: starts no process")
    expected = {}
    for recipe in recipes:
        model = target.convert(models.mlp(target, dtype="bfloat16"), recipe)
        x, g = models.mlp_batch(target, dtype="bfloat16", seed=95 + fp8_seed)
        models.one_pass(model, x, g)
        torch.optim.AdamW(model.parameters(), lr=0.01).step()
        torch.save(model, tmp_path / f"{recipe}.model.pt")
        saved = {"state": model.state_dict(), "x": x, "g": g}
        torch.save(saved, tmp_path / f"{recipe}.pt")
        expected[recipe] = models.one_pass(model, x, g).tensors()
    child = _in_child(tmp_path, target, recipes, fp8_plant)
    failed = f"it failed: {child.stderr[-2000:]}"
    if not judge.true("P17", "fresh process", child.returncode == 0, failed):
        return
    for recipe in recipes:
        judge.example(recipe=recipe, dtype="bfloat16")
        restored = torch.load(tmp_path / f"{recipe}.out.pt", weights_only=True)
        for source, tensors in restored.items():
            for name, tensor in tensors.items():
                check = f"{source} in a fresh process: {name}"
                judge.bitwise("P17", check, tensor, expected[recipe][name])
