"""Capturing operands: what the hooks record, and what they leave out and why."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8
from fp8.testing.capture import CaptureError, capture, capturing


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


class TwoLayers(nn.Module):
    """An in-place activation between them: the first one's gradient is still its own output's."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7, dtype=dtype)
        self.down = nn.Linear(7, 3, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.relu(self.up(x), inplace=True))


def loss_at(*inputs: torch.Tensor):
    """A run: the sum of the losses at each input, each of which is one call."""
    return lambda model: sum((model(x).square() / 2).sum() for x in inputs)


# --- what is recorded ---------------------------------------------------------------------------


def test_operands_are_the_ones_that_autograd_used():
    model, x = TwoLayers(), torch.randn(4, 5)
    layers = capture(model, loss_at(x), dtype=torch.float32).layers
    assert list(layers) == ["up", "down"]
    up, down = layers["up"], layers["down"]
    hidden = nn.functional.relu(model.up(x))
    assert torch.equal(up.x, x)
    assert torch.equal(up.w, model.up.weight)
    assert torch.equal(down.x, hidden)
    assert torch.equal(down.g, model.down(hidden))  # the loss is half the sum of squares
    assert torch.equal(up.g, (down.g @ model.down.weight) * (hidden > 0))
    assert torch.equal(model.down.weight.grad, down.g.T @ down.x)


def test_dtype_and_independence_of_the_model():
    model, x = TwoLayers(), torch.randn(4, 5)
    up = capture(model, loss_at(x)).layers["up"]
    weight = model.up.weight.detach().bfloat16()
    with torch.no_grad():
        model.up.weight.zero_()
        x.zero_()
    assert torch.equal(up.w, weight)
    assert up.x.abs().sum() > 0
    assert {t.dtype for t in (up.x, up.w, up.g)} == {torch.bfloat16}
    assert str(up) == "4 tokens, 5 -> 7, bfloat16, 166 bytes"


@pytest.mark.parametrize("leading", [(), (4,), (2, 3), (2, 1, 3), (3, 0)])
def test_leading_dimensions_are_tokens(leading):
    x = torch.randn(*leading, 5)
    step = loss_at(x, torch.randn(1, 5))  # a second call, for there is nothing in (3, 0)
    up = capture(TwoLayers(), step, dtype=torch.float32).layers["up"]
    tokens = x.numel() // 5
    assert (up.x.shape, up.g.shape) == ((tokens + 1, 5), (tokens + 1, 7))
    assert torch.equal(up.x[:tokens], x.reshape(-1, 5))


def test_input_by_keyword_and_strided():
    class Keyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            return self.layer(input=x.t())

    x = torch.randn(4, 3)
    # A sum's gradient is expanded from one value.
    layer = capture(Keyword(), lambda model: model(x).sum(), dtype=torch.float32).layers["layer"]
    assert torch.equal(layer.x, x.t())
    assert torch.equal(layer.g, torch.ones(3, 2))
    assert layer.x.is_contiguous()
    assert layer.g.is_contiguous()


def test_calls_are_concatenated_in_their_order():
    model, batches = TwoLayers(), torch.randn(3, 4, 5)
    whole = capture(model, loss_at(batches), dtype=torch.float32).layers
    one_by_one = capture(model, loss_at(*batches), dtype=torch.float32).layers
    for name in ("up", "down"):
        for tensor in ("x", "w", "g"):
            torch.testing.assert_close(
                getattr(one_by_one[name], tensor), getattr(whole[name], tensor)
            )


@pytest.mark.parametrize("most", [1, 4, 6, 12, 13])
def test_max_tokens_keeps_the_first(most):
    model, batches = TwoLayers(), torch.randn(3, 4, 5)
    whole = capture(model, loss_at(*batches)).layers["up"]
    part = capture(model, loss_at(*batches), max_tokens=most).layers["up"]
    assert torch.equal(part.x, whole.x[:most])
    assert torch.equal(part.g, whole.g[:most])


def test_a_shared_module_is_one_layer_with_all_its_calls():
    layer = nn.Linear(5, 5)
    layers = capture(nn.Sequential(layer, nn.GELU(), layer), loss_at(torch.randn(4, 5))).layers
    assert list(layers) == ["0"]
    assert len(layers["0"].x) == 8


def test_the_model_may_be_the_layer():
    assert list(capture(nn.Linear(5, 3), loss_at(torch.randn(4, 5))).layers) == ["linear"]


def test_filter_chooses_layers():
    layers = capture(
        TwoLayers(), loss_at(torch.randn(4, 5)), filter_fn=lambda m, _: m.bias is None
    ).layers
    assert list(layers) == ["down"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_is_recorded_once(reentrant):
    model = TwoLayers()
    x = torch.randn(4, 5, requires_grad=True)

    def run(model):
        return checkpoint(model, x, use_reentrant=reentrant).square().sum() / 2

    plain = capture(model, loss_at(x)).layers["down"]
    again = capture(model, run).layers["down"]
    assert torch.equal(again.x, plain.x)
    assert torch.equal(again.g, plain.g)


def test_the_backward_pass_may_be_the_callers():
    model, batches = TwoLayers(), torch.randn(3, 4, 5)

    def run(model):
        for batch in batches:
            loss_at(batch)(model).backward()

    assert torch.equal(
        capture(model, run).layers["up"].g, capture(model, loss_at(*batches)).layers["up"].g
    )


@pytest.mark.filterwarnings("ignore::fp8.regimes.RegimeWarning")  # tiny layers, on purpose
@pytest.mark.parametrize("recipe", list(fp8.RECIPES))
def test_converted_layers_show_what_they_get(recipe):
    model, x = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)), torch.randn(20, 32)
    fp8.convert(model, recipe, backend="emulated")
    layers = capture(model, loss_at(x), dtype=torch.float32).layers
    assert torch.equal(layers["1"].x, model[0](x))
    assert torch.equal(layers["1"].g, model(x))


def test_torchao_layers_show_what_they_get():
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    model, x = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16)).bfloat16(), torch.randn(16, 32)
    config = float8.Float8LinearConfig(emulate=True)
    float8.convert_to_float8_training(model, config=config)
    layers = capture(model, loss_at(x.bfloat16())).layers
    assert type(model[1]).__name__ == "Float8Linear"
    assert torch.equal(layers["1"].x, model[0](x.bfloat16()))


# --- what is left out ---------------------------------------------------------------------------


def test_evaluation_in_between_leaves_no_trace():
    model, batches = TwoLayers(), torch.randn(2, 4, 5)

    def run(model):
        first = loss_at(batches[0])(model)
        with torch.no_grad():
            model(torch.randn(100, 5))
        return first + loss_at(batches[1])(model)

    assert torch.equal(
        capture(model, run, max_tokens=8).layers["up"].x,
        capture(model, loss_at(*batches)).layers["up"].x,
    )


def test_an_output_that_nobody_uses_leaves_no_trace():
    def run(model):
        model(torch.randn(100, 5))
        return loss_at(torch.randn(4, 5))(model)

    assert len(capture(TwoLayers(), run).layers["up"].x) == 4


def test_only_the_first_step_is_recorded():
    model, batches = TwoLayers(), torch.randn(2, 4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model.up.weight.detach().bfloat16()
    with capturing(model) as recording:
        for batch in batches:
            loss_at(batch)(model).backward()
            optimizer.step()
    assert torch.equal(recording.layers["up"].x, batches[0].bfloat16())
    assert torch.equal(recording.layers["up"].w, weight)


def test_frozen_weights():
    model = TwoLayers()
    model.down.weight.requires_grad_(False)
    assert list(capture(model, loss_at(torch.randn(4, 5))).layers) == ["up", "down"]
    model.up.requires_grad_(False)
    model.down.weight.requires_grad_(True)
    recording = capture(model, loss_at(torch.randn(4, 5)))
    assert list(recording.layers) == ["down"]
    assert "needed no gradient" in recording.omitted["up"]


class Odd(nn.Module):
    """Layers that give no operands, each for a reason of its own, and one that does."""

    class Pair(nn.Linear):
        def forward(self, input):
            return super().forward(input), self.bias

    def __init__(self):
        super().__init__()
        self.good = nn.Linear(4, 4)
        self.idle = nn.Linear(4, 4)
        self.detached = nn.Linear(4, 4)
        self.pair = self.Pair(4, 4)
        self.infinite = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        self.detached(x)
        y = self.good(x) + self.pair(x)[0] + self.attention(x, x, x)[0]
        return y + self.infinite(torch.full_like(x, torch.inf)).nan_to_num()


def test_every_omission_has_its_reason():
    recording = capture(Odd(), loss_at(torch.randn(2, 3, 4)))
    assert list(recording.layers) == ["good"]
    assert recording.omitted == {
        "idle": "its forward was never called",
        "detached": "no gradient reached its output",
        "pair": "its output is a tuple, not a tensor",
        "infinite": "x has 24 of 24 values that are not finite",
        "attention.out_proj": "its forward was never called",
    }
    assert str(recording).splitlines()[:3] == [
        "1 captured, 5 omitted",
        "  good: 6 tokens, 4 -> 4, bfloat16, 128 bytes",
        "  idle: omitted, its forward was never called",
    ]


def test_hooks_are_removed_and_errors_pass():
    model = TwoLayers()

    def fail(model):
        model(torch.randn(4, 5))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        capture(model, fail)
    capture(model, loss_at(torch.randn(4, 5)))
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"model": "a model"}, TypeError, ["model", "str", "Module"]),
        ({"model": nn.ReLU()}, CaptureError, ["model", "ReLU", "without any Linear"]),
        ({"filter_fn": lambda *_: False}, CaptureError, ["filter_fn", "none", "up, down"]),
        ({"max_tokens": 0}, ValueError, ["max_tokens", "got 0", "at least 1"]),
        ({"dtype": torch.float64}, ValueError, ["dtype", "float64", "bfloat16"]),
        ({"run": lambda _: 1.0}, CaptureError, ["run", "float", "loss"]),
        ({"run": lambda m: m(torch.ones(2, 5))}, CaptureError, ["run", "(2, 3)", "scalar"]),
        ({"run": lambda _: torch.ones(())}, CaptureError, ["run", "without a gradient"]),
        ({"run": lambda _: None}, CaptureError, ["0 captured", "never called"]),
    ],
)
def test_wrong_arguments(arguments, error, words):
    everything = {"model": TwoLayers(), "run": loss_at(torch.ones(2, 5)), **arguments}
    with pytest.raises(error) as caught:
        capture(**everything)
    for word in words:
        assert word in str(caught.value)
