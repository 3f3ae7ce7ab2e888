"""Faults of the cast to float8: overflow, rounding, subnormals, signs, tails."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fp8.formats import E4M3FN, E4M3FNUZ, E5M2, E8M0FNU, Format
from fp8.testing.faults.base import fault

Cast = Callable[[Tensor, Format], Tensor]
CAST = "fp8.quantize.cast"


def _bytes(codes: Tensor) -> Tensor:
    return codes.contiguous().view(torch.uint8)


def _magnitude(codes: Tensor) -> Tensor:
    return codes.to(torch.float32).abs()


def _towards_zero(x: Tensor, codes: Tensor, format: Format) -> Tensor:
    """The codes of x rounded to nearest, made those of x rounded towards zero."""
    away = _magnitude(codes) > x.to(torch.float32).abs()
    coded = _bytes(codes)
    # Where there is no negative zero, a step down from the smallest negative code is NaN.
    zero = torch.zeros_like(coded)
    smallest = (coded & 0x7F == 1) & (not format.has_negative_zero)
    return torch.where(away, torch.where(smallest, zero, coded - 1), coded).view(format.dtype)


@fault("F04", law="P06", naive=True, step=CAST)
def no_saturation(cast: Cast) -> Cast:
    """Finite values beyond the largest one become NaN rather than saturate."""

    def wrong(x: Tensor, format: Format) -> Tensor:
        codes = cast(x, format)
        if format != E4M3FN:
            return codes
        nan = torch.full_like(_bytes(codes), 0x7F).view(format.dtype)
        return torch.where(x.abs() > 464, _bytes(nan), _bytes(codes)).view(format.dtype)

    return wrong


@fault("F06", law="P06", naive=False, step=CAST)
def towards_zero(cast: Cast) -> Cast:
    """The cast rounds towards zero."""

    def wrong(x: Tensor, format: Format) -> Tensor:
        codes = cast(x, format)
        return codes if format == E8M0FNU else _towards_zero(x, codes, format)

    return wrong


@fault("F08", law="P06", naive=True, step=CAST)
def through_bfloat16(cast: Cast) -> Cast:
    """float32 is rounded to bfloat16 first: twice rounded near every midpoint."""

    def wrong(x: Tensor, format: Format) -> Tensor:
        return cast(x.to(torch.bfloat16) if x.dtype == torch.float32 else x, format)

    return wrong


@fault("F09", law="P06", naive=True, step=CAST)
def subnormals_flushed(cast: Cast) -> Cast:
    """Subnormals are flushed to zero."""

    def wrong(x: Tensor, format: Format) -> Tensor:
        codes = cast(x, format)
        if format == E8M0FNU:
            return codes
        small = _magnitude(codes) < format.smallest_normal
        sign = _bytes(codes) & (0x80 if format.has_negative_zero else 0)
        return torch.where(small, sign, _bytes(codes)).view(format.dtype)

    return wrong


@fault("F68", law="P06", naive=True, step=CAST)
def e5m2_ties_away(cast: Cast) -> Cast:
    """In e5m2 alone, ties go away from zero rather than to even."""

    def wrong(x: Tensor, format: Format) -> Tensor:
        codes = cast(x, format)
        return _ties_away(x, codes) if format == E5M2 else codes

    return wrong


def _ties_away(x: Tensor, codes: Tensor) -> Tensor:
    coded = _bytes(codes)
    above = coded + 1
    distance = x.to(torch.float32).abs() - _magnitude(codes)
    tie = (distance > 0) & (_magnitude(above.view(codes.dtype)) - x.abs() == distance)
    return torch.where(tie, above, coded).view(codes.dtype)


@fault("F69", law="P06", naive=True, step=CAST)
def bfloat16_ties_away(cast: Cast) -> Cast:
    """For bfloat16 inputs alone, ties go away from zero rather than to even."""

    def wrong(x: Tensor, format: Format) -> Tensor:
        codes = cast(x, format)
        return codes if x.dtype != torch.bfloat16 or format == E8M0FNU else _ties_away(x, codes)

    return wrong


@fault("F70", law="P06", naive=True, step=CAST)
def through_float16(cast: Cast) -> Cast:
    """float32 is rounded to float16 first, which drops the bits that break a tie."""

    def wrong(x: Tensor, format: Format) -> Tensor:
        if x.dtype != torch.float32 or format == E8M0FNU:
            return cast(x, format)
        return cast(x.clamp(-65504, 65504).to(torch.float16), format)

    return wrong


@fault("F71", law="P06", naive=True, step=CAST)
def negative_zero_lost(cast: Cast) -> Cast:
    """A negative zero becomes a positive one."""
    return lambda x, to: cast(torch.where(x == 0, x.abs(), x), to)


@fault("F72", law="P06", naive=True, step=CAST)
def nan_is_a_number(cast: Cast) -> Cast:
    """NaN becomes zero."""
    return lambda x, to: cast(torch.where(torch.isnan(x), torch.zeros_like(x), x), to)


@fault("F73", law="P06", naive=True, step=CAST)
def infinity_is_nan(cast: Cast) -> Cast:
    """An infinity becomes NaN rather than the largest value."""
    return lambda x, to: cast(torch.where(torch.isinf(x), x - x, x), to)


@fault("F74", law="P06", naive=True, step=CAST)
def subnormals_rounded_twice(cast: Cast) -> Cast:
    """What becomes a subnormal is first rounded to half the smallest subnormal."""

    def wrong(x: Tensor, format: Format) -> Tensor:
        if format == E8M0FNU:
            return cast(x, format)
        granule = format.smallest_subnormal / 2
        once = torch.round(x.to(torch.float32) / granule) * granule
        small = x.abs() < format.smallest_normal
        return cast(torch.where(small, torch.copysign(once, x), x.to(torch.float32)), format)

    return wrong


@fault("F75", law="P06", naive=False, step=CAST)
def carry_lost(cast: Cast) -> Cast:
    """Rounding up into the next binade forgets to raise the exponent."""

    def wrong(x: Tensor, format: Format) -> Tensor:
        codes = cast(x, format)
        if format == E8M0FNU:
            return codes
        mantissa = 1 << format.mantissa_bits
        raised = _magnitude(codes) > x.to(torch.float32).abs()
        carried = raised & (_bytes(codes) % mantissa == 0) & (_bytes(codes) & 0x7F > mantissa)
        return torch.where(carried, _bytes(codes) - mantissa, _bytes(codes)).view(format.dtype)

    return wrong


@fault("F76", law="P06", naive=True, step=CAST)
def tail_truncated(cast: Cast) -> Cast:
    """The values after the last full vector of 16 are rounded towards zero."""

    def wrong(x: Tensor, format: Format) -> Tensor:
        codes = cast(x, format)
        tail = x.numel() % 16
        if format == E8M0FNU or tail == 0:
            return codes
        flat = _bytes(codes).flatten().clone()
        last = _towards_zero(x.flatten()[-tail:], codes.flatten()[-tail:], format)
        flat[-tail:] = _bytes(last)
        return flat.view(format.dtype).view(x.shape)

    return wrong


@fault("F77", law="P06", naive=True, step=CAST)
def e5m2_overflows(cast: Cast) -> Cast:
    """In e5m2 alone, overflow gives infinity."""

    def wrong(x: Tensor, format: Format) -> Tensor:
        codes = cast(x, format)
        if format != E5M2:
            return codes
        infinity = (_bytes(codes) & 0x80) | 0x7C
        return torch.where(x.abs() >= 61440, infinity, _bytes(codes)).view(format.dtype)

    return wrong


@fault("F78", law="P06", naive=True, step=CAST)
def fnuz_limit_of_ocp(cast: Cast) -> Cast:
    """e4m3fnuz saturates at 448, e4m3fn's largest value, and so becomes NaN."""

    def wrong(x: Tensor, format: Format) -> Tensor:
        codes = cast(x, format)
        if format != E4M3FNUZ:
            return codes
        nan = torch.full_like(_bytes(codes), 0x80)
        return torch.where(x.abs() >= 248, nan, _bytes(codes)).view(format.dtype)

    return wrong


@fault("F79", law="P06", naive=True, step=CAST)
def scales_rounded_down(cast: Cast) -> Cast:
    """e8m0fnu is rounded down to a power of two rather than to the nearest."""

    def wrong(x: Tensor, format: Format) -> Tensor:
        if format != E8M0FNU:
            return cast(x, format)
        powers = x.to(torch.float32).view(torch.int32) & -0x0080_0000
        return cast(torch.where(torch.isfinite(x), powers.view(torch.float32), x.float()), format)

    return wrong


@fault("F80", law="P25", naive=True, step=CAST)
def dithered(cast: Cast) -> Cast:
    """e5m2 is rounded stochastically: two runs differ."""

    def wrong(x: Tensor, format: Format) -> Tensor:
        if format != E5M2:
            return cast(x, format)
        _, exponent = torch.frexp(x.to(torch.float32))
        granule = torch.ldexp(torch.ones_like(x, dtype=torch.float32), exponent - 3)
        return cast(x + (torch.rand_like(granule) - 0.5) * granule, format)

    return wrong


@fault("F81", law="P06", naive=True, step=CAST)
def float16_raised(cast: Cast) -> Cast:
    """float16 inputs are cut to e4m3fn's normal range from below, so small ones become larger."""

    def wrong(x: Tensor, format: Format) -> Tensor:
        if x.dtype != torch.float16 or format != E4M3FN:
            return cast(x, format)
        raised = torch.copysign(x.abs().clamp(min=format.smallest_subnormal), x)
        return cast(torch.where(x == 0, x, raised), format)

    return wrong
