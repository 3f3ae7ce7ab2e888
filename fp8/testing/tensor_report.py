"""What float8 costs on a model's own tensors, and whether that is little: the figures, judged.

Random numbers are not what people train on. For each captured layer and recipe: the SQNR of y, dX
and dW against float64 on the unquantised operands, how that compares with the recipe's prediction
for Gaussian operands, the worst row, and what the casts flushed or saturated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fp8.testing import oracle
from fp8.testing.linear_runs import PRODUCTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Array = NDArray[np.float64]

#: what they are called in a table
SHOWN = {"y": "y", "dx": "dX", "dw": "dW"}
#: the verdicts, by rank
_WORDS = ("fits", "look", "lossy")

#: The prediction averages over where in its binade a value lies. Rounding x = m * 2^e (1 <= m < 2)
#: to steps of s * 2^e leaves s^2 / 12 of m^2: a Gaussian operand is 2.6 dB above the worst, all m
#: just over 1. A tensor is no Gaussian, so some of that is luck; 1 dB is 26 % more noise power and
#: a sixth of a mantissa bit (6.02 dB).
LOST_FITS_DB = 1.0
#: Beyond 2.6 dB rounding alone cannot have done it: values became subnormal or zero, or the sum
#: cancels. 3 dB is twice the noise that was predicted.
LOST_LOSSY_DB = 3.0
#: A row (a token of y and dX, an output feature of dW) with the rest of its tensor fine: at 10 dB
#: the error is 0.32 of the row's norm, and turns it by 18 degrees.
ROW_FITS_DB = 10.0
#: At 3 dB the error has half of the row's power, and turns it by 35 degrees.
ROW_LOSSY_DB = 3.0
#: Under one scale, e4m3 flushes what lies below amax * 2^-10 / 448: of a Gaussian tensor, whose
#: amax is some 4.5 sigma, less than 0.001 %. A thousand times that is a tensor that spans more than
#: the 18 binades of the format. It costs little SQNR by itself (what is flushed is small), so it
#: asks for a look and no more.
FLUSHED_FITS = 0.01
#: A scale that is made from the amax leaves nothing above the largest code.
SATURATED_FITS = 0.0


@dataclass(frozen=True)
class CastLoss:
    """Shares of an operand's values; of a product's two operands, the larger shares."""

    #: not zero, and the code is
    flushed: float = 0.0
    #: beyond the last value that rounds to the largest code
    saturated: float = 0.0


@dataclass(frozen=True)
class ProductReport:
    """One product of one layer under one recipe."""

    #: dB, all elements against float64 on the unquantised operands
    sqnr: float
    #: dB, what Gaussian operands would have; None for a product in high precision
    predicted: float | None
    #: dB, the lowest row, and which it is
    worst_row: float
    worst_row_index: int
    cast: CastLoss
    #: what a cast to the same formats without scales would lose
    unscaled_cast: CastLoss

    @property
    def lost(self) -> float | None:
        """dB below the prediction (negative: above it); None without a prediction."""
        return None if self.predicted is None else self.predicted - self.sqnr


@dataclass(frozen=True)
class Verdict:
    """One of three words, "fits", "look" or "lossy", and which limits say so."""

    word: str
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.word + (f": {', '.join(self.reasons)}" if self.reasons else "")


@dataclass(frozen=True)
class LayerReport:
    """One layer under one recipe: a row of the table."""

    layer: str
    recipe: str
    tokens: int
    in_features: int
    out_features: int
    #: "y", "dx", "dw"
    products: Mapping[str, ProductReport] = field(repr=False)

    @property
    def verdict(self) -> Verdict:
        """Whether the recipe is good enough here, by the limits above; the worst limit decides."""
        found = [
            finding
            for name, product in self.products.items()
            for finding in (*_costs(name, product), *_hints(name, product))
        ]
        worst = max((rank for rank, _ in found), default=0)
        return Verdict(_WORDS[worst], tuple(text for rank, text in found if rank == worst))

    @property
    def cost(self) -> int:
        """The rank of the verdict without what was flushed, which by itself costs nothing."""
        costs = (rank for name, p in self.products.items() for rank, _ in _costs(name, p))
        return max(costs, default=0)

    @property
    def lost(self) -> tuple[float, str]:
        """The most dB lost, and in which result."""
        lost = ((p.lost, name) for name, p in self.products.items())
        return max((dB, name) for dB, name in lost if dB is not None)

    @property
    def worst_row(self) -> tuple[float, str]:
        """The lowest row, dB, and of which result."""
        return min((p.worst_row, name) for name, p in self.products.items())


def measure(
    layer: str,
    recipe: str,
    operands: tuple[Array, Array, Array],
    got: Mapping[str, Array],
    quantised: oracle.LinearResult,
    exact: oracle.LinearResult,
) -> LayerReport:
    """Measure what a target gave for one layer under one recipe.

    operands: x (M, K), w (N, K), g (M, N), as float64. got: what the target gave, "y" (M, N),
    "dx" (M, K), "dw" (N, K). quantised: `oracle.linear` of the operands under the recipe, whose
    codes stand for the target's (the laws say that they are). exact: `oracle.exact_linear`.
    """
    x, w, g = operands
    laid_out = {"y": (x, w), "dx": (g, w.T), "dw": (g.T, x.T)}
    products = {}
    for name, product in PRODUCTS.items():
        casts = [
            (values, used)
            for values, used in zip(laid_out[name], quantised.operands[product], strict=True)
            if used is not None
        ]
        ideal = getattr(exact, name).value
        by_row = oracle.row_sqnr(got[name], ideal)
        a, b, _ = oracle.RECIPES[recipe][product]
        products[name] = ProductReport(
            sqnr=oracle.sqnr(got[name], ideal),
            predicted=None if a is None or b is None else oracle.predicted_sqnr(a[0], b[0]),
            worst_row=float(by_row.min()),
            worst_row_index=int(by_row.argmin()),
            cast=_worse(cast_loss(values, used) for values, used in casts),
            unscaled_cast=_worse(unscaled_loss(values, used.fmt) for values, used in casts),
        )
    return LayerReport(layer, recipe, x.shape[0], x.shape[1], w.shape[0], products)


def _worse(losses: Iterable[CastLoss]) -> CastLoss:
    found = list(losses)
    return CastLoss(
        max((loss.flushed for loss in found), default=0.0),
        max((loss.saturated for loss in found), default=0.0),
    )


def cast_loss(values: Array, used: oracle.Quantized) -> CastLoss:
    """What quantising `values` to `used` flushed to zero, and what it saturated.

    Not saturated is the amax itself, which a rounded scale may put an ulp above the largest code.
    """
    zero = oracle.decode(used.codes, used.fmt) == 0
    limit = _saturates_at(used.fmt) * oracle.expand(used.scale, used.block, values.shape)
    return CastLoss(
        flushed=float(np.mean(zero & (values != 0))),
        saturated=float(np.mean(np.abs(values) > limit)),
    )


def unscaled_loss(values: Array, fmt: str) -> CastLoss:
    """What a cast without a scale flushes and saturates."""
    codes = oracle.encode(values.astype(np.float32), fmt)
    one = np.ones((1, 1), np.float32)
    return cast_loss(values, oracle.Quantized(codes, one, fmt, (None, None)))


@cache
def _saturates_at(fmt: str) -> float:
    return float(oracle.midpoints(fmt).max())


def _costs(name: str, product: ProductReport) -> list[tuple[int, str]]:
    """What is over a limit, with its rank in `_WORDS`."""
    shown, lost = SHOWN[name], product.lost
    found = []
    # `not <=` rather than `>`: a NaN is over every limit.
    if lost is not None and not lost <= LOST_FITS_DB:
        found.append((1 if lost <= LOST_LOSSY_DB else 2, f"{shown} lost {lost:.1f} dB"))
    if not product.worst_row >= ROW_FITS_DB:
        rank = 1 if product.worst_row >= ROW_LOSSY_DB else 2
        found.append((rank, f"{shown} row {product.worst_row:.1f} dB"))
    if product.cast.saturated > SATURATED_FITS:
        found.append((2, f"{shown} saturated {product.cast.saturated:.2%}"))
    return found


def _hints(name: str, product: ProductReport) -> list[tuple[int, str]]:
    """What asks for a look and costs nothing that the SQNR doesn't show."""
    if product.cast.flushed > FLUSHED_FITS:
        return [(1, f"{SHOWN[name]} flushed {product.cast.flushed:.1%}")]
    return []


# --- comparing recipes --------------------------------------------------------------------------


def compare(rows: Sequence[LayerReport], recipe: str, baseline: str = "tensorwise") -> str | None:
    """One line: is `recipe` worth it against `baseline` on these layers? None without both.

    It is when it costs some layer less than the baseline does (lossy, look or fits, leaving aside
    what is only flushed) and none more. The gains are means over the layers, in dB.
    """
    ours = {row.layer: row for row in rows if row.recipe == recipe}
    theirs = {row.layer: row for row in rows if row.recipe == baseline}
    layers = [name for name in ours if name in theirs]
    if not layers or recipe == baseline:
        return None
    gains = [
        f"{SHOWN[name]} {np.mean([_gain(ours[n], theirs[n], name) for n in layers]):+.1f}"
        for name in PRODUCTS
    ]
    rows_at = [min(side[n].worst_row[0] for n in layers) for side in (theirs, ours)]
    better = sum(ours[n].cost < theirs[n].cost for n in layers)
    worse = sum(ours[n].cost > theirs[n].cost for n in layers)
    return (
        f"{recipe} against {baseline}: {_answer(better, worse, len(layers), theirs)} "
        f"({', '.join(gains)} dB; worst row {rows_at[0]:.1f} -> {rows_at[1]:.1f} dB)"
    )


def _gain(ours: LayerReport, theirs: LayerReport, name: str) -> float:
    return ours.products[name].sqnr - theirs.products[name].sqnr


def _answer(better: int, worse: int, layers: int, baseline: Mapping[str, LayerReport]) -> str:
    if better and worse:
        return f"mixed, {better} of {layers} layers better and {worse} worse"
    if better:
        return f"worth it, {better} of {layers} layers better and none worse"
    if worse:
        return f"not worth it, {worse} of {layers} layers worse and none better"
    if not any(row.cost for row in baseline.values()):
        return "not needed, every layer is within the limits without"
    return "no layer's verdict changes"


def closing_lines(rows: Sequence[LayerReport]) -> list[str]:
    """Each recipe against tensorwise, and what scales are for."""
    recipes = dict.fromkeys(row.recipe for row in rows)
    lines = [line for recipe in recipes if (line := compare(rows, recipe)) is not None]
    if rows:
        lines.append(_unscaled_line(rows))
    return lines


def _unscaled_line(rows: Sequence[LayerReport]) -> str:
    casts = [
        (product.unscaled_cast, f"{SHOWN[name]} of {row.layer}, {row.recipe}")
        for row in rows
        for name, product in row.products.items()
    ]
    flushed, where = max(((cast.flushed, where) for cast, where in casts), key=lambda c: c[0])
    saturated = max(cast.saturated for cast, _ in casts)
    return (
        f"without scales, casts would flush up to {flushed:.1%} of an operand ({where}) "
        f"and saturate up to {saturated:.2%}"
    )
