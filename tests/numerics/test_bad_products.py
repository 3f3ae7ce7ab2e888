"""A scaled product refuses what it cannot multiply, and names the argument that is wrong.

Asked twice, of tensors on the target's device and of CUDA tensors without data; and the reference's
padded operands are shown to torch's own statement of what CUDA multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import fp8
from fp8 import matmul
from fp8.scaling import GRANULARITIES
from fp8.targets.reference import ReferenceTarget
from fp8.testing.strategies import DTYPES, examples, shapes
from fp8.testing.worlds import WORLDS, World, in_world, scale_shape

if TYPE_CHECKING:
    from fp8.quantize import Quantized

#: M tokens, K in, N out: all different, none of them aligned
M, K, N = 5, 17, 33

worlds = pytest.mark.parametrize("world", WORLDS)


@pytest.fixture
def careful(target, judge):
    """The target, which promises errors that name the argument."""
    promise = target.capabilities().refuses_bad_input
    judge.require(promise, "bad input: does not promise to name the argument")
    return target


@pytest.fixture
def with_torch_product(target, judge):
    """The target, which is the reference with torch's scaled product."""
    ours = isinstance(target, ReferenceTarget) and target.backend == "torch"
    judge.require(ours, "scaled_mm: not the reference with torch's product")
    return target


@dataclass(frozen=True)
class Call:
    """Arguments of `scaled_mm`: good ones but for one."""

    a: object
    b: object
    bias: object = None
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


def bad_products(here: World) -> dict[str, tuple[Call, type[Exception], tuple[str, ...]]]:
    """Case -> (call, type of its error, words of the message)."""
    a, b, zeros = here.operand(M, K), here.operand(N, K), here.zeros
    there = World(here.elsewhere, here.device)

    def codes(operand: Quantized, *shape: int, dtype: str = "float8_e4m3fn") -> Quantized:
        return operand._replace(codes=zeros(*shape, dtype=dtype))

    def scale(operand: Quantized, dtype: str) -> Quantized:
        return operand._replace(scale=zeros(1, 1, dtype=dtype))

    def bias(*shape: int, dtype: str = "bfloat16", on: World = here) -> Call:
        return Call(a, b, bias=on.zeros(*shape, dtype=dtype))

    def pair(first: str, second: str) -> Call:
        return Call(here.operand(M, K, format=first), here.operand(N, K, format=second))

    return {
        "a is no operand": (Call(zeros(M, K), b), TypeError, ("a:", "Tensor", "Quantized")),
        "b is no operand": (Call(a, b.codes), TypeError, ("b:", "Tensor", "Quantized")),
        "codes in high precision": (
            Call(codes(a, M, K, dtype="bfloat16"), b),
            TypeError,
            ("a.codes", "bfloat16", "float8_e4m3fn"),
        ),
        "codes as bytes": (
            Call(a, codes(b, N, K, dtype="uint8")),
            TypeError,
            ("b.codes", "uint8", "float8_e4m3fn"),
        ),
        "codes of another format": (
            Call(a, codes(b, N, K, dtype="float8_e5m2")),
            TypeError,
            ("b.codes", "float8_e5m2", "float8_e4m3fn"),
        ),
        "codes as a vector": (Call(codes(a, K), b), ValueError, ("a.codes", f"({K},)", "2")),
        "codes of three dimensions": (
            Call(a, codes(b, 2, N, K)),
            ValueError,
            ("b.codes", f"(2, {N}, {K})", "2"),
        ),
        "contractions differ": (
            Call(a, here.operand(N, K + 1)),
            ValueError,
            ("b.codes", f"({N}, {K + 1})", f"(N, {K})"),
        ),
        "contraction first": (
            Call(a, here.operand(K, N)),
            ValueError,
            ("b.codes", f"({K}, {N})", f"(N, {K})"),
        ),
        "scale in float64": (
            Call(scale(a, "float64"), b),
            TypeError,
            ("a.scale", "float64", "float32"),
        ),
        "scale in bfloat16": (
            Call(a, scale(b, "bfloat16")),
            TypeError,
            ("b.scale", "bfloat16", "float32"),
        ),
        "scale in e8m0fnu": (
            Call(a, scale(b, "float8_e8m0fnu")),
            TypeError,
            ("b.scale", "float8_e8m0fnu", "float32"),
        ),
        "scale elsewhere": (
            Call(a._replace(scale=there.zeros(1, 1)), b),
            ValueError,
            ("a.scale", "device", there.device.type, here.device.type),
        ),
        "operand elsewhere": (
            Call(a, there.operand(N, K)),
            ValueError,
            ("b.codes", "device", there.device.type, here.device.type),
        ),
        "e5m2 x e5m2": (pair("e5m2", "e5m2"), TypeError, ("a, b", "e5m2 x e5m2", *_KNOWN_PAIRS)),
        "fnuz x fnuz": (
            pair("e4m3fnuz", "e4m3fnuz"),
            TypeError,
            ("a, b", "e4m3fnuz x e4m3fnuz", *_KNOWN_PAIRS),
        ),
        "fn x fnuz": (
            pair("e4m3fn", "e5m2fnuz"),
            TypeError,
            ("a, b", "e4m3fn x e5m2fnuz", *_KNOWN_PAIRS),
        ),
        "bias too short": (bias(N - 1), ValueError, ("bias", f"({N - 1},)", f"({N},)")),
        "bias of K values": (bias(K), ValueError, ("bias", f"({K},)", f"({N},)")),
        "bias of one value": (bias(1), ValueError, ("bias", "(1,)", f"({N},)")),
        "bias as a matrix": (bias(1, N), ValueError, ("bias", f"(1, {N})", f"({N},)")),
        "bias of another dtype": (
            bias(N, dtype="float32"),
            TypeError,
            ("bias", "float32", "bfloat16"),
        ),
        "bias in float8": (
            bias(N, dtype="float8_e4m3fn"),
            TypeError,
            ("bias", "float8_e4m3fn", "bfloat16"),
        ),
        "bias elsewhere": (
            bias(N, on=there),
            ValueError,
            ("bias", "device", there.device.type, here.device.type),
        ),
        "bias as a list": (Call(a, b, bias=[0.0] * N), TypeError, ("bias", "list", "tensor")),
        **{
            f"output in {name}": (
                Call(a, b, out_dtype=getattr(torch, name)),
                TypeError,
                ("out_dtype", name, "float32", "bfloat16", "float16"),
            )
            for name in ("float64", "int32", "float8_e4m3fn")
        },
        "unknown accumulation": (
            Call(a, b, accumulation="sloppy"),
            ValueError,
            ("accumulation", "sloppy", "fast", "precise"),
        ),
        "accumulation as a switch": (
            Call(a, b, accumulation=True),
            ValueError,
            ("accumulation", "True", "fast", "precise"),
        ),
    }


_KNOWN_PAIRS = ("e4m3fn x e4m3fn", "e5m2 x e4m3fn", "e4m3fn x e5m2")
BAD_PRODUCTS = tuple(bad_products(World(torch.device("meta"), torch.device("meta"))))


@pytest.mark.law("P04")
@worlds
@pytest.mark.parametrize("case", BAD_PRODUCTS)
def test_scaled_mm(careful, judge, world, case):
    """One bad argument among good ones: the error names it, what it got and what it needs."""
    judge.example(case=case, world=world)
    with in_world(world, careful) as here:
        call, exception, mentions = bad_products(here)[case]
        judge.raises("P04", case, lambda: call.run(careful), exception, mentions)


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
    right = scale_shape(granularity, rows, columns)
    others = {scale_shape(name, rows, columns) for name in GRANULARITIES}
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


@pytest.mark.thorough
@pytest.mark.law("P04")
@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("granularities", PAIRS, ids="-".join)
@examples(12)
@given(data=st.data(), shape=shapes(1, 300))
def test_scale_of_another_shape(careful, judge, granularities, side, data, shape):
    """A scale that is flat, transposed, one too many or of another granularity is never taken."""
    rows, contraction, columns = shape
    extent, granularity = {
        "a": (rows, granularities[0]),
        "b": (columns, granularities[1]),
    }[side]
    wrong = data.draw(st.sampled_from(wrong_scale_shapes(granularity, extent, contraction)))
    facts = {"M": rows, "K": contraction, "N": columns, "side": side, "scale": list(wrong)}
    judge.example(granularity=granularity, **facts)
    right = scale_shape(granularity, extent, contraction)
    for world in WORLDS:
        with in_world(world, careful) as here:
            operands = {
                "a": here.operand(rows, contraction, granularity=granularities[0]),
                "b": here.operand(columns, contraction, granularity=granularities[1]),
            }
            operands[side] = operands[side]._replace(scale=here.ones(*wrong))
            call = Call(**operands)
            judge.raises(
                "P04",
                f"scale of another shape, {world}",
                lambda call=call: call.run(careful),
                ValueError,
                (f"{side}.scale", str(wrong), str(right)),
            )


@pytest.mark.law("P04")
@pytest.mark.parametrize("case", [name for name in BAD_PRODUCTS if name.startswith("scale in")])
def test_products_of_others(target, judge, case):
    """A stack that does not promise good errors still never multiplies by a malformed scale."""
    how = World(target.device, target.device).operand(M, K).operand
    judge.require((how, how) in target.capabilities().products, f"scaled_mm: no {how} x {how}")
    judge.example(case=case)
    with in_world("real", target) as here:
        call, _, _ = bad_products(here)[case]
        judge.raises("P04", f"{case}, any error", lambda: call.run(target), Exception)


@pytest.mark.law("P04")
@pytest.mark.parametrize(
    "granularities", [("128x128", "128x128"), ("columnwise", "columnwise")], ids="-".join
)
def test_product_that_the_backend_lacks(with_torch_product, judge, granularities):
    """What torch's operator cannot multiply is refused by name, not multiplied some other way."""
    judge.example(granularities=list(granularities))
    with in_world("real", with_torch_product) as here:
        a, b = (
            here.operand(rows, K, granularity=name)
            for rows, name in zip((M, N), granularities, strict=True)
        )
        judge.raises(
            "P04",
            "no such product",
            lambda: Call(a, b).run(with_torch_product),
            NotImplementedError,
            ("backend", granularities[0], "emulated", with_torch_product.device.type),
        )


@pytest.mark.law("P04")
@worlds
@pytest.mark.parametrize("backend", ["cublas", "", None, "Torch"])
def test_unknown_backend(target, judge, world, backend):
    """The reference's own argument: `scaled_mm` and `convert` list the backends there are."""
    judge.require(isinstance(target, ReferenceTarget), "backend: the reference's own argument")
    judge.example(backend=backend, world=world)
    with in_world(world, target) as here:
        a, b = here.operand(M, K), here.operand(N, K)
        judge.raises(
            "P04",
            "unknown backend of a product",
            lambda: matmul.scaled_mm(a, b, out_dtype=torch.bfloat16, backend=backend),
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


# --- good operands pass --------------------------------------------------------------------------


def lain(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same shape: row-major, column-major, or with a gap after each row."""
    rows, columns = x.shape
    if layout == "row-major":
        return x
    if layout == "column-major":
        return x.new_empty(columns, rows).t()
    return x.new_empty(rows, columns + 3).narrow(1, 0, columns)


@pytest.mark.thorough
@pytest.mark.law("P03", "P04")
# A build with CUDA may look for the data that a fake tensor has not, and say so.
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
@pytest.mark.parametrize("layout", ["row-major", "column-major", "padded"])
@pytest.mark.parametrize("granularities", PAIRS[:3], ids="-".join)
@examples(10)
@given(shape=shapes(1, 70), dtype=st.sampled_from(DTYPES), bias=st.booleans())
@example(shape=(17, 17, 33), dtype="bfloat16", bias=True)
def test_cuda_accepts_the_padded_product(
    with_torch_product, judge, granularities, layout, shape, dtype, bias
):
    """Any M, K, N and any layout meet CUDA's conditions, as torch states them without a GPU.

    That is: the second operand column-major, K and N multiples of 16, scales of the right shapes
    and strides. torch's statement is incomplete (it lets e5m2 x e5m2 pass), so this is no proof,
    but it refuses the unpadded product, which shows that it was asked.
    """
    M, K, N = shape
    judge.example(M=M, K=K, N=N, dtype=dtype, layout=layout, bias=bias)
    with in_world("fake CUDA", with_torch_product) as here:
        a, b = (
            operand._replace(codes=lain(operand.codes, layout))
            for operand in (
                here.operand(M, K, granularity=granularities[0]),
                here.operand(N, K, granularity=granularities[1]),
            )
        )
        offset = here.zeros(N, dtype=dtype) if bias else None
        ran, out = judge.attempt(
            "P03",
            "padded product on CUDA",
            lambda: matmul.torch_product(a, b, offset, getattr(torch, dtype), fast=True),
        )
        if ran:
            judge.equal("P03", "shape on CUDA", tuple(out.shape), (M, N))
            judge.equal("P03", "dtype on CUDA", out.dtype, getattr(torch, dtype))
        if K % 16:
            judge.raises(
                "P04",
                "unpadded product on CUDA",
                lambda: torch._scaled_mm(
                    a.codes,
                    b.codes.t(),
                    scale_a=here.ones(1, 1),
                    scale_b=here.ones(1, 1),
                    out_dtype=torch.bfloat16,
                ),
                RuntimeError,
            )
