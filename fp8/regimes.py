"""Regions known to be slow or inaccurate in float8: their types. The claims are in regimes.toml.

A regime says of which cases it speaks (`when`), where that was seen (`applies`), what to expect
there, why anyone should believe it, and what to do. Its number is a bound on one ratio,

    figure of the alternative / figure of the case

where the figure is a time or bytes, and the alternative is the same layer in bfloat16, or the case
after the remedy. A measured ratio outside the bound makes the claim *stale*: the library got better
and the claim has to go.

    [[regime]]
    id = "narrow-output"                                  # unique
    title = "Small N"
    when = [{ subject = "linear", N = { at_most = 128 } }]  # any of these; see fp8.claims
    applies = { gpu = ["h200"] }                          # optional; unknown facts don't matter
    claim = "never faster than bfloat16"
    metric = "time"                                       # one of METRICS
    against = "bfloat16"                                  # or "remedy"
    at_most = 1.0                                         # or at_least; a statement has neither
    remedy = "keep the layer in bfloat16"
    evidence = [{ kind = "published", text = "...", link = "https://..." }]
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal, get_args

from fp8 import claims
from fp8.claims import ClaimError, Provenance

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from importlib.resources.abc import Traversable

#: What a case is a case of: one product, a layer or a whole step, each forward and backward but the
#: first; the bytes that are saved for backward; or the values themselves.
Subject = Literal["product", "linear", "step", "memory", "values"]
#: What is compared. "error" is the magnitude of the mean relative error; it has no alternative.
Metric = Literal["time", "memory", "error"]
Against = Literal["bfloat16", "remedy", "nothing"]


class RegimeWarning(UserWarning):
    """Layers were converted into a regime that is known to be slow or inaccurate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is known of a case; None is what is not.

    Attributes:
        subject: See `Subject`.
        M: Tokens.
        K: Features in; for a product the contraction.
        N: Features out.
        recipe: The recipe's name.
        bias: Whether the layer has one.
        bias_fused: Whether it is added inside the product.
        compiled: Whether torch.compile made the code that runs.
        fused: Whether quantising has kernels of its own (Triton, CUDA), compiled or not.
        accumulation: The output product's, "fast" or "precise".
        head: Whether this is the model's output head.
        window: What is timed: "steady", "first call", or the first call with a "new M".
        data: "random" signs, or "same-sign" values along the contraction.
        target: The stack: a target's name without its backend, such as "reference".
        gpu: The id of a hardware file.
        versions: Package to version.
    """

    subject: Subject = "linear"
    M: int | None = None
    K: int | None = None
    N: int | None = None
    recipe: str | None = None
    bias: bool | None = None
    bias_fused: bool | None = None
    compiled: bool | None = None
    fused: bool | None = None
    accumulation: str | None = None
    head: bool | None = None
    window: str | None = None
    data: str | None = None
    target: str | None = None
    gpu: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    def facts(self) -> dict[str, object]:
        """What is known, by name."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return {**known.pop("versions"), **known}


#: what conditions may speak of
_FACTS = ({f.name for f in fields(Case)} - {"versions"}) | claims.VERSION_FACTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """One region and the claim about it; the module's docstring explains the fields."""

    id: str
    title: str
    when: tuple[Mapping[str, object], ...]
    claim: str
    metric: Metric
    against: Against
    remedy: str
    evidence: tuple[Provenance, ...]
    applies: Mapping[str, object] = field(default_factory=dict)
    at_most: float | None = None
    at_least: float | None = None

    def has(self, case: Case) -> bool:
        """Whether the case is certainly in this regime.

        Everything that one of the conditions asks for must be known and so. Of `applies` only what
        is known counts: a model is converted before anyone knows the GPU that it will run on.
        """
        facts = case.facts()
        return any(claims.holds(when, facts) for when in self.when) and claims.holds(
            self.applies, facts, facts
        )


@cache
def load() -> tuple[Regime, ...]:
    """Every known regime. Raises ClaimError when the file is wrong."""
    return read(resources.files("fp8") / "regimes.toml")


def of(case: Case, known: Iterable[Regime] | None = None) -> tuple[Regime, ...]:
    """The regimes that a case is certainly in, in the order of the file."""
    return tuple(r for r in (load() if known is None else known) if r.has(case))


def read(path: Traversable) -> tuple[Regime, ...]:
    """The regimes of a file. Raises ClaimError."""
    data = claims.read(path, "regime", "published")
    return tuple(_regime(t, where) for t, where in claims.entries(data, "regime", path))


def _regime(table: dict[str, Any], where: str) -> Regime:
    texts = ("id", "title", "claim", "metric", "against", "remedy")
    claims.checked(
        table,
        where,
        {**dict.fromkeys(texts, str), "when": list, "evidence": list},
        {"applies": dict, "at_most": float, "at_least": float},
    )
    for name, known in (("metric", get_args(Metric)), ("against", get_args(Against))):
        if table[name] not in known:
            raise ClaimError(f"{where}: {name} must be one of {', '.join(known)}")
    if not table["when"] or not table["evidence"]:
        raise ClaimError(f"{where}: when and evidence must each have an entry")
    for when in table["when"]:
        claims.check_conditions(when, f"{where}: when", _FACTS)
    claims.check_conditions(table.get("applies", {}), f"{where}: applies", _FACTS)
    evidence = tuple(claims.provenance(e, f"{where}: evidence") for e in table["evidence"])
    return Regime(**{**table, "when": tuple(table["when"]), "evidence": evidence})


# --- from how many tokens a layer pays ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Published:
    """A published table of speed-ups over bfloat16, forward and backward.

    Attributes:
        source: What the numbers are of.
        name: The same in a few words, for reports.
        M: The rows' tokens.
        N: The columns' features out.
        speedup: Features in -> one row for each of `M`, one column for each of `N`.
    """

    source: Provenance
    name: str
    M: tuple[int, ...]
    N: tuple[int, ...]
    speedup: Mapping[int, tuple[tuple[float, ...], ...]]


@cache
def published() -> Published:
    """torchao's table for rowwise, compiled, on an H100.

    `tensorwise` is at least as fast for every shape that torchao publishes, so for it the table is
    a safe side.
    """
    path = resources.files("fp8") / "regimes.toml"
    table = claims.read(path, "regime", "published")["published"]
    return Published(
        claims.provenance(table["source"], f"{path}: published"),
        table["name"],
        tuple(table["M"]),
        tuple(table["N"]),
        {int(K): tuple(map(tuple, rows)) for K, rows in table["K"].items()},
    )


def break_even_tokens(in_features: int, out_features: int) -> int | None:
    """The number of tokens from which a layer of this shape is faster in float8.

    Shapes between grid points take the next smaller point of the grid, the slower side. None means
    that no M of the grid pays.
    """
    table = published()
    rows = [K for K in table.speedup if in_features >= K]
    columns = [i for i, N in enumerate(table.N) if out_features >= N]
    if not rows or not columns:
        return None
    speedups = [row[columns[-1]] for row in table.speedup[max(rows)]]
    return next((M for M, s in zip(table.M, speedups, strict=True) if s >= 1), None)
