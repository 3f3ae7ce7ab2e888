"""The library's descriptions of the formats say what the codes say."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch

from fp8 import formats
from fp8.formats import FORMATS, Overflow
from fp8.testing import oracle

CODES = np.arange(256, dtype=np.uint8)

every_format = pytest.mark.parametrize("name", oracle.FORMATS)


def values(name: str) -> np.ndarray:
    return oracle.decode(CODES, name)


def test_the_formats_are_these():
    assert tuple(FORMATS) == oracle.FORMATS
    assert all(FORMATS[name].name == name for name in FORMATS)


@every_format
def test_range(name):
    described, decoded = FORMATS[name], values(name)
    positive = decoded[np.isfinite(decoded) & (decoded > 0)]
    assert described.max == positive.max() == oracle.fmax(name)
    assert described.smallest_subnormal == positive.min()
    # The smallest with a whole binade above it: the mantissa's steps begin to double there.
    steps = 2**described.mantissa_bits
    assert described.smallest_normal == positive[0 if name == "e8m0fnu" else steps - 1]


@every_format
def test_every_code_from_the_fields(name):
    """Sign, exponent and mantissa as the class's docstring has it, for each finite code."""
    f = FORMATS[name]
    assert f.exponent_bits + f.mantissa_bits + f.signed == 8
    sign = np.where(f.signed & (CODES >> 7), -1.0, 1.0)
    exponent = (CODES >> f.mantissa_bits).astype(int) & (2**f.exponent_bits - 1)
    fraction = (CODES & (2**f.mantissa_bits - 1)) / 2.0**f.mantissa_bits
    normal = np.ldexp(1 + fraction, exponent - f.bias)
    subnormal = np.ldexp(fraction, 1 - f.bias)
    has_subnormals = f.smallest_subnormal != f.smallest_normal
    built = sign * np.where((exponent == 0) & has_subnormals, subnormal, normal)
    decoded = values(name)
    finite = np.isfinite(decoded)
    assert built[finite].tolist() == decoded[finite].tolist()
    assert np.signbit(built[finite]).tolist() == np.signbit(decoded[finite]).tolist()


@every_format
def test_what_is_no_number(name):
    described, decoded = FORMATS[name], values(name)
    assert described.nan_codes == tuple(np.flatnonzero(np.isnan(decoded)))
    assert described.has_infinity == bool(np.isinf(decoded).any())
    assert described.signed == bool((decoded < 0).any())
    zeros = decoded[decoded == 0]
    assert described.has_negative_zero == bool(np.signbit(zeros).any())


def test_overflow_of_the_specification():
    """OFP8 section 5.2 saturates by default; fnuz hardware and e8m0fnu give NaN."""
    assert {name: f.overflow for name, f in FORMATS.items()} == {
        "e4m3fn": Overflow.SATURATE,
        "e5m2": Overflow.SATURATE,
        "e4m3fnuz": Overflow.NAN,
        "e5m2fnuz": Overflow.NAN,
        "e8m0fnu": Overflow.NAN,
    }
    assert all(f.overflow != Overflow.INF or f.has_infinity for f in FORMATS.values())


@every_format
def test_dtype(name):
    described = FORMATS[name]
    assert described.dtype == getattr(torch, f"float8_{name}")
    assert formats.from_dtype(described.dtype) is described
    info = torch.finfo(described.dtype)
    assert (info.max, info.smallest_normal, info.bits) == (
        described.max,
        described.smallest_normal,
        8,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_other_dtypes_are_no_format(dtype):
    with pytest.raises(TypeError, match=rf"dtype: got {dtype}.*e4m3fn"):
        formats.from_dtype(dtype)


def test_descriptions_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        formats.E4M3FN.max = 240.0
    with pytest.raises(TypeError, match="does not support item assignment"):
        FORMATS["e4m3fn"] = formats.E5M2
    assert len({hash(f) for f in FORMATS.values()}) == len(FORMATS)


def test_every_format_says_where_it_is_defined():
    assert all(f.clause for f in FORMATS.values())


def test_descriptions_need_no_torch():
    code = "import sys, fp8.formats; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
