"""The oracle's elements: decoding, encoding and rounding against gfloat, ml_dtypes and by hand."""

from __future__ import annotations

import itertools
import subprocess
import sys
from fractions import Fraction

import gfloat
import ml_dtypes
import numpy as np
import pytest
from gfloat.formats import (
    format_info_bfloat16,
    format_info_binary16,
    format_info_ocp_e4m3,
    format_info_ocp_e5m2,
    format_info_ocp_e8m0,
    format_info_p3109,
)
from gfloat.types import Domain, RoundMode, Signedness

from fp8.testing import oracle

# IEEE P3109's finite-domain formats are value for value the fnuz formats: bias 2^(7-mantissa),
# one zero, the only NaN at 0x80.
GFLOAT = {
    "e4m3fn": format_info_ocp_e4m3,
    "e5m2": format_info_ocp_e5m2,
    "e4m3fnuz": format_info_p3109(8, 4, Signedness.Signed, Domain.Finite),
    "e5m2fnuz": format_info_p3109(8, 3, Signedness.Signed, Domain.Finite),
    "e8m0fnu": format_info_ocp_e8m0,
}
ML_DTYPES = {
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e8m0fnu": ml_dtypes.float8_e8m0fnu,
}
ELEMENTS = [fmt for fmt in oracle.FORMATS if fmt != "e8m0fnu"]
POLICIES = [(fmt, overflow) for fmt in ELEMENTS for overflow in ("saturate", "nan")]
POLICIES.append(("e5m2", "inf"))
U16 = np.arange(1 << 16, dtype=np.uint16)
SIXTEEN_BITS = {  # no casts: those may complain about the signalling NaNs
    "bfloat16": (U16.astype(np.uint32) << np.uint32(16)).view(np.float32),
    "float16": U16.view(np.float16).astype(np.float32),
}


def bits32(*patterns: int) -> np.ndarray:
    return np.array(patterns, dtype=np.uint32).view(np.float32)


def same_codes(got: np.ndarray, expected: np.ndarray, fmt: str) -> np.ndarray:
    """Elementwise: equal codes, where all NaN codes of one format count as equal."""
    nans = oracle.nan_codes(fmt)
    return (got == expected) | (np.isin(got, nans) & np.isin(expected, nans))


def assert_same_codes(got: np.ndarray, expected: np.ndarray, fmt: str, x: np.ndarray) -> None:
    wrong = np.flatnonzero(~same_codes(got, expected, fmt))
    assert wrong.size == 0, (
        f"{wrong.size} of {x.size} wrong, first: {x[wrong[0]]!r} gave {got[wrong[0]]:#x}, "
        f"expected {expected[wrong[0]]:#x}"
    )


@np.errstate(all="ignore")
def gfloat_codes(x: np.ndarray, fmt: str, overflow: str) -> np.ndarray:
    """gfloat's codes; its unsaturated e5m2 has infinities, which "nan" turns into NaN."""
    info, saturate = GFLOAT[fmt], overflow == "saturate"
    rounded = gfloat.round_ndarray(info, x.astype(np.float64), RoundMode.TiesToEven, sat=saturate)
    if overflow == "nan":
        rounded = np.where(np.isinf(rounded), np.nan, rounded)
    return gfloat.encode_ndarray(info, rounded).astype(np.uint8)


def decision_neighbours(fmt: str) -> np.ndarray:
    """Each midpoint of `fmt` and its float32 neighbours on both sides."""
    middle = oracle.midpoints(fmt)
    below = np.nextafter(middle, np.float32(-np.inf))
    above = np.nextafter(middle, np.float32(np.inf))
    return np.concatenate([below, middle, above])


@pytest.mark.parametrize("fmt", oracle.FORMATS)
def test_every_code_decodes_as_gfloat_and_ml_dtypes_say(fmt: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    got = oracle.decode(codes, fmt)
    assert got.dtype == np.float64
    gfloats = gfloat.decode_ndarray(GFLOAT[fmt], codes.astype(np.int64))
    ml = codes.view(ML_DTYPES[fmt]).astype(np.float64)
    np.testing.assert_array_equal(got, gfloats)
    np.testing.assert_array_equal(got, ml)
    np.testing.assert_array_equal(np.signbit(got[got == 0]), np.signbit(ml[ml == 0]))


@pytest.mark.parametrize(
    ("fmt", "largest", "smallest", "nans"),
    [
        # OFP8 1.0 table 2 and ONNX's float8 page for fnuz.
        ("e4m3fn", 448, 2.0**-9, {0x7F, 0xFF}),
        ("e5m2", 57344, 2.0**-16, {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}),
        ("e4m3fnuz", 240, 2.0**-10, {0x80}),
        ("e5m2fnuz", 57344, 2.0**-17, {0x80}),
        ("e8m0fnu", 2.0**127, 2.0**-127, {0xFF}),
    ],
)
def test_extremes_and_nan_codes(fmt: str, largest: float, smallest: float, nans: set[int]) -> None:
    values = oracle.decode(np.arange(256, dtype=np.uint8), fmt)
    assert oracle.fmax(fmt) == largest
    assert values[values > 0].min() == smallest
    assert set(oracle.nan_codes(fmt)) == nans == set(np.flatnonzero(np.isnan(values)))
    assert len(oracle.nan_codes(fmt)) == len(nans)


@pytest.mark.parametrize("fmt", oracle.FORMATS)
def test_every_number_encodes_to_its_own_code(fmt: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = oracle.decode(codes, fmt)
    overflow = "inf" if fmt == "e5m2" else "nan"
    got = oracle.encode(values.astype(np.float32), fmt, overflow)
    expected = np.where(np.isnan(values), oracle.nan_codes(fmt)[0], codes)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("source", SIXTEEN_BITS)
@pytest.mark.parametrize(("fmt", "overflow"), POLICIES)
def test_every_sixteen_bit_value_encodes_as_gfloat_says(
    fmt: str, overflow: str, source: str
) -> None:
    x = SIXTEEN_BITS[source]
    got = oracle.encode(x, fmt, overflow)
    assert_same_codes(got, gfloat_codes(x, fmt, overflow), fmt, x)
    assert np.isin(got[np.isnan(x)], oracle.nan_codes(fmt)[0]).all()


@pytest.mark.parametrize(("fmt", "overflow"), POLICIES)
def test_float32_at_and_beside_every_midpoint_encodes_as_gfloat_says(
    fmt: str, overflow: str
) -> None:
    x = decision_neighbours(fmt)
    assert_same_codes(oracle.encode(x, fmt, overflow), gfloat_codes(x, fmt, overflow), fmt, x)


@pytest.mark.parametrize(("fmt", "overflow"), POLICIES)
def test_random_float32_bits_encode_as_gfloat_says(fmt: str, overflow: str) -> None:
    bits = np.random.default_rng(20).integers(0, 1 << 32, 20_000, dtype=np.uint32)
    # Half of them in the format's own range, where random exponents seldom fall.
    bits[::2] = (bits[::2] & np.uint32(0x80FFFFFF)) | np.uint32(0x3A000000)
    x = bits.view(np.float32)
    assert_same_codes(oracle.encode(x, fmt, overflow), gfloat_codes(x, fmt, overflow), fmt, x)


@pytest.mark.parametrize("fmt", ELEMENTS)
def test_encoding_agrees_with_ml_dtypes_which_never_saturates(fmt: str) -> None:
    overflow = "inf" if fmt == "e5m2" else "nan"
    x = np.concatenate([*SIXTEEN_BITS.values(), decision_neighbours(fmt)])
    with np.errstate(all="ignore"):
        ml = x.astype(ML_DTYPES[fmt]).view(np.uint8)
    assert_same_codes(oracle.encode(x, fmt, overflow), ml, fmt, x)


def test_midpoints_are_exact_and_complete() -> None:
    for fmt in ELEMENTS:
        values = oracle.decode(np.arange(128, dtype=np.uint8), fmt)
        finite = [Fraction(v) for v in values if np.isfinite(v)]
        step = finite[-1] - finite[-2]
        beyond = [*finite, finite[-1] + step]
        expected = {(a + b) / 2 for a, b in itertools.pairwise(beyond)}
        got = [Fraction(float(m)) for m in oracle.midpoints(fmt)]
        assert len(got) == len(set(got)) == 2 * len(expected)
        assert set(got) == expected | {-m for m in expected}
    # e8m0fnu: 1.5 · 2^k between 254 neighbours, one overflow midpoint, the odd 2^-127; two signs.
    assert len(set(oracle.midpoints("e8m0fnu").tolist())) == 2 * (254 + 1 + 1)


@pytest.mark.parametrize(
    ("fmt", "overflow", "x", "code"),
    [
        # Normal ties: 17 is halfway between 16 (1.000·2^4) and 18 (1.001·2^4): to the even one.
        ("e4m3fn", "saturate", 17.0, 0x58),
        ("e4m3fn", "saturate", 19.0, 0x5A),  # halfway between 18 and 20 = 1.010·2^4
        ("e4m3fn", "saturate", -19.0, 0xDA),
        ("e4m3fn", "saturate", 17.000002, 0x59),
        # A carry into the exponent: 31 is halfway between 30 = 1.111·2^4 and 32.
        ("e4m3fn", "saturate", 31.0, 0x60),
        # Subnormals of e4m3fn are k·2^-9: 2^-10 and 3·2^-10 are ties, to 0 and to 2.
        ("e4m3fn", "saturate", 2.0**-10, 0x00),
        ("e4m3fn", "saturate", -(2.0**-10), 0x80),
        ("e4m3fn", "saturate", 2.0**-10 * (1 + 2.0**-23), 0x01),
        ("e4m3fn", "saturate", 3 * 2.0**-10, 0x02),
        ("e4m3fn", "saturate", 15 * 2.0**-10, 0x08),  # 7.5 steps: up to the smallest normal
        ("e4m3fn", "saturate", 2.0**-149, 0x00),
        # The overflow midpoint 464 is a tie between 448 (even) and 480, which isn't there.
        ("e4m3fn", "nan", 464.0, 0x7E),
        ("e4m3fn", "nan", 464.00003, 0x7F),
        ("e4m3fn", "saturate", 464.00003, 0x7E),
        ("e4m3fn", "saturate", -np.inf, 0xFE),
        ("e4m3fn", "nan", np.inf, 0x7F),
        ("e4m3fn", "saturate", np.nan, 0x7F),
        # e5m2: 61440 is a tie between 57344 (odd) and 65536: overflow.
        ("e5m2", "inf", 61439.996, 0x7B),
        ("e5m2", "inf", 61440.0, 0x7C),
        ("e5m2", "inf", -61440.0, 0xFC),
        ("e5m2", "nan", 61440.0, 0x7E),
        ("e5m2", "nan", -np.inf, 0x7E),
        ("e5m2", "saturate", np.inf, 0x7B),
        ("e5m2", "saturate", -1e30, 0xFB),
        # fnuz: no -0, not even by underflow; 248 is a tie between 240 (odd) and 256: overflow.
        ("e4m3fnuz", "saturate", -0.0, 0x00),
        ("e4m3fnuz", "saturate", -(2.0**-11), 0x00),
        ("e4m3fnuz", "nan", 248.0, 0x80),
        ("e4m3fnuz", "nan", -248.0, 0x80),
        ("e4m3fnuz", "saturate", -248.0, 0xFF),
        ("e5m2fnuz", "saturate", 1e9, 0x7F),
        ("e5m2fnuz", "nan", -np.inf, 0x80),
    ],
)
def test_codes_worked_out_by_hand(fmt: str, overflow: str, x: float, code: int) -> None:
    assert int(oracle.encode(np.float32([x]), fmt, overflow)[0]) == code


@pytest.mark.parametrize(
    ("pattern", "code"),
    [
        (0x3F800000, 127),  # 1
        (0xBF800000, 127),  # -1: the sign is ignored
        (0x3FBFFFFF, 127),  # just under 1.5
        (0x3FC00000, 128),  # 1.5, the tie, goes up to 2
        (0x40400000, 129),  # 3 goes up to 4 as well: not to even
        (0xC3E00000, 136),  # -448 = -1.75 · 2^8
        (0x00000000, 0),
        (0x80000000, 0),
        (0x00400000, 0),  # 2^-127
        (0x00400001, 1),  # the quirk: anything above 2^-127 is 2^-126
        (0x00800000, 1),  # 2^-126
        (0x7F3FFFFF, 254),  # just under 1.5 · 2^127
        (0x7F400000, 255),
        (0x7F800000, 255),
        (0xFF800000, 255),
        (0x7F800001, 255),  # a NaN whose high half looks like infinity
    ],
)
def test_e8m0_codes_worked_out_by_hand(pattern: int, code: int) -> None:
    assert int(oracle.encode(bits32(pattern), "e8m0fnu")[0]) == code


def test_e8m0_agrees_with_ml_dtypes_on_positive_values() -> None:
    x = np.concatenate([*SIXTEEN_BITS.values(), decision_neighbours("e8m0fnu")])
    x = x[x > 0]
    assert x.size > 2 * 30_000
    with np.errstate(all="ignore"):
        ml = x.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    assert_same_codes(oracle.encode(x, "e8m0fnu"), ml, "e8m0fnu", x)
    assert_same_codes(oracle.encode(-x, "e8m0fnu"), ml, "e8m0fnu", -x)


@pytest.mark.parametrize(
    ("dtype", "info"), [("bfloat16", format_info_bfloat16), ("float16", format_info_binary16)]
)
def test_round_to_is_the_rounding_of_gfloat(dtype: str, info: gfloat.FormatInfo) -> None:
    every = SIXTEEN_BITS[dtype]
    every = every[np.isfinite(every)].astype(np.float64)
    # Every value stays what it is, zeros with their sign.
    np.testing.assert_array_equal(oracle.round_to(every, dtype), every)
    np.testing.assert_array_equal(np.signbit(oracle.round_to(every, dtype)), np.signbit(every))
    # Between neighbours: the tie and the two float64 values next to it, overflow included.
    positive = np.unique(np.abs(every))
    positive = np.append(positive, 2 * positive[-1] - positive[-2])
    ties = (positive[:-1] + positive[1:])[::7] / 2
    ties = np.append(ties, (positive[-1] + positive[-2]) / 2)
    x = np.concatenate([np.nextafter(ties, 0), ties, np.nextafter(ties, np.inf), -ties])
    x = np.concatenate([x, [np.inf, -np.inf, np.nan, 1e300, -5e-324]])
    expected = gfloat.round_ndarray(info, x, RoundMode.TiesToEven, sat=False)
    got = oracle.round_to(x, dtype)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(x))


@pytest.mark.filterwarnings("error")
def test_round_to_keeps_a_nan_whatever_its_payload() -> None:
    # Rounding these bit patterns as if they were numbers gives infinity, and wraps round to 0.
    payloads = np.array([0x7FF0000000000001, 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
    for dtype in ("bfloat16", "float16", "float32"):
        assert np.isnan(oracle.round_to(payloads.view(np.float64), dtype)).all()


def test_round_to_rounds_once() -> None:
    # 1 + 2^-8 is a bfloat16 tie, which goes to 1; the 2^-40 above it must not get lost in float32.
    above_tie = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8, -(1 + 2.0**-8 + 2.0**-40)])
    np.testing.assert_array_equal(
        oracle.round_to(above_tie, "bfloat16"), [1 + 2.0**-7, 1, -(1 + 2.0**-7)]
    )
    # The same in float16 (11 bits) and below its normal range, in steps of 2^-24.
    np.testing.assert_array_equal(
        oracle.round_to(np.array([1 + 2.0**-11 + 2.0**-50, 2.5 * 2.0**-24]), "float16"),
        [1 + 2.0**-10, 2 * 2.0**-24],
    )
    # float32: 2^24 + 1 is a tie, and 3.5e38 is beyond the largest value.
    np.testing.assert_array_equal(
        oracle.round_to(np.array([2.0**24 + 1, 2.0**24 + 3, 3.5e38]), "float32"),
        [2.0**24, 2.0**24 + 4, np.inf],
    )
    assert oracle.round_to(np.array(1.0), "bfloat16").shape == ()


@pytest.mark.parametrize(
    ("dtype", "numpy_dtype"),
    [("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16), ("float32", np.float32)],
)
def test_unit_roundoff_and_smallest_subnormal(dtype: str, numpy_dtype: type) -> None:
    info = ml_dtypes.finfo(numpy_dtype)
    assert oracle.unit_roundoff(dtype) == float(info.eps) / 2
    assert oracle.smallest_subnormal(dtype) == float(info.smallest_subnormal)


def test_errors_name_the_argument() -> None:
    x = np.float32([1.0])
    with pytest.raises(ValueError, match="fmt is 'e4m3'"):
        oracle.encode(x, "e4m3")
    with pytest.raises(ValueError, match="overflow is 'inf', need one of saturate, nan for e4m3fn"):
        oracle.encode(x, "e4m3fn", "inf")
    with pytest.raises(ValueError, match="overflow is 'wrap'"):
        oracle.encode(x, "e5m2", "wrap")
    with pytest.raises(ValueError, match="x is float64 with values that float32 can't hold"):
        oracle.encode(np.array([0.1]), "e4m3fn")
    with pytest.raises(TypeError, match="codes has dtype int64, need uint8"):
        oracle.decode(np.array([1]), "e4m3fn")
    with pytest.raises(ValueError, match="dtype is 'float64'"):
        oracle.round_to(x, "float64")


def test_importing_the_oracle_loads_neither_torch_nor_the_library() -> None:
    program = (
        "import sys, fp8.testing.oracle;"
        "print(*sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'fp8')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "fp8.testing.oracle" in loaded
    outside = {m for m in loaded if not m.startswith("fp8.testing.oracle")}
    assert outside == {"fp8", "fp8.testing"}
