"""Faults of the scale rule: constants, arithmetic, powers of two, a factor for each value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fp8 import scaling
from fp8.formats import E4M3FN, E5M2, Format
from fp8.scaling import BLOCK_1X128, Granularity, ScaleRule
from fp8.testing.faults.base import fault

Factors = Callable[[Tensor, Format, ScaleRule], tuple[Tensor, Tensor]]
Expand = Callable[[Tensor, Granularity, int, int], Tensor]

FACTORS = "fp8.scaling.multiplier_and_scale"
POWER = "fp8.scaling.round_down_to_power_of_two"
EXPAND = "fp8.scaling.expand"


# --- the factors --------------------------------------------------------------------------------


@fault("F01", law="P11", naive=False, step=FACTORS)
def wrong_way_round(factors: Factors) -> Factors:
    """Multiplier and scale change places."""
    return lambda amax, to, rule: factors(amax, to, rule)[::-1]


@fault("F15", law="P11", naive=True, step=FACTORS)
def largest_is_240(factors: Factors) -> Factors:
    """The largest value of e4m3fn is taken to be 240, e4m3fnuz's."""

    def wrong(amax: Tensor, format: Format, rule: ScaleRule) -> tuple[Tensor, Tensor]:
        return factors(amax, replace(format, max=240.0) if format == E4M3FN else format, rule)

    return wrong


@fault("F16", law="P11", naive=True, step=FACTORS)
def largest_is_512(factors: Factors) -> Factors:
    """The largest value of e4m3fn is taken to be 512: the top saturates."""

    def wrong(amax: Tensor, format: Format, rule: ScaleRule) -> tuple[Tensor, Tensor]:
        return factors(amax, replace(format, max=512.0) if format == E4M3FN else format, rule)

    return wrong


@fault("F94", law="P11", naive=True, step=FACTORS)
def e5m2_largest_is_49152(factors: Factors) -> Factors:
    """The largest value of e5m2 is taken to be 49152, the code below it."""

    def wrong(amax: Tensor, format: Format, rule: ScaleRule) -> tuple[Tensor, Tensor]:
        return factors(amax, replace(format, max=49152.0) if format == E5M2 else format, rule)

    return wrong


@fault("F18", law="P12", naive=True, step=FACTORS)
def floor_too_high(factors: Factors) -> Factors:
    """amax is never taken to be below 1e-2."""

    def wrong(amax: Tensor, format: Format, rule: ScaleRule) -> tuple[Tensor, Tensor]:
        return factors(amax, format, replace(rule, amax_floor=max(rule.amax_floor, 1e-2)))

    return wrong


@fault("F95", law="P11", naive=True, step=FACTORS)
def floor_1e_8(factors: Factors) -> Factors:
    """The floor of torchao's amax is 1e-8, not 1e-12."""

    def wrong(amax: Tensor, format: Format, rule: ScaleRule) -> tuple[Tensor, Tensor]:
        floor = 1e-8 if rule.amax_floor == 1e-12 else rule.amax_floor
        return factors(amax, format, replace(rule, amax_floor=floor))

    return wrong


@fault("F19", law="P12", naive=True, step=FACTORS)
def no_floor(factors: Factors) -> Factors:
    """amax has no floor: zeros are divided by zero."""
    return lambda amax, to, rule: factors(amax, to, replace(rule, amax_floor=0.0))


@fault("F96", law="P12", naive=True, step=FACTORS)
def no_floor_for_groups(factors: Factors) -> Factors:
    """amax has no floor where there is more than one group."""

    def wrong(amax: Tensor, format: Format, rule: ScaleRule) -> tuple[Tensor, Tensor]:
        many = amax.numel() > 1
        return factors(amax, format, replace(rule, amax_floor=0.0) if many else rule)

    return wrong


@fault("F97", law="P12", naive=True, step=FACTORS)
def degenerate_not_one(factors: Factors) -> Factors:
    """An amax of zero, infinity or NaN is divided by like any other."""

    def wrong(amax: Tensor, format: Format, rule: ScaleRule) -> tuple[Tensor, Tensor]:
        return factors(amax, format, replace(rule, degenerate_to_one=False))

    return wrong


@fault("F20", law="P11", naive=True, step=FACTORS)
def power_of_two_always(factors: Factors) -> Factors:
    """Scales are powers of two although the rule says not."""

    def wrong(amax: Tensor, format: Format, rule: ScaleRule) -> tuple[Tensor, Tensor]:
        possible = rule.quotient == "multiplier"
        return factors(amax, format, replace(rule, power_of_two=True) if possible else rule)

    return wrong


@fault("F98", law="P11", naive=True, step=FACTORS)
def power_of_two_never(factors: Factors) -> Factors:
    """Scales are no powers of two although the rule says so."""

    def wrong(amax: Tensor, format: Format, rule: ScaleRule) -> tuple[Tensor, Tensor]:
        return factors(amax, format, replace(rule, power_of_two=False))

    return wrong


@fault("F23", law="P11", naive=True, step=FACTORS)
def scale_in_bfloat16(factors: Factors) -> Factors:
    """The dequantising scale is kept in bfloat16."""

    def wrong(amax: Tensor, format: Format, rule: ScaleRule) -> tuple[Tensor, Tensor]:
        multiplier, scale = factors(amax, format, rule)
        return multiplier, scale.to(torch.bfloat16).to(torch.float32)

    return wrong


@fault("F99", law="P11", naive=True, step=FACTORS)
def two_divisions(factors: Factors) -> Factors:
    """The multiplier is max times a float32 reciprocal of amax: off by an ulp now and then."""

    def wrong(amax: Tensor, format: Format, rule: ScaleRule) -> tuple[Tensor, Tensor]:
        if rule != scaling.TORCHAO:
            return factors(amax, format, rule)
        multiplier = amax.clamp(min=1e-12).reciprocal() * format.max
        return multiplier, multiplier.reciprocal()

    return wrong


@fault("F100", law="P11", naive=True, step=FACTORS)
def scale_of_its_own(factors: Factors) -> Factors:
    """torchao's scale is amax / max rather than the reciprocal of its multiplier."""

    def wrong(amax: Tensor, format: Format, rule: ScaleRule) -> tuple[Tensor, Tensor]:
        multiplier, scale = factors(amax, format, rule)
        if rule == scaling.TORCHAO:
            scale = (amax.to(torch.float64).clamp(min=1e-12) / format.max).to(torch.float32)
        return multiplier, scale

    return wrong


@fault("F101", law="P12", naive=True, step=FACTORS)
def neighbours_of_the_tiny(factors: Factors) -> Factors:
    """The group before one of less than 1e-30 has twice its scale."""

    def wrong(amax: Tensor, format: Format, rule: ScaleRule) -> tuple[Tensor, Tensor]:
        multiplier, scale = factors(amax, format, rule)
        tiny = amax.flatten().roll(-1).view(amax.shape) < 1e-30
        return multiplier, torch.where(tiny & (amax >= 1e-30), scale * 2, scale)

    return wrong


@fault("F102", law="P12", naive=True, step=FACTORS)
def quotient_overflows(factors: Factors) -> Factors:
    """The multiplier of a very small amax is infinite rather than float32's largest."""

    def wrong(amax: Tensor, format: Format, rule: ScaleRule) -> tuple[Tensor, Tensor]:
        multiplier, scale = factors(amax, format, rule)
        overflows = rule.degenerate_to_one & (amax > 0) & (format.max / amax == torch.inf)
        infinite = torch.where(overflows, torch.inf, multiplier)
        return infinite, torch.where(overflows, 0.0, scale)

    return wrong


@fault("F103", law="P11", naive=True, step=FACTORS)
def deepgemm_by_multiplier(factors: Factors) -> Factors:
    """DeepGEMM's scale is the reciprocal of a multiplier, not a quotient of its own."""

    def wrong(amax: Tensor, format: Format, rule: ScaleRule) -> tuple[Tensor, Tensor]:
        return factors(amax, format, replace(rule, quotient="multiplier"))

    return wrong


# --- powers of two ------------------------------------------------------------------------------


@fault("F21", law="P11", naive=False, step=POWER)
def power_of_two_above(down: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The multiplier is rounded up to a power of two: the largest value saturates."""

    def wrong(x: Tensor) -> Tensor:
        below = down(x)
        return torch.where(below == x, below, below * 2)

    return wrong


@fault("F104", law="P11", naive=True, step=POWER)
def power_of_two_by_logarithm(down: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The power of two is exp2(floor(log2(x))): one too high just below a power of two."""

    def wrong(x: Tensor) -> Tensor:
        finite = torch.isfinite(x) & (x > 0)
        return torch.where(finite, torch.exp2(torch.floor(torch.log2(x))), down(x))

    return wrong


@fault("F105", law="P11", naive=True, step=POWER)
def power_of_two_nearest(down: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The power of two is the nearest, not the one below."""

    def wrong(x: Tensor) -> Tensor:
        below = down(x)
        return torch.where(x / below >= 1.5, below * 2, below)

    return wrong


# --- a scale for each value ---------------------------------------------------------------------


@fault("F106", law="P11", naive=True, step=EXPAND)
def ragged_from_the_end(expand: Expand) -> Expand:
    """A ragged edge cuts the first block, not the last."""

    def wrong(scale: Tensor, how: Granularity, rows: int, columns: int) -> Tensor:
        for axis, (block, extent) in enumerate(zip(how.block, (rows, columns), strict=True)):
            if block is not None and block > 1:
                scale = scale.repeat_interleave(block, dim=axis)
                scale = scale.narrow(axis, scale.shape[axis] - extent, extent)
        return scale

    return wrong


@fault("F107", law="P05", naive=True, step=EXPAND)
def square_grid_transposed(expand: Expand) -> Expand:
    """A square grid of block scales is read transposed."""

    def wrong(scale: Tensor, how: Granularity, rows: int, columns: int) -> Tensor:
        grid = how.block == (128, 128) and scale.shape[0] == scale.shape[1]
        return expand(scale.t() if grid else scale, how, rows, columns)

    return wrong


@fault("F108", law="P05", naive=True, step=EXPAND)
def third_block_is_the_second(expand: Expand) -> Expand:
    """From the third block of 128 columns on, the second block's factor is used."""

    def wrong(scale: Tensor, how: Granularity, rows: int, columns: int) -> Tensor:
        if how == BLOCK_1X128 and scale.shape[1] > 2:
            scale = torch.cat([scale[:, :2], scale[:, 1:2].expand(-1, scale.shape[1] - 2)], dim=1)
        return expand(scale, how, rows, columns)

    return wrong
