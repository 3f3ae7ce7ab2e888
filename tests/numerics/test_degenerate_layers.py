"""Layers given degenerate operands: zeros, one NaN or infinity, every magnitude there is.

Output and gradients are right wherever they are not spoilt, and spoilt exactly where a recipe's
scaling groups say so.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8.testing import oracle
from fp8.testing.bounds import expected, product_bound
from fp8.testing.linear_runs import run_linear
from fp8.testing.strategies import (
    DTYPES,
    LAYOUTS,
    LinearArrays,
    exact_arrays,
    examples,
    matrix,
    shapes,
    to_dtype,
)

BAD_VALUES = {"NaN": np.nan, "Inf": np.inf, "-Inf": -np.inf}
#: result -> the product of the recipe that makes it
PRODUCTS = {"y": "output", "dx": "grad_input", "dw": "grad_weight"}

recipes = pytest.mark.parametrize("recipe", oracle.RECIPES)


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


def underflow(a: np.ndarray, b: np.ndarray, contraction: int, dtype: str) -> float:
    """What a product in high precision may lose where values are subnormal.

    Each float32 product may round to a multiple of 2^-149, which no relative bound allows for. And
    x86's bfloat16 product (VDPBF16PS) takes subnormal inputs, those under 2^-126, for zero.
    """
    if dtype != "bfloat16":
        return contraction * 2.0**-150
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
            # The product was rounded once before the bias, perhaps to the neighbour of what the
            # exact product rounds to: another ulp of the product.
            bound = bound + 2 * oracle.unit_roundoff(dtype) * np.nan_to_num(want.magnitude)
        if name == "dw" and oracle.RECIPES[recipe]["grad_weight"][0] is None:
            bound = bound + underflow(operands.g, operands.x, M, dtype)
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


@pytest.mark.thorough
@pytest.mark.law("P12")
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


@pytest.mark.thorough
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
    # As few tokens as the target takes: one, unless its hardware wants them by the 16.
    fewest = layers_of.capabilities().alignment
    one = np.s_[row // fewest * fewest : row // fewest * fewest + fewest]
    alone = LinearArrays(operands.x[one], operands.w, None, operands.g[one])
    # The other tokens large, and of no particular values.
    noise = np.random.default_rng([fp8_seed, seed]).standard_normal((M, K + N)) * 1e3
    noisy = LinearArrays(
        to_dtype(noise[:, :K], dtype), operands.w, None, to_dtype(noise[:, K:], dtype)
    )
    noisy.x[one], noisy.g[one] = operands.x[one], operands.g[one]
    together, among_others, by_itself = (
        run_linear(layers_of, recipe, arrays, dtype, layout=layout)
        for arrays in (operands, noisy, alone)
    )
    for name in ("y", "dx"):
        want = getattr(together, name)[one] + 0  # a zero sum may have either sign
        judge.bitwise("P25", f"{name} among others", getattr(among_others, name)[one] + 0, want)
        judge.bitwise("P25", f"{name} alone", getattr(by_itself, name) + 0, want)
