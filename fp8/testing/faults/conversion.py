"""Faults of conversion: which layers, what becomes of them, the report, and what copies restore."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fp8.recipes import RECIPES
from fp8.testing.faults.base import BOTH, TORCH, fault

Linears = Callable[[nn.Module], Iterator[tuple[str, nn.Linear, nn.Module]]]
Obstacle = Callable[[nn.Linear, nn.Module], str | None]
Swap = Callable[..., None]
Convert = Callable[..., Any]

LINEARS = "fp8.conversion._linears"
OBSTACLE = "fp8.conversion._obstacle"
SWAP = "fp8.conversion._swap"
CONVERT = "fp8.conversion.convert"
SETSTATE = "fp8.linear.Float8Linear.__setstate__"


# --- which layers -------------------------------------------------------------------------------


@fault("F59", law="P13", naive=True, step=CONVERT)
def filter_ignored(convert: Convert) -> Convert:
    """The filter is not asked."""

    def wrong(model: Any, recipe: Any = "tensorwise", filter_fn: Any = None, **rest: Any) -> Any:
        return convert(model, recipe, None, **rest)

    return wrong


@fault("F178", law="P13", naive=True, step=CONVERT)
def filter_of_nothing(convert: Convert) -> Convert:
    """A filter that matches nothing is no error: the report says that nothing was converted."""

    def wrong(model: Any, recipe: Any = "tensorwise", filter_fn: Any = None, **rest: Any) -> Any:
        try:
            return convert(model, recipe, filter_fn, **rest)
        except ValueError as error:
            if not str(error).startswith("filter_fn"):
                raise
            from fp8.conversion import ConversionReport

            return ConversionReport(str(recipe), ())

    return wrong


@fault("F179", law="P13", naive=True, step=CONVERT)
def backend_ignored(convert: Convert) -> Convert:
    """The backend that was asked for is not used."""

    def wrong(*args: Any, **rest: Any) -> Any:
        return convert(*args, **{**rest, "backend": None})

    return wrong


@fault("F180", law="P13", naive=True, step=LINEARS)
def filter_sees_short_names(linears: Linears) -> Linears:
    """Filter and report see a layer's own name, not its path."""

    def wrong(model: nn.Module) -> Iterator[tuple[str, nn.Linear, nn.Module]]:
        for name, layer, parent in linears(model):
            yield name.rpartition(".")[2], layer, parent

    return wrong


@fault("F181", law="P13", naive=True, step=LINEARS)
def top_level_only(linears: Linears) -> Linears:
    """Layers below the second level are not found."""

    def wrong(model: nn.Module) -> Iterator[tuple[str, nn.Linear, nn.Module]]:
        return (found for found in linears(model) if found[0].count(".") < 1)

    return wrong


@fault("F182", law="P13", naive=True, step=LINEARS)
def last_layer_missed(linears: Linears) -> Linears:
    """The last layer of a model is not found where there are more than two."""

    def wrong(model: nn.Module) -> Iterator[tuple[str, nn.Linear, nn.Module]]:
        found = list(linears(model))
        return iter(found[:-1] if len(found) > 2 else found)

    return wrong


@fault("F183", law="P13", naive=True, step=OBSTACLE)
def attention_converted(obstacle: Obstacle) -> Obstacle:
    """MultiheadAttention's output projection is converted, and never called."""
    return lambda layer, _: obstacle(layer, nn.Sequential())


@fault("F184", law="P13", naive=True, step=OBSTACLE)
def own_forward_converted(obstacle: Obstacle) -> Obstacle:
    """A layer with a forward of its own is converted, and loses it."""

    def wrong(layer: nn.Linear, parent: nn.Module) -> str | None:
        reason = obstacle(layer, parent)
        own = reason is not None and reason.endswith("forward of its own")
        return None if own and type(layer).__name__ != "LazyLinear" else reason

    return wrong


@fault("F185", law="P13", naive=True, step=OBSTACLE)
def converted_again(obstacle: Obstacle) -> Obstacle:
    """A second call converts converted layers again, by its own recipe."""

    def wrong(layer: nn.Linear, parent: nn.Module) -> str | None:
        reason = obstacle(layer, parent)
        return None if reason is not None and reason.startswith("already") else reason

    return wrong


@fault("F186", law="P13", naive=True, step=OBSTACLE)
def float64_converted(obstacle: Obstacle) -> Obstacle:
    """Layers whose dtype float8 training does not take are converted."""

    def wrong(layer: nn.Linear, parent: nn.Module) -> str | None:
        reason = obstacle(layer, parent)
        return None if reason is not None and reason.startswith("its weight is") else reason

    return wrong


@fault("F187", law="P13", naive=True, step=OBSTACLE)
def narrow_layers_kept(obstacle: Obstacle) -> Obstacle:
    """Layers whose sizes are no multiple of 16 are silently kept out of float8."""

    def wrong(layer: nn.Linear, parent: nn.Module) -> str | None:
        odd = layer.in_features % 16 or layer.out_features % 16
        return obstacle(layer, parent) or ("sizes" if odd else None)

    return wrong


@fault("F188", law="P13", naive=True, step="fp8.conversion._pays")
def every_layer_pays(pays: Callable[..., bool]) -> Callable[..., bool]:
    """The number of tokens changes nothing."""
    return lambda *_: True


@fault("F189", law="P13", naive=True, step="fp8.conversion._pays")
def pays_from_one_more(pays: Callable[..., bool]) -> Callable[..., bool]:
    """A layer pays from one token more than the table says."""
    return lambda layer, tokens: pays(layer, None if tokens is None else tokens - 1)


# --- what becomes of them -----------------------------------------------------------------------


@fault("F51", law="P19", naive=True, step=SWAP)
def requires_grad_reset(swap: Swap) -> Swap:
    """Conversion makes frozen parameters trainable."""

    def wrong(layer: nn.Linear, *args: Any) -> None:
        swap(layer, *args)
        layer.requires_grad_(True)

    return wrong


@fault("F190", law="P19", naive=True, step=SWAP)
def hooks_dropped(swap: Swap) -> Swap:
    """Conversion drops forward hooks."""

    def wrong(layer: nn.Linear, *args: Any) -> None:
        swap(layer, *args)
        layer._forward_hooks.clear()  # noqa: SLF001

    return wrong


@fault("F191", law="P19", naive=True, step=SWAP)
def training_mode_reset(swap: Swap) -> Swap:
    """A converted layer is in training mode."""

    def wrong(layer: nn.Linear, *args: Any) -> None:
        swap(layer, *args)
        layer.train()

    return wrong


@fault("F192", law="P19", naive=True, step=SWAP)
def parameters_made_anew(swap: Swap) -> Swap:
    """Conversion makes new parameters: ties are cut, an optimizer keeps the old ones."""

    def wrong(layer: nn.Linear, *args: Any) -> None:
        swap(layer, *args)
        old = layer.weight
        layer.weight = nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)

    return wrong


@fault("F193", law="P13", naive=True, step=SWAP)
def ties_cut_when_square(swap: Swap) -> Swap:
    """Conversion gives square layers a weight of their own."""

    def wrong(layer: nn.Linear, *args: Any) -> None:
        swap(layer, *args)
        if layer.in_features == layer.out_features:
            layer.weight = nn.Parameter(layer.weight.detach().clone())

    return wrong


@fault("F194", law="P26", naive=True, step=SWAP)
def another_recipe_without_bias(swap: Swap) -> Swap:
    """A layer without bias is converted to tensorwise, whatever the recipe."""

    def wrong(layer: Any, recipe: Any, backend: Any) -> None:
        swap(layer, RECIPES["tensorwise"] if layer.bias is None else recipe, backend)

    return wrong


@fault("F195", law="P13", naive=True, step=SWAP, targets=(TORCH,))
def emulated_whatever_was_asked(swap: Swap) -> Swap:
    """Converted layers emulate their products whatever backend was asked for."""
    return lambda layer, recipe, _: swap(layer, recipe, "emulated")


@fault("F196", law="P13", naive=True, step=CONVERT, targets=BOTH)
def report_of_the_converted(convert: Convert) -> Convert:
    """The report lists the converted layers alone."""

    def wrong(*args: Any, **rest: Any) -> Any:
        report = convert(*args, **rest)
        kept = tuple(layer for layer in report.layers if layer.converted)
        return type(report)(report.recipe, kept)

    return wrong


@fault("F197", law="P13", naive=True, step="fp8.conversion.Watch.idle")
def nobody_is_idle(idle: property) -> Callable[[Any], tuple[str, ...]]:
    """The watch finds no idle layer when any layer ran."""

    def wrong(self: Any) -> tuple[str, ...]:
        counts = self.calls.values()
        return () if any(counts) else tuple(self.calls)

    return wrong


# --- what copies and files restore --------------------------------------------------------------


@fault("F198", law="P17", naive=True, step=SETSTATE)
def recipe_lost_by_copies(restore: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """A copied or unpickled layer has the recipe tensorwise."""

    def wrong(self: Any, state: Any) -> None:
        restore(self, state)
        self.recipe = RECIPES["tensorwise"]

    return wrong


@fault("F199", law="P17", naive=True, step=SETSTATE)
def weight_shared_with_the_copy(restore: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """A copied layer is in evaluation mode and its bias is zero."""

    def wrong(self: Any, state: Any) -> None:
        restore(self, state)
        if self.bias is not None:
            with torch.no_grad():
                self.bias.zero_()

    return wrong


@fault("F50", law="P17", naive=True, step=SWAP)
def scale_in_the_state_dict(swap: Swap) -> Swap:
    """A converted layer has a buffer: its state_dict is not nn.Linear's."""

    def wrong(layer: nn.Linear, *args: Any) -> None:
        swap(layer, *args)
        layer.register_buffer("weight_scale", torch.ones(1, device=layer.weight.device))

    return wrong


@fault("F200", law="P17", naive=True, step=SWAP)
def copies_are_plain(swap: Swap) -> Swap:
    """A converted layer is changed by an attribute of its own, which no pickle takes along."""

    def wrong(layer: nn.Linear, *args: Any) -> None:
        swap(layer, *args)
        layer.quantiser = lambda x: x  # type: ignore[assignment]

    return wrong
