"""Shapes known to be slow in float8, as data: from how many tokens a layer pays.

Source: torchao's published speed-ups of LayerNorm, Linear, Sigmoid, forward and backward, compiled,
`rowwise` against bfloat16 on one H100 with torch 2.8 (docs/static/fp8-rowwise-perf.png). The table
below holds the smallest M of its grid (1024 to 32768) whose speed-up reaches 1.0. `tensorwise` is
at least as fast as `rowwise` for every shape that torchao publishes, so for it the table is a safe
side; a GPU that was measured overrides it.
"""

from __future__ import annotations

from types import MappingProxyType

#: where the numbers come from, for reports
SOURCE = "torchao's rowwise table, H100, compiled"

_NEVER = None
_OUT_FEATURES = (1024, 2048, 4096, 8192, 16384, 32768)
#: in_features -> for each of _OUT_FEATURES, the smallest M that pays
_BREAK_EVEN = MappingProxyType(
    {
        1024: (_NEVER, _NEVER, _NEVER, _NEVER, _NEVER, _NEVER),
        2048: (_NEVER, _NEVER, _NEVER, 8192, 8192, 8192),
        4096: (_NEVER, _NEVER, 8192, 4096, 4096, 4096),
        8192: (_NEVER, _NEVER, 8192, 4096, 4096, 4096),
        16384: (_NEVER, _NEVER, 8192, 4096, 4096, 4096),
        32768: (_NEVER, _NEVER, 8192, 4096, 4096, 4096),
    }
)


def break_even_tokens(in_features: int, out_features: int) -> int | None:
    """The number of tokens from which a layer of this shape is faster in float8.

    Shapes between grid points take the next smaller point of the grid, the slower side. None means
    that no M of the grid pays.
    """
    rows = [k for k in _BREAK_EVEN if k <= in_features]
    columns = [i for i, n in enumerate(_OUT_FEATURES) if n <= out_features]
    if not rows or not columns:
        return None
    return _BREAK_EVEN[rows[-1]][columns[-1]]
