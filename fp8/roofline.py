"""The predicted time of a linear layer in bfloat16 and in float8: can float8 pay at all?

A layer runs three products of 2·M·K·N operations each; in float8 they take half the time, and
everything else that float8 does is extra. A kernel takes as long as its arithmetic, its memory
traffic or its launch, whichever is longest:

    product    max(2·M·K·N / P, bytes / B, launch)
    pass       max(bytes / B, launch)

P is the arithmetic rate of the format, B the memory bandwidth. Kernels do not overlap. Quantising a
bfloat16 tensor of n values costs 2n bytes for its amax, and 2n read plus n written for a cast; a
cast that also writes the transposed layout, which Hopper's products need in backward, writes 2n.

With c bytes of quantising traffic for each value of x, W and grad_output, and products that are
limited by arithmetic, float8 saves 6·M·K·N·(1/P_bf16 - 1/P_fp8) and pays c·(M·K + K·N + M·N)/B.
Divided by M·K·N that is a condition on one number alone, and `critical_size` is its right side:

    1 / (1/M + 1/K + 1/N)  >=  c / (6·B·(1/P_bf16 - 1/P_fp8))

so that a layer with 1/K + 1/N above the inverse of that pays at no M.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from fp8.hardware import Hardware
    from fp8.quantize import Operand
    from fp8.recipes import Recipe

#: The shortest kernel, in seconds: a Triton kernel that reads and writes one element takes 2 us on
#: an H100 (torchao/testing/training/roofline_utils.py, KERNEL_LAUNCH_OVERHEAD_SEC).
LAUNCH = 2e-6

#: "fused": the fewest passes that a stack with kernels of its own needs. "layouts": one kernel for
#: each layout, as torch.compile emits them for torchao.
Manner = Literal["fused", "layouts"]
Bias = Literal["none", "fused", "unfused"]

_BF16, _FP8 = 2, 1  # bytes of a value
#: Where `break_even_tokens` stops looking: a million tokens.
_MOST_TOKENS = 2**20


@dataclass(frozen=True, slots=True)
class Machine:
    """What a GPU does at most: FLOP/s, bytes/s, and seconds for the shortest kernel."""

    bf16: float
    fp8: float
    bandwidth: float
    launch: float = LAUNCH


def machine(hardware: Hardware, *, floor: bool = False) -> Machine:
    """A GPU's sustained figures, for what to expect, or its peaks, for what nothing can beat."""
    figure = hardware.peak if floor else hardware.sustained
    return Machine(figure("bf16"), figure("fp8"), figure("bandwidth"))


@dataclass(frozen=True, slots=True)
class Prediction:
    """One layer, forward and backward: seconds by where they go."""

    products_bf16: float
    products_fp8: float
    quantisation: float
    bias_bf16: float = 0.0
    bias_fp8: float = 0.0

    @property
    def bf16(self) -> float:
        """Seconds in bfloat16."""
        return self.products_bf16 + self.bias_bf16

    @property
    def fp8(self) -> float:
        """Seconds in float8."""
        return self.products_fp8 + self.quantisation + self.bias_fp8

    @property
    def speedup(self) -> float:
        """The time in bfloat16 over that in float8: below 1 float8 is slower."""
        return self.bf16 / self.fp8


def product(M: int, K: int, N: int, on: Machine, *, float8: bool) -> float:
    """Seconds of one product (M, K) x (K, N) that writes bfloat16."""
    rate, item = (on.fp8, _FP8) if float8 else (on.bf16, _BF16)
    moved = item * (M * K + K * N) + _BF16 * M * N
    return max(2 * M * K * N / rate, moved / on.bandwidth, on.launch)


def memory_pass(moved: float, on: Machine) -> float:
    """Seconds of a kernel that reads and writes `moved` bytes in all."""
    return max(moved / on.bandwidth, on.launch)


def amax(values: int, on: Machine) -> float:
    """Seconds to read bfloat16 once for its largest magnitude."""
    return memory_pass(_BF16 * values, on)


def cast(values: int, on: Machine, *, layouts: int = 1) -> float:
    """Seconds to read bfloat16 and write float8, once or with the transposed layout."""
    return memory_pass((_BF16 + layouts * _FP8) * values, on)


def quantising_bytes(uses: tuple[Operand, ...], manner: Manner) -> tuple[int, ...]:
    """The kernels that quantise one tensor for its `uses`: bytes moved for each value.

    uses: the tensor as an operand of each product that wants it in float8, one layout each. A row's
    or a block's second read, for the cast after its amax, comes from the cache. A tensor that is
    tensorwise in one product and rowwise in the other has its amax from those of its rows.
    """
    layouts = len(uses)
    granularities = {use.granularity.name for use in uses}
    one_layout = _BF16 + _FP8
    if not uses:
        return ()
    if granularities == {"tensorwise"}:
        casts = (_BF16 + layouts * _FP8,) if manner == "fused" else (one_layout,) * layouts
        return (_BF16, *casts)
    if manner == "fused" and not granularities & {"tensorwise", "rowwise"}:
        return (_BF16 + layouts * _FP8,)  # a 128 x 128 tile has whole blocks of both layouts
    if manner == "layouts" and granularities == {"rowwise"} and layouts == 2:
        # the first kernel leaves a transposed bfloat16 copy for the second
        return (one_layout + _BF16, one_layout)
    return (one_layout,) * layouts


def uses(recipe: Recipe) -> dict[str, tuple[Operand, ...]]:
    """What each tensor of a layer is quantised to, by "x", "weight" and "grad_output"."""
    wanted = {
        "x": (recipe.output.a, recipe.grad_weight.b),
        "weight": (recipe.output.b, recipe.grad_input.b),
        "grad_output": (recipe.grad_input.a, recipe.grad_weight.a),
    }
    return {name: tuple(o for o in pair if o is not None) for name, pair in wanted.items()}


def linear(
    M: int,
    K: int,
    N: int,
    recipe: Recipe,
    on: Machine,
    *,
    bias: Bias = "none",
    manner: Manner = "fused",
) -> Prediction:
    """A layer of K in and N out features with M tokens, forward and backward, all three products.

    An unfused bias is a pass over the output of its own (2 bytes read, 2 written a value); a fused
    one is free, as bfloat16's is. Its gradient reads grad_output once in either format.
    """
    products = (
        (recipe.output, (M, K, N)),
        (recipe.grad_input, (M, N, K)),
        (recipe.grad_weight, (N, M, K)),
    )
    values = {"x": M * K, "weight": K * N, "grad_output": M * N}
    quantisation = sum(
        memory_pass(each * values[tensor], on)
        for tensor, operands in uses(recipe).items()
        for each in quantising_bytes(operands, manner)
    )
    gradient = 0.0 if bias == "none" else memory_pass(_BF16 * M * N, on)
    added = memory_pass(2 * _BF16 * M * N, on) if bias == "unfused" else 0.0
    return Prediction(
        products_bf16=sum(product(*shape, on, float8=False) for _, shape in products),
        products_fp8=sum(product(*shape, on, float8=how.a is not None) for how, shape in products),
        quantisation=quantisation,
        bias_bf16=gradient,
        bias_fp8=gradient + added,
    )


def size(M: int, K: int, N: int) -> float:
    """1 / (1/M + 1/K + 1/N): the one number of a shape that decides whether float8 pays."""
    return 1 / (1 / M + 1 / K + 1 / N)


def critical_size(on: Machine, bytes_per_value: float) -> float:
    """The `size` from which a layer of three float8 products pays: see the module's docstring."""
    return bytes_per_value / (6 * on.bandwidth * (1 / on.bf16 - 1 / on.fp8))


def break_even_tokens(
    K: int, N: int, recipe: Recipe, on: Machine, *, bias: Bias = "none", manner: Manner = "fused"
) -> int | None:
    """The least number of tokens, a multiple of 16, at which float8 is predicted not to be slower.

    None when no number up to a million is enough. The speed-up grows with M: the weight's share of
    the quantising traffic shrinks, and nothing else changes.
    """

    def pays(sixteens: int) -> bool:
        found = linear(16 * sixteens, K, N, recipe, on, bias=bias, manner=manner)
        return found.speedup >= 1

    candidates = range(1, _MOST_TOKENS // 16 + 1)
    first = bisect_left(candidates, True, key=pays)
    return 16 * candidates[first] if first < len(candidates) else None
