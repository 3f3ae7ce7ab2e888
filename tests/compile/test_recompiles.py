"""Nothing is compiled twice without a reason: over steps, over layers, over numbers of tokens.

A recompilation costs seconds, and dynamo gives up after eight of one function and runs it eagerly,
so that a model quietly becomes slow. The number of graphs is therefore exact, and where it is more
than one the reason stands beside it.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8.testing import models
from fp8.testing.compilations import watched
from fp8.testing.compiled_runs import compiling, count_graphs

STEPS = 5
DEPTH = 6
#: numbers of tokens, of one block of 128 and of several, whole ones and ragged ones
TOKENS = (36, 47, 128, 129, 300, 512, 2)
#: how many graphs TOKENS take with dynamic=True where it is more than one
DYNAMIC_GRAPHS = {
    "blockwise": (4, "scales in blocks of 128 tokens: one block or several, whole or ragged"),
}


def one_step(judge, model, target, tokens: tuple[int, ...], seed: int) -> bool:
    """Forward and backward of a model from WIDTH to OUT features; whether it compiled and ran.

    tokens: the leading dimensions of its input.
    """
    width, out = models.aligned(target, models.WIDTH, models.OUT)
    x = models.values(seed, *tokens, width, dtype="bfloat16", device=target.device)
    g = models.values(seed + 1, *tokens, out, dtype="bfloat16", device=target.device)

    def step() -> None:
        model(x.requires_grad_()).backward(g)

    ran, _ = judge.attempt("P10", "compiles", step)
    return bool(ran)


@pytest.fixture
def mlp(target, recipe):
    return target.convert(models.mlp(target, dtype="bfloat16"), recipe)


@pytest.fixture
def linear(target, recipe):
    width, out = models.aligned(target, models.WIDTH, models.OUT)
    return target.convert(models.linear(target, width, out, dtype="bfloat16"), recipe)


@pytest.mark.law("P10")
def test_steps(target, recipe, mlp, judge, fp8_seed):
    """Five steps of training, new weights and gradients set to None in between, are one graph."""
    judge.example(recipe=recipe, dtype="bfloat16")
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1)
    tokens = models.aligned(target, 36)
    with watched() as seen:
        compiled = compiling("aot_eager")(mlp)
        for step in range(STEPS):
            if not one_step(judge, compiled, target, tokens, 80 + step + fp8_seed):
                return
            optimizer.step()
            optimizer.zero_grad()
            count_graphs(judge, seen, 1, f"after step {step + 1} of {STEPS}, as after the first")


@pytest.mark.law("P10")
def test_evaluation_in_between(target, recipe, mlp, judge, fp8_seed):
    """Evaluating between steps takes a graph of its own, once."""
    judge.example(recipe=recipe, dtype="bfloat16")
    tokens = models.aligned(target, 36)
    x, _ = models.mlp_batch(target, dtype="bfloat16")
    with watched() as seen:
        compiled = compiling("aot_eager")(mlp)
        for step in range(3):
            if not one_step(judge, compiled, target, tokens, 80 + step + fp8_seed):
                return
            compiled.eval()
            with torch.no_grad():
                compiled(x)
            compiled.train()
        count_graphs(judge, seen, 2, "one with gradients in training, one without in evaluation")


@pytest.mark.law("P10")
def test_depth(target, recipe, judge, fp8_seed):
    """Layers of one kind, each compiled on its own, share a graph (pytorch#152307)."""
    judge.example(recipe=recipe, dtype="bfloat16", depth=DEPTH)
    width, tokens = models.aligned(target, models.WIDTH, 36)
    layers = [
        models.linear(target, width, width, dtype="bfloat16", seed=seed)[0] for seed in range(DEPTH)
    ]
    model = target.convert(nn.Sequential(*layers), recipe)
    x, g = (
        models.values(seed + fp8_seed, tokens, width, dtype="bfloat16", device=target.device)
        for seed in (81, 82)
    )
    with watched() as seen:
        for layer in model:
            layer.compile(backend="aot_eager")
        ran, _ = judge.attempt("P10", "compiles", lambda: model(x.requires_grad_()).backward(g))
        if not ran:
            return
        count_graphs(judge, seen, 1, f"for {DEPTH} layers of one kind")


@pytest.mark.law("P10")
def test_tokens_under_dynamic(target, recipe, linear, judge, fp8_seed):
    """With dynamic=True the number of tokens may change without another graph, except to 1."""
    judge.example(recipe=recipe, dtype="bfloat16", dynamic=True)
    graphs, reason = DYNAMIC_GRAPHS.get(recipe, (1, "any number of tokens but 1"))
    with watched() as seen:
        compiled = compiling("aot_eager", dynamic=True)(linear)
        for tokens in TOKENS:
            if not one_step(judge, compiled, target, models.aligned(target, tokens), 83 + fp8_seed):
                return
        count_graphs(judge, seen, graphs, f"{reason}: {', '.join(map(str, TOKENS))}")
        if target.capabilities().alignment == 1:
            one_step(judge, compiled, target, (1,), 83 + fp8_seed)
            count_graphs(judge, seen, graphs + 1, "dynamo treats an extent of 1 as a constant")


@pytest.mark.law("P10")
def test_sequences_under_dynamic(target, recipe, linear, judge, fp8_seed):
    """The same with a batch and a length that both change."""
    judge.example(recipe=recipe, dtype="bfloat16", dynamic=True, dimensions=3)
    with watched() as seen:
        compiled = compiling("aot_eager", dynamic=True)(linear)
        for sizes in ((3, 16), (4, 16), (5, 24), (2, 40)):  # never more than 128 tokens
            if not one_step(judge, compiled, target, sizes, 84 + fp8_seed):
                return
        count_graphs(judge, seen, 1, "any batch and length")


@pytest.mark.law("P10")
def test_tokens_without_dynamic(target, recipe, linear, judge, fp8_seed):
    """By default dynamo takes the second number of tokens for a sign that there are more."""
    judge.example(recipe=recipe, dtype="bfloat16", dynamic=None)
    with watched() as seen:
        compiled = compiling("aot_eager")(linear)
        for tokens in (36, 47, 90, 100):
            if not one_step(judge, compiled, target, models.aligned(target, tokens), 85 + fp8_seed):
                return
        count_graphs(judge, seen, 2, "one for the first number of tokens, one for all the others")
