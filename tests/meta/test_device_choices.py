"""What the library chooses for a device and asks of torch there, seen without the device.

The numerics suite sees a wrong choice where the device is, unless the choice is to do without what
the device can: then a test is skipped. What devices want is written again here from its sources,
and not taken from the library.
"""

from __future__ import annotations

import copy
import json
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from fp8 import conversion, matmul
from fp8.formats import E4M3FN, E5M2
from fp8.quantize import Operand, Quantized
from fp8.scaling import BLOCK_1X128, BLOCK_128X128, COLUMNWISE, ROWWISE, TENSORWISE, TORCHAO
from fp8.targets import reference
from fp8.testing.worlds import in_world

#: XPU is a device of which the library knows nothing special
CPU, CUDA, XPU = (torch.device(name) for name in ("cpu", "cuda", "xpu"))
FLAT = (TENSORWISE, ROWWISE)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def operand(granularity, format=E4M3FN):
    return Operand(format, granularity, TORCHAO)


# --- the backend --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "backend"),
    [
        ((7, 0), "emulated"),
        ((7, 9), "emulated"),
        ((8, 8), "emulated"),
        ((8, 9), "torch"),
        ((9, 0), "torch"),
        ((12, 0), "torch"),
    ],
)
def test_float8_hardware_begins_with_8_9(monkeypatch, capability, backend):
    """CUDA's float8 instructions need sm_89 or later (PTX ISA, `mma` and `wgmma`)."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert conversion.default_backend(CUDA) == backend


@pytest.mark.parametrize("device", [CPU, XPU, torch.device("meta")], ids=str)
def test_other_devices_emulate(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert conversion.default_backend(device) == "emulated"


# --- what a backend multiplies ------------------------------------------------------------------


@pytest.mark.parametrize("device", [CPU, CUDA, XPU], ids=str)
def test_the_emulated_product_takes_all_granularities(device):
    for a in (TENSORWISE, ROWWISE, COLUMNWISE, BLOCK_1X128, BLOCK_128X128):
        for b in (TENSORWISE, BLOCK_128X128):
            for formats, able in {
                (E4M3FN, E4M3FN): True,
                (E5M2, E4M3FN): True,
                (E4M3FN, E5M2): True,
                (E5M2, E5M2): False,
            }.items():
                operands = operand(a, formats[0]), operand(b, formats[1])
                assert matmul.supports(*operands, backend="emulated", device=device) == able


def test_a_backend_may_be_read_from_a_file():
    """An equal string is as good as the same one."""
    how = {"backend": json.loads('"emulated"'), "device": CPU}
    assert matmul.supports(operand(BLOCK_1X128), operand(BLOCK_1X128), **how)


@pytest.mark.parametrize("rowwise", [True, False], ids=["able", "unable"])
@pytest.mark.parametrize("device", [CPU, CUDA, XPU], ids=str)
@pytest.mark.parametrize("a", FLAT, ids=lambda g: g.name)
@pytest.mark.parametrize("b", FLAT, ids=lambda g: g.name)
def test_torch_multiplies_one_scale_a_tensor_or_row(monkeypatch, rowwise, device, a, b):
    """On a CPU, rowwise only where this torch does it right (pytorch#179118)."""
    monkeypatch.setattr(matmul, "cpu_multiplies_rowwise", lambda: rowwise)
    # What was unpickled is equal and not the same object.
    how = operand(a), operand(copy.deepcopy(b))
    able = device != CPU or rowwise or a == b == TENSORWISE
    assert matmul.supports(*how, backend="torch", device=device) == able
    e5m2 = operand(a, E5M2), operand(b)
    assert matmul.supports(*e5m2, backend="torch", device=device) == able
    both = operand(a, E5M2), operand(b, E5M2)
    assert not matmul.supports(*both, backend="torch", device=device)


@pytest.mark.parametrize("device", [CPU, CUDA, XPU], ids=str)
def test_torch_multiplies_blocks_on_cuda_alone(device):
    """cuBLASLt: float8_e4m3fn, one of the operands 1x128 (documentation of cublasLtMatmul)."""
    blocks = (BLOCK_1X128, BLOCK_128X128)
    for a in (*blocks, *FLAT, COLUMNWISE):
        for b in (*blocks, *FLAT, COLUMNWISE):
            if a in FLAT and b in FLAT:
                continue
            both_blocks = a in blocks and b in blocks
            able = device == CUDA and both_blocks and not (a == b == BLOCK_128X128)
            how = operand(a), operand(copy.deepcopy(b))
            assert matmul.supports(*how, backend="torch", device=device) == able, (a.name, b.name)
            for formats in ((E5M2, E4M3FN), (E4M3FN, E5M2)):
                how = operand(a, formats[0]), operand(b, formats[1])
                assert not matmul.supports(*how, backend="torch", device=device)


def test_a_torch_without_blockwise_products(monkeypatch):
    monkeypatch.delattr(torch.nn.functional, "scaled_mm", raising=False)
    how = operand(BLOCK_1X128), operand(BLOCK_128X128)
    assert not matmul.supports(*how, backend="torch", device=CUDA)


def scaled(a, b, *, scale_a, scale_b, out_dtype):
    """What `torch._scaled_mm` is to do, in float64."""
    wide = (a.double() * scale_a.double()) @ (b.double() * scale_b.double())
    return wide.to(out_dtype)


def with_first_scale(a, b, *, scale_a, scale_b, out_dtype):
    """What it does with a scale a row in some of torch 2.11's builds."""
    return scaled(a, b, scale_a=scale_a[:1], scale_b=scale_b[:, :1], out_dtype=out_dtype)


def with_scales_in_reverse(a, b, *, scale_a, scale_b, out_dtype):
    return scaled(a, b, scale_a=scale_a.flip(0), scale_b=scale_b.flip(1), out_dtype=out_dtype)


def refusing(a, b, **how):
    raise RuntimeError("Only Tensor-wise scaling is supported")


@pytest.mark.parametrize(
    ("product", "able"),
    [(scaled, True), (with_first_scale, False), (with_scales_in_reverse, False), (refusing, False)],
)
def test_rowwise_on_a_cpu_is_tried(monkeypatch, product, able):
    """The trial passes exactly the products that are right."""
    monkeypatch.setattr(torch, "_scaled_mm", product)
    assert matmul.cpu_multiplies_rowwise.__wrapped__() == able


def test_rowwise_on_this_cpu():
    """The library does without this torch's rowwise product only if it is refused or wrong."""
    codes = (torch.arange(32 * 48).reshape(32, 48) % 7 - 3.0).to(E4M3FN.dtype)
    scale = 2.0 ** (torch.arange(32.0) % 5 - 2).unsqueeze(1)
    operands = (codes, codes.t())
    how = {"scale_a": scale, "scale_b": scale.t(), "out_dtype": torch.float32}
    try:
        right = torch.equal(torch._scaled_mm(*operands, **how), scaled(*operands, **how))
    except (RuntimeError, ValueError):
        right = False
    assert matmul.cpu_multiplies_rowwise() == right


# --- what torch is asked for --------------------------------------------------------------------


@dataclass
class Asked:
    """One call of torch's product."""

    a: torch.Tensor
    b: torch.Tensor
    out_dtype: torch.dtype
    bias: torch.Tensor | None
    fast: bool
    scale_a: torch.Tensor
    scale_b: torch.Tensor


@contextmanager
def asking():
    """Notes what torch's products are asked for; they answer with zeros."""
    calls = []

    def product(a, b, **how):
        dtype = how.get("out_dtype") or how["output_dtype"]
        rest = (how["bias"], how["use_fast_accum"], how["scale_a"], how["scale_b"])
        calls.append(Asked(a, b, dtype, *rest))
        return torch.zeros((a.shape[0], b.shape[1]), dtype=dtype, device=a.device)

    with (
        mock.patch.object(torch, "_scaled_mm", product),
        mock.patch.object(torch.nn.functional, "scaled_mm", product, create=True),
    ):
        yield calls


def asked(device, granularities, out_dtype, bias, *, fast=False, shape=(5, 33, 7)):
    """What torch is asked for by a product (M, K, N)."""
    M, K, N = shape
    world, target = "real" if device == CPU else "fake CUDA", reference.torch_backend(CPU)
    with in_world(world, target) as here, asking() as calls:
        a, b = (
            # An equal description is as good as the same one.
            q._replace(operand=copy.deepcopy(q.operand))
            for q in (
                here.operand(rows, K, granularity=granularity.name)
                for rows, granularity in zip((M, N), granularities, strict=True)
            )
        )
        offset = torch.zeros(N, dtype=out_dtype, device=here.device) if bias else None
        out = matmul.torch_product(a, b, offset, out_dtype, fast=fast)
        assert (out.shape, out.dtype) == ((M, N), out_dtype)
    (call,) = calls
    return call


ROWS = ((ROWWISE, ROWWISE), (TENSORWISE, ROWWISE), (ROWWISE, TENSORWISE))
BLOCKS = ((BLOCK_1X128, BLOCK_128X128), (BLOCK_128X128, BLOCK_1X128), (BLOCK_1X128, BLOCK_1X128))


def named(pairs):
    return pytest.mark.parametrize("pair", pairs, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")


every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@every_dtype
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@named([(TENSORWISE, TENSORWISE), *ROWS, *BLOCKS])
def test_torch_rounds_where_it_can(pair, bias, dtype):
    """torch is asked for the output's dtype where it writes it and adds the bias there, if any.

    Otherwise it is asked for float32, and what remains is added and rounded afterwards. CUDA writes
    every dtype for one scale a tensor, bfloat16 and float32 for rows and blocks (pytorch#156771);
    it adds a bias to a 16-bit output, and for blocks never.
    """
    tensorwise, blocks = pair == (TENSORWISE, TENSORWISE), pair in BLOCKS
    writes = {torch.float32, torch.bfloat16} | ({torch.float16} if tensorwise else set())
    adds = set() if blocks else writes - {torch.float32}
    call = asked(CUDA, pair, dtype, bias)
    assert (call.bias is not None) == (bias and dtype in adds)
    direct = dtype in adds if bias else dtype in writes
    assert call.out_dtype == (dtype if direct else torch.float32)


@every_dtype
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_a_cpu_rounds_every_dtype(monkeypatch, bias, dtype):
    monkeypatch.setattr(matmul, "cpu_multiplies_rowwise", lambda: True)
    call = asked(CPU, (ROWWISE, ROWWISE), dtype, bias)
    assert call.out_dtype == dtype
    assert (call.bias is not None) == (bias and dtype != torch.float32)


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "precise"])
@named([(TENSORWISE, TENSORWISE), *ROWS, *BLOCKS])
def test_fast_accumulation_is_passed_on(pair, fast):
    """Blocks are always summed precisely: torch refuses to be asked for anything else."""
    assert asked(CUDA, pair, torch.bfloat16, False, fast=fast).fast == (fast and pair not in BLOCKS)


@pytest.mark.parametrize(("accumulation", "fast"), [("fast", True), ("precise", False)])
def test_the_accumulation_reaches_torch(accumulation, fast):
    with in_world("real", reference.torch_backend(CPU)) as here, asking() as calls:
        a, b = here.operand(3, 16), here.operand(5, 16)
        how = {"out_dtype": torch.float32, "accumulation": accumulation, "backend": "torch"}
        matmul.scaled_mm(a, b, **how)
    assert [call.fast for call in calls] == [fast]


@pytest.mark.parametrize("shape", [(5, 33, 7), (16, 16, 16), (8, 300, 20), (1, 1, 1)], ids=str)
@named([(TENSORWISE, TENSORWISE), *ROWS, *BLOCKS])
def test_torch_gets_the_shapes_that_it_wants(pair, shape):
    """K and N in multiples of 16; the rows as they are, but for blocks in multiples of 4."""
    M, K, N = shape
    call = asked(CUDA, pair, torch.bfloat16, False, shape=shape)
    rows = -(-M // 4) * 4 if pair in BLOCKS else M
    columns, contraction = (-(-extent // 16) * 16 for extent in (N, K))
    assert call.a.shape == (rows, contraction)
    assert call.b.shape == (contraction, columns)
    if pair not in BLOCKS:
        wide = pair != (TENSORWISE, TENSORWISE)
        assert call.scale_a.shape == (rows if wide else 1, 1)
        assert call.scale_b.shape == (1, columns if wide else 1)


@pytest.mark.parametrize("empty", [0, 1, 2], ids=["M", "K", "N"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_nothing_is_asked_of_torch_for_an_empty_product(empty, bias):
    """Some of its kernels refuse it."""
    M, K, N = (0 if axis == empty else 16 for axis in range(3))
    with in_world("real", reference.torch_backend(CPU)) as here, asking() as calls:
        offset = here.ones(N) if bias else None
        a, b = here.operand(M, K), here.operand(N, K)
        out = matmul.torch_product(a, b, offset, torch.float32, fast=False)
    assert calls == []
    assert torch.equal(out, torch.full((M, N), float(bias)))


@pytest.mark.parametrize("blocks", [2, 3, 4, 5])
def test_scales_of_blocks_lie_as_cublaslt_reads_them(blocks):
    """1x128: all rows' scales of a block of K together. 128x128: by blocks of K, padded to 4.

    cuBLASLt's documentation ("Scaling factors layouts") has both; torch wants them as tensors of
    (rows, blocks of K) and (blocks of K, blocks of N) with these strides.
    """
    scale = torch.arange(1.0, 1 + 3 * blocks).reshape(3, blocks)

    def lain(granularity, rows):
        codes = torch.zeros((rows, 128 * blocks), dtype=E4M3FN.dtype)
        return matmul._blockwise_scale(Quantized(codes, scale, operand(granularity)))

    rows = lain(BLOCK_1X128, 3)
    assert torch.equal(rows, scale)
    assert rows.stride() == (1, 3)
    squares = lain(BLOCK_128X128, 3 * 128)
    padded = -(-blocks // 4) * 4
    assert squares.shape == (padded, 3)
    assert torch.equal(squares[:blocks], scale.t())
    assert (squares[blocks:] == 1).all()
    assert squares.stride() == (1, padded)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_operands_begin_at_multiples_of_16_bytes(dtype):
    """cuBLASLt refuses other addresses; what begins at one already is not copied."""
    whole = torch.arange(200).to(dtype)
    size = whole.element_size()
    for offset in range(40):
        x = whole[offset : offset + 96].view(6, 16)
        out = matmul._compact(x)
        assert torch.equal(out, x)
        assert out.data_ptr() % 16 == 0
        assert (out.data_ptr() == x.data_ptr()) == (offset * size % 16 == 0)
