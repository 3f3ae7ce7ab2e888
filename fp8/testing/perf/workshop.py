"""Making what is measured: the callables of every bench on a GPU, and looking into them.

Data is random, the upstream gradient too; operands are rotated over more than three times L2. Of a
layer the inputs and gradients are rotated and the weight is not: its copies would be compiled one
by one. So a small weight may be found in the cache, in bfloat16 as in float8.
"""

from __future__ import annotations

import copy
import gc
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fp8.formats import E4M3FN
from fp8.quantize import Operand, Quantized
from fp8.recipes import RECIPES
from fp8.testing.perf import evidence
from fp8.testing.perf.benches import Casts, Ceilings, Linears, Products, Steps
from fp8.testing.perf.llama import LlamaBlock
from fp8.testing.perf.regime_benches import Accumulations, Bias, NewTokens
from fp8.testing.timing import kernels
from fp8.testing.timing.operands import Rotated, enough

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fp8.targets.base import Target
    from fp8.testing.perf.benches import Bench
    from fp8.testing.perf.cases import Case, Mode
    from fp8.testing.perf.evidence import Breakdown
    from fp8.testing.perf.scenarios import Scenario

Subject_co = TypeVar("Subject_co", covariant=True)

#: The update of a step is as much work with any rate; with this one the weights stay as they are,
#: and so does the data.
_LEARNING_RATE = 1e-12


@dataclass(frozen=True, slots=True)
class Stage:
    """What is measured at a time: callables by name."""

    name: str
    subjects: Mapping[str, Any]


class Workshop(Protocol):
    """What makes callables and looks into them."""

    def stages(self, bench: Bench, cases: tuple[Case, ...]) -> Iterator[Stage]:
        """The callables of a bench, stage by stage."""
        ...

    def breakdown(self, subject: Any, calls: int) -> Breakdown:
        """Which kernels a callable runs. Raises RuntimeError where that can't be seen."""
        ...

    def saved_bytes(self, subject: Any) -> int:
        """What a step keeps between forward and backward, bytes."""
        ...

    def clean_up(self) -> None:
        """Forget what was compiled and free what nobody holds."""
        ...


class TrainingStep:
    """One SGD step of a model: forward, backward, update, zero_grad.

    The gradients are freed at the end, not at the begin: a step that began with those of the step
    before would seem to need less memory than it does, by so much.
    """

    def __init__(self, forward: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> None:
        self._forward = forward
        self._optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
        self._x = x
        self.grad_output: Tensor | None = None

    def __call__(self) -> None:
        """Take a step."""
        self._forward(self._x).backward(self.grad_output)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._x.grad = None

    def saved_bytes(self) -> int:
        """Bytes that are alive between forward and backward beyond those before, output apart."""
        gc.collect()
        before = torch.cuda.memory_allocated()
        y = self._forward(self._x)
        return torch.cuda.memory_allocated() - before - y.nbytes


@dataclass(frozen=True, slots=True)
class TorchWorkshop:
    """The real one, for one target.

    Attributes:
        target: What is measured.
        rotate_bytes: Operands together hold more than this.
        backend: torch.compile's; tests without a compiler take another.
    """

    target: Target
    rotate_bytes: int
    backend: str = "inductor"

    def stages(self, bench: Bench, cases: tuple[Case, ...]) -> Iterator[Stage]:
        """The callables of a bench, stage by stage."""
        names = tuple(dict.fromkeys(case.subject for case in cases))
        match bench:
            case Ceilings():
                yield self._ceilings(bench)
            case Products():
                yield self._products(bench, names)
            case Accumulations():
                yield self._accumulations(bench)
            case Casts():
                yield self._casts(bench)
            case Linears():
                yield self._linears(bench, names)
            case Bias():
                yield self._bias(bench)
            case NewTokens():
                yield self._new_tokens(bench)
            case Steps():
                yield from self._steps(bench, names)
            case _:
                raise TypeError(f"bench: got {type(bench).__name__}, needs one of the catalogue's")

    def breakdown(self, subject: Callable[[], object], calls: int) -> Breakdown:
        """Which kernels a callable runs, by torch.profiler."""
        return evidence.breakdown(kernels.profiled(subject, calls), calls)

    def saved_bytes(self, subject: TrainingStep) -> int:
        """What a step keeps between forward and backward, bytes."""
        return subject.saved_bytes()

    def clean_up(self) -> None:
        """Forget what was compiled and free what nobody holds."""
        torch.compiler.reset()
        gc.collect()
        if self.target.device.type == "cuda":
            torch.cuda.empty_cache()

    # --- kernels ------------------------------------------------------------------------------

    def _ceilings(self, bench: Ceilings) -> Stage:
        M, K, N = bench.shape
        matrices = self._sets(lambda draw: (draw(M, K), draw(N, K)))
        one = torch.ones((), device=self.target.device)
        codes = enough(
            lambda seed: tuple(self._draw(seed)(*s).to(E4M3FN.dtype) for s in ((M, K), (N, K))),
            self.rotate_bytes,
        )

        def scaled(a: Tensor, b: Tensor) -> Tensor:
            return torch._scaled_mm(  # noqa: SLF001 - the only name that it has
                a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        tensors = self._sets(lambda draw: (draw(*bench.tensor),))
        subjects = {
            "bf16": Rotated(_multiply, matrices),
            "fp8": Rotated(scaled, codes),
            "copy": Rotated(torch.clone, tensors),
            "amax": Rotated(partial(torch.linalg.vector_norm, ord=float("inf")), tensors),
        }
        return Stage("", subjects)

    def _products(self, bench: Products, names: tuple[str, ...]) -> Stage:
        M, K, N = bench.shape
        matrices = self._sets(lambda draw: (draw(M, K), draw(N, K)))
        bias = self._draw(99)(1, N)[0] if bench.bias else None
        baseline = partial(_multiply, bias=bias)
        subjects = {"bf16": Rotated(baseline, matrices)}
        for name in names:
            subjects[name] = self._scaled(name, matrices, bias)
        return Stage("", subjects)

    def _accumulations(self, bench: Accumulations) -> Stage:
        M, K, N = bench.shape
        matrices = self._sets(lambda draw: (draw(M, K), draw(N, K)))
        names = [f"{bench.recipe}/{how}" for how in ("fast", "precise")]
        return Stage("", {name: self._scaled(name, matrices, None) for name in names})

    def _scaled(self, name: str, matrices: Sequence[tuple[Tensor, ...]], bias: Any) -> Rotated:
        """The stack's product of the matrices, quantised now. name: "RECIPE/ACCUMULATION"."""
        recipe, _, how = name.partition("/")
        product = RECIPES[recipe].grad_input if how == "grad" else RECIPES[recipe].output
        accumulation = product.accumulation if how == "grad" else how
        operand_a, operand_b = product.a, product.b
        assert operand_a is not None  # noqa: S101 - for mypy: every output product is in float8
        assert operand_b is not None  # noqa: S101

        def multiply(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
            return self.target.scaled_mm(
                Quantized(a, a_scale, operand_a),
                Quantized(b, b_scale, operand_b),
                bias=bias,
                out_dtype=torch.bfloat16,
                accumulation=accumulation,
            )

        quantized = []
        for x, w in matrices:
            a = self.target.quantize(x, operand_a)
            b = self.target.quantize(w, operand_b)
            quantized.append((a.codes, a.scale, b.codes, b.scale))

        # Codes are half as large as the matrices: it takes twice as many.
        def copied(number: int) -> tuple[Tensor, ...]:
            return tuple(tensor.clone() for tensor in quantized[number % len(quantized)])

        return Rotated(multiply, enough(copied, self.rotate_bytes))

    def _casts(self, bench: Casts) -> Stage:
        tensors = self._sets(lambda draw: (draw(bench.rows, bench.columns),))
        subjects: dict[str, Any] = {"copy": Rotated(torch.clone, tensors)}
        for operation in bench.operations:
            function = self._as(bench.mode, self._cast(operation))
            subjects[operation] = Rotated(function, tensors)
        return Stage("", subjects)

    def _cast(self, operation: str) -> Callable[[Tensor], Any]:
        target = self.target
        if operation == "cast":
            return lambda x: target.cast(x, E4M3FN)
        granularity, _, both = operation.partition("-")
        recipe = RECIPES["tensorwise" if granularity == "tensorwise" else "rowwise"]
        operand = recipe.output.a
        assert operand is not None  # noqa: S101 - for mypy

        def codes(x: Tensor, how: Operand = operand) -> Tensor:
            return target.quantize(x, how).codes

        if both:
            return lambda x: (codes(x), codes(x.t()))
        return codes if granularity != "columnwise" else lambda x: codes(x.t())

    # --- layers and steps ---------------------------------------------------------------------

    def _linears(self, bench: Linears, names: tuple[str, ...]) -> Stage:
        M, K, N = bench.shape
        plain = self._linear(K, N)
        models = {"bf16": plain}
        for name in names:
            models[name] = self.target.convert(copy.deepcopy(plain), name)
        sets = self._inputs(M, K, N)
        passes = {name: self._pass(model, bench.mode) for name, model in models.items()}
        return Stage("", {name: Rotated(one, sets) for name, one in passes.items()})

    def _bias(self, bench: Bias) -> Stage:
        M, K, N = bench.shape
        sets = self._inputs(M, K, N)
        subjects = {}
        for name, bias in (("without bias", False), ("with bias", True)):
            model = self.target.convert(self._linear(K, N, bias=bias), bench.recipe)
            subjects[f"{bench.recipe} {name}"] = Rotated(self._pass(model, bench.mode), sets)
        return Stage("", subjects)

    def _new_tokens(self, bench: NewTokens) -> Stage:
        M, K, N = bench.shape
        model = self.target.convert(self._linear(K, N), bench.recipe)
        # Not dynamic=False: what is asked is what somebody gets who says nothing.
        forward = torch.compile(model, backend=self.backend)
        one = partial(_pass, forward, tuple(model.parameters()))
        tokens = {"tokens": M, "new tokens": bench.new}
        return Stage("", {n: Rotated(one, self._inputs(m, K, N)) for n, m in tokens.items()})

    def _steps(self, bench: Steps, names: tuple[str, ...]) -> Iterator[Stage]:
        scenario = bench.scenario
        plain = self._model(scenario)
        models = {"bf16": plain}
        for recipe in dict.fromkeys(name.split()[0] for name in names):
            models[recipe] = self._converted(copy.deepcopy(plain), scenario, recipe)
        x = self._batch(scenario, scenario.layers[0][1], seed=1).requires_grad_()
        subjects = {
            f"{name} {mode}": TrainingStep(self._as(mode, model), model, x)
            for mode in ("eager", "compiled")
            for name, model in models.items()
        }
        random = self._batch(scenario, scenario.layers[-1][2], seed=2)
        for gradient in scenario.gradients:
            grad_output = random if gradient == "random" else torch.ones_like(random)
            for step in subjects.values():
                step.grad_output = grad_output
            yield Stage(gradient, subjects)

    def _model(self, scenario: Scenario) -> nn.Module:
        torch.manual_seed(0)
        if scenario.block is not None:
            return LlamaBlock(scenario.block).to(self.target.device, torch.bfloat16)
        layers = [
            nn.Linear(K, N, scenario.bias, device=self.target.device, dtype=torch.bfloat16)
            for _, K, N in scenario.layers
        ]
        return nn.Sequential(*layers)

    def _converted(self, model: nn.Module, scenario: Scenario, recipe: str) -> nn.Module:
        if not scenario.kept:
            return self.target.convert(model, recipe)
        assert isinstance(model, nn.Sequential)  # noqa: S101 - for mypy
        layers = list(model)
        body = nn.Sequential(*layers[: -scenario.kept])
        return nn.Sequential(self.target.convert(body, recipe), *layers[-scenario.kept :])

    def _batch(self, scenario: Scenario, features: int, seed: int) -> Tensor:
        flat = self._draw(seed)(scenario.tokens, features)
        block = scenario.block
        return flat if block is None else flat.reshape(-1, block.sequence, features)

    # --- what they share ----------------------------------------------------------------------

    def _draw(self, seed: int) -> Callable[..., Tensor]:
        generator = torch.Generator(self.target.device).manual_seed(seed)
        return partial(
            torch.randn, generator=generator, device=self.target.device, dtype=torch.bfloat16
        )

    def _sets(
        self, make: Callable[[Callable[..., Tensor]], tuple[Tensor, ...]]
    ) -> list[tuple[Tensor, ...]]:
        """Sets of random tensors, so many that together they are out of L2."""
        return enough(lambda seed: make(self._draw(seed)), self.rotate_bytes)

    def _inputs(self, M: int, K: int, N: int) -> list[tuple[Tensor, ...]]:
        """Sets of x (M, K), which needs a gradient, and grad_output (M, N)."""
        return self._sets(lambda draw: (draw(M, K).requires_grad_(), draw(M, N)))

    def _linear(self, K: int, N: int, *, bias: bool = False) -> nn.Module:
        torch.manual_seed(0)
        layer = nn.Linear(K, N, bias, device=self.target.device, dtype=torch.bfloat16)
        return nn.Sequential(layer)

    def _as(self, mode: Mode, function: Any) -> Any:
        if mode == "eager":
            return function
        return torch.compile(function, backend=self.backend, dynamic=False)

    def _pass(self, model: nn.Module, mode: Mode) -> Callable[[Tensor, Tensor], None]:
        return partial(_pass, self._as(mode, model), tuple(model.parameters()))


def _multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return a @ b.t() if bias is None else torch.addmm(bias, a, b.t())


def _pass(
    forward: Callable[[Tensor], Tensor],
    parameters: tuple[nn.Parameter, ...],
    x: Tensor,
    grad_output: Tensor,
) -> None:
    """Forward and backward. Gradients don't add up: that would be a kernel more."""
    forward(x).backward(grad_output)
    for leaf in (x, *parameters):
        leaf.grad = None
