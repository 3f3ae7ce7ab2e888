"""The laws on operands that a real model saw: the shipped sample, or --fp8-tensors=FILE.

Captured operands are skewed, correlated and full of outliers where drawn ones are tame. Each layer
is judged under every recipe that the target has, and the summary shows what float8 costs on it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from fp8.testing import captured, oracle, tensor_report, tensor_table
from fp8.testing.bounds import NARROW_NOISE, expected, product_bound
from fp8.testing.linear_runs import PRODUCTS, accumulation, run_linear
from fp8.testing.options import read_options
from fp8.testing.strategies import LinearArrays

SAMPLE = Path(__file__).parent / "data" / "minilm.safetensors"
RECIPES = tuple(oracle.RECIPES)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each layer of each file, or one for each file."""
    if "path" not in metafunc.fixturenames:
        return
    files = read_options(metafunc.config).tensors or (SAMPLE,)
    if "layer" not in metafunc.fixturenames:
        metafunc.parametrize("path", files, ids=[path.stem for path in files])
        return
    try:
        layers = [(path, name) for path in files for name in captured.layer_names(path)]
    except captured.CapturedFileError as error:
        raise pytest.Collector.CollectError(str(error)) from error
    ids = [f"{path.stem}-{name}" for path, name in layers]
    metafunc.parametrize(("path", "layer"), layers, ids=ids)


@cache
def layers_of(path: Path) -> dict[str, captured.Captured]:
    return captured.load(path)


def operands_of(layer: captured.Captured) -> LinearArrays:
    x, w, g = (as_array(tensor) for tensor in (layer.x, layer.w, layer.g))
    return LinearArrays(x, w, None, g)


def as_array(tensor):
    return tensor.double().cpu().numpy()


def begin(judge, path: Path, name: str, recipe: str) -> None:
    layer = layers_of(path)[name]
    (M, K), N = layer.x.shape, len(layer.w)
    judge.example(
        file=path.name, layer=name, recipe=recipe, dtype=layer.dtype, M=M, K=K, N=N, bias=False
    )


def can_run(target, layer: captured.Captured, recipe: str) -> str | None:
    """Why the target cannot run this layer, or None."""
    able = target.capabilities()
    if recipe not in able.recipes:
        return f"convert: no recipe {recipe}"
    if layer.x.dtype not in able.dtypes:
        return f"convert: no {layer.dtype}"
    return None


@pytest.mark.thorough
@pytest.mark.law("P03", "P05", "P08")
@pytest.mark.parametrize("recipe", RECIPES)
def test_tight(target, path, layer, recipe, judge):
    """y, dX and dW of a captured layer within the bound of float64 on the oracle's codes."""
    values = layers_of(path)[layer]
    obstacle = can_run(target, values, recipe)
    judge.require(obstacle is None, obstacle)
    begin(judge, path, layer, recipe)
    operands, dtype = operands_of(values), values.dtype
    ran, run = judge.attempt(
        "P03", "forward and backward", lambda: run_linear(target, recipe, operands, dtype)
    )
    if not ran:
        return
    quantised = oracle.linear(operands.x, operands.w, None, operands.g, recipe, dtype=dtype)
    (M, K), N = operands.x.shape, len(operands.w)
    for name, law, contraction in (("y", "P05", K), ("dx", "P08", N), ("dw", "P08", M)):
        want = getattr(quantised, name)
        model = accumulation(target, recipe, name)
        bound = product_bound(want.value, want.magnitude, contraction, dtype, model)
        got = getattr(run, name)
        judge.bound(law, f"{name} tight", got, expected(want.value, dtype), bound)


@pytest.mark.thorough
@pytest.mark.law("P26")
def test_quality(target, path, judge):
    """SQNR on captured layers as good as the oracle's, and no better; shown as a table."""
    layers = layers_of(path)
    obstacles = {(n, r): can_run(target, layers[n], r) for n in layers for r in RECIPES}
    missing = sorted({obstacle for obstacle in obstacles.values() if obstacle is not None})
    judge.require(None in obstacles.values(), "; ".join(missing))
    measured = [
        measure(target, name, layer, recipe)
        for name, layer in layers.items()
        for recipe in RECIPES
        if obstacles[name, recipe] is None
    ]
    # All are shown and recorded before the first one is judged: who fails wants to see the rest.
    table = tensor_table.as_text([row for row, *_ in measured])
    judge.note(f"captured operands, {path.name}\n\n{table}\n")
    for row, *_ in measured:
        for name, product in row.products.items():
            judge.record(f"{row.layer} {row.recipe} {name}", product.sqnr, "sqnr")
    for row, run, quantised, exact in measured:
        begin(judge, path, row.layer, row.recipe)
        dtype = layers[row.layer].dtype
        for name in PRODUCTS:
            narrow = accumulation(target, row.recipe, name).startswith("hopper")
            judge.quality(
                "P26",
                f"{name} quality",
                getattr(run, name),
                getattr(quantised, name).rounded(dtype),
                getattr(exact, name).value,
                accumulation=NARROW_NOISE if narrow else 0.0,
                # A captured layer's outlier channel is the same in every token: fast accumulation
                # undid 1 dB of `y`'s rounding errors where M, K, N = 128, 1536, 384.
                aligned=True,
            )


def measure(target, name: str, layer, recipe: str):
    """(a row of the table, what the target gave, the oracle's result, the unquantised one)."""
    operands = operands_of(layer)
    x, w, g = operands.x, operands.w, operands.g
    exact = oracle.exact_linear(x, w, None, g)
    run = run_linear(target, recipe, operands, layer.dtype)
    quantised = oracle.linear(x, w, None, g, recipe, dtype=layer.dtype)
    got = {result: as_array(getattr(run, result)) for result in PRODUCTS}
    row = tensor_report.measure(name, recipe, (x, w, g), got, quantised, exact)
    return row, run, quantised, exact
