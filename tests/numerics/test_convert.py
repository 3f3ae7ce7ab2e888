"""Converting a model changes how its linear layers multiply, and nothing else about it.

The laws hold for every stack, whether it converts in place or gives a copy. What only the
reference promises (its report, filters, `tokens`, `fp8.watch`) is in test_convert_report.py.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from functools import partial

import pytest
import torch
from torch import nn

from fp8.testing import models, oracle
from fp8.testing.tracing import trace_products

DTYPE = "bfloat16"
PRODUCTS = {"y": "output", "dx": "grad_input", "grad 0.weight": "grad_weight"}


class Doubled(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, input):
        return 2 * super().forward(input)


class Tagged(nn.Linear):
    """A subclass without one: everything of nn.Linear's, and something besides."""

    def __init__(self, *args, tag: str = "", **kwargs):
        super().__init__(*args, **kwargs)
        self.tag = tag

    def label(self) -> str:
        return f"{self.tag}: {self.in_features} to {self.out_features}"


@pytest.fixture
def convert(target, judge):
    """Converts by a recipe of the target: these laws don't depend on which."""
    recipes = target.capabilities().recipes
    judge.require(bool(recipes), "convert: no recipe")
    recipe = "tensorwise" if "tensorwise" in recipes else min(recipes)
    return lambda model: target.convert(model, recipe)


@pytest.fixture
def square(target):
    """One extent that the target takes."""
    return models.aligned(target, 48)[0]


def on(target, model):
    """The model with seeded weights, in DTYPE, on the target's device."""
    return models.seeded(model, 1).to(target.device, getattr(torch, DTYPE))


def batch(target, width: int, seed: int = 0) -> torch.Tensor:
    return models.values(seed, 32, width, dtype=DTYPE, device=target.device)


def float8_products(judge, target, model, x) -> int:
    """How many float8 products a forward pass runs."""
    hidden = target.capabilities().hidden_products
    judge.require(not hidden, "its products are hidden from torch's dispatcher")
    with torch.no_grad():
        return sum(p.a.startswith("float8") for p in trace_products(lambda: model(x)))


# --- what is kept -------------------------------------------------------------------------------


@pytest.mark.law("P19")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_parameters_are_kept(target, convert, dtype, judge):
    """Names, values, requires_grad, dtype and device; in place, the very Parameter objects."""
    judge.example(dtype=dtype)
    model = models.mlp(target, dtype=dtype)
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    before = dict(model.named_parameters())
    values = {n: p.detach().clone() for n, p in before.items()}
    flags = {n: (p.requires_grad, p.dtype, p.device) for n, p in before.items()}
    converted = convert(model)
    after = dict(converted.named_parameters())
    judge.equal("P19", "names", list(after), list(before))
    for name, parameter in after.items():
        judge.bitwise("P19", f"value of {name}", parameter.detach(), values[name])
        got = (parameter.requires_grad, parameter.dtype, parameter.device)
        judge.equal("P19", f"requires_grad, dtype and device of {name}", got, flags[name])
    # A copy must leave its original as it was; in place, nothing may be made anew, or an optimizer
    # that exists already would go on with the old parameters.
    owner = dict(model.named_parameters())
    same = [name for name in before if owner[name] is before[name]]
    judge.equal("P19", "the same Parameter objects", same, list(before))
    if converted is model:
        return
    judge.equal(
        "P19", "classes of the original", [type(m) for m in model], [nn.Linear, nn.GELU, nn.Linear]
    )


@pytest.mark.law("P19")
def test_training_mode_is_kept(target, convert, judge):
    """Each layer keeps its own `.training`."""
    judge.example(dtype=DTYPE)
    model = models.mlp(target, dtype=DTYPE)
    model[2].eval()
    converted = convert(model)
    judge.equal("P19", "training", [m.training for m in converted], [True, True, False])
    judge.equal("P19", "training of the whole", converted.training, True)


@pytest.mark.law("P19")
def test_flags_survive_a_change_of_dtype(target, convert, judge):
    """`.to(dtype)` and `.half()` after conversion keep requires_grad, and the layer goes on."""
    x, g = models.mlp_batch(target, dtype="float16")
    for how in ("to", "half"):
        judge.example(dtype="float32", change=how)
        model = models.mlp(target, dtype="float32")
        model[0].weight.requires_grad_(False)
        converted = convert(model)
        changed = converted.to(torch.float16) if how == "to" else converted.half()
        flags = [p.requires_grad for p in changed.parameters()]
        judge.equal("P19", "requires_grad", flags, [False, True, True])
        run = models.one_pass(changed, x, g)
        dtypes = {t.dtype for t in run.tensors().values() if t is not None}
        judge.equal("P19", "dtypes of a pass", dtypes, {torch.float16})


HOOKS = {
    "forward": nn.Module.register_forward_hook,
    "forward pre": nn.Module.register_forward_pre_hook,
    "backward": nn.Module.register_full_backward_hook,
    "backward pre": nn.Module.register_full_backward_pre_hook,
    "state_dict": nn.Module.register_state_dict_post_hook,
}


@pytest.mark.law("P19")
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_are_kept(target, convert, kind, judge):
    """A hook that was registered before conversion fires after it, once a pass."""
    judge.example(dtype=DTYPE, hook=kind)
    model = models.mlp(target, dtype=DTYPE)
    fired = []

    def hook(*_):
        fired.append(kind)

    HOOKS[kind](model[0], hook)
    converted = convert(model)
    models.one_pass(converted, *models.mlp_batch(target, dtype=DTYPE))
    if kind == "state_dict":
        converted.state_dict()
    judge.equal("P19", f"{kind} hook", fired, [kind])


@pytest.mark.law("P19")
def test_parameter_hooks_are_kept(target, convert, judge):
    """Hooks of the parameters themselves, where they are not copied."""
    judge.example(dtype=DTYPE)
    model = models.mlp(target, dtype=DTYPE)
    fired = []
    model[0].weight.register_hook(lambda _: fired.append("grad"))
    model[2].weight.register_post_accumulate_grad_hook(lambda _: fired.append("accumulated"))
    converted = convert(model)
    models.one_pass(converted, *models.mlp_batch(target, dtype=DTYPE))
    # copy.deepcopy drops the hooks of tensors: a copy has none.
    expected = ["accumulated", "grad"] if converted is model else []
    judge.equal("P19", "parameter hooks", sorted(fired), expected)


@pytest.mark.law("P13")
def test_tied_parameters_stay_tied(target, convert, square, judge):
    """Two layers with one weight still have one weight, whose gradient is the sum."""
    judge.example(dtype=DTYPE)
    model, untied = (
        on(target, nn.Sequential(nn.Linear(square, square), nn.GELU(), nn.Linear(square, square)))
        for _ in range(2)
    )
    model[2].weight = model[0].weight
    untied.load_state_dict(model.state_dict())
    model, untied = convert(model), convert(untied)
    judge.true("P13", "tied", model[2].weight is model[0].weight, "there are two weights now")
    x, g = batch(target, square), batch(target, square, seed=1)
    run, apart = (models.one_pass(m, x, g) for m in (model, untied))
    judge.bitwise("P13", "output of tied layers", run.y, apart.y)
    # Autograd adds the later layer's gradient first.
    total = apart.gradients["2.weight"] + apart.gradients["0.weight"]
    judge.bitwise("P13", "gradient of a tied weight", run.gradients["0.weight"], total)


@pytest.mark.law("P13")
def test_shared_modules_stay_shared(target, convert, square, judge):
    """A layer that is in two places is converted in both, and is still one object."""
    judge.example(dtype=DTYPE)
    layer = nn.Linear(square, square)
    model = on(target, nn.Sequential(layer, nn.GELU(), layer))
    model = convert(model)
    judge.true("P13", "shared module: object", model[0] is model[2], "there are two modules now")
    count = float8_products(judge, target, model, batch(target, square))
    judge.equal("P13", "shared module: float8 products", count, 2)


@pytest.mark.law("P13")
def test_other_references_see_the_conversion(target, convert, square, judge):
    """Whoever holds the layer outside the module tree (a list, a closure) has the converted one."""
    judge.example(dtype=DTYPE)
    model = on(target, nn.Sequential(nn.Linear(square, square)))
    model.layers = [model[0]]
    model = convert(model)
    outside = model.layers[0] is model[0]
    judge.true("P13", "module in a list", outside, "the list holds another module than the model")


# --- what is converted --------------------------------------------------------------------------


@pytest.mark.law("P13")
def test_own_forward_is_left_alone(target, convert, square, judge):
    """A subclass that computes something else still computes it."""
    judge.example(dtype=DTYPE, subclass="own forward")
    model = on(target, nn.Sequential(Doubled(square, square), nn.Linear(square, square)))
    x = batch(target, square)
    expected = model[0](x).detach()
    model = convert(model)
    judge.bitwise("P13", "own forward", model[0](x).detach(), expected)


@pytest.mark.law("P13", "P17")
def test_plain_subclasses_keep_their_class(target, convert, square, judge):
    """A subclass without its own forward runs float8, is still what it was, and so are copies."""
    judge.example(dtype=DTYPE, subclass="no forward")
    model = on(target, nn.Sequential(Tagged(square, square, tag="first")))
    model = convert(model)
    x, g = batch(target, square), batch(target, square, seed=1)
    judge.equal("P13", "float8 products", float8_products(judge, target, model, x), 1)
    kept = isinstance(model[0], Tagged) and model[0].label() == f"first: {square} to {square}"
    judge.true("P13", "subclass: class", kept, f"it is a {type(model[0]).__name__} now")
    expected = models.one_pass(model, x, g)
    for how, copied in (
        ("deepcopy", copy.deepcopy(model)),
        ("pickle", pickle.loads(pickle.dumps(model))),
    ):
        judge.equal("P17", f"subclass: class after {how}", type(copied[0]), type(model[0]))
        judge.equal("P17", f"subclass: tag after {how}", vars(copied[0]).get("tag"), "first")
        run = models.one_pass(copied, x, g)
        models.same_pass(judge, "P17", f"subclass: pass after {how}", run, expected)


@pytest.mark.law("P13")
def test_uncalled_layers_are_left_alone(target, convert, square, judge):
    """MultiheadAttention reads its out_proj's weight and never calls it: not a float8 layer."""
    judge.example(dtype=DTYPE)
    attention = nn.MultiheadAttention(square, 2, batch_first=True)
    model = on(target, nn.ModuleList([attention, nn.Linear(square, square)]))
    before = type(attention.out_proj)
    model = convert(model)
    judge.equal("P13", "MultiheadAttention.out_proj", type(model[0].out_proj), before)


@pytest.mark.law("P13")
def test_second_conversion_converts_nothing(target, convert, judge):
    """Converting twice is converting once: the same modules, the same bits."""
    judge.example(dtype=DTYPE)
    model = convert(models.mlp(target, dtype=DTYPE))
    x, g = models.mlp_batch(target, dtype=DTYPE)
    expected, modules = models.one_pass(model, x, g), list(model)
    again = convert(model)
    models.same_pass(judge, "P13", "converted twice", models.one_pass(again, x, g), expected)
    if again is model:
        same = [a is b for a, b in zip(again, modules, strict=True)]
        judge.equal("P13", "modules converted again", same, [True] * len(same))


@pytest.mark.law("P13")
def test_root_linear(target, convert, square, judge):
    """A root that is a Linear: an error that says so, or a converted layer; never a silent no."""
    judge.example(dtype=DTYPE)
    layer = on(target, nn.Linear(square, square))
    if target.capabilities().reports_conversion:
        refused = ("model", "Linear")
        judge.raises("P13", "root Linear", lambda: convert(layer), ValueError, refused)
        return
    count = float8_products(judge, target, convert(layer), batch(target, square))
    judge.equal("P13", "root Linear", count, 1)


@pytest.mark.law("P13")
def test_nothing_to_convert(target, convert, judge):
    """A model without any Linear: an error, since the caller expects float8 to run."""
    judge.example(dtype=DTYPE)
    for model in (nn.Sequential(nn.GELU()), nn.Sequential(), nn.Conv1d(3, 3, 1)):
        judge.raises("P13", "no Linear", lambda m=model: convert(m), ValueError, ("Linear",))


@pytest.mark.law("P13")
def test_unknown_recipe(target, convert, judge):
    """An unknown recipe is refused by its name."""
    judge.example(recipe="no-such")
    kind = ValueError if target.capabilities().refuses_bad_input else Exception
    model = models.mlp(target, dtype=DTYPE)
    judge.raises(
        "P13", "unknown recipe", lambda: target.convert(model, "no-such"), kind, ("no-such",)
    )


@pytest.mark.law("P13")
@pytest.mark.parametrize("recipe", tuple(oracle.RECIPES))
def test_meta_device(target, recipe, judge):
    """Converted on the meta device, then given memory and weights: as if converted with them."""
    models.require_recipe(judge, target, recipe)
    judge.example(recipe=recipe, dtype=DTYPE)
    plain = models.mlp(target, dtype=DTYPE)
    model = target.convert(copy.deepcopy(plain).to("meta"), recipe)
    on_meta = {p.device.type for p in model.parameters()}
    judge.equal("P13", "devices after conversion", on_meta, {"meta"})
    model = model.to_empty(device=target.device)
    model.load_state_dict(plain.state_dict())
    x, g = models.mlp_batch(target, dtype=DTYPE)
    expected = models.one_pass(target.convert(plain, recipe), x, g)
    models.same_pass(judge, "P13", "from meta", models.one_pass(model, x, g), expected)


# --- every switch does something ----------------------------------------------------------------


@pytest.mark.law("P13")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_recipe_changes_what_it_should(target, convert, dtype, judge, fp8_seed):
    """Two recipes differ in exactly those results whose products quantise differently."""
    m, k, n = models.aligned(target, 140, 204, 268)
    x = models.values(1 + fp8_seed, m, k, dtype=dtype, device=target.device)
    g = models.values(2 + fp8_seed, m, n, dtype=dtype, device=target.device)
    x, g = models.uneven(x), models.uneven(g)
    plain = models.linear(target, k, n, dtype=dtype, bias=False)
    with torch.no_grad():
        plain[0].weight.copy_(models.uneven(plain[0].weight))
    runs = {"nn.Linear": models.one_pass(plain, x, g).tensors()}
    table = {"nn.Linear": dict.fromkeys(PRODUCTS.values(), (None, None))}
    for recipe in sorted(target.capabilities().recipes):
        model = target.convert(copy.deepcopy(plain), recipe)
        runs[recipe] = models.one_pass(model, x, g).tensors()
        table[recipe] = {name: spec[:2] for name, spec in oracle.RECIPES[recipe].items()}
    for one, other in itertools.combinations(runs, 2):
        judge.example(dtype=dtype, recipe=one, other=other)
        for result, product in PRODUCTS.items():
            got, reference = runs[one][result], runs[other][result]
            if table[one][product] == table[other][product]:
                judge.bitwise("P13", f"{result} is the same", got, reference)
            else:
                differs = not torch.equal(got, reference)
                judge.true("P13", f"{result} differs", differs, f"{one} and {other} give the same")


@pytest.mark.law("P03")
@pytest.mark.parametrize("recipe", tuple(oracle.RECIPES))
def test_accepted_layers_run(target, recipe, judge):
    """A layer that was converted runs forward and backward, however narrow, with any tokens."""
    models.require_recipe(judge, target, recipe)
    for widths, tokens in itertools.product([(1, 1), (1, 17), (15, 1), (130, 3)], [0, 1, 33]):
        m, k, n = models.aligned(target, tokens, *widths)
        judge.example(recipe=recipe, dtype=DTYPE, M=m, K=k, N=n)
        model = target.convert(models.linear(target, k, n, dtype=DTYPE), recipe)
        x = models.values(m, m, k, dtype=DTYPE, device=target.device)
        g = models.values(m, m, n, dtype=DTYPE, device=target.device)
        ran, run = judge.attempt("P03", "runs", partial(models.one_pass, model, x, g))
        if ran:
            shapes = [tuple(t.shape) for t in run.tensors().values()]
            judge.equal("P03", "shapes", shapes, [(m, n), (m, k), (n, k), (n,)])
