"""Swapping a model's linear layers to float8 in place, and the report of what was kept and why.

A layer is converted by changing its class: the module object stays, and with it its parameters
(tied ones too), hooks, training mode, requires_grad flags and every reference to it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fp8 import hardware, regimes
from fp8.linear import Float8Linear
from fp8.quantize import HIGH_PRECISION
from fp8.recipes import Recipe
from fp8.recipes import get as get_recipe
from fp8.regimes import Case, Regime, RegimeWarning

if TYPE_CHECKING:
    from fp8.matmul import Backend

FilterFn = Callable[[nn.Linear, str], bool]

#: what models call their output head
_HEADS = frozenset({"lm_head", "head", "output", "classifier"})
#: how many layers a warning names for each regime
_NAMED = 4


@dataclass(frozen=True)
class LayerReport:
    """What became of one linear layer."""

    #: fully qualified name of the module
    name: str
    in_features: int
    out_features: int
    converted: bool
    #: why it was kept, or what to know about a converted one; may be empty for a converted one
    reason: str
    #: the ids of the regimes that a converted one is certainly in (see `fp8.regimes`)
    regimes: tuple[str, ...] = ()

    def __str__(self) -> str:
        state = "float8" if self.converted else "kept"
        shape = f"{self.in_features} -> {self.out_features}"
        notes = "; ".join(filter(None, (", ".join(self.regimes), self.reason)))
        return f"{self.name:<40} {shape:>16}  {state:<6}  {notes}".rstrip()


@dataclass(frozen=True)
class ConversionReport:
    """Every linear layer of a model: converted, or kept and why. `print(report)` shows a table."""

    recipe: str
    layers: tuple[LayerReport, ...]

    @property
    def converted(self) -> tuple[str, ...]:
        """The names of the layers that this call converted."""
        return tuple(layer.name for layer in self.layers if layer.converted)

    @property
    def kept(self) -> dict[str, str]:
        """The names of the layers that it left alone, and why."""
        return {layer.name: layer.reason for layer in self.layers if not layer.converted}

    def __str__(self) -> str:
        head = f"{len(self.converted)} of {len(self.layers)} linear layers to {self.recipe}"
        return "\n".join([head, *(f"  {layer}" for layer in self.layers)])


def convert(
    model: nn.Module,
    recipe: Recipe | str = "tensorwise",
    filter_fn: FilterFn | None = None,
    tokens: int | None = None,
    backend: Backend | None = None,
) -> ConversionReport:
    """Convert the linear layers of `model` to float8, in place, and report on every one.

    recipe: a name in `fp8.RECIPES` or a Recipe. filter_fn: called as filter_fn(module, name); a
    layer for which it is false is kept. tokens: M, the tokens of one forward pass; layers that do
    not pay at that M are kept (see `fp8.regimes`). Without it every layer is converted, and the
    report says from which M it pays. backend: "torch" where the device has float8 hardware, else
    "emulated".

    Warns once, with a `fp8.regimes.RegimeWarning`, when it converts layers into regimes that are
    known to be slow or inaccurate from what is known here: names, shapes and recipe, and M only
    when `tokens` says so.

    Layers with a forward of their own, layers whose forward nobody calls, and layers whose dtype
    float8 training does not take are kept and reported. A second call converts nothing.

    Raises TypeError when `model` is no module; ValueError when it is itself a Linear (there is no
    parent to hold the report's name: use `Float8Linear`), when it has no Linear, when `filter_fn`
    or `tokens` leave nothing to convert, or when the recipe or the backend is unknown.
    """
    recipe = get_recipe(recipe)
    _check_arguments(model, tokens, backend)
    layers = list(_linears(model))
    if not layers:
        raise ValueError(f"model: got {type(model).__name__} without any Linear, needs one or more")

    reports = []
    filtered = unpaid = eligible = 0
    for name, layer, parent in layers:
        reason = _obstacle(layer, parent)
        if reason is None:
            eligible += 1
            if filter_fn is not None and not filter_fn(layer, name):
                reason, filtered = "filter_fn", filtered + 1
            elif not _pays(layer, tokens):
                reason, unpaid = f"{tokens} tokens: {_payoff(layer)}", unpaid + 1
        converted = reason is None
        known: tuple[Regime, ...] = ()
        if converted:
            _swap(layer, recipe, backend)
            reason = _advice(layer, parent, tokens)
            known = regimes.of(_case(name, layer, recipe, tokens))
        reports.append(
            LayerReport(
                name,
                layer.in_features,
                layer.out_features,
                converted,
                reason or "",
                tuple(regime.id for regime in known),
            )
        )
    if eligible and filtered == eligible:
        raise ValueError(
            f"filter_fn: matched none of the {eligible} layers that can be converted: "
            f"{', '.join(r.name for r in reports if r.reason == 'filter_fn')}"
        )
    if eligible and filtered + unpaid == eligible:
        raise ValueError(
            f"tokens: no layer pays at {tokens} ({regimes.published().name}); leave it out to "
            "convert anyway"
        )
    if any(report.regimes for report in reports):
        warnings.warn(_warning(reports), RegimeWarning, stacklevel=2)
    return ConversionReport(recipe.name, tuple(reports))


def _check_arguments(model: object, tokens: int | None, backend: str | None) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, needs a torch.nn.Module")
    if isinstance(model, nn.Linear):
        raise ValueError(  # noqa: TRY004 - a Linear is a Module, this one has no parent
            "model: got a Linear, needs a model that contains it: wrap it, as in "
            "nn.Sequential(layer), or build a Float8Linear"
        )
    if tokens is not None and tokens < 1:
        raise ValueError(f"tokens: got {tokens}, needs at least 1")
    if backend not in (None, "emulated", "torch"):
        raise ValueError(f"backend: got {backend!r}, needs 'emulated', 'torch' or None")


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear, nn.Module]]:
    """Every linear layer once, by its first name, with the module that holds it."""
    seen = set()
    for parent_name, parent in model.named_modules():
        for child_name, child in parent.named_children():
            if isinstance(child, nn.Linear) and child not in seen:
                seen.add(child)
                yield f"{parent_name}.{child_name}".lstrip("."), child, parent


def _obstacle(layer: nn.Linear, parent: nn.Module) -> str | None:  # noqa: PLR0911 - one a reason
    """Why this layer cannot be converted, or None."""
    if isinstance(layer, Float8Linear):
        return f"already float8 ({layer.recipe.name})"
    if type(layer).forward is not nn.Linear.forward or "forward" in vars(layer):
        return f"{type(layer).__name__} has a forward of its own"
    if isinstance(parent, nn.MultiheadAttention):
        return "its forward is never called: MultiheadAttention reads its weight"
    if parametrize.is_parametrized(layer):
        return "parametrized: its class is made for its parametrizations; convert it before"
    if isinstance(layer, nn.LazyLinear):
        return "lazy: its shape is not known yet"
    if layer.weight.dtype not in HIGH_PRECISION:
        return f"its weight is {layer.weight.dtype}, not float32, bfloat16 or float16"
    return None


def _pays(layer: nn.Linear, tokens: int | None) -> bool:
    least = regimes.break_even_tokens(layer.in_features, layer.out_features)
    return tokens is None or (least is not None and tokens >= least)


def _payoff(layer: nn.Linear) -> str:
    least = regimes.break_even_tokens(layer.in_features, layer.out_features)
    when = "pays at no M" if least is None else f"pays from M = {least}"
    return f"{when} ({regimes.published().name})"


def _advice(layer: nn.Linear, parent: nn.Module, tokens: int | None) -> str:
    notes = [_payoff(layer)] if tokens is None else []
    if isinstance(parent, nn.TransformerEncoderLayer):
        notes.append("TransformerEncoderLayer's fast path in eval mode does not call it")
    return "; ".join(notes)


def _case(name: str, layer: nn.Linear, recipe: Recipe, tokens: int | None) -> Case:
    """What is known of a layer of the reference at its conversion."""
    return Case(
        subject="linear",
        M=tokens,
        K=layer.in_features,
        N=layer.out_features,
        recipe=recipe.name,
        bias=layer.bias is not None,
        bias_fused=True,
        accumulation=recipe.output.accumulation,
        head=name.rpartition(".")[2] in _HEADS,
        target="reference",
        gpu=_gpu(layer.weight.device),
    )


def _gpu(device: torch.device) -> str | None:
    """The id of the device's hardware file; None on a CPU, and for a fake tensor's GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    known = hardware.find(torch.cuda.get_device_name(device))
    return known.id if known is not None else None


def _warning(reports: list[LayerReport]) -> str:
    """Which layers are in which regime, and what to do: one line for each regime."""
    concerned = [report for report in reports if report.regimes]
    of = f"{len(concerned)} of {sum(r.converted for r in reports)} converted layers"
    lines = [f"{of} are in regimes known to be slow or inaccurate in float8 (docs/regimes.md):"]
    for regime in regimes.load():
        inside = [r for r in concerned if regime.id in r.regimes]
        if inside:
            names = [f"{r.name} ({r.in_features} -> {r.out_features})" for r in inside[:_NAMED]]
            names += [f"{len(inside) - _NAMED} more"] if len(inside) > _NAMED else []
            lines.append(f"  {regime.id}: {', '.join(names)}. To do: {regime.remedy}")
    return "\n".join(lines)


def _swap(layer: nn.Linear, recipe: Recipe, backend: Backend | None) -> None:
    base: type = type(layer)
    layer.__class__ = _float8_class(base)
    vars(layer).update(recipe=recipe, backend=backend or default_backend(layer.weight.device))


def default_backend(device: torch.device) -> Backend:
    """The backend "torch" on a GPU with float8 tensor cores (sm_89 or later), else "emulated"."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        return "torch"
    return "emulated"


@cache  # one class for each base, so that two layers of a kind have one type
def _float8_class(base: type) -> type[Float8Linear]:
    """Float8Linear itself, or for a subclass of Linear the class that is also that subclass."""
    if base is nn.Linear:
        return Float8Linear

    def reduce(self: Float8Linear, protocol: int) -> tuple[Any, ...]:
        # The class is made here, so pickle must be told how to make it again.
        return _empty, (base,), self.__getstate__()  # type: ignore[no-untyped-call]

    members = {"__reduce_ex__": reduce, "__module__": base.__module__}
    return type(f"Float8{base.__name__}", (Float8Linear, base), members)


def _empty(base: type) -> Float8Linear:
    cls = _float8_class(base)
    return cls.__new__(cls)


@dataclass
class Watch:
    """How often each converted layer ran: see `watch`."""

    calls: dict[str, int] = field(default_factory=dict)

    @property
    def idle(self) -> tuple[str, ...]:
        """The converted layers that did not run."""
        return tuple(name for name, count in self.calls.items() if count == 0)


@contextmanager
def watch(model: nn.Module) -> Iterator[Watch]:
    """Count the calls of every Float8Linear of `model`, so that one that never runs is found out.

        with fp8.watch(model) as ran:
            model(batch)
        assert not ran.idle, f"converted, but float8 never ran: {ran.idle}"

    Uses no hooks: the fast paths that skip a layer's forward look for hooks and step aside. Run the
    model eagerly while watching. Raises ValueError when the model has no Float8Linear.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, Float8Linear)}
    if not layers:
        raise ValueError("model: got no Float8Linear, needs a converted model")
    ran = Watch(dict.fromkeys(layers, 0))

    def counted(name: str, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def wrapper(input: Tensor) -> Tensor:
            ran.calls[name] += 1
            return forward(input)

        return wrapper

    for name, layer in layers.items():
        vars(layer)["forward"] = counted(name, layer.forward)
    try:
        yield ran
    finally:
        for layer in layers.values():
            del vars(layer)["forward"]
