"""One session's state: its options, the targets it loaded, what it counted, and what that means."""

from __future__ import annotations

import datetime as dt
import platform
from typing import TYPE_CHECKING, Any

import pytest

from fp8.claims import VERSION_FACTS, ClaimError
from fp8.testing.expectations import Expectation, Expectations, load_expectations
from fp8.testing.records import Record, environment, numbered, save_record, version_of
from fp8.testing.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fp8.targets.base import Target
    from fp8.testing.laws import Judge
    from fp8.testing.options import Options


class Session:
    """What the plug-in's hooks share.

    Args:
        options: What was asked for.

    Raises:
        pytest.UsageError: The expectations file can't be used.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.tally = Tally()
        self._targets: dict[str, Target] = {}
        self._facts: dict[str, object] | None = None
        self.expectations = Expectations()
        if options.expectations is not None:
            try:
                self.expectations = load_expectations(options.expectations)
            except ClaimError as error:
                raise pytest.UsageError(str(error)) from error

    @property
    def used(self) -> bool:
        """Whether there is anything to say.

        Targets of the ini file don't count: a project that presets them has tests without any.
        """
        return bool(self.options.given or self.tally.targets)

    @property
    def expired(self) -> tuple[Expectation, ...]:
        """The expectations of chosen targets that are past their date."""
        today = dt.datetime.now(tz=dt.UTC).date()
        chosen = self.options.targets
        return tuple(e for e in self.expectations.expired(today) if e.target in chosen)

    def load_targets(self) -> None:
        """Load every chosen target.

        Raises:
            pytest.UsageError: An unknown target, or one that can't be loaded here; no GPU.
        """
        for spec in self.options.targets:
            self.target(spec)

    def target(self, spec: str) -> Target:
        """A chosen target, loaded at its first use. Raises as `load_targets`."""
        if spec not in self._targets:
            from fp8.targets import UnknownTargetError, known, load

            _check_device(self.options.device)
            try:
                self._targets[spec] = load(spec, self.options.device)
            except UnknownTargetError as error:
                msg = f"--fp8-target: {error} (known: {', '.join(known())})"
                raise pytest.UsageError(msg) from error
        return self._targets[spec]

    def facts(self) -> dict[str, object]:
        """What is true of every example: device and versions."""
        if self._facts is None:
            self._facts = {"device": self.options.device, "python": platform.python_version()}
            for package in sorted(VERSION_FACTS - {"python"}):
                version = version_of(package)
                if version is not None:
                    self._facts[package] = version
        return self._facts

    def judge(self, item: pytest.Item, target: Any) -> Judge:
        """The judge of one test."""
        from fp8.testing.laws import Judge

        return Judge(
            target=target.name,
            laws=declared_laws(item),
            tally=self.tally,
            test=item.nodeid,
            facts=self.facts(),
            expectations=self.expectations,
            reproduce=self.options.command(item.nodeid, self._target_of(item)),
        )

    def declare(self, items: Iterable[pytest.Item]) -> None:
        """Note which laws the collected tests can check, by target."""
        for item in items:
            spec = self._target_of(item)
            if spec is not None:
                self.tally.target(spec).declared |= declared_laws(item)

    def look_for_examples(self, items: list[pytest.Item]) -> None:
        """Note which expectations name an example that isn't there although its file is."""
        files = {item.nodeid.partition("::")[0] for item in items}
        for entry in self._applying():
            if entry.example.partition("::")[0] in files and not any(
                entry.is_example(item.nodeid) and self._target_of(item) == entry.target
                for item in items
            ):
                self.tally.examples_missing.add(entry.id)

    def passed(self, item: pytest.Item) -> None:
        """Note that a test passed: the expectations that it is the example of had their chance."""
        for entry in self.expectations.entries:
            if entry.is_example(item.nodeid) and self._target_of(item) == entry.target:
                self.tally.examples_run.add(entry.id)

    def problems(self) -> list[str]:
        """Why the session fails although its tests may have passed."""
        found = [
            f"expectation {entry.id!r} names an example that isn't there: {entry.example}"
            for entry in self._applying()
            if entry.id in self.tally.examples_missing
        ]
        if self.options.plant is None:  # a planted fault may well hide an expected deviation
            found += [self._stale_text(entry) for entry in self._stale()]
        return found

    def _target_of(self, item: pytest.Item) -> str | None:
        """Which target a test is for; None when it is for none (or has a `target` of its own)."""
        callspec = getattr(item, "callspec", None)
        spec = callspec.params.get("target") if callspec is not None else None
        return spec if spec in self.options.targets else None

    def _applying(self) -> list[Expectation]:
        """The expectations of chosen targets whose conditions on versions and device hold."""
        facts = self.facts()
        return [
            entry
            for entry in self.expectations.entries
            if entry.target in self.options.targets and entry.holds(facts, {*facts, *VERSION_FACTS})
        ]

    def _stale(self) -> list[Expectation]:
        return [
            entry
            for entry in self._applying()
            if entry.id in self.tally.examples_run
            and not self.tally.target(entry.target).deviations[entry.id]
        ]

    def _stale_text(self, entry: Expectation) -> str:
        passed = self.tally.matched[entry.id]
        what = f"all {passed} comparisons that it matches passed" if passed else "it matched none"
        return (
            f"expectation {entry.id!r} is stale: its example ran and {what}; delete it from "
            f"{self.options.expectations}"
        )

    def write_record(self) -> None:
        """Write ``--fp8-record``, if it was asked for."""
        options = self.options
        if options.record is None:
            return
        described = {
            "device": options.device,
            "profile": options.profile,
            "seed": "derandomised" if options.seed is None else str(options.seed),
            "plant": options.plant or "none",
        }
        laws = {
            target: {law: count.values for law, count in sorted(counts.laws.items())}
            for target, counts in sorted(self.tally.targets.items())
        }
        record = Record(environment() | described, laws, numbered(self.tally.measurements))
        save_record(options.record, record)


def declared_laws(item: pytest.Item) -> set[str]:
    """The laws that a test declares with the marker ``law``."""
    return {str(law) for mark in item.iter_markers("law") for law in mark.args}


def _check_device(device: str) -> None:
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            msg = "--fp8-device: cuda: this torch sees no CUDA device; known here: cpu"
            raise pytest.UsageError(msg)
