"""The judge: what it accepts, what it refuses, what it counts and what it says."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from fp8.testing.comparing import QualityLimits as Limits
from fp8.testing.comparing import bitwise, elements, quality, sqnr, within
from fp8.testing.law_table import LAWS
from fp8.testing.laws import Judge, LawUsageError, LawViolation
from fp8.testing.tally import Tally

FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
LIMITS = Limits(0.02, 0.2)


@pytest.fixture
def tally() -> Tally:
    return Tally()


@pytest.fixture
def judge_of_it(tally: Tally) -> Judge:
    return Judge(
        target="it",
        laws=["P05", "P08"],
        tally=tally,
        test="test_x.py::test_y[it]",
        facts={"device": "cpu"},
        reproduce='python -m pytest "test_x.py::test_y[it]"',
    )


# ---------------------------------------------------------------------------------- as bits


@pytest.mark.parametrize("dtype", FLOAT8)
def test_all_codes_equal_themselves_whatever_holds_them(dtype: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    tensor = torch.from_numpy(codes.copy()).view(getattr(torch, dtype))
    array = codes.view(getattr(ml_dtypes, dtype))
    fmt = dtype.removeprefix("float8_")
    for got in (tensor, array, codes):
        for expected in (tensor, array, codes):
            found = bitwise(got, expected, fmt=fmt)
            assert (found.compared, found.wrong) == (256, 0)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_two_different_codes_are_equal_only_if_both_are_nan(dtype: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    got, expected = (a.ravel() for a in np.meshgrid(codes, codes))
    values = codes.view(getattr(ml_dtypes, dtype)).astype(np.float32)
    nan = int(np.isnan(values).sum())
    found = bitwise(got, expected, fmt=dtype)
    assert found.wrong == 256 * 255 - nan * (nan - 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_nan_payload_and_sign_do_not_matter_but_signed_zero_does(dtype: str) -> None:
    one = torch.tensor([math.nan, 0.0, 1.0], dtype=getattr(torch, dtype))
    other = torch.tensor([-math.nan, 0.0, 1.0], dtype=getattr(torch, dtype))
    assert bitwise(one, other).ok
    other[1] = -0.0
    found = bitwise(one, other)
    assert found.wrong == 1
    assert found.lines[0].startswith("first wrong element: [1] expected -0.0 (code 0x80")


def test_strides_do_not_matter() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).to(torch.float8_e4m3fn)
    assert bitwise(tensor.t(), elements(tensor).bits.T.copy(), fmt="e4m3fn").ok
    assert bitwise(torch.ones(1).expand(5), np.ones(5, np.float32)).ok


def test_an_array_of_values_is_compared_by_value() -> None:
    values = np.array([1.0, -0.0, np.inf, np.nan, 448.0])
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert bitwise(torch.tensor(values).to(dtype), values).ok
    bf16 = torch.tensor(values).to(torch.bfloat16)
    values[0] += 2**-12  # bfloat16 can't hold it, so it can't be equal
    assert bitwise(bf16, values).wrong == 1
    # the sign of zero survives the widening
    assert bitwise(torch.zeros(1, dtype=torch.bfloat16), np.array([-0.0])).wrong == 1


def test_another_dtype_or_shape_or_number_is_wrong() -> None:
    tensor = torch.ones(2, 3)
    assert bitwise(tensor, tensor.to(torch.bfloat16)).lines == (
        "dtype: expected bfloat16, got float32",
    )
    assert bitwise(tensor, tensor.to(torch.int32)).wrong == 6
    assert bitwise(tensor, torch.ones(3, 2)).lines == ("shape: expected (3, 2), got (2, 3)",)
    assert bitwise(tensor, np.float32(1.0)).wrong == 6  # nothing is broadcast
    assert bitwise([tensor], [tensor, tensor]).lines == ("expected 2 tensors, got 1",)
    assert bitwise(None, tensor).lines == ("expected a Tensor, got None",)
    assert bitwise([tensor, None], [tensor, None]).compared == 7


def test_a_list_says_which_tensor_was_wrong() -> None:
    zeros = torch.zeros(2)
    found = bitwise([zeros, zeros, zeros], [zeros, zeros + 1, zeros + 1])
    assert (found.compared, found.wrong) == (6, 4)
    assert found.lines[0] == "in tensor 1 of 3, the first that is wrong"


def test_what_has_no_bits_is_refused() -> None:
    with pytest.raises(TypeError, match="complex64"):
        bitwise(np.ones(2, np.complex64), np.ones(2, np.complex64))
    with pytest.raises(ValueError, match="fmt must name an 8-bit format, got 'e3m4'"):
        bitwise(np.zeros(1, np.uint8), np.zeros(1, np.uint8), fmt="e3m4")


# ------------------------------------------------------------------------- within a bound


def test_bound_is_inclusive_and_elementwise() -> None:
    got, expected = torch.tensor([1.0, 2.0, 3.0]), np.array([1.5, 2.0, 3.0])
    assert within(got, expected, [0.5, 0.0, 0.0]).ok
    found = within(got, expected, [0.25, 0.0, 0.0])
    assert (found.compared, found.wrong) == (3, 1)
    assert found.lines == (
        "first wrong element: [0] expected 1.5, got 1.0 (code 0x3f800000, float32)",
        "wrong: 1 of 3 elements",
        "worst error: 0.5, 2 times its bound 0.25, at [0]",
    )


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_non_finite_must_agree_in_kind_and_sign(special: float) -> None:
    for got in (math.nan, math.inf, -math.inf, 1.0):
        same = got == special or (math.isnan(got) and math.isnan(special))
        assert within(np.array([got]), np.array([special]), 1.0).ok is same
        # and an infinite bound there excuses nothing
        assert within(np.array([got]), np.array([special]), math.inf).ok is same
    assert not within(np.array([special]), np.array([1.0]), 1e300).ok


@pytest.mark.parametrize("bound", [math.inf, math.nan, -1.0])
def test_a_bound_that_cannot_fail_or_hold_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="bound must be finite and >= 0"):
        within(np.ones(3), np.ones(3), np.array([1.0, bound, 1.0]))


# ------------------------------------------------------------------------------ as quality


@pytest.fixture
def exact() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((32, 64))


def noisy(exact: np.ndarray, seed: int, size: float) -> np.ndarray:
    return exact + size * np.random.default_rng(seed).standard_normal(exact.shape)


def test_quality_is_two_sided(exact: np.ndarray) -> None:
    oracle = noisy(exact, 1, 0.05)
    assert quality(oracle, oracle, exact, LIMITS).ok
    assert quality(exact + 1.001 * (oracle - exact), oracle, exact, LIMITS).ok
    for factor in (0.99, 1.01):  # 0.087 dB too good, 0.086 dB too bad
        found = quality(exact + factor * (oracle - exact), oracle, exact, LIMITS)
        assert not found.ok
        assert re.search(r"oracle 2\d\.\d{4} dB, got 2\d\.\d{4} dB: [+-]0\.08", found.lines[0])
    assert not quality(exact, oracle, exact, LIMITS).ok  # a switch was ignored


def test_quality_sees_one_row(exact: np.ndarray) -> None:
    oracle = noisy(exact, 1, 0.05)
    got = oracle.copy()
    got[7] = exact[7] + 1.03 * (oracle[7] - exact[7])  # 0.26 dB in one row of 32
    found = quality(got, oracle, exact, LIMITS)
    assert found.wrong == 1
    assert found.lines[0].startswith("first wrong row: [7] oracle")
    assert found.lines[-1] == "wrong: 1 of 32 rows"


def test_quality_widens_by_the_noise_of_a_narrow_accumulator(exact: np.ndarray) -> None:
    oracle = noisy(exact, 1, 0.05)
    cut = replace(LIMITS, accumulation=0.005)  # a tenth of the oracle's noise
    in_step = exact + 1.08 * (oracle - exact)  # 0.67 dB worse in every row
    across = oracle + noisy(np.zeros_like(exact), 2, 0.005)  # 0.04 dB worse overall
    assert not quality(across, oracle, exact, LIMITS).ok
    assert quality(across, oracle, exact, cut).ok
    found = quality(in_step, oracle, exact, cut)
    assert found.lines == (found.lines[0],)  # the rows may be, all of them together may not
    assert found.lines[0].startswith("SQNR overall")
    assert quality(in_step, oracle, exact, replace(cut, aligned=True)).ok
    worse = exact + 1.15 * (oracle - exact)
    assert not quality(worse, oracle, exact, replace(cut, aligned=True)).ok


def test_quality_compares_rows_of_zeros_exactly(exact: np.ndarray) -> None:
    exact[3] = 0
    oracle = noisy(exact, 1, 0.05)
    oracle[3] = 0
    got = exact + 1.0001 * (oracle - exact)
    assert quality(got, oracle, exact, LIMITS).ok
    got[3, 5] = 1e-300
    assert quality(got, oracle, exact, LIMITS).lines[0] == (
        "first wrong element: [3, 5] expected 0.0, got 1e-300"
    )


def test_quality_wants_the_oracles_nan(exact: np.ndarray) -> None:
    oracle = noisy(exact, 1, 0.05)
    got = exact + 1.0001 * (oracle - exact)
    oracle[2, 4] = np.nan
    assert quality(got, oracle, exact, LIMITS).wrong == 1
    got[2, 4] = np.nan
    assert quality(got, oracle, exact, LIMITS).ok
    got[2, 4] = np.inf
    assert not quality(got, oracle, exact, LIMITS).ok


def test_sqnr() -> None:
    exact = np.array([3.0, 4.0])
    assert sqnr(exact, exact) == math.inf
    assert sqnr(np.array([3.5, 4.0]), exact) == pytest.approx(20.0)  # 25 over 0.25
    assert sqnr(np.zeros(2), np.zeros(2)) == math.inf


# ------------------------------------------------------------------------------- the judge


def test_failure_says_everything(judge_of_it: Judge) -> None:
    judge_of_it.example(recipe="rowwise", M=3, seed=7)
    got = torch.tensor([[1.0, 448.0], [2.0, 3.0]]).to(torch.float8_e4m3fn)
    with pytest.raises(LawViolation) as caught:
        judge_of_it.bitwise("P05", "codes", got, np.array([[0x38, 0x7F], [0, 0x44]], np.uint8),
                            fmt="e4m3fn")  # fmt: skip
    assert str(caught.value).splitlines() == [
        'P05 "Exact arithmetic" is broken by it',
        "  check: codes",
        "  case: recipe=rowwise M=3 seed=7 device=cpu",
        (
            "  first wrong element: [0, 1] expected nan (code 0x7f, float8_e4m3fn), "
            "got 448.0 (code 0x7e, float8_e4m3fn)"
        ),
        "  wrong: 2 of 4 elements",
        f"  law: {LAWS['P05'].statement}",
        '  reproduce: python -m pytest "test_x.py::test_y[it]"',
    ]


def test_counts(judge_of_it: Judge, tally: Tally) -> None:
    for size in (2, 3):
        judge_of_it.example(M=size)
        judge_of_it.bitwise("P05", "y", np.ones(size), np.ones(size))
        judge_of_it.bound("P05", "y", np.ones(size), np.ones(size), 0)
        judge_of_it.equal("P08", "shape", (size,), (size,))
    judge_of_it.finish()
    counts = tally.target("it")
    assert (counts.tests, counts.examples, counts.values) == (1, 2, 12)
    exact, gradient = counts.laws["P05"], counts.laws["P08"]
    assert (exact.comparisons, exact.values, exact.examples) == (4, 10, 2)
    assert (gradient.comparisons, gradient.values, gradient.examples) == (2, 2, 2)


def test_a_test_without_examples_is_one(judge_of_it: Judge, tally: Tally) -> None:
    judge_of_it.equal("P05", "n", 1, 1)
    judge_of_it.finish()
    assert tally.target("it").examples == 1


def test_undeclared_and_unknown_laws_are_errors_of_the_test(judge_of_it: Judge) -> None:
    with pytest.raises(LawUsageError, match=r"compares for law P06 without declaring it.*P05, P08"):
        judge_of_it.equal("P06", "n", 1, 1)
    with pytest.raises(LawUsageError, match="law 'P99' is unknown; known: P01, "):
        judge_of_it.equal("P99", "n", 1, 1)
    with pytest.raises(LawUsageError, match="law 'P99' is unknown"):
        Judge(target="it", laws=["P99"])


def test_equal_wants_the_type_too(judge_of_it: Judge) -> None:
    judge_of_it.equal("P05", "dtype", torch.float32, torch.float32)
    with pytest.raises(LawViolation, match=r"expected 1, got True \(a int and a bool\)"):
        judge_of_it.equal("P05", "n", True, 1)
    with pytest.raises(LawViolation, match=r"expected \(1,\), got \(2,\)"):
        judge_of_it.equal("P05", "shape", (2,), (1,))


def test_true(judge_of_it: Judge) -> None:
    assert judge_of_it.true("P05", "flag", condition=True, message="never seen")
    with pytest.raises(LawViolation, match="the hook was lost"):
        judge_of_it.true("P05", "flag", condition=False, message="the hook was lost")


def fail(error: Exception) -> None:
    raise error


def test_raises(judge_of_it: Judge) -> None:
    def refuses(error: Exception) -> bool:
        return judge_of_it.raises(
            "P05", "refused", lambda: fail(error), (TypeError, ValueError), ("Scale", "float32")
        )

    assert refuses(TypeError("scale must be float32"))
    with pytest.raises(
        LawViolation, match="expected a message that mentions 'Scale', got: float32"
    ):
        refuses(ValueError("float32"))
    with pytest.raises(LawViolation, match="expected TypeError or ValueError, got KeyError"):
        refuses(KeyError("scale float32"))
    with pytest.raises(LawViolation, match=r"but it returned a Tensor torch.float32 \(2, 3\)"):
        judge_of_it.raises("P05", "refused", lambda: torch.ones(2, 3), TypeError)
    with pytest.raises(pytest.skip.Exception):  # control flow of pytest passes through
        judge_of_it.raises("P05", "refused", lambda: pytest.skip("no"), TypeError)


def test_attempt(judge_of_it: Judge) -> None:
    assert judge_of_it.attempt("P05", "runs", lambda: 3) == (True, 3)
    assert judge_of_it.compared == 0  # to have run is no comparison of values
    with pytest.raises(LawViolation, match="it raised RuntimeError: boom") as caught:
        judge_of_it.attempt("P05", "runs", lambda: fail(RuntimeError("boom")))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_violation_inside_passes_through(judge_of_it: Judge) -> None:
    with pytest.raises(LawViolation, match="check: inner"):
        judge_of_it.attempt("P05", "outer", lambda: judge_of_it.equal("P05", "inner", 1, 2))
    with pytest.raises(LawViolation, match="check: inner"):
        judge_of_it.raises("P05", "outer", lambda: judge_of_it.equal("P05", "inner", 1, 2),
                           AssertionError)  # fmt: skip


def test_violations_are_counted_by_test(judge_of_it: Judge, tally: Tally) -> None:
    for _ in range(2):  # Hypothesis runs a failing example again and again
        with pytest.raises(LawViolation):
            judge_of_it.equal("P05", "n", 1, 2)
    assert tally.target("it").violated == {"P05": {"test_x.py::test_y[it]"}}


def test_tally_survives_json(judge_of_it: Judge, tally: Tally) -> None:
    judge_of_it.example(M=1)
    judge_of_it.equal("P05", "n", 1, 1)
    judge_of_it.note("accumulator: 24 bits")
    judge_of_it.record("n", 3, "count")
    with pytest.raises(pytest.skip.Exception):
        judge_of_it.require(False, "no e5m2")
    judge_of_it.finish()
    tally.matched["some"] += 2
    tally.examples_run.add("some")
    twice = Tally.from_json(tally.to_json())
    assert twice == tally
    twice.merge(tally)
    counts = twice.target("it")
    assert (counts.tests, counts.examples, counts.values) == (2, 2, 2)
    assert counts.skipped == {"no e5m2": 2}
    assert counts.notes == {"accumulator: 24 bits"}
    assert twice.matched == {"some": 4}
    assert len(twice.measurements) == 2


def test_the_laws() -> None:
    assert list(LAWS) == [f"P{n:02}" for n in range(1, 28)] + ["F-ACC"]
    for law in LAWS.values():
        assert law.statement.endswith(".")
        assert law.bugs
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", bug) for bug in law.bugs)
