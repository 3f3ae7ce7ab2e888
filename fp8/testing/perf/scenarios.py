"""The training steps that are measured: the models of pytorch/ao#2262, and a block of Llama 3 8B.

A step is forward, backward, SGD's update and zero_grad, in bfloat16. Where the report's model has
some twenty layers of one shape, two stand for them here: they are alike, so depth changes the
time and not the ratio. The input needs a gradient, as it would behind another layer: else the
first of two layers would run without its grad_input in bfloat16, which is half a layer of twenty
in the report and a sixth of all products here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from fp8.testing.perf.cases import Shape

Gradient = Literal["random", "ones"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One model with its batch.

    Attributes:
        name: As in ids.
        text: Whose model it is, and what is wrong with it.
        tokens: M of every layer.
        widths: Features of a chain of linear layers, in to out.
        bias: Whether its layers have biases.
        kept: The last so many layers stay in bfloat16.
        block: A transformer block of `Block`'s widths instead of a chain.
        remedied: Converted and compiled as it should be: it must not be slower than bfloat16.
        recipes: What it is converted to.
        gradients: What comes into backward; "ones" is what `.sum().backward()` sends.
        first_call: Whether its first call is held to the claim about first calls.
    """

    name: str
    text: str
    tokens: int
    widths: tuple[int, ...] = ()
    bias: bool = False
    kept: int = 0
    block: Block | None = None
    remedied: bool = False
    recipes: tuple[str, ...] = ("tensorwise",)
    gradients: tuple[Gradient, ...] = ("random", "ones")
    first_call: bool = False

    @property
    def layers(self) -> tuple[Shape, ...]:
        """(M, K, N) of every linear layer."""
        if self.block is not None:
            return tuple((self.tokens, K, N) for K, N in self.block.layers)
        return tuple((self.tokens, K, N) for K, N in pairwise(self.widths))

    @property
    def converted(self) -> tuple[Shape, ...]:
        """(M, K, N) of the layers that are converted."""
        return self.layers[: len(self.layers) - self.kept]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The widths of a Llama block: attention with grouped keys and values, SwiGLU, RMSNorm."""

    width: int
    hidden: int
    heads: int
    groups: int
    sequence: int

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """(K, N) of q, k, v, the output projection, gate, up and down."""
        shared = self.width * self.groups // self.heads
        square, narrow = (self.width, self.width), (self.width, shared)
        wide = (self.width, self.hidden)
        return (square, narrow, narrow, square, wide, wide, (self.hidden, self.width))


#: Llama 3 8B (arXiv:2407.21783, table 3): 4096 wide, 14336 in the MLP, 32 heads, 8 for keys and
#: values.
LLAMA3_8B = Block(width=4096, hidden=14336, heads=32, groups=8, sequence=4096)

BLOCK = Scenario(
    name="llama3_8b_block",
    text="what people train: one block of Llama 3 8B",
    tokens=8192,
    block=LLAMA3_8B,
    gradients=("random",),
    first_call=True,
)

SCENARIOS = (
    Scenario(
        name="deep_nobias_warm",
        text="the report's model without biases (there 21 layers), warm; its head is converted",
        tokens=8192,
        widths=(16384, 16384, 16384, 128),
        remedied=True,
    ),
    Scenario(
        name="toy",
        text="the example of torchao's page: small, biases, a head of 128",
        tokens=4096,
        widths=(2048, 4096, 128),
        bias=True,
    ),
    BLOCK,
    Scenario(
        name="deep_bias_head",
        text="the report's model with biases (there 20 layers, M = 16384); its head is converted",
        tokens=4096,
        widths=(16384, 16384, 16384, 128),
        bias=True,
    ),
    Scenario(
        name="deep_head_filtered",
        text="the same with the head left in bfloat16",
        tokens=4096,
        widths=(16384, 16384, 16384, 128),
        bias=True,
        kept=1,
        remedied=True,
    ),
    Scenario(
        name="ffn_fsdp2",
        text="two wide layers, in the report under FSDP2, here on one GPU and not sharded",
        tokens=32000,
        widths=(4096, 12288, 4096),
    ),
)
