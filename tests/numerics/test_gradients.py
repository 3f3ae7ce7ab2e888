"""Which gradients there are, and that they do not depend on what else was asked for."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fp8.testing import oracle
from fp8.testing.bounds import expected, half_ulp, product_bound
from fp8.testing.linear_runs import make_layer, run_layer, run_linear
from fp8.testing.strategies import (
    DTYPES,
    LinearCase,
    arrays,
    as_tensor,
    exact_arrays,
    examples,
    linear_cases,
    shapes,
)

RECIPES = tuple(oracle.RECIPES)
AUTOCAST = (None, "bfloat16", "float16")


def small(target) -> dict[str, object]:
    """How the cases of this file are drawn."""
    return {
        "smallest": 2,
        "largest": 96,
        "magnitudes": ("unit",),
        "alignment": target.capabilities().alignment,
    }


recipes = pytest.mark.parametrize("recipe", RECIPES)


@pytest.fixture(autouse=True)
def _recipe_is_known(target, recipe, judge):
    judge.require(recipe in target.capabilities().recipes, f"convert: no recipe {recipe}")


@pytest.mark.law("P19", "P08")
@recipes
@pytest.mark.parametrize("bias", [True, False], ids=("bias", "no_bias"))
@examples(12)
@given(data=st.data())
def test_requires_grad_matrix(target, recipe, bias, judge, fp8_seed, data):
    """All combinations of input, weight and bias: None where nn.Linear gives None, and where it
    gives a gradient the one that asking for everything gives."""
    case = data.draw(linear_cases(**small(target)))
    case = LinearCase(**{**case.facts(), "bias": bias})
    judge.example(recipe=recipe, **case.facts())
    operands = arrays(case, fp8_seed)
    full = run_linear(target, recipe, operands, case.dtype)
    for needs in product((True, False), repeat=3 if bias else 2):
        if not any(needs):
            continue
        layer = make_layer(target, recipe, operands.w, operands.bias, case.dtype)
        owners = dict(zip(("x", "weight", "bias"), needs, strict=False))
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(owners[name.split(".")[-1]])
        x = as_tensor(operands.x, case.dtype, target.device).requires_grad_(owners["x"])
        y = layer(x)
        y.backward(as_tensor(operands.g, case.dtype, target.device))
        grads = {"x": x.grad} | {n.split(".")[-1]: p.grad for n, p in layer.named_parameters()}
        for (name, needed), result in zip(owners.items(), ("dx", "dw", "db"), strict=False):
            check = f"{result} when {sorted(n for n, v in owners.items() if v)} need it"
            if needed:
                judge.bitwise("P08", check, grads[name], getattr(full, result))
            else:
                judge.true("P19", check, grads[name] is None, "nn.Linear leaves it None")
        judge.bitwise("P19", "y whatever needs a gradient", y, full.y)


@pytest.mark.law("P19", "P07")
@recipes
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "eval"])
@examples(8)
@given(data=st.data())
def test_without_gradients(target, recipe, mode, judge, fp8_seed, data):
    """The output is the same when no gradient is wanted, and then there is no graph."""
    case = data.draw(linear_cases(**small(target)))
    judge.example(recipe=recipe, **case.facts())
    operands = arrays(case, fp8_seed)
    layer = make_layer(target, recipe, operands.w, operands.bias, case.dtype)
    x = as_tensor(operands.x, case.dtype, target.device, case.layout)
    training = layer(x)
    if mode == "eval":
        layer.eval()
        y = layer(x)
        judge.true("P19", "graph in eval", y.requires_grad, "eval mode does not turn gradients off")
    else:
        with getattr(torch, mode)():
            ran, y = judge.attempt("P19", f"{mode} runs", lambda: layer(x))
        if not ran:
            return
        judge.true("P19", "no graph", not y.requires_grad, f"{mode} must not build a graph")
    judge.bitwise("P07", f"y under {mode}", y, training)


@pytest.mark.law("P23")
@recipes
@pytest.mark.parametrize("autocast", AUTOCAST, ids=str)
@pytest.mark.parametrize("parameters", DTYPES)
@examples(8)
@given(data=st.data())
def test_dtypes_and_autocast(target, recipe, autocast, parameters, judge, fp8_seed, data):
    """Parameter, input and autocast dtypes, bias: dtypes as nn.Linear's, values the oracle's."""
    case = data.draw(linear_cases(dtypes=(parameters,), **small(target)))
    inputs = data.draw(st.sampled_from(DTYPES)) if autocast else parameters
    judge.example(recipe=recipe, autocast=autocast, input=inputs, **case.facts())
    operands = arrays(case, fp8_seed)
    compute = autocast or inputs

    def run(layer: nn.Module):
        with torch.autocast(
            torch.device(target.device).type,
            dtype=getattr(torch, autocast or "bfloat16"),
            enabled=autocast is not None,
        ):
            x = as_tensor(operands.x, inputs, target.device).requires_grad_()
            y = layer(x)
        y.backward(as_tensor(operands.g, compute, target.device).to(y.dtype))
        return y, x.grad, *(p.grad for p in layer.parameters())

    layer = make_layer(target, recipe, operands.w, operands.bias, parameters)
    ran, got = judge.attempt("P23", "forward and backward", lambda: run(layer))
    if not ran:
        return
    plain = nn.Linear(case.K, case.N, case.bias, device=target.device, dtype=got[2].dtype)
    plain = plain.to(getattr(torch, parameters))
    want = [tensor.dtype for tensor in run(plain)]
    judge.equal("P23", "dtypes of y, dx, dw, db", [tensor.dtype for tensor in got], want)
    x = as_tensor(operands.x, inputs, "cpu").to(getattr(torch, compute)).double().numpy()
    exact = oracle.linear(
        x,
        operands.w,
        operands.bias,
        as_tensor(operands.g, compute, "cpu").double().numpy(),
        recipe,
        dtype=compute,
        bias_rounding=target.policy.bias_rounding,
    )
    mode = oracle.RECIPES[recipe]["output"][2]
    bound = product_bound(
        exact.y.value, exact.y.magnitude, case.K, compute, target.policy.accumulation[mode]
    )
    if case.bias and target.policy.bias_rounding == "after":
        bound = bound + 2 * half_ulp(exact.y.magnitude, compute)  # as in test_linear
    judge.bound("P23", "y tight", got[0], expected(exact.y.value, compute), bound)


@pytest.mark.law("P27")
@recipes
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@examples(15)
@given(data=st.data(), seed=st.integers(0, 2**20))
def test_bias_is_added_before_the_rounding(target, recipe, dtype, judge, fp8_seed, data, seed):
    """The layer's output is round(sum + bias), one rounding, whatever the stack's policy."""
    M, K, N = data.draw(shapes(2, 128, False, target.capabilities().alignment, align_rows=True))
    judge.example(M=M, K=K, N=N, recipe=recipe, dtype=dtype, bias=True, seed=seed)
    operands = exact_arrays(M, K, N, recipe, dtype, True, seed + fp8_seed)
    run = run_linear(target, recipe, operands, dtype)
    ideal = oracle.exact_linear(operands.x, operands.w, operands.bias, None).y
    want = as_tensor(ideal.rounded(dtype), dtype, "cpu")
    judge.bitwise("P27", "y bias rounded once", run.y + 0, want + 0)


@pytest.mark.law("P18", "P08")
@recipes
@examples(10)
@given(data=st.data(), seed=st.integers(0, 2**20))
def test_expanded_grad_output(target, recipe, judge, fp8_seed, data, seed):
    """The gradient of a sum has strides 0: it gives what its contiguous copy gives."""
    M, K, N = data.draw(shapes(2, 96, False, target.capabilities().alignment, align_rows=True))
    judge.example(M=M, K=K, N=N, recipe=recipe, dtype="bfloat16", seed=seed)
    operands = exact_arrays(M, K, N, recipe, "bfloat16", True, seed + fp8_seed)
    layer = make_layer(target, recipe, operands.w, operands.bias, "bfloat16")
    x = as_tensor(operands.x, "bfloat16", target.device)
    row = as_tensor(operands.g[0], "bfloat16", target.device)
    expanded = run_layer(layer, x, row.expand(M, N))
    first = {name: getattr(expanded, name).clone() for name in ("dx", "dw", "db")}
    again = run_layer(layer, x, row.expand(M, N).contiguous())
    for name, value in first.items():
        judge.bitwise("P18", f"{name} of an expanded gradient", value, getattr(again, name))
    total = float(np.abs(operands.g[0]).sum())
    judge.true("P08", "gradient is not zero", total == 0 or bool(first["dw"].any()), "dw is all 0")
