"""Thresholds: the files, what a case is held to, and what a measurement means for it."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from fp8 import hardware, regimes
from fp8.claims import ClaimError, Provenance
from fp8.testing import thresholds
from fp8.testing.speed_verdicts import Interval, Verdict, of_case, of_claim, of_threshold
from fp8.testing.thresholds import Threshold

FOLDER = Path(__file__).parents[1] / "perf" / "thresholds"
REGIMES = {regime.id: regime for regime in regimes.load()}
MEASURED = Provenance(
    "measured", "fp8 calibrate, 12 pairs", date=dt.date(2026, 12, 1), versions="NVIDIA Q1, torch 3"
)
PUBLISHED = Provenance("published", "a page", link="https://example.org")

FILE = """
schema = 1
devices = ["NVIDIA Q1", "NVIDIA Q1 PCIe"]
threshold = [
    { case = "a", ratio = 2, sd = 0.01, source = "here" },
    { case = "b", ratio = 1.5, source = "there" },
]

[[source]]
id = "here"
kind = "measured"
text = "12 pairs"
date = 2026-12-01
versions = "NVIDIA Q1, torch 3"

[[source]]
id = "there"
kind = "published"
text = "a page"
link = "https://example.org"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "q1.toml").write_text(FILE, encoding="utf-8")
    return tmp_path


# --- the files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["NVIDIA Q1", "NVIDIA Q1 PCIe"])
def test_a_gpu_finds_its_file(folder: Path, device: str) -> None:
    found = thresholds.load(folder, device)
    assert list(found.by_case) == ["a", "b"]
    assert found.by_case["a"].source.kind == "measured"
    assert not found.by_case["a"].provisional
    assert found.by_case["b"].provisional
    assert str(found) == f"{device}: 2 thresholds, 1 of them provisional (q1.toml)"


def test_a_gpu_without_a_file_says_so_and_what_to_do(folder: Path) -> None:
    found = thresholds.load(folder, "NVIDIA Q2")
    assert found.by_case == {}
    assert str(found) == (
        "NVIDIA Q2 has no thresholds: everything runs and is recorded, nothing is gated; "
        "`fp8 calibrate` measures this GPU and writes its file"
    )


def test_two_files_for_one_gpu_are_refused(folder: Path) -> None:
    (folder / "q2.toml").write_text(FILE, encoding="utf-8")
    with pytest.raises(ClaimError, match=r"NVIDIA Q1 is in q1.toml and in q2.toml"):
        thresholds.load(folder, "NVIDIA Q1")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('devices = ["NVIDIA Q1", "NVIDIA Q1 PCIe"]', "", "devices must be a list of names"),
        ('case = "b"', 'case = "a"', "threshold 2 .a.: this case was used before"),
        ('source = "there"', 'source = "where"', r"threshold 2 .b.: source 'where' is unknown"),
        ("ratio = 2", "ratio = 0", "ratio must be positive, got 0"),
        ("ratio = 2", "ratio = true", "ratio must be a float"),
        ("sd = 0.01", "sd = 0.4", "sd must be from 0 to below a third, got 0.4"),
        ("sd = 0.01", "spread = 0.4", "unknown key 'spread'"),
        ("1.5,", "1.5, provisional = false,", "is published, so it is provisional: measure it"),
        ('link = "https://example.org"', "", "source 2 .there.: link is missing"),
    ],
)
def test_a_wrong_file_is_refused(folder: Path, old: str, new: str, message: str) -> None:
    (folder / "q1.toml").write_text(FILE.replace(old, new), encoding="utf-8")
    with pytest.raises(ClaimError, match=message):
        thresholds.load(folder, "NVIDIA Q1")


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    rows = [
        Threshold("step/toy", 1.25, MEASURED, sd=0.02),
        Threshold("linear/1x2x3", 0.5, MEASURED, provisional=True),
        Threshold('a "quoted" one', 2.0, PUBLISHED, provisional=True),
    ]
    path = tmp_path / "q9.toml"
    path.write_text(thresholds.text("NVIDIA Q9", rows), encoding="utf-8")
    assert list(thresholds.load(tmp_path, "NVIDIA Q9").by_case.values()) == rows


# --- this project's files -----------------------------------------------------------------------


def test_the_files_here_are_good_and_for_known_gpus() -> None:
    files = sorted(FOLDER.glob("*.toml"))
    assert files
    for path in files:
        assert thresholds.read(path)
    h100 = thresholds.load(FOLDER, "NVIDIA H100 80GB HBM3")
    assert hardware.find(h100.device) is not None
    assert h100.by_case["step/deep_nobias_warm/torchao-tensorwise/compiled/ones"].ratio == 1.51
    assert h100.by_case["step/deep_nobias_warm/torchao-tensorwise/eager/ones"].ratio == 0.72
    assert all(t.provisional for t in h100.by_case.values())


def test_the_h100s_rowwise_figures_are_those_of_the_published_table() -> None:
    table = regimes.published()
    expected = {
        f"linear/torchao-rowwise/compiled/{M}x{K}x{N}": speedup
        for K, rows in table.speedup.items()
        for M, row in zip(table.M, rows, strict=True)
        for N, speedup in zip(table.N, row, strict=True)
        if speedup >= 1
    }
    known = thresholds.read(FOLDER / "h100.toml")
    assert {case: t.ratio for case, t in known.items() if "-rowwise" in case} == expected


# --- the floor ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sd", "floor"),
    [(0, 1.9), (0.01, 1.9), (0.05 / 3, 1.9), (0.02, 1.88), (0.1, 1.4)],
)
def test_the_floor(sd: float, floor: float) -> None:
    assert Threshold("a", 2.0, MEASURED, sd=sd).floor == pytest.approx(floor)


# --- verdicts -----------------------------------------------------------------------------------

TWO = Threshold("a", 2.0, MEASURED)  # floor 1.9


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.91, 1.95, Verdict.PASS),
        (2.5, 2.6, Verdict.PASS),
        (1.89, 1.91, Verdict.UNRESOLVED),
        (1.85, 1.89, Verdict.REGRESSED),
        (0.5, 3.0, Verdict.UNRESOLVED),
    ],
)
def test_a_threshold(low: float, high: float, verdict: Verdict) -> None:
    measured = Interval((low + high) / 2, low, high)
    judgement = of_threshold(measured, TWO)
    assert judgement.verdict is verdict
    assert "1.900 (2.000 less 5%)" in judgement.reason


def test_nothing_measured_is_never_green() -> None:
    published = Threshold("a", 2.0, PUBLISHED, provisional=True)
    for threshold in (TWO, published):
        assert of_threshold(None, threshold).verdict is Verdict.UNRESOLVED
    claim = of_claim(None, REGIMES["small-n"])
    assert claim is not None
    assert claim.verdict is Verdict.UNRESOLVED


@pytest.mark.parametrize(("low", "said"), [(1.95, "reaches"), (0.5, "does not surely reach")])
def test_a_provisional_threshold_fails_nothing(low: float, said: str) -> None:
    threshold = Threshold("a", 2.0, PUBLISHED, provisional=True)
    judgement = of_threshold(Interval(low, low, low), threshold)
    assert judgement.verdict is Verdict.PROVISIONAL
    assert f"{said} 1.900" in judgement.reason
    assert "published, not measured here" in judgement.reason


@pytest.mark.parametrize(
    ("regime", "low", "high", "verdict"),
    [
        ("eager", 0.6, 0.7, Verdict.PASS),
        ("eager", 0.7, 0.9, Verdict.UNRESOLVED),
        ("eager", 0.81, 0.9, Verdict.STALE),
        # no alternative: the error itself, at least 5 %
        ("fast-accumulation", 0.06, 0.07, Verdict.PASS),
        ("fast-accumulation", 0.04, 0.06, Verdict.UNRESOLVED),
        ("fast-accumulation", 0.001, 0.002, Verdict.STALE),
    ],
)
def test_a_claim(regime: str, low: float, high: float, verdict: Verdict) -> None:
    judgement = of_claim(Interval((low + high) / 2, low, high), REGIMES[regime])
    assert judgement is not None
    assert judgement.verdict is verdict
    assert regime in judgement.reason


def test_a_statement_judges_nothing() -> None:
    assert of_claim(Interval(1, 1, 1), REGIMES["float8-head"]) is None


def test_the_gravest_judgement_counts() -> None:
    eager = [REGIMES["eager"]]
    slow = Threshold("a", 0.72, MEASURED)  # floor 0.684
    for measured, verdict in (
        (Interval(0.7, 0.69, 0.71), Verdict.PASS),
        (Interval(0.9, 0.89, 0.91), Verdict.STALE),
        (Interval(0.5, 0.49, 0.51), Verdict.REGRESSED),
        (Interval(0.684, 0.67, 0.69), Verdict.UNRESOLVED),
    ):
        judgement = of_case(measured, slow, eager)
        assert judgement is not None
        assert judgement.verdict is verdict


def test_a_case_of_which_nothing_is_known_is_not_judged() -> None:
    assert of_case(Interval(1, 1, 1), None, []) is None
    # claims about memory, or against the remedy, are about other ratios
    others = [REGIMES["no-memory-saving"], REGIMES["unfused-bias"], REGIMES["float8-head"]]
    assert of_case(Interval(9, 9, 9), None, others) is None
