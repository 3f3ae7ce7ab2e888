"""What is made of the perf suite's records: tables, Markdown, thresholds, and the difference."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

from fp8.cli import main
from fp8.testing import thresholds
from fp8.testing.diffing import compare
from fp8.testing.perf import running, tables
from fp8.testing.perf.benches import Linears
from fp8.testing.perf.judging import standard
from fp8.testing.perf.simulated import SimulatedWorkshop, simulated_stack
from fp8.testing.perf.under_law import entries
from fp8.testing.records import Record, save_record
from fp8.testing.timing.simulated import SimulatedDevice

if TYPE_CHECKING:
    from fp8.testing.perf.cases import Case

GPU = "NVIDIA H200"
BENCHES = (
    Linears((8192, 8192, 8192), "compiled", ("tensorwise",)),
    Linears((8192, 16384, 128), "compiled", ("tensorwise",)),
)
ENVIRONMENT = {"torch": "2.11.0", "fp8": "0.1.0", "GPU": f"1 x {GPU}"}


def speed(case: Case) -> float:
    return 0.5 if case.facts["N"] == 128 else 1.5


def record(scale: float = 1.0, noise: float = 0.0, **environment: str) -> Record:
    """Of one run: a layer that pays and a head that doesn't."""
    made: list[dict[str, Any]] = []
    for bench in BENCHES:
        outcomes = running.run(
            bench,
            simulated_stack("torchao"),
            SimulatedDevice(seed=1),
            SimulatedWorkshop(lambda case: scale * speed(case), noise=noise),
            standard({}, GPU),
        )
        made += [{"target": "torchao", "test": "t", **e} for e in entries(outcomes, GPU)]
    whole = json.loads(json.dumps(made))
    return Record({**ENVIRONMENT, **environment}, {}, tuple(whole))


def invoke(*args: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, [str(arg) for arg in args])


# --- tables -------------------------------------------------------------------------------------

MARKDOWN = """\
# Speed of float8 training

GPU 1 x NVIDIA H200, torch 2.11.0, fp8 0.1.0

**2 cases: 1 PASS, 1 RECORDED**

## Slower than bfloat16: ms (of bfloat16), and why

```text
linear/torchao-tensorwise/compiled/8192x16384x128 0.50: products 2 (1), quantising 1 (0), other 1 (1), \
waiting for the host 0 (0); 6 kernels (6); small-n
in small-n: keep the layer in bfloat16: filter_fn=lambda layer, name: layer.out_features > 256
```

## Linear layers, forward and backward

| case | bf16 ms | float8 ms | host ms | speed-up | roofline | regimes | verdict |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |
| torchao-tensorwise/compiled/8192x8192x8192 | 2 | 1.333 | 0.01 | 1.5 | 1.67 | – | RECORDED |
| torchao-tensorwise/compiled/8192x16384x128 | 2 | 4 | 0.01 | 0.5 | 0.49 | small-n | PASS |
"""  # noqa: E501, RUF001


def test_markdown() -> None:
    made = record()
    assert tables.markdown(tables.timings(made.measurements), made.environment) == MARKDOWN


def test_the_command_prints_tables_or_writes_markdown(tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    save_record(path, record())
    shown = invoke("report", path)
    assert shown.exit_code == 0
    assert "linear layers, forward and backward" in shown.output
    assert shown.output.rstrip().endswith("2 cases: 1 PASS, 1 RECORDED")
    assert invoke("report", path, "--markdown", tmp_path / "speed.md").exit_code == 0
    assert (tmp_path / "speed.md").read_text(encoding="utf-8") == MARKDOWN


def test_a_record_without_speeds_is_refused(tmp_path: Path) -> None:
    count = {"target": "t", "test": "t", "name": "n", "kind": "count", "value": 1}
    save_record(tmp_path / "counts.json", Record({}, {}, (count,)))
    for path in ("counts.json", "nothing.json"):
        assert invoke("report", tmp_path / path).exit_code == 2


# --- calibration --------------------------------------------------------------------------------


def test_calibrating_writes_what_the_suite_then_holds_cases_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("tests/perf/thresholds")
    folder.mkdir(parents=True)
    (folder / "h200.toml").write_text(
        """
schema = 1
devices = ["NVIDIA H200"]
threshold = [
    { case = "linear/torchao-tensorwise/compiled/8192x8192x8192", ratio = 1.7, source = "page" },
    { case = "linear/torchao-tensorwise/compiled/8192x16384x128", ratio = 0.5, source = "page" },
    { case = "linear/torchao-tensorwise/compiled/1x2x3", ratio = 1.7, source = "page" },
]
[[source]]
id = "page"
kind = "published"
text = "a page"
link = "https://example.org"
""",
        encoding="utf-8",
    )
    for number, scale in enumerate((0.99, 1.0, 1.01)):
        save_record(tmp_path / f"{number}.json", record(scale))
    done = invoke("calibrate", "0.json", "1.json", "2.json")
    assert done.exit_code == 0, done.output
    assert done.output.splitlines() == [
        "linear/torchao-tensorwise/compiled/8192x8192x8192: 1.7 replaced, it is not reached: 1.5",
        "linear/torchao-tensorwise/compiled/8192x16384x128: 0.5 confirmed: 0.5",
        "tests/perf/thresholds/h200.toml: 2 thresholds measured on NVIDIA H200",
    ]
    known = thresholds.load(folder, GPU).by_case
    wide = known["linear/torchao-tensorwise/compiled/8192x8192x8192"]
    assert (wide.ratio, wide.sd) == (pytest.approx(1.5, rel=1e-3), pytest.approx(0.01, rel=0.02))
    assert wide.source.kind == "measured"
    assert "torch 2.11.0" in wide.source.versions
    assert not wide.provisional
    # what was not measured stays as it was
    assert known["linear/torchao-tensorwise/compiled/1x2x3"].provisional


def test_what_is_no_result_gets_no_threshold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no GPU has thresholds yet
    first, second = record(), record()
    narrow = second.measurements[1]
    void = {**narrow, "value": {**narrow["value"], "ratio": None, "reason": "too hot"}}
    save_record(tmp_path / "0.json", first)
    save_record(tmp_path / "1.json", replace(second, measurements=(second.measurements[0], void)))
    out = tmp_path / "new.toml"
    done = invoke("calibrate", tmp_path / "0.json", tmp_path / "1.json", "--out", out)
    assert "8192x16384x128: no threshold: no result: too hot" in done.output
    assert list(thresholds.read(out)) == ["linear/torchao-tensorwise/compiled/8192x8192x8192"]


def test_of_one_run_the_spread_from_pair_to_pair_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no GPU has thresholds yet
    save_record(tmp_path / "0.json", record(noise=0.02))
    out = tmp_path / "new.toml"
    assert invoke("calibrate", tmp_path / "0.json", "--out", out).exit_code == 0
    known = thresholds.read(out)
    assert len(known) == 2
    for one in record(noise=0.02).measurements:
        assert known[one["name"]].sd == pytest.approx(one["value"]["sd"], rel=0.05)
        assert known[one["name"]].sd > 0
        assert "from pair to pair" in known[one["name"]].source.text


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sd": 0.19}, "it differs by 19% from pair to pair"),
        ({"quantity": "call"}, ""),
        ({"quantity": "call", "waits": True}, "it waits for the host"),
        ({"quantity": "call", "waits": True, "of": "saved bytes"}, ""),
        ({"waits": True}, ""),
    ],
)  # fmt: skip
def test_what_says_nothing_of_the_gpu_gets_no_threshold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (one, *_) = record().measurements
    changes = {**changes}
    share = 0.5 if changes.pop("waits", False) else 0.9
    subject = {**one["value"]["subject"], "device_ms": share, "call_ms": 1.0}
    value = {**one["value"], "subject": subject, **changes}
    save_record(tmp_path / "0.json", Record(ENVIRONMENT, {}, ({**one, "value": value},)))
    done = invoke("calibrate", tmp_path / "0.json", "--out", tmp_path / "new.toml")
    assert done.exit_code == (2 if why else 0)
    assert why in done.output


def test_records_of_different_software_are_refused(tmp_path: Path) -> None:
    save_record(tmp_path / "0.json", record())
    save_record(tmp_path / "1.json", record(torch="2.12.0"))
    done = invoke("calibrate", tmp_path / "0.json", tmp_path / "1.json")
    assert done.exit_code == 2
    assert "different software" in done.output


# --- the difference of two runs -----------------------------------------------------------------


@pytest.mark.parametrize(("scale", "changed"), [(1.0, 0), (0.985, 0), (0.95, 2), (1.05, 2)])
def test_a_speed_has_changed_when_chance_does_not_explain_it(scale: float, changed: int) -> None:
    assert len(compare(record(), record(scale)).changed) == changed


def test_another_verdict_is_a_change() -> None:
    old, new = record(), record()
    one = new.measurements[0]
    flipped = {**one, "value": {**one["value"], "verdict": "REGRESSED"}}
    found = compare(old, replace(new, measurements=(flipped, *new.measurements[1:]))).changed
    assert [(change.old, change.new) for change in found] == [
        ("RECORDED 1.500 [1.500, 1.500]", "REGRESSED 1.500 [1.500, 1.500]")
    ]
