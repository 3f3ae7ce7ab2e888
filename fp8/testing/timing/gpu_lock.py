"""One timing run at a time on one GPU."""

from __future__ import annotations

import fcntl
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class TimingUnavailableError(RuntimeError):
    """Nothing can be timed here; the message says what is missing."""


class GpuBusyError(TimingUnavailableError):
    """Another timing run has the GPU."""


def refuse_xdist(environ: Mapping[str, str]) -> None:
    """Refuse to time in a worker of pytest-xdist: its neighbours share the GPU and the cores.

    Raises:
        TimingUnavailableError: This is a worker, and it has neighbours.
    """
    workers = environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    if "PYTEST_XDIST_WORKER" in environ and workers != "1":
        msg = f"timing needs a machine to itself, got {workers} pytest workers: leave out -n"
        raise TimingUnavailableError(msg)


@contextmanager
def locked(uuid: str, folder: Path | None = None) -> Iterator[Path]:
    """Hold the lock of a GPU; yields its file.

    The kernel gives the lock back when the process ends, however it ends. The file stays: to
    delete it would let two processes hold locks on two files of one name.

    Args:
        uuid: The GPU's.
        folder: Of the lock files; the system's for temporary files when left out.

    Raises:
        GpuBusyError: Another run holds it.
    """
    path = (folder if folder is not None else Path(tempfile.gettempdir())) / f"fp8-{uuid}.lock"
    try:
        # Read only, and created only if it isn't there: it may be another user's.
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            msg = f"GPU {uuid} is being timed by another run, which holds {path}"
            raise GpuBusyError(msg) from error
        yield path
    finally:
        os.close(descriptor)
