"""What the traced graph of a layer holds: three products, six casts, and nothing wide in between.

The graph is AOTAutograd's, before any backend has touched it, so that what is wrong here is wrong
on every machine; only a GPU shows whether the kernels made of it are few and right.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8.testing import graphs, models, oracle
from fp8.testing.compiled_runs import Compile, in_graphs
from fp8.testing.graphs import Graphs

#: off the tiles, all different, and no two products of one shape
M, K, N = 140, 268, 204
NAMES = ("output", "grad_input", "grad_weight")


@pytest.fixture
def traceable(target, judge):
    hidden = target.capabilities().hidden_products
    judge.require(not hidden, "its products are hidden from torch's dispatcher")


def shapes(target) -> dict[str, tuple[int, int]]:
    m, k, n = models.aligned(target, M, K, N)
    return {"output": (m, n), "grad_input": (m, k), "grad_weight": (n, k)}


def traced(
    judge, target, recipe: str, seed: int, *, frozen: str = "", grad: bool = True, **options
) -> Graphs | None:
    """The graphs of one linear layer with a bias, bfloat16; None if it doesn't compile."""
    m, k, n = models.aligned(target, M, K, N)

    def run(compile_: Compile) -> bool:
        model = target.convert(models.linear(target, k, n, dtype="bfloat16"), recipe)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name != frozen)
        x = models.values(seed, m, k, dtype="bfloat16", device=target.device)
        g = models.values(seed + 1, m, n, dtype="bfloat16", device=target.device)
        x.requires_grad_(frozen != "input")
        with torch.set_grad_enabled(grad):
            y = compile_(model)(x)
        if grad:
            y.backward(g)
        return True

    kept = Graphs(**options)
    return kept if in_graphs(judge, run, backend=kept.backend) else None


def due(recipe: str, names: tuple[str, ...], target) -> list[tuple]:
    """The recipe's products as a graph should have them: formats, accumulation, shape."""
    found = []
    for name in names:
        a, b, accumulation = oracle.RECIPES[recipe][name]
        shape = shapes(target)[name]
        if a is None or b is None:
            found.append(("bfloat16", "bfloat16", "", shape))
        else:
            found.append((f"float8_{a[0]}", f"float8_{b[0]}", accumulation, shape))
    return sorted(found)


def products(graph) -> list[tuple]:
    return sorted((p.a, p.b, p.accumulation, p.shape) for p in graphs.products(graph))


def quantised(recipe: str, names: tuple[str, ...] = NAMES) -> int:
    """How many operands of these products are quantised."""
    return sum(operand is not None for n in names for operand in oracle.RECIPES[recipe][n][:2])


@pytest.mark.law("P10", "P26")
@pytest.mark.parametrize("min_cut", [False, True], ids=["save all", "min cut"])
def test_products(target, recipe, traceable, min_cut, judge, fp8_seed):
    """Three products, in the recipe's formats; one in the forward pass, two in the backward.

    However the two are split: a product that the split computed again would cost a third more.
    """
    judge.example(recipe=recipe, dtype="bfloat16")
    kept = traced(judge, target, recipe, 90 + fp8_seed, min_cut=min_cut)
    if kept is None:
        return
    (joint,), (forward,), (backward,) = kept.joint, kept.forward, kept.backward
    judge.equal("P26", "products", products(joint), due(recipe, NAMES, target))
    judge.equal("P26", "products of forward", products(forward), due(recipe, NAMES[:1], target))
    judge.equal("P26", "products of backward", products(backward), due(recipe, NAMES[1:], target))


@pytest.mark.law("P10", "P19")
@pytest.mark.parametrize(
    ("frozen", "missing"), [("input", "grad_input"), ("0.weight", "grad_weight"), ("0.bias", "")]
)
def test_products_with_something_frozen(
    target, recipe, traceable, frozen, missing, judge, fp8_seed
):
    """Two products when the input or the weight needs no gradient."""
    judge.example(recipe=recipe, dtype="bfloat16", frozen=frozen)
    kept = traced(judge, target, recipe, 91 + fp8_seed, frozen=frozen)
    if kept is None:
        return
    needed = tuple(name for name in NAMES if name != missing)
    ran = sorted(p for graph in (*kept.forward, *kept.backward) for p in products(graph))
    judge.equal("P19", "products with something frozen", ran, due(recipe, needed, target))


@pytest.mark.law("P10", "P19")
def test_products_without_grad(target, recipe, traceable, judge, fp8_seed):
    """One product when nobody asks for gradients."""
    judge.example(recipe=recipe, dtype="bfloat16")
    kept = traced(judge, target, recipe, 92 + fp8_seed, grad=False)
    if kept is None:
        return
    (graph,) = kept.inference
    judge.equal("P19", "products without grad", products(graph), due(recipe, NAMES[:1], target))


@pytest.mark.law("P10", "P26")
def test_products_of_a_model(target, recipe, traceable, judge, fp8_seed):
    """Three products a converted layer in a block, and attention's own: none is computed again."""
    judge.example(recipe=recipe, dtype="bfloat16")
    kept = Graphs(min_cut=True)

    block = models.block(target, dtype="bfloat16")
    layers = sum(isinstance(module, nn.Linear) for module in block.modules())
    model = target.convert(block, recipe)
    x, g = models.block_batch(target, dtype="bfloat16", seed=93 + fp8_seed)

    def run(compile_: Compile) -> bool:
        compile_(model)(x.requires_grad_()).backward(g)
        return True

    if not in_graphs(judge, run, backend=kept.backend):
        return
    ran = [p for graph in (*kept.forward, *kept.backward) for p in graphs.products(graph)]
    in_float8 = [p for p in ran if p.accumulation]
    per_layer = sum(oracle.RECIPES[recipe][n][0] is not None for n in NAMES)
    judge.equal("P26", "products in float8", len(in_float8), per_layer * layers)


@pytest.mark.law("P10", "P26")
def test_casts(target, recipe, traceable, judge, fp8_seed):
    """Each operand is cast to float8 at most once, and no whole tensor is widened for nothing."""
    judge.example(recipe=recipe, dtype="bfloat16")
    kept = traced(judge, target, recipe, 94 + fp8_seed)
    if kept is None:
        return
    (joint,) = kept.joint
    whole = min(rows * columns for rows, columns in shapes(target).values())
    whole = min(whole, models.aligned(target, M)[0] * models.aligned(target, K)[0])
    found, most = graphs.casts(joint, whole), quantised(recipe)
    judge.true(
        "P26",
        "casts",
        0 < len(found) <= most,
        f"expected at most {most} casts to float8, one an operand, got {len(found)}:\n    "
        + graphs.described(found),
    )
    wide = graphs.upcasts(joint, whole)
    judge.true(
        "P26",
        "nothing widened",
        not wide,
        f"whole tensors in a wide format that do not end in float8:\n    {graphs.described(wide)}",
    )


@pytest.mark.law("P10", "P14")
def test_saved_for_backward(target, recipe, traceable, judge, fp8_seed):
    """Between forward and backward no whole tensor is kept in a format wider than the model's."""
    judge.example(recipe=recipe, dtype="bfloat16")
    kept = traced(judge, target, recipe, 95 + fp8_seed, min_cut=True)
    if kept is None:
        return
    (forward,) = kept.forward
    m, k, n = models.aligned(target, M, K, N)
    saved = graphs.outputs(forward)[1:]
    size = sum(tensor.numel() * tensor.itemsize for tensor in saved)
    # The input and the weight in bfloat16, and a float32 scale for each row, column or block.
    budget = 2 * (m * k + n * k) + 4 * 2 * (m + n + k)
    listing = ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in saved)
    judge.true(
        "P14",
        "bytes saved by the compiled forward",
        size <= budget,
        f"expected at most {budget} bytes, got {size}: {listing}",
    )
    judge.record(f"{recipe} bytes saved by the compiled forward", size, "bytes")
