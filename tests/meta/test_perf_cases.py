"""What the perf suite measures: ids that never clash, every claim held, the order, the evidence."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from fp8 import regimes
from fp8.testing import thresholds
from fp8.testing.perf import catalogue, evidence
from fp8.testing.perf.cases import Case, Stack
from fp8.testing.perf.simulated import simulated_stack
from fp8.testing.timing.kernels import Kernel

THRESHOLDS = Path(__file__).parents[1] / "perf" / "thresholds"


def all_cases(name: str, gpu: str = "h200") -> list[Case]:
    it = simulated_stack(name, gpu)
    return [c for b in catalogue.order() if not b.obstacle(it) for c in b.cases(it)]


@pytest.mark.parametrize("name", ["reference[torch]", "torchao"])
def test_ids_are_unique_and_say_whose_case_it_is(name: str) -> None:
    ids = Counter(case.id for case in all_cases(name))
    assert [case for case, count in ids.items() if count > 1] == []
    assert all(name in case or case.startswith("ceiling/") for case in ids)


def test_published_thresholds_are_of_cases_that_are_measured() -> None:
    """Those of torchao's page are a grid of which the suite compiles a few points."""
    known = thresholds.load(THRESHOLDS, "NVIDIA H100 80GB HBM3").by_case
    ids = {case.id for case in all_cases("torchao", "h100_sxm")}
    for case, threshold in known.items():
        if "2262" in threshold.source.link or "-tensorwise/" in case:
            assert case in ids
    rowwise = [case for case in known if "torchao-rowwise" in case]
    assert len(ids & set(rowwise)) >= 1


def test_every_claim_with_a_number_is_held_by_a_case() -> None:
    found = [
        case
        for name in ("reference[torch]", "torchao")
        for gpu in ("h100_sxm", "h200")
        for case in all_cases(name, gpu)
    ]
    held = {
        regime.id
        for case in found
        if case.known is not None
        for regime in regimes.of(case.known)
        if (regime.metric, regime.against) == (case.metric, case.against)
    }
    # tests/perf/test_regimes.py has a test of its own for what is no time
    held.add("fast-accumulation")
    numbered = {r.id for r in regimes.load() if (r.at_most, r.at_least) != (None, None)}
    assert numbered <= held


def test_the_order_has_every_bench_once_and_something_of_everything_first() -> None:
    turns = catalogue.order()
    everything = (
        catalogue.CEILINGS,
        *catalogue.STEPS,
        *catalogue.LINEARS,
        *catalogue.PRODUCTS,
        *catalogue.REGIMES,
        *catalogue.CASTS,
    )
    assert sorted(turns.values()) == list(range(len(everything)))
    assert set(turns) == set(everything)
    first = sorted(turns, key=lambda bench: turns[bench])[:9]
    assert len({type(bench) for bench in first}) == 6
    # products are cheap: none waits for the steps that compile for half of the budget
    late = [step for step in catalogue.STEPS if step.name in {"deep_bias_head", "ffn_fsdp2"}]
    assert max(turns[bench] for bench in catalogue.PRODUCTS) < min(turns[step] for step in late)
    assert set(catalogue.SHORT) <= set(everything)


@pytest.mark.parametrize(
    "benches", [catalogue.STEPS, catalogue.LINEARS, catalogue.PRODUCTS, catalogue.CASTS]
)
def test_the_names_of_a_tests_benches_are_unique(benches: tuple[catalogue.Bench, ...]) -> None:
    assert len({bench.name for bench in benches}) == len(benches)


def test_a_stack_without_recipes_is_told_why() -> None:
    bare = Stack(
        name="bare", recipes=frozenset(), bias_fused=False, multiplies=False, quantises=False
    )
    reasons = {type(b).__name__: b.obstacle(bare) for b in catalogue.order()}
    assert reasons.pop("Ceilings") == ""
    assert all(reasons.values())


# --- evidence -----------------------------------------------------------------------------------

FLOAT8 = (
    "nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_coopA_TNT",  # seen on an H200, torch 2.11
    "nvjet_sm90_qrtst_128x256_128x4_2x1_v_bz_coopA_TNT",
    "nvjet_qqtst_192x192_128x4_2x1_v_bz_coopA_TNN",
    "sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x128x128_warpgroupsize1x1x1",
    "sm89_xmma_gemm_e5m2bf16_e5m2e4m3_f32_tn_n_tilesize128x128x64",
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<float_e4m3_t>>(P)",
    "triton_tem_fused__scaled_mm_0",
    "fp8_gemm_kernel",
)
OTHER_PRODUCTS = (
    "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNT",
    "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128>",
    "triton_tem_fused_mm_2",
)
NO_PRODUCTS = (
    "void at::native::unrolled_elementwise_kernel<at::native::float8_copy_kernel_cuda>",
    "void at::native::vectorized_elementwise_kernel<4, c10::Float8_e4m3fn>",
    "triton_poi_fused__scaled_mm__to_copy_clamp_mul_3",
    "triton_red_fused_abs_amax_0",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7",
    "pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel",
    "Memcpy DtoD (Device -> Device)",
)


def test_products_are_known_by_their_names() -> None:
    assert all(map(evidence.is_float8_product, FLOAT8))
    assert all(map(evidence.is_product, OTHER_PRODUCTS))
    assert not any(map(evidence.is_float8_product, OTHER_PRODUCTS))
    assert not any(map(evidence.is_product, NO_PRODUCTS))


def test_the_breakdown() -> None:
    names = (FLOAT8[0], FLOAT8[0], NO_PRODUCTS[3], OTHER_PRODUCTS[0])
    kernels = [Kernel(name, 10.0 * i, 10.0 * i + 4) for i, name in enumerate(names)]
    found = evidence.breakdown(kernels, calls=2)
    assert (found.float8_us, found.product_us, found.rest_us) == (4, 2, 2)
    assert (found.float8, found.products, found.kernels) == (1, 0.5, 2)
    assert found.names == ((FLOAT8[0], 2), (OTHER_PRODUCTS[0], 1))
