"""The oracle's arithmetic as a torch module, so that a whole training loop can run on it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from fp8.testing import oracle

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
AnyModule = TypeVar("AnyModule", bound=nn.Module)


def _array(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    return tensor.detach().to("cpu", torch.float32).numpy()


def _tensor(
    exact: oracle.Exact, compute: torch.dtype, like: torch.Tensor, shape: torch.Size
) -> torch.Tensor:
    """`exact` rounded once to the compute dtype, then cast to the dtype and device of `like`."""
    rounded = torch.from_numpy(exact.rounded(_DTYPES[compute])).to(compute)
    return rounded.to(like.device, like.dtype).reshape(shape)


class _OracleLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        recipe: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.recipe = recipe
        y, _ = oracle.linear_output(
            _array(x).reshape(-1, x.shape[-1]),
            _array(weight),
            None if bias is None else _array(bias),
            recipe,
            dtype=_DTYPES[x.dtype],
        )
        return _tensor(y, x.dtype, x, x.shape[:-1] + weight.shape[:1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        (grad_output,) = grad_outputs
        dx, dw, db, _ = oracle.linear_gradients(
            _array(x).reshape(-1, x.shape[-1]),
            _array(weight),
            _array(grad_output).reshape(-1, weight.shape[0]),
            ctx.recipe,
            dtype=_DTYPES[x.dtype],
        )
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        return (
            _tensor(dx, x.dtype, x, x.shape) if need_x else None,
            _tensor(dw, x.dtype, weight, weight.shape) if need_weight else None,
            _tensor(db, x.dtype, bias, bias.shape) if need_bias else None,
            None,
        )


class OracleLinear(nn.Linear):
    """An `nn.Linear` whose output and three gradients come from `fp8.testing.oracle`.

    Takes x (…, in_features) in float32, bfloat16 or float16 and computes in its dtype, or in
    autocast's where that is on. Slow and numpy-bound: for small models in tests.
    """

    recipe: str

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Shape (…, out_features), in the compute dtype; TypeError for any other dtype."""
        device = input.device.type
        if torch.is_autocast_enabled(device):
            input = input.to(torch.get_autocast_dtype(device))  # noqa: A001 - as above
        if input.dtype not in _DTYPES:
            msg = f"input has dtype {input.dtype}, need one of {', '.join(map(str, _DTYPES))}"
            raise TypeError(msg)
        y: torch.Tensor = _OracleLinearFunction.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.recipe
        )
        return y


def oracle_model(model: AnyModule, recipe: str) -> AnyModule:
    """A deep copy of `model` in which every plain `nn.Linear` computes with the oracle's `recipe`.

    Subclasses of `nn.Linear` are left alone: their forward, or their owner's, is their own.
    """
    if recipe not in oracle.RECIPES:
        msg = f"recipe is {recipe!r}, need one of {', '.join(oracle.RECIPES)}"
        raise ValueError(msg)
    converted = copy.deepcopy(model)
    # Changing the class keeps parameters, ties, hooks and the training flag as the copy has them.
    for module in converted.modules():
        if type(module) is nn.Linear:
            module.__class__ = OracleLinear
            module.recipe = recipe  # type: ignore[assignment]
    return converted
