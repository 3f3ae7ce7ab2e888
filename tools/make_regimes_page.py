"""Write docs/regimes.md: the regimes as fp8/regimes.toml has them.

Run it after a change of that file: tests/meta/test_docs.py compares the page with what it makes.

    python tools/make_regimes_page.py
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fp8 import regimes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fp8.claims import Provenance
    from fp8.regimes import Regime

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "regimes.md"
INTRODUCTION = """\
# Regimes

A regime is a region of shapes and settings in which float8 is known to be slow or inaccurate: when
it holds, what to expect, why anyone should believe it, and what to do. `fp8.convert` warns when it
converts a layer into one that it can recognise from the layer's name and shape, the recipe and,
where it is told, the number of tokens; `fp8.regimes.of` says which regimes a case is in.

A layer takes x (M, K) to y (M, N): M tokens, K features in, N features out. Speeds are of a linear
layer forward and backward, quantising included, unless the condition says `subject = product` or
`step`. A bound is on time or bytes of the alternative over those of the case: "at most 1.0 against
bfloat16" is a layer that is never faster than bfloat16. A measurement outside its bound makes the
claim stale: the library got better, and the claim has to go.

This page is made by `tools/make_regimes_page.py` from `fp8/regimes.toml`.
"""


def page(known: Iterable[Regime]) -> str:
    """The page of these regimes."""
    known = tuple(known)
    rows = [f"| [{r.id}](#{r.id}) | {r.title} | {bound(r)} |" for r in known]
    summary = "\n".join(["| regime | in words | bound |", "| --- | --- | --- |", *rows, ""])
    return "\n".join([INTRODUCTION, summary, *map(section, known)])


def section(regime: Regime) -> str:
    """One regime: its claim, and everything that belongs to it."""
    where = conditions(regime.applies) if regime.applies else "everywhere"
    return "\n".join(
        [
            f"## {regime.id}\n\n{regime.title}: {regime.claim}.\n",
            f"- When: {', or '.join(map(conditions, regime.when))}",
            f"- Where: {where}",
            f"- Bound: {bound(regime)}",
            f"- To do: {code(regime.remedy)}",
            "- Evidence:",
            *(f"  - {evidence(e)}" for e in regime.evidence),
            "",
        ]
    )


def bound(regime: Regime) -> str:
    """The number that a measurement is held to."""
    ends = (("at most", regime.at_most), ("at least", regime.at_least))
    found = [f"{word} {value:g}" for word, value in ends if value is not None]
    against = "" if regime.against == "nothing" else f" against {_AGAINST[regime.against]}"
    return f"{regime.metric} {' and '.join(found)}{against}" if found else "none: a statement"


_AGAINST = {"bfloat16": "bfloat16", "remedy": "the case after its remedy"}


def conditions(when: Mapping[str, object]) -> str:
    """A table of conditions as code: all of them must hold."""
    return "`" + ", ".join(f"{name} {condition(wanted)}" for name, wanted in when.items()) + "`"


def condition(wanted: object) -> str:
    """What must hold of one fact."""
    if isinstance(wanted, dict):
        signs = {"at_least": ">=", "at_most": "<="}
        return " and ".join(f"{signs[end]} {value}" for end, value in wanted.items())
    if isinstance(wanted, bool):
        return f"= {wanted}".lower()
    return f"= {' or '.join(map(str, wanted)) if isinstance(wanted, list) else wanted}"


def code(remedy: str) -> str:
    """The remedy with its argument for `fp8.convert`, if it has one, as code."""
    text, mark, argument = remedy.partition("filter_fn=")
    return f"{text}`{mark}{argument}`" if mark else remedy


def evidence(source: Provenance) -> str:
    """One source: what it says and where it is, or what it was measured on."""
    if source.kind == "published":
        return f"[published]({source.link}): {source.text}"
    on = f" ({source.versions}, {source.date})" if source.kind == "measured" else ""
    return f"{source.kind}{on}: {source.text}"


if __name__ == "__main__":
    PAGE.write_text(page(regimes.load()), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
