"""The scaled product by itself: unequal scales, every code, odd sizes, layouts, accumulation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8.formats import FORMATS
from fp8.quantize import Operand, Quantized
from fp8.scaling import GRANULARITIES, TORCHAO
from fp8.testing import bounds, oracle
from fp8.testing.strategies import DTYPES, LAYOUTS, as_tensor, examples, lay_out, shapes

FORMAT_PAIRS = (("e4m3fn", "e4m3fn"), ("e5m2", "e4m3fn"), ("e4m3fn", "e5m2"))
GRANULARITY_PAIRS = (
    ("tensorwise", "tensorwise"),
    ("rowwise", "rowwise"),
    ("rowwise", "tensorwise"),
    ("tensorwise", "rowwise"),
    ("1x128", "128x128"),
    ("1x128", "1x128"),
)
ACCUMULATIONS = ("fast", "precise")
#: NaN in e4m3fn and e5m2, what lies around an operand in memory
NAN_CODE = 0x7F

format_pairs = pytest.mark.parametrize("formats", FORMAT_PAIRS, ids="-".join)
granularity_pairs = pytest.mark.parametrize("granularities", GRANULARITY_PAIRS, ids="-".join)
accumulations = pytest.mark.parametrize("accumulation", ACCUMULATIONS)


@dataclass(frozen=True)
class Side:
    """One operand: codes and scales as arrays, and as the target's Quantized."""

    codes: np.ndarray
    scale: np.ndarray
    operand: Operand

    @property
    def block(self):
        return self.operand.granularity.block

    @property
    def values(self) -> np.ndarray:
        name = self.operand.format.name
        return oracle.dequantize(self.codes, self.scale, name, self.block)

    def padded(self, columns: int) -> Side:
        """The same operand with that many zero codes more along the contraction.

        Up to the next scale block only: then it has the scales that it had.
        """
        return replace(self, codes=np.pad(self.codes, ((0, 0), (0, columns))))

    def on(self, device, layout: str = "contiguous") -> Quantized:
        codes = lay_out(torch.from_numpy(self.codes).to(device), layout, NAN_CODE)
        scale = torch.from_numpy(self.scale).to(device)
        return Quantized(codes.view(self.operand.format.dtype), scale, self.operand)


def operand(format: str, granularity: str) -> Operand:
    return Operand(FORMATS[format], GRANULARITIES[granularity], TORCHAO)


def finite_codes(format: str) -> np.ndarray:
    codes = np.arange(256, dtype=np.uint8)
    return codes[np.isfinite(oracle.decode(codes, format))]


def scale_shape(operand: Operand, rows: int, columns: int) -> tuple[int, int]:
    """Written again from the definition: the library's own would hide its mistake."""
    block_rows, block_columns = operand.granularity.block
    return (
        1 if block_rows is None else -(-rows // block_rows),
        1 if block_columns is None else -(-columns // block_columns),
    )


def exact_side(
    rng, operand: Operand, rows: int, columns: int, along: np.ndarray, sign: int
) -> Side:
    """Integer codes and power-of-two scales, different in every group; `along` the contraction the
    exponents of the blocks, which the other operand cancels."""
    integers = rng.integers(-7, 8, (rows, columns)) * (
        rng.random((rows, columns)) < 400 / (columns + 1)
    )
    codes = oracle.encode(integers.astype(np.float32), operand.format.name)
    shape = scale_shape(operand, rows, columns)
    own = rng.integers(-4, 5, (shape[0], 1))
    blocks = along[: shape[1]] if operand.granularity.block[1] is not None else np.zeros(shape[1])
    scale = np.exp2(own + sign * blocks).astype(np.float32)
    return Side(codes, scale, operand)


def exact_pair(rng, left: Operand, right: Operand, M: int, K: int, N: int) -> tuple[Side, Side]:
    blocked = all(o.granularity.block[1] not in (None, 1) for o in (left, right))
    along = rng.integers(-3, 4, -(-K // 128) if blocked else 1)
    return (
        exact_side(rng, left, M, K, along, +1),
        exact_side(rng, right, N, K, along, -1),
    )


def require(judge, target, left: Operand, right: Operand) -> None:
    known = (left, right) in target.capabilities().products
    judge.require(known, f"scaled_mm: no {left} x {right}")


@pytest.mark.law("P05", "P18", "P22", "P03")
@granularity_pairs
@format_pairs
@accumulations
@examples(12)
@given(data=st.data(), seed=st.integers(0, 2**20))
def test_exact(target, judge, fp8_seed, formats, granularities, accumulation, data, seed):
    """A power-of-two scale for every group, none like its neighbour: equal to float64, bit for bit.

    Sizes run over every residue of the tiles and of the scale blocks; layouts lie among NaN codes.
    """
    left, right = (operand(f, g) for f, g in zip(formats, granularities, strict=True))
    require(judge, target, left, right)
    aligned = target.capabilities().alignment
    M, K, N = data.draw(shapes(1, 300, True, aligned, squares=True))
    layout = data.draw(st.sampled_from(LAYOUTS))
    dtype = data.draw(st.sampled_from([d for d in DTYPES if supports_dtype(target, d)]))
    judge.example(M=M, K=K, N=N, dtype=dtype, layout=layout, accumulation=accumulation, seed=seed)
    a, b = exact_pair(np.random.default_rng([fp8_seed, seed]), left, right, M, K, N)

    def multiply(a: Quantized, b: Quantized):
        # An accumulator that begins with +0 has no -0 to give: the sign of a zero sum is free.
        how = {"out_dtype": getattr(torch, dtype), "accumulation": accumulation}
        return target.scaled_mm(a, b, bias=None, **how) + 0

    got = multiply(a.on(target.device, layout), b.on(target.device, layout))
    value, _ = oracle.product(a.values, b.values)
    want = as_tensor(oracle.round_to(value, dtype), dtype, "cpu")
    judge.bitwise("P05", "product exact", got, want + 0)
    compact = multiply(a.on(target.device), b.on(target.device))
    judge.bitwise("P18", f"product of {layout} operands", got, compact)
    if layout not in ("contiguous", "transposed"):
        judge.bitwise("P22", "product beside NaN codes", got, compact)
    padded = multiply(*(side.padded(-K % 128).on(target.device) for side in (a, b)))
    judge.bitwise("P22", "contraction padded by hand", padded, got)


def supports_dtype(target, dtype: str) -> bool:
    return getattr(torch, dtype) in target.capabilities().dtypes


@pytest.mark.law("P05")
@granularity_pairs
@format_pairs
@accumulations
@examples(12)
@given(data=st.data(), seed=st.integers(0, 2**20))
def test_tight(target, judge, fp8_seed, formats, granularities, accumulation, data, seed):
    """Every finite code and arbitrary scales: within the bound of the target's accumulation."""
    left, right = (operand(f, g) for f, g in zip(formats, granularities, strict=True))
    require(judge, target, left, right)
    M, K, N = data.draw(shapes(1, 260, alignment=target.capabilities().alignment))
    dtype = data.draw(st.sampled_from([d for d in DTYPES if supports_dtype(target, d)]))
    judge.example(M=M, K=K, N=N, dtype=dtype, accumulation=accumulation, seed=seed)
    rng = np.random.default_rng([fp8_seed, seed])
    # float16 ends at 65504, and codes reach 57344 * 448 * K.
    exponents = (-26, -16) if dtype == "float16" else (-12, 12)

    def side(operand: Operand, rows: int) -> Side:
        shape = scale_shape(operand, rows, K)
        scale = np.exp2(rng.uniform(*exponents, shape)).astype(np.float32)
        return Side(rng.choice(finite_codes(operand.format.name), (rows, K)), scale, operand)

    a, b = side(left, M), side(right, N)
    got = target.scaled_mm(
        a.on(target.device),
        b.on(target.device),
        bias=None,
        out_dtype=getattr(torch, dtype),
        accumulation=accumulation,
    )
    value, magnitude = oracle.product(a.values, b.values)
    model = target.policy.accumulation[accumulation]
    bound = bounds.product_bound(value, magnitude, K, dtype, model)
    judge.bound("P05", "product tight", got, bounds.expected(value, dtype), bound)


@pytest.mark.law("P27")
@accumulations
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@examples(12)
@given(data=st.data(), seed=st.integers(0, 2**20))
def test_bias_is_added_before_the_rounding(
    target, judge, fp8_seed, accumulation, dtype, data, seed
):
    """round(sum + bias), never round(round(sum) + bias)."""
    how = operand("e4m3fn", "tensorwise")
    require(judge, target, how, how)
    judge.require(
        getattr(torch, dtype) in target.capabilities().bias_dtypes,
        f"scaled_mm: no bias with {dtype} output",
    )
    M, K, N = data.draw(shapes(2, 200, alignment=target.capabilities().alignment))
    judge.example(M=M, K=K, N=N, dtype=dtype, accumulation=accumulation, seed=seed)
    rng = np.random.default_rng([fp8_seed, seed])
    a, b = exact_pair(rng, how, how, M, K, N)
    granule = float(a.scale[0, 0] * b.scale[0, 0])
    bias = rng.integers(-100, 101, N) * (granule / 4)
    got = target.scaled_mm(
        a.on(target.device),
        b.on(target.device),
        bias=as_tensor(bias, dtype, target.device),
        out_dtype=getattr(torch, dtype),
        accumulation=accumulation,
    )
    value, _ = oracle.product(a.values, b.values)
    want = as_tensor(oracle.round_to(value + bias, dtype), dtype, "cpu")
    judge.bitwise("P27", "bias rounded once", got + 0, want + 0)


@pytest.mark.thorough
@pytest.mark.law("F-ACC", "P27")
@accumulations
@pytest.mark.parametrize("contraction", [64, 256, 1024, 4096, 16384, 65536])
def test_sums_of_one_sign(target, judge, fp8_seed, accumulation, contraction):
    """Positive data, whose running sum only grows: the error that random signs hide."""
    how = operand("e4m3fn", "tensorwise")
    require(judge, target, how, how)
    judge.example(K=contraction, accumulation=accumulation, dtype="float32")
    rng = np.random.default_rng([fp8_seed, contraction])
    a, b = (
        Side(
            oracle.encode((rng.random((rows, contraction)) + 0.5).astype(np.float32), "e4m3fn"),
            np.ones((1, 1), np.float32),
            how,
        )
        for rows in (16, 32)
    )
    got = target.scaled_mm(
        a.on(target.device),
        b.on(target.device),
        bias=None,
        out_dtype=torch.float32,
        accumulation=accumulation,
    )
    value, magnitude = oracle.product(a.values, b.values)
    model = target.policy.accumulation[accumulation]
    bound = bounds.same_sign_gamma(model, contraction) * magnitude + bounds.half_ulp(
        value, "float32"
    )
    judge.bound("F-ACC", "sum of one sign", got, value, bound)
    error = float(((got.double().cpu().numpy() - value) / value).mean())
    judge.record("mean error of a same-sign sum", f"{error:+.4f}", "text")
    if abs(error) > 0.01:
        judge.note(f"{accumulation}: a same-sign sum of {contraction} is off by {error:+.1%}")


#: bits that every value of the sum keeps, for each model of accumulation
WIDTHS = {
    "float64": 24,
    "float32": 23,
    "cpu_scaled_mm": 23,
    "hopper_fast": 13,
    "hopper_precise": 13,
}


@pytest.mark.law("F-ACC", "P27")
@accumulations
def test_accumulator_width(target, judge, accumulation):
    """One large product and 1,023 small ones: up to which ratio does every small one count?"""
    how = operand("e4m3fn", "tensorwise")
    require(judge, target, how, how)
    judge.example(accumulation=accumulation, K=1024)
    width = 0
    for bits in range(1, 35):
        got, want = measured_sum(target, accumulation, how, bits)
        if got != want:
            break
        width = bits
    model = target.policy.accumulation[accumulation]
    judge.true(
        "F-ACC",
        "accumulator width",
        width >= WIDTHS[model],
        f"every 1 counts only up to a sum of 2^{width}, needs 2^{WIDTHS[model]} ({model})",
    )
    judge.record("accumulator width", width, "count")
    at_least = "at least " if width == 34 else ""
    judge.note(f"{accumulation} accumulation holds {at_least}{width} bits")


#: the product of two of e4m3fn's smallest subnormals, 2^-9 * 2^-9: from there 34 bits up to 2^16
UNIT = -18


def measured_sum(target, accumulation: str, how: Operand, bits: int) -> tuple[float, float]:
    """(got, want) for one product of 2^bits units and 1,023 of one unit, float32 output."""
    a = np.full((1, 1024), 2.0 ** (UNIT // 2), np.float32)
    b = np.full((16, 1024), 2.0 ** (UNIT // 2), np.float32)
    large = bits + UNIT
    a[0, 0], b[:, 0] = 2.0 ** (large // 2), 2.0 ** (large - large // 2)
    one = np.ones((1, 1), np.float32)
    got = target.scaled_mm(
        Side(oracle.encode(a, "e4m3fn"), one, how).on(target.device),
        Side(oracle.encode(b, "e4m3fn"), one, how).on(target.device),
        bias=None,
        out_dtype=torch.float32,
        accumulation=accumulation,
    )
    return got[0, 0].item(), float(np.float32((2.0**bits + 1023) * 2.0**UNIT))
