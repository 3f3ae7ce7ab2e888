"""``fp8 capture``: the example of its help, its options, and what it says of mistakes."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fp8.commands.capture import capture as command
from fp8.testing.captured import load, read_metadata


@pytest.fixture
def example(tmp_path, monkeypatch):
    """The example of --help, as mine.py in the current folder; a function that runs the command."""
    text = inspect.cleandoc(command.callback.__doc__)  # 3.13 has taken the indent off, 3.12 not
    indented = text[text.index("  import torch") : text.index("the first command")]
    lines = [line.removeprefix("  ") for line in indented.splitlines() if line != "\b"]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments, batch="mine:batch"):
        spec = ["--model", "mine:build", "--batch", batch, "--out", "mine.safetensors"]
        return CliRunner().invoke(command, [*spec, *arguments])

    yield run
    sys.modules.pop("mine", None)


def test_command_runs_the_example_of_its_help(example):
    done = example()
    assert done.exit_code == 0, done.output
    layers = load("mine.safetensors")
    assert {n: (*layer.x.shape, len(layer.w)) for n, layer in layers.items()} == {
        "0": (128, 64, 256),
        "2": (128, 256, 48),
    }
    size = Path("mine.safetensors").stat().st_size
    assert "2 layers captured" in done.output
    assert done.output.count(" 128 ") == 2  # tokens
    assert f"mine.safetensors: {size:,} bytes" in done.output
    assert "pytest tests/numerics/test_tensors.py --fp8-tensors=mine.safetensors" in done.output
    assert read_metadata("mine.safetensors")["batch"] == "mine:batch"


def test_help_keeps_the_lines_of_the_example():
    lines = [line.strip() for line in CliRunner().invoke(command, ["--help"]).output.splitlines()]
    assert "def batch(model):" in lines
    assert "pytest tests/numerics/test_tensors.py --fp8-tensors=mine.safetensors" in lines


def test_command_options(example):
    assert example("--layers", "2", "--max-tokens", "7", "--dtype", "float32").exit_code == 0
    layers = load("mine.safetensors")
    assert list(layers) == ["2"]
    assert (layers["2"].dtype, len(layers["2"].x)) == ("float32", 7)


def test_command_is_reproducible(example):
    example()
    first = Path("mine.safetensors").read_bytes()
    example()
    assert Path("mine.safetensors").read_bytes() == first
    example("--seed", "1")
    assert Path("mine.safetensors").read_bytes() != first


@pytest.mark.parametrize(
    ("arguments", "batch", "words"),
    [
        ([], "mine", ["--batch", "'mine'", "package.module:name"]),
        ([], "mine:other", ["--batch", "mine:other", "no attribute"]),
        ([], "nowhere:batch", ["--batch", "nowhere:batch", "No module named"]),
        ([], "mine:torch.nn", ["--batch", "module", "needs a function"]),
        (["--model", "mine:torch.get_rng_state"], "mine:batch", ["--model", "Tensor"]),
        (["--layers", "9"], "mine:batch", ["matched none", "0, 2"]),
        (["--out", "no/where.safetensors"], "mine:batch", ["--out", "no folder no"]),
        (["--max-tokens", "0"], "mine:batch", ["--max-tokens"]),
        ([], "mine:torch.nn.Module.parameters", ["run: returned generator", "loss"]),
    ],
)
def test_command_says_what_is_wrong(example, arguments, batch, words):
    done = example(*arguments, batch=batch)
    assert done.exit_code in (1, 2)
    assert not Path("mine.safetensors").exists()
    for word in words:
        assert word in done.output


def test_command_shows_the_models_own_errors(example):
    done = example(batch="mine:build")
    assert isinstance(done.exception, TypeError)
    assert "build() takes 0 positional arguments" in str(done.exception)
