"""The file of captured operands: what goes in comes out, and what is no such file is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fp8.testing.capture import capture
from fp8.testing.captured import (
    Captured,
    CapturedFileError,
    layer_names,
    load,
    read_metadata,
    save,
)

SAMPLE = Path(__file__).parents[1] / "numerics" / "data" / "minilm.safetensors"


def operands(tokens=4, inputs=5, outputs=3, dtype=torch.bfloat16):
    shapes = ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    return Captured(*(torch.randn(shape).to(dtype) for shape in shapes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_round_trip(tmp_path, dtype):
    layers = {"b.0": operands(dtype=dtype), "a": operands(2, 7, 6, dtype=dtype)}
    paths = [tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
    for path in paths:
        save(layers, path, {"model": "mine", "licence": "BSD"})
    loaded = load(str(paths[0]))
    assert list(loaded) == ["a", "b.0"] == layer_names(paths[0])
    for name, layer in layers.items():
        for tensor in ("x", "w", "g"):
            assert torch.equal(getattr(loaded[name], tensor), getattr(layer, tensor))
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert read_metadata(paths[0]) == {"schema": "1", "model": "mine", "licence": "BSD"}


def test_a_file_made_by_other_means(tmp_path):
    path = tmp_path / "other.safetensors"
    x, w, g = torch.randn(2, 3, 5), torch.randn(7, 5), torch.randn(2, 3, 7)
    save_file({"layer.x": x, "layer.w": w, "layer.g": g}, path)
    layer = load(path)["layer"]
    assert torch.equal(layer.x, x.reshape(6, 5))
    assert torch.equal(layer.g, g.reshape(6, 7))
    assert read_metadata(path) == {}


def test_capture_writes_the_file(tmp_path):
    path = tmp_path / "captured.safetensors"
    recording = capture(
        nn.Linear(5, 3), lambda model: model(torch.randn(4, 5)).sum(), path, metadata={"seed": "0"}
    )
    assert torch.equal(load(path)["linear"].g, recording.layers["linear"].g)
    assert read_metadata(path)["seed"] == "0"


def nan_at(tensor: torch.Tensor) -> torch.Tensor:
    tensor[0, 0] = torch.nan
    return tensor


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a.g": None}, ["a:", "got .x and .w without .g"]),
        ({"a.x": None, "a.w": None}, ["a:", "got .g without .x and .w"]),
        ({"a.weight": torch.ones(3, 5)}, ["a.weight", "ends in .x, .w or .g"]),
        ({"x": torch.ones(3, 5)}, ["x:", "ends in .x, .w or .g"]),
        ({"a.w": torch.ones(3, 6).bfloat16()}, ["x (4, 5), w (3, 6), g (4, 3)", "(N, K)"]),
        ({"a.g": torch.ones(4, 5).bfloat16()}, ["x (4, 5), w (3, 5), g (4, 5)"]),
        ({"a.x": torch.ones(5).bfloat16()}, ["x (5,)", "(..., K)"]),
        ({"a.g": torch.ones(4, 3)}, [".x bfloat16, .w bfloat16, .g float32", "for all three"]),
        (
            {f"a.{name}": torch.ones(2, 2).double() for name in "xwg"},
            [".x F64", "bfloat16, float16, float32"],
        ),
        (
            {"a.x": torch.ones(0, 5).bfloat16(), "a.g": torch.ones(0, 3).bfloat16()},
            ["x (0, 5)", "at least one token"],
        ),
        ({"a.w": nan_at(torch.ones(3, 5)).bfloat16()}, ["a: w has 1 of 15 values", "not finite"]),
    ],
)
def test_bad_files_are_refused(tmp_path, change, words):
    path = tmp_path / "bad.safetensors"
    good = operands()
    tensors = {"a.x": good.x, "a.w": good.w, "a.g": good.g, **change}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    with pytest.raises(CapturedFileError) as caught:
        load(path)
    for word in ("bad.safetensors", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not a file of tensors", b"\2" + b"\0" * 7 + b"[]"])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "note.txt"
    path.write_bytes(content)
    with pytest.raises(CapturedFileError, match=r"note\.txt: is no safetensors file"):
        layer_names(path)


def test_a_file_without_tensors_and_a_missing_one(tmp_path):
    path = tmp_path / "empty.safetensors"
    save_file({}, path)
    with pytest.raises(CapturedFileError, match="got no tensors"):
        load(path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.safetensors")


def test_save_refuses_what_load_would(tmp_path):
    bad = Captured(torch.ones(4, 5), torch.ones(3, 6), torch.ones(4, 3))
    with pytest.raises(ValueError, match=r"'a': got shapes x \(4, 5\), w \(3, 6\)"):
        save({"a": bad}, tmp_path / "bad.safetensors")
    with pytest.raises(ValueError, match="got none"):
        save({}, tmp_path / "bad.safetensors")
    assert not list(tmp_path.iterdir())


def test_without_safetensors(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    called = []
    with pytest.raises(ModuleNotFoundError, match="pip install safetensors"):
        capture(nn.Linear(5, 3), called.append, tmp_path / "captured.safetensors")
    assert not called  # it is said before the work, not after it
    with pytest.raises(ModuleNotFoundError, match="pip install safetensors"):
        load(SAMPLE)


def test_names_are_read_without_torch():
    code = (
        "import sys; from fp8.testing.captured import layer_names; "
        f"print(layer_names({str(SAMPLE)!r})); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "encoder.layer.3.output.dense" in done.stdout


def test_the_shipped_sample():
    assert SAMPLE.stat().st_size < 4_000_000
    assert read_metadata(SAMPLE)["license"] == "Apache-2.0"
    shapes = {name: (*layer.x.shape, len(layer.w)) for name, layer in load(SAMPLE).items()}
    assert shapes == {
        "encoder.layer.3.attention.self.value": (128, 384, 384),
        "encoder.layer.3.intermediate.dense": (128, 384, 1536),
        "encoder.layer.3.output.dense": (128, 1536, 384),
    }
