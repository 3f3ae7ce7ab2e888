"""The scale of a group: its bits under each rule and granularity, from the exact amax.

Judged through the target's `quantize`. Amaxes are enumerated where a rule decides: at every power
of two of the dtype, where the quotient is one, at the rules' floors and at the ends. What zeros,
NaN and infinity do to the groups around them is in test_degenerate.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fp8.scaling import GRANULARITIES, SCALE_RULES
from fp8.testing import oracle
from fp8.testing.probes import AmaxProbes, amax_probes, matrix_of_amaxes
from fp8.testing.quantize_checks import chosen, expected, facts, judge_quantized
from fp8.testing.strategies import DTYPES, LAYOUTS, as_tensor, examples, extents, to_dtype

if TYPE_CHECKING:
    from fp8.quantize import Operand, Quantized

ELEMENTS = tuple(name for name in oracle.FORMATS if name != "e8m0fnu")
#: every how many-th amax a granularity takes, the costly ones fewer; rowwise takes them all
STRIDES = {"rowwise": 1, "tensorwise": 41}
OTHER_STRIDE = 7

formats = pytest.mark.parametrize("format", ELEMENTS)
rules = pytest.mark.parametrize("rule", SCALE_RULES)
granularities = pytest.mark.parametrize("granularity", GRANULARITIES)


@pytest.fixture
def operands(target, judge, format, rule):
    """The target's operands of the format by the rule, one for each granularity that it has."""
    known = chosen(target.capabilities().operands, format=format, rule=rule)
    judge.require(bool(known), f"quantize: no {format} by the rule {rule}")
    return known


@pytest.fixture
def of_granularity(target, judge, granularity):
    """The target's operands of the granularity, of every format and by every rule that it has."""
    known = chosen(target.capabilities().operands, granularity=granularity)
    judge.require(bool(known), f"quantize: no {granularity} operand")
    return known


# --- the bits -----------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.law("P11")
@rules
@formats
def test_every_binade(target, operands, judge, profile, fp8_seed, format, rule):
    """The scale's bits, and the codes under it, for every amax at which a rule decides.

    Just above the format's maximum times a power of two the quotient is just below a power of two:
    there exp2(floor(log2(quotient))) is the next power, while its mantissa's bits are not.
    """
    scales = []
    # Rowwise, or what there is, in every dtype; the other granularities, which test_amax_anywhere
    # and test_quantize.py have too, in one of them.
    first, *others = sorted(operands, key=lambda operand: operand.granularity.name != "rowwise")
    for number, operand in enumerate([first] if profile == "quick" else [first, *others]):
        for dtype in DTYPES if operand is first else (DTYPES[number % len(DTYPES)],):
            for probes in amax_probes(format, dtype):
                judge.example(**facts(operand), dtype=dtype, amax=probes.edge)
                scales += judge_probes(judge, target, operand, dtype, probes, fp8_seed)
    judge.record("scales", scales, "hash")


def judge_probes(judge, target, operand: Operand, dtype: str, probes: AmaxProbes, seed: int):
    """Codes and scales of groups that have these amaxes; the scales, as tensors."""
    amaxes = probes.amax[:: STRIDES.get(operand.granularity.name, OTHER_STRIDE)]
    alone = operand.granularity.name == "tensorwise"
    scales = []
    for part in np.split(amaxes, len(amaxes)) if alone else (amaxes,):
        x = matrix_of_amaxes(part, operand.granularity.block, dtype, seed)
        got = target.quantize(as_tensor(x, dtype, target.device), operand)
        judge_quantized(judge, "P11", got, expected(x, operand))
        scales.append(got.scale)
    return scales


@pytest.mark.law("P11")
@rules
@formats
def test_scale_is_float32_whatever_the_dtype(target, operands, judge, fp8_seed, format, rule):
    """The same values in float32, bfloat16 and float16 have the same codes and the same scales.

    An amax or a quotient in the input's own dtype would show: the values are integers up to 255,
    and 448 divided by most of them needs all of float32's bits.
    """
    rng = np.random.default_rng([fp8_seed, 11])
    # float16 holds them from 2^-14 on, to all eight bits.
    x = rng.integers(-255, 256, (300, 140)) * np.exp2(rng.integers(-6, 4, (300, 1)))
    for operand in operands:
        judge.example(**facts(operand), seed=fp8_seed)
        want = expected(x, operand)
        for dtype in DTYPES:
            got = target.quantize(as_tensor(x, dtype, target.device), operand)
            judge.equal("P11", "dtype of the scale", got.scale.dtype, torch.float32)
            judge_quantized(judge, "P11", got, want)


# --- where the amax is --------------------------------------------------------------------------


def positions(rows: int, columns: int) -> list[tuple[int, int]]:
    """Corners of the matrix and of its 128x128 blocks, and one place inside."""
    along = [sorted({0, 1, 127, 128, n - 2, n - 1} & set(range(n))) for n in (rows, columns)]
    inside = (rows // 2, columns // 3)
    return [*((i, j) for i in along[0] for j in along[1]), inside]


@pytest.mark.thorough
@pytest.mark.law("P11")
@granularities
@pytest.mark.parametrize("dtype", DTYPES)
def test_amax_anywhere(target, of_granularity, judge, profile, fp8_seed, granularity, dtype):
    """One large value, positive or negative, at each corner of the matrix and of its blocks.

    It alone makes the scale of its group, and of no other: an amax that leaves out the last row,
    the ragged tail of a block or the negative values is off by 2^5.
    """
    rng = np.random.default_rng([fp8_seed, 12])
    shapes = ((131, 150), (1, 259), (258, 3), (5, 7))
    for number, (rows, columns) in enumerate(shapes[:1] if profile == "quick" else shapes):
        for turn, (i, j) in enumerate(positions(rows, columns)):
            operand = of_granularity[(turn + 7 * number) % len(of_granularity)]
            sign = (-1) ** turn
            judge.example(**facts(operand), rows=rows, columns=columns, at=[i, j], dtype=dtype)
            x = to_dtype(rng.uniform(-1, 1, (rows, columns)), dtype)
            x[i, j] = sign * 39.0
            layout = LAYOUTS[turn % len(LAYOUTS)]
            got = target.quantize(as_tensor(x, dtype, target.device, layout), operand)
            judge_quantized(judge, "P11", got, expected(x, operand))


@pytest.mark.law("P11")
@granularities
@examples(40)
@example(rows=1, columns=1, i=0, j=0, sign=-1, pick=0, dtype="bfloat16")
@given(
    rows=extents(1, 270),
    columns=extents(1, 270),
    i=st.integers(0, 269),
    j=st.integers(0, 269),
    sign=st.sampled_from((-1, 1)),
    pick=st.integers(0, 59),
    dtype=st.sampled_from(DTYPES),
)
def test_one_value_makes_the_scale(
    target, of_granularity, judge, granularity, rows, columns, i, j, sign, pick, dtype
):
    """The only value of an empty matrix gives its group's scale; all others have that of zeros."""
    operand = of_granularity[pick % len(of_granularity)]
    i, j = i % rows, j % columns
    judge.example(**facts(operand), rows=rows, columns=columns, at=[i, j], dtype=dtype)
    x = np.zeros((rows, columns))
    x[i, j] = sign * 0.75
    got = target.quantize(as_tensor(x, dtype, target.device), operand)
    judge_quantized(judge, "P11", got, expected(x, operand))


# --- what a scale is for ------------------------------------------------------------------------


@pytest.mark.law("P11")
@rules
@formats
def test_range_is_used(target, operands, judge, profile, fp8_seed, format, rule):
    """Without the oracle's scales: the largest code is the format's maximum, and no value errs by
    more than half an ulp of its own, or half of the smallest code.

    A power-of-two multiplier is at most the quotient, and more than half of it: there the largest
    code lies between half of the maximum and the maximum.
    """
    for operand in operands:
        # An amax of 2^-11 is above DeepGEMM's floor of 1e-4.
        for exponent in (0,) if profile == "quick" else (-11, 0, 20):
            judge.example(**facts(operand), exponent=exponent, seed=fp8_seed)
            x = values_of_all_binades(format, exponent, fp8_seed)
            got = target.quantize(as_tensor(x, "float32", target.device), operand)
            judge_range(judge, got, x, SCALE_RULES[rule].power_of_two)


def values_of_all_binades(format: str, exponent: int, seed: int) -> np.ndarray:
    """(140, 150), every group with an amax of 1.7 * 2^exponent and values down to underflow."""
    rng = np.random.default_rng([seed, exponent + 20])
    shape = (140, 150)
    binades = int(np.log2(oracle.fmax(format) / smallest_code(format))) + 3
    x = np.ldexp(rng.uniform(1, 1.7, shape), exponent - rng.integers(0, binades, shape))
    x *= rng.choice([-1.0, 1.0], shape)
    x[:, ::128], x[::128, :] = np.ldexp(1.7, exponent), np.ldexp(-1.7, exponent)
    return to_dtype(x, "float32")


def smallest_code(format: str) -> float:
    values = oracle.decode(np.arange(256, dtype=np.uint8), format)
    return float(values[values > 0].min())


#: half an ulp, relative to the value: bits after the leading one, and one more
HALF_AN_ULP = {"e4m3fn": 2.0**-4, "e5m2": 2.0**-3, "e4m3fnuz": 2.0**-4, "e5m2fnuz": 2.0**-3}


def judge_range(judge, got: Quantized, x: np.ndarray, power_of_two: bool) -> None:
    """With m the multiplier, the scale s is (1 + e)/m and the code c is x m (1 + f) + h, where |e|
    and |f| are at most 2^-24 and |h| is half an ulp: c s errs from x by |h| s and by 2^-23 |x|. The
    products of these errors stay below another 2^-23 |x|.
    """
    name, block = got.operand.format.name, got.operand.granularity.block
    codes = oracle.decode(got.codes.view(torch.uint8).cpu().numpy(), name)
    scale = got.scale.double().cpu().numpy()
    largest = oracle.group_amax(codes.astype(np.float32), block).astype(np.float64)
    top = oracle.fmax(name)
    bottom = top / 2 if power_of_two else top
    judge.true(
        "P11",
        "largest code",
        ((bottom <= largest) & (largest <= top)).all(),
        f"largest codes from {largest.min():g} to {largest.max():g}, need {bottom:g} to {top:g}",
    )
    if power_of_two:
        mantissas, _ = np.frexp(scale)
        judge.bitwise("P11", "power of two", mantissas, np.full_like(mantissas, 0.5))
    spread = oracle.expand(scale, block, x.shape)
    half = np.maximum(np.abs(x) * HALF_AN_ULP[name], spread * smallest_code(name) / 2)
    judge.bound("P11", "error of a value", codes * spread, x, half + 2.0**-22 * np.abs(x))


@pytest.mark.thorough
@pytest.mark.law("P11")
@pytest.mark.parametrize("rule", [name for name, rule in SCALE_RULES.items() if rule.power_of_two])
@formats
def test_power_of_two_is_never_above_the_quotient(target, operands, judge, format, rule):
    """Rounded down, whatever the amax: amax times the multiplier stays within the format."""
    largest = oracle.fmax(format)
    of_lines = [o for o in operands if o.granularity.name in ("rowwise", "columnwise")]
    judge.require(bool(of_lines), f"quantize: no {format} rowwise or columnwise by the rule {rule}")
    for operand in of_lines:
        for dtype in DTYPES:
            for probes in amax_probes(format, dtype):
                amaxes = probes.amax[(probes.amax > 1e-12) & np.isfinite(probes.amax)]
                if amaxes.size == 0:
                    continue
                judge.example(**facts(operand), dtype=dtype, amax=probes.edge)
                x = matrix_of_amaxes(amaxes, operand.granularity.block, dtype, 0)
                got = target.quantize(as_tensor(x, dtype, target.device), operand)
                multiplier = 1 / got.scale.double().cpu().numpy().ravel()
                quotient = largest / amaxes.astype(np.float64)
                excess = np.maximum(multiplier - quotient, 0)
                judge.bound("P11", "multiplier", excess, 0 * excess, 0 * excess)
