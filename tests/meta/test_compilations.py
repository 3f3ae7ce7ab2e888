"""What counts compilations is right: a break, an attribute, a print, a new shape are each found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8.testing import graphs
from fp8.testing.compilations import watched
from fp8.testing.compiled_runs import compiling, in_graphs
from fp8.testing.laws import Judge, LawViolation


class Layer(nn.Module):
    """A linear layer with a hook for what a test plants into its forward."""

    def __init__(self, planted=None) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)
        self.planted = planted

    def forward(self, x):
        y = self.inner(x)
        if self.planted is not None:
            self.planted(self, y)
        return y * 2


def item(layer, y):
    layer.total = float(y.sum().item())


def shout(layer, y):
    print(end="")  # noqa: T201 - that is what is planted


def count(layer, y):
    layer.calls = getattr(layer, "calls", 0) + 1


def judge(*laws: str) -> Judge:
    return Judge(target="mine", laws=laws)


def once(layer):
    return lambda compile_: compile_(layer)(torch.ones(3, 8))


def test_one_graph_is_one_graph():
    judging = judge("P10")
    assert in_graphs(judging, once(Layer())).shape == (3, 4)
    assert judging.compared == 2


@pytest.mark.parametrize(("planted", "said"), [(item, "item"), (shout, "print")])
def test_a_break_is_listed_with_its_place(planted, said):
    with pytest.raises(LawViolation) as raised:
        in_graphs(judge("P10"), once(Layer(planted)))
    text = str(raised.value)
    assert "no graph break" in text
    assert "graph breaks: " in text
    assert f"{__name__.rpartition('.')[2]}.py" in text
    assert said in text
    assert f"in {planted.__name__}" in text or "in forward" in text


def test_a_written_attribute_is_a_recompilation():
    layer = Layer(count)

    def run(compile_):
        compiled = compile_(layer)
        for _ in range(3):
            compiled(torch.ones(3, 8))
        return True

    with pytest.raises(LawViolation, match=r"(?s)expected 1.*got [23].*calls"):
        in_graphs(judge("P10"), run)


def test_a_new_shape_is_a_recompilation_and_says_which():
    with watched() as seen:
        compiled = compiling("aot_eager", dynamic=False)(Layer())
        for tokens in (3, 5):
            compiled(torch.ones(tokens, 8))
        assert seen.graphs == 2
        (found,) = seen.recompilations
        assert "size mismatch" in found
        assert "expected 3, actual 5" in found


def test_too_few_graphs_are_wrong_too():
    with pytest.raises(LawViolation, match=r"expected 2 \(a reason\), got 1"):
        in_graphs(judge("P10"), once(Layer()), graphs=2, reason="a reason")


def test_what_does_not_compile_says_why():
    def broken(layer, y):
        raise ArithmeticError("as planted")

    with pytest.raises(LawViolation, match="as planted"):
        in_graphs(judge("P10"), once(Layer(broken)))


# --- what a graph holds -------------------------------------------------------------------------


def traced(function, *args, backward=False):
    kept = graphs.Graphs()
    with watched():
        out = torch.compile(function, backend=kept.backend, fullgraph=True)(*args)
        if backward:
            out.sum().backward()
    return kept


def test_products_are_listed_forward_and_backward():
    x = torch.ones(3, 8, requires_grad=True)
    w = torch.ones(8, 4, requires_grad=True)
    kept = traced(lambda x, w: x @ w, x, w, backward=True)
    (joint,), (forward,), (backward,) = kept.joint, kept.forward, kept.backward
    assert sorted(p.shape for p in graphs.products(joint)) == [(3, 4), (3, 8), (8, 4)]
    assert [p.shape for p in graphs.products(forward)] == [(3, 4)]
    assert len(graphs.products(backward)) == 2
    assert kept.inference == []


def test_a_cast_is_no_upcast():
    def quantise(x):
        return (x.float() * 2).to(torch.float8_e4m3fn)

    (graph,) = traced(quantise, torch.ones(4, 16, dtype=torch.bfloat16)).inference
    assert len(graphs.casts(graph, 64)) == 1
    assert graphs.upcasts(graph, 64) == []


@pytest.mark.parametrize("made", ["returned", "narrowed", "multiplied"])
def test_a_wide_tensor_is_found(made):
    def widen(x):
        wide = x.float() * 2
        if made == "narrowed":
            return wide.to(torch.bfloat16)
        return wide if made == "returned" else wide @ wide.t()

    (graph,) = traced(widen, torch.ones(4, 16, dtype=torch.bfloat16)).inference
    (found,) = graphs.upcasts(graph, 64)
    assert "float32 (4, 16)" in graphs.described([found])


def test_a_reduction_may_be_wide():
    (graph,) = traced(
        lambda x: x.float().sum(dim=0), torch.ones(4, 16, dtype=torch.bfloat16)
    ).inference
    assert graphs.upcasts(graph, 64) == []
