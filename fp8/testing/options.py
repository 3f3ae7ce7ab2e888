"""The plug-in's options: what each means, where it comes from, and how to give it again.

Every option has an ini twin with underscores (``--fp8-target`` is ``fp8_target``); the command
line wins. None is read from the environment: a run is what its command line and its ini file say.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

DEVICES = ("cpu", "cuda")
PROFILES = ("quick", "default", "nightly")
DEFAULT_TARGETS = ("reference[emulated]", "reference[torch]")


class _Option(NamedTuple):
    name: str
    metavar: str
    repeatable: bool
    help: str

    @property
    def ini(self) -> str:
        return "fp8_" + self.name

    @property
    def flag(self) -> str:
        return "--fp8-" + self.name


_OPTIONS = (
    _Option(
        "target",
        "TARGET",
        True,
        "Judge this implementation: a known name or package.module:object. Repeatable. "
        f"Default: {' and '.join(DEFAULT_TARGETS)}.",
    ),
    _Option("device", "DEVICE", False, "Where the tensors are: cpu (default) or cuda."),
    _Option(
        "profile",
        "PROFILE",
        False,
        "How many examples: quick, default or nightly (ten times the default, and slow tests).",
    ),
    _Option(
        "seed",
        "N",
        False,
        "Draw other examples: seeds Hypothesis and the tensors, and turns derandomisation off.",
    ),
    _Option(
        "plant",
        "MODULE:FAULT",
        False,
        "Plant a fault around every test: package.module:fault names a callable without "
        "arguments that returns a context manager.",
    ),
    _Option(
        "expectations",
        "FILE",
        False,
        "Known deviations of the targets, in TOML: they are counted, not failed.",
    ),
    _Option("record", "FILE", False, "Write what was measured, and where, to this JSON file."),
    _Option(
        "tensors",
        "FILE",
        True,
        "Also judge on operands captured from a model, in a .safetensors file. Repeatable.",
    ),
    _Option(
        "budget",
        "MINUTES",
        False,
        "Tests of speed begin no bench any more after so many minutes; the most informative ones "
        "come first.",
    ),
)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one session, read and checked.

    Attributes:
        targets: What ``--fp8-target`` said, without repetition.
        device: ``cpu`` or ``cuda``.
        profile: ``quick``, ``default`` or ``nightly``.
        seed: As given; None means derandomised.
        plant: ``package.module:fault``, or None.
        expectations: The file of known deviations, or None.
        record: Where to write the record, or None.
        tensors: Files of captured operands.
        budget: Minutes for the tests of speed, or None for no limit.
        asked: Whether anybody asked for this plug-in, by option or ini file.
        given: Flags and values from the command line, to be given again.
    """

    targets: tuple[str, ...] = DEFAULT_TARGETS
    device: str = "cpu"
    profile: str = "default"
    seed: int | None = None
    plant: str | None = None
    expectations: Path | None = None
    record: Path | None = None
    tensors: tuple[Path, ...] = ()
    budget: float | None = None
    asked: bool = False
    given: tuple[tuple[str, str], ...] = ()

    @property
    def base_seed(self) -> int:
        """The base of the tensors' seeds."""
        return 0 if self.seed is None else self.seed

    def command(self, nodeid: str, target: str | None) -> str:
        """One line that runs one test again, with the options that aren't the default.

        Args:
            nodeid: The test.
            target: What ``--fp8-target`` says for the target at hand.
        """
        plain = not set(nodeid) & set('"$`\\!')
        words = ["python -m pytest", f'"{nodeid}"' if plain else shlex.quote(nodeid)]
        if target is not None and any(flag == "--fp8-target" for flag, _ in self.given):
            words.append(f"--fp8-target={shlex.quote(target)}")
        words += [
            f"{flag}={shlex.quote(value)}"
            for flag, value in self.given
            if flag not in {"--fp8-target", "--fp8-record"}
        ]
        return " ".join(words)


def add_options(parser: pytest.Parser) -> None:
    """Add the option group and the ini twins."""
    group = parser.getgroup("fp8", "fp8: judge a float8 implementation")
    for option in _OPTIONS:
        group.addoption(
            option.flag,
            dest=option.ini,
            metavar=option.metavar,
            action="append" if option.repeatable else "store",
            default=None,
            help=option.help.replace("%", "%%"),
        )
        kind: Literal["linelist", "string"] = "linelist" if option.repeatable else "string"
        parser.addini(option.ini, f"{option.flag}: {option.help}", type=kind, default=None)


def read_options(config: pytest.Config) -> Options:
    """Read the options and check all that can be checked without loading a target.

    Raises:
        pytest.UsageError: A value that isn't known, naming those that are; a missing file.
    """
    line: dict[str, Sequence[str]] = {}
    ini: dict[str, Sequence[str]] = {}
    for option in _OPTIONS:
        given, preset = config.getoption(option.ini), config.getini(option.ini)
        for source, value in ((line, given), (ini, preset)):
            if value is not None:
                source[option.name] = value if isinstance(value, list) else [str(value)]
    chosen = {**ini, **line}

    def one(name: str) -> str | None:
        return chosen[name][0] if name in chosen else None

    def paths(name: str) -> tuple[Path, ...]:
        base = config.invocation_params.dir if name in line else _ini_folder(config)
        return tuple(base / value for value in chosen.get(name, ()))

    files = {name: paths(name) for name in ("expectations", "record", "tensors")}
    for name in ("expectations", "tensors"):
        for path in files[name]:
            if not path.is_file():
                msg = f"--fp8-{name}: there is no file {path}"
                raise pytest.UsageError(msg)
    return Options(
        targets=tuple(dict.fromkeys(chosen.get("target", DEFAULT_TARGETS))),
        device=_known("device", one("device") or "cpu", DEVICES),
        profile=_known("profile", one("profile") or "default", PROFILES),
        seed=_integer(one("seed")),
        plant=one("plant"),
        expectations=next(iter(files["expectations"]), None),
        record=next(iter(files["record"]), None),
        tensors=files["tensors"],
        budget=_minutes(one("budget")),
        asked=bool(chosen),
        given=tuple((f"--fp8-{name}", value) for name in line for value in line[name]),
    )


def _ini_folder(config: pytest.Config) -> Path:
    return config.inipath.parent if config.inipath is not None else config.rootpath


def _known(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        msg = f"--fp8-{name}: {value!r} is unknown; known: {', '.join(known)}"
        raise pytest.UsageError(msg)
    return value


def _integer(value: str | None) -> int | None:
    if value is None:
        return None
    try:
        return int(value)
    except ValueError:
        msg = f"--fp8-seed: must be an integer, got {value!r}"
        raise pytest.UsageError(msg) from None


def _minutes(value: str | None) -> float | None:
    if value is None:
        return None
    try:
        minutes = float(value)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        msg = f"--fp8-budget: must be a number of minutes above 0, got {value!r}"
        raise pytest.UsageError(msg)
    return minutes
