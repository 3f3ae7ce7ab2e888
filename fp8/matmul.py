"""The scaled matrix product of two quantised operands: emulated, or by torch's own operator.

Every product goes through one custom operator, `torch.ops.fp8.scaled_mm`, whatever computes it: a
traced graph shows which products run, in which formats and with which accumulation, on any machine.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fp8 import scaling
from fp8.formats import E4M3FN, E5M2, from_dtype
from fp8.quantize import HIGH_PRECISION, Operand, Quantized
from fp8.recipes import Accumulation
from fp8.scaling import BLOCK_1X128, BLOCK_128X128, GRANULARITIES, ROWWISE, TENSORWISE

#: "emulated": float64 arithmetic on the dequantised operands, on any device.
#: "torch": torch's scaled product, float8 hardware on CUDA.
Backend = Literal["emulated", "torch"]

#: the pairs of formats that a product takes; hardware refuses e5m2 x e5m2
FORMAT_PAIRS = ((E4M3FN, E4M3FN), (E5M2, E4M3FN), (E4M3FN, E5M2))

#: what the hardware wants the contraction and the output's columns to be a multiple of
_ALIGNMENT = 16
#: columns of float32 scales are read 16 bytes at a time
_SCALE_ALIGNMENT = 4


def scaled_mm(
    a: Quantized,
    b: Quantized,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype,
    accumulation: Accumulation = "precise",
    backend: Backend = "emulated",
) -> Tensor:
    """a . b^T + bias, rounded once to `out_dtype`.

    a: (M, K). b: (N, K), contraction last like a. bias: (N,) of `out_dtype`, added before the one
    rounding. out_dtype: float32, bfloat16 or float16. Returns (M, N). K = 0 gives the bias alone.
    accumulation: see `fp8.recipes.Accumulation`; only float8 hardware knows the difference.
    Raises TypeError, ValueError (both name the argument, what it got and what it needs) and
    NotImplementedError for granularities that `backend` cannot multiply on this device.
    """
    check_operands(a, b, bias=bias, out_dtype=out_dtype, accumulation=accumulation, backend=backend)
    out: Tensor = torch.ops.fp8.scaled_mm(
        a.codes,
        b.codes,
        a.scale,
        b.scale,
        bias,
        out_dtype,
        a.operand.granularity.name,
        b.operand.granularity.name,
        accumulation,
        backend,
    )
    return out


def check_operands(
    a: Quantized,
    b: Quantized,
    *,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    accumulation: str,
    backend: str,
) -> None:
    """Refuse what no device should be asked to multiply, alike on CPU and CUDA."""
    for name, operand in (("a", a), ("b", b)):
        _check_operand(name, operand)
    pair = (from_dtype(a.codes.dtype), from_dtype(b.codes.dtype))
    if pair not in FORMAT_PAIRS:
        known = ", ".join(f"{x.name} x {y.name}" for x, y in FORMAT_PAIRS)
        raise TypeError(f"a, b: got {pair[0].name} x {pair[1].name}, needs one of {known}")
    if a.codes.shape[1] != b.codes.shape[1]:
        raise ValueError(
            f"b.codes: got shape {tuple(b.codes.shape)}, needs (N, {a.codes.shape[1]}): the "
            f"contraction is the last dimension of both, and a.codes is {tuple(a.codes.shape)}"
        )
    if b.codes.device != a.codes.device:
        raise ValueError(
            f"b.codes: got device {b.codes.device}, needs {a.codes.device}, as a.codes"
        )
    if out_dtype not in HIGH_PRECISION:
        raise TypeError(f"out_dtype: got {out_dtype}, needs float32, bfloat16 or float16")
    if accumulation not in get_args(Accumulation):
        raise ValueError(f"accumulation: got {accumulation!r}, needs 'fast' or 'precise'")
    if backend not in get_args(Backend):
        raise ValueError(f"backend: got {backend!r}, needs 'emulated' or 'torch'")
    if bias is not None:
        _check_bias(bias, columns=b.codes.shape[0], dtype=out_dtype, device=a.codes.device)


def _check_operand(name: str, operand: Quantized) -> None:
    if not isinstance(operand, Quantized):
        raise TypeError(f"{name}: got {type(operand).__name__}, needs a Quantized operand")
    codes, scale, how = operand
    if codes.dtype != how.format.dtype:
        raise TypeError(f"{name}.codes: got {codes.dtype}, needs {how.format.dtype}, as {how}")
    if codes.dim() != 2:
        raise ValueError(f"{name}.codes: got shape {tuple(codes.shape)}, needs 2 dimensions")
    if scale.dtype != torch.float32:
        raise TypeError(f"{name}.scale: got {scale.dtype}, needs float32")
    shape = how.granularity.scale_shape(*codes.shape)
    if tuple(scale.shape) != shape:
        raise ValueError(
            f"{name}.scale: got shape {tuple(scale.shape)}, needs {shape}: "
            f"{how.granularity.name} scales of codes {tuple(codes.shape)}"
        )
    if scale.device != codes.device:
        raise ValueError(f"{name}.scale: got device {scale.device}, needs {codes.device}")


def _check_bias(bias: Tensor, *, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    if not isinstance(bias, Tensor):
        raise TypeError(f"bias: got {type(bias).__name__}, needs a tensor")
    if tuple(bias.shape) != (columns,):
        raise ValueError(f"bias: got shape {tuple(bias.shape)}, needs ({columns},)")
    if bias.dtype != dtype:
        raise TypeError(f"bias: got {bias.dtype}, needs {dtype}, the output's dtype")
    if bias.device != device:
        raise ValueError(f"bias: got device {bias.device}, needs {device}")


def supports(a: Operand, b: Operand, *, backend: Backend, device: torch.device) -> bool:
    """Whether `backend` can multiply these operands on `device`."""
    if (a.format, b.format) not in FORMAT_PAIRS:
        return False
    if backend == "emulated":
        return True
    if not _is_flat(a, b):
        return device.type == "cuda" and _multiplies_blockwise(a, b)
    both_tensorwise = a.granularity == b.granularity == TENSORWISE
    return both_tensorwise or device.type != "cpu" or cpu_multiplies_rowwise()


@cache
def cpu_multiplies_rowwise() -> bool:
    """Whether torch's operator takes rowwise scales on a CPU: it was tried, once.

    torch 2.11 refuses them, or multiplies by the first one alone (pytorch#179118).
    """
    codes = torch.ones((16, 16), dtype=E4M3FN.dtype)
    scale = torch.arange(1.0, 17.0).unsqueeze(1)
    try:
        product = torch._scaled_mm(  # noqa: SLF001 - the only name that it has
            codes, codes.t(), scale_a=scale, scale_b=scale.t(), out_dtype=torch.float32
        )
    except (RuntimeError, ValueError):
        return False
    return torch.equal(product, 16 * scale * scale.t())


def _is_flat(a: Operand, b: Operand) -> bool:
    return all(o.granularity in (TENSORWISE, ROWWISE) for o in (a, b))


# --- the operator -------------------------------------------------------------------------------

torch.library.define(
    "fp8::scaled_mm",
    "(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias, ScalarType out_dtype, "
    "str a_granularity, str b_granularity, str accumulation, str backend) -> Tensor",
)


@torch.library.impl("fp8::scaled_mm", "CompositeExplicitAutograd")
def _scaled_mm(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    a_granularity: str,
    b_granularity: str,
    accumulation: str,
    backend: str,
) -> Tensor:
    left = _operand(a, a_scale, a_granularity)
    right = _operand(b, b_scale, b_granularity)
    # Called through this module, so that a planted fault reaches eager and compiled code alike.
    if backend == "emulated":
        return emulated_product(left, right, bias, out_dtype)
    # On a CPU torch's operator is a float32 product inside, which autocast would narrow to its own
    # dtype (seen with torch 2.13; tests/numerics/test_gradients.py, test_dtypes_and_autocast).
    with torch.autocast(a.device.type, enabled=False):
        return torch_product(left, right, bias, out_dtype, fast=accumulation == "fast")


@torch.library.register_fake("fp8::scaled_mm")
def _scaled_mm_fake(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    a_granularity: str,
    b_granularity: str,
    accumulation: str,
    backend: str,
) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _operand(codes: Tensor, scale: Tensor, granularity: str) -> Quantized:
    # The rule made the scale and is done; a product needs the format and the granularity alone.
    how = Operand(from_dtype(codes.dtype), GRANULARITIES[granularity], scaling.TORCHAO)
    return Quantized(codes, scale, how)


# --- emulated -----------------------------------------------------------------------------------


def emulated_product(
    a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """The product in float64: codes times scale is exact there, and TF32 cannot interfere."""
    out = _dequantize_exactly(a) @ _dequantize_exactly(b).t()
    if bias is not None:
        out = out + bias.to(torch.float64)
    return round_once(out, out_dtype)


def _dequantize_exactly(operand: Quantized) -> Tensor:
    factors = scaling.expand(operand.scale, operand.operand.granularity, *operand.codes.shape)
    # float8 x float32 has at most 28 significant bits.
    return operand.codes.to(torch.float64) * factors.to(torch.float64)


def round_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 to `dtype`, ties to even, in one step.

    torch converts float64 to bfloat16 and float16 through float32, which rounds twice. Rounding to
    odd in float32 first (Boldo and Melquiond, 2008) makes the second rounding the only one.
    """
    nearest = x.to(torch.float32)
    if dtype == torch.float32:
        return nearest
    error = x - nearest.to(torch.float64)
    bits = nearest.view(torch.int32)
    # Where the float32 is inexact and its last bit even, step to its neighbour on x's side: the
    # bits of a positive float32 grow with it, those of a negative one with its magnitude.
    step = torch.where((error > 0) == (nearest > 0), 1, -1)
    inexact = (error != 0) & torch.isfinite(error) & (nearest != 0)
    odd = torch.where(inexact & (bits & 1 == 0), bits + step, bits)
    return odd.to(torch.int32).view(torch.float32).to(dtype)


# --- torch's operator ---------------------------------------------------------------------------


def torch_product(
    a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype, *, fast: bool
) -> Tensor:
    """The product by `torch._scaled_mm`, or `torch.nn.functional.scaled_mm` where it is blockwise.

    Pads the contraction and b's rows to multiples of 16 with zero codes, which add exactly nothing.
    """
    rows, contraction = a.codes.shape
    columns = b.codes.shape[0]
    if rows == 0 or columns == 0 or contraction == 0:
        out = torch.zeros((rows, columns), dtype=out_dtype, device=a.codes.device)
        return out if bias is None else out + bias
    flat = _is_flat(a.operand, b.operand)
    if not supports(a.operand, b.operand, backend="torch", device=a.codes.device):
        raise NotImplementedError(
            f"backend: got 'torch' for {a.operand.granularity.name} x {b.operand.granularity.name} "
            f"on {a.codes.device.type}, needs 'emulated': torch has no such product there"
        )
    a, b, padded_bias = pad_operands(a, b, bias, row_alignment=1 if flat else _SCALE_ALIGNMENT)
    # The epilogue adds a bias only to a bfloat16 or float16 output; otherwise it is added in
    # float32, which is the accumulator's own precision, before the one rounding to out_dtype.
    writes = _writes(a, b, out_dtype)
    fused = flat and writes and out_dtype != torch.float32
    product = _flat_product if flat else _blockwise_product
    out = product(
        a,
        b,
        padded_bias if fused else None,
        out_dtype if fused or (bias is None and writes) else torch.float32,
        fast,
    )[:rows, :columns]
    if bias is not None and not fused:
        out = out + bias.to(torch.float32)
    # Without the padding around it, which would make it a strided view and stay allocated.
    return out.to(out_dtype).contiguous()


def _writes(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> bool:
    # CUDA's rowwise and blockwise kernels write bfloat16 and float32 (pytorch#156771); a tensorwise
    # operand beside a rowwise one is multiplied by the rowwise kernel.
    scalar = a.operand.granularity == b.operand.granularity == TENSORWISE
    return out_dtype != torch.float16 or scalar or a.codes.device.type == "cpu"


def pad_operands(
    a: Quantized, b: Quantized, bias: Tensor | None, *, row_alignment: int = 1
) -> tuple[Quantized, Quantized, Tensor | None]:
    """Both operands with the contraction and b's rows padded to multiples of 16, row-major."""
    rows = _pad_to(a.codes.shape[0], row_alignment)
    contraction = _pad_to(a.codes.shape[1], _ALIGNMENT)
    columns = _pad_to(b.codes.shape[0], _ALIGNMENT)
    extra = columns - b.codes.shape[0]
    if bias is not None:
        bias = torch.nn.functional.pad(bias, (0, extra))
    return (
        _pad(a, rows=rows, columns=contraction),
        _pad(b, rows=columns, columns=contraction),
        bias,
    )


def _pad_to(extent: int, alignment: int) -> int:
    return -(-extent // alignment) * alignment


def _pad(operand: Quantized, *, rows: int, columns: int) -> Quantized:
    codes, scale, how = operand
    if codes.shape == (rows, columns):
        return Quantized(_compact(codes), scale, how)
    # Zero codes are zero bytes in every format; as bytes they can be padded on every device.
    bytes_ = torch.nn.functional.pad(
        codes.view(torch.uint8), (0, columns - codes.shape[1], 0, rows - codes.shape[0])
    )
    shape = how.granularity.scale_shape(rows, columns)
    more = (0, shape[1] - scale.shape[1], 0, shape[0] - scale.shape[0])
    # A scale of 1 for the rows that are new: 0 * 1 adds nothing, 0 * NaN would.
    return Quantized(bytes_.view(codes.dtype), torch.nn.functional.pad(scale, more, value=1.0), how)


def _compact(x: Tensor) -> Tensor:
    """`x` contiguous and at an address that is a multiple of 16 bytes, as cuBLASLt wants it."""
    # A single row counts as contiguous whatever its stride says, and cuBLASLt reads the stride.
    x = x.contiguous().view(-1).view(x.shape)
    # Storage begins at such an address; only a view into it may not.
    return x if x.storage_offset() * x.element_size() % 16 == 0 else x.clone()


def _flat_product(
    a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype, fast: bool
) -> Tensor:
    a_scale, b_scale = a.scale.reshape(-1), b.scale.reshape(-1)
    if a.operand.granularity != b.operand.granularity:
        # One side tensorwise, one rowwise: the operator wants both the same.
        a_scale = a_scale.expand(a.codes.shape[0])
        b_scale = b_scale.expand(b.codes.shape[0])
    return torch._scaled_mm(  # noqa: SLF001 - the only name that it has
        a.codes,
        b.codes.t(),
        scale_a=_compact(a_scale).unsqueeze(1),
        scale_b=_compact(b_scale).unsqueeze(0),
        bias=bias,
        out_dtype=out_dtype,
        use_fast_accum=fast,
    )


def _multiplies_blockwise(a: Operand, b: Operand) -> bool:
    # cuBLASLt multiplies blockwise operands in e4m3 alone, and not two of 128x128.
    pairs = ((BLOCK_1X128, BLOCK_128X128), (BLOCK_128X128, BLOCK_1X128), (BLOCK_1X128, BLOCK_1X128))
    return (
        hasattr(torch.nn.functional, "scaled_mm")
        and a.format == b.format == E4M3FN
        and (a.granularity, b.granularity) in pairs
    )


def _blockwise_recipes(a: Operand, b: Operand) -> tuple[Any, Any]:
    """torch's names for the two granularities."""
    types = torch.nn.functional.ScalingType
    names = {BLOCK_1X128: types.BlockWise1x128, BLOCK_128X128: types.BlockWise128x128}
    return names[a.granularity], names[b.granularity]


def _blockwise_product(
    a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype, fast: bool
) -> Tensor:
    # cuBLASLt promotes its sums at every scale, every 128 values, whatever is asked for.
    recipe_a, recipe_b = _blockwise_recipes(a.operand, b.operand)
    return torch.nn.functional.scaled_mm(
        a.codes,
        b.codes.t(),
        scale_a=_blockwise_scale(a),
        scale_recipe_a=recipe_a,
        scale_b=_blockwise_scale(b),
        scale_recipe_b=recipe_b,
        bias=bias,
        output_dtype=out_dtype,
        use_fast_accum=False,
    )


def _blockwise_scale(operand: Quantized) -> Tensor:
    """The scales as cuBLASLt reads them (seen with torch 2.11 on H200)."""
    scale = operand.scale
    if operand.operand.granularity == BLOCK_1X128:
        # All rows' scales for one block of the contraction lie together: strides (1, rows).
        return scale.t().contiguous().t()
    # The blocks of the contraction come first, padded to a multiple of 4.
    extra = _pad_to(scale.shape[1], _SCALE_ALIGNMENT) - scale.shape[1]
    return torch.nn.functional.pad(scale, (0, extra), value=1.0).t()
