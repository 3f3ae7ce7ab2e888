"""Descriptions that come out of a file work as the library's own do: equal is enough.

The library compares formats, granularities, rules, recipes and names by their values. Where it
asked whether they are the same object, a checkpoint's would silently be taken for others.
"""

from __future__ import annotations

import json
import pickle

import pytest
import torch

from fp8 import linear, matmul, quantize
from fp8.formats import E4M3FN, E8M0FNU, FORMATS
from fp8.quantize import Operand, Quantized
from fp8.recipes import RECIPES
from fp8.scaling import GRANULARITIES, SCALE_RULES, TENSORWISE, TORCHAO

X = torch.tensor([[1e9, -3.3, 0.0, 1e-9], [float("inf"), 5.0, -0.0, 7e4]])


def restored(x):
    copy = pickle.loads(pickle.dumps(x))
    assert copy == x
    return copy


def same(a, b):
    """Whether the bits are the same: NaN equals NaN."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_casts(fmt):
    assert restored(fmt) is not fmt
    assert same(quantize.cast(X, restored(fmt)), quantize.cast(X, fmt))


def test_a_format_of_scales_is_refused():
    with pytest.raises(ValueError, match="e8m0fnu"):
        Operand(restored(E8M0FNU), TENSORWISE, TORCHAO)


@pytest.mark.parametrize("rule", SCALE_RULES.values(), ids=lambda r: r.name)
@pytest.mark.parametrize("granularity", GRANULARITIES.values(), ids=lambda g: g.name)
def test_quantised_operands(granularity, rule):
    operand = Operand(E4M3FN, granularity, rule)
    got, expected = (quantize.quantize(X, how) for how in (restored(operand), operand))
    assert same(got.codes, expected.codes)
    assert same(got.scale, expected.scale)
    assert got.t().operand == expected.t().operand


@pytest.mark.parametrize("backend", ["emulated", "torch"])
@pytest.mark.parametrize("name", RECIPES)
def test_recipes(name, backend):
    recipe = RECIPES[name]
    operands = (recipe.output.a, recipe.output.b)
    if not matmul.supports(*operands, backend=backend, device=X.device):
        pytest.skip(f"{backend} multiplies no {name} operands here")
    weight = torch.arange(12.0).reshape(3, 4)
    x = X.clamp(-100, 100)
    bias = torch.tensor([0.5, -1.0, 2.0])
    backend = json.loads(json.dumps(backend))
    got, expected = (
        linear.linear(x, weight, bias, recipe=how, backend=backend)
        for how in (restored(recipe), recipe)
    )
    assert same(got, expected)
    a, b = (quantize.quantize(t, how) for t, how in zip((x, weight), operands, strict=True))
    copies = [Quantized(q.codes, q.scale, restored(q.operand)) for q in (a, b)]
    how = {"out_dtype": torch.float32, "backend": backend}
    assert same(matmul.scaled_mm(*copies, **how), matmul.scaled_mm(a, b, **how))
