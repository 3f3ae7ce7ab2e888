"""The library's granularities and scale rules: their constants, written out once more.

That their arithmetic is right is judged in tests/numerics/test_scaling.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from fp8 import scaling
from fp8.formats import E4M3FN, E5M2
from fp8.quantize import Operand
from fp8.scaling import GRANULARITIES, SCALE_RULES, ScaleRule

BLOCKS = {
    "tensorwise": (None, None),
    "rowwise": (1, None),
    "columnwise": (None, 1),
    "1x128": (1, 128),
    "128x1": (128, 1),
    "128x128": (128, 128),
}
#: name -> division, floor of the amax, degenerate amaxes give 1, power of two, what is rounded
RULES = {
    "torchao": ("float64", 1e-12, False, False, "multiplier"),
    "torchao_pow2": ("float64", 1e-12, False, True, "multiplier"),
    "transformer_engine": ("float32", 0.0, True, False, "multiplier"),
    "transformer_engine_pow2": ("float32", 0.0, True, True, "multiplier"),
    "deepgemm": ("float32", 1e-4, False, False, "scale"),
}


def test_granularities():
    assert {name: g.block for name, g in GRANULARITIES.items()} == BLOCKS
    assert all(g.name == name for name, g in GRANULARITIES.items())


def test_rules():
    fields = {
        name: (r.division, r.amax_floor, r.degenerate_to_one, r.power_of_two, r.quotient)
        for name, r in SCALE_RULES.items()
    }
    assert fields == RULES
    assert all(r.name == name for name, r in SCALE_RULES.items())


@pytest.mark.parametrize(
    ("name", "rows", "columns", "shape"),
    [
        ("tensorwise", 5, 300, (1, 1)),
        ("tensorwise", 0, 0, (1, 1)),
        ("rowwise", 5, 300, (5, 1)),
        ("columnwise", 5, 300, (1, 300)),
        ("1x128", 5, 300, (5, 3)),
        ("1x128", 5, 256, (5, 2)),
        ("1x128", 0, 1, (0, 1)),
        ("128x1", 129, 7, (2, 7)),
        ("128x128", 128, 129, (1, 2)),
        ("128x128", 1, 127, (1, 1)),
        ("128x128", 0, 300, (0, 3)),
    ],
)
def test_shape_of_the_scales(name, rows, columns, shape):
    assert GRANULARITIES[name].scale_shape(rows, columns) == shape
    assert GRANULARITIES[name].transposed.scale_shape(columns, rows) == shape[::-1]


def test_transposing_a_granularity():
    turned = {name: g.transposed.name for name, g in GRANULARITIES.items()}
    assert turned == {
        "tensorwise": "tensorwise",
        "rowwise": "columnwise",
        "columnwise": "rowwise",
        "1x128": "128x1",
        "128x1": "1x128",
        "128x128": "128x128",
    }
    assert all(g.transposed.transposed is g for g in GRANULARITIES.values())


def test_operands():
    operand = Operand(E5M2, scaling.BLOCK_1X128, scaling.DEEPGEMM)
    assert str(operand) == "e5m2/1x128/deepgemm"
    assert operand.transposed == Operand(E5M2, scaling.BLOCK_128X1, scaling.DEEPGEMM)
    assert operand.transposed.transposed == operand
    assert hash(operand) != hash(operand.transposed)


@pytest.mark.parametrize("described", [scaling.ROWWISE, scaling.TORCHAO])
def test_descriptions_cannot_change(described):
    with pytest.raises(dataclasses.FrozenInstanceError):
        described.name = "mine"


def test_a_scale_cannot_be_rounded_to_a_power_of_two_downwards():
    """The quotient rounded down is the scale there, so that codes could overflow."""
    with pytest.raises(ValueError, match="power_of_two: got True, needs quotient='multiplier'"):
        ScaleRule(
            name="mine",
            division="float32",
            amax_floor=0.0,
            degenerate_to_one=False,
            power_of_two=True,
            quotient="scale",
        )


@pytest.mark.parametrize(
    ("rule", "amax", "multiplier"),
    [
        ("torchao", 448.0, 1.0),
        ("torchao", 1.0, 448.0),
        ("torchao", 0.0, 4.48e14),
        ("torchao", 1e-13, 4.48e14),
        ("torchao", np.inf, 0.0),
        ("torchao_pow2", 1.0, 256.0),
        ("torchao_pow2", 0.0, 2.0**48),
        ("transformer_engine", 0.0, 1.0),
        ("transformer_engine", np.inf, 1.0),
        ("transformer_engine", np.nan, 1.0),
        ("transformer_engine", 1e-45, float(np.finfo(np.float32).max)),
        ("transformer_engine_pow2", 1e-45, 2.0**127),
        ("transformer_engine_pow2", 3.0, 128.0),
        ("deepgemm", 0.0, 4.48e6),
        ("deepgemm", 448.0, 1.0),
    ],
)
def test_multipliers_by_hand(rule, amax, multiplier):
    got, scale = scaling.multiplier_and_scale(torch.tensor([amax]), E4M3FN, SCALE_RULES[rule])
    assert got.dtype == scale.dtype == torch.float32
    assert got.item() == pytest.approx(multiplier, rel=2.0**-22, abs=0)
    assert scale.item() == pytest.approx(
        1 / got.double().item() if multiplier else np.inf, rel=1e-7
    )


@pytest.mark.parametrize("x", [0.0, np.inf, np.nan, 1.0, 2.0**-126, 1.9999999, 2.0**127 * 1.5])
def test_rounding_down_to_a_power_of_two(x):
    got = scaling.round_down_to_power_of_two(torch.tensor([x])).item()
    special = x == 0 or not np.isfinite(x)
    want = x if special else 2.0 ** (np.frexp(x)[1] - 1)
    assert got == want or (np.isnan(got) and np.isnan(want))


@pytest.mark.parametrize("name", GRANULARITIES)
def test_spreading_scales(name):
    """Every value meets its own group's factor, ragged edges included."""
    granularity = GRANULARITIES[name]
    rows, columns = 130, 259
    shape = granularity.scale_shape(rows, columns)
    scale = torch.arange(1.0, 1 + shape[0] * shape[1]).view(shape)
    spread = scaling.expand(scale, granularity, rows, columns).expand(rows, columns)
    height, width = (
        n if b is None else b for b, n in zip(BLOCKS[name], (rows, columns), strict=True)
    )
    for i, j in ((0, 0), (0, 258), (127, 128), (128, 127), (129, 256), (64, 1)):
        assert spread[i, j] == scale[i // height, j // width]
