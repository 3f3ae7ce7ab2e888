"""Benches: what is measured together, interleaved, and the cases that come out of it.

A bench is frozen data. `cases` says what one stack makes of it; `obstacle` why it can't be run.
Names of callables: "bf16" is the baseline, the others are said where they are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from fp8 import regimes
from fp8.testing.perf.cases import MODES, Case, written
from fp8.testing.timing.plan import Plan

if TYPE_CHECKING:
    from fp8.testing.perf.cases import Mode, Shape, Stack
    from fp8.testing.perf.scenarios import Scenario

# Of every plan: at least five pairs, 1 % to be steady, a margin of 2 % (fp8/testing/timing/plan.py
# says why). Narrower than that the intervals need not be: what a case may lose is 5 %. Blocks are
# shorter than a user's, so that two hundred cases fit into minutes; a block's length matters less
# than the number of pairs.

#: Kernels: some 20 µs to some ms.
KERNELS = Plan(
    quantity="device", half_width=0.02, max_pairs=10, max_warm_up=5, block_ms=5, budget_s=6
)
#: A layer forward and backward.
LAYERS = Plan(
    quantity="device", half_width=0.02, max_pairs=10, max_warm_up=5, block_ms=10, budget_s=8
)
#: A step of tens or hundreds of ms, which is a block of its own. Pairs of steps differ by 1 to 3 %
#: (SD, H200): an interval of 2 % would take some twenty, and a pair of a step's four ways takes
#: half a second. What looks wrong gets twice the pairs.
STEPS = Plan(
    quantity="call",
    half_width=0.04,
    max_pairs=6,
    max_warm_up=3,
    block_ms=10,
    min_samples=1,
    budget_s=15,
)


class Bench(Protocol):
    """What is measured together."""

    @property
    def name(self) -> str:
        """Of the test."""
        ...

    @property
    def plan(self) -> Plan:
        """How much to measure."""
        ...

    def obstacle(self, stack: Stack) -> str:
        """Why this stack can't be measured here, or ""."""
        ...

    def cases(self, stack: Stack) -> tuple[Case, ...]:
        """What comes out of it."""
        ...


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this GPU reaches today: large products, a copy, and reading for an amax.

    The products are torch's own, whatever the stack. The GPU's hardware file has what was reached
    when it was written; fractions in the record are of what is reached in the same run.
    """

    shape: Shape = (8192, 8192, 8192)
    #: A tensor of 512 MiB in bfloat16: ten times the largest L2.
    tensor: tuple[int, int] = (16384, 16384)
    name: str = "ceilings"
    plan: Plan = KERNELS

    def obstacle(self, stack: Stack) -> str:  # noqa: ARG002 - it needs none
        """There is none."""
        return ""

    def cases(self, stack: Stack) -> tuple[Case, ...]:  # noqa: ARG002 - they are no stack's
        """The float8 product against bf16's; the amax against the copy."""
        M, K, N = self.shape
        values = self.tensor[0] * self.tensor[1]
        return (
            Case(
                id="ceiling/fp8",
                family="ceiling",
                subject="fp8",
                baseline="bf16",
                facts={"M": M, "K": K, "N": N},
                float8_products=1,
                layers=(self.shape,),
                flop=2 * M * K * N,
            ),
            Case(
                id="ceiling/amax",
                family="ceiling",
                subject="amax",
                baseline="copy",
                against="nothing",
                facts={"rows": self.tensor[0], "columns": self.tensor[1]},
                moved=2 * values,
                baseline_moved=4 * values,
            ),
        )


#: A recipe, and which of its products: the output product with that accumulation, or "grad".
Variant = tuple[str, Literal["fast", "precise", "grad"]]


@dataclass(frozen=True, slots=True)
class Products:
    """Bare scaled products of one shape, the operands quantised before, against bf16's.

    Callables: "RECIPE/ACCUMULATION", the output product of a recipe with that accumulation, and
    "RECIPE/grad", its grad_input product as the recipe has it.
    """

    shape: Shape
    of: str
    variants: tuple[Variant, ...]
    bias: bool = False
    plan: Plan = KERNELS

    @property
    def name(self) -> str:
        """Shape, and whether with a bias."""
        return written(self.shape) + ("-bias" if self.bias else "")

    def obstacle(self, stack: Stack) -> str:
        """It needs a product that can be called alone."""
        if not stack.multiplies:
            return "no scaled product that can be called alone"
        return "" if self._able(stack) else "none of the recipes"

    def _able(self, stack: Stack) -> list[Variant]:
        return [(recipe, how) for recipe, how in self.variants if recipe in stack.recipes]

    def cases(self, stack: Stack) -> tuple[Case, ...]:
        """One for each variant."""
        M, K, N = self.shape
        suffix = "/bias" if self.bias else ""
        return tuple(
            Case(
                id=f"product/{stack.name}-{recipe}/{how}/{written(self.shape)}{suffix}",
                family="product",
                subject=f"{recipe}/{how}",
                baseline="bf16",
                known=regimes.Case(
                    subject="product",
                    M=M,
                    K=K,
                    N=N,
                    recipe=recipe,
                    accumulation="precise" if how == "grad" else how,
                    target=stack.base,
                    gpu=stack.gpu,
                    versions=stack.versions,
                ),
                facts={
                    "recipe": recipe,
                    "accumulation": how,
                    "M": M,
                    "K": K,
                    "N": N,
                    "bias": self.bias,
                    "of": self.of,
                },
                float8_products=1,
                layers=(self.shape,),
                flop=2 * M * K * N,
            )
            for recipe, how in self._able(stack)
        )


#: Operations of a stack's quantising, and the bytes that each has to move for a value of bfloat16:
#: read once and written once, or written in both layouts. Whoever needs an amax of the whole tensor
#: reads it a second time, which is not counted: it is what a fraction of the ceiling below 1 is of.
CASTS = {
    "cast": 3,
    "tensorwise": 3,
    "rowwise": 3,
    "columnwise": 3,
    "tensorwise-both": 4,
    "rowwise-both": 4,
}


@dataclass(frozen=True, slots=True)
class Casts:
    """Casting and quantising a bfloat16 tensor, against a copy of it.

    Callables: those of `CASTS`. "cast" has no scale; "tensorwise" and "rowwise" are amax, scale and
    cast; "columnwise" is the same of the transposed tensor; "…-both" writes both layouts.
    """

    rows: int
    columns: int
    operations: tuple[str, ...]
    mode: Mode = "eager"
    plan: Plan = KERNELS

    @property
    def name(self) -> str:
        """Shape and mode."""
        return f"{self.rows}x{self.columns}-{self.mode}"

    def obstacle(self, stack: Stack) -> str:
        """It needs a quantisation that can be called alone."""
        return "" if stack.quantises else "no quantisation that can be called alone"

    def cases(self, stack: Stack) -> tuple[Case, ...]:
        """One for each operation."""
        size = f"{self.rows}x{self.columns}"
        return tuple(
            Case(
                id=f"cast/{stack.name}-{operation}/{self.mode}/{size}",
                family="cast",
                subject=operation,
                baseline="copy",
                against="nothing",
                facts={
                    "operation": operation,
                    "mode": self.mode,
                    "rows": self.rows,
                    "columns": self.columns,
                },
                moved=CASTS[operation] * self.rows * self.columns,
                baseline_moved=4 * self.rows * self.columns,
            )
            for operation in self.operations
        )


@dataclass(frozen=True, slots=True)
class Linears:
    """One layer without bias, forward and backward, quantising included, against bf16's.

    Callables: the recipes' names.
    """

    shape: Shape
    mode: Mode
    recipes: tuple[str, ...]
    of: str = ""
    plan: Plan = LAYERS

    @property
    def name(self) -> str:
        """Mode and shape."""
        return f"{self.mode}-{written(self.shape)}"

    def obstacle(self, stack: Stack) -> str:
        """It needs one of the recipes."""
        return "" if self._able(stack) else "none of the recipes"

    def _able(self, stack: Stack) -> list[str]:
        return [recipe for recipe in self.recipes if recipe in stack.recipes]

    def cases(self, stack: Stack) -> tuple[Case, ...]:
        """One for each recipe."""
        M, K, N = self.shape
        return tuple(
            Case(
                id=f"linear/{stack.name}-{recipe}/{self.mode}/{written(self.shape)}",
                family="linear",
                subject=recipe,
                baseline="bf16",
                known=known_linear(self.shape, recipe, self.mode, stack),
                facts={
                    "recipe": recipe,
                    "mode": self.mode,
                    "M": M,
                    "K": K,
                    "N": N,
                    "bias": False,
                    "of": self.of,
                },
                float8_products=products_of(recipe),
                layers=(self.shape,),
                flop=6 * M * K * N,
            )
            for recipe in self._able(stack)
        )


@dataclass(frozen=True, slots=True)
class Steps:
    """A training step in four ways, and each with every gradient of its scenario.

    Stages: the gradients. Callables: "bf16 MODE" and "RECIPE MODE". What is compiled is compared
    with compiled bfloat16, what is not with eager.
    """

    scenario: Scenario
    plan: Plan = STEPS

    @property
    def name(self) -> str:
        """The scenario's, and the recipes where it is not tensorwise alone."""
        others = [recipe for recipe in self.scenario.recipes if recipe != "tensorwise"]
        return "-".join([self.scenario.name, *others])

    def obstacle(self, stack: Stack) -> str:
        """It needs one of the recipes."""
        return "" if self._able(stack) else "none of the recipes"

    def _able(self, stack: Stack) -> list[str]:
        return [recipe for recipe in self.scenario.recipes if recipe in stack.recipes]

    def cases(self, stack: Stack) -> tuple[Case, ...]:
        """Time for every way and gradient; once for each way what it saves; maybe first calls."""
        scenario, random = self.scenario, self.scenario.gradients[0]
        found = []
        for recipe in self._able(stack):
            for mode in MODES:
                found += [
                    self._time(recipe, mode, gradient, stack) for gradient in scenario.gradients
                ]
                found.append(self._saved(recipe, mode, random, stack))
            if scenario.first_call:
                found.append(self._first_call(recipe, random, stack))
        return tuple(found)

    def _time(self, recipe: str, mode: Mode, gradient: str, stack: Stack) -> Case:
        scenario = self.scenario
        of_it = f"{scenario.name}/{stack.name}-{recipe}/{mode}/{gradient}"
        return Case(
            id=f"step/{of_it}",
            family="step",
            stage=gradient,
            subject=f"{recipe} {mode}",
            baseline=f"bf16 {mode}",
            quantity="call",
            known=self._known(recipe, mode, "steady", stack),
            facts=self._facts(recipe, mode, gradient),
            float8_products=products_of(recipe) * len(scenario.converted),
            layers=scenario.converted,
            flop=sum(6 * M * K * N for M, K, N in scenario.layers),
            remedied=scenario.remedied and mode == "compiled" and gradient == "random",
        )

    def _saved(self, recipe: str, mode: Mode, gradient: str, stack: Stack) -> Case:
        return Case(
            id=f"memory/{self.scenario.name}/{stack.name}-{recipe}/{mode}",
            family="regime",
            stage=gradient,
            subject=f"{recipe} {mode}",
            baseline=f"bf16 {mode}",
            ratio="saved bytes",
            known=regimes.Case(
                subject="memory",
                recipe=recipe,
                compiled=mode == "compiled",
                target=stack.base,
                gpu=stack.gpu,
                versions=stack.versions,
            ),
            facts=self._facts(recipe, mode, gradient),
        )

    def _first_call(self, recipe: str, gradient: str, stack: Stack) -> Case:
        return Case(
            id=f"first-call/{self.scenario.name}/{stack.name}-{recipe}/compiled",
            family="regime",
            stage=gradient,
            subject=f"{recipe} compiled",
            baseline=f"{recipe} compiled",
            ratio="first call",
            against="remedy",
            known=self._known(recipe, "compiled", "first call", stack),
            facts=self._facts(recipe, "compiled", gradient),
        )

    def _known(self, recipe: str, mode: Mode, window: str, stack: Stack) -> regimes.Case:
        return regimes.Case(
            subject="step",
            recipe=recipe,
            bias=self.scenario.bias,
            bias_fused=stack.bias_fused,
            compiled=mode == "compiled",
            fused=stack.fused,
            window=window,
            target=stack.base,
            gpu=stack.gpu,
            versions=stack.versions,
        )

    def _facts(self, recipe: str, mode: Mode, gradient: str) -> dict[str, object]:
        return {
            "recipe": recipe,
            "mode": mode,
            "scenario": self.scenario.name,
            "gradient": gradient,
            "M": self.scenario.tokens,
        }


def known_linear(
    shape: Shape,
    recipe: str,
    mode: Mode,
    stack: Stack,
    *,
    bias: bool = False,
    window: str = "steady",
) -> regimes.Case:
    """What regimes ask of a layer of this shape in this stack."""
    from fp8.recipes import RECIPES  # imports torch

    M, K, N = shape
    known = RECIPES.get(recipe)  # a third party's recipe may be one of its own
    return regimes.Case(
        subject="linear",
        M=M,
        K=K,
        N=N,
        recipe=recipe,
        bias=bias,
        bias_fused=stack.bias_fused,
        compiled=mode == "compiled",
        fused=stack.fused,
        accumulation=None if known is None else known.output.accumulation,
        window=window,
        target=stack.base,
        gpu=stack.gpu,
        versions=stack.versions,
    )


def products_of(recipe: str) -> int:
    """How many of a layer's three products a recipe has in float8."""
    from fp8.recipes import RECIPES  # imports torch

    known = RECIPES[recipe]
    return sum(p.a is not None for p in (known.output, known.grad_input, known.grad_weight))
