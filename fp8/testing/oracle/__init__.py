"""The independent arithmetic that judges a target: numpy and float64, nothing of the library.

Written from the OCP OFP8 and MX specifications and from the published scale rules, so that a
mistake in the library can't be repeated here. Arrays in, arrays out: codes are uint8, scales
float32, results float64. Tensors of float32, bfloat16 or float16 arrive as float32 or float64
arrays that hold exactly their values. Formats are "e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz" and,
for scales, "e8m0fnu". The oracle itself is checked in tests/meta.
"""

from .formats import (
    FORMATS,
    decode,
    encode,
    fmax,
    midpoints,
    nan_codes,
    round_to,
    smallest_subnormal,
    unit_roundoff,
)
from .linear import (
    RECIPES,
    Exact,
    LinearResult,
    OperandSpec,
    ProductSpec,
    Quantized,
    bf16_linear,
    exact_linear,
    linear,
    linear_gradients,
    linear_output,
    product,
)
from .quality import ELEMENT_SQNR, predicted_sqnr, row_sqnr, sqnr
from .scales import Block, dequantize, expand, group_amax, multiplier_and_scale, quantize

__all__ = [
    "ELEMENT_SQNR",
    "FORMATS",
    "RECIPES",
    "Block",
    "Exact",
    "LinearResult",
    "OperandSpec",
    "ProductSpec",
    "Quantized",
    "bf16_linear",
    "decode",
    "dequantize",
    "encode",
    "exact_linear",
    "expand",
    "fmax",
    "group_amax",
    "linear",
    "linear_gradients",
    "linear_output",
    "midpoints",
    "multiplier_and_scale",
    "nan_codes",
    "predicted_sqnr",
    "product",
    "quantize",
    "round_to",
    "row_sqnr",
    "smallest_subnormal",
    "sqnr",
    "unit_roundoff",
]
