"""A sharded run has the bits of an unsharded one: outputs, gradients, scales, parameters.

Two processes, each with a microbatch of its own, take two steps; one process that holds all of
every parameter takes the same steps. See `fp8.testing.sharded` for why nothing may differ.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import multiprocessing

from fp8.testing.sharded import RANKS, STEPS, WAYS, Plan, Trace, run_rank, unsharded

if TYPE_CHECKING:
    from pathlib import Path

#: seconds for both processes to start, run every recipe and end; they take about 5
DEADLINE = 150


def run_ranks(plan: Plan, folder: Path) -> list[dict[str, dict[str, Any]]]:
    """What each rank wrote.

    The first rank that fails ends the other, and its traceback is in the error's message. Ranks
    that do not end by the deadline are killed.
    """
    context = multiprocessing.start_processes(
        run_rank, (plan, folder), nprocs=RANKS, join=False, start_method="spawn"
    )
    end = time.monotonic() + DEADLINE
    try:
        while not context.join(timeout=1):
            if time.monotonic() > end:
                alive = [rank for rank, p in enumerate(context.processes) if p.is_alive()]
                raise TimeoutError(f"ranks {alive} did not end within {DEADLINE} seconds")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [torch.load(folder / f"rank{rank}.pt", map_location="cpu") for rank in range(RANKS)]


@pytest.mark.thorough
@pytest.mark.law("P01")
def test_sharded_equals_unsharded(target, judge, fp8_seed, fp8_plant, tmp_path):
    """Every recipe and every way of distributing in one pair of processes, which take seconds."""
    capabilities = target.capabilities()
    recipes = tuple(sorted(capabilities.recipes))
    judge.require(bool(recipes), "convert: no recipe at all")
    if target.device.type == "cuda":
        judge.require(torch.cuda.device_count() >= RANKS, f"distributed: needs {RANKS} GPUs")
    plan = Plan(
        target=target.name,
        recipes=recipes,
        plant=fp8_plant,
        seed=fp8_seed,
        device=target.device.type,
        threads=torch.get_num_threads(),
        alignment=capabilities.alignment,
    )
    ran, ranks = judge.attempt("P01", "two processes", lambda: run_ranks(plan, tmp_path))
    if not ran:
        return
    for way, (_, compute) in WAYS.items():
        for recipe in recipes:
            expected = unsharded(target, recipe, plan, compute)
            for rank in range(RANKS):
                judge.example(way=way, recipe=recipe, rank=rank)
                got = Trace(**ranks[rank][way][recipe])
                scales = not capabilities.hidden_products
                judge_trace(judge, got, expected[rank], scales=scales)


def judge_trace(judge, got: Trace, want: Trace, *, scales: bool) -> None:
    for step in range(STEPS):
        if scales:
            seen = len(want.scales[step])
            judge.true("P01", "float8 ran", seen > 0, "no scaled product was seen")
            judge.bitwise("P01", f"scales, step {step}", got.scales[step], want.scales[step])
        judge.bitwise("P01", f"output, step {step}", got.y[step], want.y[step])
        judge.bitwise("P01", f"gradients, step {step}", got.gradients[step], want.gradients[step])
        judge.bitwise(
            "P01", f"parameters, step {step}", got.parameters[step], want.parameters[step]
        )
