"""One trial: a pytest run in a process of its own, with a fault planted, that notes what objects.

Processes come from multiprocessing's fork server, which imports torch, pytest and this project
once; a trial costs a fork, a collection and the tests that it runs. In a trial the judge records a
violation and goes on, so that one run tells which laws catch a fault; a test is over when every law
that it declares has spoken, and the run when every law that was asked for has.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import pytest
import torch

# Imported by the tests, and therefore here: the fork server imports this module alone.
import fp8.targets.reference
import fp8.testing.bounds
import fp8.testing.linear_runs
import fp8.testing.models
import fp8.testing.naive
import fp8.testing.oracle
import fp8.testing.session
import fp8.testing.strategies
import fp8.testing.summary
import fp8.testing.tracing
import fp8.testing.worlds  # noqa: F401
from fp8.testing import laws
from fp8.testing.faults import STEPS, replaced
from fp8.testing.trial_plugin import Kill, Outcome, Trial, Watch, noted_step, noting

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext

__all__ = ["Kill", "Outcome", "Progress", "Running", "Trial", "outcome", "run", "run_all"]

#: told the stage, and how many of how many of its trials are done
Progress = Callable[[str, int, int], None]


#: what the fork server imports for trials of faults
PRELOAD = ("fp8.testing.trials",)
#: pytest's exit statuses after which a trial has run: all passed, some failed, none selected
_RAN = (0, 1, 5)


def run(trial: Trial, connection: Connection) -> None:
    """Run a trial in this process, which ends with it; the outcome goes through the connection."""
    torch.set_num_threads(1)
    os.chdir(trial.root)
    watch = Watch(trial, connection.send)
    laws.Judge = noting(watch)  # type: ignore[misc]
    with tempfile.TemporaryFile("w+") as output, ExitStack() as stack:
        if trial.note_steps:
            for step in STEPS:
                stack.enter_context(replaced(step, partial(noted_step, watch.reaching, step)))
        _redirect(output.fileno())
        status = pytest.main(trial.arguments(), plugins=[watch])
        sys.stdout.flush()
        sys.stderr.flush()
        output.seek(0)
        text = output.read()
    ran = status in _RAN or (status == pytest.ExitCode.INTERRUPTED and watch.over())
    error = "" if ran else f"pytest: exit status {int(status)}\n{text[-3000:]}"
    reached = watch.reached if trial.note_steps else {}
    connection.send(("done", {"seconds": watch.seconds, "reached": reached, "error": error}))


def _redirect(descriptor: int) -> None:
    """What this process prints, and its children, goes there."""
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


# --- processes ----------------------------------------------------------------------------------


class Running:
    """A process that runs `function(argument, connection)`, and what it has said so far."""

    def __init__(
        self,
        function: Callable[..., None],
        argument: object,
        timeout: float,
        preload: Sequence[str] = PRELOAD,
    ) -> None:
        context = _fork_server(preload)
        self.reader, writer = context.Pipe(duplex=False)
        self.process = context.Process(target=function, args=(argument, writer), daemon=False)
        self.process.start()
        writer.close()
        self.deadline = time.monotonic() + timeout
        self.timeout = timeout
        self.said: list[Any] = []

    def receive(self) -> bool:
        """Take in what was said; returns whether the process is still at work."""
        with suppress(EOFError):
            while self.reader.poll():
                self.said.append(self.reader.recv())
            if time.monotonic() < self.deadline:
                return True
            self.said.append(("late", self.timeout))
        self.close()
        return False

    def close(self) -> None:
        """End the process if it runs, and forget it."""
        if self.process.is_alive() and time.monotonic() >= self.deadline:
            self.process.kill()
        self.process.join()
        self.reader.close()


def _fork_server(preload: Sequence[str]) -> ForkServerContext:
    """The context whose processes have imported these modules already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


def outcome(said: list[Any]) -> Outcome:
    """What a trial's messages amount to."""
    found = Outcome(error="the process ended without a result")
    test = None
    for kind, value in said:
        if kind == "test":
            test = value
        elif kind == "laws":
            found.laws = tuple(value)
        elif kind == "kill":
            found.kills[value["law"]] = Kill(**value)
        elif kind == "unusable":
            found.unusable.append(value)
        elif kind == "late":
            found.error = f"no result after {value:.0f} s"
        else:
            found.seconds, found.reached = value["seconds"], value["reached"]
            found.tests, found.error = len(found.seconds), value["error"]
    if test is not None and not {"done", "late"} & {kind for kind, _ in said}:
        # It died in a test, as the whole of pytest would have: nobody overlooks that.
        name, asked, seconds = test
        for law in asked:
            found.kills.setdefault(law, Kill(law, name, "the process died", 1, seconds))
        found.error = ""
    return found


def run_all(
    stage: str,
    function: Callable[..., None],
    todo: dict[str, Any],
    workers: int,
    timeout: float,
    progress: Progress,
    preload: Sequence[str] = PRELOAD,
) -> Iterator[tuple[str, list[Any]]]:
    """Each job in a process of its own, `workers` at a time; what each said, when it has ended.

    The first call decides what the processes of this one have imported.
    """
    waiting = list(todo.items())
    running: dict[str, Running] = {}
    done = 0
    progress(stage, 0, len(todo))
    while waiting or running:
        while waiting and len(running) < workers:
            key, argument = waiting.pop(0)
            running[key] = Running(function, argument, timeout, preload)
        wait([job.reader for job in running.values()], timeout=1.0)
        for key in [key for key, job in running.items() if not job.receive()]:
            done += 1
            progress(stage, done, len(todo))
            yield key, running.pop(key).said
