"""From a measured case to an outcome: what it is held to, and what follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8 import hardware, regimes, roofline
from fp8.testing.perf.outcomes import Outcome
from fp8.testing.speed_verdicts import of_case

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fp8.hardware import Hardware
    from fp8.testing.perf.cases import Case
    from fp8.testing.perf.outcomes import Measured
    from fp8.testing.thresholds import Threshold


@dataclass(frozen=True, slots=True)
class Standard:
    """What cases are held to on one GPU.

    Attributes:
        thresholds: By the case's id.
        hardware: The GPU's file; None where there is none.
    """

    thresholds: Mapping[str, Threshold]
    hardware: Hardware | None

    def judge(self, measured: Measured, attempts: int = 1) -> Outcome:
        """Hold a case to its threshold, to the claims about it, and to its remedy."""
        case = measured.case
        threshold = self.thresholds.get(case.id)
        known = () if case.known is None else regimes.of(case.known)
        judgement = of_case(
            measured.interval,
            threshold,
            known,
            metric=case.metric,
            against=case.against,
            remedied=case.remedied,
        )
        return Outcome(
            measured=measured,
            regimes=known,
            threshold=threshold,
            judgement=judgement,
            predicted=self._predicted(case),
            attempts=attempts,
        )

    def _predicted(self, case: Case) -> float | None:
        """The speed-up by the roofline, for compiled layers and for products."""
        if self.hardware is None or not case.layers or case.facts.get("mode") == "eager":
            return None
        on = roofline.machine(self.hardware)
        if case.family in {"product", "ceiling"}:
            (shape,) = case.layers
            plain, float8 = (roofline.product(*shape, on, float8=f) for f in (False, True))
            return plain / float8
        from fp8.recipes import RECIPES  # imports torch

        recipe = RECIPES.get(str(case.facts["recipe"]))
        if recipe is None:
            return None
        layers = [roofline.linear(*shape, recipe, on, manner="layouts") for shape in case.layers]
        return sum(layer.bf16 for layer in layers) / sum(layer.fp8 for layer in layers)


def standard(thresholds: Mapping[str, Threshold], gpu: str) -> Standard:
    """What cases are held to on the GPU that torch calls `gpu`."""
    return Standard(thresholds, hardware.find(gpu))
