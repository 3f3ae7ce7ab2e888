"""Everything that is measured, the most informative first.

A compiled layer costs seconds before it is measured, a bare product none. So the map of speed-ups
is compiled where it matters (large layers of real models, and one point in every bad regime) and
the wide grid of shapes is of bare products, from which the roofline tells the rest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fp8.testing.perf.benches import Casts, Ceilings, Linears, Products, Steps
from fp8.testing.perf.regime_benches import Accumulations, Bias, NewTokens
from fp8.testing.perf.scenarios import BLOCK, SCENARIOS

if TYPE_CHECKING:
    from fp8.testing.perf.benches import Bench, Variant

_FAST: tuple[Variant, ...] = (("tensorwise", "fast"), ("rowwise", "fast"))
_ALL: tuple[Variant, ...] = (
    *_FAST,
    ("tensorwise", "precise"),
    ("tensorwise", "grad"),
    ("rowwise", "precise"),
    ("blockwise", "precise"),
)
_BOTH = ("tensorwise", "rowwise")

#: M, K, N of bare products. "of" says whose they are; M = 8192 is two sequences of 4096.
_LLAMA3_8B = {"wq": (8192, 4096, 4096), "wk": (8192, 4096, 1024), "w1": (8192, 4096, 14336)}
_LLAMA3_70B = {"wk": (8192, 8192, 1024), "w1": (8192, 8192, 28672), "w2": (8192, 28672, 8192)}
#: arXiv:2412.19437, section 4.2: hidden 7168, 128 heads of 128, ranks 1536 and 512, experts of
#: 2048; the products of DeepGEMM's own benchmark.
_DEEPSEEK_V3 = {
    "kv_a": (4096, 7168, 576),
    "q_b": (4096, 1536, 24576),
    "kv_b": (4096, 512, 32768),
    "o": (4096, 16384, 7168),
    "expert up": (4096, 7168, 4096),
    "expert down": (4096, 2048, 7168),
}
_REPORT = {
    "toy": (4096, 2048, 4096),
    "toy head": (4096, 4096, 128),
    "deep": (8192, 16384, 16384),
    "deep head": (8192, 16384, 128),
    "ffn": (32000, 4096, 12288),
}
_GRID = {
    "few tokens": (16, 8192, 8192),
    "small K": (8192, 256, 8192),
    # off every tile, as far as the hardware takes it: K and N are multiples of 16
    "odd": (4099, 4112, 4144),
}

PRODUCTS: tuple[Products, ...] = (
    Products((8192, 8192, 8192), "grid", _ALL),
    Products((4096, 4096, 4096), "grid", _ALL),
    Products((1024, 1024, 1024), "grid", _ALL),
    *(
        Products(shape, f"{model} {layer}", _FAST)
        for model, shapes in (
            ("report", _REPORT),
            ("Llama 3 8B", _LLAMA3_8B),
            ("Llama 3 70B", _LLAMA3_70B),
            ("DeepSeek-V3", _DEEPSEEK_V3),
            ("grid", _GRID),
        )
        for layer, shape in shapes.items()
    ),
    Products((4096, 4096, 4096), "grid", _FAST, bias=True),
    Products((8192, 4096, 14336), "Llama 3 8B w1", _FAST, bias=True),
    Products((16384, 16384, 16384), "grid", _FAST),
)

CASTS: tuple[Casts, ...] = (
    Casts(8192, 8192, ("cast", "tensorwise", "rowwise", "columnwise")),
    Casts(8192, 8192, ("tensorwise-both", "rowwise-both"), mode="compiled"),
    Casts(8192, 16384, ("tensorwise", "rowwise")),
    Casts(1024, 1024, ("cast", "tensorwise", "rowwise")),
)

#: Compiled layers: the first pay, each of the others is in one bad regime.
LINEARS: tuple[Linears, ...] = (
    Linears(
        (8192, 8192, 8192),
        "compiled",
        (*_BOTH, "rowwise_with_gw_hp", "blockwise"),
        "grid",
    ),
    Linears((4096, 4096, 4096), "compiled", _BOTH, "grid"),
    Linears((8192, 16384, 128), "compiled", ("tensorwise",), "small N: the report's head"),
    Linears((8192, 4096, 14336), "compiled", _BOTH, "Llama 3 8B w1"),
    Linears((1024, 1024, 1024), "compiled", ("tensorwise",), "small everything"),
    Linears((256, 8192, 8192), "compiled", ("tensorwise",), "small M"),
    Linears((8192, 256, 8192), "compiled", ("tensorwise",), "small K"),
    Linears((8192, 4096, 1024), "compiled", _BOTH, "Llama 3 8B wk: tensorwise small N and K"),
    Linears((8192, 8192, 8192), "eager", _BOTH, "grid"),
    Linears((4096, 4096, 4096), "eager", _BOTH, "grid"),
    Linears((1024, 1024, 1024), "eager", ("tensorwise",), "small everything"),
    Linears((2048, 8192, 8192), "compiled", ("rowwise",), "rowwise small M"),
    Linears((8192, 1024, 8192), "compiled", ("rowwise",), "rowwise small K"),
    Linears((4096, 8192, 16384), "compiled", ("tensorwise",), "torchao's page"),
    Linears((16384, 8192, 28672), "compiled", ("tensorwise",), "Llama 3 70B w1"),
)

#: The last is the least informative for what it costs: it compiles for 20 s, and the layers tell
#: rowwise from tensorwise as well.
STEPS: tuple[Steps, ...] = (
    *(Steps(scenario) for scenario in SCENARIOS),
    Steps(replace(BLOCK, recipes=("rowwise",), first_call=False)),
)

REGIMES: tuple[Bench, ...] = (
    # K so small that the pass over the output is a good part of the layer
    Bias((8192, 1024, 8192)),
    Accumulations((8192, 8192, 8192)),
    NewTokens((8192, 4096, 4096), new=6144),
)

CEILINGS = Ceilings()


def order() -> dict[Bench, int]:
    """Each bench's turn, from 0: the most informative first.

    Whoever has only a minute should have seen something of everything: the families take turns,
    each in its own order of importance, and long families take several benches at a time. Products
    take the most: one bench of them is 2 s, a step that is compiled 15 to 60 s (H200).
    """
    *steps, last = STEPS
    families: tuple[tuple[tuple[Bench, ...], int], ...] = (
        ((CEILINGS,), 1),
        (tuple(steps), 1),
        (LINEARS, 2),
        (REGIMES, 1),
        (CASTS, 1),
        (PRODUCTS, 9),
    )
    turns: list[Bench] = []
    for turn in range(max(len(benches) for benches, _ in families)):
        for benches, each in families:
            turns += benches[turn * each : (turn + 1) * each]
    turns.append(last)
    return {bench: number for number, bench in enumerate(turns)}


#: What an A/A run of half a minute measures: one of every kind that needs no long compilation.
SHORT: tuple[Bench, ...] = (
    CEILINGS,
    PRODUCTS[1],
    PRODUCTS[2],
    CASTS[0],
    *(bench for bench in LINEARS if bench.name in {"eager-8192x8192x8192", "eager-4096x4096x4096"}),
)


def benches(*chosen: Bench) -> list[Any]:
    """Benches as pytest's parameters, named; all but `SHORT` are left out by the quick profile."""
    import pytest

    return [
        pytest.param(bench, id=bench.name, marks=() if bench in SHORT else pytest.mark.thorough)
        for bench in chosen
    ]
