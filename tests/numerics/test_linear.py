"""The linear layer's output and gradients: exact arithmetic, the tight bound, paired quality.

Each of y, dX, dW and db is judged on its own, against float64 arithmetic on the oracle's codes and
scales. Gradients flow from a random grad_output: `.sum()` would make it all ones, which float8
holds exactly.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8.testing import oracle
from fp8.testing.bounds import NARROW_EVEN_NOISE, expected, half_ulp, product_bound
from fp8.testing.linear_runs import (
    PRODUCTS,
    LinearRun,
    accumulation,
    judge_exact,
    run_linear,
)
from fp8.testing.strategies import (
    DTYPES,
    LAYOUTS,
    VALUES,
    LinearArrays,
    LinearCase,
    arrays,
    as_tensor,
    exact_arrays,
    examples,
    linear_cases,
    shapes,
)

RECIPES = tuple(oracle.RECIPES)
#: values whose running sum stays near zero: fast accumulation on same-sign data has its own law
MIXED_SIGN = tuple(name for name in VALUES if name != "positive")
#: values of which many make up every row of y, dX and dW: where one dominates, as the outlier
#: channel does in each row of dW, the way that one rounds to the output's dtype moves the row's
#: SQNR, and Hopper's accumulator cuts the others (see bounds.NARROW_NOISE). Outliers are judged
#: element by element, by the tight bound.
EVEN = ("normal", "zeros")


@pytest.fixture
def recipe_of(target, recipe, judge):
    judge.require(recipe in target.capabilities().recipes, f"convert: no recipe {recipe}")
    return recipe


def contraction(case, name: str) -> int:
    return {"y": case.K, "dx": case.N, "dw": case.M, "db": case.M}[name]


def judge_tight(judge, target, case: LinearCase, recipe: str, run: LinearRun, exact) -> None:
    """Each result within its bound of float64 arithmetic on the oracle's codes."""
    for name, law in (("y", "P05"), ("dx", "P08"), ("dw", "P08"), ("db", "P08")):
        want = getattr(exact, name)
        if want is None:
            judge.true(law, f"{name} absent", getattr(run, name) is None, "nn.Linear gives None")
            continue
        bound = product_bound(
            want.value,
            want.magnitude,
            contraction(case, name),
            case.dtype,
            accumulation(target, recipe, name),
        )
        if name == "y" and case.bias and target.policy.bias_rounding == "after":
            # The product was rounded before the bias, and its own error may have turned that
            # rounding to the neighbour: an ulp of the product.
            bound = bound + 2 * half_ulp(want.magnitude, case.dtype)
        value = expected(want.value, case.dtype)
        judge.bound(law, f"{name} tight", getattr(run, name), value, bound)


def judge_quality(
    judge, case: LinearCase, operands: LinearArrays, run: LinearRun, exact, narrow: bool
) -> None:
    """SQNR as good as the oracle's on the same operands, and no better."""
    ideal = oracle.exact_linear(operands.x, operands.w, operands.bias, operands.g)
    for name in ("y", "dx", "dw"):
        judge.quality(
            "P26",
            f"{name} quality",
            getattr(run, name),
            getattr(exact, name).rounded(case.dtype),
            getattr(ideal, name).value,
            accumulation=NARROW_EVEN_NOISE if narrow else 0.0,
        )


@pytest.mark.law("P05", "P08", "P03")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
@examples(24)
@given(
    data=st.data(),
    bias=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 2**20),
)
def test_exact(target, recipe_of, recipe, dtype, judge, fp8_seed, data, bias, layout, seed):
    """Small integers times powers of two: y, dX, dW and db equal float64's result, bit for bit."""
    alignment = target.capabilities().alignment
    M, K, N = data.draw(shapes(1, 200, True, alignment, align_rows=True, squares=True))
    judge.example(M=M, K=K, N=N, recipe=recipe, dtype=dtype, bias=bias, layout=layout, seed=seed)
    operands = exact_arrays(M, K, N, recipe, dtype, bias, seed + fp8_seed)
    ran, run = judge.attempt(
        "P03",
        "forward and backward",
        lambda: run_linear(target, recipe, operands, dtype, layout=layout),
    )
    if not ran:
        return
    judge_exact(judge, target, run, operands, dtype)


@pytest.mark.law("P05", "P08", "P03")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
@examples(30)
@given(data=st.data())
def test_tight(target, recipe_of, recipe, dtype, judge, fp8_seed, data):
    """Any shape, layout, bias, distribution and magnitude: each result within its derived bound."""
    case = data.draw(
        linear_cases(
            dtypes=(dtype,),
            values=MIXED_SIGN,
            empty_rows=True,
            alignment=target.capabilities().alignment,
        )
    )
    judge.example(recipe=recipe, **case.facts())
    operands = arrays(case, fp8_seed)
    ran, run = judge.attempt(
        "P03",
        "forward and backward",
        lambda: run_linear(target, recipe, operands, dtype, layout=case.layout),
    )
    if ran:
        judge_tight(
            judge, target, case, recipe, run, linear_oracle(target, recipe, operands, dtype)
        )


def linear_oracle(target, recipe: str, operands: LinearArrays, dtype: str):
    return oracle.linear(
        operands.x,
        operands.w,
        operands.bias,
        operands.g,
        recipe,
        dtype=dtype,
        bias_rounding=target.policy.bias_rounding,
    )


@pytest.mark.law("P26")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
@examples(15)
@given(data=st.data())
def test_quality(target, recipe_of, recipe, dtype, judge, fp8_seed, data):
    """SQNR paired with the oracle's, two-sided, overall and for every row."""
    narrow = any(accumulation(target, recipe, name).startswith("hopper") for name in PRODUCTS)
    # From 48 up a row's error is a sum of many: one value that rounds the other way cannot move it.
    case = data.draw(
        linear_cases(
            dtypes=(dtype,),
            smallest=48,
            largest=200,
            values=EVEN,
            magnitudes=("unit",),
            alignment=target.capabilities().alignment,
        )
    )
    judge.example(recipe=recipe, **case.facts())
    operands = arrays(case, fp8_seed)
    run = run_linear(target, recipe, operands, dtype, layout=case.layout)
    exact = linear_oracle(target, recipe, operands, dtype)
    judge_quality(judge, case, operands, run, exact, narrow)


@pytest.mark.law("P03")
@pytest.mark.parametrize("recipe", RECIPES)
@examples(30)
@given(
    leading=st.lists(st.integers(0, 5), max_size=4).map(tuple),
    columns=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    seed=st.integers(0, 2**20),
)
def test_leading_dimensions(target, recipe_of, recipe, judge, fp8_seed, leading, columns, seed):
    """Any number of leading dimensions, empty ones too, gives what the flat input gives."""
    alignment = target.capabilities().alignment
    K, N = (-(-extent // alignment) * alignment for extent in columns)
    if alignment > 1:
        leading = (*leading, alignment)
    M = int(np.prod(leading))
    judge.example(M=M, K=K, N=N, recipe=recipe, leading=list(leading), dtype="bfloat16", seed=seed)
    operands = exact_arrays(M, K, N, recipe, "bfloat16", False, seed + fp8_seed)
    ran, run = judge.attempt(
        "P03",
        "leading dimensions",
        lambda: run_linear(target, recipe, operands, "bfloat16", leading=leading),
    )
    if ran:
        ideal = oracle.exact_linear(operands.x, operands.w, None, operands.g)
        for name in ("y", "dx", "dw"):
            # plus zero: the sign of a zero sum depends on where the sum begins
            want = as_tensor(getattr(ideal, name).rounded("bfloat16"), "bfloat16", "cpu") + 0
            judge.bitwise("P03", f"{name} with leading dimensions", getattr(run, name) + 0, want)
        judge.equal("P03", "shape of y", run.shapes["y"], (*leading, N))
        judge.equal("P03", "shape of dx", run.shapes["dx"], (*leading, K))


@pytest.mark.law("P25")
@pytest.mark.parametrize("recipe", RECIPES)
@examples(10)
@given(data=st.data())
def test_repeatable(target, recipe_of, recipe, judge, fp8_seed, data):
    """The same input twice gives the same bits."""
    alignment = target.capabilities().alignment
    case = data.draw(linear_cases(smallest=16, largest=200, alignment=alignment))
    judge.example(recipe=recipe, **case.facts())
    operands = arrays(case, fp8_seed)
    first = run_linear(target, recipe, operands, case.dtype, layout=case.layout)
    again = run_linear(target, recipe, operands, case.dtype, layout=case.layout)
    for name in ("y", "dx", "dw"):
        judge.bitwise("P25", f"{name} again", getattr(again, name), getattr(first, name))
