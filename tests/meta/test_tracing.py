"""What is seen of products and of memory: each tool against cases counted by hand."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

from fp8 import matmul, quantize
from fp8.formats import E4M3FN, E5M2
from fp8.quantize import Operand
from fp8.scaling import ROWWISE, TENSORWISE, TORCHAO
from fp8.targets.base import ProductTrace
from fp8.testing import memory
from fp8.testing.tracing import record_products, trace_products

M, K, N = 5, 16, 32
CPU = torch.device("cpu")


def codes(rows: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(rows * K).reshape(rows, K) % 7 - 3.0).to(dtype)


# --- products -----------------------------------------------------------------------------------


def test_forward_and_backward_of_a_linear_layer():
    layer = nn.Linear(K, N, dtype=torch.bfloat16)
    x = torch.ones(M, K, dtype=torch.bfloat16, requires_grad=True)
    ran = trace_products(lambda: layer(x).sum().backward())
    assert [(p.a, p.b, p.accumulation) for p in ran] == [("bfloat16", "bfloat16", "")] * 3
    assert [p.operator for p in ran] == ["aten::addmm", "aten::mm", "aten::mm"]
    assert ran[0].shape == (M, N)
    assert {p.shape for p in ran[1:]} == {(M, K), (N, K)}


@pytest.mark.parametrize("dimensions", [1, 3])
def test_one_product_whatever_the_mode(dimensions):
    """Batches, and inference_mode, which keeps composite operators whole."""
    layer = nn.Linear(K, N)
    x = torch.ones((M,) * (dimensions - 1) + (2, K))
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert len(trace_products(partial(layer, x))) == 1


def test_no_product():
    assert trace_products(lambda: torch.ones(M, K).t().contiguous() * 2) == []


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("rowwise", [True, False])
def test_scaled_products_of_torch(fast, rowwise):
    """Both of torch's names, with the operands as (rows, contraction) and their scales."""
    a, b = codes(M, torch.float8_e5m2), codes(N, torch.float8_e4m3fn)
    a_scale = torch.arange(1.0, M + 1)[:, None] if rowwise else torch.tensor(2.0)
    b_scale = torch.arange(1.0, N + 1)[:, None] if rowwise else torch.tensor(3.0)
    kind = functional.ScalingType.RowWise if rowwise else functional.ScalingType.TensorWise
    right = b_scale.t() if rowwise else b_scale
    calls = (
        partial(
            torch._scaled_mm,
            a,
            b.t(),
            scale_a=a_scale,
            scale_b=right,
            out_dtype=torch.float32,
            use_fast_accum=fast,
        ),
        partial(
            functional.scaled_mm,
            a,
            b.t(),
            scale_a=a_scale,
            scale_recipe_a=kind,
            scale_b=right,
            scale_recipe_b=kind,
            output_dtype=torch.float32,
            use_fast_accum=fast,
        ),
    )
    for call in calls:
        out, (product,) = record_products(call)
        mode = "fast" if fast else "precise"
        operator = product.trace.operator
        assert operator.startswith("aten::_scaled_mm")
        assert product.trace == ProductTrace("float8_e5m2", "float8_e4m3fn", mode, (M, N), operator)
        left, right_ = product.a.float() * product.a_scale, product.b.float() * product.b_scale
        assert torch.equal(left @ right_.t(), out)
        assert torch.equal(product.output, out)


@pytest.mark.parametrize("backend", ["emulated", "torch"])
def test_the_references_product_counts_once(backend):
    """Whatever its backend runs inside."""
    x, w = torch.ones(M, K), torch.ones(N, K)
    a = quantize.quantize(x, Operand(E5M2, ROWWISE, TORCHAO))
    b = quantize.quantize(w, Operand(E4M3FN, TENSORWISE, TORCHAO))
    call = partial(
        matmul.scaled_mm, a, b, out_dtype=torch.bfloat16, accumulation="fast", backend=backend
    )
    _, (product,) = record_products(call)
    expected = ProductTrace("float8_e5m2", "float8_e4m3fn", "fast", (M, N), "fp8::scaled_mm")
    assert product.trace == expected
    assert torch.equal(product.a_scale, a.scale)
    assert torch.equal(product.b_scale, b.scale)


def test_tensor_subclasses_are_taken_apart():
    """A subclass that holds two tensors multiplies twice."""
    a = TwoTensor(torch.ones(M, K), torch.zeros(M, K))
    b = TwoTensor(torch.ones(K, N), torch.ones(K, N))
    _, products = record_products(lambda: a @ b)
    assert [p.trace.shape for p in products] == [(M, N)] * 2
    assert [p.output.max().item() for p in products] == [K, 0]


def test_nothing_is_seen_outside():
    x = torch.ones(M, K)
    ran = trace_products(lambda: x @ x.t())
    assert len(ran) == 1
    x @ x.t()
    assert len(ran) == 1


# --- memory -------------------------------------------------------------------------------------


def test_saved_for_backward():
    """Distinct storages, whatever the number of tensors and views that keep them."""
    x = torch.ones(10, requires_grad=True)
    w = torch.ones(10, requires_grad=True)
    y, saved = memory.saved_for_backward(lambda: x * w)
    assert saved == {x.data_ptr(): 40, w.data_ptr(): 40}
    y, saved = memory.saved_for_backward(lambda: (x * x) + x[:5].sum())
    assert saved == {x.data_ptr(): 40}
    y, saved = memory.saved_for_backward(lambda: x + w)
    assert saved == {}
    del y


def test_saved_tensor_subclasses_count_by_what_they_wrap():
    inner = torch.ones(10), torch.ones(10)
    x = TwoTensor(*inner).requires_grad_()
    _, saved = memory.saved_for_backward(lambda: x * x)
    assert saved == {t.data_ptr(): 40 for t in inner}


def test_allocated_by():
    x = torch.ones(1000)
    value, fresh = memory.allocated_by(lambda: x + 1)
    assert (value[0].item(), fresh) == (2.0, 4000)
    assert memory.allocated_by(lambda: x.view(10, 100).t()[2:])[1] == 0
    assert memory.allocated_by(lambda: x.add_(1))[1] == 0
    assert memory.allocated_by(lambda: (x + 1, x.clone()))[1] == 8000
    assert memory.allocated_by(lambda: torch.empty(1000, device="meta"))[1] == 0


def test_growth():
    """What was alive before doesn't count; what is dropped, in a cycle or not, doesn't either."""
    before = torch.ones(1000)
    with memory.growth(CPU) as alive:
        assert alive() == 0
        kept = [torch.ones(10), before[:5]]
        assert alive() == 40 + before.nbytes  # a new view keeps the whole storage
        kept.pop()
        assert alive() == 40
        cycle = [torch.ones(10)]
        cycle.append(cycle)
        assert alive() == 80
        del cycle
        assert alive() == 40
        kept.clear()
        assert alive() == 0
    with memory.growth(CPU, besides=[before]) as alive:
        kept = [torch.ones(10), before[:5]]
        assert alive() == 40


def test_tied_parameters_count_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model.register_buffer("mask", torch.ones(2))
    assert sum(memory.parameter_storages(model).values()) == 64 + 2 * 16 + 8
