"""What a compiled layer's graphs hold: products, casts to float8, whole tensors in wide formats.

The joint graph is what AOTAutograd traced, forward and backward in one, before anything was split
or fused: it is the same on every machine, whatever compiles it afterwards.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from fp8.testing import tracing

if TYPE_CHECKING:
    from collections.abc import Callable

    from fp8.targets.base import ProductTrace

FLOAT8 = tuple(
    getattr(torch, f"float8_{name}") for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")
)


@dataclass
class Graphs:
    """A backend of torch.compile that keeps the graphs, and runs them as they are.

    Attributes:
        min_cut: Whether forward and backward are split as inductor does, which may compute things
            again in the backward rather than save them; otherwise all that is needed is saved.
        joint: Forward and backward in one, before they are split.
        forward: The forward passes, whose outputs are the results and what the backward needs.
        backward: The backward passes.
        inference: Passes of which no gradient was asked.
    """

    min_cut: bool = False
    joint: list[GraphModule] = field(default_factory=list)
    forward: list[GraphModule] = field(default_factory=list)
    backward: list[GraphModule] = field(default_factory=list)
    inference: list[GraphModule] = field(default_factory=list)

    @property
    def backend(self) -> Callable[..., Any]:
        """What torch.compile takes as its backend."""
        backend: Callable[..., Any] = aot_autograd(
            fw_compiler=_kept(self.forward),
            bw_compiler=_kept(self.backward),
            inference_compiler=_kept(self.inference),
            partition_fn=self._split,
        )
        return backend

    def _split(self, joint: GraphModule, *args: Any, **rest: Any) -> Any:
        self.joint.append(copy.deepcopy(joint))
        split = min_cut_rematerialization_partition if self.min_cut else default_partition
        return split(joint, *args, **rest)


def _kept(graphs: list[GraphModule]) -> Callable[..., Any]:
    def compiler(graph: GraphModule, example_inputs: object) -> Callable[..., Any]:
        del example_inputs
        graphs.append(graph)
        boxed: Callable[..., Any] = make_boxed_func(graph.forward)
        return boxed

    return compiler


def _value(node: object) -> Any:
    """What a node stands for: a fake tensor, or the constant that it is."""
    return node.meta.get("val") if isinstance(node, Node) else node


def products(graph: GraphModule) -> list[ProductTrace]:
    """The matrix products of a graph, in its order."""
    found = []
    for node in graph.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), _value)
            product = tracing.product_of(node.target, args, kwargs, _value(node))
            if product is not None:
                found.append(product.trace)
    return found


def outputs(graph: GraphModule) -> list[torch.Tensor]:
    """The tensors that a graph returns."""
    (returned,) = graph.graph.output_node().args
    made = [_value(node) for node in tree_leaves(returned)]
    return [value for value in made if isinstance(value, torch.Tensor)]


def casts(graph: GraphModule, least: int) -> list[Node]:
    """The conversions of tensors of at least `least` elements to float8."""
    return [n for n in graph.graph.nodes if _becomes(n, FLOAT8, least)]


def upcasts(graph: GraphModule, least: int) -> list[Node]:
    """Whole tensors (of at least `least` elements) that became float32 or float64 for nothing.

    A value is quantised in float32 and a sum is accumulated in it: a tensor that was widened and
    then only feeds a cast to float8 or a reduction costs nothing, since it is never stored. One
    that reaches a product, the output or a narrower format again does.
    """
    wide = (torch.float32, torch.float64)
    return [
        node
        for node in graph.graph.nodes
        if _becomes(node, wide, least) and not _is_passing(node, least)
    ]


def _becomes(node: Node, dtypes: tuple[torch.dtype, ...], least: int) -> bool:
    """Whether a node makes a tensor of one of `dtypes` from tensors that have other ones."""
    made = _value(node)
    if node.op != "call_function" or not isinstance(made, torch.Tensor):
        return False
    if made.dtype not in dtypes or made.numel() < least:
        return False
    whole = [_value(n) for n in node.all_input_nodes]
    sources = [v for v in whole if isinstance(v, torch.Tensor) and v.numel() >= least]
    return all(source.dtype not in dtypes for source in sources)


def _is_passing(node: Node, least: int) -> bool:
    """Whether all that comes of a wide tensor are float8 codes and small tensors."""
    users = list(node.users)
    if not users:
        return True
    for user in users:
        made = _value(user)
        if user.op == "output" or not isinstance(made, torch.Tensor):
            return False
        if made.dtype in FLOAT8 or made.numel() < least:
            continue
        if made.dtype != _value(node).dtype or _is_product(user):
            return False
        if not _is_passing(user, least):
            return False
    return True


def _is_product(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and tracing.is_product(schema.name)


def described(nodes: list[Node]) -> str:
    """Nodes as a message shows them: what made which tensor, and where in the user's code."""
    lines = []
    for node in nodes:
        made = _value(node)
        line = f"{node.name} = {node.target}: {made.dtype} {tuple(made.shape)}"
        trace = (node.meta.get("stack_trace") or "").strip().splitlines()
        lines.append(f"{line}, from {trace[-2].strip()}" if len(trace) > 1 else line)
    return "\n    ".join(lines)
