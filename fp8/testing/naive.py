"""The naive accuracy test, beside which the suite is measured: random squares, SQNR >= 20 dB."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from fp8 import targets
from fp8.testing.faults import find

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

#: what the usual accuracy test asks for
NAIVE_DB = 20.0
_NAIVE_EXTENT = 256


def naive(plant: str, connection: Connection) -> None:
    """Whether random 256 x 256 x 256 operands show the fault: SQNR of y, dX, dW below 20 dB.

    Every recipe of the fault's targets is tried, in bfloat16, with a bias and a random grad_output.
    """
    torch.set_num_threads(1)
    variant = find(plant)
    try:
        with variant():
            found = any(_naive_sees(target) for target in variant.targets)
    except Exception as error:  # noqa: BLE001 - whatever breaks, a naive test sees it
        connection.send((True, f"{type(error).__name__}: {error}"))
        return
    connection.send((found, ""))


def _naive_sees(name: str) -> bool:
    target = targets.load(name)
    rng = np.random.default_rng(0)
    n = _NAIVE_EXTENT
    x, w, g = (torch.from_numpy(rng.standard_normal((n, n))).to(torch.bfloat16) for _ in range(3))
    bias = torch.from_numpy(rng.standard_normal(n)).to(torch.bfloat16)
    for recipe in sorted(target.capabilities().recipes):
        layer = nn.Linear(n, n, dtype=torch.bfloat16)
        with torch.no_grad():
            layer.weight.copy_(w)
            layer.bias.copy_(bias)
        model = target.convert(nn.Sequential(layer), recipe)
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.backward(g)
        exact = (x.double() @ w.double().t() + bias.double(), g.double() @ w.double())
        weight = g.double().t() @ x.double()
        pairs = zip((y, leaf.grad, layer.weight.grad), (*exact, weight), strict=True)
        if any(not _sqnr(got, want) >= NAIVE_DB for got, want in pairs):
            return True
    return False


def _sqnr(got: Tensor | None, want: Tensor) -> float:
    if got is None:
        return -torch.inf
    noise = (got.detach().double() - want).square().sum()
    return float(10 * torch.log10(want.square().sum() / noise))
