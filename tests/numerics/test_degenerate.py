"""Degenerate operands: nothing but zeros, one NaN or infinity, and every magnitude there is.

Zeros stay zeros, what should be finite is finite, and damage stays in its own scaling group, in
quantised operands and in their products. Layers have a file of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8.formats import FORMATS
from fp8.quantize import Operand, Quantized
from fp8.scaling import GRANULARITIES, SCALE_RULES, TORCHAO
from fp8.testing import oracle
from fp8.testing.bounds import expected, product_bound
from fp8.testing.strategies import DTYPES, LAYOUTS, as_tensor, examples, extents, shapes, to_dtype
from fp8.testing.worlds import scale_shape

ELEMENTS = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")
#: rule -> the oracle's name for it, and whether it rounds to a power of two
RULES = {name: (name.removesuffix("_pow2"), name.endswith("_pow2")) for name in SCALE_RULES}
BAD_VALUES = {"NaN": np.nan, "Inf": np.inf, "-Inf": -np.inf}

granularities = pytest.mark.parametrize("granularity", GRANULARITIES)
rules = pytest.mark.parametrize("rule", SCALE_RULES)


# --- quantising ---------------------------------------------------------------------------------


@pytest.fixture
def formats_of(target, granularity, rule, judge):
    """The element formats that the target quantises to by this granularity and rule."""
    operands = target.capabilities().operands
    known = [name for name in ELEMENTS if how(name, granularity, rule) in operands]
    judge.require(bool(known), f"quantize: no {granularity} operand by the rule {rule}")
    return known


def how(format: str, granularity: str, rule: str) -> Operand:
    return Operand(FORMATS[format], GRANULARITIES[granularity], SCALE_RULES[rule])


def oracle_codes(x: np.ndarray, operand: Operand) -> tuple[np.ndarray, np.ndarray]:
    rule, pow2 = RULES[operand.rule.name]
    return oracle.quantize(x, operand.format.name, operand.granularity.block, rule, pow2)


def judge_quantized(judge, got: Quantized, x: np.ndarray, operand: Operand) -> None:
    """Codes and scales, bit for bit."""
    codes, scale = oracle_codes(x, operand)
    judge.bitwise("P12", "codes", got.codes.view(torch.uint8), codes, fmt=operand.format.name)
    judge.bitwise("P12", "scale", got.scale, scale)


def judge_layout(judge, target, got: Quantized, x: np.ndarray, dtype: str) -> None:
    """The NaN around a sliced, padded or offset x, one value away, changes nothing."""
    alone = target.quantize(as_tensor(x, dtype, target.device), got.operand)
    judge.bitwise("P22", "among NaN", [got.codes, got.scale], [alone.codes, alone.scale])


def as_bytes(codes: torch.Tensor) -> np.ndarray:
    return codes.view(torch.uint8).cpu().numpy()


def group_of(x: np.ndarray, granularity: str, row: int, column: int) -> np.ndarray:
    """A mask of the values that share the scale of x[row, column]."""
    mask = np.zeros(x.shape, bool)
    span = [
        slice(None) if size is None else slice(at // size * size, at // size * size + size)
        for size, at in zip(GRANULARITIES[granularity].block, (row, column), strict=True)
    ]
    mask[span[0], span[1]] = True
    return mask


@pytest.mark.thorough
@pytest.mark.law("P12", "P22")
@granularities
@rules
@examples(6)
@given(data=st.data())
def test_zero_groups(target, formats_of, granularity, rule, judge, fp8_seed, data):
    """Zeros of both signs stay what they are, under a scale that is finite and above zero."""
    rows, columns = data.draw(extents(1, 260)), data.draw(extents(1, 260))
    element = data.draw(st.sampled_from(formats_of))
    dtype = data.draw(st.sampled_from(DTYPES))
    layout = data.draw(st.sampled_from(LAYOUTS))
    zeros = data.draw(st.sampled_from(("everything", "rows", "columns", "a block")))
    seed = data.draw(st.integers(0, 2**20))
    judge.example(
        rows=rows,
        columns=columns,
        dtype=dtype,
        format=element,
        layout=layout,
        zeros=zeros,
        seed=seed,
    )
    rng = np.random.default_rng([fp8_seed, seed])
    x = to_dtype(rng.standard_normal((rows, columns)), dtype)
    where = {
        "everything": np.s_[:, :],
        "rows": np.s_[rng.random(rows) < 0.5, :],
        "columns": np.s_[:, rng.random(columns) < 0.5],
        "a block": np.s_[:128, :128],
    }[zeros]
    x[where] = np.copysign(0.0, rng.standard_normal(x[where].shape))
    operand = how(element, granularity, rule)
    got = target.quantize(as_tensor(x, dtype, target.device, layout), operand)
    judge_quantized(judge, got, x, operand)
    judge_layout(judge, target, got, x, dtype)
    negative = 0x80 if operand.format.has_negative_zero else 0
    zero = x == 0
    signed = np.where(np.signbit(x), negative, 0).astype(np.uint8)
    judge.bitwise("P12", "zeros keep their sign", as_bytes(got.codes)[zero], signed[zero])
    judge_scales_usable(judge, got.scale)


def judge_scales_usable(judge, scale: torch.Tensor) -> None:
    wrong = scale[~(torch.isfinite(scale) & (scale > 0))]
    judge.true(
        "P12",
        "scale is usable",
        wrong.numel() == 0,
        f"expected finite scales above 0, got {wrong[:3].tolist()}",
    )


#: every power of two of float32 and its neighbours, 2^-149 to 2^127, and the largest value
_POWERS = np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32)
_UNDER, _OVER = (np.nextafter(_POWERS, np.float32(way)) for way in (0, np.inf))
_MAX = np.finfo(np.float32).max
EVERY_AMAX = np.unique(np.concatenate([_POWERS, _UNDER, _OVER, [_MAX]]))[1:]  # without 0


def rows_of_every_amax() -> np.ndarray:
    """(amaxes, 8): groups of one amax each, with smaller values and zeros of both signs."""
    shares = np.array([1, -1, 0.5, -1 / 3, 0.0, -0.0, 2.0**-10, 0.96], np.float32)
    return EVERY_AMAX[:, None] * shares


def groups_of_every_amax(granularity: str) -> list[np.ndarray]:
    """The same groups as matrices in which each has a scale of its own."""
    rows = rows_of_every_amax()
    if granularity == "tensorwise":
        return [row[None] for row in rows]
    if granularity in ("rowwise", "1x128"):
        return [rows]
    if granularity in ("columnwise", "128x1"):
        return [np.ascontiguousarray(rows.T)]
    tall = np.zeros((len(rows), 128), np.float32)
    tall[:, 77 : 77 + rows.shape[1]] = rows
    return [tall.reshape(-1, 1)]


@pytest.mark.thorough
@pytest.mark.law("P12")
@granularities
@rules
def test_every_amax(target, formats_of, granularity, rule, judge):
    """An amax at, just under and just over each power of two of float32, subnormals included.

    Codes and scales equal the oracle's; scales are finite and above 0; no code is NaN.
    """
    groups = groups_of_every_amax(granularity)
    # With one scale a row, the rows stacked have the scales of each alone.
    stacked = np.concatenate(groups) if granularity == "tensorwise" else groups[0]
    for element in formats_of[:2]:  # e4m3fn and e5m2: the rule knows only the format's maximum
        operand = how(element, granularity, rule)
        judge.example(operand=str(operand))
        got = [target.quantize(torch.from_numpy(x).to(target.device), operand) for x in groups]
        codes = torch.cat([q.codes.view(torch.uint8) for q in got])
        scale = torch.cat([q.scale for q in got])
        by_row = how(element, "rowwise", rule) if granularity == "tensorwise" else operand
        want_codes, want_scale = oracle_codes(stacked, by_row)
        judge.bitwise("P12", "codes of every amax", codes, want_codes, fmt=element)
        judge.bitwise("P12", "scale of every amax", scale, want_scale)
        judge_scales_usable(judge, scale)
        damaged = np.isin(codes.cpu().numpy(), oracle.nan_codes(element))
        judge.equal("P12", "NaN from finite values", int(damaged.sum()), 0)


@pytest.mark.thorough
@pytest.mark.law("P12", "P22")
@granularities
@rules
@examples(6)
@given(data=st.data())
def test_one_bad_value(target, formats_of, granularity, rule, judge, fp8_seed, data):
    """One NaN or infinity changes codes and scales of its own group only, as the rule says."""
    rows, columns = data.draw(extents(1, 260)), data.draw(extents(1, 260))
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    bad = data.draw(st.sampled_from(tuple(BAD_VALUES)))
    element = data.draw(st.sampled_from(formats_of))
    dtype = data.draw(st.sampled_from(DTYPES))
    layout = data.draw(st.sampled_from(LAYOUTS))
    seed = data.draw(st.integers(0, 2**20))
    judge.example(
        rows=rows,
        columns=columns,
        bad=bad,
        at=[row, column],
        dtype=dtype,
        format=element,
        layout=layout,
        seed=seed,
    )
    clean = to_dtype(
        np.random.default_rng([fp8_seed, seed]).standard_normal((rows, columns)), dtype
    )
    x = clean.copy()
    x[row, column] = BAD_VALUES[bad]
    operand = how(element, granularity, rule)
    got, whole = (
        target.quantize(as_tensor(values, dtype, target.device, layout), operand)
        for values in (x, clean)
    )
    judge_quantized(judge, got, x, operand)
    judge_layout(judge, target, got, x, dtype)
    others = ~group_of(x, granularity, row, column)
    if others.any():
        judge.bitwise(
            "P12",
            "codes of other groups",
            as_bytes(got.codes)[others],
            as_bytes(whole.codes)[others],
        )
        other_scales = others_of(got.scale, operand, row, column)
        judge.bitwise(
            "P12", "scales of other groups", got.scale[other_scales], whole.scale[other_scales]
        )


def others_of(scale: torch.Tensor, operand: Operand, row: int, column: int) -> torch.Tensor:
    """A mask of the scales that do not belong to x[row, column]."""
    mask = torch.ones(scale.shape, dtype=torch.bool, device=scale.device)
    at = (
        0 if size is None else index // size
        for size, index in zip(operand.granularity.block, (row, column), strict=True)
    )
    mask[tuple(at)] = False
    return mask


@pytest.mark.law("P25")
@pytest.mark.parametrize("granularity", ["rowwise", "1x128"])
@rules
@examples(8)
@given(data=st.data())
def test_rows_are_quantized_alone(target, formats_of, granularity, rule, judge, fp8_seed, data):
    """A row's codes and scales do not depend on what other rows hold, nor on how many there are."""
    rows, columns = data.draw(extents(2, 200)), data.draw(extents(1, 260))
    row = data.draw(st.integers(0, rows - 1))
    element = data.draw(st.sampled_from(formats_of))
    dtype = data.draw(st.sampled_from(DTYPES))
    seed = data.draw(st.integers(0, 2**20))
    judge.example(rows=rows, columns=columns, row=row, dtype=dtype, format=element, seed=seed)
    operand = how(element, granularity, rule)
    rng = np.random.default_rng([fp8_seed, seed])
    x = to_dtype(rng.standard_normal((rows, columns)), dtype)
    changed = to_dtype(rng.standard_normal((rows, columns)) * 1e3, dtype)
    changed[row] = x[row]
    together, among_others, alone = (
        target.quantize(as_tensor(values, dtype, target.device), operand)
        for values in (x, changed, x[row : row + 1])
    )
    codes, scale = together.codes.view(torch.uint8)[row], together.scale[row]
    for check, got, at in (("among others", among_others, row), ("alone", alone, 0)):
        judge.bitwise("P25", f"codes {check}", got.codes.view(torch.uint8)[at], codes)
        judge.bitwise("P25", f"scale {check}", got.scale[at], scale)


# --- products -----------------------------------------------------------------------------------

FORMAT_PAIRS = (("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn"), ("e4m3fn", "e5m2"))
GRANULARITY_PAIRS = (("tensorwise", "tensorwise"), ("rowwise", "rowwise"), ("1x128", "128x128"))


@pytest.fixture
def product_pair(target, formats, granularities, judge):
    """The two operands, which the target multiplies."""
    pair = tuple(
        Operand(FORMATS[f], GRANULARITIES[g], TORCHAO)
        for f, g in zip(formats, granularities, strict=True)
    )
    known = pair in target.capabilities().products
    judge.require(known, f"scaled_mm: no {pair[0]} x {pair[1]}")
    return pair


product_pairs = pytest.mark.parametrize("granularities", GRANULARITY_PAIRS, ids="-".join)
format_pairs = pytest.mark.parametrize("formats", FORMAT_PAIRS, ids="-".join)


@dataclass(frozen=True)
class Side:
    """One operand of a product, as arrays: uint8 codes, float32 scales."""

    codes: np.ndarray
    scale: np.ndarray
    operand: Operand

    @property
    def values(self) -> np.ndarray:
        return oracle.dequantize(
            self.codes, self.scale, self.operand.format.name, self.operand.granularity.block
        )

    def on(self, device) -> Quantized:
        codes = torch.from_numpy(self.codes).to(device).view(self.operand.format.dtype)
        return Quantized(codes, torch.from_numpy(self.scale).to(device), self.operand)


@pytest.mark.law("P12")
@product_pairs
@format_pairs
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_product_of_two_codes(
    target, product_pair, granularities, formats, dtype, judge, fp8_seed
):
    """All 256 x 256 products, ±max, the smallest subnormals and NaN among them, are exact.

    Row i of the one operand holds code i once, among zeros; row j of the other holds code j
    throughout. So each sum has one term, of 8 significant bits, that every accumulator and even
    bfloat16 holds. A NaN, and the infinity of e5m2, spoils its own row or column only.
    """
    judge.example(formats=list(formats), granularities=list(granularities), dtype=dtype)
    left, right = product_pair
    K = 32
    rng = np.random.default_rng([fp8_seed, K])
    every = np.arange(256, dtype=np.uint8)
    once = np.zeros((256, K), np.uint8)
    once[every, rng.integers(0, K, 256)] = every
    a, b = (
        Side(
            codes,
            np.exp2(rng.integers(-3, 4, scale_shape(operand.granularity.name, 256, K))).astype(
                np.float32
            ),
            operand,
        )
        for codes, operand in ((once, left), (np.repeat(every[:, None], K, axis=1), right))
    )
    got = target.scaled_mm(
        a.on(target.device),
        b.on(target.device),
        bias=None,
        out_dtype=getattr(torch, dtype),
        accumulation="fast",
    )
    value, _ = oracle.product(a.values, b.values)
    # The sign of a zero sum depends on where the sum begins.
    judge.bitwise("P12", "product of two codes", got + 0, as_tensor(value, dtype, "cpu") + 0)


@pytest.mark.law("P12")
@product_pairs
@format_pairs
@examples(12)
@given(data=st.data(), seed=st.integers(0, 2**20))
def test_extreme_scales(target, product_pair, granularities, formats, judge, fp8_seed, data, seed):
    """Scales of 2^±90 that cancel give what moderate ones give; a NaN scale spoils its group."""
    alignment = target.capabilities().alignment
    M, K, N = data.draw(shapes(1, 200, alignment=alignment))
    exponent = data.draw(st.integers(-90, 90))
    broken = data.draw(st.booleans())
    judge.example(M=M, K=K, N=N, exponent=exponent, broken=broken, seed=seed)
    rng = np.random.default_rng([fp8_seed, seed])

    def side(operand: Operand, rows: int, exponent: int) -> Side:
        numbers = rng.standard_normal((rows, K)).astype(np.float32)
        codes = oracle.encode(numbers, operand.format.name)
        shape = scale_shape(operand.granularity.name, rows, K)
        scale = np.ldexp(rng.random(shape) + 0.5, exponent).astype(np.float32)
        return Side(codes, scale, operand)

    a, b = side(product_pair[0], M, exponent), side(product_pair[1], N, -exponent)
    if broken:
        a.scale[rng.integers(len(a.scale)), rng.integers(a.scale.shape[1])] = np.nan
    got = target.scaled_mm(
        a.on(target.device),
        b.on(target.device),
        bias=None,
        out_dtype=torch.float32,
        accumulation="precise",
    )
    value, magnitude = oracle.product(a.values, b.values)
    model = target.policy.accumulation["precise"]
    finite = np.nan_to_num(value), np.nan_to_num(magnitude)
    bound = product_bound(*finite, K, "float32", model)
    judge.bound("P12", "product of extreme scales", got, expected(value, "float32"), bound)
