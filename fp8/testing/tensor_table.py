"""What float8 costs on captured tensors, shown: a table for people, JSON for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fp8.testing.linear_runs import PRODUCTS
from fp8.testing.tensor_report import SHOWN, closing_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from fp8.testing.tensor_report import LayerReport


#: heading and width of each column but the last
_COLUMNS = (
    ("recipe", 18),
    ("y dB", 5),
    ("dX dB", 5),
    ("dW dB", 5),
    ("lost dB", 7),
    ("worst row dB", 14),
    ("flushed", 7),
    ("saturated", 9),
)


def tables(rows: Sequence[LayerReport]) -> RenderableType:
    """The rows as rich tables, one for each layer, their columns under each other."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    made: list[RenderableType] = []
    for name in dict.fromkeys(row.layer for row in rows):
        of_layer = [row for row in rows if row.layer == name]
        first = of_layer[0]
        size = f"{first.tokens} tokens, {first.in_features} -> {first.out_features}"
        one = Table(
            title=f"{escape(name)}  {size}",
            title_justify="left",
            box=SIMPLE_HEAD,
            pad_edge=False,
            show_edge=False,
        )
        for heading, width in _COLUMNS:
            justify: Literal["left", "right"] = "left" if heading == "recipe" else "right"
            one.add_column(heading, justify=justify, min_width=width, no_wrap=True)
        one.add_column("verdict", overflow="fold", min_width=26)
        for row in of_layer:
            one.add_row(*_cells(row))
        made += [one, ""]
    return Group(*made)


def _cells(row: LayerReport) -> list[str]:
    lost, lost_in = row.lost
    worst_in = row.worst_row[1]
    worst = row.products[worst_in]
    casts = [product.cast for product in row.products.values()]
    return [
        row.recipe,
        *(f"{row.products[name].sqnr:.1f}" for name in PRODUCTS),
        f"{lost:+.1f} {SHOWN[lost_in]}",
        f"{worst.worst_row:.1f} {SHOWN[worst_in]}[{worst.worst_row_index}]",
        f"{max(cast.flushed for cast in casts):.2%}",
        f"{max(cast.saturated for cast in casts):.2%}",
        str(row.verdict),
    ]


def as_text(rows: Sequence[LayerReport], width: int = 120) -> str:
    """The table and the closing lines, without colour."""
    from io import StringIO

    from rich.console import Console

    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(tables(rows))
    drawn = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO, see above
    lines = [line.rstrip() for line in drawn.splitlines()]
    return "\n".join([*lines, *closing_lines(rows)])


def as_json(rows: Sequence[LayerReport]) -> list[dict[str, Any]]:
    """The rows as JSON values: dB as numbers, "inf", "-inf" or "nan" where they are not finite."""
    return [
        {
            "layer": row.layer,
            "recipe": row.recipe,
            "tokens": row.tokens,
            "in_features": row.in_features,
            "out_features": row.out_features,
            "verdict": row.verdict.word,
            "reasons": list(row.verdict.reasons),
            "products": {
                name: _plain({**asdict(product), "lost": product.lost})
                for name, product in row.products.items()
            },
        }
        for row in rows
    ]


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    return {
        key: str(value) if isinstance(value, float) and not np.isfinite(value) else value
        for key, value in values.items()
    }
