"""Faults of the table: another format, granularity or accumulation for one operand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from fp8.formats import E4M3FN, E5M2
from fp8.recipes import Product, Recipe
from fp8.scaling import BLOCK_1X128, ROWWISE, TENSORWISE, TORCHAO, TORCHAO_POW2
from fp8.testing.faults.base import fault

Table = Mapping[str, Recipe]
RECIPES = "fp8.recipes.RECIPES"


def _changed(table: Table, name: str, change: Callable[[Recipe], Recipe]) -> Table:
    return MappingProxyType({**table, name: change(table[name])})


def _operands(product: Product, **changes: object) -> Product:
    """The product with the same fields of both its operands replaced."""
    if product.a is None or product.b is None:
        return product
    a = replace(product.a, **changes)  # type: ignore[arg-type]
    b = replace(product.b, **changes)  # type: ignore[arg-type]
    return replace(product, a=a, b=b)


def _left(product: Product, **changes: object) -> Product:
    a = product.a
    return product if a is None else replace(product, a=replace(a, **changes))  # type: ignore[arg-type]


def _right(product: Product, **changes: object) -> Product:
    b = product.b
    return product if b is None else replace(product, b=replace(b, **changes))  # type: ignore[arg-type]


@fault("F26", law="P26", naive=True, step=RECIPES)
def gradient_in_e4m3(table: Table) -> Table:
    """tensorwise: grad_output is e4m3fn in both products of backward."""

    def change(recipe: Recipe) -> Recipe:
        return replace(
            recipe,
            grad_input=_left(recipe.grad_input, format=E4M3FN),
            grad_weight=_left(recipe.grad_weight, format=E4M3FN),
        )

    return _changed(table, "tensorwise", change)


@fault("F27", law="P26", naive=True, step=RECIPES)
def input_in_e5m2(table: Table) -> Table:
    """rowwise: the input of the output product is e5m2."""
    return _changed(table, "rowwise", lambda r: replace(r, output=_left(r.output, format=E5M2)))


@fault("F147", law="P26", naive=True, step=RECIPES)
def wgrad_gradient_in_e5m2(table: Table) -> Table:
    """blockwise: grad_output is e5m2 in the weight's gradient alone."""
    return _changed(
        table, "blockwise", lambda r: replace(r, grad_weight=_left(r.grad_weight, format=E5M2))
    )


@fault("F28", law="P26", naive=True, step=RECIPES)
def wgrad_scaled_by_tensor(table: Table) -> Table:
    """rowwise: the operands of the weight's gradient have one scale a tensor."""
    return _changed(
        table,
        "rowwise",
        lambda r: replace(r, grad_weight=_operands(r.grad_weight, granularity=TENSORWISE)),
    )


@fault("F31", law="P26", naive=True, step=RECIPES)
def dgrad_in_high_precision(table: Table) -> Table:
    """rowwise: the input's gradient silently stays out of float8."""
    return _changed(
        table,
        "rowwise",
        lambda r: replace(r, grad_input=replace(r.grad_input, a=None, b=None)),
    )


@fault("F148", law="P26", naive=True, step=RECIPES)
def wgrad_in_float8(table: Table) -> Table:
    """rowwise_with_gw_hp: the weight's gradient is float8 as in rowwise."""
    return _changed(
        table,
        "rowwise_with_gw_hp",
        lambda r: replace(r, grad_weight=table["rowwise"].grad_weight),
    )


@fault("F149", law="P26", naive=True, step=RECIPES)
def dgrad_weight_by_rows(table: Table) -> Table:
    """rowwise_with_gw_hp: the weight of the input's gradient has one scale a row."""
    return _changed(
        table,
        "rowwise_with_gw_hp",
        lambda r: replace(r, grad_input=_right(r.grad_input, granularity=ROWWISE)),
    )


@fault("F150", law="P26", naive=True, step=RECIPES)
def weight_in_small_blocks(table: Table) -> Table:
    """blockwise: the weight of the output product has 1x128 blocks."""
    return _changed(
        table,
        "blockwise",
        lambda r: replace(r, output=_right(r.output, granularity=BLOCK_1X128)),
    )


@fault("F151", law="P26", naive=True, step=RECIPES)
def no_power_of_two(table: Table) -> Table:
    """rowwise: the scales of the output product are not rounded to powers of two."""
    return _changed(
        table, "rowwise", lambda r: replace(r, output=_operands(r.output, rule=TORCHAO))
    )


@fault("F152", law="P26", naive=True, step=RECIPES)
def powers_of_two_in_tensorwise(table: Table) -> Table:
    """tensorwise: the scales of the weight's gradient are rounded to powers of two."""
    return _changed(
        table,
        "tensorwise",
        lambda r: replace(r, grad_weight=_operands(r.grad_weight, rule=TORCHAO_POW2)),
    )


@fault("F35", law="P26", naive=True, step=RECIPES)
def fast_in_backward(table: Table) -> Table:
    """tensorwise: the products of backward accumulate in fast mode."""

    def change(recipe: Recipe) -> Recipe:
        return replace(
            recipe,
            grad_input=replace(recipe.grad_input, accumulation="fast"),
            grad_weight=replace(recipe.grad_weight, accumulation="fast"),
        )

    return _changed(table, "tensorwise", change)


@fault("F153", law="P26", naive=True, step=RECIPES)
def precise_in_forward(table: Table) -> Table:
    """rowwise: the output product accumulates in precise mode, the slow one."""
    return _changed(
        table, "rowwise", lambda r: replace(r, output=replace(r.output, accumulation="precise"))
    )


@fault("F154", law="P04", naive=True, step=RECIPES)
def a_name_too_many(table: Table) -> Table:
    """The empty name is a recipe, too: tensorwise."""
    return MappingProxyType({**table, "": table["tensorwise"]})
