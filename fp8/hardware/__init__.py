"""What each GPU can do: its peaks, and what was measured to be within reach, one TOML file a GPU.

A file names the devices that it is for, as torch does, and holds figures with their sources::

    schema = 1
    devices = ["NVIDIA H200"]            # torch.cuda.get_device_name(), exactly

    [[figure]]
    id = "bf16"                          # one of FIGURES
    value = 989.4                        # in its unit
    source = { kind = "published", text = "...", link = "https://..." }

Figures are of dense matrices: data sheets print twice as much, "with sparsity".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fp8 import claims
from fp8.claims import ClaimError, Provenance

if TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.resources.abc import Traversable

#: What a figure may be, with its unit. "sustained" is the measured ceiling: what large products of
#: random operands reach while the power cap holds the clocks down, bf16 and float8 interleaved, so
#: that their ratio is right. A cool GPU exceeds it for a while, but never the peak.
FIGURES: Mapping[str, str] = MappingProxyType(
    {
        "bf16": "TFLOP/s",
        "fp8": "TFLOP/s",
        "bandwidth": "TB/s",
        "cache": "MB",
        "processors": "",
        "power": "W",
        "bf16 sustained": "TFLOP/s",
        "fp8 sustained": "TFLOP/s",
        "bandwidth sustained": "TB/s",
    }
)
#: What every file must have; the others come with the first measurement.
_NEEDED = ("bf16", "fp8", "bandwidth", "cache", "processors", "power")


@dataclass(frozen=True, slots=True)
class Figure:
    """One number and its source; its unit is in `FIGURES`."""

    value: float
    source: Provenance


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU.

    Attributes:
        id: The file's name without its suffix, such as "h200".
        devices: The names by which torch reports it.
        figures: By the names of `FIGURES`. "cache" is the last level before the memory: what a
            benchmark's operands must exceed to be read from memory.
    """

    id: str
    devices: tuple[str, ...]
    figures: Mapping[str, Figure]

    def peak(self, name: str) -> float:
        """A figure's value, in SI units: FLOP/s, B/s, B, W."""
        return self.figures[name].value * _SI[FIGURES[name]]

    def sustained(self, name: str) -> float:
        """What was measured of "bf16", "fp8" or "bandwidth", or else the peak; in SI units."""
        measured = f"{name} sustained"
        return self.peak(measured if measured in self.figures else name)


_SI = {"TFLOP/s": 1e12, "TB/s": 1e12, "MB": 1e6, "": 1.0, "W": 1.0}


@cache
def load_all() -> Mapping[str, Hardware]:
    """Every GPU by its id. Raises ClaimError when a file is wrong or two name one device."""
    folder = resources.files("fp8.hardware")
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    found = {hardware.id: hardware for hardware in map(load, files)}
    owners: dict[str, str] = {}
    for hardware in found.values():
        for device in hardware.devices:
            if owners.setdefault(device, hardware.id) != hardware.id:
                raise ClaimError(f"device {device!r} is in {owners[device]} and in {hardware.id}")
    return MappingProxyType(found)


def find(device: str) -> Hardware | None:
    """The GPU that torch reports as `device` (torch.cuda.get_device_name()), or None."""
    return next((h for h in load_all().values() if device in h.devices), None)


def load(path: Traversable) -> Hardware:
    """One hardware file. Raises ClaimError."""
    data = claims.read(path, "devices", "figure")
    devices = data.get("devices")
    if not isinstance(devices, list) or not devices or not all(isinstance(d, str) for d in devices):
        raise ClaimError(f"{path}: devices must be a list of names, got {devices!r}")
    figures = {
        table["id"]: _figure(table, where)
        for table, where in claims.entries(data, "figure", path)
        if claims.checked(table, where, {"id": str, "value": float, "source": dict})
    }
    missing = [name for name in _NEEDED if name not in figures]
    if missing:
        raise ClaimError(f"{path}: figures are missing: {', '.join(missing)}")
    return Hardware(path.name.removesuffix(".toml"), tuple(devices), MappingProxyType(figures))


def _figure(table: Mapping[str, Any], where: str) -> Figure:
    if table["id"] not in FIGURES:
        raise ClaimError(f"{where}: unknown figure; known: {', '.join(FIGURES)}")
    if table["value"] <= 0:
        raise ClaimError(f"{where}: value must be positive, got {table['value']}")
    return Figure(table["value"], claims.provenance(table["source"], f"{where}: source"))
