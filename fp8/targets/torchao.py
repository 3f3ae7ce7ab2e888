"""torchao's float8 training as a target: its saturating cast, its dynamic scales, its layers.

Importing this module imports torchao (0.17 or later), so `fp8.targets.load` does it only when this
target was chosen.
"""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch
from packaging.version import Version
from torch import Tensor, nn

from fp8.formats import FORMATS, Format
from fp8.quantize import HIGH_PRECISION, Operand, Quantized
from fp8.scaling import COLUMNWISE, ROWWISE, TENSORWISE, TORCHAO, TORCHAO_POW2
from fp8.targets.base import Capabilities, Policy
from fp8.targets.reference import torch_accumulation

if TYPE_CHECKING:
    from collections.abc import Iterator

_OLDEST = Version("0.17")
#: what torchao and torch log while torchao is imported, none of it about float8 training: CUDA
#: extensions that this machine cannot load, and how torchao registers its enums
_IMPORT_NOISE = ("Failed to load", "Skipping import of cpp extensions", "register_constant()")


def _check_installed() -> None:
    needs = f"needs torchao >= {_OLDEST}: pip install 'fp8[torchao]'"
    try:
        found = version("torchao")
    except PackageNotFoundError as error:
        msg = f"torchao is not installed; this target {needs}"
        raise ImportError(msg) from error
    if Version(found) < _OLDEST:
        msg = f"torchao: got {found}; this target {needs}"
        raise ImportError(msg)


@contextmanager
def _quiet_import() -> Iterator[None]:
    def is_news(record: logging.LogRecord) -> bool:
        return not any(noise in record.getMessage() for noise in _IMPORT_NOISE)

    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    for logger in loggers:
        logger.addFilter(is_news)
    try:
        with warnings.catch_warnings():
            # A docstring's "\\." in torchao 0.18, which Python 3.12 warns of when it compiles it.
            warnings.simplefilter("ignore", SyntaxWarning)
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_news)


_check_installed()
with _quiet_import():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.config import Float8LinearRecipeName, ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.float8.float8_utils import FP8_TYPES, to_fp8_saturated

#: what cuBLASLt wants, since torchao's recipes don't pad; the CPU kernel takes any extent
_CUDA_ALIGNMENT = 16
#: our granularity -> torchao's name for it, and the axis along which one scale reaches
_GRANULARITIES = {
    TENSORWISE: (ScalingGranularity.TENSORWISE, None),
    ROWWISE: (ScalingGranularity.AXISWISE, -1),
    COLUMNWISE: (ScalingGranularity.AXISWISE, 0),
}


@dataclass
class TorchaoTarget:
    """`torchao.float8`: dynamic scaling, module swap."""

    device: torch.device
    name: str = "torchao"
    policy: Policy = field(init=False)

    def __post_init__(self) -> None:
        self.policy = Policy(
            overflow={fmt.name: "saturate" for fmt in _formats()},
            # float8_linear.py: `output + self.bias`, on the rounded output.
            bias_rounding="after",
            accumulation=torch_accumulation(self.device),
        )

    def capabilities(self) -> Capabilities:
        """torchao's recipes and what their operands are made of."""
        recipes = frozenset(recipe.value for recipe in Float8LinearRecipeName)
        return Capabilities(
            formats=frozenset(fmt.name for fmt in _formats()),
            operands=frozenset(
                Operand(fmt, granularity, rule)
                for fmt in _formats()
                for granularity in _GRANULARITIES
                for rule in (TORCHAO, TORCHAO_POW2)
            ),
            recipes=recipes if self._runs() else frozenset(),
            dtypes=frozenset(HIGH_PRECISION),
            alignment=_CUDA_ALIGNMENT if self.device.type == "cuda" else 1,
        )

    def _runs(self) -> bool:
        if self.device.type != "cuda":
            return True
        return torch.cuda.get_device_capability(self.device) >= (8, 9)

    def cast(self, x: Tensor, format: Format) -> Tensor:
        """float8_utils.py, `to_fp8_saturated`."""
        out: Tensor = to_fp8_saturated(x, format.dtype)
        return out

    def quantize(self, x: Tensor, operand: Operand) -> Quantized:
        """float8_scaling_utils.py, `hp_tensor_to_float8_dynamic`."""
        granularity, axis = _GRANULARITIES[operand.granularity]
        quantized = hp_tensor_to_float8_dynamic(
            x,
            operand.format.dtype,
            LinearMMConfig(),
            scaling_granularity=granularity,
            axiswise_dim=axis,
            round_scales_to_power_of_2=operand.rule == TORCHAO_POW2,
        )
        codes, multiplier = quantized._data, quantized._scale  # noqa: SLF001 - its only names
        # What torchao calls the scale is the multiplier; its products take the reciprocal, in
        # float32 (float8_ops.py, `addmm_float8_unwrapped`).
        shape = operand.granularity.scale_shape(*x.shape)
        return Quantized(codes.contiguous(), multiplier.reciprocal().reshape(shape), operand)

    def convert(self, module: nn.Module, recipe: str) -> nn.Module:
        """The module itself with its layers swapped; of a root Linear, a new layer."""
        config = Float8LinearConfig.from_recipe_name(recipe)
        converted: nn.Module = convert_to_float8_training(module, config=config)
        return converted


def _formats() -> list[Format]:
    return [fmt for fmt in FORMATS.values() if fmt.dtype in FP8_TYPES]


def target(device: torch.device) -> TorchaoTarget:
    """The target `torchao`."""
    return TorchaoTarget(device)
