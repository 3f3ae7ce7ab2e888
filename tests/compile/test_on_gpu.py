"""What only a GPU shows of compiled code: its kernels, its waits, its graphs, its choices.

Without a GPU these tests skip.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch._dynamo import utils
from torch._inductor import config
from torch._inductor.runtime import triton_heuristics

from fp8.testing import models
from fp8.testing.compilations import watched
from fp8.testing.compiled_runs import as_it_is, compiling, in_graphs
from fp8.testing.models import one_pass
from fp8.testing.timing.kernels import profiled

COUNTS = Path(__file__).parent / "kernel_counts.toml"
M, K, N = 512, 1024, 768
#: how many of a kernel's configurations are tried; inductor has fewer for a cast
CONFIGURATIONS = 12
FRESH_COMPILES = 3


@pytest.fixture(autouse=True)
def gpu(target, judge):
    judge.require(target.device.type == "cuda", "needs a GPU: --fp8-device cuda")


@pytest.fixture
def layer(target, recipe):
    made = models.linear(target, K, N, dtype="bfloat16", bias=True)
    return target.convert(made, recipe)


@pytest.fixture
def operands(target, fp8_seed):
    shapes = ((M, K), (M, N))
    return [
        models.values(110 + i + fp8_seed, *shape, dtype="bfloat16", device=target.device)
        for i, shape in enumerate(shapes)
    ]


def recorded(target_name: str, recipe: str) -> dict[str, int] | None:
    """The kernels of a layer, recorded for this torch and this GPU's architecture."""
    counts = tomllib.loads(COUNTS.read_text(encoding="utf-8"))
    release = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    major, minor = torch.cuda.get_device_capability()
    table = counts.get(f"torch-{release}", {}).get(f"sm_{major}{minor}", {})
    found: dict[str, int] | None = table.get(target_name, {}).get(recipe)
    return found


@pytest.mark.law("P10")
def test_kernels(target, recipe, layer, operands, judge):
    """As many kernels, forward and backward, as were counted for this torch."""
    judge.example(recipe=recipe, M=M, K=K, N=N, dtype="bfloat16")
    x, g = operands
    counted: dict[str, int] = {}

    def run(compile_):
        compiled = compile_(layer)
        one_pass(compiled, x, g)  # compiles
        leaf = x.detach().requires_grad_()
        counted["forward"] = len(profiled(lambda: compiled(leaf), 1))
        whole = len(profiled(lambda: one_pass(compiled, x, g), 1))
        counted["backward"] = whole - counted["forward"]
        return counted

    if in_graphs(judge, run, backend="inductor") is None:
        return
    for name, number in counted.items():
        judge.record(f"{recipe} kernels, {name}", number, "count")
    judge.note(f"kernels of a compiled layer, {recipe}: {counted}")
    expected = recorded(target.name, recipe)
    judge.require(
        expected is not None,
        f"no kernels are recorded for torch {torch.__version__} on this GPU ({COUNTS.name})",
    )
    judge.equal("P10", "kernels", counted, expected)


@pytest.mark.law("P10")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_no_synchronisation(target, recipe, layer, operands, judge):
    """Neither direction waits for the device, compiled or not."""
    judge.example(recipe=recipe, dtype="bfloat16")
    x, g = operands
    for name, compile_ in (("eager", as_it_is), ("compiled", compiling("inductor"))):
        with watched():
            model = compile_(layer)
            one_pass(model, x, g)  # compiles, and allocates
            torch.cuda.synchronize()
            waited = waits(model, x, g)
        judge.true("P10", f"no synchronisation, {name}", not waited, waited)


def waits(model, x, g) -> str:
    """What torch says of the first wait in a pass, or ""."""
    try:
        torch.cuda.set_sync_debug_mode("error")
        one_pass(model, x, g)
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


@pytest.mark.law("P09", "P10")
# The first capture, of a warm-up, records nothing.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_graph_replay(target, recipe, layer, operands, judge):
    """Replayed as a CUDA graph the layer gives eager's bits, and the graph is not skipped."""
    judge.example(recipe=recipe, dtype="bfloat16")
    x, g = operands
    expected = one_pass(layer, x, g)
    with watched(), config.patch(emulate_precision_casts=True):
        compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
        for _ in range(4):  # warm-up, capture, replay
            torch.compiler.cudagraph_mark_step_begin()
            got = one_pass(compiled, x, g)
        skipped = utils.counters["inductor"]["cudagraph_skips"]
        judge.equal("P10", "skipped CUDA graphs", int(skipped), 0)
        models.same_pass(judge, "P09", "replayed", got, expected)


@pytest.mark.thorough
@pytest.mark.law("P09")
def test_every_configuration(target, recipe, layer, operands, judge, monkeypatch):
    """Whichever configuration inductor chooses for its kernels, the bits are eager's.

    A single configuration may be miscompiled (triton-lang/triton#11111), and which one is chosen
    is a matter of timing.
    """
    x, g = operands
    expected = one_pass(layer, x, g)
    sizes: Counter[int] = Counter()
    original = triton_heuristics.CachingAutotuner.autotune_to_one_config

    def tried(number: int) -> int:
        """Compile and run with the configuration of this number; how many kernels had a choice."""
        chosen = 0

        def choose(self, *args, **rest):
            nonlocal chosen
            launchers = self.launchers
            sizes[len(launchers)] += 1
            if len(launchers) > number:
                chosen += 1
                self.launchers = [launchers[number]]
                return None
            return original(self, *args, **rest)

        monkeypatch.setattr(triton_heuristics.CachingAutotuner, "autotune_to_one_config", choose)
        options = {
            "emulate_precision_casts": True,
            "max_autotune_pointwise": True,
            "force_disable_caches": True,
        }
        with watched(), config.patch(options):
            got = one_pass(compiling("inductor")(layer), x, g)
        models.same_pass(judge, "P09", "compiled", got, expected)
        return chosen

    for number in range(CONFIGURATIONS):
        judge.example(recipe=recipe, dtype="bfloat16", configuration=number)
        if not tried(number) and number:
            break
    judge.note(f"configurations of {recipe}'s kernels: up to {max(sizes, default=1)}")


@pytest.mark.thorough
@pytest.mark.law("P09")
def test_fresh_compiles(target, recipe, layer, operands, judge):
    """Compiled anew, without any cache, the bits are the same each time."""
    x, g = operands
    expected = one_pass(layer, x, g)
    for number in range(FRESH_COMPILES):
        judge.example(recipe=recipe, dtype="bfloat16", compiled=number)
        options = {"emulate_precision_casts": True, "force_disable_caches": True}
        with watched(), config.patch(options):
            got = one_pass(compiling("inductor")(layer), x, g)
        models.same_pass(judge, "P09", "compiled", got, expected)
