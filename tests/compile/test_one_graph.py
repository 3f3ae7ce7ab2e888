"""One graph, forward and backward, wherever a layer may be; and in it the bits of eager code.

What is judged here is capture, on the backend `aot_eager`: it traces forward and backward as
inductor does and then runs torch's own operators, so that every bit must be eager's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fp8.testing import models
from fp8.testing.compiled_runs import Compile, as_it_is, in_graphs
from fp8.testing.models import Pass

#: from a model and a compiler to what is called
Wrap = Callable[[nn.Module, Compile], Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Context:
    """Where a compiled model is.

    wrap: calls it there. dtype: of its parameters and input. frozen: what needs no gradient,
    "input" or a parameter's name. grad: the grad mode it runs in. graphs, reason: how many graphs
    it takes, and why.
    """

    wrap: Wrap
    model: str = "mlp"
    dtype: str = "bfloat16"
    frozen: str = ""
    grad: type = nullcontext
    graphs: int = 1
    reason: str = "forward and backward are one graph"


def alone(model: nn.Module, compile_: Compile) -> Callable[[Tensor], Tensor]:
    return compile_(model)


def evaluated(model: nn.Module, compile_: Compile) -> Callable[[Tensor], Tensor]:
    return compile_(model.eval())


def around_checkpoint(reentrant: bool, **options) -> Wrap:
    def wrap(model: nn.Module, compile_: Compile) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            return checkpoint(model, x, use_reentrant=reentrant, **options)

        return compile_(forward)

    return wrap


def inside_checkpoint(reentrant: bool) -> Wrap:
    def wrap(model: nn.Module, compile_: Compile) -> Callable[[Tensor], Tensor]:
        return partial(checkpoint, compile_(model), use_reentrant=reentrant)

    return wrap


def _saves_products(context, operator, *args, **rest):
    del context, args, rest
    products = (torch.ops.fp8.scaled_mm.default, torch.ops.aten._scaled_mm.default)
    kept = CheckpointPolicy.MUST_SAVE
    return kept if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


def autocast_outside(model: nn.Module, compile_: Compile) -> Callable[[Tensor], Tensor]:
    compiled = compile_(model)

    def forward(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return compiled(x)

    return forward


def autocast_inside(model: nn.Module, compile_: Compile) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return model(x)

    return compile_(forward)


def data_parallel(model: nn.Module, compile_: Compile) -> Callable[[Tensor], Tensor]:
    """DDP around a compiled model, on one process."""
    return DistributedDataParallel(compile_(model))


CONTEXTS = {
    "linear": Context(alone, model="linear"),
    "linear without bias": Context(alone, model="linear without bias"),
    "mlp": Context(alone),
    "block": Context(alone, model="block"),
    "eval": Context(evaluated),
    "no_grad": Context(alone, grad=torch.no_grad),
    "inference_mode": Context(alone, grad=torch.inference_mode),
    "input without gradient": Context(alone, frozen="input"),
    "frozen weight": Context(alone, frozen="0.weight"),
    "frozen last weight": Context(alone, frozen="2.weight"),
    "frozen bias": Context(alone, frozen="2.bias"),
    "checkpoint": Context(around_checkpoint(False)),
    "reentrant checkpoint": Context(around_checkpoint(True)),
    "selective checkpoint": Context(
        around_checkpoint(
            False, context_fn=partial(create_selective_checkpoint_contexts, _saves_products)
        )
    ),
    "block, checkpoint": Context(around_checkpoint(False), model="block"),
    "in a checkpoint": Context(inside_checkpoint(False)),
    "in a reentrant checkpoint": Context(
        inside_checkpoint(True),
        graphs=2,
        reason="its forward runs without gradients, its recomputation with them",
    ),
    "autocast outside": Context(autocast_outside, dtype="float32"),
    "autocast inside": Context(autocast_inside, dtype="float32"),
    "DDP": Context(data_parallel),
}
#: contexts whose models are large: seconds rather than a fraction of one
THOROUGH = {"block", "block, checkpoint"}


@pytest.fixture
def process_group(tmp_path):
    """A process group of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(target, kind: str, dtype: str, seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """An unconverted model, its input and grad_output."""
    if kind == "block":
        return (
            models.block(target, dtype=dtype),
            *models.block_batch(target, dtype=dtype, seed=seed),
        )
    if kind == "mlp":
        return (models.mlp(target, dtype=dtype), *models.mlp_batch(target, dtype=dtype, seed=seed))
    m, k, n = models.aligned(target, models.TOKENS, models.WIDTH, models.OUT)
    model = models.linear(target, k, n, dtype=dtype, bias=kind == "linear")
    x = models.values(seed, 3, m, k, dtype=dtype, device=target.device)
    return model, x, models.values(seed + 1, 3, m, n, dtype=dtype, device=target.device)


def passed(target, recipe: str, context: Context, seed: int, compile_: Compile) -> Pass:
    """One pass through a new model in its context."""
    model, x, g = make(target, context.model, context.dtype, seed)
    converted = target.convert(model, recipe)
    for name, parameter in converted.named_parameters():
        parameter.requires_grad_(name != context.frozen)
    x.requires_grad_(context.frozen != "input")
    forward = context.wrap(converted, compile_)
    with context.grad():
        y = forward(x)
    if y.requires_grad:
        y.backward(g.to(y.dtype))
    return Pass(y.detach(), x.grad, {n: p.grad for n, p in converted.named_parameters()})


@pytest.mark.law("P10", "P09")
@pytest.mark.parametrize(
    "context",
    [
        pytest.param(name, marks=pytest.mark.thorough if name in THOROUGH else ())
        for name in CONTEXTS
    ],
)
def test_one_graph(target, recipe, context, judge, fp8_seed, request):
    """No graph break, and the bits of the same pass in eager code."""
    if context == "DDP":
        request.getfixturevalue("process_group")
    where = CONTEXTS[context]
    judge.example(recipe=recipe, dtype=where.dtype, context=context)
    run = partial(passed, target, recipe, where, 70 + fp8_seed)
    ran, expected = judge.attempt("P09", "eager", partial(run, as_it_is))
    if not ran:
        return
    got = in_graphs(judge, run, graphs=where.graphs, reason=where.reason)
    if got is not None:
        models.same_pass(judge, "P09", "compiled", got, expected)


@pytest.mark.law("P10", "P09")
def test_eager_backend(target, recipe, judge, fp8_seed):
    """Captured by dynamo alone, without AOTAutograd, an MLP is one graph with eager's bits."""
    judge.example(recipe=recipe, dtype="bfloat16", backend="eager")
    run = partial(passed, target, recipe, CONTEXTS["mlp"], 71 + fp8_seed)
    got = in_graphs(judge, run, backend="eager")
    if got is not None:
        models.same_pass(judge, "P09", "compiled", got, run(as_it_is))
