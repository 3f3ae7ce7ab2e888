"""The oracle's groups, scale rules and quantisation: by hand, and against a plain loop."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest

from fp8.testing import oracle

ML_DTYPES = {
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}
BLOCKS = {
    "tensorwise": (None, None),
    "rowwise": (1, None),
    "columnwise": (None, 1),
    "1x128": (1, 128),
    "128x1": (128, 1),
    "128x128": (128, 128),
    "2x3": (2, 3),
}
FLT_MAX = float(np.finfo(np.float32).max)
F32 = np.float32


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- Groups ---------------------------------------------------------------------------------------

X = np.float32([[1, -2, 3, 0, 5], [-6, 7, 0.5, -9, 0], [0, -0.0, 11, 12, -13]])


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ((None, None), [[13]]),
        ((1, None), [[5], [9], [13]]),
        ((None, 1), [[6, 7, 11, 12, 13]]),
        ((2, 2), [[7, 9, 5], [0, 12, 13]]),  # ragged on both edges
        ((2, None), [[9], [13]]),
        ((None, 2), [[7, 12, 13]]),
        ((1, 3), [[3, 5], [7, 9], [11, 13]]),
        ((128, 128), [[13]]),
    ],
)
def test_group_amax_by_hand(block: tuple[int | None, int | None], expected: list) -> None:
    got = oracle.group_amax(X, block)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, np.float32(expected))


@pytest.mark.parametrize(
    ("shape", "block", "groups"),
    [
        ((0, 5), (None, None), (1, 1)),
        ((0, 5), (1, None), (0, 1)),
        ((0, 5), (None, 1), (1, 5)),
        ((0, 200), (1, 128), (0, 2)),
        ((0, 200), (128, 128), (0, 2)),
        ((3, 0), (1, None), (3, 1)),
        ((3, 0), (1, 128), (3, 0)),
        ((0, 0), (128, 128), (0, 0)),
    ],
)
def test_groups_of_nothing(
    shape: tuple[int, int], block: tuple[int | None, int | None], groups: tuple[int, int]
) -> None:
    empty = np.zeros(shape, np.float32)
    amax = oracle.group_amax(empty, block)
    assert amax.shape == groups
    assert not amax.any()
    codes, scale = oracle.quantize(empty, "e4m3fn", block, "torchao", False)
    assert (codes.shape, scale.shape) == (shape, groups)
    assert oracle.dequantize(codes, scale, "e4m3fn", block).shape == shape


def test_amax_lets_nan_win_and_stays_in_its_group() -> None:
    x = X.copy()
    x[1, 1], x[2, 4] = np.nan, -np.inf
    np.testing.assert_array_equal(
        oracle.group_amax(x, (2, 2)), np.float32([[np.nan, 9, 5], [0, 12, np.inf]])
    )
    np.testing.assert_array_equal(oracle.group_amax(x, (1, None)), [[5], [np.nan], [np.inf]])
    assert np.isnan(oracle.group_amax(x, (None, None))).all()


def test_expand_by_hand() -> None:
    scale = np.float32([[1, 2], [3, 4]])
    np.testing.assert_array_equal(
        oracle.expand(scale, (2, 2), (3, 3)), [[1, 1, 2], [1, 1, 2], [3, 3, 4]]
    )
    np.testing.assert_array_equal(
        oracle.expand(np.float32([[1], [2]]), (1, None), (2, 3)), [[1, 1, 1], [2, 2, 2]]
    )
    with pytest.raises(ValueError, match=r"scale has shape \(2, 2\), need \(2, 1\)"):
        oracle.expand(scale, (1, None), (2, 3))
    with pytest.raises(ValueError, match="block has size 0"):
        oracle.expand(scale, (0, 2), (2, 2))


# --- Scale rules ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fmt", "rule", "pow2", "amax", "multiplier", "scale"),
    [
        ("e4m3fn", "torchao", False, 448.0, 1.0, 1.0),
        ("e4m3fn", "torchao", False, 1.0, 448.0, F32(1) / F32(448)),
        ("e5m2", "torchao", False, 7.0, 8192.0, 2.0**-13),
        ("e4m3fnuz", "torchao", False, 30.0, 8.0, 0.125),
        # 448 / 3 = 149.33…: float32 has steps of 2^-16 there, and 149 + 21845/2^16 is nearest.
        ("e4m3fn", "torchao", False, 3.0, 149 + 21845 / 2**16, F32(1) / F32(149 + 21845 / 2**16)),
        ("e4m3fn", "torchao", True, 3.0, 128.0, 2.0**-7),
        ("e4m3fn", "torchao", True, 3.5, 128.0, 2.0**-7),  # 448 / 3.5 is 128 already
        # One float32 ulp above 3.5 the multiplier is just under 128: down to 64. A log2 in float32
        # gives 7 here, hence 128.
        ("e4m3fn", "torchao", True, 3.5000002384185791, 64.0, 2.0**-6),
        # The floor: 448 / 1e-12 = 4.48e14, between 2^48 and 2^49.
        ("e4m3fn", "torchao", False, 0.0, F32(4.48e14), F32(1) / F32(4.48e14)),
        ("e4m3fn", "torchao", False, 1e-13, F32(4.48e14), F32(1) / F32(4.48e14)),
        ("e4m3fn", "torchao", True, 0.0, 2.0**48, 2.0**-48),
        ("e4m3fn", "torchao", False, np.inf, 0.0, np.inf),
        ("e4m3fn", "torchao", True, np.inf, 0.0, np.inf),
        ("e4m3fn", "torchao", False, np.nan, np.nan, np.nan),
        ("e4m3fn", "torchao", True, np.nan, np.nan, np.nan),
        ("e4m3fn", "transformer_engine", False, 7.0, 64.0, 2.0**-6),
        ("e4m3fn", "transformer_engine", True, 1.0, 256.0, 2.0**-8),
        ("e4m3fn", "transformer_engine", False, 0.0, 1.0, 1.0),
        ("e4m3fn", "transformer_engine", True, np.inf, 1.0, 1.0),
        ("e4m3fn", "transformer_engine", False, np.nan, 1.0, 1.0),
        # 448 / 1e-37 is beyond float32. 1 / FLT_MAX is 2^-128 (1 + 2^-24 + …): subnormal, in steps
        # of 2^-149, so 2^-128. The largest power of two is 2^127.
        ("e4m3fn", "transformer_engine", False, 1e-37, FLT_MAX, 2.0**-128),
        ("e4m3fn", "transformer_engine", True, 1e-37, 2.0**127, 2.0**-127),
        ("e4m3fn", "transformer_engine", False, 1e-13, F32(448) / F32(1e-13), None),
        ("e4m3fn", "deepgemm", False, 7.0, 64.0, 2.0**-6),
        ("e4m3fn", "deepgemm", False, 0.0, None, F32(1e-4) / F32(448)),
        ("e4m3fn", "deepgemm", False, 9e-5, None, F32(1e-4) / F32(448)),
        ("e4m3fn", "deepgemm", False, np.inf, 0.0, np.inf),
        ("e4m3fn", "deepgemm", False, np.nan, np.nan, np.nan),
    ],
)
def test_scales_by_hand(
    fmt: str, rule: str, pow2: bool, amax: float, multiplier: float | None, scale: float | None
) -> None:
    got = oracle.multiplier_and_scale(np.float32([[amax]]), fmt, rule, pow2)
    assert [array.dtype for array in got] == [np.float32, np.float32]
    for value, expected in zip(got, (multiplier, scale), strict=True):
        if expected is not None:
            np.testing.assert_array_equal(value, np.float32([[expected]]))


def test_which_number_is_rounded_differs_between_the_rules() -> None:
    # torchao rounds max/amax, deepgemm amax/max: for this amax the two scales are different bits.
    amax = np.arange(1, 2, 2**-10).astype(np.float32)[None]
    ours = oracle.multiplier_and_scale(amax, "e4m3fn", "torchao", False)
    theirs = oracle.multiplier_and_scale(amax, "e4m3fn", "deepgemm", False)
    assert (ours[1] != theirs[1]).any()
    assert (ours[0] != theirs[0]).any()
    np.testing.assert_array_equal(theirs[1], amax / F32(448))
    np.testing.assert_array_equal(ours[0], F32(448) / amax)
    # Either way scale · amax is 448's preimage to within the two float32 roundings.
    for multiplier, scale in (ours, theirs):
        np.testing.assert_allclose(np.float64(multiplier) * scale, 1, rtol=2**-24)


def test_power_of_two_multipliers_are_the_largest_that_fit() -> None:
    bits = np.random.default_rng(3).integers(0x2B8CBCCC, 0x7F800000, 4000, dtype=np.uint32)
    amax = bits.view(np.float32)[None]  # from 1e-12 up
    for rule, fmt in itertools.product(("torchao", "transformer_engine"), ML_DTYPES):
        largest = oracle.fmax(fmt)
        multiplier, scale = oracle.multiplier_and_scale(amax, fmt, rule, True)
        fraction, _ = np.frexp(multiplier)
        assert (fraction == 0.5).all()
        np.testing.assert_array_equal(np.float64(multiplier) * np.float64(scale), 1)
        exact = np.float64(amax) * multiplier
        # (largest / amax) is rounded to float32 first: that may lift it by half an ulp.
        assert (exact <= largest * (1 + 2**-24)).all()
        assert (exact * 2 > largest).all()


def test_bad_rules_are_refused() -> None:
    one = np.float32([[1]])
    with pytest.raises(ValueError, match="rule is 'te'"):
        oracle.multiplier_and_scale(one, "e4m3fn", "te", False)
    with pytest.raises(ValueError, match="pow2 is True"):
        oracle.multiplier_and_scale(one, "e4m3fn", "deepgemm", True)
    with pytest.raises(TypeError, match="amax has dtype float64"):
        oracle.multiplier_and_scale(np.array([[1.0]]), "e4m3fn", "torchao", False)


# --- Quantisation ---------------------------------------------------------------------------------


def test_quantize_by_hand() -> None:
    # amax 7: multiplier 64. 7 → 448, -3 → -192 = -1.5 · 2^7, 0.1 → 6.4, between 6 and 6.5.
    codes, scale = oracle.quantize(
        np.float32([[7, -3, 0.1]]), "e4m3fn", (None, None), "torchao", False
    )
    np.testing.assert_array_equal(codes, np.uint8([[0x7E, 0xF4, 0x4D]]))
    np.testing.assert_array_equal(scale, np.float32([[2.0**-6]]))
    np.testing.assert_array_equal(
        oracle.dequantize(codes, scale, "e4m3fn", (None, None)), [[7, -3, 6.5 / 64]]
    )
    # e5m2: multiplier 8192. 0.1 → 819.2, in steps of 128: 768 = 1.5 · 2^9, code 24·4 + 2.
    codes, scale = oracle.quantize(np.float32([[7, 0.1]]), "e5m2", (None, None), "torchao", False)
    np.testing.assert_array_equal(codes, np.uint8([[0x7B, 0x62]]))
    assert scale[0, 0] == 2.0**-13
    # One scale a row, and a row of zeros of both signs.
    codes, scale = oracle.quantize(
        np.float32([[7, 3.5], [0, -0.0], [0.4375, 0.0625]]), "e4m3fn", (1, None), "torchao", True
    )
    np.testing.assert_array_equal(codes, np.uint8([[0x7E, 0x76], [0x00, 0x80], [0x7E, 0x68]]))
    np.testing.assert_array_equal(scale, np.float32([[2.0**-6], [2.0**-48], [2.0**-10]]))


def test_the_product_with_the_multiplier_is_a_float32_product() -> None:
    # Values whose float32 product with the multiplier lands on a rounding tie that the exact
    # product misses: the code must follow the float32 product.
    middle = oracle.midpoints("e4m3fn").astype(np.float64)
    middle = middle[np.abs(middle) < 448]
    told_apart = 0
    for amax in np.linspace(1, 2, 41)[1:-1].astype(np.float32):
        multiplier = float(F32(448) / amax)
        x = np.append((middle / multiplier).astype(np.float32), amax)[None]
        codes, _ = oracle.quantize(x, "e4m3fn", (None, None), "torchao", False)
        in_float32 = (x * F32(multiplier)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        in_float64 = x.astype(np.float64) * multiplier
        # The float64 product decides by its side of the midpoint, without a tie.
        nearest = np.abs(in_float64[..., None] - _finite("e4m3fn")).argmin(-1)
        told_apart += (_finite("e4m3fn")[nearest] != oracle.decode(codes, "e4m3fn")).sum()
        np.testing.assert_array_equal(codes, in_float32)
    assert told_apart > 100


def _finite(fmt: str) -> np.ndarray:
    values = oracle.decode(np.arange(256, dtype=np.uint8), fmt)
    return values[np.isfinite(values)]


def naive_quantize(
    x: np.ndarray, fmt: str, block: tuple[int | None, int | None], rule: str, pow2: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The same by a loop over groups, scalar arithmetic and ml_dtypes' casts."""
    rows, columns = (size or max(extent, 1) for size, extent in zip(block, x.shape, strict=True))
    top = float(ml_dtypes.finfo(ML_DTYPES[fmt]).max)
    grid = (math.ceil(x.shape[0] / rows), math.ceil(x.shape[1] / columns))
    codes, scales = np.zeros(x.shape, np.uint8), np.zeros(grid, np.float32)
    for i, j in np.ndindex(grid):
        where = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        amax = max(abs(float(v)) for v in x[where].ravel())
        if rule == "deepgemm":
            scales[i, j] = F32(F32(max(F32(amax), F32(1e-4))) / F32(top))
            multiplier = F32(1) / scales[i, j]
        else:
            if rule == "torchao":
                multiplier = F32(top / max(amax, 1e-12))
            else:
                multiplier = F32(top) / F32(amax) if amax else F32(1)
            if pow2:
                multiplier = F32(2.0 ** math.floor(math.log2(float(multiplier))))
            scales[i, j] = F32(1) / multiplier
        scaled = np.clip(x[where] * multiplier, F32(-top), F32(top))
        codes[where] = scaled.astype(ML_DTYPES[fmt]).view(np.uint8)
    return codes, scales


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize(
    ("rule", "pow2"),
    [
        ("torchao", False),
        ("torchao", True),
        ("transformer_engine", False),
        ("transformer_engine", True),
        ("deepgemm", False),
    ],
)
def test_quantize_is_the_plain_loop_over_groups(
    block: tuple[int | None, int | None], rule: str, pow2: bool
) -> None:
    x = normal(7, 131, 133)
    x *= np.exp2(np.random.default_rng(8).integers(-20, 20, (131, 1))).astype(np.float32)
    x[128:, 128:] = 0  # a whole 128x128 group of zeros, at the ragged corner
    for fmt, dtype in ML_DTYPES.items():
        codes, scale = oracle.quantize(x, fmt, block, rule, pow2)
        expected_codes, expected_scale = naive_quantize(x, fmt, block, rule, pow2)
        np.testing.assert_array_equal(scale, expected_scale)
        np.testing.assert_array_equal(codes, expected_codes)
        # A plain loop for the way back, too.
        got = oracle.dequantize(codes, scale, fmt, block)
        rows, columns = (size or extent for size, extent in zip(block, x.shape, strict=True))
        for i, j in ((0, 0), (130, 132), (127, 128), (64, 129)):
            value = float(codes[i, j].view(dtype))
            assert got[i, j] == value * float(scale[i // rows, j // columns])
