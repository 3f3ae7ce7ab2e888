"""What a converted layer keeps and computes: no byte saved and no product run that nobody needs.

The model of the memory: a layer that quantises afresh in backward saves its input, for the weight's
gradient, and its weight, for the input's; nn.Linear saves the same two. A layer that saves codes
saves less, and its scales. Parameters are alive anyway and don't count.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8.testing import memory, models, oracle
from fp8.testing.tracing import trace_products

#: off the tiles, all different
M, K, N = 36, 84, 52


@pytest.fixture(params=tuple(oracle.RECIPES))
def recipe(request, target, judge):
    return models.require_recipe(judge, target, request.param)


@pytest.fixture
def visible(target, judge):
    hidden = target.capabilities().hidden_products
    judge.require(not hidden, "its products are hidden from torch's dispatcher")


def extents(target) -> tuple[int, int, int]:
    m, k, n = models.aligned(target, M, K, N)
    return m, k, n


def slack(target, recipe: str) -> int:
    """Bytes beyond nn.Linear's: the scales of x and of W, if a stack saves codes instead.

    A float32 for every scaling group of the output product's two operands.
    """
    m, k, n = extents(target)
    groups = 0
    for operand, rows in zip(oracle.RECIPES[recipe]["output"][:2], (m, n), strict=True):
        block = operand[1]
        groups += -(-rows // (block[0] or rows)) * -(-k // (block[1] or k))
    return 4 * groups


def activation_bytes(layer: nn.Module, x: torch.Tensor, context) -> int:
    """Bytes saved for backward by one forward pass, parameters left out."""

    def forward():
        with context():
            return layer(x)

    # The output is kept while the addresses are compared.
    _, saved = memory.saved_for_backward(forward)
    kept = saved.keys() - memory.parameter_storages(layer).keys()
    return sum(saved[address] for address in kept)


# --- bytes --------------------------------------------------------------------------------------

#: how the input lies; the last one makes every implementation copy it
INPUTS = {
    "matrix": lambda x: x,
    "three dimensions": lambda x: x.unflatten(0, (4, -1)),
    "transposed batch": lambda x: x.unflatten(0, (4, -1)).transpose(0, 1),
}


@pytest.mark.law("P14", "P18")
@pytest.mark.parametrize("shape", INPUTS)
@pytest.mark.parametrize("precision", ["bfloat16", "float32", "autocast"])
def test_saves_no_more_than_nn_linear(target, recipe, shape, precision, judge):
    """Saved for backward: never more than nn.Linear saves in the same precision, plus scales."""
    m, k, n = extents(target)
    dtype = "bfloat16" if precision == "bfloat16" else "float32"
    context = (
        partial(torch.autocast, target.device.type, torch.bfloat16)
        if precision == "autocast"
        else nullcontext
    )
    judge.example(recipe=recipe, precision=precision, shape=shape, M=m, K=k, N=n)
    plain = models.linear(target, k, n, dtype=dtype)
    converted = target.convert(copy.deepcopy(plain), recipe)
    x = models.values(0, m, k, dtype=dtype, device=target.device)
    inputs = [INPUTS[shape](x.clone().requires_grad_()) for _ in range(2)]
    ran, ours = judge.attempt(
        "P18", f"{shape} runs", lambda: activation_bytes(converted, inputs[0], context)
    )
    if not ran:
        return
    theirs = activation_bytes(plain, inputs[1], context)
    judge.record(f"saved {recipe} {precision} {shape}", ours, "bytes")
    budget = theirs + slack(target, recipe)
    message = f"{ours} bytes saved, nn.Linear saves {theirs}, and scales take {budget - theirs}"
    judge.true("P14", "saved bytes", ours <= budget, message)


@pytest.mark.law("P14")
def test_checkpointing_saves_less(target, recipe, judge):
    """Under non-reentrant checkpointing only the block's input is saved."""
    judge.example(recipe=recipe, dtype="bfloat16")
    model = target.convert(models.mlp(target, dtype="bfloat16"), recipe)
    x, _ = models.mlp_batch(target, dtype="bfloat16")
    x.requires_grad_()
    whole = activation_bytes(model, x, nullcontext)
    _, saved = memory.saved_for_backward(lambda: checkpoint(model, x, use_reentrant=False))
    # Autograd may keep the block's output's own bookkeeping, but no activation.
    less = sum(saved.values())
    message = f"{less} bytes saved under checkpointing, {whole} without, the input has {x.nbytes}"
    judge.true("P14", "saved under checkpointing", less <= x.nbytes < whole, message)


@pytest.mark.law("P14")
def test_frozen_layers_save_less(target, recipe, judge):
    """A frozen weight: the input isn't saved. An input without gradient: the weight isn't."""
    m, k, n = extents(target)
    x = models.values(0, m, k, dtype="bfloat16", device=target.device)
    for frozen in ("weight", "input"):
        judge.example(recipe=recipe, dtype="bfloat16", frozen=frozen, M=m, K=k, N=n)
        model = target.convert(models.linear(target, k, n, dtype="bfloat16", bias=False), recipe)
        (weight,) = model.parameters()
        weight.requires_grad_(frozen != "weight")
        leaf = x.clone().requires_grad_(frozen != "input")
        # The output is kept, so that none of its memory is taken for the input's.
        y, saved = memory.saved_for_backward(partial(model, leaf))
        needless = {"weight": leaf, "input": weight}[frozen]
        what = f"{needless.nbytes} bytes of what nobody needs are saved ({frozen} is frozen)"
        kept = memory.storages([needless]).keys() <= saved.keys()
        judge.true("P14", f"saved with frozen {frozen}", not kept, what)
        # Codes or copies of it, neither.
        useful = memory.storages([{"weight": weight, "input": leaf}[frozen]])
        rest = sum(saved[address] for address in saved.keys() - useful.keys())
        budget = slack(target, recipe)
        message = f"{rest} bytes saved besides the {frozen}, scales take {budget} ({y.shape})"
        judge.true("P14", f"saved besides the frozen {frozen}", rest <= budget, message)


@pytest.mark.law("P14")
def test_nothing_else_is_alive_until_backward(target, recipe, judge):
    """Between forward and backward no more is alive than with nn.Linear, but for scales.

    What is saved for backward can be listed; what an autograd node holds besides can't, so this
    counts what is there.
    """
    m, k, n = extents(target)
    judge.example(recipe=recipe, dtype="bfloat16", M=m, K=k, N=n)
    plain = models.linear(target, k, n, dtype="bfloat16")
    converted = target.convert(copy.deepcopy(plain), recipe)
    x = models.values(0, m, k, dtype="bfloat16", device=target.device).requires_grad_()

    def alive_after(layer: nn.Module) -> int:
        layer(x)  # the first call of a product on a GPU allocates its library's workspace
        with memory.growth(target.device, besides=[x, *layer.parameters()]) as alive:
            y = layer(x)
            count = alive()
        del y
        return count

    theirs, ours = alive_after(plain), alive_after(converted)
    allowed = slack(target, recipe)
    if target.device.type == "cuda":
        allowed += 2 * 512  # the allocator's granule, for the scales of x and of W
    message = f"{ours} bytes alive after forward, {theirs} with nn.Linear, scales take {allowed}"
    judge.true("P14", "alive until backward", ours <= theirs + allowed, message)


@pytest.mark.thorough
@pytest.mark.law("P14")
def test_memory_is_flat_over_steps(target, recipe, judge, fp8_seed):
    """Twenty steps leave as many bytes alive as two, with the gradients freed: none."""
    judge.example(recipe=recipe, dtype="bfloat16")
    x, g = models.mlp_batch(target, dtype="bfloat16", seed=fp8_seed)

    def steps(model: nn.Module, count: int) -> None:
        stepper = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(count):
            model(x).backward(g)
            stepper.step()
            stepper.zero_grad(set_to_none=True)

    first, second = (target.convert(models.mlp(target, dtype="bfloat16"), recipe) for _ in range(2))
    # The first call of a product on a GPU allocates its library's workspace.
    steps(first, 1)
    with memory.growth(target.device) as alive:
        after = []
        for count in (2, 18):
            steps(second, count)
            after.append(alive())
    judge.equal("P14", "bytes alive after 2 and after 20 steps", after, [0, 0])


@pytest.mark.law("P14")
def test_conversion_allocates_nothing(target, recipe, judge):
    """Converting in place makes no tensor; converting a copy copies the parameters, once."""
    judge.example(recipe=recipe, dtype="bfloat16")
    model = models.mlp(target, dtype="bfloat16")
    own = sum(memory.parameter_storages(model).values())
    converted, fresh = memory.allocated_by(lambda: target.convert(model, recipe))
    budget = 0 if converted is model else own
    judge.record(f"allocated by conversion {recipe}", fresh, "bytes")
    message = f"{fresh} bytes allocated, the model has {own}, allowed are {budget}"
    judge.true("P14", "bytes allocated by conversion", fresh <= budget, message)
    after = sum(memory.parameter_storages(converted).values())
    judge.equal("P14", "bytes of parameters and buffers", after, own)


# --- products -----------------------------------------------------------------------------------


@pytest.mark.law("P19")
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_requires_grad_matrix(target, recipe, visible, bias, judge, fp8_seed):
    """Every combination of requires_grad: nn.Linear's gradients, no product for a frozen one."""
    m, k, n = extents(target)
    x = models.values(4 + fp8_seed, m, k, dtype="bfloat16", device=target.device)
    g = models.values(5 + fp8_seed, m, n, dtype="bfloat16", device=target.device)
    whole = target.convert(models.linear(target, k, n, dtype="bfloat16", bias=bias), recipe)
    full = models.one_pass(whole, x, g)
    wanted = {"input": full.dx} | {
        name.split(".")[-1]: grad for name, grad in full.gradients.items()
    }
    for flags in product([True, False], repeat=len(wanted)):
        needs = dict(zip(wanted, flags, strict=True))
        named = "+".join(name for name in needs if needs[name])
        judge.example(recipe=recipe, dtype="bfloat16", M=m, K=k, N=n, bias=bias, needs=named)
        model = target.convert(models.linear(target, k, n, dtype="bfloat16", bias=bias), recipe)
        leaves = {"input": x.clone()} | {
            name.split(".")[-1]: p for name, p in model.named_parameters()
        }
        for name, leaf in leaves.items():
            leaf.requires_grad_(needs[name])
        forward = partial(model, leaves["input"])
        y = forward()
        judge.equal("P19", "output requires grad", y.requires_grad, any(flags))
        judge.equal("P19", "products forward", len(trace_products(forward)), 1)
        judge.bitwise("P19", "y", y.detach(), full.y)
        if not any(flags):
            continue
        ran = trace_products(partial(y.backward, g))
        due = needs["input"] + needs["weight"]
        check = "products backward" if due == 2 else "products with something frozen"
        judge.equal("P19", check, len(ran), due)
        for name, leaf in leaves.items():
            expected = wanted[name] if needs[name] else None
            judge.bitwise("P19", f"grad of {name}", leaf.grad, expected)


def _evaluation(model, x):
    model.eval()
    return model(x)


def _no_grad(model, x):
    with torch.no_grad():
        return model(x)


def _inference_mode(model, x):
    with torch.inference_mode():
        return model(x)


@pytest.mark.law("P19")
@pytest.mark.parametrize("mode", [_evaluation, _no_grad, _inference_mode])
def test_without_gradients(target, recipe, visible, mode, judge, fp8_seed):
    """eval(), no_grad and inference_mode give training's output, from one product."""
    judge.example(recipe=recipe, dtype="bfloat16", mode=mode.__name__)
    m, k, n = extents(target)
    model = target.convert(models.linear(target, k, n, dtype="bfloat16"), recipe)
    x = models.values(6 + fp8_seed, m, k, dtype="bfloat16", device=target.device)
    expected = model(x).detach()
    ran, y = judge.attempt("P19", f"{mode.__name__.strip('_')} runs", partial(mode, model, x))
    if not ran:
        return
    judge.bitwise("P19", "output", y.detach(), expected)
    judge.equal("P19", "requires grad", y.requires_grad, mode is _evaluation)
    judge.equal("P19", "products", len(trace_products(partial(mode, model, x))), 1)
