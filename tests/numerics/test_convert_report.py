"""The reference's conversion: its report, filters and `tokens`, and the watch on what really runs.

Every Linear of a model is in the report, converted or kept and why; a converted layer that never
runs float8 is found out by `fp8.watch`.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import fp8
from fp8.testing import models, oracle

# Tiny layers, on purpose; tests/meta/test_regime_data.py has the warnings.
pytestmark = pytest.mark.filterwarnings("ignore::fp8.regimes.RegimeWarning")

WIDTH = 32
#: what becomes of each Linear of `Zoo`: None where it is converted, else what the reason mentions
ZOO = {
    "plain": None,
    "nested.0": None,
    "nested.2": None,
    "shared": None,
    "tied": None,
    "tagged": None,
    "own": "forward of its own",
    "patched": "forward of its own",
    "attention.out_proj": "never called",
    "encoder.self_attn.out_proj": "never called",
    "encoder.linear1": None,
    "encoder.linear2": None,
    "wide": "float64",
    "lazy": "lazy",
    "normed": "parametrized",
}


class Doubled(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, input):
        return 2 * super().forward(input)


class Tagged(nn.Linear):
    """A subclass without one."""


class Zoo(nn.Module):
    """Linear layers of every kind, among modules that are none."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.plain = nn.Linear(WIDTH, 48)
        self.nested = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 40, bias=False))
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.again = self.shared
        self.tied = nn.Linear(WIDTH, 48)
        self.tied.weight = self.plain.weight
        self.tagged = Tagged(WIDTH, 48)
        self.own = Doubled(WIDTH, 48)
        self.patched = nn.Linear(WIDTH, 48)
        self.patched.forward = lambda x: x
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 48, batch_first=True, dropout=0.0)
        self.wide = nn.Linear(WIDTH, 48, dtype=torch.float64)
        self.lazy = nn.LazyLinear(48)
        self.normed = weight_norm(nn.Linear(WIDTH, 48))
        self.convolution = nn.Conv1d(3, 3, 1)


@pytest.fixture
def convert(target, judge):
    """`fp8.convert` with the target's backend."""
    judge.require(target.capabilities().reports_conversion, "convert: gives no report")
    return partial(fp8.convert, backend=target.backend)


@pytest.fixture(params=tuple(oracle.RECIPES))
def recipe(request, target, judge):
    return models.require_recipe(judge, target, request.param)


def float8_layers(model: nn.Module) -> set[str]:
    return {name for name, m in model.named_modules() if isinstance(m, fp8.Float8Linear)}


# --- the report ---------------------------------------------------------------------------------


@pytest.mark.law("P13")
def test_every_linear_is_reported(convert, recipe, target, judge):
    """The converted set is exactly the expected one, and every other layer says why it was kept."""
    judge.example(recipe=recipe)
    model = Zoo().to(target.device)
    types = {name: type(m) for name, m in model.named_modules()}
    report = convert(model, recipe)
    expected = [name for name, reason in ZOO.items() if reason is None]
    judge.equal("P13", "report's recipe", report.recipe, recipe)
    judge.equal("P13", "reported", sorted(layer.name for layer in report.layers), sorted(ZOO))
    judge.equal("P13", "report's converted", sorted(report.converted), sorted(expected))
    judge.equal("P13", "converted modules", float8_layers(model), set(expected))
    judge.true("P13", "shared module", model.again is model.shared, "it is two modules now")
    for layer in report.layers:
        module = model.get_submodule(layer.name)
        extents = (layer.in_features, layer.out_features)
        judge.equal("P13", "extents", extents, (module.in_features, module.out_features))
        judge.equal("P13", "state", layer.converted, ZOO[layer.name] is None)
        if layer.converted:
            judge.equal("P13", "recipe of a layer", module.recipe.name, recipe)
            judge.equal("P13", "backend of a layer", module.backend, target.backend)
        else:
            kept = ZOO[layer.name] in report.kept[layer.name]
            judge.true("P13", "reason", kept, f"{layer.name}: {layer.reason!r}")
            judge.equal("P13", "class of a kept layer", type(module), types[layer.name])
    text = str(report)
    missing = [name for name in ZOO if name not in text]
    judge.equal("P13", "layers missing in the text", missing, [])
    count = f"{len(expected)} of {len(ZOO)}"
    judge.true("P13", "count in the text", count in text, f"no {count!r} in {text}")


@pytest.mark.law("P13")
def test_second_report(convert, recipe, target, judge):
    """A second call converts nothing, is no error, and says that the layers are float8 already."""
    judge.example(recipe=recipe)
    model = models.mlp(target, dtype="bfloat16")
    convert(model, recipe)
    modules = dict(model.named_modules())
    for other in sorted(target.capabilities().recipes):
        report = convert(model, other)
        judge.equal("P13", "converted again", report.converted, ())
        said = [recipe in reason and "already" in reason for reason in report.kept.values()]
        judge.equal("P13", "reasons", said, [True, True])
        judge.equal("P13", "recipes", {model[i].recipe.name for i in (0, 2)}, {recipe})
        same = all(modules[name] is m for name, m in model.named_modules())
        judge.true("P13", "modules", same, "modules were replaced")


@pytest.mark.law("P13")
def test_partial_then_whole(convert, target, judge):
    """Converting one layer by one recipe and the rest by another."""
    recipes_known = sorted(target.capabilities().recipes)
    judge.require(len(recipes_known) > 1, "convert: no two recipes")
    one, *_, other = recipes_known
    judge.example(recipe=one, other=other)
    model = models.mlp(target, dtype="bfloat16")
    convert(model, one, filter_fn=lambda _, name: name == "0")
    report = convert(model, other)
    judge.equal("P13", "converted", report.converted, ("2",))
    recipes = (model[0].recipe.name, model[2].recipe.name)
    judge.equal("P13", "recipes", recipes, (one, other))


# --- filters ------------------------------------------------------------------------------------


@pytest.mark.law("P13")
def test_filters(convert, target, judge):
    """By name and by shape; asked once for each layer that can be converted, and only for those."""
    judge.example(filter="by name")
    model = Zoo().to(target.device)
    asked = []

    def by_name(module, name):
        asked.append((name, module is model.get_submodule(name)))
        return name.startswith("nested")

    report = convert(model, filter_fn=by_name)
    judge.equal("P13", "by name", float8_layers(model), {"nested.0", "nested.2"})
    judge.equal("P13", "report by name", set(report.converted), {"nested.0", "nested.2"})
    can = sorted(name for name, reason in ZOO.items() if reason is None)
    judge.equal("P13", "asked", sorted(asked), [(name, True) for name in can])
    filtered = sorted(name for name, reason in report.kept.items() if reason == "filter_fn")
    judge.equal("P13", "filtered", filtered, sorted(set(can) - {"nested.0", "nested.2"}))

    judge.example(filter="by shape")
    model = Zoo().to(target.device)
    convert(model, filter_fn=lambda module, _: module.out_features >= 64)
    judge.equal("P13", "by shape", float8_layers(model), {"nested.0"})


@pytest.mark.law("P13")
def test_a_filter_that_matches_nothing(convert, target, judge):
    """It is an error that names the filter and the layers, and nothing was converted."""
    judge.example(filter="nothing")
    model = models.mlp(target, dtype="bfloat16")
    judge.raises(
        "P13",
        "nothing matched",
        lambda: convert(model, filter_fn=lambda *_: False),
        ValueError,
        ("filter_fn", "0", "2"),
    )
    judge.equal("P13", "converted nevertheless", float8_layers(model), set())
    # After everything was converted, nothing is left to be matched: no error.
    convert(model)
    report = convert(model, filter_fn=lambda *_: False)
    judge.equal("P13", "converted again", report.converted, ())


# --- tokens -------------------------------------------------------------------------------------


def large_model() -> nn.Module:
    """Layers of a real model's size, on the meta device: they take no memory."""
    with torch.device("meta"):
        return nn.ModuleDict(
            {
                "wide": nn.Linear(8192, 8192, bias=False),
                "medium": nn.Linear(4096, 4096, bias=False),
                "head": nn.Linear(8192, 128, bias=False),
            }
        )


@pytest.mark.law("P13")
def test_tokens(convert, judge):
    """Layers that don't pay at this many tokens are kept, and the report says from when they do."""
    for tokens, expected in ((8192, {"wide", "medium"}), (4096, {"wide"})):
        judge.example(tokens=tokens)
        model = large_model()
        report = convert(model, tokens=tokens)
        judge.equal("P13", "converted at these tokens", float8_layers(model), expected)
        for name, reason in report.kept.items():
            said = str(tokens) in reason and "pays" in reason
            judge.true("P13", "reason", said, f"{name}: {reason!r}")
    judge.example(tokens=None)
    model = large_model()
    report = convert(model)
    judge.equal("P13", "converted without tokens", float8_layers(model), set(model.keys()))
    reasons = {layer.name: layer.reason for layer in report.layers}
    for name, advice in (("wide", "M = 4096"), ("medium", "M = 8192"), ("head", "no M")):
        judge.true("P13", "advice", advice in reasons[name], f"{name}: {reasons[name]!r}")


@pytest.mark.law("P13")
def test_tokens_at_which_nothing_pays(convert, judge):
    """Too few tokens for every layer, or a number that is none: an error, nothing converted."""
    for tokens, said in (
        (1024, "no layer pays"),
        (0, "needs at least 1"),
        (-1, "needs at least 1"),
    ):
        judge.example(tokens=tokens)
        model = large_model()
        words = ("tokens", str(tokens), said)
        judge.raises(
            "P13", "tokens", lambda m=model, t=tokens: convert(m, tokens=t), ValueError, words
        )
        judge.equal("P13", "converted nevertheless", float8_layers(model), set())


@pytest.mark.law("P13")
def test_nothing_left_in_a_deep_model(convert, judge):
    """Hundreds of layers of which none is left are an error like one of which none is left."""
    judge.example(layers=300)
    with torch.device("meta"):
        deep = nn.Sequential(*(nn.Linear(4, 4) for _ in range(300)))
    words = ("filter_fn", "300")
    judge.raises("P13", "filter", lambda: convert(deep, filter_fn=_none), ValueError, words)
    words = ("tokens", "no layer pays")
    judge.raises("P13", "tokens", lambda: convert(deep, tokens=1), ValueError, words)
    judge.equal("P13", "converted nevertheless", float8_layers(deep), set())


def _none(layer: nn.Linear, name: str) -> bool:
    return False


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.law("P13", "P04")
def test_what_is_refused(convert, target, judge):
    """Each error names the argument, what it got and what it needs; nothing was converted."""
    model = models.mlp(target, dtype="bfloat16")
    refused = {
        "root Linear": (ValueError, lambda: convert(model[0]), ("model", "Linear", "Sequential")),
        "no Linear": (ValueError, lambda: convert(nn.GELU()), ("model", "GELU", "without any")),
        "no module": (TypeError, lambda: convert(model[0].weight), ("model", "Parameter")),
        "unknown recipe": (
            ValueError,
            lambda: convert(model, "no-such"),
            ("recipe", "no-such", *oracle.RECIPES),
        ),
        "unknown backend": (
            ValueError,
            lambda: fp8.convert(model, backend="no-such"),
            ("backend", "no-such", "emulated", "torch"),
        ),
    }
    for check, (error, call, mentions) in refused.items():
        judge.example(refused=check)
        law = "P04" if "unknown" in check or check == "no module" else "P13"
        judge.raises(law, check, call, error, mentions)
        judge.equal("P13", "converted nevertheless", float8_layers(model), set())


# --- what really runs ---------------------------------------------------------------------------


@pytest.mark.law("P13")
def test_watch_counts(convert, target, judge):
    """Every call of every converted layer is counted; afterwards the layers are as they were."""
    judge.example(model="mlp")
    model = models.mlp(target, dtype="bfloat16")
    convert(model)
    x, g = models.mlp_batch(target, dtype="bfloat16")
    expected = models.one_pass(model, x, g)
    with fp8.watch(model) as ran:
        judge.equal("P13", "idle before", ran.idle, ("0", "2"))
        model[0](x)
        judge.equal("P13", "idle after one layer", ran.idle, ("2",))
        run = models.one_pass(model, x, g)
        judge.equal("P13", "calls", ran.calls, {"0": 2, "2": 1})
    models.same_pass(judge, "P13", "watched", run, expected)
    left = [name for name, m in model.named_modules() if "forward" in vars(m)]
    judge.equal("P13", "left behind", left, [])
    model(x)
    judge.equal("P13", "calls after the watch", ran.calls, {"0": 2, "2": 1})


@pytest.mark.law("P13")
def test_watch_ends_on_errors(convert, target, judge):
    """An exception in the model leaves no trace of the watch."""
    judge.example(model="mlp", error=True)
    model = models.mlp(target, dtype="bfloat16")
    convert(model)
    x, _ = models.mlp_batch(target, dtype="bfloat16")

    def failing():
        with fp8.watch(model):
            model(x[:, :-1])

    judge.raises("P13", "error in the model", failing, ValueError, ("input",))
    left = [name for name, m in model.named_modules() if "forward" in vars(m)]
    judge.equal("P13", "left behind", left, [])


@pytest.mark.law("P13")
def test_watch_needs_a_converted_model(convert, target, judge):
    """A model without float8 layers: an error that says so, not an empty watch."""
    judge.example(model="mlp")
    model = models.mlp(target, dtype="bfloat16")

    def watch():
        with fp8.watch(model):
            model(models.mlp_batch(target, dtype="bfloat16")[0])

    judge.raises("P13", "unconverted model", watch, ValueError, ("model", "Float8Linear"))
    convert(model)
    with fp8.watch(model) as ran:
        pass
    judge.equal("P13", "idle", ran.idle, ("0", "2"))


@pytest.mark.law("P13")
def test_the_encoders_fast_path_is_found_out(convert, target, judge):
    """TransformerEncoderLayer's fast path reads the weights itself: the watch shows idle layers.

    The fast path steps aside for hooks, which is why the watch uses none.
    """
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 48, batch_first=True, dropout=0.0)
    model = nn.Sequential(models.seeded(layer, 1)).to(target.device)
    report = convert(model)
    warned = [line for line in report.layers if line.converted and "fast path" in line.reason]
    judge.equal(
        "P13", "layers with a warning", [w.name for w in warned], ["0.linear1", "0.linear2"]
    )
    x = models.values(0, 3, 5, WIDTH, dtype="float32", device=target.device)
    judge.example(training=True)
    with fp8.watch(model) as ran:
        model(x)
    judge.equal("P13", "idle in training", ran.idle, ())
    judge.example(training=False)
    model.eval()
    with fp8.watch(model) as ran, torch.no_grad():
        model(x)
    judge.equal("P13", "idle on the fast path", ran.idle, ("0.linear1", "0.linear2"))
