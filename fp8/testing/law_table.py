"""The laws: one property each, and the public bug reports that it stands for.

A law's number never changes and is never used again: expectations and records refer to it.
The bugs are ``owner/repository#number`` on GitHub: reports that a check of this law would have
caught, here or in an emulation of the same fault.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Law:
    """One property that a float8 implementation must have.

    Attributes:
        id: ``P01`` to ``P27``, or ``F-ACC``.
        title: A few words, for messages and tables.
        statement: What must hold.
        bugs: Public reports of implementations for which it did not hold.
    """

    id: str
    title: str
    statement: str
    bugs: tuple[str, ...]


def _law(law_id: str, title: str, statement: str, bugs: str) -> Law:
    return Law(law_id, title, statement, tuple(bugs.split()))


_ALL = (
    _law(
        "P01",
        "Sharded equals unsharded",
        "A sharded run (tensor parallel, fully sharded, DTensor placements, uneven ranks) gives "
        "the outputs, gradients and scales of the single process, and every rank holds the same "
        "scales.",
        "NVIDIA/TransformerEngine#1734 NVIDIA/TransformerEngine#1412 "
        "NVIDIA/TransformerEngine#702 pytorch/ao#4106 pytorch/ao#1334 "
        "meta-pytorch/float8_experimental#168 meta-pytorch/float8_experimental#207 "
        "axolotl-ai-cloud/axolotl#2926 NVIDIA/TransformerEngine#600 ROCm/rocm-systems#10374 "
        "allenai/OLMo-core#168 pytorch/ao#4300 pytorch/ao#3982 pytorch/torchtitan#864 "
        "pytorch/pytorch#153595 pytorch/pytorch#159957 pytorch/pytorch#191992 "
        "NVIDIA/Megatron-LM#442 NVIDIA/Megatron-LM#2272 Azure/msccl-executor-nccl#38 "
        "NVIDIA/TransformerEngine#1648 pytorch/torchtitan#865 pytorch/torchtitan#866 "
        "NVIDIA/TransformerEngine#2974",
    ),
    _law(
        "P02",
        "Speed and launch budget per shape",
        "Forward plus backward, quantising included, keeps its time relative to compiled bfloat16 "
        "and its exact number of kernels on a grid of shapes; shapes where float8 cannot pay are "
        "listed, not averaged away.",
        "sgl-project/sglang#27926 ROCm/legacy-rocm-build#5730 pytorch/ao#4471 "
        "vllm-project/vllm#40016 axolotl-ai-cloud/axolotl#2926 NVIDIA/TransformerEngine#705 "
        "NVIDIA/cudnn-frontend#619 sgl-project/DeepGEMM#76 pytorch/torchtitan#866 "
        "pytorch/ao#2262 pytorch/ao#2184 pytorch/pytorch#155991 pytorch/ao#2672 "
        "pytorch/pytorch#133242 pytorch/pytorch#159769 pytorch/ao#2410 "
        "NVIDIA/TransformerEngine#761 NVIDIA/TransformerEngine#1491 triton-lang/triton#3851 "
        "sgl-project/sglang#8499 vllm-project/vllm#48035 openxla/xla#17887 "
        "pytorch/torchtitan#1191 pytorch/ao#893 pytorch/pytorch#143464 "
        "NVIDIA/TransformerEngine#2126",
    ),
    _law(
        "P03",
        "Shape sweep",
        "Every M, N and K, from 0 and 1 over odd values to one past a tile, is either computed "
        "correctly, forward and backward, or refused in the forward by an error that names the "
        "constraint.",
        "pytorch/FBGEMM#6159 ml-explore/mlx#3763 ROCm/legacy-rocm-build#5730 "
        "sgl-project/sglang#32843 NVIDIA/TransformerEngine#3070 pytorch/ao#1516 pytorch/ao#4584 "
        "neuralmagic/AutoFP8#9 pytorch/ao#571 pytorch/ao#1268 pytorch/ao#4106 "
        "pytorch/pytorch#133334 vllm-project/vllm#28637 vllm-project/vllm#40016 "
        "deepseek-ai/DeepGEMM#25 pytorch/ao#4045 pytorch/torchtitan#2262 "
        "NVIDIA/TransformerEngine#1527 vllm-project/vllm#30257 pytorch/ao#3982 "
        "pytorch/torchtitan#864 meta-pytorch/torchtune#2833",
    ),
    _law(
        "P04",
        "Bad input is refused",
        "A wrong dtype, rank, shape, device or format pair raises an error that names the "
        "argument, what it got and what it needs, with the same verdict on every backend; it "
        "never returns a tensor.",
        "vllm-project/vllm#51372 pytorch/pytorch#179118 vllm-project/vllm-xpu-kernels#110 "
        "pytorch/ao#571 pytorch/ao#1268 vllm-project/vllm#30257 pytorch/pytorch#134765 "
        "pytorch/pytorch#184081 pytorch/pytorch#119135 pytorch/pytorch#132005 "
        "pytorch/pytorch#128744 pytorch/pytorch#180855 pytorch/ao#1108 "
        "vllm-project/vllm-omni#5262",
    ),
    _law(
        "P05",
        "Exact arithmetic",
        "Small integers times powers of two, a different power for every scaling group, give the "
        "float64 result rounded once to the output dtype, bit for bit: no scale is swapped, "
        "dropped, repeated or put on the wrong axis.",
        "huggingface/transformers#47030 vllm-project/vllm#51372 pytorch/pytorch#190449 "
        "pytorch/pytorch#179118 sgl-project/sglang#27926 ROCm/aiter#1258 ROCm/pytorch#2739 "
        "NVIDIA/cutlass#3615 pytorch/FBGEMM#6159 sgl-project/sglang#20819 "
        "triton-lang/triton#11633 ml-explore/mlx#3763 vllm-project/vllm#18026 "
        "vllm-project/vllm-xpu-kernels#110 intel/torch-xpu-ops#1120 mlc-ai/pith-train#74 "
        "pytorch/ao#4229 unslothai/unsloth#8953",
    ),
    _law(
        "P06",
        "Cast table",
        "Every 8-bit code decodes and every 16-bit value, every float32 midpoint and its "
        "neighbours, subnormals, signed zeros, overflow, infinities and NaN encode as the "
        "format's definition says, at every vector and tail length.",
        "dropbox/gemlite#38 meta-pytorch/float8_experimental#33 pytorch/ao#1912 "
        "pytorch/pytorch#178817 jax-ml/ml_dtypes#260 triton-lang/triton#11753 "
        "triton-lang/triton#2583 triton-lang/triton#8322 triton-lang/triton#11897 "
        "intel/torch-xpu-ops#2951 apache/tvm#20315 openvinotoolkit/openvino#30057 "
        "pytorch/ao#4725 pytorch/pytorch#172767 pytorch/pytorch#128744 pytorch/pytorch#149002",
    ),
    _law(
        "P07",
        "Multi-step state",
        "After an optimiser step the forward uses the new weights, microbatches add up, an "
        "evaluation in between changes nothing, and step one is no worse than step two.",
        "AMD-AGI/Primus#1046 meta-pytorch/float8_experimental#321 NVIDIA/TransformerEngine#600 "
        "NVIDIA/Megatron-LM#442 NVIDIA/Megatron-LM#2272 NVIDIA/TransformerEngine#1648 "
        "NVIDIA/Megatron-LM#5707 NVIDIA/TransformerEngine#567 NVIDIA/TransformerEngine#1972 "
        "NVIDIA/TransformerEngine#825 NVIDIA/TransformerEngine#1047 "
        "NVIDIA/TransformerEngine#539 NVIDIA/TransformerEngine#1190 "
        "meta-pytorch/float8_experimental#220 InternLM/xtuner#1356 vllm-project/vllm-omni#5262",
    ),
    _law(
        "P08",
        "Each gradient on its own",
        "grad_input, grad_weight and grad_bias are each right under a non-uniform upstream "
        "gradient, with and without bias, on rectangular shapes; a gradient that nn.Linear leaves "
        "None stays None.",
        "pytorch/ao#3356 mlc-ai/pith-train#74 NVIDIA/TransformerEngine#3342 "
        "huggingface/transformers#46736 NVIDIA/TransformerEngine#1412 "
        "NVIDIA/TransformerEngine#3400 AMD-AGI/Primus#1046 modelscope/mcore-bridge#125 "
        "pytorch/ao#4229 pytorch/ao#1516 unslothai/unsloth#8953 ROCm/TransformerEngine#634 "
        "pytorch/ao#4045 pytorch/pytorch#128257",
    ),
    _law(
        "P09",
        "Eager equals compiled",
        "Outputs, gradients and scales are the same bits, or within a stated bound, in eager and "
        "in compiled mode, and both accept the same arguments.",
        "pytorch/ao#1912 triton-lang/triton#8322 pytorch/pytorch#136181 pytorch/pytorch#154807 "
        "pytorch/pytorch#179570 pytorch/pytorch#134765 NVIDIA/TransformerEngine#600 "
        "pytorch/pytorch#184081 pytorch/pytorch#178095 pytorch/pytorch#172767 "
        "pytorch/torchtitan#1056",
    ),
    _law(
        "P10",
        "One graph, no recompile, no sync",
        "The model compiles to one graph, the number of compilations does not grow with steps, "
        "depth or M, and neither direction waits for the device.",
        "pytorch/ao#1329 pytorch/ao#1334 meta-pytorch/float8_experimental#237 "
        "meta-pytorch/float8_experimental#168 meta-pytorch/float8_experimental#207 "
        "axolotl-ai-cloud/axolotl#2926 meta-pytorch/float8_experimental#321 "
        "NVIDIA/TransformerEngine#705 pytorch/pytorch#152307 pytorch/ao#1600 "
        "NVIDIA/cudnn-frontend#619 vllm-project/vllm#22758 pytorch/ao#567 "
        "sgl-project/DeepGEMM#76",
    ),
    _law(
        "P11",
        "Scale formula",
        "A scale is what the stated rule makes of the exact amax over the stated group, in "
        "float32 whatever the input dtype, for the largest value of the format really produced; a "
        "power of two is never above its argument.",
        "NVIDIA/TransformerEngine#2589 flashinfer-ai/flashinfer#4023 pytorch/ao#4725 "
        "pytorch/ao#1770 pytorch/pytorch#136181 NVIDIA/TransformerEngine#1734 "
        "ROCm/TransformerEngine#485 microsoft/onnxruntime#29350 huggingface/transformers#47030 "
        "pytorch/pytorch#179570",
    ),
    _law(
        "P12",
        "Degenerate magnitudes",
        "Zero tensors, rows and blocks, subnormals, extreme magnitudes, one NaN or one Inf: zeros "
        "stay zero, what should be finite is, and damage stays in its own scaling group.",
        "pytorch/ao#4713 pytorch/ao#3356 huggingface/kernels-community#681 "
        "ROCm/TransformerEngine#737 NVIDIA/TransformerEngine#786 NVIDIA/TransformerEngine#2589 "
        "flashinfer-ai/flashinfer#4023 dropbox/gemlite#38 pytorch/ao#1770",
    ),
    _law(
        "P13",
        "Every switch does something",
        "Each option changes the result, the kernel or the memory as documented, or raises; "
        "exactly the expected modules are converted; a filter that matches nothing is an error.",
        "pytorch/pytorch#190449 pytorch/pytorch#154807 meta-pytorch/float8_experimental#296 "
        "openxla/xla#17887 pytorch/pytorch#119135 pytorch/torchtitan#4008 "
        "huggingface/accelerate#4147 meta-pytorch/float8_experimental#205 "
        "meta-pytorch/torchtune#2833",
    ),
    _law(
        "P14",
        "Memory budget",
        "Bytes kept after conversion, saved for backward and left after it stay within their "
        "budget, flat over steps; frozen weights and checkpointing lower them.",
        "NVIDIA/TransformerEngine#1736 NVIDIA/TransformerEngine#739 "
        "NVIDIA/TransformerEngine#2803 NVIDIA/TransformerEngine#1261 pytorch/ao#936 "
        "pytorch/ao#567 NVIDIA/TransformerEngine#244 huggingface/accelerate#2655",
    ),
    _law(
        "P15",
        "Recompute equals forward",
        "Under every kind of checkpointing the recomputed float8 tensors are the forward's, bit "
        "for bit, and the gradients are those of the run without checkpointing.",
        "pytorch/ao#1329 pytorch/torchtitan#1056 pytorch/torchtitan#864 pytorch/torchtitan#865 "
        "pytorch/ao#893 NVIDIA/TransformerEngine#539 NVIDIA/TransformerEngine#1190 "
        "NVIDIA/TransformerEngine#24 NVIDIA/Megatron-LM#7538 NVIDIA/TransformerEngine#3284 "
        "meta-pytorch/float8_experimental#267",
    ),
    _law(
        "P16",
        "Operations on quantised tensors",
        "Transposing, slicing, viewing, copying and moving a quantised tensor commute with "
        "dequantising it, and its metadata follows; what is not supported says so.",
        "pytorch/ao#4444 NVIDIA/TransformerEngine#1687 pytorch/ao#1339 pytorch/ao#3053 "
        "pytorch/pytorch#180855 pytorch/pytorch#149002 pytorch/pytorch#128257",
    ),
    _law(
        "P17",
        "Save and restore",
        "state_dict, pickle, deepcopy and a load in a fresh process give the same keys, the same "
        "bits and, at the next step, the same output and gradients.",
        "NVIDIA/TransformerEngine#123 NVIDIA/TransformerEngine#567 NVIDIA/TransformerEngine#304 "
        "NVIDIA/TransformerEngine#982 pytorch/torchtitan#1414 pytorch/ao#2478 "
        "InternLM/xtuner#1234 NVIDIA/TransformerEngine#2974 pytorch/pytorch#176270",
    ),
    _law(
        "P18",
        "Layout independence",
        "Transposed, sliced, padded, offset, expanded and broadcast inputs give the result of "
        "their contiguous copies, or are clearly refused.",
        "vllm-project/vllm#55534 sgl-project/sglang#27926 triton-lang/triton#11633 "
        "mlc-ai/pith-train#74 unslothai/unsloth#8953 vllm-project/vllm#19452 "
        "pytorch/pytorch#159957",
    ),
    _law(
        "P19",
        "requires_grad matrix",
        "For every combination of requires_grad of input, weight and bias, and under no_grad and "
        "inference_mode, the gradients are None where nn.Linear's are, and no product is computed "
        "for a frozen tensor.",
        "huggingface/transformers#46736 pytorch/ao#4471 NVIDIA/TransformerEngine#1736 "
        "NVIDIA/TransformerEngine#739 NVIDIA/TransformerEngine#1687 NVIDIA/TransformerEngine#59 "
        "NVIDIA/TransformerEngine#702",
    ),
    _law(
        "P20",
        "The suite can fail",
        "Oracles share no code with what they judge, magnitudes are checked and not just "
        "directions, every check counts what it compared, and planted faults are caught.",
        "jax-ml/ml_dtypes#260 NVIDIA/TransformerEngine#3342 pytorch/pytorch#153595 "
        "pytorch/ao#1438 pytorch/pytorch#150002",
    ),
    _law(
        "P21",
        "Timing is itself tested",
        "Warm-up and compilation are outside the timed region, host and device time apart, caches "
        "cold, data random, the baseline fair and the spread reported.",
        "sgl-project/DeepGEMM#76 pytorch/ao#2262 pytorch/torchtitan#1191 "
        "deepseek-ai/DeepGEMM#68 facebookexperimental/triton#2258 baidu-research/DeepBench#104 "
        "meta-pytorch/float8_experimental#151 NVIDIA/TransformerEngine#2126",
    ),
    _law(
        "P22",
        "Poisoned padding",
        "NaN or sentinels in padding, in unused groups and in fresh outputs change no valid "
        "result, and exactly the right region is written.",
        "sgl-project/sglang#32843 NVIDIA/TransformerEngine#3070 pytorch/ao#1516 pytorch/ao#4584 "
        "pytorch/pytorch#133334",
    ),
    _law(
        "P23",
        "dtype and autocast matrix",
        "Every combination of parameter dtype, input dtype, autocast, bias and recipe runs, and "
        "outputs and gradients have the dtypes that nn.Linear gives them.",
        "ROCm/TransformerEngine#634 huggingface/accelerate#2655 pytorch/pytorch#159125",
    ),
    _law(
        "P24",
        "Offsets beyond 2^31",
        "With more than 2^31 elements, or a row offset beyond them, the last rows equal the same "
        "rows computed alone.",
        "vllm-project/vllm#53390 vllm-project/vllm#9425",
    ),
    _law(
        "P25",
        "Repeatability and row independence",
        "The same input gives the same bytes every time, and a row does not depend on the other "
        "rows where that is promised.",
        "vllm-project/vllm#37718",
    ),
    _law(
        "P26",
        "Format and accumulation per operand",
        "The format, the scaling group and the accumulation mode of every operand of the three "
        "products are those of the recipe's table.",
        "pytorch/ao#1325 NVIDIA/TransformerEngine#3342 NVIDIA-NeMo/Megatron-Bridge#638 "
        "pytorch/pytorch#132005",
    ),
    _law(
        "P27",
        "Accumulation and rounding once",
        "Long sums are as accurate as the stated accumulation mode allows, and the bias is added "
        "before the one rounding of the output.",
        "llvm/torch-mlir#4616 pytorch/ao#1325 pytorch/ao#1549 triton-lang/triton#3851",
    ),
    _law(
        "F-ACC",
        "Fast accumulation on same-sign data",
        "What fast accumulation loses on sums of one sign stays within the bound of its "
        "accumulator's width; the other laws stay out of its way.",
        "pytorch/ao#1325 triton-lang/triton#3851",
    ),
)

#: Every law by its number.
LAWS: Mapping[str, Law] = MappingProxyType({law.id: law for law in _ALL})
