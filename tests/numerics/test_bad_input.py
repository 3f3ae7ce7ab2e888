"""Bad input is refused with an error that names the argument, what it got and what it needs.

Casts, quantisation and layers; the scaled product has its own file. What needs no values is asked
twice: on the target's device, and on CUDA without data.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fp8.formats import FORMATS
from fp8.quantize import Operand
from fp8.scaling import GRANULARITIES, TORCHAO
from fp8.testing.strategies import DTYPES
from fp8.testing.worlds import WORLDS, World, in_world

#: M tokens, K in, N out: all different, none of them aligned
M, K, N = 5, 17, 33
#: what no operand may be: not float32, bfloat16 or float16
WRONG_DTYPES = (
    "float64",
    "int64",
    "int32",
    "uint8",
    "bool",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
)

worlds = pytest.mark.parametrize("world", WORLDS)


@pytest.fixture
def careful(target, judge):
    """The target, which promises errors that name the argument."""
    promise = target.capabilities().refuses_bad_input
    judge.require(promise, "bad input: does not promise to name the argument")
    return target


@pytest.fixture
def recipes(target, judge):
    """The names of the target's recipes, one or more."""
    known = sorted(target.capabilities().recipes)
    judge.require(bool(known), "convert: no recipe at all")
    return known


# --- cast and quantize --------------------------------------------------------------------------


@pytest.mark.law("P04")
@worlds
@pytest.mark.parametrize("dtype", WRONG_DTYPES)
def test_dtypes_that_cannot_be_quantized(careful, judge, world, dtype):
    """Only float32, bfloat16 and float16 are cast or quantised; float8 says that it is already."""
    judge.example(dtype=dtype, world=world)
    capabilities = careful.capabilities()
    mentions = ("x:", dtype, "float32", "bfloat16", "float16")
    with in_world(world, careful) as here:
        x = here.zeros(M, K, dtype=dtype)
        for name in sorted(capabilities.formats):
            judge.raises(
                "P04",
                f"cast {dtype}",
                lambda x=x, name=name: careful.cast(x, FORMATS[name]),
                TypeError,
                mentions,
            )
        for operand in sorted(capabilities.operands, key=str):
            judge.raises(
                "P04",
                f"quantize {dtype}",
                lambda x=x, operand=operand: careful.quantize(x, operand),
                TypeError,
                mentions,
            )


@pytest.mark.law("P04")
@worlds
@pytest.mark.parametrize("shape", [(), (K,), (2, M, K), (1, 1, 1, 1)], ids=str)
def test_ranks_that_cannot_be_quantized(careful, judge, world, shape):
    """Scaling groups are those of a matrix: (rows, columns)."""
    judge.example(shape=list(shape), world=world)
    with in_world(world, careful) as here:
        x = here.zeros(*shape)
        for operand in sorted(careful.capabilities().operands, key=str):
            judge.raises(
                "P04",
                f"quantize rank {len(shape)}",
                lambda x=x, operand=operand: careful.quantize(x, operand),
                ValueError,
                ("x:", str(shape), "2"),
            )


@pytest.mark.law("P04")
@pytest.mark.parametrize("value", [[[1.0, 2.0]], 1.0, None], ids=["list", "float", "None"])
def test_what_is_no_tensor(careful, judge, value):
    """A list, a number or nothing is refused by its type."""
    kind = type(value).__name__
    judge.example(type=kind)
    operand = Operand(FORMATS["e4m3fn"], GRANULARITIES["tensorwise"], TORCHAO)
    calls = {
        "cast": lambda: careful.cast(value, FORMATS["e4m3fn"]),
        "quantize": lambda: careful.quantize(value, operand),
    }
    for check, call in calls.items():
        judge.raises("P04", f"{check} of no tensor", call, TypeError, ("x:", kind, "tensor"))


@pytest.mark.law("P04")
def test_scale_format_for_elements(careful, judge):
    """e8m0fnu has no sign and no mantissa: scales are made of it, operands are not."""
    judge.example(format="e8m0fnu")
    granularity = GRANULARITIES["tensorwise"]

    def quantize() -> object:
        operand = Operand(FORMATS["e8m0fnu"], granularity, TORCHAO)
        return careful.quantize(torch.zeros(M, K, device=careful.device), operand)

    mentions = ("format", "e8m0fnu")
    judge.raises("P04", "quantize to e8m0fnu", quantize, (TypeError, ValueError), mentions)


# --- layers -------------------------------------------------------------------------------------


@pytest.mark.law("P04")
@pytest.mark.parametrize("recipe", ["float8", "Rowwise", "", None, 3], ids=str)
def test_unknown_recipe(careful, judge, recipe):
    """The error lists the recipes there are, and the model stays as it was."""
    judge.example(recipe=recipe)
    model = nn.Sequential(nn.Linear(K, N, device=careful.device))
    judge.raises(
        "P04",
        "unknown recipe",
        lambda: careful.convert(model, recipe),
        (TypeError, ValueError),
        ("recipe", repr(recipe), *careful.capabilities().recipes),
    )
    judge.equal("P04", "model untouched", type(model[0]).__name__, "Linear")


@dataclass(frozen=True)
class Input:
    """One input that a layer of K features cannot take."""

    #: dtype of the layer's parameters
    parameters: str
    dtype: str
    shape: tuple[int, ...]
    exceptions: type[Exception]
    mentions: tuple[str, ...]

    def make(self, here: World) -> torch.Tensor:
        return here.zeros(*self.shape, dtype=self.dtype)


def _wrong_dtype(dtype: str, parameters: str = "float32") -> Input:
    return Input(parameters, dtype, (M, K), TypeError, ("input", dtype, parameters))


def _wrong_shape(*shape: int) -> Input:
    return Input("float32", "float32", shape, ValueError, ("input", str(shape), str(K)))


BAD_INPUTS = {
    **{f"{dtype} input": _wrong_dtype(dtype) for dtype in WRONG_DTYPES},
    "bfloat16 input, float32 weight": _wrong_dtype("bfloat16"),
    "float16 input, float32 weight": _wrong_dtype("float16"),
    "float32 input, bfloat16 weight": _wrong_dtype("float32", "bfloat16"),
    "float16 input, bfloat16 weight": _wrong_dtype("float16", "bfloat16"),
    "last dimension too long": _wrong_shape(M, K + 1),
    "last dimension too short": _wrong_shape(2, M, K - 1),
    "transposed": _wrong_shape(K, M),
    # M * K values, so that a reshape to (-1, K) would take them.
    "as many values in another shape": _wrong_shape(K, 2, M),
    "a scalar": _wrong_shape(),
    "a vector of another length": _wrong_shape(N),
    "no features": _wrong_shape(M, 0),
}


@pytest.mark.law("P04")
@worlds
@pytest.mark.parametrize("case", BAD_INPUTS)
def test_layer_input(careful, recipes, judge, world, case):
    """What nn.Linear would not multiply either: the error names `input`, whatever the recipe."""
    bad = BAD_INPUTS[case]
    for recipe in recipes:
        judge.example(recipe=recipe, case=case, world=world)
        with in_world(world, careful) as here:
            layer = here.layer(careful, recipe, K, N, bad.parameters)
            x = bad.make(here)
            judge.raises(
                "P04", case, lambda layer=layer, x=x: layer(x), bad.exceptions, bad.mentions
            )


@pytest.mark.law("P04")
@worlds
def test_layer_input_on_another_device(careful, recipes, judge, world):
    for recipe in recipes:
        judge.example(recipe=recipe, world=world)
        with in_world(world, careful) as here:
            layer = here.layer(careful, recipe, K, N)
            x = torch.zeros(M, K, device=here.elsewhere)
            judge.raises(
                "P04",
                "input on another device",
                lambda layer=layer, x=x: layer(x),
                ValueError,
                ("input", "device", here.elsewhere.type, here.device.type),
            )


@pytest.mark.law("P04")
@pytest.mark.parametrize("dtype", WRONG_DTYPES)
def test_layer_input_under_autocast(careful, recipes, judge, dtype):
    """Autocast casts float32, bfloat16 and float16: it is no excuse for another dtype.

    nn.Linear refuses these under autocast, too (torch 2.13), but for float8 inputs, which it takes
    for numbers although their scale is elsewhere.
    """
    judge.example(dtype=dtype)
    # On the device only: a build without CUDA switches CUDA's autocast off.
    with in_world("real", careful) as here:
        layer = here.layer(careful, recipes[0], K, N)
        x = here.zeros(M, K, dtype=dtype)
        with torch.autocast(here.device.type, torch.bfloat16):
            judge.raises(
                "P04", "input under autocast", lambda: layer(x), TypeError, ("input", dtype)
            )


@pytest.mark.law("P04")
@pytest.mark.parametrize("autocast", [False, True], ids=("plain", "autocast"))
def test_weight_that_became_float64(careful, recipes, judge, autocast):
    """A model made double after its conversion: the error names the weight."""
    judge.example(dtype="float64", autocast=autocast)
    with in_world("real", careful) as here:
        layer = here.layer(careful, recipes[0], K, N).double()
        x = here.zeros(M, K)
        context = torch.autocast(here.device.type, torch.bfloat16) if autocast else nullcontext()
        with context:
            mentions = ("weight", "float64")
            judge.raises("P04", "float64 weight", lambda: layer(x), TypeError, mentions)


@pytest.mark.law("P04")
def test_layer_input_that_is_no_tensor(careful, recipes, judge):
    judge.example(type="list")
    with in_world("real", careful) as here:
        layer = here.layer(careful, recipes[0], K, N)
        x = [[0.0] * K] * M
        judge.raises(
            "P04", "input is a list", lambda: layer(x), TypeError, ("input", "list", "tensor")
        )


@pytest.mark.law("P04")
@pytest.mark.parametrize("case", ["int64 input", "float8_e4m3fn input", "last dimension too long"])
def test_layers_of_others(target, recipes, judge, case):
    """A stack that does not promise good errors still raises one, and never returns a tensor."""
    for recipe in recipes:
        judge.example(recipe=recipe, case=case)
        with in_world("real", target) as here:
            layer = here.layer(target, recipe, K, N)
            x = BAD_INPUTS[case].make(here)
            judge.raises("P04", f"{case}, any error", lambda layer=layer, x=x: layer(x), Exception)


# --- good input passes --------------------------------------------------------------------------


@pytest.mark.law("P04")
@worlds
@pytest.mark.parametrize("dtype", DTYPES)
def test_good_input_passes(target, recipes, judge, world, dtype):
    """The same layers take what is right: none of these errors is raised by mistake."""
    capabilities = target.capabilities()
    judge.require(getattr(torch, dtype) in capabilities.dtypes, f"convert: no {dtype} parameters")
    judge.require(capabilities.alignment == 1, "convert: M, K and N must be aligned")
    if world != "real":
        # Others may take odd extents on this device and not on CUDA.
        judge.require(capabilities.refuses_bad_input, "bad input: promises nothing about CUDA")
    for recipe in recipes:
        judge.example(recipe=recipe, dtype=dtype, world=world)
        with in_world(world, target) as here:
            layer = here.layer(target, recipe, K, N, dtype)
            x = here.zeros(M, K, dtype=dtype)
            ran, y = judge.attempt("P04", "good input", lambda layer=layer, x=x: layer(x))
            if ran:
                judge.equal("P04", "shape of the output", tuple(y.shape), (M, N))
                judge.equal("P04", "dtype of the output", y.dtype, getattr(torch, dtype))
