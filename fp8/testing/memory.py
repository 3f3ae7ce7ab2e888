"""How many bytes live where: saved for backward, allocated by a call, alive in the process."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fp8.testing.tracing import OperatorWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address -> bytes of every distinct storage behind `tensors`; those on `meta` have none."""
    found = {}
    for tensor in tensors:
        if tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def saved_for_backward(fn: Callable[[], Any]) -> tuple[Any, dict[int, int]]:
    """Run a forward pass; returns its value and the storages that autograd keeps for backward.

    Keep the value as long as the addresses are used: a storage that is freed gives its address to
    the next one. Nested wrappers (tensor subclasses) count by what they wrap.
    """
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.extend(_plain(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        value = fn()
    return value, storages(saved)


def _plain(tensor: Tensor) -> list[Tensor]:
    """The plain tensors inside a tensor subclass; the tensor itself where it is plain."""
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    names, _ = flatten(tensor)
    return [inner for name in names for inner in _plain(getattr(tensor, name))]


def allocated_by(fn: Callable[[], Any]) -> tuple[Any, int]:
    """Run `fn`; returns its value and the bytes of all the storages that its operators made."""
    with _Allocations() as allocations:
        value = fn()
    return value, sum(storages(allocations.fresh).values())


class _Allocations(OperatorWatch):
    def __init__(self) -> None:
        super().__init__()
        # Held until the end, so that no address is given out twice.
        self.fresh: list[Tensor] = []

    def saw(
        self,
        func: torch._ops.OpOverload,  # noqa: ARG002 - whatever the operator is
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
    ) -> None:
        old = storages(_tensors((args, kwargs)))
        self.fresh += [t for t in _tensors(out) if not storages([t]).keys() <= old.keys()]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def growth(device: torch.device, besides: Iterable[Tensor] = ()) -> Iterator[Callable[[], int]]:
    """Yields a function: how many bytes of tensors are alive that were not when this began.

    The allocator's count on CUDA; on the CPU every tensor that Python can reach. There a new view
    counts with its whole storage, unless it is a view of one of `besides`.
    """
    if device.type == "cuda":
        before = _allocated(device)
        yield lambda: _allocated(device) - before
        return
    old = storages(besides).keys()
    # What is frozen, garbage too, is left out of gc's lists: looking through them gets cheap.
    gc.freeze()
    try:
        yield lambda: sum(size for address, size in _tracked().items() if address not in old)
    finally:
        gc.unfreeze()


def _allocated(device: torch.device) -> int:
    gc.collect()
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def _tracked() -> dict[int, int]:
    gc.collect()
    # type() rather than isinstance(): asking a lazy proxy for its __class__ would import things.
    alive = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
    return storages(plain for t in alive for plain in _plain(t))


def parameter_storages(model: nn.Module) -> dict[int, int]:
    """Address -> bytes of the storages of a model's parameters and buffers."""
    return storages([*model.parameters(), *model.buffers()])
