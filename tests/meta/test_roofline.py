"""The roofline: numbers worked out by hand, and how far it is from what was measured on an H200."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fp8 import hardware, roofline
from fp8.recipes import RECIPES
from fp8.roofline import Machine

if TYPE_CHECKING:
    from fp8.roofline import Manner

#: Numbers that are easy by hand: float8 twice as fast, a byte costs 100 operations of bfloat16.
PAPER = Machine(bf16=1e12, fp8=2e12, bandwidth=1e10, launch=0)
TENSORWISE = RECIPES["tensorwise"]
H200 = hardware.load_all()["h200"]


# --- by hand ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "float8", "seconds"),
    [
        ((1000, 1000, 1000), False, 2e-3),  # 2e9 operations
        ((1000, 1000, 1000), True, 1e-3),
        ((1000, 1000, 10), False, 2.04e-4),  # 2 (1e6 + 1e4) + 2 * 1e4 bytes
        ((1000, 1000, 10), True, 1.03e-4),  # 1e6 + 1e4 + 2 * 1e4 bytes
    ],
)
def test_a_product(shape: tuple[int, int, int], float8: bool, seconds: float) -> None:
    assert roofline.product(*shape, PAPER, float8=float8) == pytest.approx(seconds)


def test_passes() -> None:
    assert roofline.amax(10**6, PAPER) == pytest.approx(2e-4)
    assert roofline.cast(10**6, PAPER) == pytest.approx(3e-4)
    assert roofline.cast(10**6, PAPER, layouts=2) == pytest.approx(4e-4)


def test_no_kernel_is_shorter_than_a_launch() -> None:
    machine = Machine(bf16=1e12, fp8=2e12, bandwidth=1e10, launch=1e-3)
    assert roofline.amax(1, machine) == 1e-3
    assert roofline.product(16, 16, 16, machine, float8=True) == 1e-3


@pytest.mark.parametrize(
    ("recipe", "manner", "kernels"),
    [
        # bytes a value of each kernel, for x, weight and grad_output
        ("tensorwise", "fused", [(2, 4)] * 3),
        ("tensorwise", "layouts", [(2, 3, 3)] * 3),
        ("rowwise", "fused", [(3, 3)] * 3),
        ("rowwise", "layouts", [(5, 3)] * 3),
        ("rowwise_with_gw_hp", "fused", [(3,), (3, 3), (3,)]),
        ("blockwise", "fused", [(4,)] * 3),
        ("blockwise", "layouts", [(3, 3)] * 3),
    ],
)
def test_what_quantising_moves(recipe: str, manner: Manner, kernels: list[tuple[int, ...]]) -> None:
    uses = roofline.uses(RECIPES[recipe]).values()
    assert [roofline.quantising_bytes(use, manner) for use in uses] == kernels


def test_a_layer() -> None:
    found = roofline.linear(1000, 1000, 1000, TENSORWISE, PAPER)
    assert found.products_bf16 == pytest.approx(6e-3)
    assert found.products_fp8 == pytest.approx(3e-3)
    assert found.quantisation == pytest.approx(1.8e-3)  # 3 tensors of 1e6 values, 6 bytes each
    assert found.speedup == pytest.approx(6 / 4.8)


def test_a_product_in_high_precision_is_not_faster() -> None:
    found = roofline.linear(1000, 1000, 1000, RECIPES["rowwise_with_gw_hp"], PAPER)
    assert found.products_fp8 == pytest.approx(1e-3 + 1e-3 + 2e-3)
    assert found.quantisation == pytest.approx(1.2e-3)  # 3 + 6 + 3 bytes


def test_a_bias() -> None:
    plain, fused, unfused = (
        roofline.linear(1000, 1000, 1000, TENSORWISE, PAPER, bias=bias)
        for bias in ("none", "fused", "unfused")
    )
    assert fused.bf16 - plain.bf16 == pytest.approx(2e-4)  # its gradient reads 2e6 bytes
    assert fused.fp8 - plain.fp8 == pytest.approx(2e-4)
    assert unfused.bf16 == fused.bf16
    assert unfused.fp8 - fused.fp8 == pytest.approx(4e-4)  # 2e6 bytes read, 2e6 written


def test_the_critical_size() -> None:
    assert roofline.critical_size(PAPER, 6) == pytest.approx(200)
    assert roofline.size(600, 600, 600) == pytest.approx(200)
    assert roofline.linear(600, 600, 600, TENSORWISE, PAPER).speedup == pytest.approx(1)


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        ((1000, 1000), 336),  # 1 / (1/200 - 2/1000) = 333.3, to the next multiple of 16
        ((800, 2000), 320),  # 1 / (1/200 - 1/800 - 1/2000) = 307.7
        ((400, 400), None),  # 2/400 is 1/200 already
        ((10**5, 128), None),
    ],
)
def test_break_even(shape: tuple[int, int], tokens: int | None) -> None:
    assert roofline.break_even_tokens(*shape, TENSORWISE, PAPER) == tokens


# --- against what was measured ------------------------------------------------------------------
# NVIDIA H200, driver 580, torch 2.11.0+cu130, torchao 0.18.0, Transformer Engine 2.20.2, random
# operands, interleaved. The model has no host, no rescaling kernels and no gaps between kernels:
# it is an optimist, and says below by how much.


@pytest.mark.parametrize(
    ("shape", "ratio"),
    [
        ((4096, 4096, 4096), 1.849),
        ((8192, 8192, 8192), 1.938),
        ((8192, 16384, 16384), 1.936),
        ((4096, 2048, 4096), 1.723),
        ((8192, 16384, 128), 1.820),
    ],
)
def test_products_are_within_an_eighth(shape: tuple[int, int, int], ratio: float) -> None:
    on = roofline.machine(H200)
    predicted = roofline.product(*shape, on, float8=False) / roofline.product(
        *shape, on, float8=True
    )
    assert predicted == pytest.approx(ratio, rel=1 / 8)


def test_small_products_are_not_predicted() -> None:
    """1024 x 1024 x 1024 takes 22 us in bfloat16, 7 times the model's, and float8 is slower."""
    on = roofline.machine(H200)
    assert roofline.product(1024, 1024, 1024, on, float8=False) < 22.5e-6 / 7


def test_quantising_seven_large_layers() -> None:
    """7 x Linear(16384, 16384), 8192 tokens: 4.7 ms in Transformer Engine, 5.1 ms in a prototype of
    two Triton kernels, 9.0 ms in torchao compiled."""
    layer = (8192, 16384, 16384, TENSORWISE)
    fused = 7e3 * roofline.linear(*layer, roofline.machine(H200)).quantisation
    floor = 7e3 * roofline.linear(*layer, roofline.machine(H200, floor=True)).quantisation
    layouts = 7e3 * roofline.linear(*layer, roofline.machine(H200), manner="layouts").quantisation
    assert (round(floor, 1), round(fused, 1), round(layouts, 1)) == (4.7, 5.3, 7.1)


@pytest.mark.parametrize(
    ("shape", "recipe", "manner", "ratio", "optimism"),
    [
        # training steps, with their optimizer: Transformer Engine, then torchao compiled
        ((32000, 4096, 12288), "tensorwise", "fused", 1.64, 1.06),
        ((8192, 16384, 16384), "tensorwise", "fused", 1.74, 1.03),
        ((32000, 4096, 12288), "tensorwise", "layouts", 1.62 / 1.03, 1.07),
        ((8192, 16384, 16384), "tensorwise", "layouts", 1.65, 1.06),
        ((32000, 4096, 12288), "rowwise", "layouts", 1.42 / 1.03, 1.22),
        ((8192, 16384, 16384), "rowwise", "layouts", 1.29, 1.35),
        ((8192, 16384, 16384), "rowwise_with_gw_hp", "layouts", 1.35, 1.04),
        # bound by the host, which the model does not have (and a head of 128 comes after it)
        ((4096, 2048, 4096), "tensorwise", "layouts", 0.43 / 0.64, 2.04),
    ],
)
def test_how_optimistic_the_speedups_are(
    shape: tuple[int, int, int], recipe: str, manner: Manner, ratio: float, optimism: float
) -> None:
    found = roofline.linear(*shape, RECIPES[recipe], roofline.machine(H200), manner=manner)
    assert found.speedup / ratio == pytest.approx(optimism, abs=0.005)


def test_a_narrow_head_does_not_pay_although_its_product_does() -> None:
    found = roofline.linear(8192, 16384, 128, TENSORWISE, roofline.machine(H200))
    assert found.products_bf16 / found.products_fp8 > 1.4
    assert found.speedup < 0.6
