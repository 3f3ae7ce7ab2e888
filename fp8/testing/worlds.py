"""Where a check's tensors are made: on the target's device, or on CUDA without data.

`FakeTensorMode` makes CUDA tensors that have shapes, dtypes and strides but no values, so that a
machine without a GPU sees CUDA's verdict wherever it needs no values.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from fp8.formats import FORMATS
from fp8.quantize import Operand, Quantized
from fp8.scaling import GRANULARITIES, TORCHAO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fp8.targets.base import Target

#: the names that `in_world` takes
WORLDS = ("real", "fake CUDA")


@dataclass(frozen=True)
class World:
    """Makes tensors, operands and layers of zeros, without the target's help where it can."""

    device: torch.device
    #: a device that is not this one
    elsewhere: torch.device

    def zeros(self, *shape: int, dtype: str = "float32") -> Tensor:
        """Zeros of this shape, on the world's device."""
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)

    def ones(self, *shape: int) -> Tensor:
        """float32 ones of this shape, on the world's device."""
        return torch.ones(shape, device=self.device)

    def operand(
        self, rows: int, columns: int, *, format: str = "e4m3fn", granularity: str = "tensorwise"
    ) -> Quantized:
        """Zero codes (rows, columns) with scales of one."""
        how = Operand(FORMATS[format], GRANULARITIES[granularity], TORCHAO)
        codes = self.zeros(rows, columns, dtype=f"float8_{format}")
        return Quantized(codes, self.ones(*scale_shape(granularity, rows, columns)), how)

    def layer(
        self, target: Target, recipe: str, inputs: int, outputs: int, dtype: str = "float32"
    ) -> nn.Module:
        """A converted Linear."""
        # Through meta: a CPU build draws no numbers on CUDA, fake or not.
        layer = nn.Linear(inputs, outputs, device="meta")
        layer.weight = nn.Parameter(self.zeros(outputs, inputs, dtype=dtype))
        layer.bias = nn.Parameter(self.zeros(outputs, dtype=dtype))
        return target.convert(nn.Sequential(layer), recipe)


@contextmanager
def in_world(name: str, target: Target) -> Iterator[World]:
    """The world of that name for as long as the context lasts.

    name: one of `WORLDS`. "real" is the target's own device.
    """
    if name == "real":
        yield World(target.device, torch.device("meta"))
        return
    # Without autograd: on a build without CUDA its nodes ask for a stream, and abort the process.
    with FakeTensorMode(), WithoutCudaBuild(), torch.no_grad():
        yield World(torch.device("cuda"), torch.device("cpu"))


def scale_shape(granularity: str, rows: int, columns: int) -> tuple[int, int]:
    """The shape of the scales, written again from the definition of the granularity.

    The library's own would hide its mistake from the tests.
    """
    block_rows, block_columns = GRANULARITIES[granularity].block
    return (
        1 if block_rows is None else -(-rows // block_rows),
        1 if block_columns is None else -(-columns // block_columns),
    )


class WithoutCudaBuild(TorchFunctionMode):
    """Lets a CPU build slice and copy fake CUDA tensors.

    Two of Python's bindings ask for a guard of the CUDA device before they dispatch, and fail where
    there is no such device to guard ("PyTorch is not linked with support for cuda devices"). Here
    they are the operators that do the same without one.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace `Tensor.contiguous` and slicing, pass on everything else."""
        if func is torch.Tensor.contiguous:
            return args[0].clone(memory_format=torch.contiguous_format)
        if func is torch.Tensor.__getitem__ and _are_slices(args[1]):
            out, index = args
            for axis, part in enumerate(index):
                start, stop, _ = part.indices(out.shape[axis])
                out = out.narrow(axis, start, stop - start)
            return out
        return func(*args, **(kwargs or {}))


def _are_slices(index: object) -> bool:
    return isinstance(index, tuple) and all(
        isinstance(part, slice) and part.step in (None, 1) for part in index
    )
