"""Small models with seeded weights, and one pass through them: what tests of whole layers share.

Extents are off every tile, and all different, so that no axis can be taken for another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fp8.testing.strategies import as_tensor, to_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from fp8.targets.base import Target
    from fp8.testing.laws import Judge

AnyModule = TypeVar("AnyModule", bound=nn.Module)

#: M, and the widths of `mlp`: in, hidden, out
TOKENS, WIDTH, HIDDEN, OUT = 36, 52, 84, 44

#: the optimizers of tests that take steps
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass.

    y: the output. dx: the input's gradient, None where it needed none. gradients: by parameter
    name; None where autograd gave none.
    """

    y: Tensor
    dx: Tensor | None
    gradients: dict[str, Tensor | None]

    def tensors(self) -> dict[str, Tensor | None]:
        """All of it by name, for one comparison each."""
        return {"y": self.y, "dx": self.dx} | {f"grad {n}": g for n, g in self.gradients.items()}


def require_recipe(judge: Judge, target: Target, recipe: str) -> str:
    """Skip the test where the target converts to no such recipe; returns the recipe."""
    judge.require(recipe in target.capabilities().recipes, f"convert: no recipe {recipe}")
    return recipe


def aligned(target: Target, *extents: int) -> tuple[int, ...]:
    """The extents, rounded up to what the target's hardware takes."""
    alignment = target.capabilities().alignment
    return tuple(-(-extent // alignment) * alignment for extent in extents)


def values(seed: int, *shape: int, dtype: str, device: torch.device | str) -> Tensor:
    """Normal values of `dtype`, the same on every machine: numpy makes them."""
    drawn = np.random.default_rng(seed).standard_normal(shape)
    flat = as_tensor(to_dtype(drawn.reshape(-1, shape[-1]), dtype), dtype, device)
    return flat.reshape(shape)


def uneven(tensor: Tensor) -> Tensor:
    """The matrix with rows and columns of different size, by exact powers of two.

    The largest is 2^18 times the smallest: more than the 2^15 between e4m3fn's largest number and
    its smallest normal, so that one scale for all gives other codes than one a row.
    """
    rows, columns = (
        torch.exp2((torch.arange(extent, device=tensor.device) % period).to(tensor.dtype))
        for extent, period in zip(tensor.shape, (9, 11), strict=True)
    )
    return tensor * rows[:, None] * columns


def seeded(model: AnyModule, seed: int) -> AnyModule:
    """Fill every parameter with normal values, a matrix's scaled to keep the signal's size."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            rng = np.random.default_rng([seed, number])
            drawn = rng.standard_normal(parameter.shape) / np.sqrt(parameter.shape[-1])
            parameter.copy_(torch.from_numpy(drawn))
    return model


def linear(
    target: Target,
    in_features: int,
    out_features: int,
    *,
    dtype: str,
    bias: bool = True,
    seed: int = 1,
) -> nn.Sequential:
    """One unconverted layer, in a container: what is converted in place needs a parent."""
    layer = nn.Linear(
        in_features, out_features, bias, device=target.device, dtype=getattr(torch, dtype)
    )
    return seeded(nn.Sequential(layer), seed)


def mlp(target: Target, *, dtype: str, seed: int = 1) -> nn.Sequential:
    """Two unconverted layers with an activation between them, WIDTH to HIDDEN to OUT."""
    width, hidden, out = aligned(target, WIDTH, HIDDEN, OUT)
    model = nn.Sequential(
        nn.Linear(width, hidden, bias=False), nn.GELU(), nn.Linear(hidden, out, bias=True)
    )
    return seeded(model.to(target.device, getattr(torch, dtype)), seed)


class Block(nn.Module):
    """A pre-norm transformer block with RMSNorm and SwiGLU: (batch, tokens, width) to the same."""

    HEADS = 4

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, tokens, width)."""
        split = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.HEADS, -1))
        q, k, v = split.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(-2))
        h = self.mlp_norm(x)
        out: Tensor = x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))
        return out


#: a block's batch, tokens, width and hidden width
BLOCK = (3, 16, 64, 176)


def block(target: Target, *, dtype: str, seed: int = 1) -> Block:
    """An unconverted block of BLOCK's widths."""
    *_, width, hidden = BLOCK
    made = seeded(Block(width, hidden), seed)
    return made.to(target.device, getattr(torch, dtype))


def block_batch(target: Target, *, dtype: str, seed: int = 2) -> tuple[Tensor, Tensor]:
    """x and grad_output for `block`, (batch, tokens, width) each."""
    shape = BLOCK[:3]
    x = values(seed, *shape, dtype=dtype, device=target.device)
    return x, values(seed + 1_000, *shape, dtype=dtype, device=target.device)


def mlp_batch(target: Target, *, dtype: str, seed: int = 2) -> tuple[Tensor, Tensor]:
    """x (TOKENS, WIDTH) and grad_output (TOKENS, OUT) for `mlp`."""
    tokens, width, out = aligned(target, TOKENS, WIDTH, OUT)
    x = values(seed, tokens, width, dtype=dtype, device=target.device)
    g = values(seed + 1_000, tokens, out, dtype=dtype, device=target.device)
    return x, g


def one_pass(model: nn.Module, x: Tensor, g: Tensor) -> Pass:
    """Forward and backward of `model` at x with grad_output g; gradients start from nothing.

    Parameters of a compiled module have the names that they have in the module itself.
    """
    model.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    y = model(x)
    y.backward(g.to(y.dtype))
    gradients = {n.replace("_orig_mod.", ""): p.grad for n, p in model.named_parameters()}
    return Pass(y.detach(), x.grad, gradients)


def fresh_mlp(target: Target, recipe: str, dtype: str, state: Mapping[str, Tensor]) -> nn.Module:
    """`mlp`, converted just now, with these weights: it has no history."""
    plain = mlp(target, dtype=dtype, seed=99)
    plain.load_state_dict(state)
    return target.convert(plain, recipe)


def same_pass(judge: Judge, law: str, check: str, got: Pass, expected: Pass) -> None:
    """Compare every tensor of two passes as bits, one comparison each."""
    ours, wanted = got.tensors(), expected.tensors()
    judge.equal(law, f"{check}: tensors", list(ours), list(wanted))
    for name, tensor in ours.items():
        judge.bitwise(law, f"{check}: {name}", tensor, wanted[name])
