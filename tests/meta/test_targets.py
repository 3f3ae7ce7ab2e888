"""The targets as such: found by name, honest about the device, clear when a stack is missing."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest
import torch
from packaging.version import Version

from fp8 import targets
from fp8.formats import E4M3FN, E5M2
from fp8.quantize import Operand, Quantized
from fp8.scaling import BLOCK_1X128, BLOCK_128X128, COLUMNWISE, ROWWISE, TENSORWISE, TORCHAO
from fp8.targets import torch_native

CUDA = torch.device("cuda")


def on_gpu(monkeypatch, capability: tuple[int, int]) -> None:
    """Let torch say that it has a GPU of this compute capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)


def operand(granularity) -> Operand:
    return Operand(E4M3FN, granularity, TORCHAO)


# --- torch --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.11.0", "nan"),
        ("2.11.1+cu130", "nan"),
        ("2.12.0.dev20260420+cpu", "saturate"),
        ("2.12.0", "saturate"),
        ("2.13.0+cpu", "saturate"),
    ],
)
def test_overflow_by_version(version, expected):
    """pytorch#178817 made e4m3fn saturate; the other formats didn't change."""
    overflow = torch_native._overflow(Version(version))
    assert overflow.pop("e4m3fn") == expected
    assert overflow == {"e5m2": "inf", "e4m3fnuz": "nan", "e5m2fnuz": "nan", "e8m0fnu": "nan"}


def test_torch_on_a_cpu():
    capabilities = targets.load("torch").capabilities()
    assert (operand(TENSORWISE), operand(TENSORWISE)) in capabilities.products
    assert (operand(ROWWISE), operand(ROWWISE)) in capabilities.products
    assert (operand(ROWWISE), operand(TENSORWISE)) not in capabilities.products
    assert (operand(BLOCK_1X128), operand(BLOCK_128X128)) not in capabilities.products
    assert (operand(COLUMNWISE), operand(COLUMNWISE)) not in capabilities.products
    assert not capabilities.operands
    assert not capabilities.recipes
    assert capabilities.alignment == 1


@pytest.mark.parametrize(("capability", "able"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_torch_on_a_gpu(monkeypatch, capability, able):
    """Products start with compute capability 8.9; none multiplies e5m2 by e5m2."""
    on_gpu(monkeypatch, capability)
    products = torch_native.target(CUDA).capabilities().products
    twice = Operand(E5M2, TENSORWISE, TORCHAO)
    assert ((operand(ROWWISE), operand(ROWWISE)) in products) == able
    assert ((twice, operand(TENSORWISE)) in products) == able
    assert (twice, twice) not in products
    assert (operand(BLOCK_1X128), operand(BLOCK_128X128)) not in products


def test_cuda_contract(monkeypatch):
    """No bias for a float32 output, K and N in multiples of 16."""
    on_gpu(monkeypatch, (9, 0))
    capabilities = torch_native.target(CUDA).capabilities()
    assert capabilities.alignment == 16
    assert torch.float32 in capabilities.dtypes
    assert torch.float32 not in capabilities.bias_dtypes


def quantized(rows: int, columns: int, granularity) -> Quantized:
    shape = granularity.scale_shape(rows, columns)
    scale = torch.arange(1.0, 1 + shape[0] * shape[1]).reshape(shape)
    codes = (torch.arange(rows * columns).reshape(rows, columns) % 5 - 2.0).to(E4M3FN.dtype)
    return Quantized(codes, scale, operand(granularity))


def test_scales_lie_as_torch_wants_them():
    """(rows, 1) with a stride of 1 along the one column, where numpy may have left a 0."""
    rowwise = quantized(5, 16, ROWWISE)
    odd = rowwise._replace(scale=rowwise.scale.as_strided((5, 1), (1, 0)))
    target = targets.load("torch")
    out = [
        target.scaled_mm(
            a, quantized(7, 16, ROWWISE), bias=None, out_dtype=torch.float32, accumulation="precise"
        )
        for a in (rowwise, odd)
    ]
    assert torch.equal(*out)


@pytest.mark.parametrize("granularity", [TENSORWISE, ROWWISE], ids=lambda g: g.name)
def test_either_name_of_the_product(monkeypatch, granularity):
    """Where torch has no `_scaled_mm`, the functional form gives the same bits."""
    target = targets.load("torch")
    a, b = quantized(5, 32, granularity), quantized(16, 32, granularity)
    bias = torch.arange(16.0)

    def product() -> torch.Tensor:
        return target.scaled_mm(a, b, bias=bias, out_dtype=torch.float32, accumulation="fast")

    expected = product()
    assert torch.equal(expected, a.dequantize() @ b.dequantize().t() + bias)
    monkeypatch.delattr(torch, "_scaled_mm")
    assert torch.equal(product(), expected)


# --- torchao ------------------------------------------------------------------------------------


@pytest.mark.parametrize("installed", [None, "0.16.0"])
def test_missing_torchao(monkeypatch, installed):
    """The error says what was found, what is needed and how to get it."""

    def version(name: str) -> str:
        assert name == "torchao"
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.delitem(sys.modules, "fp8.targets.torchao", raising=False)
    with pytest.raises(targets.UnknownTargetError, match=r"torchao >= 0\.17: pip install") as error:
        targets.load("torchao")
    assert (installed or "not installed") in str(error.value)


def test_torchao_needs_float8_hardware(monkeypatch):
    pytest.importorskip("torchao", reason="torchao is an optional extra")
    from fp8.targets import torchao

    on_gpu(monkeypatch, (8, 0))
    assert not torchao.target(CUDA).capabilities().recipes
    on_gpu(monkeypatch, (9, 0))
    capabilities = torchao.target(CUDA).capabilities()
    assert capabilities.recipes == {"tensorwise", "rowwise", "rowwise_with_gw_hp"}
    assert capabilities.alignment == 16


def test_torchao_is_loaded_quietly():
    """In a fresh process: what torchao and torch say at its import is about other things."""
    pytest.importorskip("torchao", reason="torchao is an optional extra")
    program = "from fp8.targets import load; print(load('torchao').name)"
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "torchao\n", "")
