"""Operators of torch that move codes about: what float8 training needs of them, and the rest."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import torch
from torch import Tensor

Operator = Callable[[Tensor], Tensor]


def _saved_and_loaded(q: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    loaded: Tensor = torch.load(file, weights_only=True)
    return loaded


def _assigned(q: Tensor) -> Tensor:
    out = q.clone()
    out[2:5, ::2] = q[7:10, 1::2]
    return out


def _at(q: Tensor, *numbers: int) -> Tensor:
    return torch.tensor(numbers, device=q.device)


#: what moving codes about must not change: dequant(op(q)) = op(dequant(q)), q (16, 16)
MOVES: dict[str, Operator] = {
    "t": lambda q: q.t(),
    "transpose": lambda q: q.transpose(0, 1),
    "permute": lambda q: q.view(2, 8, 16).permute(2, 0, 1),
    "view": lambda q: q.view(8, 32),
    "reshape": lambda q: q.t().reshape(32, 8),
    "flatten": lambda q: q[:, 3:7].flatten(),
    "unsqueeze": lambda q: q.unsqueeze(1).squeeze(1)[None],
    "slice": lambda q: q[3:11, 1:6],
    "strided slice": lambda q: q[1::3, ::2],
    "narrow": lambda q: q.narrow(1, 3, 7),
    "select": lambda q: q.select(1, 15),
    "element": lambda q: q[7, 14],
    "index": lambda q: q[_at(q, 3, 0, 15, 3)],
    "index columns": lambda q: q[:, _at(q, 8, 1)],
    "mask": lambda q: q[torch.arange(16, device=q.device) % 3 == 0],
    "index_select": lambda q: q.index_select(1, _at(q, 15, 7)),
    "cat": lambda q: torch.cat([q[:3], q, q[5:6]]),
    "cat columns": lambda q: torch.cat([q[:, :3], q.t()], dim=1),
    "stack": lambda q: torch.stack([q, q.t()]),
    "split": lambda q: torch.cat(q.split([5, 4, 7])[::-1]),
    "unbind": lambda q: torch.stack(q.unbind(1)),
    "expand": lambda q: q[:, :1].expand(16, 9).contiguous(),
    "repeat": lambda q: q.repeat(2, 3),
    "where": lambda q: torch.where(torch.arange(16, device=q.device) % 2 == 0, q, q.t()),
    "clone": lambda q: q.clone(),
    "clone of a transpose": lambda q: q.t().clone(memory_format=torch.contiguous_format),
    "detach": lambda q: q.detach(),
    "contiguous": lambda q: q.t().contiguous(),
    "to device": lambda q: q.to("cpu").to(q.device),
    "to its dtype": lambda q: q.to(q.dtype, copy=True),
    "copy_": lambda q: torch.empty_like(q.t()).copy_(q.t()),
    "assignment": _assigned,
    "deepcopy": copy.deepcopy,
    "torch.save": _saved_and_loaded,
}
#: the same of operators that float8 training can do without: they may say that they don't know it
OTHER_OPERATORS: dict[str, Operator] = {
    "pickle": lambda q: pickle.loads(pickle.dumps(q)),  # noqa: S301 - its own
    "flip rows": lambda q: q.flip(0),
    "flip columns": lambda q: q.flip(1),
    "roll": lambda q: q.roll((3, 5), (0, 1)),
    "gather": lambda q: q.gather(0, _at(q, 4, 9, 0)[:, None]),
    "take": lambda q: q.take(_at(q, 255, 128, 0)),
    "index_copy": lambda q: q.clone().index_copy(0, _at(q, 2), q[:1]),
    "tril": lambda q: q.tril(),
    "masked_fill": lambda q: q.masked_fill(torch.arange(16, device=q.device) % 5 == 0, 0.5),
    "abs": lambda q: q.abs(),
    "neg": lambda q: -q,
}
