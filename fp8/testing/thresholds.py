"""How fast each case must be on a GPU, against bfloat16: a file of thresholds for each.

A ratio is the time in bfloat16 over the time in float8, both in the same mode (eager or compiled)
and in the same run: absolute times are not comparable between machines, ratios are. ::

    schema = 1
    devices = ["NVIDIA H200"]            # torch.cuda.get_device_name(), exactly
    threshold = [
        { case = "linear/torchao-rowwise/compiled/8192x8192x8192", ratio = 1.3, sd = 0.01, source = "calibration" },
    ]

    [[source]]
    id = "calibration"
    kind = "measured"                    # see fp8.claims.Provenance
    ...

A case's name is ``linear/TARGET-RECIPE/MODE/MxKxN``, ``step/SCENARIO/TARGET-RECIPE/MODE/GRADIENT``
or another that `fp8.testing.perf.benches` gives; casts have a copy in bfloat16's place.
`ratio` is what the source has; `Threshold.floor` is what a case is held to. What was not measured
by this suite is *provisional*: it is reported and fails nothing.
"""  # noqa: E501 - one entry is one line

from __future__ import annotations

import json
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fp8 import claims
from fp8.claims import ClaimError, Provenance

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

#: What a case may lose before it fails: 5 %, for less is the difference between two machines (bf16
#: products of one shape ran at 769 to 798 TFLOP/s over several H200s), or three standard deviations
#: of that case's own log-ratio where it is noisier: 1 false alarm in 700 if normal.
_MARGIN = 0.05
_DEVIATIONS = 3


@dataclass(frozen=True, slots=True)
class Threshold:
    """What one case must reach.

    Attributes:
        case: The case's name.
        ratio: The time in bfloat16 over that in float8, as the source has it.
        source: Where the ratio comes from.
        sd: The standard deviation of the case's log-ratio between runs; 0 where it is not known.
        provisional: Whether to report only.
    """

    case: str
    ratio: float
    source: Provenance
    sd: float = 0.0
    provisional: bool = False

    @property
    def margin(self) -> float:
        """The share of the ratio that a case may lose."""
        return max(_MARGIN, _DEVIATIONS * self.sd)

    @property
    def floor(self) -> float:
        """The least ratio that passes."""
        return self.ratio * (1 - self.margin)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What is known of one GPU; nothing, where nobody measured.

    Attributes:
        device: The GPU, as torch names it.
        path: The file; None where there is none for this GPU.
        by_case: By the case's name.
    """

    device: str
    path: Path | None
    by_case: Mapping[str, Threshold]

    def __str__(self) -> str:
        """One line for the summary."""
        if self.path is None:
            return (
                f"{self.device} has no thresholds: everything runs and is recorded, nothing is "
                "gated; `fp8 calibrate` measures this GPU and writes its file"
            )
        provisional = sum(t.provisional for t in self.by_case.values())
        return (
            f"{self.device}: {len(self.by_case)} thresholds, {provisional} of them provisional "
            f"({self.path.name})"
        )


def load(folder: Path, device: str) -> Thresholds:
    """The thresholds for a GPU, from the one file of `folder` that names it.

    device: as torch names it. Raises ClaimError when a file is wrong, or two name this GPU.
    """
    files = {path: _devices(path) for path in sorted(folder.glob("*.toml"))}
    own = [path for path, devices in files.items() if device in devices]
    if len(own) > 1:
        raise ClaimError(f"{device} is in {own[0].name} and in {own[1].name}: needs one file")
    return Thresholds(device, own[0] if own else None, read(own[0]) if own else {})


def read(path: Path) -> Mapping[str, Threshold]:
    """The thresholds of a file by their cases. Raises ClaimError."""
    data = _file(path)
    sources = {}
    for table, where in claims.entries(data, "source", path):
        rest = {key: value for key, value in table.items() if key != "id"}
        sources[table.get("id")] = claims.provenance(rest, where)
    tables = claims.entries(data, "threshold", path, id_key="case")
    found = [_threshold(table, where, sources) for table, where in tables]
    return MappingProxyType({threshold.case: threshold for threshold in found})


def _file(path: Path) -> dict[str, Any]:
    return claims.read(path, "devices", "threshold", "source")


def _devices(path: Path) -> list[str]:
    devices = _file(path).get("devices")
    if not isinstance(devices, list) or not devices or not all(isinstance(d, str) for d in devices):
        raise ClaimError(f"{path}: devices must be a list of names, got {devices!r}")
    return devices


def _threshold(
    table: dict[str, Any], where: str, sources: Mapping[str | None, Provenance]
) -> Threshold:
    claims.checked(
        table,
        where,
        {"case": str, "ratio": float, "source": str},
        {"sd": float, "provisional": bool},
    )
    if table["source"] not in sources:
        raise ClaimError(f"{where}: source {table['source']!r} is unknown: write a [[source]]")
    if table["ratio"] <= 0:
        raise ClaimError(f"{where}: ratio must be positive, got {table['ratio']}")
    if not 0 <= table.get("sd", 0) < 1 / _DEVIATIONS:
        raise ClaimError(f"{where}: sd must be from 0 to below a third, got {table['sd']}")
    source = sources[table["source"]]
    measured = source.kind == "measured"
    provisional = table.get("provisional", not measured)
    if not (measured or provisional):
        raise ClaimError(f"{where}: is {source.kind}, so it is provisional: measure it first")
    return Threshold(**{**table, "source": source, "provisional": provisional})


def text(device: str, thresholds: Iterable[Threshold]) -> str:
    """The file of one GPU; `load` of it gives the thresholds back."""
    kept = list(thresholds)
    sources = list(dict.fromkeys(threshold.source for threshold in kept))
    ids = {source: f"{source.kind}-{number}" for number, source in enumerate(sources, start=1)}
    lines = ["schema = 1", f"devices = [{_string(device)}]", "threshold = ["]
    for one in kept:
        entry = f"case = {_string(one.case)}, ratio = {one.ratio:.4g}"
        entry += f", sd = {one.sd:.2g}" if one.sd else ""
        entry += f", source = {_string(ids[one.source])}"
        entry += ", provisional = true" if one.provisional else ""
        lines.append(f"    {{ {entry} }},")
    lines.append("]")
    for source in sources:
        told = {"id": ids[source], "kind": source.kind, "text": source.text, "link": source.link}
        told["versions"] = source.versions
        lines += ["", "[[source]]"]
        lines += [f"{name} = {_string(value)}" for name, value in told.items() if value]
        lines += [f"date = {source.date}"] if source.date is not None else []
    return "\n".join(lines) + "\n"


def _string(value: str) -> str:
    """A TOML string: JSON's escapes are among TOML's."""
    return json.dumps(value, ensure_ascii=False)
