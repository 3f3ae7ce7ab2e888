"""What a float8 number is: each 8-bit format as a frozen description, and nothing of tensors.

Sources: "OCP 8-bit Floating Point Specification (OFP8)" rev. 1.0 for e4m3fn and e5m2, "OCP
Microscaling Formats (MX)" rev. 1.0 for e8m0fnu, and the "fnuz" variants as LLVM's APFloat and
AMD's MI300 define them (finite, no negative zero, the code of -0 is the only NaN).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


class Overflow(StrEnum):
    """What a value too large for the format becomes. Infinities follow the same rule."""

    #: the largest finite value, with the sign kept
    SATURATE = "saturate"
    #: NaN
    NAN = "nan"
    #: infinity, with the sign kept; only for formats that have one
    INF = "inf"


@dataclass(frozen=True, kw_only=True)
class Format:
    """An 8-bit element encoding.

    A finite normal code with sign s, exponent field e and mantissa field m is
    (-1)^s * 2^(e - bias) * (1 + m / 2^mantissa_bits); with e = 0 it is subnormal,
    (-1)^s * 2^(1 - bias) * m / 2^mantissa_bits (e8m0fnu has no subnormals, no mantissa, no sign).
    """

    #: the field's name for it: torch's dtype is `torch.float8_<name>`
    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    #: largest finite value
    max: float
    smallest_normal: float
    #: equals smallest_normal where the format has no subnormals
    smallest_subnormal: float
    signed: bool
    has_infinity: bool
    has_negative_zero: bool
    #: every code that means NaN
    nan_codes: tuple[int, ...]
    #: what the specification does with overflow in its default conversion
    overflow: Overflow
    #: where the encoding is defined
    clause: str
    #: `max` as text, for code that is compiled: see `fp8.scaling.constant`
    max_text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_text", repr(self.max))

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype that stores this format."""
        import torch

        dtype: torch.dtype = getattr(torch, f"float8_{self.name}")
        return dtype


E4M3FN = Format(
    name="e4m3fn",
    exponent_bits=4,
    mantissa_bits=3,
    bias=7,
    max=448.0,
    smallest_normal=2.0**-6,
    smallest_subnormal=2.0**-9,
    signed=True,
    has_infinity=False,
    has_negative_zero=True,
    nan_codes=(0x7F, 0xFF),
    overflow=Overflow.SATURATE,
    clause="OFP8 1.0, section 5.1, table 1 (E4M3) and 5.2 (saturating conversion)",
)

E5M2 = Format(
    name="e5m2",
    exponent_bits=5,
    mantissa_bits=2,
    bias=15,
    max=57344.0,
    smallest_normal=2.0**-14,
    smallest_subnormal=2.0**-16,
    signed=True,
    has_infinity=True,
    has_negative_zero=True,
    nan_codes=(0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF),
    overflow=Overflow.SATURATE,
    clause="OFP8 1.0, section 5.1, table 1 (E5M2) and 5.2 (saturating conversion)",
)

E4M3FNUZ = Format(
    name="e4m3fnuz",
    exponent_bits=4,
    mantissa_bits=3,
    bias=8,
    max=240.0,
    smallest_normal=2.0**-7,
    smallest_subnormal=2.0**-10,
    signed=True,
    has_infinity=False,
    has_negative_zero=False,
    nan_codes=(0x80,),
    overflow=Overflow.NAN,
    clause="LLVM APFloat semFloat8E4M3FNUZ",
)

E5M2FNUZ = Format(
    name="e5m2fnuz",
    exponent_bits=5,
    mantissa_bits=2,
    bias=16,
    max=57344.0,
    smallest_normal=2.0**-15,
    smallest_subnormal=2.0**-17,
    signed=True,
    has_infinity=False,
    has_negative_zero=False,
    nan_codes=(0x80,),
    overflow=Overflow.NAN,
    clause="LLVM APFloat semFloat8E5M2FNUZ",
)

E8M0FNU = Format(
    name="e8m0fnu",
    exponent_bits=8,
    mantissa_bits=0,
    bias=127,
    max=2.0**127,
    smallest_normal=2.0**-127,
    smallest_subnormal=2.0**-127,
    signed=False,
    has_infinity=False,
    has_negative_zero=False,
    nan_codes=(0xFF,),
    overflow=Overflow.NAN,
    clause="OCP MX 1.0, section 5.4.1 (E8M0 scale)",
)

#: every format, by name
FORMATS: Mapping[str, Format] = MappingProxyType(
    {f.name: f for f in (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ, E8M0FNU)}
)


def from_dtype(dtype: torch.dtype) -> Format:
    """The format that `dtype` stores. Raises TypeError for a dtype that is not float8."""
    name = str(dtype).removeprefix("torch.float8_")
    if name not in FORMATS:
        raise TypeError(f"dtype: got {dtype}, needs a float8 dtype: {', '.join(FORMATS)}")
    return FORMATS[name]
