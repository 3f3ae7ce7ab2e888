"""The oracle as a torch module: the same numbers as the arrays', rounded once to each dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fp8.testing import oracle
from fp8.testing.oracle_module import OracleLinear, oracle_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def tensor(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = np.random.default_rng(seed).standard_normal(shape)
    return torch.from_numpy(values).to(dtype)


def linear(k: int, n: int, dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = nn.Linear(k, n, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(tensor(1, n, k))
        layer.bias.copy_(tensor(2, n))
    return layer


def array(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


@pytest.mark.parametrize("recipe", oracle.RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_and_gradients_are_the_oracles_rounded_once(dtype: str, recipe: str) -> None:
    layer = oracle_model(linear(11, 6, DTYPES[dtype]), recipe)
    assert type(layer) is OracleLinear
    x = tensor(3, 2, 3, 11, dtype=DTYPES[dtype]).requires_grad_()
    g = tensor(4, 2, 3, 6, dtype=DTYPES[dtype])
    y = layer(x)
    y.backward(g)
    expected = oracle.linear(
        array(x).reshape(6, 11),
        array(layer.weight),
        array(layer.bias),
        array(g).reshape(6, 6),
        recipe,
        dtype=dtype,
    )
    for got, exact in (
        (y, expected.y),
        (x.grad, expected.dx),
        (layer.weight.grad, expected.dw),
        (layer.bias.grad, expected.db),
    ):
        assert got.dtype == DTYPES[dtype]
        np.testing.assert_array_equal(array(got).ravel(), exact.rounded(dtype).ravel())


def test_autocast_casts_x_and_bias_but_quantises_the_weight_as_it_is() -> None:
    layer = oracle_model(linear(11, 6), "tensorwise")
    x = tensor(3, 5, 11).requires_grad_()
    g = tensor(4, 5, 6, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.backward(g)
    assert (y.dtype, x.grad.dtype, layer.weight.grad.dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )
    expected = oracle.linear(
        array(x), array(layer.weight), array(layer.bias), array(g), "tensorwise", dtype="bfloat16"
    )
    np.testing.assert_array_equal(array(y), expected.y.rounded("bfloat16"))
    np.testing.assert_array_equal(array(x.grad), expected.dx.rounded("bfloat16"))
    np.testing.assert_array_equal(array(layer.weight.grad), expected.dw.rounded("bfloat16"))
    np.testing.assert_array_equal(array(layer.bias.grad), expected.db.rounded("bfloat16"))


def test_frozen_parameters_get_no_gradient() -> None:
    layer = oracle_model(linear(11, 6), "rowwise")
    layer.weight.requires_grad_(False)
    x = tensor(3, 5, 11).requires_grad_()
    layer(x).backward(tensor(4, 5, 6))
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    assert x.grad is not None


def test_the_model_is_a_copy_with_its_ties_and_its_mode() -> None:
    shared = linear(8, 8)
    model = nn.Sequential(shared, nn.GELU(), shared, linear(8, 8)).eval()
    model[3].weight = shared.weight
    copy = oracle_model(model, "blockwise")
    assert [type(m) for m in model] == [nn.Linear, nn.GELU, nn.Linear, nn.Linear]
    assert [type(m) for m in copy] == [OracleLinear, nn.GELU, OracleLinear, OracleLinear]
    assert copy[0] is copy[2]
    assert copy[3].weight is copy[0].weight
    assert copy[0].weight is not shared.weight
    assert not copy.training
    assert copy.state_dict().keys() == model.state_dict().keys()


def test_subclasses_are_left_alone() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    copy = oracle_model(nn.Sequential(Doubled(4, 4), nn.MultiheadAttention(4, 1)), "rowwise")
    assert not any(isinstance(m, OracleLinear) for m in copy.modules())


def test_a_training_step_learns_by_the_oracles_gradients() -> None:
    model = nn.Sequential(linear(16, 24), nn.ReLU(), linear(24, 16))
    copy = oracle_model(model, "tensorwise")
    x, target = tensor(5, 40, 16), tensor(6, 40, 16)
    steps = {}
    for name, trained in (("float32", model), ("oracle", copy)):
        before = trained[2].weight.detach().clone()
        optimizer = torch.optim.SGD(trained.parameters(), lr=1e-3)
        nn.functional.mse_loss(trained(x), target).backward()
        optimizer.step()
        steps[name] = array(trained[2].weight - before)
    # The same step but for float8's noise: forward and backward errors add up to about the 24.5 dB
    # of one e5m2 x e4m3 product, less what the loss amplifies. 15 to 35 says "float8, and right".
    assert 15 < oracle.sqnr(steps["oracle"], steps["float32"]) < 35


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="recipe is 'none'"):
        oracle_model(linear(4, 4), "none")
    layer = oracle_model(linear(4, 4, torch.float64), "rowwise")
    with pytest.raises(TypeError, match=r"input has dtype torch\.float64"):
        layer(tensor(1, 2, 4, dtype=torch.float64))
