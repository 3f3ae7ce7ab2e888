"""The speed-up map: which linear layers pay in float8, drawn from a record."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from fp8 import hardware, regimes
from fp8.claims import VERSION_FACTS
from fp8.testing.agreement import timings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from matplotlib.axes import Axes

    from fp8.testing.agreement import Timed
    from fp8.testing.records import Record

#: Red is slower and blue faster than bfloat16, white the same.
_COLOURS = "RdBu"
#: Where the colours end, on either side of 1. No product gains more than the factor of two in the
#: arithmetic, and a map that had to show a layer five times as slow would show little else.
_RANGE = 2.0
_TICKS = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 1.75, 2)
#: An interval wider than this on either side, relative: what it is of is not shown as a colour.
#: Of 27 cases of the first run on an H200 the widest was 3.7 %, but for two of 23 % whose baseline
#: had waited for the host.
_VAGUE = 0.1
_HATCH = "////"
_UNKNOWN = "0.95"
#: Inches: a number in a cell is readable from 7 points on.
_CELL = (0.62, 0.3)


class MapError(ValueError):
    """A record has nothing to draw."""


class Layer(NamedTuple):
    """A row of the map: features in and out."""

    K: int
    N: int


@dataclass(frozen=True, slots=True)
class Cell:
    """One layer at one M.

    Attributes:
        ratio: The speed-up over bfloat16; None where it was not measured, or not well enough.
        verdict: The case's; empty where it was not measured.
        regimes: The bad regimes it is in, whether it was measured or not.
    """

    ratio: float | None
    verdict: str
    regimes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One target, recipe and mode."""

    target: str
    mode: str
    recipe: str
    cells: Mapping[tuple[Layer, int], Cell]

    @property
    def title(self) -> str:
        """What is above it."""
        return f"{self.target}, {self.recipe}, {self.mode}"


@dataclass(frozen=True, slots=True)
class SpeedMap:
    """Panels over one grid.

    Attributes:
        title: GPU and versions.
        layers: Mode to its rows: the layers that were measured in it.
        tokens: The columns, M.
        panels: One for each target, recipe and mode.
    """

    title: str
    layers: Mapping[str, tuple[Layer, ...]]
    tokens: tuple[int, ...]
    panels: tuple[Panel, ...]

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Target and mode of each row of panels."""
        return list(dict.fromkeys((panel.target, panel.mode) for panel in self.panels))

    @property
    def columns(self) -> list[str]:
        """The recipe of each column of panels."""
        return list(dict.fromkeys(panel.recipe for panel in self.panels))


def speed_map(record: Record) -> SpeedMap:
    """The linear layers of a record. Raises MapError when it has none."""
    found = [
        (target, timed)
        for (target, _, _), timed in timings(record).items()
        if timed.facts.get("family") == "linear" and not timed.facts.get("bias")
    ]
    if not found:
        raise MapError("the record has no timings of the family linear")
    modes = sorted({timed.facts["mode"] for _, timed in found})
    layers = {
        mode: tuple(sorted({_layer(t) for _, t in found if t.facts["mode"] == mode}))
        for mode in modes
    }
    tokens = tuple(sorted({timed.facts["M"] for _, timed in found}))
    panels = []
    for key, group in groupby(sorted(found, key=_panel_of), key=_panel_of):
        measured = {(_layer(timed), timed.facts["M"]): timed for _, timed in group}
        cells = {
            (layer, M): _cell(measured.get((layer, M)), _regimes(record, key, layer, M))
            for layer in layers[key[1]]
            for M in tokens
        }
        panels.append(Panel(*key, cells))
    return SpeedMap(_title(record.environment), layers, tokens, tuple(panels))


def _panel_of(found: tuple[str, Timed]) -> tuple[str, str, str]:
    target, timed = found
    return target, timed.facts["mode"], timed.facts["recipe"]


def _layer(timed: Timed) -> Layer:
    return Layer(timed.facts["K"], timed.facts["N"])


def _cell(timed: Timed | None, bad: tuple[str, ...]) -> Cell:
    if timed is None:
        return Cell(None, "", bad)
    # The run may have known more of the case than its name, shape and recipe.
    also = tuple(r.id for r in regimes.load() if r.id in timed.regimes and _is_about_time(r))
    vague = timed.estimate is not None and timed.estimate.half_width > _VAGUE
    ratio = None if vague else timed.ratio
    return Cell(ratio, timed.verdict, tuple(dict.fromkeys((*bad, *also))))


def _is_about_time(regime: regimes.Regime) -> bool:
    return (regime.metric, regime.against) == ("time", "bfloat16")


def _regimes(record: Record, panel: tuple[str, str, str], layer: Layer, M: int) -> tuple[str, ...]:
    """The regimes in which such a layer is claimed to be slower than bfloat16."""
    target, mode, recipe = panel
    gpu = hardware.find(_gpu(record.environment))
    case = regimes.Case(
        subject="linear",
        M=M,
        K=layer.K,
        N=layer.N,
        recipe=recipe,
        bias=False,
        compiled=mode == "compiled",
        window="steady",
        target=target.partition("[")[0],
        gpu=None if gpu is None else gpu.id,
        versions={k: v for k, v in record.environment.items() if k in VERSION_FACTS},
    )
    return tuple(r.id for r in regimes.of(case) if _is_about_time(r))


def _gpu(environment: Mapping[str, str]) -> str:
    """The name of the GPU, without how many there are."""
    return environment.get("GPU", "unknown GPU").partition(" x ")[2] or "unknown GPU"


def _title(environment: Mapping[str, str]) -> str:
    versions = [
        f"{name} {environment[name]}"
        for name in ("torch", "torchao", "triton", "fp8")
        if name in environment
    ]
    described = ", ".join([_gpu(environment), *versions])
    return f"Speed-up of float8 over bfloat16, linear forward and backward\n{described}"


# --- drawing ------------------------------------------------------------------------------------


def save(drawn: SpeedMap, paths: Iterable[Path]) -> None:
    """Draw a map into files, each in the format of its suffix: svg or png."""
    # Text stays text, and the same map gives the same bytes.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fp8", "hatch.linewidth": 0.5}):
        made = figure(drawn)
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else {}
            made.savefig(path, dpi=150, metadata=metadata)


def figure(drawn: SpeedMap) -> Figure:
    """The map as a figure: a heat map for each panel, bad regimes hatched."""
    rows, columns = drawn.rows, drawn.columns
    width = len(columns) * (len(drawn.tokens) * _CELL[0] + 0.9) + 1.2
    heights = [len(drawn.layers[mode]) * _CELL[1] + 0.8 for _, mode in rows]
    height = sum(heights) + 1.2
    made = Figure(figsize=(max(width, 7.0), height), layout="constrained")
    FigureCanvasAgg(made)
    grid = made.subplots(len(rows), len(columns), squeeze=False, height_ratios=heights)
    for axes in grid.flat:
        axes.set_axis_off()
    norm = Normalize(-math.log(_RANGE), math.log(_RANGE), clip=True)
    for panel in drawn.panels:
        axes = grid[rows.index((panel.target, panel.mode)), columns.index(panel.recipe)]
        _draw(axes, drawn, panel, norm)
    made.suptitle(drawn.title, fontsize=10)
    _explain(made, grid, norm, height)
    return made


def _explain(made: Figure, grid: Any, norm: Normalize, height: float) -> None:
    """The scale of colours and the legend."""
    scale = mpl.cm.ScalarMappable(norm, _COLOURS)
    bar = made.colorbar(scale, ax=grid, shrink=min(1.0, 3 / height), extend="both")
    bar.set_label("times as fast", fontsize=8)
    bar.set_ticks([math.log(t) for t in _TICKS], labels=[f"{t:g}" for t in _TICKS], fontsize=7)
    made.legend(
        handles=[
            Patch(facecolor="none", edgecolor="0.5", hatch=_HATCH, label="in a bad regime"),
            Patch(facecolor=_UNKNOWN, edgecolor="0.7", label="not measured, or (?) too vaguely"),
        ],
        loc="outside lower center",
        ncols=2,
        fontsize=8,
        frameon=False,
    )


def _draw(axes: Axes, drawn: SpeedMap, panel: Panel, norm: Normalize) -> None:
    axes.set_axis_on()
    layers = drawn.layers[panel.mode]
    colours = mpl.colormaps[_COLOURS]
    for y, layer in enumerate(layers):
        for x, M in enumerate(drawn.tokens):
            cell = panel.cells[layer, M]
            face: Any = _UNKNOWN if cell.ratio is None else colours(norm(math.log(cell.ratio)))
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=face, edgecolor="0.7", linewidth=0.5))
            if cell.regimes:
                axes.add_patch(
                    Rectangle((x, y), 1, 1, fill=False, hatch=_HATCH, edgecolor="0.5", linewidth=0)
                )
            text = "?" if cell.ratio is None else f"{cell.ratio:.2f}"
            if cell.verdict:
                axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8, bbox=_BOX)
    axes.set_xlim(0, len(drawn.tokens))
    axes.set_ylim(len(layers), 0)
    axes.set_xticks([x + 0.5 for x in range(len(drawn.tokens))], labels=map(str, drawn.tokens))
    axes.set_yticks(
        [y + 0.5 for y in range(len(layers))],
        labels=[f"{layer.K}, {layer.N}" for layer in layers],
    )
    axes.tick_params(length=0, labelsize=7)
    axes.set_xlabel("M", fontsize=8)
    axes.set_ylabel("K, N", fontsize=8)
    axes.set_title(panel.title, fontsize=9)
    for spine in axes.spines.values():
        spine.set_visible(False)


#: A number must be readable on a hatched and on a dark cell alike.
_BOX = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "boxstyle": "round,pad=0.12"}
