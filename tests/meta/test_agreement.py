"""Two runs' speed-ups: what changed, whether the runs agree, and how both are told."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner
from scipy import stats

from fp8.cli import main
from fp8.testing.agreement import COVERING, agreement, change
from fp8.testing.diffing import compare
from fp8.testing.records import Record, RecordError, load_record, measured, save_record
from fp8.testing.timing.analysis import Estimate, estimated

if TYPE_CHECKING:
    from pathlib import Path


def timing(
    case: str,
    ratio: float = 1.5,
    sd: float = 0.01,
    pairs: int = 10,
    verdict: str = "PASS",
    estimate: Estimate | None = None,
) -> dict[str, Any]:
    """A measurement of kind timing."""
    made = estimate or Estimate(math.log(ratio), sd, pairs, 0.99)
    return {
        "target": "reference[torch]",
        "test": "tests/perf/test_linear.py::test_speed",
        "name": case,
        "kind": "timing",
        "value": {
            "ratio": made.ratio,
            "sd": made.sd,
            "pairs": made.pairs,
            "confidence": made.confidence,
            "verdict": verdict,
            "samples": [1, 2],
        },
        "facts": {"family": "linear"},
    }


def record(*measurements: dict[str, Any], **environment: str) -> Record:
    return Record(environment or {"GPU": "1 x NVIDIA H200"}, {}, measurements)


def unresolved(case: str) -> dict[str, Any]:
    return of_value(case, ratio=None, pairs=3, verdict="UNRESOLVED")


def of_value(case: str, **changed: Any) -> dict[str, Any]:
    made = timing(case)
    return made | {"value": made["value"] | changed}


# --- the interval of a change -------------------------------------------------------------------


def test_the_interval_is_welchs() -> None:
    random = np.random.default_rng(0)
    old, new = random.normal(0.4, 0.01, 5), random.normal(0.41, 0.03, 12)
    got = change(estimated(old.tolist(), 0.995), estimated(new.tolist(), 0.995))
    expected = stats.ttest_ind(new, old, equal_var=False).confidence_interval(0.99)
    assert got.log_ratio - got.half_width == pytest.approx(expected.low)
    assert got.log_ratio + got.half_width == pytest.approx(expected.high)


def test_99_of_100_intervals_cover_zero_when_nothing_changed() -> None:
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(2000):
        runs = [estimated(random.normal(0.4, sd, 8).tolist(), 0.99) for sd in (0.005, 0.01)]
        covered += change(*runs).covers_zero
    assert abs(covered / 2000 - 0.99) < 0.007  # three standard deviations of a share of 2000


def test_no_spread_at_all() -> None:
    exact = Estimate(0.4, 0.0, 5, 0.99)
    assert change(exact, exact).covers_zero
    assert not change(exact, Estimate(0.401, 0.0, 5, 0.99)).covers_zero


@pytest.mark.parametrize(
    ("ratio", "covers", "beyond"),
    [(1.5, True, False), (1.52, False, False), (1.56, False, True), (1.44, False, True)],
)
def test_a_change_is_flagged_beyond_the_margin(ratio: float, covers: bool, beyond: bool) -> None:
    old, new = (Estimate(math.log(r), 0.005, 10, 0.99) for r in (1.5, ratio))
    assert change(old, new).covers_zero is covers
    assert change(old, new).beyond_margin is beyond
    wide = Estimate(math.log(ratio), 0.2, 10, 0.99)
    assert not change(old, wide).beyond_margin


def test_how_a_change_reads() -> None:
    got = change(Estimate(0.0, 0.0, 5, 0.99), Estimate(math.log(0.9), 0.0, 5, 0.99))
    assert str(got) == "-10.0% [-10.0%, -10.0%]"


# --- two records --------------------------------------------------------------------------------


def test_two_runs_of_the_same_code_agree() -> None:
    random = np.random.default_rng(2)

    def run() -> Record:
        log_ratios = {f"case {i}": random.normal(0.1, 0.01, 8).tolist() for i in range(100)}
        return record(
            *(timing(case, estimate=estimated(got, 0.99)) for case, got in log_ratios.items())
        )

    found = agreement(run(), run())
    assert len(found.changes) == 100
    assert found.agrees
    assert found.covering is not None
    assert found.covering >= COVERING
    assert str(found).startswith("speed: the runs agree: the 99% interval of the change covers ")


def test_a_flip_or_too_many_changes_is_no_agreement() -> None:
    old = record(*(timing(f"case {i}") for i in range(10)))
    flipped = record(timing("case 0", verdict="STALE"), *old.measurements[1:])
    found = agreement(old, flipped)
    assert not found.agrees
    assert [pair.new.case for pair in found.flips] == ["case 0"]
    assert str(found) == (
        "speed: the runs do not agree: the 99% interval of the change covers zero for 10 of 10"
        " cases (100.0%), 1 verdict changed"
    )
    moved = record(timing("case 0", ratio=1.53), *old.measurements[1:])
    assert not agreement(old, moved).agrees  # 90 % cover zero
    assert agreement(old, old).agrees


def test_what_has_no_estimate_is_not_counted_as_agreeing() -> None:
    nothing = record(unresolved("a"))
    found = agreement(nothing, nothing)
    assert found.covering is None
    assert not found.agrees
    assert compare(nothing, nothing).same


def test_what_is_no_mean_of_pairs_has_no_interval_but_a_verdict() -> None:
    """Bytes saved for backward, and the first call: counted, or seen once."""
    old = record(of_value("memory/toy", ratio=0.9, sd=0.0, pairs=0))
    new = record(of_value("memory/toy", ratio=0.8, sd=0.0, pairs=0))
    found = agreement(old, new)
    assert found.changes == []
    assert compare(old, new).same
    stale = record(of_value("memory/toy", ratio=1.2, sd=0.0, pairs=0, verdict="STALE"))
    (changed,) = compare(old, stale).changed
    assert (changed.old, changed.new) == ("PASS 0.900", "STALE 1.200")


def test_differences_of_records() -> None:
    old = record(timing("a"), timing("b"), timing("c"), timing("d"), timing("gone"))
    new = record(
        timing("a", ratio=1.505),
        timing("b", ratio=1.3),
        timing("c", verdict="REGRESSED"),
        unresolved("d"),
        timing("born"),
    )
    found = compare(old, new)
    assert found.unchanged == 1
    assert [(c.name, c.kind) for c in found.changed] == [(n, "timing") for n in ("b", "c", "d")]
    assert found.changed[0].new.startswith("PASS 1.300 [1.28")
    assert found.changed[2].new == "UNRESOLVED nothing"
    assert [name for _, _, name in found.missing] == ["gone"]
    count = timing("a") | {"kind": "count", "value": 3}
    assert not compare(record(timing("a")), record(count)).same
    assert compare(record(count), record(count)).speed is None


# --- files and commands -------------------------------------------------------------------------


def test_saved_and_loaded(tmp_path: Path) -> None:
    whole = record(timing("a"), unresolved("b"))
    save_record(tmp_path / "r.json", whole)
    assert load_record(tmp_path / "r.json") == whole
    value = timing("a")["value"]
    assert measured(value, "timing") == value


@pytest.mark.parametrize("value", [1.5, {"ratio": 1.5}])
def test_what_is_no_timing_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="a timing must be a dict with a verdict"):
        measured(value, "timing")


@pytest.mark.parametrize("missing", ["ratio", "sd", "pairs", "confidence", "verdict"])
def test_a_file_without_what_comparing_needs_is_refused(missing: str, tmp_path: Path) -> None:
    whole = timing("a")
    del whole["value"][missing]
    save_record(tmp_path / "r.json", record(whole))
    with pytest.raises(RecordError, match=f"damaged: KeyError: '{missing}'"):
        load_record(tmp_path / "r.json")


def invoke(*args: object) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(main, [str(arg) for arg in args])
    return result.exit_code, result.output


def test_diff_shows_speed(tmp_path: Path) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    save_record(a, record(timing("a"), timing("b")))
    save_record(b, record(timing("a", ratio=1.35), timing("b")))
    code, output = invoke("diff", a, b)
    assert code == 1
    assert "-10.0% [-1" in output
    assert "covers zero for 1 of 2 cases (50.0%), 0 verdicts changed" in output
    code, output = invoke("diff", a, a)
    assert code == 0
    assert "speed: the runs agree" in output


OLD = record(timing("a|b"), timing("c"), timing("gone"), GPU="1 x NVIDIA H200", torch="2.12")
NEW = record(
    timing("a|b", ratio=1.2, sd=0.0, verdict="REGRESSED"), timing("c"), GPU="1 x NVIDIA H200",
    torch="2.13",
)  # fmt: skip

MARKDOWN = r"""# What changed

**1 unchanged, 1 changed, 1 missing, 0 new**

speed: the runs do not agree: the 99% interval of the change covers zero for 1 of 2 cases (50.0%), 1 verdict changed.

| environment | old | new |
| --- | --- | --- |
| torch | 2.12 | 2.13 |

| target | changed | old | new | change |
| --- | --- | --- | --- | --- |
| reference[torch] | a\|b | PASS 1.500 [1.485, 1.515] | REGRESSED 1.200 [1.200, 1.200] | -20.0% [-20.8%, -19.2%] |

| target | missing |
| --- | --- |
| reference[torch] | gone |
"""  # noqa: E501 - the lines of the page


def test_diff_in_markdown(tmp_path: Path) -> None:
    old, new, out = (tmp_path / name for name in ("a.json", "b.json", "out.md"))
    save_record(old, OLD)
    save_record(new, NEW)
    assert invoke("diff", old, new, "--markdown", out)[0] == 1
    assert out.read_text(encoding="utf-8") == MARKDOWN
    assert invoke("diff", old, old, "--markdown", out)[0] == 0
    assert out.read_text(encoding="utf-8") == (
        "# What changed\n\n**3 unchanged, 0 changed, 0 missing, 0 new**\n\n"
        "speed: the runs agree: the 99% interval of the change covers zero for 3 of 3 cases"
        " (100.0%), 0 verdicts changed.\n"
    )
