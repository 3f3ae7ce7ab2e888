"""Bad input is refused with an error that names the argument, what it got and what it needs.

Every case is asked twice: of tensors on the target's device, and of CUDA tensors without data
(`FakeTensorMode`), so that a machine without a GPU sees CUDA's verdict where it needs no data.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fp8
from fp8 import matmul
from fp8.formats import FORMATS
from fp8.quantize import Operand, Quantized
from fp8.scaling import GRANULARITIES, TORCHAO
from fp8.targets.reference import ReferenceTarget
from fp8.testing import oracle
from fp8.testing.strategies import examples, shapes

#: M tokens, K in, N out: all different, none of them aligned
M, K, N = 5, 17, 33
RECIPES = tuple(oracle.RECIPES)
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
WORLDS = ("real", "fake CUDA")

worlds = pytest.mark.parametrize("world", WORLDS)


@dataclass(frozen=True)
class World:
    """Where tensors are made: on the target's device, or on CUDA without data."""

    device: torch.device
    #: a device that is not this one
    elsewhere: torch.device

    def zeros(self, *shape: int, dtype: str = "float32") -> torch.Tensor:
        # As bytes, which every dtype and device can be made of. Zero bytes are zeros.
        size = getattr(torch, dtype).itemsize
        if not shape:
            return self.zeros(1, dtype=dtype)[0]
        bytes_ = torch.zeros(*shape[:-1], shape[-1] * size, dtype=torch.uint8, device=self.device)
        return bytes_.view(getattr(torch, dtype))

    def ones(self, *shape: int) -> torch.Tensor:
        return torch.ones(shape, device=self.device)

    def operand(
        self,
        rows: int,
        columns: int,
        *,
        format: str = "e4m3fn",
        granularity: str = "tensorwise",
        scale_shape: tuple[int, ...] | None = None,
    ) -> Quantized:
        """Zero codes and scales of one, without the target's help."""
        how = Operand(FORMATS[format], GRANULARITIES[granularity], TORCHAO)
        shape = right_scale_shape(granularity, rows, columns) if scale_shape is None else scale_shape
        codes = self.zeros(rows, columns, dtype=f"float8_{format}")
        return Quantized(codes, self.ones(*shape), how)

    def layer(self, target, recipe: str, dtype: str = "float32") -> nn.Module:
        """A converted Linear of K inputs and N outputs."""
        # skip_init: a CPU build cannot draw random numbers on CUDA, fake or not.
        layer = nn.utils.skip_init(
            nn.Linear, K, N, device=self.device, dtype=getattr(torch, dtype)
        )
        return target.convert(nn.Sequential(layer), recipe)


def right_scale_shape(granularity: str, rows: int, columns: int) -> tuple[int, int]:
    """Written again from the definition: the library's own would hide its mistake."""
    block_rows, block_columns = GRANULARITIES[granularity].block
    return (
        1 if block_rows is None else -(-rows // block_rows),
        1 if block_columns is None else -(-columns // block_columns),
    )


@contextmanager
def in_world(name: str, target):
    if name == "real":
        yield World(target.device, torch.device("meta"))
        return
    with FakeTensorMode():
        yield World(torch.device("cuda"), torch.device("cpu"))


def refuses(judge, target) -> None:
    judge.require(
        target.capabilities().refuses_bad_input, "bad input: does not promise to name the argument"
    )


# --- cast and quantize --------------------------------------------------------------------------


@pytest.mark.law("P04")
@worlds
@pytest.mark.parametrize("dtype", WRONG_DTYPES)
def test_dtypes_that_cannot_be_quantized(target, judge, world, dtype):
    """Only float32, bfloat16 and float16 are cast or quantised; float8 says that it is already."""
    refuses(judge, target)
    judge.example(dtype=dtype, world=world)
    capabilities = target.capabilities()
    mentions = ("x", dtype, "float32", "bfloat16", "float16")
    with in_world(world, target) as here:
        x = here.zeros(M, K, dtype=dtype)
        for name in sorted(capabilities.formats):
            judge.raises(
                "P04",
                f"cast {dtype}",
                lambda x=x, name=name: target.cast(x, FORMATS[name]),
                TypeError,
                mentions,
            )
        for operand in sorted(capabilities.operands, key=str):
            judge.raises(
                "P04",
                f"quantize {dtype}",
                lambda x=x, operand=operand: target.quantize(x, operand),
                TypeError,
                mentions,
            )


@pytest.mark.law("P04")
@worlds
@pytest.mark.parametrize("shape", [(), (K,), (2, M, K), (1, 1, 1, 1)], ids=str)
def test_ranks_that_cannot_be_quantized(target, judge, world, shape):
    """Scaling groups are those of a matrix: (rows, columns)."""
    refuses(judge, target)
    judge.example(shape=list(shape), world=world)
    with in_world(world, target) as here:
        x = here.zeros(*shape)
        for operand in sorted(target.capabilities().operands, key=str):
            judge.raises(
                "P04",
                f"quantize rank {len(shape)}",
                lambda x=x, operand=operand: target.quantize(x, operand),
                ValueError,
                ("x", str(shape), "2"),
            )


@pytest.mark.law("P04")
@pytest.mark.parametrize("value", [[[1.0, 2.0]], 1.0, None], ids=["list", "float", "None"])
def test_what_is_no_tensor(target, judge, value):
    """A list, a number or nothing is refused by its type."""
    refuses(judge, target)
    kind = type(value).__name__
    judge.example(type=kind)
    operand = Operand(FORMATS["e4m3fn"], GRANULARITIES["tensorwise"], TORCHAO)
    calls = {
        "cast": ("x", lambda: target.cast(value, FORMATS["e4m3fn"])),
        "quantize": ("x", lambda: target.quantize(value, operand)),
    }
    for check, (name, call) in calls.items():
        judge.raises("P04", f"{check} of no tensor", call, TypeError, (name, kind, "tensor"))


@pytest.mark.law("P04")
@worlds
def test_scale_format_for_elements(target, judge, world):
    """e8m0fnu has no sign and no mantissa: scales are made of it, operands are not."""
    refuses(judge, target)
    judge.example(format="e8m0fnu", world=world)
    operand = Operand(FORMATS["e8m0fnu"], GRANULARITIES["tensorwise"], TORCHAO)
    with in_world(world, target) as here:
        x = here.zeros(M, K)
        judge.raises(
            "P04",
            "quantize to e8m0fnu",
            lambda: target.quantize(x, operand),
            (TypeError, ValueError),
            ("format", "e8m0fnu"),
        )


# --- scaled_mm ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """Arguments of `scaled_mm`, good ones unless a case changes them."""

    a: object
    b: object
    bias: torch.Tensor | None = None
    out_dtype: object = torch.bfloat16
    accumulation: object = "precise"

    def run(self, target) -> torch.Tensor:
        return target.scaled_mm(
            self.a,
            self.b,
            bias=self.bias,
            out_dtype=self.out_dtype,
            accumulation=self.accumulation,
        )


def good(here: World, **changes: object) -> Call:
    arguments = {"a": here.operand(M, K), "b": here.operand(N, K), **changes}
    return Call(**arguments)


def replaced(operand: Quantized, **changes: object) -> Quantized:
    return operand._replace(**changes)


#: name -> (arguments in a world, types of error, words of its message)
BAD_PRODUCTS = {
    "a is no operand": (
        lambda here: good(here, a=here.zeros(M, K)),
        TypeError,
        ("a:", "Tensor", "Quantized"),
    ),
    "b is no operand": (
        lambda here: good(here, b=here.zeros(N, K, dtype="float8_e4m3fn")),
        TypeError,
        ("b:", "Tensor", "Quantized"),
    ),
    "a's codes are bfloat16": (
        lambda here: good(here, a=replaced(here.operand(M, K), codes=here.zeros(M, K))),
        TypeError,
        ("a.codes", "float32", "float8_e4m3fn"),
    ),
    "b's codes are bytes": (
        lambda here: good(
            here, b=replaced(here.operand(N, K), codes=here.zeros(N, K, dtype="uint8"))
        ),
        TypeError,
        ("b.codes", "uint8", "float8_e4m3fn"),
    ),
    "b's codes are of another format": (
        lambda here: good(
            here, b=replaced(here.operand(N, K), codes=here.zeros(N, K, dtype="float8_e5m2"))
        ),
        TypeError,
        ("b.codes", "float8_e5m2", "float8_e4m3fn"),
    ),
    "a's codes are a vector": (
        lambda here: good(
            here, a=replaced(here.operand(M, K), codes=here.zeros(K, dtype="float8_e4m3fn"))
        ),
        ValueError,
        ("a.codes", f"({K},)", "2"),
    ),
    "b's codes have three dimensions": (
        lambda here: good(
            here, b=replaced(here.operand(N, K), codes=here.zeros(2, N, K, dtype="float8_e4m3fn"))
        ),
        ValueError,
        ("b.codes", f"(2, {N}, {K})", "2"),
    ),
    "contractions differ": (
        lambda here: good(here, b=here.operand(N, K + 1)),
        ValueError,
        ("b.codes", f"({N}, {K + 1})", f"(N, {K})"),
    ),
    "b is laid out with the contraction first": (
        lambda here: good(here, b=here.operand(K, N)),
        ValueError,
        ("b.codes", f"({K}, {N})", f"(N, {K})"),
    ),
    "a's scale is float64": (
        lambda here: good(
            here, a=replaced(here.operand(M, K), scale=here.zeros(1, 1, dtype="float64"))
        ),
        TypeError,
        ("a.scale", "float64", "float32"),
    ),
    "b's scale is bfloat16": (
        lambda here: good(
            here, b=replaced(here.operand(N, K), scale=here.zeros(1, 1, dtype="bfloat16"))
        ),
        TypeError,
        ("b.scale", "bfloat16", "float32"),
    ),
    "b's scale is e8m0fnu": (
        lambda here: good(
            here, b=replaced(here.operand(N, K), scale=here.zeros(1, 1, dtype="float8_e8m0fnu"))
        ),
        TypeError,
        ("b.scale", "float8_e8m0fnu", "float32"),
    ),
    "a's scale is on another device": (
        lambda here: good(
            here,
            a=replaced(here.operand(M, K), scale=torch.ones(1, 1, device=here.elsewhere)),
        ),
        ValueError,
        ("a.scale", "device"),
    ),
    "b is on another device": (
        lambda here: good(here, b=World(here.elsewhere, here.device).operand(N, K)),
        ValueError,
        ("b.codes", "device"),
    ),
    "e5m2 x e5m2": (
        lambda here: good(
            here, a=here.operand(M, K, format="e5m2"), b=here.operand(N, K, format="e5m2")
        ),
        TypeError,
        ("a, b", "e5m2 x e5m2", "e4m3fn x e4m3fn", "e5m2 x e4m3fn"),
    ),
    "fnuz": (
        lambda here: good(
            here, a=here.operand(M, K, format="e4m3fnuz"), b=here.operand(N, K, format="e4m3fnuz")
        ),
        TypeError,
        ("a, b", "e4m3fnuz x e4m3fnuz", "e4m3fn x e4m3fn"),
    ),
    "fnuz with fn": (
        lambda here: good(here, b=here.operand(N, K, format="e5m2fnuz")),
        TypeError,
        ("a, b", "e4m3fn x e5m2fnuz", "e4m3fn x e5m2"),
    ),
    "e8m0fnu elements": (
        lambda here: good(here, b=here.operand(N, K, format="e8m0fnu")),
        TypeError,
        ("a, b", "e8m0fnu"),
    ),
    "bias too short": (
        lambda here: good(here, bias=here.zeros(N - 1, dtype="bfloat16")),
        ValueError,
        ("bias", f"({N - 1},)", f"({N},)"),
    ),
    "bias as long as the contraction": (
        lambda here: good(here, bias=here.zeros(K, dtype="bfloat16")),
        ValueError,
        ("bias", f"({K},)", f"({N},)"),
    ),
    "bias of one value": (
        lambda here: good(here, bias=here.zeros(1, dtype="bfloat16")),
        ValueError,
        ("bias", "(1,)", f"({N},)"),
    ),
    "bias is a matrix": (
        lambda here: good(here, bias=here.zeros(1, N, dtype="bfloat16")),
        ValueError,
        ("bias", f"(1, {N})", f"({N},)"),
    ),
    "bias of another dtype than the output": (
        lambda here: good(here, bias=here.zeros(N)),
        TypeError,
        ("bias", "float32", "bfloat16"),
    ),
    "bias is float8": (
        lambda here: good(here, bias=here.zeros(N, dtype="float8_e4m3fn")),
        TypeError,
        ("bias", "float8_e4m3fn", "bfloat16"),
    ),
    "bias on another device": (
        lambda here: good(
            here, bias=torch.zeros(N, dtype=torch.bfloat16, device=here.elsewhere)
        ),
        ValueError,
        ("bias", "device"),
    ),
    "bias is a list": (
        lambda here: good(here, bias=[0.0] * N),
        TypeError,
        ("bias", "list", "tensor"),
    ),
    "output in float64": (
        lambda here: good(here, out_dtype=torch.float64),
        TypeError,
        ("out_dtype", "float64", "float32"),
    ),
    "output in float8": (
        lambda here: good(here, out_dtype=torch.float8_e4m3fn),
        TypeError,
        ("out_dtype", "float8_e4m3fn", "bfloat16"),
    ),
    "output in integers": (
        lambda here: good(here, out_dtype=torch.int32),
        TypeError,
        ("out_dtype", "int32", "float16"),
    ),
    "unknown accumulation": (
        lambda here: good(here, accumulation="sloppy"),
        ValueError,
        ("accumulation", "sloppy", "fast", "precise"),
    ),
    "accumulation as a switch": (
        lambda here: good(here, accumulation=True),
        (TypeError, ValueError),
        ("accumulation", "True", "fast", "precise"),
    ),
}


@pytest.mark.law("P04")
@worlds
@pytest.mark.parametrize("case", BAD_PRODUCTS)
def test_scaled_mm(target, judge, world, case):
    """One bad argument among good ones: the error names it, what it got and what it needs."""
    refuses(judge, target)
    judge.example(case=case, world=world)
    make, exceptions, mentions = BAD_PRODUCTS[case]
    with in_world(world, target) as here:
        call = make(here)
        judge.raises("P04", case, lambda: call.run(target), exceptions, mentions)


#: granularity pairs that some device multiplies
PAIRS = (
    ("tensorwise", "tensorwise"),
    ("rowwise", "rowwise"),
    ("rowwise", "tensorwise"),
    ("1x128", "128x128"),
    ("1x128", "1x128"),
)


def wrong_scale_shapes(granularity: str, rows: int, columns: int) -> list[tuple[int, ...]]:
    """Shapes that a caller may well pass, none of them right."""
    right = right_scale_shape(granularity, rows, columns)
    others = {right_scale_shape(name, rows, columns) for name in GRANULARITIES}
    near = {
        (),
        (right[0],),
        (right[0] * right[1],),
        right[::-1],
        (right[0] + 1, right[1]),
        (right[0], right[1] + 1),
        (right[0] - 1, right[1]),
        (right[0], right[1] - 1),
        (*right, 1),
        (1, *right),
        (rows, columns),
        (columns, rows),
    }
    return sorted((near | others) - {right})


@pytest.mark.law("P04")
@pytest.mark.parametrize("side", ("a", "b"))
@pytest.mark.parametrize("granularities", PAIRS, ids="-".join)
@examples(12)
@given(data=st.data(), shape=shapes(1, 300))
def test_scale_of_another_shape(target, judge, granularities, side, data, shape):
    """A scale that is flat, transposed, one too many or of another granularity is never taken."""
    refuses(judge, target)
    rows, contraction, columns = shape
    extent, granularity = {
        "a": (rows, granularities[0]),
        "b": (columns, granularities[1]),
    }[side]
    wrong = data.draw(st.sampled_from(wrong_scale_shapes(granularity, extent, contraction)))
    facts = {"M": rows, "K": contraction, "N": columns, "side": side, "scale": list(wrong)}
    judge.example(granularity=granularity, **facts)
    right = right_scale_shape(granularity, extent, contraction)
    for world in WORLDS:
        with in_world(world, target) as here:
            operands = {
                "a": here.operand(rows, contraction, granularity=granularities[0]),
                "b": here.operand(columns, contraction, granularity=granularities[1]),
            }
            operands[side] = replaced(operands[side], scale=here.ones(*wrong))
            call = Call(**operands)
            judge.raises(
                "P04",
                f"scale of another shape, {world}",
                lambda call=call: call.run(target),
                ValueError,
                (f"{side}.scale", str(wrong), str(right)),
            )


@pytest.mark.law("P04")
@pytest.mark.parametrize("case", [name for name, case in BAD_PRODUCTS.items() if "scale" in name])
def test_products_of_others(target, judge, case):
    """A stack that does not promise good errors still never multiplies by a malformed scale."""
    how = World(target.device, target.device).operand(M, K).operand
    judge.require((how, how) in target.capabilities().products, f"scaled_mm: no {how} x {how}")
    judge.example(case=case)
    make, _, _ = BAD_PRODUCTS[case]
    with in_world("real", target) as here:
        call = make(here)
        judge.raises("P04", f"{case}, any error", lambda: call.run(target), Exception)


@pytest.mark.law("P04")
@pytest.mark.parametrize(
    "granularities", [("128x128", "128x128"), ("columnwise", "columnwise")], ids="-".join
)
def test_product_that_the_backend_lacks(target, judge, granularities):
    """What torch's operator cannot multiply is refused by name, not multiplied some other way."""
    judge.require(
        isinstance(target, ReferenceTarget) and target.backend == "torch",
        "scaled_mm: every granularity has a product",
    )
    judge.example(granularities=list(granularities))
    with in_world("real", target) as here:
        a, b = (
            here.operand(rows, K, granularity=name)
            for rows, name in zip((M, N), granularities, strict=True)
        )
        judge.raises(
            "P04",
            "no such product",
            lambda: Call(a, b).run(target),
            NotImplementedError,
            ("backend", granularities[0], "emulated", target.device.type),
        )


@pytest.mark.law("P04")
@worlds
@pytest.mark.parametrize("backend", ("cublas", "", None, "Torch"))
def test_unknown_backend(target, judge, world, backend):
    """The reference's own argument: `scaled_mm` and `convert` list the backends there are."""
    judge.require(isinstance(target, ReferenceTarget), "backend: the reference's own argument")
    judge.example(backend=backend, world=world)
    with in_world(world, target) as here:
        call = good(here)
        judge.raises(
            "P04",
            "unknown backend of a product",
            lambda: matmul.scaled_mm(call.a, call.b, out_dtype=torch.bfloat16, backend=backend),
            ValueError,
            ("backend", repr(backend), "emulated", "torch"),
        )
        if backend is not None:  # which leaves the choice to convert
            judge.raises(
                "P04",
                "unknown backend of a model",
                lambda: fp8.convert(nn.Sequential(nn.Linear(K, N, device="meta")), backend=backend),
                ValueError,
                ("backend", repr(backend), "emulated", "torch"),
            )


# --- layers -------------------------------------------------------------------------------------


@pytest.mark.law("P04")
@pytest.mark.parametrize("recipe", ("float8", "Rowwise", "", None, 3), ids=str)
def test_unknown_recipe(target, judge, recipe):
    """The error lists the recipes there are, and the model stays as it was."""
    refuses(judge, target)
    judge.example(recipe=recipe)
    model = nn.Sequential(nn.Linear(K, N, device=target.device))
    judge.raises(
        "P04",
        "unknown recipe",
        lambda: target.convert(model, recipe),
        (TypeError, ValueError),
        ("recipe", repr(recipe), *target.capabilities().recipes),
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


def has_recipe(judge, target, recipe: str) -> None:
    judge.require(recipe in target.capabilities().recipes, f"convert: no recipe {recipe}")


@pytest.mark.law("P04")
@worlds
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", BAD_INPUTS)
def test_layer_input(target, judge, recipe, world, case):
    """What nn.Linear would not multiply either: the error names `input`."""
    refuses(judge, target)
    has_recipe(judge, target, recipe)
    judge.example(recipe=recipe, case=case, world=world)
    bad = BAD_INPUTS[case]
    with in_world(world, target) as here:
        layer = here.layer(target, recipe, bad.parameters)
        x = bad.make(here)
        judge.raises("P04", case, lambda: layer(x), bad.exceptions, bad.mentions)


@pytest.mark.law("P04")
@worlds
@pytest.mark.parametrize("recipe", RECIPES)
def test_layer_input_on_another_device(target, judge, recipe, world):
    refuses(judge, target)
    has_recipe(judge, target, recipe)
    judge.example(recipe=recipe, world=world)
    with in_world(world, target) as here:
        layer = here.layer(target, recipe)
        x = torch.zeros(M, K, device=here.elsewhere)
        judge.raises(
            "P04",
            "input on another device",
            lambda: layer(x),
            ValueError,
            ("input", "device", here.elsewhere.type, here.device.type),
        )


@pytest.mark.law("P04")
@worlds
@pytest.mark.parametrize("dtype", [d for d in WRONG_DTYPES if d != "complex64"])
def test_layer_input_under_autocast(target, judge, world, dtype):
    """Autocast casts float32, bfloat16 and float16: it is no excuse for another dtype.

    nn.Linear refuses these, too: autocast leaves a float64 input, a float8 one and integers alone.
    """
    refuses(judge, target)
    judge.example(dtype=dtype, world=world)
    with in_world(world, target) as here:
        layer = here.layer(target, "tensorwise")
        x = here.zeros(M, K, dtype=dtype)
        with torch.autocast(here.device.type, torch.bfloat16):
            judge.raises(
                "P04", "input under autocast", lambda: layer(x), TypeError, ("input", dtype)
            )


@pytest.mark.law("P04")
@pytest.mark.parametrize("autocast", (False, True), ids=("plain", "autocast"))
def test_weight_that_became_float64(target, judge, autocast):
    """A model made double after its conversion: the error names the weight."""
    refuses(judge, target)
    judge.example(dtype="float64", autocast=autocast)
    with in_world("real", target) as here:
        layer = here.layer(target, "tensorwise").double()
        x = here.zeros(M, K)
        context = torch.autocast(here.device.type, torch.bfloat16) if autocast else nullcontext()
        with context:
            judge.raises("P04", "float64 weight", lambda: layer(x), TypeError, ("weight", "float64"))


@pytest.mark.law("P04")
def test_layer_input_that_is_no_tensor(target, judge):
    refuses(judge, target)
    judge.example(type="list")
    with in_world("real", target) as here:
        layer = here.layer(target, "tensorwise")
        x = [[0.0] * K] * M
        judge.raises(
            "P04", "input is a list", lambda: layer(x), TypeError, ("input", "list", "tensor")
        )


@pytest.mark.law("P04")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("case", ("int64 input", "float8_e4m3fn input", "last dimension too long"))
def test_layers_of_others(target, judge, recipe, case):
    """A stack that does not promise good errors still raises one, and never returns a tensor."""
    has_recipe(judge, target, recipe)
    judge.example(recipe=recipe, case=case)
    with in_world("real", target) as here:
        layer = here.layer(target, recipe)
        x = BAD_INPUTS[case].make(here)
        judge.raises("P04", f"{case}, any error", lambda: layer(x), Exception)


# --- good input passes --------------------------------------------------------------------------


@pytest.mark.law("P04")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_good_input_passes(target, judge, recipe, dtype):
    """The same layers take what is right: none of these errors is raised by mistake."""
    has_recipe(judge, target, recipe)
    judge.require(
        getattr(torch, dtype) in target.capabilities().dtypes, f"convert: no {dtype} parameters"
    )
    tokens = 16 if target.capabilities().alignment > 1 else M
    judge.require(target.capabilities().alignment == 1, "convert: no unaligned K and N")
    judge.example(recipe=recipe, dtype=dtype)
    with in_world("real", target) as here:
        layer = here.layer(target, recipe, dtype)
        ran, y = judge.attempt("P04", "good input", lambda: layer(here.zeros(tokens, K, dtype=dtype)))
        if ran:
            judge.equal("P04", "shape of the output", tuple(y.shape), (tokens, N))
            judge.equal("P04", "dtype of the output", y.dtype, getattr(torch, dtype))


def accepted_by_cuda(a: Quantized, b: Quantized, bias, dtype: torch.dtype) -> torch.Tensor:
    """The reference's operands, padded and laid out as it does, given to torch's own check.

    Not the whole of `torch_product`: a slice of a fake CUDA tensor needs a CUDA build.
    """
    a, b, bias = matmul.pad_operands(a, b, bias)
    return matmul._flat_product(a, b, bias, dtype, True)


def lain(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same shape: row-major, column-major, or with a gap after each row."""
    if layout == "row-major":
        return x
    if layout == "column-major":
        return x.t().contiguous().t()
    return torch.nn.functional.pad(x, (0, 3)).narrow(1, 0, x.shape[1])


@pytest.mark.law("P04", "P03")
@pytest.mark.parametrize("layout", ("row-major", "column-major", "padded"))
@pytest.mark.parametrize("granularities", PAIRS[:3], ids="-".join)
@examples(10)
@given(shape=shapes(1, 70), bias=st.booleans())
def test_cuda_accepts_the_padded_product(target, judge, granularities, layout, shape, bias):
    """Any M, K, N and any layout meet CUDA's conditions, as torch states them without a GPU.

    M = 17, K = 17, N = 33 among them: the second operand column-major, K and N multiples of 16.
    torch's statement is incomplete (it lets e5m2 x e5m2 pass), so this is no proof, but CUDA's
    refusal of the unpadded product shows that it is asked.
    """
    judge.require(
        isinstance(target, ReferenceTarget) and target.backend == "torch",
        "scaled_mm: no product of torch's to pad for",
    )
    for rows, contraction, columns in (shape, (17, 17, 33)):
        judge.example(M=rows, K=contraction, N=columns, layout=layout, bias=bias)
        with FakeTensorMode():
            here = World(torch.device("cuda"), torch.device("cpu"))
            a, b = (
                replaced(x, codes=lain(x.codes.view(torch.uint8), layout).view(x.codes.dtype))
                for x in (
                    here.operand(rows, contraction, granularity=granularities[0]),
                    here.operand(columns, contraction, granularity=granularities[1]),
                )
            )
            offset = here.zeros(columns, dtype="bfloat16") if bias else None
            ran, out = judge.attempt(
                "P03",
                "padded product on CUDA",
                lambda a=a, b=b, offset=offset: accepted_by_cuda(a, b, offset, torch.bfloat16),
            )
            if ran:
                judge.equal("P03", "rows of the output", out.shape[0], rows)
                judge.true(
                    "P03",
                    "columns of the output",
                    out.shape[1] >= columns,
                    f"got {out.shape[1]} columns, needs {columns} or more",
                )
            if contraction % 16:
                judge.raises(
                    "P04",
                    "unpadded product on CUDA",
                    lambda a=a, b=b: torch._scaled_mm(
                        a.codes,
                        b.codes.t(),
                        scale_a=here.ones(1, 1),
                        scale_b=here.ones(1, 1),
                        out_dtype=torch.bfloat16,
                    ),
                    Exception,
                )
