"""amax to scale: what shares one scale (granularity) and how its value is made (scale rule).

Two factors belong to every group of values: the *multiplier* takes values into the format's range,
the *scale* takes codes back, x ~ codes * scale. What torchao calls "scale" is the multiplier, and
Transformer Engine's "scale_inv" is the scale; here `scale` is always the dequantising factor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fp8.formats import Format

#: the exponent and sign bits of a float32
_POWER_OF_TWO_BITS = -0x0080_0000  # 0xFF80_0000 as a signed 32-bit integer
_FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Granularity:
    """What shares one scale in an operand of shape (R, C).

    `block` is (rows, columns) of one group, None meaning the whole extent. Products take both
    operands with the contraction last, so "rowwise" is always one scale a row, along the
    contraction, and "1x128" is 128 values along it.
    """

    name: str
    block: tuple[int | None, int | None]

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of the scales of an operand of shape (rows, columns); edges may be ragged."""
        block_rows, block_columns = self.block
        return (
            1 if block_rows is None else -(-rows // block_rows),
            1 if block_columns is None else -(-columns // block_columns),
        )

    @property
    def transposed(self) -> Granularity:
        """The granularity that the transposed operand has."""
        return _BY_BLOCK[self.block[::-1]]


TENSORWISE = Granularity("tensorwise", (None, None))
ROWWISE = Granularity("rowwise", (1, None))
COLUMNWISE = Granularity("columnwise", (None, 1))
BLOCK_1X128 = Granularity("1x128", (1, 128))
BLOCK_128X1 = Granularity("128x1", (128, 1))
BLOCK_128X128 = Granularity("128x128", (128, 128))

_ALL = (TENSORWISE, ROWWISE, COLUMNWISE, BLOCK_1X128, BLOCK_128X1, BLOCK_128X128)
#: every granularity, by name
GRANULARITIES = {g.name: g for g in _ALL}
_BY_BLOCK = {g.block: g for g in _ALL}


@dataclass(frozen=True, kw_only=True)
class ScaleRule:
    """How an amax becomes a multiplier and a scale. Stacks differ, so each is a named value."""

    name: str
    #: the arithmetic of the quotient, before its one rounding to float32
    division: Literal["float64", "float32"]
    #: amax is raised to this first
    amax_floor: float
    #: an amax of 0, infinity or NaN gives multiplier 1, and a quotient too large float32's maximum
    degenerate_to_one: bool
    #: the multiplier is rounded down to a power of two, so that nothing can overflow
    power_of_two: bool
    #: which of the two factors is the rounded quotient; the other one is its reciprocal
    quotient: Literal["multiplier", "scale"]

    #: `amax_floor` as text, for code that is compiled: see `constant`
    amax_floor_text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "amax_floor_text", repr(self.amax_floor))
        if self.power_of_two and self.quotient == "scale":
            raise ValueError("power_of_two: got True, needs quotient='multiplier'")


#: torchao/float8/float8_utils.py, `amax_to_scale`
TORCHAO = ScaleRule(
    name="torchao",
    division="float64",
    amax_floor=1e-12,
    degenerate_to_one=False,
    power_of_two=False,
    quotient="multiplier",
)
#: the same with round_scales_to_power_of_2, as both of torchao's rowwise recipes set it
TORCHAO_POW2 = ScaleRule(
    name="torchao_pow2",
    division="float64",
    amax_floor=1e-12,
    degenerate_to_one=False,
    power_of_two=True,
    quotient="multiplier",
)
#: transformer_engine/common/recipe/recipe_common.cuh, `compute_scale_from_amax`, epsilon 0
TRANSFORMER_ENGINE = ScaleRule(
    name="transformer_engine",
    division="float32",
    amax_floor=0.0,
    degenerate_to_one=True,
    power_of_two=False,
    quotient="multiplier",
)
#: the same with force_pow_2_scales, Float8BlockScaling's default
TRANSFORMER_ENGINE_POW2 = ScaleRule(
    name="transformer_engine_pow2",
    division="float32",
    amax_floor=0.0,
    degenerate_to_one=True,
    power_of_two=True,
    quotient="multiplier",
)
#: deep_gemm/utils/math.py, `per_token_cast_to_fp8` with float32 scales
DEEPGEMM = ScaleRule(
    name="deepgemm",
    division="float32",
    amax_floor=1e-4,
    degenerate_to_one=False,
    power_of_two=False,
    quotient="scale",
)

#: every scale rule, by name
SCALE_RULES = {
    r.name: r
    for r in (TORCHAO, TORCHAO_POW2, TRANSFORMER_ENGINE, TRANSFORMER_ENGINE_POW2, DEEPGEMM)
}


def amax(x: Tensor, granularity: Granularity) -> Tensor:
    """The largest magnitude of each group of `x`.

    x: (R, C), float32, bfloat16 or float16. Returns float32 of shape
    `granularity.scale_shape(R, C)`: exact, since a maximum rounds nothing. NaN wins its group; a
    group without values has amax 0.
    """
    rows, columns = x.shape
    shape = granularity.scale_shape(rows, columns)
    if x.numel() == 0:
        return torch.zeros(shape, dtype=torch.float32, device=x.device)
    if set(granularity.block) <= {1, None}:
        # Whole axes are reduced as they are: inductor makes poor kernels of the reshaped reduction
        # below, with which a compiled step of docs/perf.md's `deep_nobias_warm` took 41 ms, not 25.
        whole = [axis for axis, block in enumerate(granularity.block) if block is None]
        return x.abs().amax(dim=whole, keepdim=True).to(torch.float32)
    block_rows, block_columns = granularity.block
    block_rows = rows if block_rows is None else block_rows
    block_columns = columns if block_columns is None else block_columns
    # Zeros beyond a ragged edge change no maximum of magnitudes.
    padded = torch.nn.functional.pad(
        x.abs(), (0, shape[1] * block_columns - columns, 0, shape[0] * block_rows - rows)
    )
    groups = padded.reshape(shape[0], block_rows, shape[1], block_columns)
    return groups.amax(dim=(1, 3)).to(torch.float32)


def round_down_to_power_of_two(x: Tensor) -> Tensor:
    """The largest power of two not above each positive, normal float32 of `x`.

    Clears the mantissa bits: exp2(floor(log2(x))) overshoots just below a power of two (for 116 of
    120 exponents on a CPU). Zero, infinity and NaN are kept.
    """
    powers = (x.view(torch.int32) & _POWER_OF_TWO_BITS).view(torch.float32)
    return torch.where(torch.isfinite(x), powers, x)


def constant(text: str) -> float:
    """A number of a frozen description, as a constant of the traced graph.

    Under dynamic=True dynamo takes a float attribute for an unknown and fails (torch 2.13:
    "lift_tracked_freevar_to_input"), and torch 2.11 cannot pass a frozen dataclass to a function
    that is assumed constant. A text is a constant to both, and guarded by its value.
    """
    return float(text)


def multiplier_and_scale(amax: Tensor, format: Format, rule: ScaleRule) -> tuple[Tensor, Tensor]:
    """The factors into the format's range and back, both float32 of amax's shape.

    amax: float32, any shape. See `ScaleRule` for the arithmetic.
    """
    largest, floor = constant(format.max_text), constant(rule.amax_floor_text)
    raised = amax.to(getattr(torch, rule.division)).clamp(min=floor)
    # float64 and one rounding give the correctly rounded quotient of two float32 numbers (53 bits
    # >= 2 * 24 + 2), which a float32 division in generated GPU code is not: 426 of 2771 scales of
    # `deepgemm` were one bit off (H200, torch 2.11).
    raised = raised.to(torch.float64)
    # A tensor divided by a tensor: torch computes number / tensor as number * reciprocal, and on a
    # GPU tensor / number likewise, which rounds twice.
    bound = torch.full_like(raised, largest)
    if rule.quotient == "scale":
        scale = (raised / bound).to(torch.float32)
        return _reciprocal(scale), scale
    multiplier = (bound / raised).to(torch.float32)
    if rule.degenerate_to_one:
        degenerate = (amax == 0) | ~torch.isfinite(amax)
        multiplier = torch.where(degenerate, 1.0, multiplier.clamp(max=_FLOAT32_MAX))
    if rule.power_of_two:
        multiplier = round_down_to_power_of_two(multiplier)
    return multiplier, _reciprocal(multiplier)


def _reciprocal(x: Tensor) -> Tensor:
    # In float64, as in `multiplier_and_scale`.
    return x.to(torch.float64).reciprocal().to(torch.float32)


def expand(scale: Tensor, granularity: Granularity, rows: int, columns: int) -> Tensor:
    """Each group's factor at each of its values, as a tensor that broadcasts to (rows, columns)."""
    for axis, (block, extent) in enumerate(zip(granularity.block, (rows, columns), strict=True)):
        if block is not None and block > 1:
            scale = scale.repeat_interleave(block, dim=axis).narrow(axis, 0, extent)
    return scale
