"""Which operand goes where in the three products of a linear layer: recipes as frozen data.

A layer holds x (M, K), W (N, K), grad_output g (M, N). Both operands of a product are laid out with
the contraction last, so the three products are

    output       (M, N) = x (M, K)    . W (N, K)^T
    grad_input   (M, K) = g (M, N)    . W^T (K, N)^T
    grad_weight  (N, K) = g^T (N, M)  . x^T (K, M)^T

The recipes are torchao's (torchao/float8/config.py, `Float8LinearConfig.from_recipe_name`) and, for
`blockwise`, DeepSeek-V3's granularity (arXiv:2412.19437, section 3.3) with torchao's scale rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from fp8.formats import E4M3FN, E5M2
from fp8.quantize import Operand
from fp8.scaling import (
    BLOCK_1X128,
    BLOCK_128X128,
    ROWWISE,
    TENSORWISE,
    TORCHAO,
    TORCHAO_POW2,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

#: "fast": Hopper's tensor cores keep the running sum in their own narrow accumulator;
#: "precise": it is promoted to float32 every 128 values
Accumulation = Literal["fast", "precise"]


@dataclass(frozen=True)
class Product:
    """The operands of one product, contraction last, and its accumulation.

    Both operands are None for a product in high precision.
    """

    a: Operand | None
    b: Operand | None
    accumulation: Accumulation

    def __post_init__(self) -> None:
        if (self.a is None) != (self.b is None):
            raise ValueError(f"a, b: got {self.a}, {self.b}, needs both or neither quantised")


@dataclass(frozen=True)
class Recipe:
    """The three products of a linear layer."""

    name: str
    output: Product
    grad_input: Product
    grad_weight: Product


_E4M3_TENSORWISE = Operand(E4M3FN, TENSORWISE, TORCHAO)
_E5M2_TENSORWISE = Operand(E5M2, TENSORWISE, TORCHAO)
_E4M3_ROWWISE = Operand(E4M3FN, ROWWISE, TORCHAO_POW2)
_E4M3_TENSORWISE_POW2 = Operand(E4M3FN, TENSORWISE, TORCHAO_POW2)
_E4M3_1X128 = Operand(E4M3FN, BLOCK_1X128, TORCHAO)
_E4M3_128X128 = Operand(E4M3FN, BLOCK_128X128, TORCHAO)

#: one scale a tensor, gradients in e5m2: the fastest, and the least robust to outliers
TENSORWISE_RECIPE = Recipe(
    "tensorwise",
    output=Product(_E4M3_TENSORWISE, _E4M3_TENSORWISE, "fast"),
    grad_input=Product(_E5M2_TENSORWISE, _E4M3_TENSORWISE, "precise"),
    grad_weight=Product(_E5M2_TENSORWISE, _E4M3_TENSORWISE, "precise"),
)
#: one power-of-two scale a row along each contraction
ROWWISE_RECIPE = Recipe(
    "rowwise",
    output=Product(_E4M3_ROWWISE, _E4M3_ROWWISE, "fast"),
    grad_input=Product(_E4M3_ROWWISE, _E4M3_ROWWISE, "precise"),
    grad_weight=Product(_E4M3_ROWWISE, _E4M3_ROWWISE, "precise"),
)
#: rowwise, with the weight's gradient in high precision
ROWWISE_WITH_GW_HP_RECIPE = Recipe(
    "rowwise_with_gw_hp",
    output=Product(_E4M3_ROWWISE, _E4M3_ROWWISE, "fast"),
    grad_input=Product(_E4M3_ROWWISE, _E4M3_TENSORWISE_POW2, "precise"),
    grad_weight=Product(None, None, "precise"),
)
#: 1x128 for activations and gradients, 128x128 for weights
BLOCKWISE_RECIPE = Recipe(
    "blockwise",
    output=Product(_E4M3_1X128, _E4M3_128X128, "precise"),
    grad_input=Product(_E4M3_1X128, _E4M3_128X128, "precise"),
    grad_weight=Product(_E4M3_1X128, _E4M3_1X128, "precise"),
)

#: every recipe, by name
RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        recipe.name: recipe
        for recipe in (
            TENSORWISE_RECIPE,
            ROWWISE_RECIPE,
            ROWWISE_WITH_GW_HP_RECIPE,
            BLOCKWISE_RECIPE,
        )
    }
)


def get(recipe: Recipe | str) -> Recipe:
    """The recipe itself, or the one of that name. Raises ValueError that lists the known names."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in RECIPES:
        raise ValueError(f"recipe: got {recipe!r}, needs one of {', '.join(RECIPES)} or a Recipe")
    return RECIPES[recipe]
