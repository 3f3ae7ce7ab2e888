"""Degenerate operands: nothing but zeros, one NaN or infinity, and every magnitude there is.

Zeros stay zeros, what should be finite is finite, and damage stays where the recipe's scaling
groups say that it stays, in quantised operands, in products and in a layer's output and gradients.
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
from fp8.testing.linear_runs import run_linear
from fp8.testing.strategies import (
    DTYPES,
    LAYOUTS,
    LinearArrays,
    as_tensor,
    exact_arrays,
    examples,
    extents,
    matrix,
    shapes,
    to_dtype,
)

ELEMENTS = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")
#: rule -> the oracle's name for it, and whether it rounds to a power of two
RULES = {name: (name.removesuffix("_pow2"), name.endswith("_pow2")) for name in SCALE_RULES}
BAD_VALUES = {"NaN": np.nan, "Inf": np.inf, "-Inf": -np.inf}

granularities = pytest.mark.parametrize("granularity", GRANULARITIES)
rules = pytest.mark.parametrize("rule", SCALE_RULES)
recipes = pytest.mark.parametrize("recipe", oracle.RECIPES)


# --- quantising ---------------------------------------------------------------------------------


@pytest.fixture
def formats_of(target, granularity, rule, judge):
    """The element formats that the target quantises to by this granularity and rule."""
    known = [name for name in ELEMENTS if how(name, granularity, rule) in operands(target)]
    judge.require(bool(known), f"quantize: no {granularity} operand by the rule {rule}")
    return known


def how(format: str, granularity: str, rule: str) -> Operand:
    return Operand(FORMATS[format], GRANULARITIES[granularity], SCALE_RULES[rule])


def operands(target) -> frozenset[Operand]:
    return target.capabilities().operands


def oracle_codes(x: np.ndarray, operand: Operand) -> tuple[np.ndarray, np.ndarray]:
    rule, pow2 = RULES[operand.rule.name]
    return oracle.quantize(x, operand.format.name, operand.granularity.block, rule, pow2)


def judge_quantized(judge, got: Quantized, x: np.ndarray, operand: Operand) -> None:
    """Codes and scales, bit for bit."""
    codes, scale = oracle_codes(x, operand)
    judge.bitwise("P12", "codes", got.codes.view(torch.uint8), codes, fmt=operand.format.name)
    judge.bitwise("P12", "scale", got.scale, scale)


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


#: every power of two that float32 has, and its neighbours: 2^-149 to just under 2^128
_POWERS = np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32)
EVERY_AMAX = np.unique(
    np.concatenate(
        [
            _POWERS,
            *(np.nextafter(_POWERS, np.float32(way)) for way in (0, np.inf)),
            [np.float32(3e38)],
        ]
    )
)
EVERY_AMAX = EVERY_AMAX[EVERY_AMAX > 0]


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
        judge.example(format=element, granularity=granularity, rule=rule)
        operand = how(element, granularity, rule)
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


def scale_shape(operand: Operand, rows: int, columns: int) -> tuple[int, int]:
    block = operand.granularity.block
    return (
        1 if block[0] is None else -(-rows // block[0]),
        1 if block[1] is None else -(-columns // block[1]),
    )


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
            np.exp2(rng.integers(-3, 4, scale_shape(operand, 256, K))).astype(np.float32),
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
        shape = scale_shape(operand, rows, K)
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


# --- layers -------------------------------------------------------------------------------------

#: result -> the product of the recipe that makes it
PRODUCTS = {"y": "output", "dx": "grad_input", "dw": "grad_weight"}


@pytest.fixture
def layers_of(target, recipe, judge):
    """The target, which converts by this recipe."""
    judge.require(recipe in target.capabilities().recipes, f"convert: no recipe {recipe}")
    return target


def accumulation(target, recipe: str, name: str) -> str:
    if name == "db":
        return "float32"
    a, _, mode = oracle.RECIPES[recipe][PRODUCTS[name]]
    return "float32" if a is None else target.policy.accumulation[mode]


def flushed(a: np.ndarray, b: np.ndarray, contraction: int, dtype: str) -> float:
    """What a product in high precision may lose where values are subnormal.

    x86's bfloat16 product (VDPBF16PS) takes subnormal inputs, those under 2^-126, for zero.
    """
    if dtype != "bfloat16":
        return 0.0
    largest = (np.abs(x[np.isfinite(x)]).max(initial=0.0) for x in (a, b))
    return contraction * 2.0**-126 * sum(largest)


def judge_layer(judge, target, recipe: str, operands: LinearArrays, dtype: str, layout: str):
    """y, dX, dW and db within their bounds of the oracle's, NaN and infinity where it has them.

    Where the oracle's value is 0 and every term is 0, the bound leaves room for 0 only.
    """
    ran, run = judge.attempt(
        "P12",
        "forward and backward",
        lambda: run_linear(target, recipe, operands, dtype, layout=layout),
    )
    if not ran:
        return None
    exact = oracle.linear(
        operands.x,
        operands.w,
        operands.bias,
        operands.g,
        recipe,
        dtype=dtype,
        bias_rounding=target.policy.bias_rounding,
    )
    (M, K), N = operands.x.shape, len(operands.w)
    for name, contraction in (("y", K), ("dx", N), ("dw", M), ("db", M)):
        want = getattr(exact, name)
        if want is None:
            continue
        model = accumulation(target, recipe, name)
        finite = (np.where(np.isfinite(v), v, 0.0) for v in (want.value, want.magnitude))
        bound = product_bound(*finite, contraction, dtype, model)
        if name == "y" and operands.bias is not None and target.policy.bias_rounding == "after":
            # The product was rounded once before the bias: another half ulp of the product.
            bound = bound + oracle.unit_roundoff(dtype) * np.nan_to_num(want.magnitude)
        if name == "dw" and oracle.RECIPES[recipe]["grad_weight"][0] is None:
            bound = bound + flushed(operands.g, operands.x, M, dtype)
        value = expected(want.value, dtype)
        judge.bound("P12", f"{name} tight", getattr(run, name), value, bound)
    return run


def draw_layer(data, target, smallest: int = 1) -> dict:
    alignment = target.capabilities().alignment
    M, K, N = data.draw(shapes(smallest, 180, alignment=alignment, align_rows=True))
    return {
        "M": M,
        "K": K,
        "N": N,
        "dtype": data.draw(st.sampled_from(DTYPES)),
        "layout": data.draw(st.sampled_from(LAYOUTS)),
        "seed": data.draw(st.integers(0, 2**20)),
    }


def gaussian(facts: dict, base_seed: int, *, bias: bool = False) -> LinearArrays:
    """x, w, g and perhaps a bias of moderate size, in the case's dtype."""
    rng = np.random.default_rng([base_seed, facts["seed"]])
    M, K, N, dtype = (facts[name] for name in ("M", "K", "N", "dtype"))
    x, w, g = (rng.standard_normal(shape) for shape in ((M, K), (N, K), (M, N)))
    offset = to_dtype(rng.standard_normal(N), dtype) if bias else None
    return LinearArrays(to_dtype(x, dtype), to_dtype(w / 8, dtype), offset, to_dtype(g / 8, dtype))


#: what is zero -> the parts of x, w and g
ZEROS = {
    "x": {"x": np.s_[:]},
    "w": {"w": np.s_[:]},
    "g": {"g": np.s_[:]},
    "everything": {"x": np.s_[:], "w": np.s_[:], "g": np.s_[:]},
    "tokens": {"x": np.s_[::2], "g": np.s_[::2]},
    "input channels": {"x": np.s_[:, ::3], "w": np.s_[:, ::3]},
    "output channels": {"w": np.s_[1::2], "g": np.s_[:, 1::2]},
    "blocks": {"x": np.s_[:128, :128], "w": np.s_[:128, :128], "g": np.s_[:128, :128]},
}


@pytest.mark.law("P12")
@recipes
@examples(16)
@given(data=st.data())
def test_layer_of_zeros(layers_of, recipe, judge, fp8_seed, data):
    """Zero tensors, tokens, channels and blocks: every result is finite, and 0 where it must be."""
    facts = draw_layer(data, layers_of)
    zeros, bias = data.draw(st.sampled_from(tuple(ZEROS))), data.draw(st.booleans())
    judge.example(recipe=recipe, zeros=zeros, bias=bias, **facts)
    operands = gaussian(facts, fp8_seed, bias=bias)
    for name, part in ZEROS[zeros].items():
        getattr(operands, name)[part] = 0.0
    run = judge_layer(judge, layers_of, recipe, operands, facts["dtype"], facts["layout"])
    if run is not None:
        for name in ("y", "dx", "dw"):
            finite = bool(torch.isfinite(getattr(run, name)).all())
            judge.true("P12", f"{name} finite", finite, "expected finite values only")


def damage(recipe: str, where: str, row: int, column: int) -> dict:
    """Result -> the part that one bad value at [row, column] of x, w or g must spoil.

    From the recipes' scaling groups alone: a group is spoilt as a whole, and with it every sum that
    it enters. (For the weight's gradient in high precision there are no groups, only sums.)
    """
    everything, this_row = np.s_[:], np.s_[row]
    this_column = np.s_[:, column]
    if recipe == "tensorwise":
        return {
            "x": {"y": everything, "dw": everything},
            "w": {"y": everything, "dx": everything},
            "g": {"dx": everything, "dw": everything},
        }[where]
    if where == "x":
        return {"y": this_row, "dw": this_column}
    if where == "g":
        # Row n of dw is column n of g.
        return {"dx": this_row, "dw": np.s_[column]}
    if recipe == "blockwise":
        tile = (slice(at // 128 * 128, at // 128 * 128 + 128) for at in (row, column))
        return dict(zip(("y", "dx"), (np.s_[:, part] for part in tile), strict=True))
    return {
        "y": np.s_[:, row],
        "dx": this_column if recipe == "rowwise" else everything,
    }


@pytest.mark.law("P12", "P22")
@recipes
@pytest.mark.parametrize("where", ["x", "w", "g"])
@examples(14)
@given(data=st.data())
def test_layer_with_one_bad_value(layers_of, recipe, where, judge, fp8_seed, data):
    """One NaN or infinity in x, w or g: exactly the results that its group enters are spoilt."""
    facts = draw_layer(data, layers_of)
    bad, bias = data.draw(st.sampled_from(tuple(BAD_VALUES))), data.draw(st.booleans())
    operands = gaussian(facts, fp8_seed, bias=bias)
    operand = getattr(operands, where)
    row, column = (data.draw(st.integers(0, extent - 1)) for extent in operand.shape)
    operand[row, column] = BAD_VALUES[bad]
    judge.example(recipe=recipe, where=where, bad=bad, at=[row, column], bias=bias, **facts)
    run = judge_layer(judge, layers_of, recipe, operands, facts["dtype"], facts["layout"])
    if run is None:
        return
    spoiled = damage(recipe, where, row, column)
    for name in ("y", "dx", "dw"):
        got = getattr(run, name)
        mask = torch.zeros(got.shape, dtype=torch.bool)
        if name in spoiled:
            mask[spoiled[name]] = True
        judge.bitwise("P12", f"damage of {name}", ~torch.isfinite(got).cpu(), mask)


#: dtype -> smallest and largest exponent of an amax, and how far its partners go the other way
RANGES = {"float32": (-149, 127, 40), "bfloat16": (-133, 127, 40), "float16": (-24, 15, 3)}
#: float8 hardware multiplies the sum of codes, up to K times 2^25 (448 x 57344), by the scales
HARDWARE_EXPONENT = 90


@pytest.mark.law("P12")
@recipes
@pytest.mark.parametrize("where", ["x", "w", "g"])
@examples(16)
@given(data=st.data())
def test_layer_of_every_magnitude(layers_of, recipe, where, judge, fp8_seed, data):
    """x, w or g with an amax from the smallest subnormal to 3e38, the others at 2^∓40."""
    facts = draw_layer(data, layers_of)
    dtype = facts["dtype"]
    smallest, largest, reach = RANGES[dtype]
    if any(model.startswith("hopper") for model in layers_of.policy.accumulation.values()):
        largest = min(largest, HARDWARE_EXPONENT)
    exponent = data.draw(st.integers(smallest, largest))
    nudge = data.draw(st.sampled_from((1.0, 1.75, 1 + 2.0**-7, 1 - 2.0**-8)))
    values = data.draw(st.sampled_from(("normal", "wide")))
    judge.example(
        recipe=recipe, where=where, exponent=exponent, nudge=nudge, values=values, **facts
    )
    M, K, N = (facts[name] for name in ("M", "K", "N"))
    made = {}
    for index, (name, shape) in enumerate({"x": (M, K), "w": (N, K), "g": (M, N)}.items()):
        raw = matrix(values, *shape, seed=[fp8_seed, facts["seed"], index])
        unit = raw / np.abs(raw).max()
        amax = nudge * 2.0**exponent if name == where else 2.0 ** np.clip(-exponent, -reach, reach)
        made[name] = to_dtype(unit * amax, dtype)
    operands = LinearArrays(made["x"], made["w"], None, made["g"])
    judge_layer(judge, layers_of, recipe, operands, dtype, facts["layout"])


@pytest.mark.law("P25")
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp", "blockwise"])
@examples(12)
@given(data=st.data())
def test_tokens_are_independent(layers_of, recipe, judge, fp8_seed, data):
    """A token's output and gradient depend on no other token, nor on how many there are.

    In exact arithmetic, so that the number of rows, by which a library chooses its kernel and with
    it the order of the sums, can make no difference.
    """
    facts = draw_layer(data, layers_of, smallest=2)
    M, K, N, dtype, layout, seed = facts.values()
    row = data.draw(st.integers(0, M - 1))
    judge.example(recipe=recipe, row=row, **facts)
    operands = exact_arrays(M, K, N, recipe, dtype, False, fp8_seed + seed)
    one = np.s_[row : row + 1]
    alone = LinearArrays(operands.x[one], operands.w, None, operands.g[one])
    # The other tokens large, and of no particular values.
    noise = np.random.default_rng([fp8_seed, seed]).standard_normal((M, K + N)) * 1e3
    noisy = LinearArrays(
        to_dtype(noise[:, :K], dtype), operands.w, None, to_dtype(noise[:, K:], dtype)
    )
    noisy.x[row], noisy.g[row] = operands.x[row], operands.g[row]
    together, among_others, by_itself = (
        run_linear(layers_of, recipe, arrays, dtype, layout=layout)
        for arrays in (operands, noisy, alone)
    )
    for name in ("y", "dx"):
        want = getattr(together, name)[one] + 0  # a zero sum may have either sign
        judge.bitwise("P25", f"{name} among others", getattr(among_others, name)[one] + 0, want)
        judge.bitwise("P25", f"{name} alone", getattr(by_itself, name) + 0, want)
