"""Tensor to codes and scales: any shape, granularity, format, rule, dtype, distribution and layout.

Codes and scales equal the oracle's, bit for bit. Beyond that, laws that need no oracle: what is
exact comes back exactly, groups do not see each other, and a transposed tensor is quantised as the
transpose.
"""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8.quantize import Operand, Quantized
from fp8.scaling import GRANULARITIES
from fp8.targets.reference import ReferenceTarget
from fp8.testing import oracle
from fp8.testing.quantize_checks import Case, cases, chosen, expected, facts, judge_quantized
from fp8.testing.strategies import (
    DTYPES,
    LAYOUTS,
    Array,
    as_tensor,
    examples,
    extents,
    matrix,
    to_dtype,
)

granularities = pytest.mark.parametrize("granularity", GRANULARITIES)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture
def operands(target, judge, granularity):
    """The target's operands of the granularity, of every format and by every rule that it has."""
    known = chosen(target.capabilities().operands, granularity=granularity)
    judge.require(bool(known), f"quantize: no {granularity} operand")
    return known


def begin(judge, operand: Operand, case: Case) -> None:
    judge.example(**facts(operand), **vars(case))


def transposed(want: oracle.Quantized) -> oracle.Quantized:
    return oracle.Quantized(want.codes.T, want.scale.T, want.fmt, want.block[::-1])


# --- against the oracle -------------------------------------------------------------------------


@pytest.mark.law("P06", "P18")
@dtypes
@granularities
@examples(40)
@given(data=st.data())
def test_codes_and_scales(target, operands, granularity, dtype, judge, fp8_seed, data):
    """Codes and scales are the oracle's; the input is left as it was, and again gives the same."""
    operand = data.draw(st.sampled_from(operands))
    case = data.draw(cases(dtypes=(dtype,)))
    begin(judge, operand, case)
    array = case.array(fp8_seed)
    x = as_tensor(array, dtype, target.device, case.layout)
    before = x.clone()
    got = target.quantize(x, operand)
    judge_quantized(judge, "P06", got, expected(array, operand))
    judge.bitwise("P18", "input afterwards", x, before)
    judge.equal("P06", "device", got.codes.device.type, target.device.type)


@pytest.mark.law("P06", "P11")
@granularities
def test_every_extent(target, operands, granularity, judge, profile, fp8_seed):
    """Every number of rows and of columns from 1 to 258: all residues of the blocks, twice."""
    edges = {127, 128, 129, 255, 256, 257}
    numbers = sorted(edges | set(range(1, 259, 7 if profile == "quick" else 1)))
    rng = np.random.default_rng([fp8_seed, 13])
    whole = to_dtype(
        rng.standard_normal((258, 3)) * np.exp2(rng.integers(-9, 9, (258, 3))), "bfloat16"
    )
    for n in numbers:
        operand = operands[n % len(operands)]
        for x in (whole[:n], whole[:n].T):
            judge.example(**facts(operand), rows=x.shape[0], columns=x.shape[1])
            got = target.quantize(as_tensor(x, "bfloat16", target.device), operand)
            judge_quantized(judge, "P06", got, expected(x, operand))


@pytest.mark.law("P03")
@granularities
def test_empty(target, operands, granularity, judge):
    """A matrix without rows or without columns has no codes, and scales of the right shape."""
    for operand in operands:
        for shape in ((0, 5), (5, 0), (0, 0), (0, 128), (129, 0)):
            judge.example(**facts(operand), rows=shape[0], columns=shape[1])
            x = torch.empty(shape, device=target.device)
            worked, got = judge.attempt(
                "P03", "nothing to quantise", lambda x=x, o=operand: target.quantize(x, o)
            )
            if worked:
                judge_quantized(judge, "P03", got, expected(np.zeros(shape), operand))
                judge.equal("P03", "shape of nothing", tuple(got.codes.shape), shape)


@pytest.mark.law("P06", "P11")
@granularities
def test_recorded(target, operands, granularity, judge):
    """The same input on every machine and version: what `fp8 diff` compares."""
    for operand in operands:
        judge.example(**facts(operand))
        x = matrix("wide", 131, 260, 7)
        got = target.quantize(as_tensor(to_dtype(x, "float32"), "float32", target.device), operand)
        judge_quantized(judge, "P06", got, expected(to_dtype(x, "float32"), operand))
        judge.record(f"codes {operand}", got.codes, "hash")
        judge.record(f"scale {operand}", got.scale, "hash")


# --- without the oracle -------------------------------------------------------------------------


@pytest.mark.law("P05")
@dtypes
@granularities
@examples(15)
@given(data=st.data())
def test_exact_values_come_back(target, operands, granularity, dtype, judge, fp8_seed, data):
    """Integers times a power of two of their own group are the code times the scale, exactly.

    The group's largest integer is 7 (15 in e4m3fnuz): 448 = 7 * 2^6, 57344 = 7 * 2^13 and
    240 = 15 * 2^4, so each rule's scale is a power of two, and no group's is its neighbour's: a
    scale put on another group, or on the wrong axis, is off by a factor of two or more.
    """
    operand = data.draw(st.sampled_from(operands))
    # Up to five blocks one way, and two the other.
    rows, columns = data.draw(
        st.permutations([data.draw(extents(1, 520)), data.draw(extents(1, 140))])
    )
    layout = data.draw(st.sampled_from(LAYOUTS))
    seed = data.draw(st.integers(0, 2**20))
    judge.example(
        **facts(operand), rows=rows, columns=columns, dtype=dtype, layout=layout, seed=seed
    )
    x = exact_values(operand, rows, columns, np.random.default_rng([fp8_seed, seed]))
    got = target.quantize(as_tensor(x, dtype, target.device, layout), operand)
    name, block = operand.format.name, operand.granularity.block
    codes = got.codes.view(torch.uint8).cpu().numpy()
    judge.bitwise(
        "P05", "values", oracle.dequantize(codes, got.scale.cpu().numpy(), name, block) + 0, x + 0
    )


def exact_values(operand: Operand, rows: int, columns: int, rng: np.random.Generator) -> Array:
    largest = 15 if operand.format.name == "e4m3fnuz" else 7
    block = operand.granularity.block
    shape = [1 if b is None else -(-n // b) for b, n in zip(block, (rows, columns), strict=True)]
    # Neighbours along either axis differ: the exponents step by 1 one way, by 3 the other, mod 7.
    i, j = np.indices(shape)
    exponents = (i + 3 * j + rng.integers(7)) % 7 - 3
    x = rng.integers(-largest, largest + 1, (rows, columns)).astype(np.float64)
    heights, widths = (n if b is None else b for b, n in zip(block, (rows, columns), strict=True))
    for top in range(0, rows, heights):
        for left in range(0, columns, widths):
            group = x[top : top + heights, left : left + widths]
            group[rng.integers(group.shape[0]), rng.integers(group.shape[1])] = largest
    return x * np.exp2(oracle.expand(exponents, block, (rows, columns)))


@pytest.mark.thorough
@pytest.mark.law("P25", "P11")
@granularities
@examples(20)
@given(data=st.data())
def test_groups_do_not_see_each_other(target, operands, granularity, judge, fp8_seed, data):
    """Another value in one place changes codes and scale of its group, and nothing else."""
    operand = data.draw(st.sampled_from(operands))
    case = data.draw(cases(exponents=(0,), damage=("none",)))
    factor = data.draw(st.sampled_from((0.0, -3.0, 2.0**10, 2.0**-10, 117.0)))
    begin(judge, operand, case)
    array = case.array(fp8_seed)
    place = case.seed % case.rows, (case.seed // 7) % case.columns
    changed = array.copy()
    changed[place] = to_dtype(np.array((array[place] + 1.0) * factor), case.dtype)
    before, after = (
        target.quantize(as_tensor(x, case.dtype, target.device, case.layout), operand)
        for x in (array, changed)
    )
    block = operand.granularity.block
    group = tuple(
        slice(None) if size is None else slice(at // size * size, at // size * size + size)
        for size, at in zip(block, place, strict=True)
    )
    own = tuple(0 if size is None else at // size for size, at in zip(block, place, strict=True))
    codes, scales = (torch.ones(t.shape, dtype=torch.bool) for t in (before.codes, before.scale))
    codes[group], scales[own] = False, False
    judge_same(judge, "P25", "scales of the others", after.scale[scales], before.scale[scales])
    judge_same(judge, "P25", "codes of the others", after.codes[codes], before.codes[codes])
    # And the group itself is quantised as if it was alone.
    alone = target.quantize(as_tensor(changed[group], case.dtype, target.device), operand)
    judge.bitwise("P25", "codes of the group", after.codes[group], alone.codes)
    judge.bitwise("P25", "scale of the group", after.scale[own], alone.scale[0, 0])


def judge_same(judge, law: str, check: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """`bitwise`, unless there is nothing: the only group has no others."""
    if want.numel():
        judge.bitwise(law, check, got, want)


@pytest.mark.law("P25")
@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "1x128"])
@examples(20)
@given(data=st.data())
def test_permuted_rows(target, operands, granularity, judge, fp8_seed, data):
    """Rows in another order have their codes, and their scales, in that order."""
    operand = data.draw(st.sampled_from(operands))
    case = data.draw(cases())
    begin(judge, operand, case)
    array = case.array(fp8_seed)
    order = np.random.default_rng(case.seed).permutation(case.rows)
    first, second = (
        target.quantize(as_tensor(x, case.dtype, target.device, case.layout), operand)
        for x in (array, array[order])
    )
    index = torch.from_numpy(order).to(target.device)
    judge.bitwise("P25", "permuted codes", second.codes, first.codes[index])
    scale = first.scale if granularity == "tensorwise" else first.scale[index]
    judge.bitwise("P25", "permuted scales", second.scale, scale)


@pytest.mark.law("P18")
@dtypes
@granularities
@examples(15)
@given(data=st.data())
def test_layouts(target, operands, granularity, dtype, judge, fp8_seed, data):
    """However the input lies, NaN around it or rows that are one row in memory: the same result."""
    operand = data.draw(st.sampled_from(operands))
    case = data.draw(cases(dtypes=(dtype,), largest=140))
    begin(judge, operand, case)
    array = case.array(fp8_seed)
    contiguous = target.quantize(as_tensor(array, dtype, target.device), operand)
    for layout in LAYOUTS:
        got = target.quantize(as_tensor(array, dtype, target.device, layout), operand)
        judge.bitwise("P18", f"codes of {layout}", got.codes, contiguous.codes)
        judge.bitwise("P18", f"scale of {layout}", got.scale, contiguous.scale)
    row = as_tensor(array[:1], dtype, target.device)
    one, many = (
        target.quantize(x, operand)
        for x in (row.expand(case.columns, -1).contiguous(), row.expand(case.columns, -1))
    )
    judge.bitwise("P18", "codes of an expanded row", many.codes, one.codes)
    judge.bitwise("P18", "scale of an expanded row", many.scale, one.scale)


@pytest.mark.law("P25")
@granularities
@examples(10)
@given(data=st.data())
def test_repeatable(target, operands, granularity, judge, fp8_seed, data):
    """The same input again gives the same bits."""
    operand = data.draw(st.sampled_from(operands))
    case = data.draw(cases())
    begin(judge, operand, case)
    x = as_tensor(case.array(fp8_seed), case.dtype, target.device, case.layout)
    first = target.quantize(x, operand)
    for _ in range(3):
        again = target.quantize(x, operand)
        judge.bitwise("P25", "codes again", again.codes, first.codes)
        judge.bitwise("P25", "scale again", again.scale, first.scale)


# --- the quantised tensor -----------------------------------------------------------------------


@pytest.mark.law("P18", "P16")
@granularities
@examples(25)
@given(data=st.data())
def test_transposed(target, operands, granularity, judge, fp8_seed, data):
    """Quantising x.t() by the transposed operand is transposing quantised x; twice is nothing.

    The scale's axis follows: a rowwise operand becomes columnwise, 1x128 becomes 128x1.
    """
    operand = data.draw(st.sampled_from(operands))
    case = data.draw(cases())
    begin(judge, operand, case)
    array = case.array(fp8_seed)
    x = as_tensor(array, case.dtype, target.device, case.layout)
    quantized = target.quantize(x, operand)
    turned = quantized.t()
    judge.equal(
        "P16",
        "granularity of t()",
        turned.operand.granularity.block,
        operand.granularity.block[::-1],
    )
    judge.equal("P16", "format of t()", turned.operand.format, operand.format)
    judge.equal("P16", "rule of t()", turned.operand.rule, operand.rule)
    judge.equal("P16", "operand of t().t()", turned.t().operand, operand)
    judge.bitwise("P16", "codes of t().t()", turned.t().codes, quantized.codes)
    judge.bitwise("P16", "scale of t().t()", turned.t().scale, quantized.scale)
    judge.bitwise("P16", "values of t()", turned.dequantize(), quantized.dequantize().t())
    if turned.operand in target.capabilities().operands:
        got = target.quantize(x.t(), turned.operand)
        judge.bitwise("P18", "codes of x.t()", got.codes, turned.codes)
        judge.bitwise("P18", "scale of x.t()", got.scale, turned.scale)
    else:
        judge_quantized(judge, "P18", turned, transposed(expected(array, operand)))


@pytest.mark.law("P05")
@granularities
@examples(25)
@given(data=st.data())
def test_dequantize(target, operands, granularity, judge, fp8_seed, data):
    """dequantize() is every code times its group's scale, rounded once to float32."""
    operand = data.draw(st.sampled_from(operands))
    case = data.draw(cases())
    begin(judge, operand, case)
    rng = np.random.default_rng([fp8_seed, case.seed])
    codes = rng.integers(0, 256, (case.rows, case.columns), dtype=np.uint8)
    name, block = operand.format.name, operand.granularity.block
    shape = oracle.group_amax(np.zeros(codes.shape), block).shape
    scale = np.exp2(rng.uniform(-140, 110, shape)).astype(np.float32)
    tensor = torch.from_numpy(codes).to(target.device).view(operand.format.dtype)
    quantized = Quantized(tensor, torch.from_numpy(scale).to(target.device), operand)
    want = oracle.round_to(oracle.dequantize(codes, scale, name, block), "float32")
    judge.bitwise("P05", "codes times scale", quantized.dequantize(), want)


@pytest.mark.thorough
@pytest.mark.law("P16")
@granularities
def test_saved_and_loaded(target, operands, granularity, judge):
    """torch.save and torch.load keep codes, scales and operand."""
    for operand in operands:
        judge.example(**facts(operand))
        x = as_tensor(to_dtype(matrix("wide", 131, 140, 3), "bfloat16"), "bfloat16", target.device)
        quantized = target.quantize(x, operand)
        file = io.BytesIO()
        torch.save(quantized, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        judge.bitwise("P16", "codes loaded", loaded.codes, quantized.codes)
        judge.bitwise("P16", "scale loaded", loaded.scale, quantized.scale)
        judge.equal("P16", "operand loaded", loaded.operand, operand)


@pytest.mark.law("P16")
@granularities
def test_codes_are_row_major(target, operands, granularity, judge):
    """The reference promises codes whose columns are adjacent, whatever the input's strides."""
    ours = isinstance(target, ReferenceTarget)
    judge.require(ours, "quantize: promises no layout of its codes")
    for layout in LAYOUTS:
        judge.example(granularity=granularity, layout=layout)
        x = as_tensor(matrix("normal", 131, 140, 3), "float32", target.device, layout)
        judge.equal("P16", "strides", target.quantize(x, operands[0]).codes.stride(), (140, 1))
