"""What Hypothesis draws: shapes, layouts, value distributions, dtypes and seeds, never numbers.

Tensors are made from the drawn seed by numpy, so that the same case gives the same bits on every
machine (torch.randn's bits depend on the CPU). Shapes have M, K and N all different and off the
tiles: bugs hide in square, aligned operands.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

Array = NDArray[np.float64]

#: dtype names of inputs and parameters
DTYPES = ("bfloat16", "float32", "float16")

#: how a matrix may lie in memory; every layout but "contiguous" and "transposed" is surrounded by
#: NaN, so that a kernel that reads a neighbour is found out
LAYOUTS = ("contiguous", "transposed", "sliced", "padded", "offset")

#: extents around the tiles of 16, 32, 64 and 128
_EXTENTS = (1, 2, 3, 7, 15, 16, 17, 31, 33, 47, 63, 64, 65, 95, 127, 128, 129, 143, 191, 255, 257)


def examples(count: int) -> Callable[[Any], Any]:
    """Settings: `count` examples in the default profile, a tenth in quick, ten times in nightly."""
    # conftest.py gives a test that does not say otherwise 40 in the default profile.
    scaled = max(3, count * settings().max_examples // 40)
    return settings(max_examples=scaled)


# --- values -------------------------------------------------------------------------------------


def _normal(rng: np.random.Generator, rows: int, columns: int) -> Array:
    return rng.standard_normal((rows, columns))


def _student_t(rng: np.random.Generator, rows: int, columns: int) -> Array:
    return np.asarray(rng.standard_t(3, (rows, columns)))


def _lognormal(rng: np.random.Generator, rows: int, columns: int) -> Array:
    signs = rng.choice([-1.0, 1.0], (rows, columns))
    return np.asarray(rng.lognormal(0, 2, (rows, columns)) * signs)


def _outlier_channels(rng: np.random.Generator, rows: int, columns: int) -> Array:
    x = _normal(rng, rows, columns)
    x[:, rng.choice(columns, max(1, columns // 100), replace=False)] *= 100
    return x


def _outlier_rows(rng: np.random.Generator, rows: int, columns: int) -> Array:
    x = _normal(rng, rows, columns)
    x[rng.choice(rows, min(rows, 2), replace=False)] *= 1e4
    return x


def _zeros(rng: np.random.Generator, rows: int, columns: int) -> Array:
    """Whole rows, whole columns and the first block of zeros, of both signs."""
    x = _normal(rng, rows, columns)
    x[rng.random(rows) < 0.3] = 0.0
    x[:, rng.random(columns) < 0.1] = -0.0
    x[: rows // 2, : min(columns, 128)] = 0.0
    return x


def _wide(rng: np.random.Generator, rows: int, columns: int) -> Array:
    """Magnitudes over 2^-20 to 1 in every group: most codes are subnormal or zero."""
    return _normal(rng, rows, columns) * np.ldexp(1.0, -rng.integers(0, 21, (rows, columns)))


def _positive(rng: np.random.Generator, rows: int, columns: int) -> Array:
    return rng.random((rows, columns)) + 0.5


#: name -> generator of (rows, columns) finite values of moderate size
VALUES: dict[str, Callable[[np.random.Generator, int, int], Array]] = {
    "normal": _normal,
    "student_t": _student_t,
    "lognormal": _lognormal,
    "outlier_channels": _outlier_channels,
    "outlier_rows": _outlier_rows,
    "zeros": _zeros,
    "wide": _wide,
    "positive": _positive,
}

#: name -> powers of two for x, w and g: each operand goes to its extreme (1e24 and 1e-20, below the
#: floor of torchao's amax) while the products stay in range. float16 gets a twentieth of it.
MAGNITUDES = {"unit": (0, 0, 0), "huge": (80, -80, 0), "tiny": (-40, 40, -30), "low": (-66, 66, 0)}


def matrix(values: str, rows: int, columns: int, seed: int) -> Array:
    """(rows, columns) of the distribution `values`, from the seed alone."""
    if rows * columns == 0:
        return np.zeros((rows, columns))
    return VALUES[values](np.random.default_rng(seed), rows, columns)


def to_dtype(x: Array, dtype: str) -> Array:
    """The values of x as `dtype` holds them, in float64."""
    kind: type = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float16": np.float16}[
        dtype
    ]
    with np.errstate(over="ignore"):
        return np.asarray(x.astype(np.float32).astype(kind).astype(np.float64))


# --- cases --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearCase:
    """One linear layer with its input and grad_output: M tokens, K in, N out."""

    M: int
    K: int
    N: int
    dtype: str
    bias: bool
    layout: str
    values: str
    magnitude: str
    seed: int

    def facts(self) -> dict[str, Any]:
        """What the failure message and the expectations see."""
        return asdict(self)


@dataclass(frozen=True)
class LinearArrays:
    """x (M, K), w (N, K), bias (N,) or None, g (M, N): float64 that holds the dtype's values."""

    x: Array
    w: Array
    bias: Array | None
    g: Array


def extents(smallest: int, largest: int, alignment: int = 1) -> st.SearchStrategy[int]:
    """An extent in [smallest, largest], more often than not at the edge of a tile."""
    edges = [n for n in _EXTENTS if smallest <= n <= largest]
    drawn = st.sampled_from(edges) | st.integers(smallest, largest)
    if alignment == 1:
        return drawn
    return drawn.map(lambda n: max(alignment, n // alignment * alignment))


@st.composite
def shapes(
    draw: st.DrawFn,
    smallest: int = 1,
    largest: int = 192,
    empty_rows: bool = False,
    alignment: int = 1,
    align_rows: bool = False,
    squares: bool = False,
) -> tuple[int, int, int]:
    """(M, K, N), all different; M may be 0 where `empty_rows` allows it.

    squares: one time in eight M = N, or all three, where a mix-up of axes does not fail by shape.

    alignment: what K and N are multiples of, for kernels that want it, and M too if `align_rows`
    says so: it is the contraction of the weight's gradient.
    """
    rows = draw(extents(smallest, largest, alignment if align_rows else 1))
    if empty_rows and draw(st.integers(0, 15)) == 0:
        rows = 0
    if squares and rows % alignment == 0 and rows > 0 and draw(st.integers(0, 7)) == 0:
        return rows, draw(st.just(rows) | extents(smallest, largest, alignment)), rows
    contraction = draw(extents(smallest, largest, alignment).filter(lambda k: k != rows))
    columns = draw(
        extents(smallest, largest, alignment).filter(lambda n: n not in (rows, contraction))
    )
    return rows, contraction, columns


@st.composite
def linear_cases(
    draw: st.DrawFn,
    *,
    dtypes: tuple[str, ...] = DTYPES,
    smallest: int = 1,
    largest: int = 192,
    empty_rows: bool = False,
    values: tuple[str, ...] = tuple(VALUES),
    magnitudes: tuple[str, ...] = tuple(MAGNITUDES),
    alignment: int = 1,
) -> LinearCase:
    """A linear layer's operands; see `arrays` for the tensors."""
    M, K, N = draw(shapes(smallest, largest, empty_rows, alignment, align_rows=True))
    return LinearCase(
        M,
        K,
        N,
        dtype=draw(st.sampled_from(dtypes)),
        bias=draw(st.booleans()),
        layout=draw(st.sampled_from(LAYOUTS)),
        values=draw(st.sampled_from(values)),
        magnitude=draw(st.sampled_from(magnitudes)),
        seed=draw(st.integers(0, 2**20)),
    )


def arrays(case: LinearCase, base_seed: int = 0) -> LinearArrays:
    """The operands of `case`, from its seed and the run's base seed."""
    seeds = np.random.SeedSequence([base_seed, case.seed]).generate_state(4)
    shapes = ((case.M, case.K), (case.N, case.K), (1, case.N), (case.M, case.N))
    exponents = _exponents(case)
    x, w, bias, g = (
        to_dtype(np.ldexp(matrix(case.values, *shape, int(seed)), exponent), case.dtype)
        for shape, seed, exponent in zip(shapes, seeds, exponents, strict=True)
    )
    return LinearArrays(x, w, bias[0] if case.bias else None, g)


def _exponents(case: LinearCase) -> tuple[int, int, int, int]:
    x, w, g = MAGNITUDES[case.magnitude]
    if case.dtype == "float16":
        # Its range is 2^-24 to 2^16, of which the outliers and the sum take their part.
        x, w, g = x // 20 - 5, w // 20 - 3, g // 20 - 5
    # Weights as training has them, so that outputs are of the size of the input.
    w -= max(1, case.K).bit_length() // 2
    return x, w, x + w, g


# --- exact arithmetic ---------------------------------------------------------------------------


def exact_arrays(
    M: int, K: int, N: int, recipe: str, dtype: str, bias: bool, seed: int
) -> LinearArrays:
    """Operands whose three products every correct implementation gives exactly.

    Integers -7 to 7 times powers of two that differ from row to row and from column to column (from
    block to block for `blockwise`) and cancel in every contraction:

        x = n 2^(e_i + h_k)    w = m 2^(f_j - h_k)    g = p 2^(-e_i - f_j)

    448 = 7 * 2^6 and 57344 = 7 * 2^13, so a group whose amax is a 7 has a power-of-two scale under
    every rule: every block has one, and the tensor as a whole (rowwise recipes round their scales
    to powers of two). The exponents of a group span at most 12, so every value is a code (e4m3fn:
    2^6 down to 2^-9 for a 1). Each partial sum is below 2^13 units of its own granule, which
    Hopper's accumulator holds; `ValueError` where it would not be.
    """
    rng = np.random.default_rng(seed)
    # float16 ends at 2^16: sums of 2^13 leave it 2^2 for the exponents.
    span = 1 if dtype == "float16" else 3
    group = 128 if recipe == "blockwise" else 1
    e, h, f = (_group_exponents(rng, extent, group, span) for extent in (M, K, N))
    n = _integers(rng, M, K, largest=max(M, K, N))
    m = _integers(rng, N, K, largest=max(M, K, N))
    p = _integers(rng, M, N, largest=max(M, K, N))
    for integers, rows, columns in ((n, e, h), (m, f, -h), (p, -e, -f)):
        _place_sevens(rng, integers, rows, columns, group)
    for a, b in ((n, m), (p, m.T), (p.T, n.T)):
        largest = (np.abs(a) @ np.abs(b).T).max(initial=0)
        if largest >= 2**13:
            raise ValueError(f"exact_arrays: a sum of {largest} needs more than 2^13 granules")
    offsets = None
    if bias:
        # Bits below the sum's granule, so that rounding before and after the bias differ.
        offsets = rng.integers(-100, 101, N) * np.exp2(f + e.min(initial=0) - 2)
    return LinearArrays(
        x=n * np.exp2(e[:, None] + h),
        w=m * np.exp2(f[:, None] - h),
        bias=offsets,
        g=p * np.exp2(-e[:, None] - f),
    )


def _group_exponents(rng: np.random.Generator, extent: int, group: int, span: int) -> Array:
    blocks = rng.integers(-span, span + 1, -(-extent // group)).astype(np.float64)
    return np.repeat(blocks, group)[:extent]


def _integers(rng: np.random.Generator, rows: int, columns: int, largest: int) -> Array:
    # The mean of |n m| is 14: 400 terms stay under 2^13 with room for luck.
    kept = rng.random((rows, columns)) < min(1.0, 400 / max(1, largest))
    return rng.integers(-7, 8, (rows, columns)).astype(np.float64) * kept


def _place_sevens(
    rng: np.random.Generator, integers: Array, rows: Array, columns: Array, group: int
) -> None:
    """A +-7 in every group of every granularity, and where the whole tensor has its amax."""
    if integers.size == 0:
        return
    signs = rng.choice([-7.0, 7.0], integers.shape)
    integers[rows.argmax(), columns.argmax()] = 7.0
    if group == 1:
        return
    # Within a tile exponents are equal, so each of its rows and columns wants one: a diagonal.
    for top in range(0, integers.shape[0], group):
        for left in range(0, integers.shape[1], group):
            tile = integers[top : top + group, left : left + group]
            i, j = np.indices(tile.shape)
            diagonal = (i - j) % min(tile.shape) == 0
            tile[diagonal] = signs[top : top + group, left : left + group][diagonal]


# --- tensors ------------------------------------------------------------------------------------


def as_tensor(
    x: Array, dtype: str, device: torch.device | str, layout: str = "contiguous"
) -> torch.Tensor:
    """The values of x (one or two dimensions) as a tensor that lies in memory as `layout` says."""
    import torch

    values = torch.from_numpy(np.ascontiguousarray(x)).to(getattr(torch, dtype)).to(device)
    return values if values.dim() == 1 else lay_out(values, layout, float("nan"))


def lay_out(values: torch.Tensor, layout: str, poison: float) -> torch.Tensor:
    """The same matrix with the strides and the offset of `layout`, `poison` all around it."""
    rows, columns = values.shape
    if layout == "contiguous":
        return values
    if layout == "transposed":
        return values.t().contiguous().t()
    if layout == "sliced":
        view = values.new_full((2 * rows + 1, columns + 3), poison)[1::2, 1 : columns + 1]
    elif layout == "padded":
        view = values.new_full((rows, columns + 7), poison)[:, :columns]
    elif layout == "offset":
        view = values.new_full((rows * columns + 2,), poison)[1:-1].view(rows, columns)
    else:
        raise ValueError(f"layout: got {layout!r}, needs one of {', '.join(LAYOUTS)}")
    return view.copy_(values)
