"""A GPU that nobody uses: ``python -m fp8.testing.timing.free_gpu`` prints its UUID.

For ``CUDA_VISIBLE_DEVICES``, before a run that times. The run takes the lock itself: this only
looks. Where torch sees no GPU it prints nothing; where all are in use it fails.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from fp8.testing.timing import gpu_lock, nvml

if TYPE_CHECKING:
    from pathlib import Path


def free_gpu(lock_folder: Path | None = None) -> str | None:
    """The UUID of the first GPU that nobody times on or computes on; None if there is none.

    Args:
        lock_folder: Where the lock files are: see `fp8.testing.timing.open_gpu`.
    """
    for index in range(torch.cuda.device_count()):
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        try:
            with gpu_lock.locked(uuid, lock_folder), nvml.monitor(uuid) as monitor:
                # NVML's list of processes has ours then, and so can be read: see `nvml.foreign`.
                torch.empty(1, device=f"cuda:{index}")
                if not monitor.foreign():
                    return uuid
        except (gpu_lock.GpuBusyError, torch.OutOfMemoryError):
            continue
    return None


def main() -> int:
    """Print it. Returns 1 when all GPUs are in use."""
    if not torch.cuda.is_available():
        return 0
    uuid = free_gpu()
    if uuid is None:
        sys.stderr.write("every GPU here is being timed on or computes for another process\n")
        return 1
    sys.stdout.write(f"{uuid}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
