"""What a case is: one ratio of two callables, and all that is known of it before it is measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from fp8 import hardware
from fp8.claims import VERSION_FACTS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fp8 import regimes
    from fp8.regimes import Against, Metric
    from fp8.targets.base import Target
    from fp8.testing.timing.plan import Quantity

#: (M, K, N): tokens, features in, features out; for a product rows, contraction, columns.
Shape = tuple[int, int, int]
Mode = Literal["eager", "compiled"]
MODES: tuple[Mode, ...] = ("eager", "compiled")
Family = Literal["ceiling", "product", "cast", "linear", "step", "regime"]
#: What a case's ratio is a ratio of. "speed-up": the baseline's time over the subject's, by blocks.
#: "first call": the subject's steady time over that of its first call. "saved bytes": what the
#: baseline keeps for backward over what the subject does.
Ratio = Literal["speed-up", "first call", "saved bytes"]

#: Whether a stack quantises by kernels of its own (Triton, CUDA) rather than by torch's operators.
#: Of others it is not known, and no claim that asks for it speaks of them.
_FUSED = {"reference[torch]": False, "torchao": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What the suite needs to know of a target.

    Attributes:
        name: The target's, with its backend.
        recipes: Those that it converts to.
        bias_fused: Whether it adds a bias inside the product.
        multiplies: Whether it has a scaled product that can be called alone.
        quantises: Whether it has a quantisation that can be called alone.
        gpu: The id of the GPU's hardware file; None where there is none.
        versions: Package to version.
    """

    name: str
    recipes: frozenset[str]
    bias_fused: bool
    multiplies: bool
    quantises: bool
    gpu: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def base(self) -> str:
        """The name without the backend: what regimes speak of."""
        return self.name.partition("[")[0]

    @property
    def fused(self) -> bool | None:
        """See `_FUSED`."""
        return _FUSED.get(self.name)


def stack_of(target: Target, gpu: str) -> Stack:
    """A target on the GPU that torch calls `gpu`."""
    from fp8.testing.records import version_of

    able = target.capabilities()
    known = hardware.find(gpu)
    versions = {name: version_of(name) for name in VERSION_FACTS}
    return Stack(
        name=target.name,
        recipes=able.recipes,
        bias_fused=target.policy.bias_rounding == "before",
        multiplies=bool(able.products),
        quantises=bool(able.operands),
        gpu=None if known is None else known.id,
        versions={name: version for name, version in versions.items() if version is not None},
    )


def is_emulated(target: Target) -> bool:
    """Whether the target's products are emulated: their speed stands for no hardware."""
    return "float64" in target.policy.accumulation.values()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One ratio.

    Attributes:
        id: Its name in thresholds and records.
        family: The table it is in.
        stage: Which stage of its bench measures it; "" where there is one.
        subject: The callable that it is about.
        baseline: The callable that it is compared with.
        ratio: See `Ratio`.
        quantity: Which time is compared.
        against: What the baseline is to the claims: "nothing" if no claim is about this ratio.
        known: What regimes ask for; None where they say nothing of such cases.
        facts: What the record keeps besides.
        float8_products: Products of one call that must have run in float8.
        layers: The converted layers (or the one product), for work and prediction.
        flop: Operations of one call.
        moved: Bytes that one call has to read and write at least.
        baseline_moved: The same of the baseline.
        remedied: What is wrong in its sibling was set right: it must not be slower than bfloat16.
    """

    id: str
    family: Family
    subject: str
    baseline: str
    stage: str = ""
    ratio: Ratio = "speed-up"
    quantity: Quantity = "device"
    against: Against = "bfloat16"
    known: regimes.Case | None = None
    facts: Mapping[str, object] = field(default_factory=dict)
    float8_products: int = 0
    layers: tuple[Shape, ...] = ()
    flop: int = 0
    moved: int = 0
    baseline_moved: int = 0
    remedied: bool = False

    @property
    def metric(self) -> Metric:
        """Of the claims that are about this ratio."""
        return "memory" if self.ratio == "saved bytes" else "time"


def written(shape: Shape) -> str:
    """MxKxN, as in ids."""
    return "x".join(map(str, shape))
