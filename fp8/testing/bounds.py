"""How far a correct product may be from the exact one: the bounds of the tight tier, derived.

A product sums K terms a_k * b_k (codes times scales, exact in float64) and rounds the sum once to
the output's dtype. The exact sum is `value`; the sum of |a_k * b_k|, and of |bias|, is `magnitude`.
An accumulator whose every addition and scaling is off by at most a relative eps leaves an error of
at most gamma * magnitude with gamma = (number of roundings on a path) * eps, whatever the order of
the sum (Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 4.2).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fp8.testing import oracle

Array = NDArray[np.float64]

#: significant bits, the implicit one included, and the exponent of the smallest subnormal
_DTYPES = {"float32": (24, -149), "bfloat16": (8, -133), "float16": (11, -24)}


def gamma(model: str, contraction: int) -> float:
    """The error of a sum of `contraction` products, relative to the sum of their magnitudes.

    model: a `fp8.targets.base.AccumulationModel`. Raises ValueError for another one.
    """
    if model == "float64":
        # K products and additions, two scales, the bias, the reading of the scale: K + 4.
        return (contraction + 4) * 2.0**-53
    if model == "float32":
        return (contraction + 4) * 2.0**-24
    if model == "cpu_scaled_mm":
        # torch's CPU kernel multiplies each scale into its operand first, two roundings more, and
        # those products then round where codes alone would not: one more.
        return (contraction + 7) * 2.0**-24
    if model == "hopper_fast":
        return _HOPPER_MIXED_SIGNS + 8 * 2.0**-24
    if model == "hopper_precise":
        # The same within a stretch of 128 values, whose sums are then added in float32.
        return _HOPPER_MIXED_SIGNS + (contraction // 128 + 8) * 2.0**-24
    raise ValueError(f"model: got {model!r}, needs one of fp8.targets.base.AccumulationModel")


#: Hopper's float8 tensor core aligns the products of a step and the running sum to the largest of
#: them and cuts what lies 13 bits under it (measured on H200: ones added to a sum of 2^13 count,
#: added to 2^14 they vanish). With mixed signs the running sum stays far below the magnitude:
#: measured 2^-11.5 of it for any K. It aligns by the exponent field, and a subnormal code has that
#: of the smallest normal, so that its product cuts up to 2^3 (e4m3fn) or 2^2 (e5m2) coarser, 2^5
#: where both are (measured: 2^-9.2 for one product of 4 from an e4m3fn code of 2^-9, to which
#: 0.0692 was added and 0.0625 arrived; 2^-8.2 with rows that are mostly subnormal).
_HOPPER_MIXED_SIGNS = 2.0**-6.5


def same_sign_gamma(model: str, contraction: int) -> float:
    """`gamma` for products of one sign, the worst case of a narrow accumulator.

    In fast mode each product is cut at the granule of a sum that only grows: measured on H200, a
    loss of 1.2 % at K = 1024, 6.9 % at 4096, 15 % at 16384. K * 2^-15 is twice the first two.
    """
    if model == "hopper_fast":
        return max(gamma(model, contraction), contraction * 2.0**-15)
    return gamma(model, contraction)


#: Noise of Hopper's accumulator relative to a row's norm, as an amplitude, where no product
#: dominates the row: measured on H200 57.6 dB below the signal at K = 4096, less for smaller K.
NARROW_EVEN_NOISE = 10 ** (-57.6 / 20)
#: The same where one product dominates: the others are cut at 2^-14 of it, K = 128 of them, all one
#: way, by 2^-7, and coarser beside subnormal codes (measured on a captured layer: 2^-6.7).
NARROW_NOISE = 2.0**-6


def half_ulp(value: Array, dtype: str) -> Array:
    """Half the distance of two neighbouring numbers of `dtype` at |value|."""
    digits, smallest = _DTYPES[dtype]
    _, exponent = np.frexp(np.abs(value))
    return np.asarray(np.ldexp(0.5, np.maximum(exponent - digits, smallest)))


def product_bound(
    value: Array, magnitude: Array, contraction: int, dtype: str, model: str
) -> Array:
    """The largest error of a correct product, elementwise.

    value, magnitude: float64 of the output's shape. Half an ulp of the output, taken where the
    accumulated sum may at most lie, plus what the accumulation may lose.
    """
    accumulated = gamma(model, contraction) * magnitude
    return half_ulp(np.abs(value) + accumulated, dtype) + accumulated


def expected(value: Array, dtype: str) -> Array:
    """What the bound is around: `value`, or the infinity that its rounding to `dtype` is."""
    rounded = oracle.round_to(value, dtype)
    return np.where(np.isfinite(rounded), value, rounded)
