"""Records: what one run measured and the environment it ran in, as one JSON file.

Schema 1::

    {"schema": 1,
     "environment": {"torch": "2.13.0", "cpu": "...", ...},   # text by name
     "laws": {target: {law: values compared}},
     "measurements": [{"target": ..., "test": ..., "name": ..., "kind": ..., "value": ...,
                       "facts": {...}}]}

A measurement's identity is (target, test, name). Its kind says how two are compared: ``hash``,
``bytes``, ``count`` and ``text`` exactly, ``sqnr`` within `SQNR_TOLERANCE_DB`, ``timing`` by
interval and verdict (`fp8.testing.diffing`), ``seconds`` not at all: a time without its conditions
is a note. Infinite and NaN SQNRs are the strings "inf", "-inf" and "nan": JSON has no such numbers.
A timing is an object: `fp8.testing.perf.values` describes it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SCHEMA = 1
KINDS = ("hash", "sqnr", "bytes", "count", "text", "seconds", "timing")

#: What comparing two timings needs of a value.
_TIMING = ("verdict", "ratio", "sd", "pairs", "confidence")

#: Two SQNRs closer than this are the same. Over 900 correct cases an implementation and the
#: oracle differed by at most 0.0034 dB, so two correct ones differ by at most twice that, 0.007;
#: 0.01 is the next round number, half of what the quality law allows (0.02 dB).
SQNR_TOLERANCE_DB = 0.01

#: Packages whose version can change a number.
_PACKAGES = (
    "fp8",
    "torch",
    "torchao",
    "transformer_engine",
    "triton",
    "numpy",
    "ml_dtypes",
    "hypothesis",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
)


class RecordError(ValueError):
    """A file is no record that can be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Record:
    """One run: its environment, what it checked and what it measured.

    Attributes:
        environment: Text by name.
        laws: Values compared, by target and law.
        measurements: As in the file.
    """

    environment: Mapping[str, str]
    laws: Mapping[str, Mapping[str, int]]
    measurements: tuple[Mapping[str, Any], ...]


def measured(value: Any, kind: str) -> str | int | float | dict[str, Any]:
    """The JSON value of a measurement.

    Args:
        value: For ``hash`` a tensor, an array, bytes, or a list of these; for ``sqnr`` a number
            in dB; for ``bytes`` and ``count`` an integer; for ``text`` a string; for ``seconds`` a
            number; for ``timing`` a dictionary of JSON values with a verdict.
        kind: One of `KINDS`.

    Raises:
        ValueError: An unknown kind.
        TypeError: A value that isn't of the kind.
    """
    if kind not in KINDS:
        msg = f"kind must be one of {', '.join(KINDS)}, got {kind!r}"
        raise ValueError(msg)
    if kind == "hash":
        return _digest(value)
    if kind == "text":
        if not isinstance(value, str):
            msg = f"a text must be a str, got {value!r}"
            raise TypeError(msg)
        return value
    if kind == "seconds":
        return float(value)
    if kind == "timing":
        if not isinstance(value, dict) or "verdict" not in value:
            msg = f"a timing must be a dict with a verdict, got {value!r}"
            raise TypeError(msg)
        return value
    if kind == "sqnr":
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"a number of {kind} must be an int, got {value!r}"
        raise TypeError(msg)
    return value


def _digest(value: Any) -> str:
    """Element type, shape and SHA-256 of the bits; every NaN of a format counts as the same."""
    from fp8.testing.comparing import elements

    if isinstance(value, list | tuple):
        joined = "\n".join(_digest(part) for part in value)
        return f"list[{len(value)}] sha256:{hashlib.sha256(joined.encode()).hexdigest()}"
    if isinstance(value, bytes):
        return f"bytes[{len(value)}] sha256:{hashlib.sha256(value).hexdigest()}"
    if value is None:
        return "None"
    data = elements(value)
    bits = data.bits.copy()
    bits[data.nan()] = ~bits.dtype.type(0)
    digest = hashlib.sha256(bits.tobytes()).hexdigest()
    return f"{data.dtype}{list(bits.shape)} sha256:{digest}"


def environment() -> dict[str, str]:
    """What this process runs on: interpreter, machine, packages, torch's build and devices."""
    found = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cpu count": str(os.cpu_count()),
    }
    for name in _PACKAGES:
        version = version_of(name)
        if version is not None:
            found[name] = version
    torch = sys.modules.get("torch")  # no target needed it: then it had no part in this
    if torch is not None:
        found |= _torch_build(torch)
    return found


def version_of(package: str) -> str | None:
    """The installed version of a package, or None; nothing is imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_build(torch: Any) -> dict[str, str]:
    found = {
        "torch git": str(torch.version.git_version),
        "torch CPU capability": torch.backends.cpu.get_cpu_capability(),
        "CUDA of torch": str(torch.version.cuda),
    }
    if torch.cuda.is_available():
        names = Counter(
            torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
        )
        found["GPU"] = ", ".join(f"{count} x {name}" for name, count in sorted(names.items()))
        capability = torch.cuda.get_device_capability()
        found["GPU capability"] = ".".join(map(str, capability))
        found["GPU driver"] = _driver_version()
    return found


def _driver_version() -> str:
    """The version the kernel module gives; NVML would need another package."""
    path = Path("/proc/driver/nvidia/version")
    if not path.is_file():
        return "unknown"
    first = path.read_text(encoding="utf-8").splitlines()[0]
    return next((word for word in first.split() if word[0].isdigit()), "unknown")


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def numbered(measurements: Iterable[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Sort measurements, and number those that share an identity in the order they were made."""
    seen: Counter[tuple[str, str, str]] = Counter()
    result = []
    for one in measurements:
        key = (one["target"], one["test"], one["name"])
        seen[key] += 1
        renamed = one["name"] if seen[key] == 1 else f"{one['name']} #{seen[key]}"
        result.append({**one, "name": renamed})
    # stable: examples stay in the order in which they were drawn
    return tuple(sorted(result, key=lambda one: (one["target"], one["test"])))


def save_record(path: Path, record: Record) -> None:
    """Write a record; readable, and the same bytes for the same record."""
    data = {
        "schema": SCHEMA,
        "environment": dict(record.environment),
        "laws": {target: dict(laws) for target, laws in record.laws.items()},
        "measurements": list(record.measurements),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data, indent=1, allow_nan=False)
    path.write_text(text + "\n", encoding="utf-8")


def load_record(path: Path) -> Record:
    """Read a record.

    Raises:
        RecordError: It can't be read, isn't a record of schema 1, or holds no measurement.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # ValueError: neither UTF-8 nor JSON
        msg = f"{path}: {error}"
        raise RecordError(msg) from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        got = data.get("schema") if isinstance(data, dict) else type(data).__name__
        msg = f"{path}: a record has schema {SCHEMA}, got {got!r}"
        raise RecordError(msg)
    try:
        record = Record(
            environment={str(k): str(v) for k, v in data["environment"].items()},
            laws={t: {law: int(n) for law, n in laws.items()} for t, laws in data["laws"].items()},
            measurements=tuple(_checked(one) for one in data["measurements"]),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        msg = f"{path}: damaged: {type(error).__name__}: {error}"
        raise RecordError(msg) from error
    if not record.measurements:
        msg = f"{path}: holds no measurement, so there is nothing to compare"
        raise RecordError(msg)
    return record


def _checked(one: Mapping[str, Any]) -> Mapping[str, Any]:
    """A measurement as it is in the file, when it has what comparing needs."""
    for key in ("target", "test", "name", "kind", "value"):
        if key not in one:
            raise KeyError(key)
    if one["kind"] not in KINDS:
        msg = f"kind {one['kind']!r}"
        raise ValueError(msg)
    if one["kind"] == "sqnr":
        float(one["value"])
    if one["kind"] == "timing":
        for key in _TIMING:
            if key not in one["value"]:
                raise KeyError(key)
    return one
