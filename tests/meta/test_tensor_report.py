"""The table of captured operands: its figures, its verdicts, and its look."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from fp8.testing import oracle, tensor_report, tensor_table
from fp8.testing.tensor_report import CastLoss, LayerReport, ProductReport

RECIPES = tuple(oracle.RECIPES)


def gaussian(M=128, K=256, N=192, seed=0):
    """x, w, g of an ordinary layer, in bfloat16."""
    rng = np.random.default_rng(seed)
    shapes = ((M, K), (N, K), (M, N))
    return tuple(oracle.round_to(rng.standard_normal(shape), "bfloat16") for shape in shapes)


def report(x, w, g, recipe, change=None, layer="layer") -> LayerReport:
    """The report of one that does what the oracle does, and then `change`s the results."""
    quantised = oracle.linear(x, w, None, g, recipe, dtype="bfloat16")
    got = {n: getattr(quantised, n).rounded("bfloat16") for n in tensor_report.PRODUCTS}
    if change is not None:
        change(got)
    exact = oracle.exact_linear(x, w, None, g)
    return tensor_report.measure(layer, recipe, (x, w, g), got, quantised, exact)


def product(**changes) -> ProductReport:
    """A product that fits."""
    fields = {
        "sqnr": 28.5,
        "predicted": 28.5,
        "worst_row": 27.0,
        "worst_row_index": 3,
        "cast": CastLoss(),
        "unscaled_cast": CastLoss(),
    }
    return ProductReport(**fields | changes)


def row(layer="layer", recipe="rowwise", **products) -> LayerReport:
    everything = {name: product() for name in tensor_report.PRODUCTS} | products
    return LayerReport(layer, recipe, 128, 256, 192, everything)


# --- figures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_gaussian_operands_fit_and_lose_nothing(recipe):
    found = report(*gaussian(), recipe)
    assert str(found.verdict) == "fits"
    for name, p in found.products.items():
        assert p.cast.flushed < 1e-4, name
        assert p.cast.saturated == 0, name
        if p.predicted is None:
            # One rounding to bfloat16 is left.
            assert p.sqnr == pytest.approx(55.6, abs=0.5)
        else:
            # The spread of an SQNR over seeds is 10.5 / sqrt(M N) < 0.1 dB; the amax, which is
            # exact, is worth more where a scale is shared by few.
            assert p.lost == pytest.approx(0, abs=0.5)


def test_predictions_follow_the_recipe():
    def predicted(recipe):
        return [
            None if p.predicted is None else round(p.predicted, 1)
            for p in report(*gaussian(32, 48, 40), recipe).products.values()
        ]

    assert predicted("tensorwise") == [28.5, 24.5, 24.5]
    assert predicted("rowwise_with_gw_hp") == [28.5, 28.5, None]


def test_worst_row_is_found():
    def change(got):
        got["dx"][17] *= 1.1

    found = report(*gaussian(), "rowwise", change)
    p = found.products["dx"]
    assert p.worst_row_index == 17
    assert p.worst_row == pytest.approx(-20 * math.log10(0.1), abs=0.5)
    assert found.worst_row == (p.worst_row, "dx")


def test_a_row_of_zeros_is_no_worst_row():
    x, w, g = gaussian()
    g[5] = 0
    assert report(x, w, g, "rowwise").products["dx"].worst_row_index != 5


def test_flushed_values_are_counted_in_the_worse_operand():
    x, w, g = gaussian()
    amax = np.abs(x).max()
    # 2^-10 of 448 is what rounds to zero; one row so small that all of it does.
    x[7] = amax / 448 * 2.0**-10.5
    x[:, 0] = 0  # zeros are not flushed
    found = report(x, w, g, "tensorwise")
    assert found.products["y"].cast.flushed == pytest.approx(255 / (128 * 256), abs=2e-4)
    assert report(x, w, g, "rowwise").products["y"].cast.flushed < 1e-3


def test_saturation_is_beyond_what_rounds_to_the_largest_code():
    one = np.ones((1, 1), np.float32)

    def loss(values, fmt):
        codes = oracle.encode(np.array(values, np.float32), fmt)
        return tensor_report.cast_loss(
            np.array(values), oracle.Quantized(codes, one, fmt, (None, None))
        )

    assert loss([[448.0, 463.9, 1.0, 0.0]], "e4m3fn").saturated == 0
    assert loss([[448.0, 465.0, -1e4, 0.0]], "e4m3fn").saturated == 0.5
    assert loss([[61439.0, 61441.0]], "e5m2").saturated == 0.5


def test_what_a_cast_without_scales_would_lose():
    values = np.array([[1e-4, 1.0, 0.0, -1e5]])
    assert tensor_report.unscaled_loss(values, "e4m3fn") == CastLoss(0.25, 0.25)
    assert tensor_report.unscaled_loss(values, "e5m2") == CastLoss(0.0, 0.25)
    x, w, g = gaussian()
    found = report(x, w, g * 2.0**-30, "rowwise").products
    assert found["dx"].cast.flushed < 1e-4
    assert found["dx"].unscaled_cast.flushed == 1.0


# --- verdicts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"dx": product(sqnr=27.5)}, "fits"),
        ({"dx": product(sqnr=27.4)}, "look: dX lost 1.1 dB"),
        ({"dx": product(sqnr=25.4)}, "lossy: dX lost 3.1 dB"),
        ({"dx": product(sqnr=math.nan)}, "lossy: dX lost nan dB"),
        ({"dw": product(worst_row=10.0)}, "fits"),
        ({"dw": product(worst_row=9.9)}, "look: dW row 9.9 dB"),
        ({"dw": product(worst_row=2.9)}, "lossy: dW row 2.9 dB"),
        ({"dw": product(worst_row=-math.inf)}, "lossy: dW row -inf dB"),
        ({"y": product(cast=CastLoss(0.01, 0.0))}, "fits"),
        ({"y": product(cast=CastLoss(0.9, 0.0))}, "look: y flushed 90.0%"),
        ({"y": product(cast=CastLoss(0.0, 0.001))}, "lossy: y saturated 0.10%"),
        ({"dw": product(sqnr=55.4, predicted=None)}, "fits"),
        (
            {"y": product(sqnr=27.0), "dx": product(worst_row=1.0, sqnr=20.0)},
            "lossy: dX lost 8.5 dB, dX row 1.0 dB",
        ),
    ],
)
def test_limits(changes, verdict):
    assert str(row(**changes).verdict) == verdict


def test_limits_are_what_their_comments_say():
    """The numbers from which the limits are derived, computed."""

    def rounding(mantissa):
        """dB of one operand whose mantissas are `mantissa`, rounded to steps of an eighth."""
        return 10 * math.log10(mantissa**2 / (0.125**2 / 12))

    gaussian_operand = oracle.ELEMENT_SQNR["e4m3fn"]
    assert gaussian_operand - rounding(1.0) == pytest.approx(2.6, abs=0.1)
    assert gaussian_operand - rounding(1.0) < tensor_report.LOST_LOSSY_DB
    assert pytest.approx(1.26, abs=0.01) == 10 ** (tensor_report.LOST_FITS_DB / 10)
    for limit, error, degrees in (
        (tensor_report.ROW_FITS_DB, 0.32, 18),
        (tensor_report.ROW_LOSSY_DB, 0.71, 35),
    ):
        assert 10 ** (-limit / 20) == pytest.approx(error, abs=0.005)
        assert math.degrees(math.atan(10 ** (-limit / 20))) == pytest.approx(degrees, abs=0.6)
    # |x| < 4.5 sigma * 2^-10 / 448, where the density of a Gaussian is 1 / sqrt(2 pi) / sigma
    flushed = 2 * 4.5 * 2**-10 / 448 / math.sqrt(2 * math.pi)
    assert flushed < 1e-5 <= tensor_report.FLUSHED_FITS / 1000


BAD = product(worst_row=1.0)


@pytest.mark.parametrize(
    ("tensorwise", "rowwise", "answer"),
    [
        (
            (product(), product()),
            (product(), product()),
            "not needed, every layer is within the limits without",
        ),
        ((BAD, product()), (product(), product()), "worth it, 1 of 2 layers better and none worse"),
        ((BAD, product()), (product(), BAD), "mixed, 1 of 2 layers better and 1 worse"),
        (
            (product(), product()),
            (product(), BAD),
            "not worth it, 1 of 2 layers worse and none better",
        ),
        ((BAD, product()), (BAD, product()), "no layer's verdict changes"),
    ],
)
def test_is_it_worth_it(tensorwise, rowwise, answer):
    rows = [
        row(layer, recipe, y=y)
        for recipe, ys in (("tensorwise", tensorwise), ("rowwise", rowwise))
        for layer, y in zip("ab", ys, strict=True)
    ]
    line = tensor_report.compare(rows, "rowwise")
    assert line is not None
    assert line.startswith(f"rowwise against tensorwise: {answer} (y +0.0, dX +0.0, dW +0.0 dB;")


def test_what_is_only_flushed_makes_no_recipe_worse():
    flushed = product(sqnr=29.0, cast=CastLoss(0.02, 0.0))
    rows = [row("a", "tensorwise"), row("a", "rowwise", dx=flushed)]
    assert str(rows[1].verdict) == "look: dX flushed 2.0%"
    line = tensor_report.compare(rows, "rowwise")
    assert line is not None
    assert "not needed" in line


def test_gains_are_means_over_layers():
    rows = [
        row("a", "tensorwise", dx=product(sqnr=24.0), dw=product(worst_row=5.0)),
        row("a", "rowwise", dx=product(sqnr=28.0)),
        row("b", "tensorwise", dx=product(sqnr=24.0)),
        row("b", "rowwise", dx=product(sqnr=25.0), y=product(worst_row=12.0)),
        row("c", "rowwise", dx=product(sqnr=0.0)),  # not in both: not compared
    ]
    assert tensor_report.compare(rows, "rowwise") == (
        "rowwise against tensorwise: worth it, 1 of 2 layers better and none worse "
        "(y +0.0, dX +2.5, dW +0.0 dB; worst row 5.0 -> 12.0 dB)"
    )


def test_nothing_to_compare_with():
    assert tensor_report.compare([row()], "rowwise") is None
    assert tensor_report.compare([row(recipe="tensorwise")], "tensorwise") is None


# --- look ---------------------------------------------------------------------------------------

# ruff: noqa: E501 - a table is as wide as it is
GOLDEN = """\
model.0[up]  128 tokens, 256 -> 192
recipe                y dB   dX dB   dW dB   lost dB     worst row dB   flushed   saturated   verdict
────────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
tensorwise            28.5    20.0    28.5   +8.5 dX         1.0 y[3]    90.00%       0.00%   lossy: y row 1.0 dB, dX
                                                                                              lost 8.5 dB
rowwise_with_gw_hp    28.5    28.5    55.4    +0.0 y       27.0 dW[3]     0.00%       0.00%   fits

rowwise_with_gw_hp against tensorwise: worth it, 1 of 1 layers better and none worse (y +0.0, dX +8.5, dW +26.9 dB; \
worst row 1.0 -> 27.0 dB)
without scales, casts would flush up to 97.9% of an operand (dX of model.0[up], tensorwise) and saturate up to 12.50%"""


def two_rows():
    return [
        row(
            "model.0[up]",
            "tensorwise",
            y=product(worst_row=1.0, cast=CastLoss(0.9, 0.0)),
            dx=product(sqnr=20.0, unscaled_cast=CastLoss(0.979, 0.0)),
            dw=product(unscaled_cast=CastLoss(0.0, 0.125)),
        ),
        row("model.0[up]", "rowwise_with_gw_hp", dw=product(sqnr=55.4, predicted=None)),
    ]


def test_table():
    assert tensor_table.as_text(two_rows()) == GOLDEN


def test_no_rows():
    assert tensor_table.as_text([]) == ""


def test_json_round_trip():
    rows = [*two_rows(), row(y=product(worst_row=math.inf, sqnr=math.nan))]
    plain = json.loads(json.dumps(tensor_table.as_json(rows), allow_nan=False))
    first, second, third = plain
    assert first["verdict"] == "lossy"
    assert first["reasons"] == ["y row 1.0 dB", "dX lost 8.5 dB"]
    assert (first["tokens"], first["in_features"], first["out_features"]) == (128, 256, 192)
    assert first["products"]["dx"] == {
        "sqnr": 20.0,
        "predicted": 28.5,
        "worst_row": 27.0,
        "worst_row_index": 3,
        "cast": {"flushed": 0.0, "saturated": 0.0},
        "unscaled_cast": {"flushed": 0.979, "saturated": 0.0},
        "lost": 8.5,
    }
    assert second["products"]["dw"]["lost"] is None
    assert (third["products"]["y"]["worst_row"], third["products"]["y"]["sqnr"]) == ("inf", "nan")
