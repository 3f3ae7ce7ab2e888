"""The hardware files: whole, sourced, found by the name that torch reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fp8 import hardware
from fp8.claims import ClaimError

if TYPE_CHECKING:
    from pathlib import Path

every_gpu = pytest.mark.parametrize("gpu", list(hardware.load_all().values()), ids=lambda g: g.id)


@pytest.mark.parametrize(
    ("device", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA H100 PCIe", "h100_pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_gpus_are_found_by_torchs_name(device: str, gpu: str) -> None:
    found = hardware.find(device)
    assert found is not None
    assert found.id == gpu


@pytest.mark.parametrize("device", ["NVIDIA H200 NVL", "NVIDIA H100 NVL", "NVIDIA A100", ""])
def test_another_gpu_is_not_taken_for_a_known_one(device: str) -> None:
    assert hardware.find(device) is None


@every_gpu
def test_figures_are_of_dense_matrices(gpu: hardware.Hardware) -> None:
    # float8 doubles bfloat16; a figure "with sparsity" beside a dense one would be 4 times it
    assert gpu.peak("fp8") == pytest.approx(2 * gpu.peak("bf16"), rel=1e-3)


@every_gpu
def test_nothing_measured_exceeds_its_peak(gpu: hardware.Hardware) -> None:
    for name in ("bf16", "fp8", "bandwidth"):
        assert gpu.sustained(name) <= gpu.peak(name)


def test_units() -> None:
    h200 = hardware.load_all()["h200"]
    assert h200.peak("bandwidth") == 4.8e12
    assert h200.sustained("bandwidth") == pytest.approx(4.23e12)
    assert h200.peak("cache") == 50e6
    assert h200.peak("processors") == 132
    assert hardware.load_all()["b200"].sustained("bf16") == 2.25e15


GOOD = """
schema = 1
devices = ["NVIDIA Q1"]
""" + "".join(
    f"""
[[figure]]
id = "{name}"
value = 2
source = {{ kind = "published", text = "data sheet", link = "https://example.org" }}
"""
    for name in ("bf16", "fp8", "bandwidth", "cache", "processors", "power")
)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "q1.toml"
    path.write_text(GOOD, encoding="utf-8")
    assert hardware.load(path).id == "q1"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('devices = ["NVIDIA Q1"]', "", "devices must be a list of names, got None"),
        ('["NVIDIA Q1"]', "[]", "devices must be a list of names"),
        ('"power"', '"price"', "unknown figure; known: bf16, fp8"),
        ("value = 2", "value = 0", "value must be positive, got 0"),
        ("value = 2", "value = true", "value must be a float, got True"),
        (', link = "https://example.org"', "", "link is missing: what is published has one"),
        ('"published"', '"measured"', "date is missing: what is measured has one"),
        ('"published"', '"guessed"', "kind must be one of measured, published, derived"),
        ("value = 2", "", "value is missing"),
        ("value = 2", "value = 2\nprice = 3", "unknown key 'price'"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "q1.toml"
    path.write_text(GOOD.replace(old, new), encoding="utf-8")
    with pytest.raises(ClaimError, match=message):
        hardware.load(path)


def test_missing_figures_are_named(tmp_path: Path) -> None:
    path = tmp_path / "q1.toml"
    path.write_text(GOOD[: GOOD.index('[[figure]]\nid = "processors"')], encoding="utf-8")
    with pytest.raises(ClaimError, match="figures are missing: processors, power"):
        hardware.load(path)
