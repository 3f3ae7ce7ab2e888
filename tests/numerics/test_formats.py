"""What a code means and what a value becomes: every code, every 16-bit value, every decision.

A cast has 256 outcomes, so it is enumerated rather than sampled, in every memory layout and length
that takes another loop of the kernel: vectors, single elements, tails.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp8.formats import FORMATS
from fp8.targets.torch_native import TorchTarget
from fp8.testing import oracle
from fp8.testing.operators import MOVES, OTHER_OPERATORS
from fp8.testing.probes import (
    LANES,
    decisions,
    float32_sample,
    lay,
    mixed_decisions,
    sixteen_bit,
)
from fp8.testing.strategies import DTYPES, VALUES, as_tensor, matrix, to_dtype

# torch makes a signalling NaN of the fnuz formats' NaN; numpy is loud about it when it widens it.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")

SIXTEEN_BITS = ("bfloat16", "float16")
#: finite values that overflow in some formats and not in others, and what is no number
OVERFLOWING = (247.99, 248.0, 449.0, 464.0, 464.01, 465.0, 6e4, 61439.0, 61440.0, 1e30, 3e38)

formats = pytest.mark.parametrize("format", oracle.FORMATS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture
def casts(target, judge, format):
    """The target, which casts to `format`."""
    judge.require(format in target.capabilities().formats, f"cast: not to {format}")
    return target


def all_codes(format: str, device) -> torch.Tensor:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    return codes.view(getattr(torch, f"float8_{format}"))


def encoded(x: torch.Tensor, format: str, target) -> np.ndarray:
    """The codes that x should become under the target's own overflow policy; x's shape."""
    values = x.cpu().to(torch.float32).numpy()
    return oracle.encode(values, format, target.policy.overflow[format])


def judge_lanes(judge, target, check: str, x: torch.Tensor, format: str) -> None:
    """Cast the vector x in every layout that takes another loop."""
    want = encoded(x, format, target)
    for lane in LANES:
        judge.example(format=format, dtype=str(x.dtype)[6:], lane=lane)
        laid, index = lay(x, lane)
        got = target.cast(laid, FORMATS[format])
        judge.bitwise("P06", check, got, want[index.numpy()], fmt=format)


# --- decode -------------------------------------------------------------------------------------


@pytest.mark.law("P06")
@dtypes
@formats
def test_every_code_decodes(casts, judge, format, dtype):
    """All 256 codes mean what the format's definition says, in every layout and length."""
    codes = all_codes(format, casts.device)
    values = oracle.round_to(oracle.decode(np.arange(256, dtype=np.uint8), format), dtype)
    want = as_tensor(values, dtype, "cpu")
    to = getattr(torch, dtype)
    for lane in LANES:
        judge.example(format=format, dtype=dtype, lane=lane)
        # Laid out as numbers, which every layout's poison is: torch has no NaN to fill e8m0fnu.
        bytes_, index = lay(torch.arange(256, device=casts.device, dtype=torch.float32), lane)
        laid = torch.empty_strided(
            bytes_.size(), bytes_.stride(), dtype=torch.uint8, device=casts.device
        )
        laid.copy_(bytes_)
        judge.bitwise("P06", "decode", laid.view(codes.dtype).to(to), want[index])
    judge.example(format=format, dtype=dtype, lengths="1 to 70")
    starts = [(97 * length) % 180 for length in range(1, 71)]
    windows = [slice(start, start + n) for n, start in enumerate(starts, start=1)]
    judge.bitwise("P06", "decode", [codes[w].to(to) for w in windows], [want[w] for w in windows])
    judge.bitwise("P06", "decode", [c.to(to) for c in codes], list(want))


@pytest.mark.law("P06")
@formats
def test_every_code_survives(casts, judge, format):
    """Decoded and cast again, every finite code comes back; infinities as the policy says."""
    judge.example(format=format)
    codes = all_codes(format, casts.device)
    again = casts.cast(codes.to(torch.float32), FORMATS[format])
    decoded = oracle.decode(np.arange(256, dtype=np.uint8), format)
    finite = np.isfinite(decoded)
    judge.bitwise("P06", "round trip", again[finite], codes[finite])
    want = encoded(codes.to(torch.float32), format, casts)
    judge.bitwise("P06", "round trip of infinity and NaN", again, want, fmt=format)


# --- encode -------------------------------------------------------------------------------------


@pytest.mark.law("P06")
@pytest.mark.parametrize("dtype", SIXTEEN_BITS)
@formats
def test_every_sixteen_bit_value(casts, judge, format, dtype):
    """All 65,536 inputs of bfloat16 and of float16, in every layout."""
    x = sixteen_bit(dtype).to(casts.device)
    judge_lanes(judge, casts, "cast", x, format)
    judge.record("cast", casts.cast(x, FORMATS[format]), "hash")


@pytest.mark.law("P06")
@formats
def test_every_float32_decision(casts, judge, format):
    """Every midpoint, code, power of two and end of float32, with its neighbours up to 2 ulp."""
    x = torch.from_numpy(decisions(format)).to(casts.device)
    judge_lanes(judge, casts, "cast", x, format)
    judge.record("cast", casts.cast(x, FORMATS[format]), "hash")


@pytest.mark.law("P06")
@formats
def test_float32_sample(casts, judge, format):
    """Every upper half of a float32 with lower halves that rounding twice would show."""
    x = torch.from_numpy(float32_sample()).to(casts.device)
    judge_lanes(judge, casts, "cast", x, format)


@pytest.mark.law("P06")
@dtypes
@formats
def test_every_length(casts, judge, format, dtype):
    """Vectors of every length from 1 to 70 and around longer blocks, and tensors without a shape.

    Each starts at another address and holds other values, so that every kind of value comes by in
    the vectors' lanes and in the tail.
    """
    lengths = [*range(71), 95, 96, 97, 127, 128, 129, 255, 256, 257, 511, 513, 1023, 1025]
    x = mixed_decisions(format, dtype).to(casts.device)
    want = encoded(x, format, casts)
    starts = np.cumsum([0, *lengths]) * 37 % (x.numel() - max(lengths))
    windows = [slice(start, start + n) for n, start in zip(lengths, starts, strict=False)]
    judge.example(format=format, dtype=dtype, lengths="0 to 70, and more")
    got = [casts.cast(x[w], FORMATS[format]) for w in windows]
    judge.bitwise("P06", "cast", got, [want[w] for w in windows], fmt=format)
    judge.example(format=format, dtype=dtype, shape="()")
    some = range(0, x.numel(), max(1, x.numel() // 300))
    got = [casts.cast(x[i], FORMATS[format]) for i in some]
    judge.bitwise("P06", "cast", got, [want[i] for i in some], fmt=format)
    x = x[: x.numel() // 30 * 30].view(2, -1, 3, 5)
    want = want[: x.numel()].reshape(x.shape)
    judge.example(format=format, dtype=dtype, shape=list(x.shape))
    judge.bitwise("P06", "cast", casts.cast(x, FORMATS[format]), want, fmt=format)


@pytest.mark.law("P06")
@dtypes
@formats
def test_overflow(casts, judge, format, dtype):
    """Too large values and infinities become what the target's policy says, and `fp8 diff` sees it.

    e4m3fn of 464.01 and more was NaN on torch before 2.12 and is 448 since (pytorch#178817).
    """
    judge.example(format=format, dtype=dtype)
    magnitudes = to_dtype(np.array([*OVERFLOWING, np.inf]), dtype)
    x = as_tensor(np.concatenate([magnitudes, -magnitudes, [np.nan]]), dtype, casts.device)
    got = casts.cast(x, FORMATS[format])
    judge.bitwise("P06", "overflow", got, encoded(x, format, casts), fmt=format)
    judge.equal("P06", "overflow", got.dtype, getattr(torch, f"float8_{format}"))
    became = zip(x.tolist(), got.to(torch.float32).tolist(), strict=True)
    lines = dict.fromkeys(f"{a:g} -> {b:g}" for a, b in became if not a < 0)
    judge.record("overflow", ", ".join(lines), "text")


@pytest.mark.law("P06")
@dtypes
@formats
def test_rounding_is_unbiased(casts, judge, fp8_seed, format, dtype):
    """The mean signed error of positive values is zero within five standard errors.

    In units of the local ulp the error of a mantissa that is uniform over its binade is uniform on
    [-1/2, 1/2], mean 0 (what the upper end rounds up, the lower end rounds down) and variance 1/12.
    For a 16-bit dtype it takes n = 2^4 or more equidistant values, whose ties go up and down
    equally often: (1 + 2/n^2)/12, 1 % more. Five standard errors are exceeded once in 1.7 million.
    """
    judge.require(format != "e8m0fnu", "e8m0fnu: without a mantissa, every tie goes up")
    count = 1 << 18
    judge.example(format=format, dtype=dtype, count=count, seed=fp8_seed)
    rng = np.random.default_rng([fp8_seed, 6])
    lowest, highest = np.log2([FORMATS[format].smallest_normal, oracle.fmax(format)]).astype(int)
    if dtype == "float16":
        lowest = max(lowest, -14)  # below it, float16 has fewer bits
    exponents = rng.integers(lowest, highest, count)  # without the last binade: its end overflows
    bits = {"bfloat16": 7, "float16": 10, "float32": 23}[dtype]
    mantissas = 1 + rng.integers(0, 1 << bits, count) / (1 << bits)
    x = np.ldexp(mantissas, exponents)
    got = casts.cast(as_tensor(x, dtype, casts.device), FORMATS[format])
    ulp = np.ldexp(1.0, exponents - FORMATS[format].mantissa_bits)
    error = float(((got.to(torch.float32).double().cpu().numpy() - x) / ulp).mean())
    band = 5 * np.sqrt(1.01 / 12 / count)
    judge.bound("P06", "mean signed error", np.array(error), np.array(0.0), np.array(band))


@pytest.mark.law("P06")
@formats
def test_random_values(casts, judge, fp8_seed, format):
    """Long vectors of each distribution, scaled over the whole range of the format."""
    reach = np.ldexp(oracle.fmax(format), np.arange(64) - 60)[:, None]
    for values in VALUES:
        judge.example(format=format, values=values, seed=fp8_seed)
        x = to_dtype(matrix(values, 64, 1024, fp8_seed) * reach, "float32").astype(np.float32)
        tensor = torch.from_numpy(x).to(casts.device)
        got = casts.cast(tensor, FORMATS[format])
        judge.bitwise("P06", "cast", got, encoded(tensor, format, casts), fmt=format)


@pytest.mark.slow
@pytest.mark.law("P06")
@formats
def test_every_float32(casts, judge, format):
    """All 2^32 values of float32."""
    judge.example(format=format, dtype="float32")
    # One chunk is 256 upper halves. Under one upper half all values but the first decide alike:
    # every decision value has so few bits that its lower half is zero (see the oracle).
    low = np.arange(1 << 16, dtype=np.uint32)
    first = torch.from_numpy(np.tile(low, 256).reshape(256, -1))
    upper = np.arange(256, dtype=np.uint32)[:, None] << np.uint32(16)
    for chunk in range(256):
        start = np.uint32(chunk << 24)
        bits = first.numpy() | (upper | start)
        x = torch.from_numpy(bits.view(np.float32)).to(casts.device)
        two = oracle.encode(bits[:, :2].view(np.float32), format, casts.policy.overflow[format])
        want = np.repeat(two, [1, (1 << 16) - 1], axis=1)
        judge.bitwise("P06", "cast", casts.cast(x, FORMATS[format]), want, fmt=format)


# --- what torch says of the formats -------------------------------------------------------------


@pytest.fixture
def torch_itself(target, judge):
    """The target, which is torch: what it says of its dtypes is no other target's doing."""
    judge.require(isinstance(target, TorchTarget), "dtype facts: not torch's own")
    return target


@pytest.mark.law("P06")
@formats
def test_finfo(torch_itself, judge, format):
    """`torch.finfo` says what the codes say."""
    judge.example(format=format)
    info = torch.finfo(getattr(torch, f"float8_{format}"))
    values = oracle.decode(np.arange(256, dtype=np.uint8), format)
    finite = values[np.isfinite(values)]
    above_one = finite[finite > 1].min() - 1
    want = {"max": finite.max(), "min": finite.min(), "eps": above_one, "bits": 8}
    want["smallest_normal"] = want["tiny"] = FORMATS[format].smallest_normal
    for name, value in want.items():
        judge.equal("P06", f"finfo {name}", float(getattr(info, name)), float(value))


@pytest.mark.law("P06", "P16")
@formats
def test_classification(torch_itself, judge, format):
    """isnan, isinf and isfinite of every code are right, or refuse the dtype by its name."""
    codes = all_codes(format, torch_itself.device)
    values = oracle.decode(np.arange(256, dtype=np.uint8), format)
    for name in ("isnan", "isinf", "isfinite"):
        judge.example(format=format, operator=name)
        got = supported(judge, name, lambda name=name: getattr(torch, name)(codes))
        if got is not None:
            judge.bitwise("P06", name, got, torch.from_numpy(getattr(np, name)(values)))


def supported(judge, name: str, operation):
    """What an operation gives, or None where it says that it does not know the dtype."""

    def or_refuse():
        try:
            return operation()
        except NotImplementedError as error:
            return error

    worked, result = judge.attempt("P16", name, or_refuse)
    if isinstance(result, NotImplementedError):
        judge.true("P16", f"{name} refuses", "Float8" in str(result), f"names no dtype: {result}")
        worked, result = False, None
    judge.record(name, "implemented" if worked else "not implemented", "text")
    return result


# --- what torch's operators make of float8 tensors ----------------------------------------------


@pytest.mark.law("P16")
@formats
def test_moving_codes(casts, judge, format):
    """Transposing, slicing, joining, copying, saving: the values are those of the same operator on
    the decoded tensor, all 256 codes among them."""
    q = all_codes(format, casts.device).view(16, 16)
    for name, operator in MOVES.items():
        judge.example(format=format, operator=name)
        attempt = supported if format == "e8m0fnu" else needed  # scales: CUDA's cat lacks them
        got = attempt(judge, name, lambda operator=operator: operator(q))
        if got is not None:
            judge.equal("P16", f"{name} keeps the dtype", got.dtype, q.dtype)
            judge.bitwise("P16", name, got.to(torch.float32), operator(decoded(q, format)))


def needed(judge, name: str, operation):
    """What an operation gives that may not refuse; None where it is expected to."""
    return judge.attempt("P16", name, operation)[1]


def decoded(q: torch.Tensor, format: str) -> torch.Tensor:
    values = oracle.decode(q.view(torch.uint8).cpu().numpy(), format)
    return torch.from_numpy(values).to(torch.float32).to(q.device)


@pytest.mark.law("P16")
@formats
def test_other_operators(torch_itself, judge, format):
    """Operators that torch may lack for float8 are right or refuse the dtype by its name."""
    q = all_codes(format, torch_itself.device).view(16, 16)
    for name, operator in OTHER_OPERATORS.items():
        judge.example(format=format, operator=name)
        got = supported(judge, name, lambda operator=operator: operator(q))
        if got is not None:
            judge.bitwise("P16", name, got.to(torch.float32), operator(decoded(q, format)))
