"""Fifty training steps of a transformer block end where the oracle's arithmetic says they end.

Three runs from the same weights on the same data: in float64, with the oracle's layers, with the
target's. Float8's noise moves the last two away from the first. How far is compared both ways: a
run that stays too close has left something in high precision. The loss has a ceiling only: whether
it is above or below float64's is chance.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import nn

from fp8.testing import oracle
from fp8.testing.oracle_module import oracle_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

STEPS, MICROBATCHES = 50, 2
#: sequences and tokens of a microbatch; vocabulary; widths. Multiples of 16, for any hardware; the
#: hidden width is more than one block of 128.
SEQUENCES, TOKENS, VOCABULARY, WIDTH, HEADS, HIDDEN = 2, 16, 32, 48, 3, 144
#: Small enough that one code that rounds the other way stays a small difference for 50 steps: at
#: ten times the rate it grows to the size of float8's noise itself.
RATE, MOMENTUM = 0.005, 0.9

# Limits: twice the largest deviation of correct implementations, over 23 seeds of every recipe of
# reference[emulated], reference[torch] and torchao (which rounds rowwise products to bfloat16, and
# so never has the oracle's very codes). One code that rounds the other way, early on, makes about
# as much of a difference as many.
#: distance from float64 over the oracle's; measured 0.986 to 1.022
RATIO = 1.044
#: distance from the oracle's weights over the oracle's distance from float64; measured 0.43
APART = 0.85
#: the same for each parameter on its own; measured 0.54
PARAMETER_APART = 1.1
#: mean loss of the last five steps over the first step's; measured 0.32
CEILING = 0.5

Weights = dict[str, np.ndarray]


class Block(nn.Module):
    """A pre-norm transformer block between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention_norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + self.projection(self.attend(self.qkv(self.attention_norm(x))))
        h = self.mlp_norm(x)
        x = x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))
        return self.head(x)

    def attend(self, qkv: torch.Tensor) -> torch.Tensor:
        batch, length, _ = qkv.shape
        q, k, v = qkv.reshape(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        future = torch.ones(length, length, dtype=torch.bool, device=qkv.device).triu(1)
        weights = scores.masked_fill(future, -math.inf).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(batch, length, WIDTH)


def new_block(seed: int) -> Block:
    """Weights from the seed, by numpy; norms near 1."""
    block, rng = Block(), np.random.default_rng([seed, 0])
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            values = rng.standard_normal(parameter.shape)
            if parameter.dim() == 1:
                values = values / 10 + ("norm.weight" in name)
            elif name != "embedding.weight":
                values = values / math.sqrt(parameter.shape[1])
            parameter.copy_(torch.from_numpy(values))
    return block


def batches(seed: int) -> Iterator[torch.Tensor]:
    """Token sequences (SEQUENCES, TOKENS + 1): each token has a usual and a rarer successor."""
    rng = np.random.default_rng([seed, 1])
    successors = rng.integers(0, VOCABULARY, (VOCABULARY, 2))
    while True:
        tokens = rng.integers(0, VOCABULARY, (SEQUENCES, TOKENS + 1))
        for at in range(TOKENS):
            rarer = (rng.random(SEQUENCES) < 0.2).astype(int)
            tokens[:, at + 1] = successors[tokens[:, at], rarer]
        yield torch.from_numpy(tokens)


@dataclass(frozen=True)
class Run:
    """Weights by name, float64, and the loss of every step."""

    weights: Weights
    losses: list[float]


def train(model: nn.Module, seed: int, device, *, evaluate: bool = False) -> Run:
    """STEPS steps of SGD; gradients of MICROBATCHES add up in each.

    evaluate: look at other data between the microbatches of every tenth step, as training loops do.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    data, losses = batches(seed), []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for microbatch in range(MICROBATCHES):
            tokens = next(data).to(device)
            logits = model(tokens[:, :-1]).double().flatten(0, 1)
            part = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()) / MICROBATCHES
            part.backward()
            loss += part.item()
            if evaluate and microbatch == 0 and step % 10 == 0:
                model.eval()
                with torch.no_grad():
                    model(1 - tokens[:, 1:] % 2)
                model.train()
        optimizer.step()
        losses.append(loss)
    return Run(weights_of(model), losses)


def weights_of(model: nn.Module) -> Weights:
    return {name: p.detach().double().cpu().numpy() for name, p in model.named_parameters()}


def distance(a: Weights, b: Weights) -> float:
    return math.sqrt(sum(float(((a[name] - b[name]) ** 2).sum()) for name in b))


@pytest.fixture(scope="session")
def without_target(fp8_seed) -> Callable[[str], Run]:
    """The runs that know no target, each made once: "float64", or the oracle's by recipe."""

    @functools.cache
    def run(how: str) -> Run:
        block = new_block(fp8_seed)
        return train(
            block.double() if how == "float64" else oracle_model(block, how), fp8_seed, "cpu"
        )

    return run


@pytest.mark.thorough
@pytest.mark.law("P07", "P08", "P26")
@pytest.mark.parametrize("recipe", oracle.RECIPES)
def test_training(target, judge, without_target, fp8_seed, recipe):
    """Every forward, backward and optimizer step of the run is in the distance of its weights."""
    judge.require(recipe in target.capabilities().recipes, f"convert: no recipe {recipe}")
    judge.example(recipe=recipe, dtype="float32", steps=STEPS, seed=fp8_seed)
    block = new_block(fp8_seed).to(target.device)
    start = weights_of(block)
    ran, got = judge.attempt(
        "P07",
        "training",
        lambda: train(target.convert(block, recipe), fp8_seed, target.device, evaluate=True),
    )
    if not ran:
        return
    exact, wanted = without_target("float64"), without_target(recipe)
    judge.equal("P07", "parameters", sorted(got.weights), sorted(exact.weights))
    moved = distance(exact.weights, start)
    noise = distance(wanted.weights, exact.weights)
    judge_noise(judge, got, wanted, exact, moved, noise)
    for name in exact.weights:
        judge_parameter(judge, name, got.weights, wanted.weights, exact.weights)
    last = float(np.mean(got.losses[-5:]))
    message = f"the last losses are {last:.3f}, needs less than {CEILING} of {got.losses[0]:.3f}"
    judge.true("P07", "loss", last < CEILING * got.losses[0], message)


def judge_noise(judge, got: Run, wanted: Run, exact: Run, moved: float, noise: float) -> None:
    """As far from float64 as the oracle, and near the oracle."""
    ours = distance(got.weights, exact.weights)
    ratio = ours / noise
    judge.true(
        "P26",
        "distance from float64",
        1 / RATIO <= ratio <= RATIO,
        f"moved by {ours / moved:.4f} of the way from float64's weights, the oracle by "
        f"{noise / moved:.4f}: a ratio of {ratio:.3f}, needs {1 / RATIO:.3f} to {RATIO:.3f}",
    )
    apart = distance(got.weights, wanted.weights) / noise
    judge.true(
        "P07",
        "distance from the oracle",
        apart <= APART,
        f"{apart:.3f} of the oracle's distance from float64, needs {APART} or less",
    )


def judge_parameter(judge, name: str, got: Mapping, wanted: Mapping, exact: Mapping) -> None:
    noise = np.linalg.norm(wanted[name] - exact[name])
    apart = np.linalg.norm(got[name] - wanted[name]) / noise
    judge.true(
        "P08",
        f"{name} from the oracle",
        apart <= PARAMETER_APART,
        f"{apart:.3f} of the oracle's distance from float64, needs {PARAMETER_APART} or less",
    )
