"""What outlives a step: weights alone. Steps, microbatches, interludes, recomputation.

A layer that quantises afresh each time has no memory: after any history it gives what a layer
converted just now gives with the same weights, bit for bit. Most tests here say just that.
"""

from __future__ import annotations

import copy
import itertools
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8.testing import models, oracle
from fp8.testing.linear_runs import run_layer
from fp8.testing.strategies import LinearArrays, as_tensor
from fp8.testing.tracing import record_products


@pytest.fixture(params=tuple(oracle.RECIPES))
def recipe(request, target, judge):
    return models.require_recipe(judge, target, request.param)


# --- steps --------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.law("P07")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("optimizer", models.OPTIMIZERS)
def test_steps_have_no_memory(target, recipe, optimizer, dtype, judge, fp8_seed):
    """Each of three steps gives what a layer converted just now gives with the current weights."""
    model = target.convert(models.mlp(target, dtype=dtype), recipe)
    stepper = models.OPTIMIZERS[optimizer](model.parameters())
    for step in range(3):
        judge.example(recipe=recipe, dtype=dtype, optimizer=optimizer, step=step)
        x, g = models.mlp_batch(target, dtype=dtype, seed=10 * step + fp8_seed)
        # From step to step the data grows: a stale amax would saturate.
        x, g = x * 2**step, g * 4.0**step
        before = copy.deepcopy(model.state_dict())
        run = models.one_pass(model, x, g)
        expected = models.one_pass(models.fresh_mlp(target, recipe, dtype, before), x, g)
        models.same_pass(judge, "P07", "after steps, as a fresh layer", run, expected)
        stepper.step()
        moved = all(not torch.equal(before[n], p) for n, p in model.state_dict().items())
        judge.true("P07", "weights move", moved, "the optimizer's step left a parameter alone")


@pytest.mark.law("P07")
def test_steps_follow_the_oracle(target, recipe, judge, fp8_seed):
    """Over three optimizer steps the output is as good as the oracle's on the current weights."""
    tokens, width, out = models.aligned(target, 72, 112, 88)
    model = target.convert(models.linear(target, width, out, dtype="bfloat16"), recipe)
    stepper = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        judge.example(recipe=recipe, dtype="bfloat16", M=tokens, K=width, N=out, step=step)
        x = models.values(step + fp8_seed, tokens, width, dtype="bfloat16", device=target.device)
        g = models.values(step + 50, tokens, out, dtype="bfloat16", device=target.device)
        weight, bias = (p.detach().double().cpu().numpy() for p in model.parameters())
        run = models.one_pass(model, x, g)
        xs, gs = x.double().cpu().numpy(), g.double().cpu().numpy()
        rounding = target.policy.bias_rounding
        want = oracle.linear(xs, weight, bias, gs, recipe, dtype="bfloat16", bias_rounding=rounding)
        ideal = oracle.exact_linear(xs, weight, bias, gs)
        got = {"y": run.y, "dx": run.dx, "dw": next(iter(run.gradients.values()))}
        for name, tensor in got.items():
            reference = getattr(want, name).rounded("bfloat16")
            judge.quality(
                "P07", f"{name} at this step", tensor, reference, getattr(ideal, name).value
            )
        stepper.step()


def _by_data(parameter, value):
    parameter.data = value


def _by_data_copy(parameter, value):
    parameter.data.copy_(value)


def _by_copy(parameter, value):
    with torch.no_grad():
        parameter.copy_(value)


def _by_arithmetic(parameter, value):
    with torch.no_grad():
        parameter.mul_(0).add_(value)


def _by_swap(parameter, value):
    torch.utils.swap_tensors(parameter, nn.Parameter(value))


WRITES = {
    ".data =": _by_data,
    ".data.copy_": _by_data_copy,
    "copy_": _by_copy,
    "mul_, add_": _by_arithmetic,
    "swap_tensors": _by_swap,
}


@pytest.mark.law("P07")
@pytest.mark.parametrize("how", WRITES)
def test_every_way_to_write_a_weight_counts(target, recipe, how, judge, fp8_seed):
    """However the weights were written, the next pass uses the new ones, forward and backward."""
    judge.example(recipe=recipe, dtype="bfloat16", write=how)
    model = target.convert(models.mlp(target, dtype="bfloat16"), recipe)
    x, g = models.mlp_batch(target, dtype="bfloat16", seed=3 + fp8_seed)
    models.one_pass(model, x, g)
    new = {n: p * 3 for n, p in models.mlp(target, dtype="bfloat16", seed=7).state_dict().items()}
    model.zero_grad(set_to_none=True)
    for name, parameter in model.named_parameters():
        WRITES[how](parameter, new[name].clone())
    run = models.one_pass(model, x, g)
    expected = models.one_pass(models.fresh_mlp(target, recipe, "bfloat16", new), x, g)
    models.same_pass(judge, "P07", f"weights written by {how}", run, expected)


# --- microbatches -------------------------------------------------------------------------------


def exact_microbatches(count: int, M: int, K: int, N: int, seed: int) -> list[LinearArrays]:
    """Operands whose gradients every recipe gives exactly, in every dtype, also summed.

    Ones, zeros and sevens: with a 7 in every row and column every scaling group's amax is 7, and
    its scale a power of two (448 = 7 * 2^6, 57344 = 7 * 2^13). The weights are small integers. The
    sum over all the tokens stays below 2^8, so that bfloat16 holds it.
    """
    rng = np.random.default_rng(seed)

    def operand(rows: int, columns: int) -> np.ndarray:
        x = rng.integers(-1, 2, (rows, columns)).astype(np.float64)
        sevens = (np.arange(columns) - np.arange(rows)[:, None]) % min(rows, columns) == 0
        return np.where(sevens, 7.0 * rng.choice([-1, 1], x.shape), x)

    weight = operand(N, K)
    batches = [LinearArrays(operand(M, K), weight, None, operand(M, N)) for _ in range(count)]
    largest = sum(np.abs(b.g).T @ np.abs(b.x) for b in batches).max()
    if largest >= 2**8:
        raise ValueError(f"exact_microbatches: a sum of {largest} does not fit bfloat16")
    return batches


@pytest.mark.law("P07")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("microbatches", [2, 3])
def test_microbatches_add_up(target, recipe, dtype, microbatches, judge, fp8_seed):
    """The gradients of k microbatches are those of the one batch that they make, bit for bit."""
    M, K, N = models.aligned(target, 6, 40, 24)
    judge.example(recipe=recipe, dtype=dtype, M=M, K=K, N=N, microbatches=microbatches)
    batches = exact_microbatches(microbatches, M, K, N, fp8_seed)
    model = target.convert(models.linear(target, K, N, dtype=dtype, bias=False), recipe)
    (weight,) = model.parameters()
    with torch.no_grad():
        weight.copy_(as_tensor(batches[0].w, dtype, target.device))
    inputs, alone = [], []
    for batch in batches:
        x = as_tensor(batch.x, dtype, target.device).requires_grad_()
        model(x).backward(as_tensor(batch.g, dtype, target.device))
        inputs.append(x.grad)
        by_itself = oracle.exact_linear(batch.x, batch.w, None, batch.g)
        alone.append(by_itself.dw.value)
    judge.bitwise("P07", "dw of microbatches", weight.grad, as_tensor(sum(alone), dtype, "cpu"))
    accumulated = weight.grad.clone()
    x, g = (np.concatenate([getattr(b, name) for b in batches]) for name in ("x", "g"))
    whole = run_layer(model, as_tensor(x, dtype, target.device), as_tensor(g, dtype, target.device))
    judge.bitwise("P07", "dw of one batch", accumulated, whole.dw)
    judge.bitwise("P07", "dx of microbatches", torch.cat(inputs), whole.dx)


@pytest.mark.law("P07")
def test_each_microbatch_stands_alone(target, recipe, judge, fp8_seed):
    """Real values: accumulating gives the sum of what fresh layers give, whatever came before."""
    model = target.convert(models.mlp(target, dtype="float32"), recipe)
    state = copy.deepcopy(model.state_dict())
    total: dict[str, torch.Tensor] = {}
    for number in range(3):
        judge.example(recipe=recipe, dtype="float32", microbatch=number)
        x, g = models.mlp_batch(target, dtype="float32", seed=20 + number + fp8_seed)
        x, g = x * 10.0**-number, g * 10.0**-number
        y = model(x)
        y.backward(g)
        fresh = models.one_pass(models.fresh_mlp(target, recipe, "float32", state), x, g)
        judge.bitwise("P07", "y of a microbatch", y.detach(), fresh.y)
        for name, parameter in model.named_parameters():
            grad = fresh.gradients[name]
            total[name] = total[name] + grad if name in total else grad
            judge.bitwise("P07", f"accumulated grad {name}", parameter.grad, total[name])


# --- in between ---------------------------------------------------------------------------------


def _evaluate(model, x):
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()


def _without_grad(model, x):
    with torch.no_grad():
        model(x)


def _inference(model, x):
    with torch.inference_mode():
        model(x)


def _forward_only(model, x):
    model(x)


def _copied(model, x):
    copy.deepcopy(model)(x)


INTERLUDES = {
    "eval": _evaluate,
    "no_grad": _without_grad,
    "inference_mode": _inference,
    "forward without backward": _forward_only,
    "deepcopy": _copied,
}


@pytest.mark.thorough
@pytest.mark.law("P07", "P19")
@pytest.mark.parametrize("interlude", INTERLUDES)
def test_interludes_change_nothing(target, recipe, interlude, judge, fp8_seed):
    """Evaluating on other data between two steps leaves the next step as it would have been."""
    judge.example(recipe=recipe, dtype="bfloat16", interlude=interlude)
    cases = list(itertools.product(oracle.RECIPES, INTERLUDES))
    # Larger than all that training sees, and than all the interludes before this one, since a
    # history may be kept by layer or for the whole process.
    size = 100 * 1.5 ** cases.index((recipe, interlude))

    def train(between) -> tuple[list[models.Pass], list[torch.Tensor]]:
        model = target.convert(models.mlp(target, dtype="bfloat16"), recipe)
        stepper = torch.optim.AdamW(model.parameters(), lr=0.01)
        passes = []
        for step in range(2):
            x, g = models.mlp_batch(target, dtype="bfloat16", seed=30 + step + fp8_seed)
            passes.append(models.one_pass(model, x, g))
            stepper.step()
            other, _ = models.mlp_batch(target, dtype="bfloat16", seed=40 + step)
            if between is not None:
                between(model, other * size)
        return passes, list(model.state_dict().values())

    def interrupt(model, x):
        judge.attempt("P19", f"{interlude} runs", partial(INTERLUDES[interlude], model, x))

    # One after the other, so that what the process remembers of the interludes can't reach both.
    straight, weights = train(None)
    interrupted, got = train(interrupt)
    for ours, theirs in zip(interrupted, straight, strict=True):
        models.same_pass(judge, "P07", "with an interlude", ours, theirs)
    judge.bitwise("P07", "weights after interludes", got, weights)


def _attributes(model: nn.Module) -> dict[str, object]:
    """What a model holds besides the values of its parameters, by name."""
    held: dict[str, object] = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            plain = isinstance(value, bool | int | float | str | tuple | type(None))
            held[f"{name}.{key}"] = value if plain else type(value).__name__
            if isinstance(value, dict):
                held[f"{name}.{key} keys"] = sorted(map(str, value))
        held[f"{name} class"] = sorted(vars(type(module)))
    return held


@pytest.mark.law("P15", "P17")
def test_no_state_grows(target, recipe, judge, fp8_seed):
    """Steps leave no attribute, buffer or key behind, on the modules and on their classes."""
    judge.example(recipe=recipe, dtype="bfloat16")
    model = target.convert(models.mlp(target, dtype="bfloat16"), recipe)
    before, keys = _attributes(model), list(model.state_dict())
    buffers = [name for name, _ in model.named_buffers()]
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        models.one_pass(model, *models.mlp_batch(target, dtype="bfloat16", seed=step + fp8_seed))
        stepper.step()
        judge.equal("P15", "attributes", _attributes(model), before)
        judge.equal("P17", "state_dict keys", list(model.state_dict()), keys)
        judge.equal("P15", "buffers", [name for name, _ in model.named_buffers()], buffers)


# --- recomputation ------------------------------------------------------------------------------

AUTOCAST = ("off", "inside", "outside")


@pytest.mark.law("P15", "P23")
@pytest.mark.parametrize("autocast", AUTOCAST)
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_recompute_equals_forward(target, recipe, reentrant, autocast, judge, fp8_seed):
    """A checkpointed pass gives the plain pass's bits, and multiplies the same codes again."""
    dtype = "bfloat16" if autocast == "off" else "float32"
    judge.example(recipe=recipe, dtype=dtype, reentrant=reentrant, autocast=autocast)
    model = target.convert(models.mlp(target, dtype=dtype), recipe)
    x, g = models.mlp_batch(target, dtype=dtype, seed=60 + fp8_seed)

    def cast(where: str):
        return (
            torch.autocast(target.device.type, torch.bfloat16)
            if where == autocast
            else nullcontext()
        )

    def inner(x):
        with cast("inside"):
            return model(x)

    def plain(x):
        with cast("outside"):
            return inner(x)

    def checkpointed(x):
        with cast("outside"):
            return checkpoint(inner, x, use_reentrant=reentrant)

    def run(forward) -> tuple[models.Pass, list]:
        def passed() -> models.Pass:
            model.zero_grad(set_to_none=True)
            leaf = x.detach().clone().requires_grad_()
            y = forward(leaf)
            y.backward(g.to(y.dtype))
            grads = {n: p.grad for n, p in model.named_parameters()}
            return models.Pass(y.detach(), leaf.grad, grads)

        return record_products(passed)

    ran, result = judge.attempt("P23", f"autocast {autocast}", partial(run, plain))
    if not ran:
        return
    expected, _ = result
    got, products = run(checkpointed)
    models.same_pass(judge, "P15", "checkpointed", got, expected)
    if target.capabilities().hidden_products:
        return
    forward, later = products[:2], products[2:]
    for number, first in enumerate(forward):
        # The product of the recomputation: the same formats, accumulation and shape.
        again = next((p for p in later if p.trace == first.trace), None)
        ran_again = f"product {number} did not run again"
        if not judge.true("P15", "recomputed", again is not None, ran_again):
            continue
        judge.bitwise(
            "P15", f"operands of product {number}", [again.a, again.b], [first.a, first.b]
        )
        judge.bitwise("P15", f"output of product {number}", again.output, first.output)
