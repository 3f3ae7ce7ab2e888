"""Benches of regimes that need a measurement of their own, mostly against their remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8 import regimes
from fp8.testing.perf.benches import KERNELS, LAYERS, known_linear, products_of
from fp8.testing.perf.cases import Case, written

if TYPE_CHECKING:
    from fp8.testing.perf.cases import Mode, Shape, Stack
    from fp8.testing.timing.plan import Plan


@dataclass(frozen=True, slots=True)
class Bias:
    """One compiled layer with a bias and without, both in float8: what the bias costs.

    Callables: "RECIPE without bias", the baseline, and "RECIPE with bias".
    """

    shape: Shape
    recipe: str = "tensorwise"
    mode: Mode = "compiled"
    plan: Plan = LAYERS

    @property
    def name(self) -> str:
        """What, and the shape."""
        return f"bias-{written(self.shape)}"

    def obstacle(self, stack: Stack) -> str:
        """It needs the recipe."""
        return "" if self.recipe in stack.recipes else "none of the recipes"

    def cases(self, stack: Stack) -> tuple[Case, ...]:
        """With the bias against without."""
        M, K, N = self.shape
        known = known_linear(self.shape, self.recipe, self.mode, stack, bias=True)
        return (
            Case(
                id=f"bias/{stack.name}-{self.recipe}/{self.mode}/{written(self.shape)}",
                family="regime",
                subject=f"{self.recipe} with bias",
                baseline=f"{self.recipe} without bias",
                against="remedy",
                known=known,
                facts={
                    "recipe": self.recipe,
                    "mode": self.mode,
                    "M": M,
                    "K": K,
                    "N": N,
                    "bias": True,
                },
                float8_products=products_of(self.recipe),
            ),
        )


@dataclass(frozen=True, slots=True)
class Accumulations:
    """One rowwise product with precise accumulation against the same with fast.

    Callables: as in `Products`.
    """

    shape: Shape
    recipe: str = "rowwise"
    plan: Plan = KERNELS

    @property
    def name(self) -> str:
        """What, and the shape."""
        return f"accumulation-{written(self.shape)}"

    def obstacle(self, stack: Stack) -> str:
        """It needs a product that can be called alone."""
        able = stack.multiplies and self.recipe in stack.recipes
        return "" if able else "no scaled product that can be called alone"

    def cases(self, stack: Stack) -> tuple[Case, ...]:
        """Precise against fast."""
        M, K, N = self.shape
        return (
            Case(
                id=f"precise/{stack.name}-{self.recipe}/{written(self.shape)}",
                family="regime",
                subject=f"{self.recipe}/precise",
                baseline=f"{self.recipe}/fast",
                against="remedy",
                known=regimes.Case(
                    subject="product",
                    M=M,
                    K=K,
                    N=N,
                    recipe=self.recipe,
                    accumulation="precise",
                    target=stack.base,
                    gpu=stack.gpu,
                    versions=stack.versions,
                ),
                facts={"recipe": self.recipe, "M": M, "K": K, "N": N},
                float8_products=1,
            ),
        )


@dataclass(frozen=True, slots=True)
class NewTokens:
    """A compiled layer that meets a number of tokens it was not compiled for.

    Callables: "tokens", the number it is compiled for, and "new tokens".
    """

    shape: Shape
    new: int
    recipe: str = "tensorwise"
    plan: Plan = LAYERS

    @property
    def name(self) -> str:
        """What, and the shape."""
        return f"new-tokens-{written(self.shape)}"

    def obstacle(self, stack: Stack) -> str:
        """It needs the recipe."""
        return "" if self.recipe in stack.recipes else "none of the recipes"

    def cases(self, stack: Stack) -> tuple[Case, ...]:
        """The first call with the new number against its steady state; and the very first call."""
        M, K, N = self.shape

        def case(subject: str, window: str, tokens: int) -> Case:
            return Case(
                id=f"{window.replace(' ', '-')}/{stack.name}-{self.recipe}/{written(self.shape)}",
                family="regime",
                subject=subject,
                baseline=subject,
                ratio="first call",
                quantity="call",
                against="remedy",
                known=known_linear(self.shape, self.recipe, "compiled", stack, window=window),
                facts={"recipe": self.recipe, "mode": "compiled", "M": tokens, "K": K, "N": N},
            )

        return case("tokens", "first call", M), case("new tokens", "new M", self.new)
