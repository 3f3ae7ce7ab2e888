"""Capturing what a model's linear layers really see: input, weight and grad_output, by hooks.

    recording = capture(model, lambda model: loss_of(model(batch)), "mine.safetensors")
    print(recording)

writes, for a layer called NAME, the tensors `NAME.x` (M, K), `NAME.w` (N, K) and `NAME.g` (M, N).
`pytest -m numerics --fp8-tensors=mine.safetensors` judges a target on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp8.testing.captured import (
    Captured,
    CapturedFileError,
    load,
    read_metadata,
    require_safetensors,
    save,
)

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "CaptureError",
    "Captured",
    "CapturedFileError",
    "Recording",
    "capture",
    "capturing",
    "load",
    "read_metadata",
    "save",
]

#: which layers to record, called as in `fp8.convert`: filter_fn(module, name)
FilterFn = Callable[[nn.Linear, str], bool]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class CaptureError(ValueError):
    """The model, or the step that ran it, gave nothing to record; the message says why."""


@dataclass
class Recording:
    """What was captured, by layer name; and which layers were not, with the reason."""

    layers: dict[str, Captured] = field(default_factory=dict)
    omitted: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{len(self.layers)} captured, {len(self.omitted)} omitted"]
        lines += [f"  {name}: {layer}" for name, layer in self.layers.items()]
        lines += [f"  {name}: omitted, {reason}" for name, reason in self.omitted.items()]
        return "\n".join(lines)


@contextmanager
def capturing(
    model: nn.Module,
    *,
    filter_fn: FilterFn | None = None,
    max_tokens: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[Recording]:
    """Record the linear layers of `model` that run forward and backward inside the block.

    The recording is filled when the block ends. Every nn.Linear counts, and every subclass: layers
    that are float8 already show what they get. Several calls of a layer (microbatches, a module
    used twice) are concatenated in the order of the calls. A call whose output got no gradient is
    left out (evaluation in between, the first pass of a reentrant checkpoint), and so is one made
    after the weight changed (the next step): it belongs to another weight. Run the model eagerly:
    what torch.compile has compiled already calls no new hooks.

    filter_fn: called as filter_fn(module, name); only layers for which it is true are recorded.
    max_tokens: keep a layer's first so many tokens (rows of x and g); None keeps all.
    dtype: what x, w and g are rounded to: bfloat16, float16 or float32.

    Raises TypeError or ValueError for a wrong argument; CaptureError when there is no layer to
    record, or when the block ends and none has all of x, w and g.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, needs a torch.nn.Module")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens: got {max_tokens}, needs at least 1")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype: got {dtype}, needs bfloat16, float16 or float32")
    recorders = {
        name: _Recorder(layer, dtype, max_tokens)
        for name, layer in _chosen_layers(model, filter_fn).items()
    }
    handles = [
        recorder.layer.register_forward_hook(recorder.after_forward, with_kwargs=True)
        for recorder in recorders.values()
    ]
    recording = Recording()
    try:
        yield recording
    finally:
        for handle in handles:
            handle.remove()
    for name, recorder in recorders.items():
        operands = recorder.operands()
        if isinstance(operands, Captured):
            recording.layers[name] = operands
        else:
            recording.omitted[name] = operands
    if not recording.layers:
        raise CaptureError(f"model: {recording}")


def capture(
    model: nn.Module,
    run: Callable[[nn.Module], Tensor | None],
    path: str | Path | None = None,
    *,
    filter_fn: FilterFn | None = None,
    max_tokens: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    metadata: Mapping[str, str] | None = None,
) -> Recording:
    """Record one training step, and write it to `path` where one is given.

    run: called as run(model). It returns the scalar loss, on which `backward` is then called, or
    does the backward passes itself and returns None. As in any step, the parameters' gradients
    accumulate; the model stays in the mode it is in. The rest is as for `capturing` and `save`.

    Raises what these raise, and CaptureError when `run` returns something else.
    """
    if path is not None:
        require_safetensors()  # rather than after the work is done
    with capturing(model, filter_fn=filter_fn, max_tokens=max_tokens, dtype=dtype) as recording:
        loss = run(model)
        if loss is not None:
            _check_loss(loss)
            loss.backward()
    if path is not None:
        save(recording.layers, path, metadata)
    return recording


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor):
        name = type(loss).__name__
        raise CaptureError(f"run: returned {name}, needs the loss, a tensor, or None")
    if loss.numel() != 1 or not loss.requires_grad:
        graph = "with" if loss.requires_grad else "without"
        raise CaptureError(
            f"run: returned shape {tuple(loss.shape)} {graph} a gradient, needs a scalar loss that "
            "requires one"
        )


def _chosen_layers(model: nn.Module, filter_fn: FilterFn | None) -> dict[str, nn.Linear]:
    """The linear layers of `model`, each once, by its first name; the model itself is "linear"."""
    layers = {
        name or "linear": module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    if not layers:
        name = type(model).__name__
        raise CaptureError(f"model: got {name} without any Linear, needs one or more")
    chosen = {n: m for n, m in layers.items() if filter_fn is None or filter_fn(m, n)}
    if not chosen:
        raise CaptureError(f"filter_fn: matched none of the layers: {', '.join(layers)}")
    return chosen


@dataclass(eq=False)
class _Call:
    """One forward call: its tokens, and once they have come back, their gradients."""

    x: Tensor
    g: Tensor | None = None


@dataclass(eq=False)
class _Recorder:
    """Collects the calls of one layer."""

    layer: nn.Linear
    dtype: torch.dtype
    max_tokens: int | None
    calls: list[_Call] = field(default_factory=list)
    seen: int = 0
    weight: Tensor | None = None
    weight_version: int = -1
    problem: str | None = None

    def after_forward(
        self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> Tensor | None:
        """The forward hook: keep the input, and return a copy of the output whose gradient we keep.

        A copy, since the output may be a view (it is when x has more than two dimensions): where an
        in-place activation then changes it, autograd forgets the hooks of the view.
        """
        self.seen += 1
        if not isinstance(output, Tensor):
            self.problem = f"its output is a {type(output).__name__}, not a tensor"
            return None
        if not output.requires_grad:
            return None
        room = self._room()
        if room == 0 or not self._is_same_weight(self.layer.weight):
            return None
        call = _Call(self._rows(args[0] if args else kwargs["input"], room))
        self.calls.append(call)

        def keep(gradient: Tensor) -> None:
            if call.g is None:  # a second backward pass over a retained graph adds nothing
                call.g = self._rows(gradient, room)

        copied = output.clone()
        copied.register_hook(keep)
        return copied

    def operands(self) -> Captured | str:
        """What was captured, or why nothing was."""
        complete = [(call.x, call.g) for call in self.calls if call.g is not None]
        if self.problem is not None:
            return self.problem
        if not self.seen:
            return "its forward was never called"
        if self.weight is None:
            return "its output needed no gradient (no_grad, or all that leads to it is frozen)"
        if not complete:
            return "no gradient reached its output"
        x, g = (torch.cat(rows) for rows in zip(*complete, strict=True))
        captured = Captured(x, self.weight, g)
        return captured.obstacle() or captured

    def _room(self) -> int | None:
        """How many tokens may still be kept; None for any number."""
        if self.max_tokens is None:
            return None
        return max(0, self.max_tokens - sum(len(call.x) for call in self.calls))

    def _is_same_weight(self, weight: Tensor) -> bool:
        """Whether this is the first call's weight still, which is copied at the first call."""
        version = weight._version  # noqa: SLF001 - what autograd itself compares
        if self.weight is None:
            self.weight = self._copy(weight)
            self.weight_version = version
        return version == self.weight_version

    def _rows(self, tensor: Tensor, room: int | None) -> Tensor:
        return self._copy(tensor.detach().reshape(-1, tensor.shape[-1])[:room])

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", self.dtype, copy=True).contiguous()
