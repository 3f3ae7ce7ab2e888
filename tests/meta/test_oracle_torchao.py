"""The oracle against torchao on a CPU: scales and codes bit for bit, its linear within float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fp8.testing import oracle

pytest.importorskip("torchao", reason="torchao isn't installed: pip install torchao==0.18.0")
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig

FORMATS = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def normal(seed: int, dtype: str, *shape: int) -> np.ndarray:
    return oracle.round_to(np.random.default_rng(seed).standard_normal(shape), dtype)


def tensor(x: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(np.array(x)).to(DTYPES[dtype])


def array(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def matrices(dtype: str) -> dict[str, np.ndarray]:
    """Operands whose amax falls below the floor, in the middle, and near the dtype's end."""
    base = normal(5, dtype, 37, 53)
    tiny, huge = {"float16": (2.0**-20, 2.0**12)}.get(dtype, (1e-15, 1e37))
    mixed = base * np.exp2(np.random.default_rng(6).integers(-9, 9, (37, 1)))
    return {
        "normal": base,
        "uniform rows": oracle.round_to(mixed, dtype),
        "tiny": oracle.round_to(base * tiny, dtype),
        "huge": oracle.round_to(base * huge, dtype),
        "zeros": base * 0,
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("granularity", "axis", "block", "pow2"),
    [
        ("TENSORWISE", None, (None, None), False),
        ("TENSORWISE", None, (None, None), True),
        ("AXISWISE", -1, (1, None), True),
        ("AXISWISE", 0, (None, 1), True),
        ("AXISWISE", -1, (1, None), False),
    ],
)
def test_scales_and_codes_are_torchaos_bit_for_bit(
    granularity: str,
    axis: int | None,
    block: tuple[int | None, int | None],
    pow2: bool,
    fmt: str,
    dtype: str,
) -> None:
    for name, x in matrices(dtype).items():
        theirs = hp_tensor_to_float8_dynamic(
            tensor(x, dtype),
            FORMATS[fmt],
            LinearMMConfig(),
            scaling_granularity=ScalingGranularity[granularity],
            axiswise_dim=axis,
            round_scales_to_power_of_2=pow2,
        )
        amax = oracle.group_amax(x, block)
        multiplier, scale = oracle.multiplier_and_scale(amax, fmt, "torchao", pow2)
        codes, used = oracle.quantize(x, fmt, block, "torchao", pow2)
        # torchao's "scale" is the multiplier; its product is given the float32 reciprocal.
        their_multiplier = theirs._scale.numpy().reshape(multiplier.shape)
        np.testing.assert_array_equal(multiplier, their_multiplier, err_msg=name)
        reciprocal = theirs._scale.reciprocal().numpy().reshape(scale.shape)
        np.testing.assert_array_equal(scale, reciprocal, err_msg=name)
        np.testing.assert_array_equal(used, scale)
        np.testing.assert_array_equal(codes, theirs._data.view(torch.uint8).numpy(), err_msg=name)


def torchao_linear(
    x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, g: np.ndarray, recipe: str, dtype: str
) -> dict[str, np.ndarray]:
    n, k = w.shape
    model = nn.Sequential(nn.Linear(k, n, bias=bias is not None, dtype=DTYPES[dtype]))
    with torch.no_grad():
        model[0].weight.copy_(tensor(w, dtype))
        if bias is not None:
            model[0].bias.copy_(tensor(bias, dtype))
    config = Float8LinearConfig.from_recipe_name(recipe)
    model = convert_to_float8_training(model, config=config)
    x_tensor = tensor(x, dtype).requires_grad_()
    y = model(x_tensor)
    y.backward(tensor(g, dtype))
    out = {"y": y, "dx": x_tensor.grad, "dw": model[0].weight.grad}
    if bias is not None:
        out["db"] = model[0].bias.grad
    return {name: array(value) for name, value in out.items()}


def assert_within(got: np.ndarray, ref: oracle.Exact, k: int, dtype: str, name: str) -> None:
    """|got - ref| ≤ u·|ref| + γ·(|A|·|B|), with γ = (K + 7)·2^-24, times the (1 + u) of both.

    The CPU operator multiplies both operands by their scales in float32 (2 roundings), then sums K
    products in float32 (at most K roundings each); 5 more leave room for the order of a blocked
    sum and its second-order terms. The result is rounded once to `dtype`: u.
    """
    u = oracle.unit_roundoff(dtype)
    gamma = (k + 7) * 2.0**-24
    bound = u * np.abs(ref.value) + (1 + u) * gamma * ref.magnitude
    bound += oracle.smallest_subnormal(dtype)
    excess = np.abs(got - ref.value) / bound
    assert excess.max() <= 1, f"{name}: {excess.max():.3g} of its bound"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("m", "k", "n"), [(64, 96, 80), (48, 304, 144)])
def test_tensorwise_linear_is_torchaos_to_within_float32(
    m: int, k: int, n: int, dtype: str
) -> None:
    x, w, g = normal(1, dtype, m, k), normal(2, dtype, n, k), normal(3, dtype, m, n)
    w = oracle.round_to(w * 0.037, dtype)
    ours = oracle.linear(x, w, None, g, "tensorwise", dtype=dtype)
    theirs = torchao_linear(x, w, None, g, "tensorwise", dtype)
    for name, contraction in (("y", k), ("dx", n), ("dw", m)):
        assert_within(theirs[name], getattr(ours, name), contraction, dtype, name)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_on_exact_data_all_torchao_recipes_are_the_oracles_bit_for_bit(recipe: str) -> None:
    # Integers to 7 with a 7 in every scaling group: multipliers are powers of two, all sums stay
    # under 2^24, so float32 has the exact result, and one rounding to bfloat16 remains.
    m, k, n = 48, 80, 64
    rng = np.random.default_rng(4)
    x, w, g = (rng.integers(-7, 8, shape).astype(float) for shape in ((m, k), (n, k), (m, n)))
    for operand in (x, w, g):
        operand[0, :] = operand[:, 0] = 7
    bias = rng.integers(-7, 8, n) / 8
    # torchao adds the bias to the rounded product.
    ours = oracle.linear(x, w, bias, g, recipe, dtype="bfloat16", bias_rounding="after")
    theirs = torchao_linear(x, w, bias, g, recipe, "bfloat16")
    for name in ("y", "dx", "dw", "db"):
        np.testing.assert_array_equal(theirs[name], getattr(ours, name).rounded("bfloat16"))
    before = oracle.linear(x, w, bias, g, recipe, dtype="bfloat16")
    assert (before.y.rounded("bfloat16") != theirs["y"]).any()
