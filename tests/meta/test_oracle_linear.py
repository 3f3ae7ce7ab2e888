"""The oracle's products, recipes and linear layer, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fp8.testing import oracle

F32 = np.float32


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- Products -------------------------------------------------------------------------------------


def test_product_by_hand() -> None:
    a = np.array([[1.0, -2.0, 0.5], [0.0, 3.0, -1.0]])
    b = np.array([[2.0, 1.0, 4.0], [-1.0, -1.0, 0.0]])
    value, magnitude = oracle.product(a, b)
    # 1·2 - 2·1 + 0.5·4, -1 + 2 + 0; 0 + 3 - 4, 0 - 3 - 0.
    np.testing.assert_array_equal(value, [[2, 1], [-1, -3]])
    np.testing.assert_array_equal(magnitude, [[6, 3], [7, 3]])


def test_product_of_nothing_and_of_the_wrong_shape() -> None:
    value, magnitude = oracle.product(np.zeros((2, 0)), np.zeros((3, 0)))
    np.testing.assert_array_equal(value, np.zeros((2, 3)))
    np.testing.assert_array_equal(magnitude, np.zeros((2, 3)))
    with pytest.raises(ValueError, match="need equal last dimensions"):
        oracle.product(np.zeros((2, 3)), np.zeros((3, 2)))
    with pytest.raises(ValueError, match="a has shape"):
        oracle.product(np.zeros(2), np.zeros((3, 2)))


# --- The recipes ----------------------------------------------------------------------------------


def test_recipe_operands_have_the_published_formats_and_scales() -> None:
    m, k, n = 130, 257, 140
    x, w, g = normal(1, m, k), normal(2, n, k), normal(3, m, n)
    # (format, block, shape of the scale) of each operand as laid out for a @ b.T: M tokens, K in,
    # N out; so "rowwise" is one scale for each row, and 1x128 runs along the contraction.
    e4_all, e5_all = ("e4m3fn", (None, None), (1, 1)), ("e5m2", (None, None), (1, 1))
    e4_m, e4_k, e4_n = (("e4m3fn", (1, None), (rows, 1)) for rows in (m, k, n))
    expected = {
        "tensorwise": {
            "output": (e4_all, e4_all),
            "grad_input": (e5_all, e4_all),
            "grad_weight": (e5_all, e4_all),
        },
        "rowwise": {
            "output": (e4_m, e4_n),
            "grad_input": (e4_m, e4_k),
            "grad_weight": (e4_n, e4_k),
        },
        "rowwise_with_gw_hp": {
            "output": (e4_m, e4_n),
            "grad_input": (e4_m, e4_all),
            "grad_weight": (None, None),
        },
        "blockwise": {
            "output": (("e4m3fn", (1, 128), (m, 3)), ("e4m3fn", (128, 128), (2, 3))),
            "grad_input": (("e4m3fn", (1, 128), (m, 2)), ("e4m3fn", (128, 128), (3, 2))),
            "grad_weight": (("e4m3fn", (1, 128), (n, 2)), ("e4m3fn", (1, 128), (k, 2))),
        },
    }
    assert set(oracle.RECIPES) == set(expected)
    layouts = {"output": (x, w), "grad_input": (g, w.T), "grad_weight": (g.T, x.T)}
    for recipe, products in expected.items():
        result = oracle.linear(x, w, None, g, recipe, dtype="float32")
        assert set(result.operands) == set(layouts)
        for product, operands in products.items():
            assert oracle.RECIPES[recipe][product][2] == (
                "fast" if product == "output" and recipe != "blockwise" else "precise"
            )
            for used, wanted, tensor in zip(
                result.operands[product], operands, layouts[product], strict=True
            ):
                if wanted is None:
                    assert used is None
                    continue
                assert used is not None
                assert (used.fmt, used.block, used.scale.shape) == wanted
                pow2 = recipe.startswith("rowwise")
                codes, scale = oracle.quantize(tensor, *wanted[:2], "torchao", pow2)
                np.testing.assert_array_equal(used.scale, scale)
                np.testing.assert_array_equal(used.codes, codes)


# x and w: 0.1 becomes 6.5/64 = 13/128 (test_quantize_by_hand), all else is exact. g: 0.1 becomes
# 3/32 in e5m2, 13/128 in e4m3.
X2 = np.float32([[7, 0.1, 2], [1, -3, 0]])
W2 = np.float32([[7, 1, 0.1], [0.5, -2, 4]])
G2 = np.float32([[7, 0.1], [-1, 2]])
B2 = np.float32([0.5, -1])
TENTH = float(F32(0.1))
Y2 = [
    # 49 + 13/128 + 26/128 + 0.5,  3.5 - 26/128 + 8 - 1
    [49.5 + 39 / 128, 10.5 - 26 / 128],
    # 7 - 3 + 0 + 0.5,  0.5 + 6 + 0 - 1
    [4.5, 5.5],
]


def test_tensorwise_linear_by_hand() -> None:
    result = oracle.linear(X2, W2, B2, G2, "tensorwise", dtype="float32")
    np.testing.assert_array_equal(result.y.value, Y2)
    np.testing.assert_array_equal(
        result.dx.value,  # g @ w
        [
            # 49 + 3/32 · 0.5,  7 - 3/32 · 2,  7 · 13/128 + 3/32 · 4
            [49 + 3 / 64, 7 - 6 / 32, 91 / 128 + 12 / 32],
            # -7 + 1,  -1 - 4,  -13/128 + 8
            [-6, -5, 8 - 13 / 128],
        ],
    )
    np.testing.assert_array_equal(
        result.dw.value,  # g.T @ x
        [
            # 49 - 1,  7 · 13/128 + 3,  14 - 0
            [48, 91 / 128 + 3, 14],
            # 7 · 3/32 + 2,  3/32 · 13/128 - 6,  3/32 · 2 + 0
            [21 / 32 + 2, 39 / 4096 - 6, 6 / 32],
        ],
    )
    np.testing.assert_array_equal(result.db.value, [6, TENTH + 2])
    # Magnitudes: the same sums without their signs, the bias included.
    np.testing.assert_array_equal(result.y.magnitude[1], [7 + 3 + 0.5, 0.5 + 6 + 1])
    np.testing.assert_array_equal(result.dx.magnitude[1], [7 + 1, 1 + 4, 8 + 13 / 128])
    np.testing.assert_array_equal(result.dw.magnitude[:, 0], [49 + 1, 21 / 32 + 2])
    np.testing.assert_array_equal(result.db.magnitude, [8, TENTH + 2])


def test_rowwise_linear_by_hand() -> None:
    # Every multiplier is a power of two: it changes no mantissa, and 0.1 = 1.6 · 2^-4 becomes
    # 1.625 · 2^-4 = 13/128 in every row. So g, which is e4m3 here, is where the recipes differ.
    result = oracle.linear(X2, W2, B2, G2, "rowwise", dtype="float32")
    np.testing.assert_array_equal(result.y.value, Y2)
    dx = [[49 + 13 / 256, 7 - 26 / 128, 91 / 128 + 52 / 128], [-6, -5, 8 - 13 / 128]]
    np.testing.assert_array_equal(result.dx.value, dx)
    dw = [[48, 91 / 128 + 3, 14], [91 / 128 + 2, 169 / 16384 - 6, 26 / 128]]
    np.testing.assert_array_equal(result.dw.value, dw)
    np.testing.assert_array_equal(result.db.value, [6, TENTH + 2])


def test_high_precision_grad_weight_by_hand() -> None:
    result = oracle.linear(X2, W2, B2, G2, "rowwise_with_gw_hp", dtype="float32")
    rowwise = oracle.linear(X2, W2, B2, G2, "rowwise", dtype="float32")
    np.testing.assert_array_equal(result.y.value, Y2)
    np.testing.assert_array_equal(result.dx.value, rowwise.dx.value)
    dw = [[48, 7 * TENTH + 3, 14], [7 * TENTH + 2, TENTH**2 - 6, 2 * TENTH]]
    np.testing.assert_array_equal(result.dw.value, dw)
    # In bfloat16 the operands are bfloat16 first: 0.1 is 205/2048.
    narrow = oracle.linear(X2, W2, B2, G2, "rowwise_with_gw_hp", dtype="bfloat16")
    tenth = 205 / 2048
    dw = [[48, 7 * tenth + 3, 14], [7 * tenth + 2, tenth**2 - 6, 2 * tenth]]
    np.testing.assert_array_equal(narrow.dw.value, dw)
    np.testing.assert_array_equal(narrow.db.value, [6, 2 + tenth])


def test_underflow_stays_where_the_granularity_says() -> None:
    # One column of W a million times smaller. Tensorwise (multiplier 64), 7e-6 is 4.48e-4, under
    # half of 2^-9: gone. Per column of W (grad_input, rowwise) it is as precise as the others.
    w = np.float32([[7, 7e-6], [3.5, 3.5e-6]])
    x, g = np.float32([[7, 7]]), np.float32([[7, 0]])
    lost = oracle.linear(x, w, None, g, "rowwise_with_gw_hp", dtype="float32").dx.value
    kept = oracle.linear(x, w, None, g, "rowwise", dtype="float32").dx.value
    np.testing.assert_array_equal(lost, [[49, 0]])
    # 7e-6 = 1.835 · 2^-18: the nearest of 8 steps a binade is 1.875 (or 1.75, further away).
    np.testing.assert_array_equal(kept, [[49, 7 * 1.875 * 2.0**-18]])


def test_bias_before_and_after_the_rounding() -> None:
    # The product is 1 + 2^-8: a bfloat16 tie, which goes to 1. With 2^-8 more it is 1 + 2^-7.
    x, w = np.float32([[1, 2.0**-8]]), np.float32([[1, 1]])
    bias = np.float32([2.0**-8])
    before = oracle.linear(x, w, bias, None, "rowwise", dtype="bfloat16")
    after = oracle.linear(x, w, bias, None, "rowwise", dtype="bfloat16", bias_rounding="after")
    assert before.y.value.tolist() == [[1 + 2.0**-7]]
    assert after.y.value.tolist() == [[1 + 2.0**-8]]
    assert before.y.rounded("bfloat16").tolist() == [[1 + 2.0**-7]]
    assert after.y.rounded("bfloat16").tolist() == [[1.0]]
    assert before.y.magnitude.tolist() == after.y.magnitude.tolist() == [[1 + 2.0**-7]]
    # The bias is cast to the compute dtype first: 1 + 2^-9 isn't a bfloat16.
    wide_bias = np.float32([1 + 2.0**-9])
    got = oracle.linear(x, w, wide_bias, None, "rowwise", dtype="bfloat16")
    assert got.y.value.tolist() == [[2 + 2.0**-8]]
    with pytest.raises(ValueError, match="bias_rounding is 'never'"):
        oracle.linear(x, w, bias, None, "rowwise", dtype="bfloat16", bias_rounding="never")


def test_the_weight_is_quantised_from_its_own_dtype_and_x_from_the_compute_dtype() -> None:
    # 1.0624 = 1.0625 - 10^-4 rounds to 1 in e4m3 (the midpoint is 1.0625), but by way of bfloat16
    # (steps of 2^-7) it becomes the midpoint 1.0625 itself. 1.1874 likewise: in one step 1.125, by
    # way of bfloat16 the midpoint 1.1875, whose even neighbour is 1.25.
    x = np.float32([[1.1874, 1.75]])
    w = np.float32([[1.1874, 1.75]])
    used = oracle.linear(x, w, None, None, "tensorwise", dtype="bfloat16").operands["output"]
    assert used[0].dequantize().tolist() == [[1.25, 1.75]]
    assert used[1].dequantize().tolist() == [[1.125, 1.75]]
    wide = oracle.linear(x, w, None, None, "tensorwise", dtype="float32").operands["output"]
    assert wide[0].dequantize().tolist() == [[1.125, 1.75]]


def test_gradients_are_optional_and_no_tokens_are_fine() -> None:
    result = oracle.linear(X2, W2, None, None, "blockwise", dtype="float32")
    assert (result.dx, result.dw, result.db) == (None, None, None)
    assert set(result.operands) == {"output"}
    without_bias = oracle.linear(X2, W2, None, G2, "blockwise", dtype="float32")
    assert without_bias.db is None
    for recipe in oracle.RECIPES:
        nothing = oracle.linear(X2[:0], W2, B2, G2[:0], recipe, dtype="float32")
        assert nothing.y.value.shape == (0, 2)
        assert nothing.dx.value.shape == (0, 3)
        np.testing.assert_array_equal(nothing.dw.value, np.zeros((2, 3)))
        np.testing.assert_array_equal(nothing.db.value, [0, 0])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_spoil_what_shares_their_scale_or_their_sum(poison: float) -> None:
    # torchao's rule: an infinite amax gives multiplier 0 and scale infinity, so 0 · ∞ = NaN.
    m, k, n = 5, 300, 4
    x, w, g = normal(1, m, k), normal(2, n, k), normal(3, m, n)
    x[2, 7] = poison
    spoilt = {
        recipe: oracle.linear(x, w, None, g, recipe, dtype="float32") for recipe in oracle.RECIPES
    }
    for recipe, result in spoilt.items():
        bad_rows = np.isnan(result.y.value).all(axis=1)
        assert (np.isnan(result.y.value).any(axis=1) == bad_rows).all()
        assert np.isfinite(result.dx.value).all()
        assert bad_rows.tolist() == [recipe == "tensorwise" or row == 2 for row in range(m)]
    # grad_weight sums over tokens: column 7 only, where x.T has a scale per row.
    for recipe in ("rowwise", "blockwise", "rowwise_with_gw_hp"):
        bad_columns = ~np.isfinite(spoilt[recipe].dw.value)
        assert bad_columns[:, 7].all()
        assert not np.delete(bad_columns, 7, axis=1).any()
    assert np.isnan(spoilt["tensorwise"].dw.value).all()
    if np.isinf(poison):  # in high precision an infinity is an infinity of the right sign
        expected = np.sign(g[2]) * poison
        np.testing.assert_array_equal(spoilt["rowwise_with_gw_hp"].dw.value[:, 7], expected)


@pytest.mark.filterwarnings("error")
def test_transformer_engines_rule_saturates_an_infinity() -> None:
    codes, scale = oracle.quantize(
        np.float32([[np.inf, -3, np.nan], [-np.inf, 1000, 0]]),
        "e4m3fn",
        (1, None),
        "transformer_engine",
        False,
    )
    np.testing.assert_array_equal(scale, [[1], [1]])
    np.testing.assert_array_equal(
        oracle.decode(codes, "e4m3fn"), [[448, -3, np.nan], [-448, 448, 0]]
    )


def test_linear_names_the_argument_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match="recipe is 'rowwize'"):
        oracle.linear(X2, W2, None, None, "rowwize", dtype="float32")
    with pytest.raises(ValueError, match="x has shape"):
        oracle.linear(X2[:, :2], W2, None, None, "rowwise", dtype="float32")
    with pytest.raises(ValueError, match=r"bias has shape \(3,\), need \(2,\)"):
        oracle.linear(X2, W2, np.float32([1, 2, 3]), None, "rowwise", dtype="float32")
    with pytest.raises(ValueError, match=r"g has shape \(2, 3\), need \(2, 2\)"):
        oracle.linear(X2, W2, None, X2, "rowwise", dtype="float32")
    with pytest.raises(ValueError, match="dtype is 'float64'"):
        oracle.linear(X2, W2, None, None, "rowwise", dtype="float64")
    with pytest.raises(ValueError, match="w has shape"):
        oracle.linear(X2, W2[0], None, None, "rowwise", dtype="float32")


def test_exact_and_bfloat16_baselines_by_hand() -> None:
    exact = oracle.exact_linear(X2, W2, B2, G2)
    assert exact.y.value[0].tolist() == [49.5 + TENTH * 3, 10.5 - 2 * TENTH]
    assert exact.dw.value[1].tolist() == [7 * TENTH + 2, TENTH * TENTH - 6, 2 * TENTH]
    assert exact.dx.value[1].tolist() == [-6, -5, 8 - TENTH]
    assert exact.db.value.tolist() == [6, TENTH + 2]
    narrow = oracle.bf16_linear(X2, W2, B2, G2)
    # 0.1 is 205/2048 in bfloat16; 49.8 sits between multiples of 1/4, 7.9 of 1/32.
    assert narrow.y.value[0].tolist() == [49.75, 10.3125]
    assert narrow.dx.value[1].tolist() == [-6, -5, 7.90625]
    assert narrow.db.value.tolist() == [6, 2.09375]
    assert oracle.exact_linear(X2, W2, None, None).dw is None
