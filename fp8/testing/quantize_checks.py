"""What tests of quantised operands share: the matrices they draw and the oracle's operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from hypothesis import strategies as st

from fp8.testing import oracle
from fp8.testing.strategies import (
    DTYPES,
    LAYOUTS,
    MAGNITUDES,
    VALUES,
    Array,
    extents,
    matrix,
    to_dtype,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fp8.quantize import Operand, Quantized
    from fp8.testing.laws import Judge

#: powers of two that the values are multiplied by: the linear layers' own, and float32's ends
EXPONENTS = tuple(sorted({e for triple in MAGNITUDES.values() for e in triple} | {-140, 110}))
#: values that are no numbers, put into one place
DAMAGE = {"none": None, "NaN": np.nan, "Inf": np.inf, "-Inf": -np.inf}


@dataclass(frozen=True)
class Case:
    """One matrix to quantise."""

    rows: int
    columns: int
    dtype: str
    layout: str
    values: str
    exponent: int
    damage: str
    seed: int

    def array(self, base_seed: int) -> Array:
        """The values, as the dtype holds them."""
        seed = int(np.random.SeedSequence([base_seed, self.seed]).generate_state(1)[0])
        # float16 reaches from 2^-24 to 2^16.
        exponent = self.exponent // 10 if self.dtype == "float16" else self.exponent
        x = to_dtype(
            np.ldexp(matrix(self.values, self.rows, self.columns, seed), exponent), self.dtype
        )
        damage = DAMAGE[self.damage]
        if damage is not None:
            x.flat[seed % x.size] = damage
        return x


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    dtypes: tuple[str, ...] = DTYPES,
    exponents: tuple[int, ...] = EXPONENTS,
    damage: tuple[str, ...] = tuple(DAMAGE),
    largest: int = 270,
) -> Case:
    """A matrix of any size from 1x1 up to (largest, largest); three in four hold only numbers."""
    return Case(
        rows=draw(extents(1, largest)),
        columns=draw(extents(1, largest)),
        dtype=draw(st.sampled_from(dtypes)),
        layout=draw(st.sampled_from(LAYOUTS)),
        values=draw(st.sampled_from(tuple(VALUES))),
        exponent=draw(st.sampled_from(exponents)),
        damage=draw(st.sampled_from(damage)) if draw(st.integers(0, 2)) == 0 else "none",
        seed=draw(st.integers(0, 2**20)),
    )


def expected(x: Array, operand: Operand) -> oracle.Quantized:
    """The oracle's codes and scales of x (rows, columns), whose values float32 holds."""
    rule = operand.rule.name.removesuffix("_pow2")
    name, block = operand.format.name, operand.granularity.block
    codes, scale = oracle.quantize(x, name, block, rule, operand.rule.name.endswith("_pow2"))
    return oracle.Quantized(codes, scale, name, block)


def judge_quantized(judge: Judge, law: str, got: Quantized, want: oracle.Quantized) -> None:
    """Codes of the operand's format and float32 scales, the bits of the oracle's."""
    __tracebackhide__ = True
    # As a tensor: an array would be compared by value with a scale in bfloat16.
    judge.bitwise(law, "scale", got.scale, torch.from_numpy(want.scale.copy()))
    judge.bitwise(law, "codes", got.codes, want.codes, fmt=want.fmt)


def chosen(
    operands: Iterable[Operand],
    *,
    format: str | None = None,
    granularity: str | None = None,
    rule: str | None = None,
) -> list[Operand]:
    """The operands of that format, granularity and rule, in an order that no run changes."""
    return sorted(
        (
            operand
            for operand in operands
            if format in (None, operand.format.name)
            and granularity in (None, operand.granularity.name)
            and rule in (None, operand.rule.name)
        ),
        key=str,
    )


def facts(operand: Operand) -> dict[str, str]:
    """What failure messages and expectations see of an operand."""
    return {
        "format": operand.format.name,
        "granularity": operand.granularity.name,
        "rule": operand.rule.name,
    }
