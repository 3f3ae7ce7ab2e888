"""The command line: help, exit statuses and what ``fp8 diff`` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result

from fp8.cli import main
from fp8.testing.records import Record, save_record

if TYPE_CHECKING:
    from pathlib import Path


def invoke(*args: object) -> Result:
    """Run ``fp8``, in a terminal wide enough that no cell is folded."""
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, [str(arg) for arg in args])


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Write a record of counts."""

    def write(file: str, torch: str = "2.12.0", **counts: int) -> Path:
        measurements = tuple(
            {"target": "it[x]", "test": "t.py::test[it[x]]", "name": n, "kind": "count", "value": v}
            for n, v in counts.items()
        )
        save_record(tmp_path / file, Record({"torch": torch}, {"it[x]": {"P05": 1}}, measurements))
        return tmp_path / file

    return write


@pytest.mark.parametrize("command", [(), ("diff",)])
def test_help(command: tuple[str, ...]) -> None:
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert "Usage: " in result.output
    for word in ("diff", "Compare two records") if not command else ("Exit status:", "0.01 dB"):
        assert word in result.output


def test_version() -> None:
    assert invoke("--version").output.startswith("fp8, version 0.")


def test_nothing_changed(write: Any) -> None:
    result = invoke("diff", write("a.json", y=3), write("b.json", y=3))
    assert result.exit_code == 0
    assert (
        result.output
        == "PASS: 1 unchanged, 0 changed, 0 missing, 0 new, 0 laws no longer checked\n"
    )


def test_what_changed_is_named_after_the_environment(write: Any) -> None:
    old, new = write("a.json", x=1, y=3, gone=1), write("b.json", "2.13.0", x=1, y=4, born=1)
    result = invoke("diff", old, new)
    assert result.exit_code == 1
    lines = [line.strip() for line in result.output.splitlines()]
    titles = ["environment", "changed", "missing: only in the old record",
              "new: only in the new record"]  # fmt: skip
    assert [line for line in lines if line in titles] == titles
    rows = [line.strip("│ ").replace("│", " ").split() for line in lines if line.startswith("│")]
    assert rows == [
        ["torch", "2.12.0", "2.13.0"],
        ["it[x]", "t.py::test[it[x]]", "y", "count", "3", "4"],
        ["it[x]", "t.py::test[it[x]]", "gone"],
        ["it[x]", "t.py::test[it[x]]", "born"],
    ]
    assert (
        lines[-1] == "CHANGED: 1 unchanged, 1 changed, 1 missing, 1 new, 0 laws no longer checked"
    )


def test_nothing_is_cut_off_in_a_narrow_terminal(write: Any) -> None:
    old, new = write("a.json", y=3, a_long_name_of_a_measurement=1), write("b.json", y=3)
    result = CliRunner(env={"COLUMNS": "40"}).invoke(main, ["diff", str(old), str(new)])
    assert result.exit_code == 1
    cells = [line.split("│")[-2] for line in result.output.splitlines() if line.startswith("│")]
    assert "".join(cell.strip() for cell in cells) == "a_long_name_of_a_measurement"


def test_unusable_files(write: Any, tmp_path: Path) -> None:
    good, empty, text = write("a.json", y=3), write("empty.json"), tmp_path / "text.json"
    text.write_text("no record", encoding="utf-8")
    for bad, message in ((empty, "holds no measurement"), (text, "text.json: Expecting value"),
                         (tmp_path / "none.json", "No such file")):  # fmt: skip
        for files in ((good, bad), (bad, good)):
            result = invoke("diff", *files)
            assert result.exit_code == 2
            assert message in result.output


def test_usage() -> None:
    result = invoke("diff", "only-one.json")
    assert result.exit_code == 2
    assert "Missing argument 'NEW.json'" in result.output
