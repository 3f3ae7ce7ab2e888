"""The library's recipes are those of the table in the documentation, written out once more."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from fp8 import recipes
from fp8.recipes import RECIPES, Product
from fp8.testing import oracle

if TYPE_CHECKING:
    from fp8.quantize import Operand

#: recipe -> product -> what it multiplies, contraction last: "format granularity rule" twice, and
#: how it accumulates. M tokens, K in, N out: output x (M, K) . W (N, K), grad_input g (M, N) .
#: W^T (K, N), grad_weight g^T (N, M) . x^T (K, M). One scale a row of these is one a token for x
#: and g, one an output for W in the output, and one an input for W in grad_input.
TABLE = {
    "tensorwise": {
        "output": ("e4m3fn tensorwise torchao", "e4m3fn tensorwise torchao", "fast"),
        "grad_input": ("e5m2 tensorwise torchao", "e4m3fn tensorwise torchao", "precise"),
        "grad_weight": ("e5m2 tensorwise torchao", "e4m3fn tensorwise torchao", "precise"),
    },
    "rowwise": {
        "output": ("e4m3fn rowwise torchao_pow2", "e4m3fn rowwise torchao_pow2", "fast"),
        "grad_input": ("e4m3fn rowwise torchao_pow2", "e4m3fn rowwise torchao_pow2", "precise"),
        "grad_weight": ("e4m3fn rowwise torchao_pow2", "e4m3fn rowwise torchao_pow2", "precise"),
    },
    "rowwise_with_gw_hp": {
        "output": ("e4m3fn rowwise torchao_pow2", "e4m3fn rowwise torchao_pow2", "fast"),
        "grad_input": ("e4m3fn rowwise torchao_pow2", "e4m3fn tensorwise torchao_pow2", "precise"),
        "grad_weight": (None, None, "precise"),
    },
    "blockwise": {
        "output": ("e4m3fn 1x128 torchao", "e4m3fn 128x128 torchao", "precise"),
        "grad_input": ("e4m3fn 1x128 torchao", "e4m3fn 128x128 torchao", "precise"),
        # x is 128x1 along M: transposed to (K, M), that is 1x128.
        "grad_weight": ("e4m3fn 1x128 torchao", "e4m3fn 1x128 torchao", "precise"),
    },
}
PRODUCTS = ("output", "grad_input", "grad_weight")

every_recipe = pytest.mark.parametrize("name", TABLE)


def described(operand: Operand | None) -> str | None:
    if operand is None:
        return None
    return f"{operand.format.name} {operand.granularity.name} {operand.rule.name}"


def test_the_recipes_are_these():
    assert tuple(RECIPES) == tuple(TABLE)
    assert all(recipe.name == name for name, recipe in RECIPES.items())


@every_recipe
def test_library(name):
    recipe = RECIPES[name]
    products = {product: getattr(recipe, product) for product in PRODUCTS}
    found = {n: (described(p.a), described(p.b), p.accumulation) for n, p in products.items()}
    assert found == TABLE[name]


@every_recipe
def test_oracle(name):
    """The oracle has a table of its own: it says the same in its own words."""
    for product, (a, b, accumulation) in TABLE[name].items():
        assert oracle.RECIPES[name][product] == (in_oracle(a), in_oracle(b), accumulation)


def in_oracle(operand: str | None):
    if operand is None:
        return None
    form, granularity, rule = operand.split()
    block = {
        "tensorwise": (None, None),
        "rowwise": (1, None),
        "1x128": (1, 128),
        "128x128": (128, 128),
    }[granularity]
    return form, block, rule.removesuffix("_pow2"), rule.endswith("_pow2")


def test_torchao_says_the_same():
    """torchao's own recipes: formats, granularities, accumulation, powers of two."""
    config = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    granularity = {"tensorwise": "tensorwise", "axiswise": "rowwise"}
    for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        theirs = config.Float8LinearConfig.from_recipe_name(name)
        operands = {
            "output": (theirs.cast_config_input, theirs.cast_config_weight),
            "grad_input": (
                theirs.cast_config_grad_output,
                theirs.cast_config_weight_for_grad_input,
            ),
            "grad_weight": (
                theirs.cast_config_grad_output_for_grad_weight,
                theirs.cast_config_input_for_grad_weight,
            ),
        }
        gemms = {n: getattr(theirs, f"gemm_config_{n}") for n in PRODUCTS}
        suffix = "_pow2" if theirs.round_scales_to_power_of_2 else ""
        for product, pair in operands.items():
            found = [
                None
                if cast.scaling_type.name == "DISABLED"
                else f"{str(cast.target_dtype)[13:]} "
                f"{granularity[cast.scaling_granularity.value]} torchao{suffix}"
                for cast in pair
            ]
            accumulation = "fast" if gemms[product].use_fast_accum else "precise"
            assert (*found, accumulation) == TABLE[name][product]


def test_recipes_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECIPES["rowwise"].output = RECIPES["tensorwise"].output
    with pytest.raises(TypeError, match="does not support item assignment"):
        RECIPES["rowwise"] = RECIPES["tensorwise"]


def test_one_operand_in_high_precision_is_refused():
    operand = RECIPES["tensorwise"].output.a
    with pytest.raises(ValueError, match=r"a, b: got .*, needs both or neither"):
        Product(operand, None, "fast")


def test_finding_a_recipe():
    assert recipes.get("rowwise") is RECIPES["rowwise"]
    mine = dataclasses.replace(RECIPES["rowwise"], name="mine")
    assert recipes.get(mine) is mine
    with pytest.raises(ValueError, match=r"recipe: got 'rowise', needs one of tensorwise, rowwise"):
        recipes.get("rowise")
