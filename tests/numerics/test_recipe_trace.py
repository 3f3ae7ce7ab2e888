"""The products that really ran, against the recipe's table: formats, scales, accumulation, count.

The table is the oracle's own (`fp8.testing.oracle.RECIPES`), not the library's. What the products
multiplied is compared code by code with what the oracle would have given them: a switch that was
ignored, an operand quantised twice or along the wrong axis shows here, whatever the data.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from fp8.testing import models, oracle
from fp8.testing.tracing import RecordedProduct, record_products, trace_products

#: off the tiles, all different; several blocks of 128 along every axis
M, K, N = 140, 268, 204
NAMES = ("output", "grad_input", "grad_weight")


@pytest.fixture(params=tuple(oracle.RECIPES))
def recipe(request, target, judge):
    hidden = target.capabilities().hidden_products
    judge.require(not hidden, "its products are hidden from torch's dispatcher")
    return models.require_recipe(judge, target, request.param)


def shapes(target) -> dict[str, tuple[int, int]]:
    m, k, n = models.aligned(target, M, K, N)
    return {"output": (m, n), "grad_input": (m, k), "grad_weight": (n, k)}


def operands(target, dtype: str, seed: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A layer, x and grad_output, whose rows and columns differ in size."""
    m, k, n = models.aligned(target, M, K, N)

    layer = models.linear(target, k, n, dtype=dtype, seed=seed)
    with torch.no_grad():
        layer[0].weight.copy_(models.uneven(layer[0].weight))
    x, g = (
        models.uneven(models.values(seed + i, *shape, dtype=dtype, device=target.device))
        for i, shape in enumerate([(m, k), (m, n)])
    )
    return layer, x, g


def expected_trace(recipe: str, name: str, dtype: str) -> tuple[str, str, str]:
    """The table's formats and accumulation of one product."""
    a, b, accumulation = oracle.RECIPES[recipe][name]
    if a is None or b is None:
        return dtype, dtype, ""
    return f"float8_{a[0]}", f"float8_{b[0]}", accumulation


def forward_and_backward(layer: nn.Module, x: torch.Tensor, g: torch.Tensor) -> None:
    layer(x).backward(g)


@pytest.mark.law("P26")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_products_are_the_recipes(target, recipe, dtype, judge, fp8_seed):
    """Three products, with the table's formats and accumulation, of the right shapes."""
    judge.example(recipe=recipe, dtype=dtype)
    layer, x, g = operands(target, dtype, 11 + fp8_seed)
    model = target.convert(layer, recipe)
    ran = trace_products(partial(forward_and_backward, model, x.requires_grad_(), g))
    judge.equal("P26", "number of products", len(ran), 3)
    by_shape = {product.shape: product for product in ran}
    for name, shape in shapes(target).items():
        product = by_shape.get(shape)
        missing = f"no product of shape {shape}: {ran}"
        if judge.true("P26", f"{name} ran", product is not None, missing):
            got = (product.a, product.b, product.accumulation)
            judge.equal("P26", f"{name} formats", got, expected_trace(recipe, name, dtype))


@pytest.mark.law("P26")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_operands_are_the_oracles(target, recipe, dtype, judge, fp8_seed):
    """Each product multiplied the oracle's codes, with the oracle's scales, bit for bit."""
    judge.example(recipe=recipe, dtype=dtype)
    layer, x, g = operands(target, dtype, 12 + fp8_seed)
    weight = layer[0].weight.detach().clone()
    model = target.convert(layer, recipe)
    x.requires_grad_()
    _, ran = record_products(partial(forward_and_backward, model, x, g))
    by_shape = {product.trace.shape: product for product in ran}
    arrays = [t.detach().float().cpu().numpy() for t in (x, weight, g)]
    expected = oracle.linear(*arrays[:2], None, arrays[2], recipe, dtype=dtype).operands
    for name, shape in shapes(target).items():
        missing = f"no product of shape {shape}"
        if judge.true("P26", f"{name} ran", shape in by_shape, missing):
            judge_operands(judge, name, by_shape[shape], expected[name])
    if expected["grad_weight"] == (None, None) and shapes(target)["grad_weight"] in by_shape:
        product = by_shape[shapes(target)["grad_weight"]]
        pair = [product.a, product.b]
        judge.bitwise("P26", "high precision operands", pair, [g.t(), x.detach().t()])


def judge_operands(judge, name: str, ran: RecordedProduct, expected: tuple) -> None:
    """Codes and scales of both operands of one product."""
    if expected == (None, None):
        return
    scales = (ran.a_scale, ran.b_scale)
    quantised = None not in scales
    if not judge.true("P26", f"{name} quantised", quantised, f"{name} ran in high precision"):
        return
    for side, codes, operand in zip("ab", (ran.a, ran.b), expected, strict=True):
        judge.bitwise("P26", f"{name} {side} codes", codes, operand.codes, fmt=operand.fmt)
    if ran.trace.operator != "fp8::scaled_mm":
        sizes = [operand.scale.size for operand in expected]
        if [scale.numel() for scale in scales] != sizes:
            # A stack may multiply with scales of 1 and scale the product afterwards: torchao does
            # in its precise rowwise products. The result shows it, which other laws judge.
            return
        # One scale of a whole tensor may have any number of dimensions.
        scales = [s.reshape(e.scale.shape) for s, e in zip(scales, expected, strict=True)]
    for side, scale, operand in zip("ab", scales, expected, strict=True):
        judge.bitwise("P26", f"{name} {side} scales", scale, operand.scale)


@pytest.mark.law("P26", "P19")
def test_only_the_products_that_are_needed(target, recipe, judge, fp8_seed):
    """Two products when the input needs no gradient or the weight is frozen, one without grad."""
    for frozen, missing in (("input", "grad_input"), ("weight", "grad_weight")):
        judge.example(recipe=recipe, dtype="bfloat16", frozen=frozen)
        layer, x, g = operands(target, "bfloat16", 13 + fp8_seed)
        layer[0].weight.requires_grad_(frozen != "weight")
        model = target.convert(layer, recipe)
        leaf = x.detach().clone().requires_grad_(frozen != "input")
        ran = trace_products(partial(forward_and_backward, model, leaf, g))
        names = {shape: name for name, shape in shapes(target).items()}
        got = [names.get(product.shape, str(product)) for product in ran]
        due = [name for name in NAMES if name != missing]
        judge.equal("P19", "products with something frozen", got, due)
        for product in ran:
            name = names.get(product.shape, "")
            if name in NAMES:
                formats = (product.a, product.b, product.accumulation)
                wanted = expected_trace(recipe, name, "bfloat16")
                judge.equal("P26", f"{name} formats", formats, wanted)
    judge.example(recipe=recipe, dtype="bfloat16", frozen="all")
    layer, x, _ = operands(target, "bfloat16", 14 + fp8_seed)
    model = target.convert(layer, recipe)
    with torch.no_grad():
        ran = trace_products(partial(model, x))
    judge.equal(
        "P19",
        "products without grad",
        [product.shape for product in ran],
        [shapes(target)["output"]],
    )


@pytest.mark.law("P26")
def test_every_layer_of_a_model(target, recipe, judge, fp8_seed):
    """Six products of two layers, each in its layer's turn: forward in order, backward reversed."""
    judge.example(recipe=recipe, dtype="bfloat16")
    model = target.convert(models.mlp(target, dtype="bfloat16"), recipe)
    x, g = models.mlp_batch(target, dtype="bfloat16", seed=15 + fp8_seed)
    ran = trace_products(partial(forward_and_backward, model, x.requires_grad_(), g))
    m, k, h, n = models.aligned(target, models.TOKENS, models.WIDTH, models.HIDDEN, models.OUT)
    order = [(m, h), (m, n), (m, h), (n, h), (m, k), (h, k)]
    names = ("output", "output", "grad_input", "grad_weight", "grad_input", "grad_weight")
    got = sorted((p.shape, p.a, p.b, p.accumulation) for p in ran)
    wanted = sorted(
        (shape, *expected_trace(recipe, name, "bfloat16"))
        for shape, name in zip(order, names, strict=True)
    )
    judge.equal("P26", "products of two layers", got, wanted)
    judge.equal("P26", "forward order", [p.shape for p in ran[:2]], order[:2])
    # Within a layer either gradient may come first.
    backward = [sorted(p.shape for p in ran[i : i + 2]) for i in (2, 4)]
    judge.equal("P26", "backward order", backward, [sorted(order[2:4]), sorted(order[4:])])
