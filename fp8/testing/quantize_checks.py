"""What every test of a quantised operand asks of it: the oracle's codes and scales, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fp8.testing import oracle

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fp8.quantize import Operand, Quantized
    from fp8.testing.laws import Judge
    from fp8.testing.strategies import Array


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
