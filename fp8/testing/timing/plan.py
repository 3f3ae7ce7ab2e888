"""How much to measure, and what is needed before a result is believed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

#: ``device``: the GPU busy with one call; ``call``: one call in steady state, back to back with
#: others, whatever it waits for; ``host``: until Python has queued one call.
Quantity = Literal["device", "call", "host"]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)

#: How device time is taken: see `fp8.testing.timing.cuda`.
Method = Literal["auto", "events", "graph", "profiler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Frozen settings of one measurement; the defaults suit kernels and training steps alike.

    Attributes:
        quantity: What the verdict, the number of pairs and the steady state go by.
        confidence: Of the interval of the ratio, two-sided.
        margin: A relative difference up to this is no difference. Within one process an interval
            does not know what differs from process to process: addresses, chosen algorithms. That
            was up to 0.6 % (SD) in A/A runs on an H200, and 5 of 99 99 % intervals missed 1;
            beyond 2 % none did (docs/timing.md).
        half_width: Stop once the interval is this narrow on either side, relative. Half the
            margin: then "alike" can be proved.
        start_pairs: Pairs of blocks before the interval is looked at. Five is where a t interval
            becomes usable: t(99 %) is 9.9 with three, 4.6 with five, 3.2 with twelve.
        max_pairs: Stop at this many valid pairs. From 5 to 20 the interval narrows to a third.
        budget_s: Stop before this many seconds are over, or None. First calls are not in it.
        void_share: More void pairs than this, of all that were measured, and there is no verdict.
        steady: A callable is steady when three block medians agree within this, relative.
        max_warm_up: Blocks of warm-up for each callable at most.
        block_ms: Device time of a block.
        sample_ms: Device time of a sample, at least: calls are timed together until they last this
            long. Events resolve 0.5 µs, 0.05 % of it.
        min_samples: Samples of a block, at least, however long a call takes.
        method: How to take device time.
    """

    quantity: Quantity = "call"
    confidence: float = 0.99
    margin: float = 0.02
    half_width: float = 0.01
    start_pairs: int = 5
    max_pairs: int = 20
    budget_s: float | None = None
    void_share: float = 0.2
    steady: float = 0.01
    max_warm_up: int = 12
    block_ms: float = 20.0
    sample_ms: float = 1.0
    min_samples: int = 3
    method: Method = "auto"

    def __post_init__(self) -> None:
        """Refuse what can't work.

        Raises:
            ValueError: The message names the field, what it got and what it needs.
        """
        wrong = [
            ("quantity", self.quantity in QUANTITIES, f"one of {', '.join(QUANTITIES)}"),
            ("method", self.method in get_args(Method), f"one of {', '.join(get_args(Method))}"),
            ("confidence", 0 < self.confidence < 1, "between 0 and 1"),
            ("margin", self.margin >= 0, "0 or more"),
            ("half_width", self.half_width > 0, "more than 0"),
            ("start_pairs", self.start_pairs >= 2, "2 or more, to have a spread"),
            ("max_pairs", self.max_pairs >= self.start_pairs, "start_pairs or more"),
            ("void_share", 0 <= self.void_share < 1, "0 or more and less than 1"),
            ("max_warm_up", self.max_warm_up >= 3, "3 or more: three medians must agree"),
            ("min_samples", self.min_samples >= 1, "1 or more"),
            ("block_ms", self.block_ms >= self.sample_ms > 0, "sample_ms or more"),
        ]
        for field, ok, needed in wrong:
            if not ok:
                msg = f"{field} must be {needed}, got {getattr(self, field)!r}"
                raise ValueError(msg)

    @property
    def look_confidence(self) -> float:
        """The confidence that each look at the interval needs.

        Whoever looks after every pair and stops when the interval is narrow stops too often when
        the spread came out small by chance: at a nominal 1 % up to 1.8 % of the intervals miss
        (simulated; tests/meta/test_timing_detection.py). Half the risk at each look keeps it.
        """
        if self.max_pairs == self.start_pairs:
            return self.confidence
        return 1 - (1 - self.confidence) / 2

    @property
    def max_rounds(self) -> int:
        """Pairs to measure at most, void ones included."""
        return round(self.max_pairs / (1 - self.void_share))
