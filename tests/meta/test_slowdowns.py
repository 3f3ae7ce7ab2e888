"""Planted slow-downs: each costs what it says and changes no number, in eager and compiled code."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import fp8
from fp8 import cli, hardware, roofline
from fp8.recipes import get
from fp8.testing import slowdowns
from fp8.testing.faults.base import STEPS
from fp8.testing.planting import PlantError, resolve
from fp8.testing.slowdowns import SLOWDOWNS, Slowdown, operators, proof
from fp8.testing.slowdowns.proof import Layer, Verdict, prove
from fp8.testing.timing import Plan
from fp8.testing.timing.simulated import SimulatedDevice, SimulatedKernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from fp8.testing.timing.protocol import Prepared

pytestmark = [
    pytest.mark.filterwarnings("ignore::fp8.regimes.RegimeWarning"),  # tiny layers, on purpose
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
every = pytest.mark.parametrize("one", SLOWDOWNS.values(), ids=list(SLOWDOWNS))
Grads = tuple[torch.Tensor, ...]

#: operators that one pass through one layer runs: six casts, three products
PASS = {
    "S1": {"fp8_slowdowns::wait": 6, "fp8::scaled_mm": 3},
    "S2": {"fp8_slowdowns::wait": 6, "fp8::scaled_mm": 3},
    "S3": {"fp8_slowdowns::cast_again": 6, "fp8::scaled_mm": 3},
    "S4": {"fp8::scaled_mm": 2},
    "S5": {"fp8::scaled_mm": 3},
    "S6": {"fp8_slowdowns::synchronize": 1, "fp8::scaled_mm": 3},
}
CLEAN = {"fp8::scaled_mm": 3}


def layer(backend: str | None = None, recipe: str = "tensorwise") -> Callable[[], Grads]:
    """A pass through a layer: y, dX, dW, db."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 32, dtype=torch.bfloat16))
    fp8.convert(model, recipe, backend="emulated")
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(16, 48, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(16, 32, dtype=torch.bfloat16)

    def step() -> Grads:
        y = run(x)
        return (y.detach(), *torch.autograd.grad(y, (x, model[0].weight, model[0].bias), grad))

    return step


def operators_of(step: Callable[[], Grads]) -> dict[str, int]:
    """How often it runs each operator of this project."""
    with torch.profiler.profile() as profile:
        step()
    return {e.key: e.count for e in profile.key_averages() if e.key.startswith("fp8")}


@every
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp"])
def test_no_number_changes_but_those_of_another_rounding(one: Slowdown, recipe: str) -> None:
    step = layer(recipe=recipe)
    clean = step()
    with one():
        slow = step()
    same = [torch.equal(a, b) for a, b in zip(clean, slow, strict=True)]
    assert same == ([True] * 4 if one.exact else [False, True, True, True])


def test_the_two_that_round_otherwise() -> None:
    model = nn.Linear(48, 32, dtype=torch.bfloat16)
    x = torch.randn(16, 48, dtype=torch.bfloat16)
    expected = model(x)
    fp8.convert(holder := nn.Sequential(model), "tensorwise", backend="emulated")
    with SLOWDOWNS["S4"]():
        assert torch.equal(holder(x), expected)
    bias, model.bias = model.bias, None
    expected = holder(x) + bias
    model.bias = bias
    with SLOWDOWNS["S5"]():
        assert torch.equal(holder(x), expected)


@every
def test_the_right_step_is_slower_in_eager_code(one: Slowdown) -> None:
    step = layer()
    assert operators_of(step) == CLEAN
    with one():
        assert operators_of(step) == PASS[one.id]
    assert operators_of(step) == CLEAN


def test_compiled_versions_stay_apart() -> None:
    """Clean and planted code side by side in one process, as the proof runs them."""
    torch._dynamo.reset()
    steps = {name: layer("aot_eager") for name in ("clean", *SLOWDOWNS)}
    stats = torch._dynamo.utils.counters["stats"]
    with torch._dynamo.config.patch(recompile_limit=4 * len(SLOWDOWNS)):
        for _ in range(2):
            for name, one in SLOWDOWNS.items():
                with one():
                    steps[name]()
                    compiled = stats["unique_graphs"]
                    assert operators_of(steps[name]) == PASS[name]
                steps["clean"]()
                assert operators_of(steps["clean"]) == CLEAN
        assert stats["unique_graphs"] == compiled, "the second time round nothing compiles"
    torch._dynamo.reset()


@pytest.mark.parametrize("scales", [torch.tensor([[0.5]]), torch.rand(8, 3).t()])
def test_operators_pass_torchs_own_check(scales: torch.Tensor) -> None:
    torch.library.opcheck(operators.wait, (scales, 50))
    torch.library.opcheck(operators.cast_again, (scales, torch.rand(4, 4)))
    torch.library.opcheck(operators.synchronize, (scales,))


def test_the_wait_compiles_for_hopper() -> None:
    """No GPU is needed for that; the loop reads the clock anew each time round."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fp8.testing.slowdowns.waiting import wait_and_copy

    pointers = {"source": "*fp32", "target": "*fp32", "ended": "*i64"}
    numbers = dict.fromkeys(("size", "permille", "limit_ns"), "i32")
    source = ASTSource(
        wait_and_copy, {**pointers, **numbers, "BLOCK": "constexpr"}, {"BLOCK": 1024}
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    before, loop = made.asm["ptx"].split("=>This Inner Loop Header")
    assert "%globaltimer" in before
    assert "%globaltimer" in loop


@every
def test_description(one: Slowdown) -> None:
    assert resolve(f"fp8.testing.slowdowns:{one.id}") is one
    assert one.step in STEPS


def test_the_page_lists_them() -> None:
    page = Path(__file__).parents[2] / "docs" / "perf.md"
    rows = re.findall(r"^\| (S\d+) \| (.*) \| (\w+) \|$", page.read_text("utf-8"), re.MULTILINE)
    assert rows == [(one.id, one.summary, one.seen_by) for one in SLOWDOWNS.values()]


def test_another_name_is_not_there() -> None:
    with pytest.raises(PlantError, match="S99"):
        resolve("fp8.testing.slowdowns:S99")
    assert not hasattr(slowdowns, "S99")


# --- the proof, on a device of known speed ------------------------------------------------------


class Pretend:
    """Runs each step, and times it as a kernel that is as slow as its operators say."""

    name, notes = "pretend", ()

    def __init__(self, blind: frozenset[str] = frozenset()) -> None:
        self.simulated = SimulatedDevice(seed=0)
        self.blind = blind

    def now(self) -> float:
        return self.simulated.now()

    def prepare(self, subject: Callable[[], object], plan: Plan) -> Prepared:
        subject()
        ran = operators_of(subject)  # type: ignore[arg-type]
        seen = {name for name in ran if name.startswith("fp8_slowdowns")} - self.blind
        slower = seen or ran["fp8::scaled_mm"] < 3
        kernel = SimulatedKernel(1.05 if slower else 1.0)
        return self.simulated.prepare(replace(kernel, block_noise=0.003), plan)


SMALL = (Layer(32, 64, 48), Layer(16, 32, 48))


def proved(device: Pretend, *ids: str, alike: int = 0) -> dict[str, bool]:
    chosen = [SLOWDOWNS[name] for name in ids]
    found = prove(device, chosen, alike=alike, layers=SMALL, on="cpu", backend="aot_eager")
    return {f"{one.layer} {one.what.partition(':')[0]}": one.proved for one in found}


def test_what_is_seen_is_proved() -> None:
    got = proved(Pretend(), "S1", "S3", "S4", "S6", alike=3)
    assert got == dict.fromkeys(
        (
            "32x64x48 S1",
            "32x64x48 S3",
            "32x64x48 S4",
            "16x32x48 S6",
            "32x64x48 the same code twice",
        ),
        True,
    )


def test_what_is_not_seen_is_told() -> None:
    got = proved(Pretend(blind=frozenset({"fp8_slowdowns::cast_again"})), "S1", "S3")
    assert got == {"32x64x48 S1": True, "32x64x48 S3": False}


def test_the_layers_are_what_the_proof_says_of_them() -> None:
    """By the roofline of an H200: what is to be seen is above the margin, what is not below it."""
    h200 = hardware.find("NVIDIA H200")
    assert h200 is not None
    machine = roofline.machine(h200)
    large, short = (
        roofline.linear(L.M, L.K, L.N, get("tensorwise"), machine, manner="layouts", bias="unfused")
        for L in (proof.LARGE, proof.SHORT)
    )
    fused = large.fp8 - (large.bias_fp8 - large.bias_bf16)
    assert large.fp8 / fused - 1 > Plan().margin + Plan().half_width
    assert 6 * roofline.LAUNCH / large.fp8 < Plan().half_width
    assert short.fp8 > 1e-4
    assert short.fp8 < large.fp8 / 5


# --- the command --------------------------------------------------------------------------------


def invoke(*args: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.main, ["slowdowns", *args])
    return result.exit_code, result.output


def test_the_command_shows_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    found = list(
        prove(Pretend(), [SLOWDOWNS["S5"]], alike=1, layers=SMALL, on="cpu", backend="aot_eager")
    )
    monkeypatch.setattr(proof, "prove", lambda *_, **__: found)
    monkeypatch.setattr("fp8.testing.timing.cuda.open_gpu", lambda: nullcontext(Pretend()))
    code, output = invoke()
    assert code == 1  # a bias of its own shows in no operator of ours: the pretence does not see it
    assert "S5: the bias is added by a kernel of its own" in output
    assert "ALIKE: within 2%" in output
    assert "FAIL: 1 of 2 comparisons are as they should be, on pretend" in output
    monkeypatch.setattr(proof, "prove", lambda *_, **__: [one for one in found if one.proved])
    code, output = invoke()
    assert code == 0
    assert "PASS: 1 of 1 comparisons" in output
    assert [one.expected for one in found] == [Verdict.SLOWER, Verdict.ALIKE]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_command_without_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    code, output = invoke()
    assert code == 2
    assert "timing needs an NVIDIA GPU" in output
    code, output = invoke("--only", "S99")
    assert code == 2
    assert "got 'S99', needs one of S1, S2" in output
