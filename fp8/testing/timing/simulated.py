"""A device that exists in arithmetic alone: what is true of it is known, so the protocol is tested.

Time passes as blocks are measured. What all callables share (drift, a wandering clock, throttling)
depends on the time; what is a callable's own (noise, outliers, modes, compilation) does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fp8.testing.timing.results import Block, Conditions, Start

if TYPE_CHECKING:
    from collections.abc import Callable

    from fp8.testing.timing.plan import Plan


@dataclass(frozen=True, slots=True)
class SimulatedKernel:
    """A callable of known speed.

    Attributes:
        ms: The time of a call, ms.
        block_noise: Log-SD from block to block.
        sample_noise: Log-SD from sample to sample within a block.
        outliers: The share of samples that take `outlier_factor` times as long.
        outlier_factor: See above.
        modes: Relative times; each block runs in one of them.
        host_ms: The time to queue a call, ms; a call takes the longer of the two.
        first_ms: The time of the first call, ms.
        compiles: Numbers of the blocks (0, 1, … warm-up included) in which something compiles.
    """

    ms: float
    block_noise: float = 0.01
    sample_noise: float = 0.01
    outliers: float = 0.0
    outlier_factor: float = 10.0
    modes: tuple[float, ...] = (1.0,)
    host_ms: float = 0.01
    first_ms: float = 1000.0
    compiles: frozenset[int] = frozenset()


@dataclass(slots=True)
class SimulatedDevice:
    """Measures `SimulatedKernel`s.

    Attributes:
        seed: Of the random numbers.
        drift: Time in s -> factor on all times.
        wander: Log-SD of the random walk that all times share, for each block.
        conditions: Time in s -> what a block that ends then ran under.
        seconds: The time.
        blocks: How many blocks were measured.
    """

    seed: int
    drift: Callable[[float], float] = lambda _: 1.0
    wander: float = 0.0
    conditions: Callable[[float], Conditions] = lambda _: Conditions()
    seconds: float = 0.0
    blocks: int = 0
    name: str = "simulated"
    notes: tuple[str, ...] = ()
    _random: Any = field(init=False)
    _walk: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def now(self) -> float:
        """The simulated time, s."""
        return self.seconds

    def prepare(self, subject: SimulatedKernel, plan: Plan) -> _Prepared:
        """Let the first two calls pass."""
        self.seconds += (subject.first_ms + subject.ms) / 1000
        return _Prepared(self, subject, plan)

    def run(self, kernel: SimulatedKernel, plan: Plan, compiles: int) -> Block:
        """Measure one block."""
        random = self._random
        self._walk += random.normal(0, self.wander)
        usual = kernel.ms * self.drift(self.seconds) * math.exp(self._walk)
        usual *= random.choice(kernel.modes) * math.exp(random.normal(0, kernel.block_noise))
        samples = max(plan.min_samples, round(plan.block_ms / max(usual, plan.sample_ms)))
        times = usual * np.exp(random.normal(0, kernel.sample_noise, samples))
        times[random.random(samples) < kernel.outliers] *= kernel.outlier_factor
        calls = max(1.0, plan.sample_ms / usual)
        self.seconds += float(np.maximum(times, kernel.host_ms).sum()) * calls / 1000
        self.blocks += 1
        return Block(
            device_ms=tuple(times.tolist()),
            call_ms=tuple(np.maximum(times, kernel.host_ms).tolist()),
            host_ms=kernel.host_ms,
            compiles=compiles,
            conditions=self.conditions(self.seconds),
        )


@dataclass(slots=True)
class _Prepared:
    device: SimulatedDevice
    kernel: SimulatedKernel
    plan: Plan
    measured: int = 0

    @property
    def start(self) -> Start:
        return Start(self.kernel.first_ms, self.kernel.ms, 0, "simulated")

    def block(self) -> Block:
        number = self.measured
        self.measured += 1
        return self.device.run(self.kernel, self.plan, int(number in self.kernel.compiles))
