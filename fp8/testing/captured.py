"""The file format of captured operands: what it holds, how it is written, read and refused.

A safetensors file with three tensors a layer: `NAME.x` input (M, K), `NAME.w` weight (N, K) and
`NAME.g` grad_output (M, N). Names and shapes are read from its header, without torch, so that
pytest can collect the layers of a large file for nothing.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

#: what a layer's tensors are called after its name
SUFFIXES = ("x", "w", "g")
#: safetensors' names of the dtypes that float8 training computes in
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
#: One entry for all metadata: safetensors writes several in random order, and the same capture
#: should give the same file.
_METADATA_KEY = "fp8_capture"
#: safetensors refuses longer headers too
_LONGEST_HEADER = 100_000_000


class CapturedFileError(ValueError):
    """A file of captured operands that cannot be used; the message names file and tensor."""


@dataclass(frozen=True, eq=False)
class Captured:
    """One layer's operands: x (M, K), w (N, K), g (M, N), on the CPU and of one dtype."""

    x: Tensor
    w: Tensor
    g: Tensor

    @property
    def dtype(self) -> str:
        """The name of their dtype, e.g. "bfloat16"."""
        return str(self.x.dtype).removeprefix("torch.")

    @property
    def nbytes(self) -> int:
        """What the three take in memory, and in a file."""
        return self.x.nbytes + self.w.nbytes + self.g.nbytes

    def obstacle(self) -> str | None:
        """Why these are no operands of one linear layer, or None."""
        problem = _shape_problem(*(tuple(t.shape) for t in (self.x, self.w, self.g)))
        if problem is not None:
            return problem
        for name, tensor in zip(SUFFIXES, (self.x, self.w, self.g), strict=True):
            bad = int((~tensor.isfinite()).sum())
            if bad:
                return f"{name} has {bad} of {tensor.numel()} values that are not finite"
        return None

    def __str__(self) -> str:
        tokens, width = self.x.shape
        return f"{tokens} tokens, {width} -> {len(self.w)}, {self.dtype}, {self.nbytes:,} bytes"


def save(
    layers: Mapping[str, Captured], path: str | Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write captured layers to a safetensors file, with `metadata` to say where they come from.

    The same layers and metadata give the same bytes. Raises ValueError for a layer whose operands
    do not fit each other and for no layers at all; ModuleNotFoundError without safetensors.
    """
    if not layers:
        raise ValueError("layers: got none, needs one or more")
    tensors = {}
    for name, layer in layers.items():
        problem = layer.obstacle()
        if problem is not None:
            raise ValueError(f"layers: {name!r}: {problem}")
        for suffix in SUFFIXES:
            tensors[f"{name}.{suffix}"] = getattr(layer, suffix).contiguous()
    # Not save_file, which makes the file with permissions for its owner alone.
    text = json.dumps({"schema": "1", **(metadata or {})}, sort_keys=True)
    Path(path).write_bytes(require_safetensors().save(tensors, metadata={_METADATA_KEY: text}))


def load(path: str | Path) -> dict[str, Captured]:
    """Read captured layers, by name, in the order of their names.

    A file made by other means will do if the names of its tensors end in `.x`, `.w` and `.g`, the
    three of a layer are of one dtype (bfloat16, float16 or float32), and their shapes are
    (..., K), (N, K) and (..., N); leading dimensions are flattened to tokens.

    Raises FileNotFoundError; CapturedFileError that names the tensor (a missing partner, a wrong
    shape or dtype, a value that is not finite); ModuleNotFoundError without safetensors.
    """
    path = Path(path)
    names = layer_names(path)
    tensors = require_safetensors().load_file(path)
    layers = {}
    for name in names:
        x, w, g = (tensors[f"{name}.{suffix}"] for suffix in SUFFIXES)
        layers[name] = Captured(x.flatten(0, -2), w, g.flatten(0, -2))
        problem = layers[name].obstacle()
        if problem is not None:
            raise CapturedFileError(f"{path}: {name}: {problem}")
    return layers


def layer_names(path: str | Path) -> list[str]:
    """The layers of a file, sorted, after the checks that need no values. Imports no torch.

    Raises FileNotFoundError and CapturedFileError, as `load`.
    """
    path = Path(path)
    entries = _header(path)
    entries.pop("__metadata__", None)
    layers: dict[str, dict[str, Any]] = {}
    for key, entry in entries.items():
        name, _, suffix = key.rpartition(".")
        if suffix not in SUFFIXES or not name:
            raise CapturedFileError(f"{path}: {key}: needs a name that ends in .x, .w or .g")
        layers.setdefault(name, {})[suffix] = entry
    if not layers:
        raise CapturedFileError(f"{path}: got no tensors, needs NAME.x, NAME.w and NAME.g")
    for name, parts in layers.items():
        problem = _entry_problem(parts)
        if problem is not None:
            raise CapturedFileError(f"{path}: {name}: {problem}")
    return sorted(layers)


def read_metadata(path: str | Path) -> dict[str, str]:
    """What `save` was told about where the operands come from; empty for other files."""
    metadata = _header(Path(path)).get("__metadata__", {})
    found: dict[str, str] = json.loads(metadata.get(_METADATA_KEY, "{}"))
    return found


def _entry_problem(parts: Mapping[str, Any]) -> str | None:
    """What is wrong with a layer's header entries, or None."""
    missing = [f".{suffix}" for suffix in SUFFIXES if suffix not in parts]
    if missing:
        found = " and ".join(f".{suffix}" for suffix in SUFFIXES if suffix in parts)
        return f"got {found} without {' and '.join(missing)}, needs all of .x, .w and .g"
    dtypes = [parts[suffix]["dtype"] for suffix in SUFFIXES]
    if dtypes[0] not in _DTYPES or len(set(dtypes)) > 1:
        got = ", ".join(f".{s} {_DTYPES.get(d, d)}" for s, d in zip(SUFFIXES, dtypes, strict=True))
        return f"got dtypes {got}, needs one of {', '.join(_DTYPES.values())} for all three"
    return _shape_problem(*(tuple(parts[suffix]["shape"]) for suffix in SUFFIXES))


def _shape_problem(x: tuple[int, ...], w: tuple[int, ...], g: tuple[int, ...]) -> str | None:
    if len(x) < 2 or len(w) != 2 or x[-1] != w[1] or g != (*x[:-1], w[0]):
        return f"got shapes x {x}, w {w}, g {g}, needs (..., K), (N, K), (..., N)"
    if 0 in x or 0 in w:
        return f"got shapes x {x}, w {w}, g {g}, needs at least one token, input and output"
    return None


def _header(path: Path) -> dict[str, Any]:
    """The JSON at the head of a safetensors file: a little-endian uint64 length, then the text."""
    with path.open("rb") as file:
        length = file.read(8)
        size = struct.unpack("<Q", length)[0] if len(length) == 8 else _LONGEST_HEADER + 1
        text = file.read(size) if size <= _LONGEST_HEADER else b""
    try:
        header = json.loads(text)
    except ValueError:  # UnicodeDecodeError and JSONDecodeError are both
        header = None
    if not isinstance(header, dict):
        raise CapturedFileError(f"{path}: is no safetensors file")
    return header


def require_safetensors() -> Any:
    """The module safetensors.torch. Raises ModuleNotFoundError that says what to install."""
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "captured operands are kept in safetensors files: pip install safetensors",
            name="safetensors",
        ) from error
    return safetensors.torch
