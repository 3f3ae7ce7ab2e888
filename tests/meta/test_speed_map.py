"""The speed-up map: what is in its cells, what is hatched, and that it can be drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import pytest
from click.testing import CliRunner
from matplotlib.patches import Rectangle

from fp8.cli import main
from fp8.testing.records import Record, save_record
from fp8.testing.speed_map import Layer, MapError, figure, speed_map

if TYPE_CHECKING:
    from pathlib import Path

ENVIRONMENT = {"GPU": "2 x NVIDIA H200", "torch": "2.13.0", "torchao": "0.18.0", "cpu": "some"}


def timing(
    ratio: float | None,
    target: str,
    recipe: str,
    mode: str,
    shape: tuple[int, int, int],
    regimes: tuple[str, ...] = (),
    **facts: Any,
) -> dict[str, Any]:
    M, K, N = shape
    return {
        "target": target,
        "test": "tests/perf/test_linear.py::test_speed",
        "name": f"linear/{target}-{recipe}/{mode}/{M}x{K}x{N}{' bias' * facts.get('bias', False)}",
        "kind": "timing",
        "value": {
            "ratio": ratio,
            "sd": 0.01,
            "pairs": 5,
            "confidence": 0.99,
            "regimes": list(regimes),
            "verdict": "PASS" if ratio else "UNRESOLVED",
        },
        "facts": {"family": "linear", "recipe": recipe, "mode": mode, "M": M, "K": K, "N": N}
        | facts,
    }


MEASUREMENTS = (
    timing(1.52, "reference[torch]", "tensorwise", "compiled", (8192, 4096, 8192)),
    timing(0.36, "reference[torch]", "tensorwise", "compiled", (8192, 8192, 128)),
    timing(None, "reference[torch]", "rowwise", "compiled", (4096, 4096, 8192)),
    timing(
        0.62,
        "torchao",
        "tensorwise",
        "eager",
        (8192, 4096, 8192),
        ("eager", "small-n", "unfused-bias"),
    ),
    timing(0.9, "torchao", "tensorwise", "eager", (8192, 4096, 8192), bias=True),  # not drawn
    timing(9.9, "torchao", "tensorwise", "eager", (1, 1, 1), family="step"),  # not drawn
)
RECORD = Record(ENVIRONMENT, {}, MEASUREMENTS)
WIDE, HEAD = Layer(4096, 8192), Layer(8192, 128)


def test_cells() -> None:
    drawn = speed_map(RECORD)
    assert drawn.title.endswith("\nNVIDIA H200, torch 2.13.0, torchao 0.18.0")
    assert drawn.layers == {"compiled": (WIDE, HEAD), "eager": (WIDE,)}
    assert drawn.tokens == (4096, 8192)
    assert drawn.rows == [("reference[torch]", "compiled"), ("torchao", "eager")]
    assert drawn.columns == ["rowwise", "tensorwise"]
    rowwise, tensorwise, eager = drawn.panels
    assert tensorwise.title == "reference[torch], tensorwise, compiled"
    ratios = {place: cell.ratio for place, cell in tensorwise.cells.items() if cell.verdict}
    assert ratios == pytest.approx({(WIDE, 8192): 1.52, (HEAD, 8192): 0.36})
    assert rowwise.cells[WIDE, 4096].ratio is None
    assert rowwise.cells[WIDE, 4096].verdict == "UNRESOLVED"
    assert set(eager.cells) == {(WIDE, 4096), (WIDE, 8192)}
    assert eager.cells[WIDE, 8192].ratio == pytest.approx(0.62)


def test_bad_regimes_are_those_of_the_predicates() -> None:
    _, tensorwise, eager = speed_map(RECORD).panels
    assert tensorwise.cells[HEAD, 4096].regimes == ("small-n",)  # whether measured or not
    assert tensorwise.cells[WIDE, 8192].regimes == ()
    # what the run itself found counts, too, unless it is about another ratio
    assert eager.cells[WIDE, 8192].regimes == ("small-n", "eager")
    h100 = Record({"GPU": "1 x NVIDIA H100 80GB HBM3"}, {}, MEASUREMENTS)
    rowwise = speed_map(h100).panels[0]
    assert "rowwise-small-n" in rowwise.cells[HEAD, 4096].regimes


def test_the_picture_says_what_the_cells_say() -> None:
    made = figure(speed_map(RECORD))
    shown = {axes.get_title(): axes for axes in made.axes if axes.get_title()}
    assert list(shown) == [
        "reference[torch], rowwise, compiled",
        "reference[torch], tensorwise, compiled",
        "torchao, tensorwise, eager",
    ]
    axes = shown["reference[torch], tensorwise, compiled"]
    assert {text.get_text() for text in axes.texts} == {"1.52", "0.36"}
    assert [text.get_text() for text in axes.get_yticklabels()] == ["4096, 8192", "8192, 128"]
    cells = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert sum(bool(patch.get_hatch()) for patch in cells) == 2  # the head, at both M
    fast = next(p for p in cells if p.get_xy() == (1, 0))
    red, _, blue, _ = mpl.colors.to_rgba(fast.get_facecolor())
    assert blue > red
    assert [text.get_text() for text in shown["reference[torch], rowwise, compiled"].texts] == ["?"]


def test_what_was_measured_vaguely_has_no_number() -> None:
    (one, *_) = MEASUREMENTS
    vague = {**one, "value": {**one["value"], "sd": 0.2}}
    (panel,) = speed_map(Record(ENVIRONMENT, {}, (vague,))).panels
    assert panel.cells[WIDE, 8192].ratio is None
    assert panel.cells[WIDE, 8192].verdict == "PASS"


def test_alike_is_white() -> None:
    record = Record({}, {}, (timing(1.0, "t", "tensorwise", "eager", (8192, 4096, 4096)),))
    (axes, *_) = figure(speed_map(record)).axes
    assert min(mpl.colors.to_rgba(axes.patches[0].get_facecolor())) > 0.95


def test_nothing_to_draw() -> None:
    with pytest.raises(MapError, match="no timings of the family linear"):
        speed_map(Record({}, {}, MEASUREMENTS[-1:]))


def invoke(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["map", *(str(arg) for arg in args)])
    return result.exit_code, result.output


def test_the_command_writes_both_formats(tmp_path: Path) -> None:
    record, svg, png = (tmp_path / name for name in ("r.json", "map.svg", "map.png"))
    save_record(record, RECORD)
    code, output = invoke(record, "--out", svg, "--out", png)
    assert code == 0, output
    assert output.startswith("3 panels: ")
    text = svg.read_text(encoding="utf-8")
    assert "1.52" in text  # text is text
    assert png.read_bytes().startswith(b"\x89PNG")
    first = svg.read_bytes()
    assert invoke(record, "--out", svg)[0] == 0
    assert svg.read_bytes() == first


def test_the_command_refuses_what_it_cannot_draw(tmp_path: Path) -> None:
    record = tmp_path / "r.json"
    save_record(record, Record({}, {}, MEASUREMENTS[-1:]))
    for arguments, message in (
        (("--out", tmp_path / "map.gif"), "needs .svg or .png"),
        (("--out", tmp_path / "map.svg"), "no timings of the family linear"),
        ((), "Missing option '--out'"),
    ):
        code, output = invoke(record, *arguments)
        assert code == 2
        assert message in output
