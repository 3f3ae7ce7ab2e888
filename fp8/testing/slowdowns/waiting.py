"""A Triton kernel that copies a few numbers and waits, on the device, for a share of the time.

The share is of the time since its last launch ended. Over many calls of one case the launches
divide all of the case's time among them, whatever the shapes, the GPU and its clock: the case takes
that share longer, without anybody measuring it first.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def wait_and_copy(  # type: ignore[no-untyped-def]
    source,
    target,
    ended,
    size,
    permille,
    limit_ns,
    BLOCK: tl.constexpr,
):
    """Copy `size` numbers of source to target; the first program then waits.

    ended: int64, when the last launch ended, in ns of the GPU's clock; written at the end.
    permille: What to wait, of the time since then. limit_ns: That time at most.
    """
    program = tl.program_id(0)
    at = program * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at, mask=at < size), mask=at < size)
    if program == 0:
        begun = globaltimer()
        passed = tl.minimum(begun - tl.load(ended), limit_ns)
        wanted = passed * permille // 1000
        now = begun
        while now - begun < wanted:
            now = globaltimer()
        tl.store(ended, now)
