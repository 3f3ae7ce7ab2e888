"""Two training steps of a small network, in one process or sharded over several.

Everything that the steps do besides the float8 layers is exact or one rounding a value, in whatever
order a library does it: gradients are averaged over two ranks, the learning rate and the momentum
are powers of two. So a sharded run has the bits of an unsharded one.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from fp8.targets import load
from fp8.testing.planting import planted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from fp8.targets.base import Target

RANKS = 2
STEPS = 2
#: powers of two: multiplying by them rounds nothing
RATE = 2.0**-3
MOMENTUM = 0.5
#: how long a collective may take, and all of a run
COLLECTIVE_TIMEOUT = timedelta(seconds=60)


class Network(nn.Module):
    """Three layers; no extent divides by two, and the last layer has fewer rows than ranks."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.first = nn.Linear(sizes[0], sizes[1], bias=False)
        self.second = nn.Linear(sizes[1], sizes[2])
        self.third = nn.Linear(sizes[2], sizes[3])

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., sizes[0]). Returns (..., sizes[3])."""
        h = self.second(nn.functional.gelu(self.first(x)))
        h += 0.5  # in place, as residuals are added
        out: Tensor = self.third(nn.functional.gelu(h))
        return out


@dataclass(frozen=True)
class Plan:
    """What each process runs: enough to load the target again in a fresh one."""

    #: the target's name, which loads it
    target: str
    recipes: tuple[str, ...]
    #: a fault to plant, or None
    plant: str | None
    seed: int
    device: str = "cpu"
    threads: int = 1
    #: extents are multiples of this, tokens too
    alignment: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Extents of the three layers."""
        return tuple(-(-n // self.alignment) * self.alignment for n in (19, 33, 17, 1))

    @property
    def tokens(self) -> tuple[int, int]:
        """Leading dimensions of one microbatch."""
        return (3, 5) if self.alignment == 1 else (2, self.alignment)

    def network(self, device: torch.device) -> Network:
        """The network before its conversion; the same in every process."""
        network = Network(self.sizes).to(device)
        rng = np.random.default_rng([self.seed, 0])
        with torch.no_grad():
            for parameter in network.parameters():
                values = rng.standard_normal(parameter.shape) / 4
                parameter.copy_(torch.from_numpy(values))
        return network

    def microbatch(self, rank: int, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """One rank's input and grad_output of one step, float32."""
        rng = np.random.default_rng([self.seed, 1, rank, step])
        x, g = (rng.standard_normal((*self.tokens, self.sizes[i])) for i in (0, 3))
        return tuple(torch.from_numpy(a).to(device, torch.float32) for a in (x, g))  # type: ignore[return-value]


@dataclass
class Trace:
    """What one rank saw, a list entry a step."""

    y: list[Tensor] = field(default_factory=list)
    scales: list[list[Tensor]] = field(default_factory=list)
    #: full and averaged over the ranks, in the order of the parameters
    gradients: list[list[Tensor]] = field(default_factory=list)
    #: full, after the step
    parameters: list[list[Tensor]] = field(default_factory=list)


# --- scales -------------------------------------------------------------------------------------


class _ScaleRecorder(TorchDispatchMode):
    """Keeps the scales of every scaled product that torch's dispatcher sees."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scales: list[Tensor] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(t not in (Tensor, nn.Parameter) for t in types):
            return NotImplemented  # a tensor subclass unwraps itself and comes again
        if "scaled_mm" in func.name():
            names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            self.scales += [
                tensor.detach().clone()
                for name, value in given.items()
                if "scale" in name
                for tensor in (value if isinstance(value, list) else [value])
                if isinstance(tensor, Tensor)
            ]
        return func(*args, **(kwargs or {}))


def _forward_backward(network: nn.Module, x: Tensor, g: Tensor, trace: Trace) -> None:
    with _ScaleRecorder() as recorder:
        y = network(x)
        y.backward(g.to(y.dtype))
    trace.y.append(y.detach().clone())
    trace.scales.append(recorder.scales)


def _optimizer(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=RATE, momentum=MOMENTUM)


# --- in one process -----------------------------------------------------------------------------


def unsharded(target: Target, recipe: str, plan: Plan, compute: torch.dtype) -> list[Trace]:
    """What each rank should see, from one process that has all of every parameter.

    compute: the dtype of the parameters that the layers see; the optimizer's are float32.
    """
    network = target.convert(plan.network(target.device), recipe)
    optimizer = _optimizer(network)
    traces = [Trace() for _ in range(RANKS)]
    for step in range(STEPS):
        gradients = []
        for rank, trace in enumerate(traces):
            copied = copy.deepcopy(network).to(compute)
            copied.zero_grad(set_to_none=True)
            x, g = plan.microbatch(rank, step, target.device)
            _forward_backward(copied, x.to(compute), g, trace)
            gradients.append([p.grad.float() for p in copied.parameters() if p.grad is not None])
        # One rounding, of the sum; halving it is exact, before or after.
        means = [(a + b) / 2 for a, b in zip(*gradients, strict=True)]
        for parameter, mean in zip(network.parameters(), means, strict=True):
            parameter.grad = mean
        optimizer.step()
        for trace in traces:
            trace.gradients.append([mean.clone() for mean in means])
            trace.parameters.append([p.detach().clone() for p in network.parameters()])
    return traces


# --- in several ---------------------------------------------------------------------------------


def _fully_shard(network: nn.Module, plan: Plan, policy: MixedPrecisionPolicy) -> nn.Module:
    mesh = init_device_mesh(torch.device(plan.device).type, (RANKS,))
    for module in list(network.children()):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(network, mesh=mesh, mp_policy=policy)
    return network


_HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

#: name -> (how the network is distributed, the dtype that its layers compute in)
WAYS: dict[str, tuple[Callable[[nn.Module, Plan], nn.Module], torch.dtype]] = {
    "fully_shard": (partial(_fully_shard, policy=MixedPrecisionPolicy()), torch.float32),
    "fully_shard in bfloat16": (partial(_fully_shard, policy=_HALF), torch.bfloat16),
    "DistributedDataParallel": (lambda network, _: DistributedDataParallel(network), torch.float32),
}


def _full(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def _sharded(target: Target, recipe: str, way: str, plan: Plan, rank: int) -> Trace:
    network = target.convert(plan.network(target.device), recipe)
    network = WAYS[way][0](network, plan)
    optimizer = _optimizer(network)
    trace = Trace()
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        _forward_backward(network, *plan.microbatch(rank, step, target.device), trace)
        trace.gradients.append([_full(p.grad) for p in network.parameters() if p.grad is not None])
        optimizer.step()
        trace.parameters.append([_full(p) for p in network.parameters()])
    return trace


@contextmanager
def _process_group(rank: int, folder: Path, device: torch.device) -> Iterator[None]:
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=RANKS,
        timeout=COLLECTIVE_TIMEOUT,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_rank(rank: int, plan: Plan, folder: Path) -> None:
    """One process of the sharded runs: every way, every recipe.

    Writes `folder`/rank<rank>.pt: way -> recipe -> the trace as a dict. The first error ends it:
    the other rank may be waiting for this one.
    """
    torch.set_num_threads(plan.threads)
    device = torch.device(plan.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    results: dict[str, dict[str, Any]] = {way: {} for way in WAYS}
    with planted(plan.plant), _process_group(rank, folder, device):
        target = load(plan.target, device)
        for way in WAYS:
            for recipe in plan.recipes:
                try:
                    results[way][recipe] = vars(_sharded(target, recipe, way, plan, rank))
                except Exception as error:
                    error.add_note(f"while rank {rank} ran {recipe} by {way}")
                    raise
    torch.save(results, folder / f"rank{rank}.pt")
