"""Faults of amax: the wrong group, the wrong dtype, values that are not looked at."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, distributed

from fp8.scaling import ROWWISE, TENSORWISE, Granularity
from fp8.testing.faults.base import fault

Amax = Callable[[Tensor, Granularity], Tensor]
AMAX = "fp8.scaling.amax"


@fault("F02", law="P05", naive=True, step=AMAX)
def wrong_axis_when_square(amax: Amax) -> Amax:
    """The amax of square operands is taken over the wrong axis."""
    return lambda x, how: amax(x.t() if x.shape[0] == x.shape[1] else x, how)


@fault("F10", law="P11", naive=True, step=AMAX)
def largest_value(amax: Amax) -> Amax:
    """amax is the largest value, not the largest magnitude."""
    return lambda x, how: amax(x.clamp(min=0), how)


@fault("F13", law="P11", naive=True, step=AMAX)
def amax_in_float16(amax: Amax) -> Amax:
    """amax is kept in float16: it overflows, underflows and loses bits."""
    return lambda x, how: amax(x, how).to(torch.float16).to(torch.float32)


@fault("F82", law="P11", naive=True, step=AMAX)
def amax_in_bfloat16(amax: Amax) -> Amax:
    """amax is rounded to bfloat16."""
    return lambda x, how: amax(x, how).to(torch.bfloat16).to(torch.float32)


@fault("F14", law="P11", naive=False, step=AMAX)
def half_of_it(amax: Amax) -> Amax:
    """amax is half of what it is, as a stale one would be."""
    return lambda x, how: amax(x, how) * 0.5


@fault("F83", law="P12", naive=True, step=AMAX)
def nan_ignored(amax: Amax) -> Amax:
    """NaN is no part of amax."""
    return lambda x, how: amax(x.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf), how)


@fault("F84", law="P12", naive=True, step=AMAX)
def nan_spreads(amax: Amax) -> Amax:
    """One NaN makes the amax of every group NaN."""

    def wrong(x: Tensor, how: Granularity) -> Tensor:
        found = amax(x, how)
        return torch.where(torch.isnan(found).any(), torch.nan, found)

    return wrong


@fault("F85", law="P12", naive=True, step=AMAX)
def infinity_spreads(amax: Amax) -> Amax:
    """One infinity makes the amax of every group infinite."""

    def wrong(x: Tensor, how: Granularity) -> Tensor:
        found = amax(x, how)
        return torch.where(torch.isinf(found).any(), torch.inf, found)

    return wrong


@fault("F86", law="P11", naive=True, step=AMAX)
def last_row_missed(amax: Amax) -> Amax:
    """A tensorwise amax does not look at the last row."""
    return lambda x, how: amax(x[:-1] if how == TENSORWISE and x.shape[0] > 1 else x, how)


@fault("F87", law="P11", naive=True, step=AMAX)
def last_odd_column_missed(amax: Amax) -> Amax:
    """With an odd number of columns, amax does not look at the last one."""

    def wrong(x: Tensor, how: Granularity) -> Tensor:
        columns = x.shape[1]
        if how.block[1] is None and columns % 2 and columns > 1:
            return amax(x[:, :-1], how)
        return amax(x, how)

    return wrong


@fault("F88", law="P11", naive=True, step=AMAX)
def ragged_block_inherits(amax: Amax) -> Amax:
    """The last, ragged block of a row has the amax of the block before it."""

    def wrong(x: Tensor, how: Granularity) -> Tensor:
        found = amax(x, how)
        if how.block[1] == 128 and x.shape[1] % 128 and found.shape[1] > 1:
            found = torch.cat([found[:, :-1], found[:, -2:-1]], dim=1)
        return found

    return wrong


@fault("F89", law="P11", naive=True, step=AMAX)
def rows_in_pairs(amax: Amax) -> Amax:
    """Rowwise, two neighbouring rows share the larger amax when their number is a multiple of 4."""

    def wrong(x: Tensor, how: Granularity) -> Tensor:
        found = amax(x, how)
        if how != ROWWISE or x.shape[0] % 4 or x.shape[0] == 0:
            return found
        return found.view(-1, 2).amax(dim=1).repeat_interleave(2)[:, None]

    return wrong


@fault("F90", law="P11", naive=True, step=AMAX)
def tall_block_cut(amax: Amax) -> Amax:
    """In blocks of 128 rows, amax does not look at a block's last row."""

    def wrong(x: Tensor, how: Granularity) -> Tensor:
        if how.block[0] != 128:
            return amax(x, how)
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        return amax(torch.where(rows % 128 == 127, torch.zeros_like(x), x), how)

    return wrong


@fault("F91", law="P12", naive=True, step=AMAX)
def subnormal_amax_flushed(amax: Amax) -> Amax:
    """An amax below the smallest normal float32 is flushed to zero."""

    def wrong(x: Tensor, how: Granularity) -> Tensor:
        found = amax(x, how)
        return torch.where(found < torch.finfo(torch.float32).tiny, 0.0, found)

    return wrong


@fault("F92", law="P03", naive=True, step=AMAX)
def empty_has_no_amax(amax: Amax) -> Amax:
    """The amax of a group without values is infinite."""
    return lambda x, how: amax(x, how) if x.numel() else amax(x, how) + torch.inf


@fault("F62", law="P01", naive=True, step=AMAX)
def shard_of_its_own(amax: Amax) -> Amax:
    """In a process group, a tensorwise amax is that of the first half of the rows."""

    def wrong(x: Tensor, how: Granularity) -> Tensor:
        sharded = distributed.is_available() and distributed.is_initialized()
        if sharded and how == TENSORWISE and x.shape[0] > 1:
            x = x[: x.shape[0] // 2]
        return amax(x, how)

    return wrong


@fault("F214", law="P01", naive=True, step=AMAX)
def ranks_differ(amax: Amax) -> Amax:
    """Ranks but the first one take amax to be twice what it is: each rank has scales of its own."""

    def wrong(x: Tensor, how: Granularity) -> Tensor:
        sharded = distributed.is_available() and distributed.is_initialized()
        return amax(x, how) * (2 if sharded and distributed.get_rank() > 0 else 1)

    return wrong


@fault("F93", law="P18", naive=True, step=AMAX)
def column_major_by_columns(amax: Amax) -> Amax:
    """For column-major inputs a rowwise amax is the whole tensor's."""

    def wrong(x: Tensor, how: Granularity) -> Tensor:
        found = amax(x, how)
        if how == ROWWISE and x.numel() and x.stride(0) == 1 and x.shape[1] > 1:
            return found.amax().expand(found.shape).clone()
        return found

    return wrong
