"""The known regimes: the file, what is in which, the evidence, and what `convert` warns of."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import fp8
from fp8 import hardware, regimes, roofline
from fp8.claims import ClaimError
from fp8.recipes import RECIPES
from fp8.regimes import Case, RegimeWarning

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

REGIMES = {regime.id: regime for regime in regimes.load()}
LAYER = Case(K=8192, N=8192, recipe="rowwise", target="reference")


def ids(case: Case) -> list[str]:
    return [regime.id for regime in regimes.of(case)]


# --- which case is in which ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"N": 128}, ["small-n", "rowwise-small-n"]),
        ({"N": 128, "subject": "product"}, []),
        ({"N": 128, "recipe": "tensorwise"}, ["small-n"]),
        ({"N": 256, "recipe": "blockwise"}, []),
        ({"N": 128, "recipe": "blockwise"}, ["small-n"]),
        ({"N": 2048}, ["rowwise-small-n"]),
        ({"N": 2049}, []),
        ({"N": 4096, "K": 2048}, ["rowwise-small-n"]),
        ({"K": 1024}, ["rowwise-small-k"]),
        ({"K": 256, "recipe": "tensorwise"}, ["small-k"]),
        ({"M": 2048}, ["rowwise-small-m"]),
        ({"M": 2049}, []),
        ({"M": 16, "recipe": "tensorwise"}, ["small-m"]),
        ({"M": 1024, "K": 1024, "N": 1024, "recipe": "tensorwise"}, ["small-everything"]),
        ({"K": 1024, "N": 1024, "recipe": "tensorwise"}, []),
        ({"K": 4096, "N": 1024, "recipe": "tensorwise", "target": "torchao"},
         ["tensorwise-small-n-and-k"]),
        ({"bias": True, "bias_fused": False}, ["unfused-bias"]),
        ({"bias": True, "bias_fused": True}, []),
        ({"bias": True}, []),
        ({"compiled": False, "fused": False, "target": "torchao"}, ["eager"]),
        ({"compiled": False, "fused": True, "target": "torchao"}, []),
        ({"compiled": True, "window": "first call"}, ["first-call"]),
        ({"compiled": True, "window": "steady"}, []),
        ({"compiled": True, "window": "new M"}, ["dynamic-m"]),
        ({"head": True}, ["float8-head"]),
        ({"head": False}, []),
        ({"subject": "memory", "compiled": False}, ["no-memory-saving"]),
        ({"subject": "memory", "compiled": True}, []),
        ({"subject": "memory", "compiled": False, "target": "transformer_engine"}, []),
        ({"subject": "product", "M": 4096, "accumulation": "precise"}, ["precise-rowwise"]),
        ({"subject": "product", "M": 4096, "accumulation": "fast"}, []),
        ({"subject": "values", "accumulation": "fast", "data": "same-sign"}, ["fast-accumulation"]),
        ({"subject": "values", "accumulation": "fast", "data": "random"}, []),
        ({"subject": "values", "accumulation": "precise", "data": "same-sign"}, []),
    ],
    ids=str,
)  # fmt: skip
def test_cases(changes: dict[str, object], expected: list[str]) -> None:
    assert ids(dataclasses.replace(LAYER, **changes)) == expected


def test_a_claim_of_one_gpu_holds_there_and_where_the_gpu_is_unknown() -> None:
    narrow = dataclasses.replace(LAYER, N=2048)
    assert ids(narrow) == ["rowwise-small-n"]
    assert ids(dataclasses.replace(narrow, gpu="h100_sxm")) == ["rowwise-small-n"]
    assert ids(dataclasses.replace(narrow, gpu="h200")) == []


def test_every_issue_of_speed_has_its_regime() -> None:
    assert {
        "small-n", "small-m", "small-everything", "small-k", "rowwise-small-k", "unfused-bias",
        "eager", "rowwise-small-n", "precise-rowwise", "first-call", "dynamic-m",
        "no-memory-saving", "float8-head", "fast-accumulation",
    } <= set(REGIMES)  # fmt: skip


def test_gpus_are_those_of_the_hardware_files() -> None:
    named = {
        gpu
        for regime in REGIMES.values()
        for table in (regime.applies, *regime.when)
        for gpu in _options(table.get("gpu", []))
    }
    assert named
    assert named <= set(hardware.load_all())


def _options(wanted: object) -> Iterable[object]:
    return wanted if isinstance(wanted, list) else [wanted]


# --- the evidence -------------------------------------------------------------------------------


@pytest.mark.parametrize("regime", ["rowwise-small-n", "rowwise-small-m", "rowwise-small-k"])
def test_the_published_table_bears_the_claims_out(regime: str) -> None:
    table = regimes.published()
    inside = [
        speedup
        for K, rows in table.speedup.items()
        for M, row in zip(table.M, rows, strict=True)
        for N, speedup in zip(table.N, row, strict=True)
        if regime in ids(Case(M=M, K=K, N=N, recipe="rowwise", target="torchao"))
    ]
    claim = REGIMES[regime]
    assert claim.at_most is not None
    assert max(inside) < claim.at_most
    # "0.38 to 0.93 of bfloat16's speed"
    low, _, high = claim.claim.partition(" of ")[0].split()
    assert (float(low), float(high)) == (min(inside), max(inside))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_roofline_bears_the_derived_claims_out(recipe: str) -> None:
    """At the edge of small-n, small-m and small-k no GPU of ours pays, whatever the others are."""
    many = 2**20
    for gpu in hardware.load_all().values():
        on = roofline.machine(gpu)
        for shape in ((256, many, many), (many, 256, many), (many, many, 256)):
            assert roofline.linear(*shape, RECIPES[recipe], on).speedup < 1, (gpu.id, shape)
    h200 = roofline.machine(hardware.load_all()["h200"])
    assert f"{roofline.critical_size(h200, 6):.0f}" in REGIMES["small-n"].evidence[0].text


def test_a_bias_costs_what_is_said() -> None:
    on = roofline.machine(hardware.load_all()["h200"])
    shares = [
        roofline.memory_pass(4 * 8192 * 8192, on) / roofline.product(8192, K, 8192, on, float8=True)
        for K in (1024, 4096, 16384)
    ]
    said = REGIMES["unfused-bias"].evidence[0].text
    assert said.endswith(
        "{:.0%} at K = 1024, {:.0%} at 4096, {:.0%} at 16384".format(*shares).replace("%", " %")
    )


def test_break_even() -> None:
    assert regimes.break_even_tokens(8192, 8192) == 4096
    assert regimes.break_even_tokens(4096, 4096) == 8192
    assert regimes.break_even_tokens(4097, 8191) == 8192
    assert regimes.break_even_tokens(8192, 128) is None
    assert regimes.break_even_tokens(512, 8192) is None
    assert regimes.break_even_tokens(32768, 2048) is None


# --- the file -----------------------------------------------------------------------------------

GOOD = """
schema = 1
[[regime]]
id = "a"
title = "A"
when = [{ N = { at_most = 128 } }]
applies = { torch = ">=2.11" }
claim = "slow"
metric = "time"
against = "bfloat16"
at_most = 1.0
remedy = "don't"
evidence = [{ kind = "derived", text = "1 + 1" }]
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("N = {", "Q = {", "regime 1 .a.: when: unknown key 'Q'"),
        ("{ at_most = 128 }", "{ below = 128 }", "when.N must be .* a range of at_least"),
        ("[{ N = { at_most = 128 } }]", "[]", "when and evidence must each have an entry"),
        ("[{ N = { at_most = 128 } }]", "[3]", "when must be a table, got 3"),
        ('">=2.11"', '"2.11"', "applies.torch must be a PEP 440 specifier"),
        ('"time"', '"speed"', "metric must be one of time, memory, error"),
        ('"bfloat16"', '"float16"', "against must be one of bfloat16, remedy, nothing"),
        ('"derived", text = "1 + 1"', '"published", text = "x"', "link is missing"),
        ('remedy = "don\'t"\n', "", "remedy is missing"),
        ("at_most = 1.0", 'at_most = "1"', "at_most must be a float"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "regimes.toml"
    path.write_text(GOOD.replace(old, new), encoding="utf-8")
    with pytest.raises(ClaimError, match=message):
        regimes.read(path)


def test_versions_are_facts(tmp_path: Path) -> None:
    path = tmp_path / "regimes.toml"
    path.write_text(GOOD, encoding="utf-8")
    (regime,) = regimes.read(path)
    assert regime.has(Case(N=64))
    assert regime.has(Case(N=64, versions={"torch": "2.13.0+cpu"}))
    assert not regime.has(Case(N=64, versions={"torch": "2.10.0"}))


# --- convert warns ------------------------------------------------------------------------------


def model(**layers: nn.Linear) -> nn.ModuleDict:
    return nn.ModuleDict(layers)


def linear(K: int, N: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(K, N, bias=bias, device="meta")


def test_convert_warns_once_and_names_layer_regime_and_remedy() -> None:
    layers = {f"up{i}": linear(8192, 2048) for i in range(6)}
    with pytest.warns(RegimeWarning) as caught:
        report = fp8.convert(model(wide=linear(8192, 8192), low=linear(8192, 64), **layers),
                             "rowwise")  # fmt: skip
    assert len(caught) == 1
    assert caught[0].filename == __file__
    first, *lines = str(caught[0].message).splitlines()
    assert first.startswith("7 of 8 converted layers are in regimes known to be slow")
    assert [line.partition(":")[0].strip() for line in lines] == ["small-n", "rowwise-small-n"]
    assert "low (8192 -> 64). To do: " in lines[0]
    assert lines[0].endswith(REGIMES["small-n"].remedy)
    assert "up0 (8192 -> 2048)" in lines[1]
    assert "3 more" in lines[1]
    assert "wide" not in "".join(lines)
    found = {layer.name: layer.regimes for layer in report.layers}
    assert found["wide"] == ()
    assert found["low"] == ("small-n", "rowwise-small-n")
    assert "small-n, rowwise-small-n; pays at no M" in str(report)


@pytest.mark.parametrize("name", ["lm_head", "output"])
def test_convert_knows_a_head_by_its_name(name: str) -> None:
    with pytest.warns(RegimeWarning, match=rf"float8-head: decoder\.{name} "):
        fp8.convert(model(decoder=model(**{name: linear(4096, 32000)})), "rowwise")


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_convert_is_silent_about_good_layers(recipe: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fp8.convert(model(a=linear(8192, 8192), b=linear(8192, 28672, bias=False)), recipe)


def test_what_is_kept_is_no_reason_to_warn() -> None:
    layers = {"wide": linear(8192, 8192), "head": linear(8192, 128)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = fp8.convert(model(**layers), filter_fn=lambda layer, _: layer.out_features > 256)
        assert report.converted == ("wide",)
        report = fp8.convert(model(wide=linear(8192, 8192), head=linear(8192, 128)), tokens=8192)
        assert report.converted == ("wide",)


def test_the_reference_target_does_not_warn() -> None:
    from fp8.targets.reference import emulated

    tiny = nn.Sequential(nn.Linear(16, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        emulated(torch.device("cpu")).convert(tiny, "rowwise")
    assert isinstance(tiny[0], fp8.Float8Linear)
