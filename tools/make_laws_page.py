"""Write docs/laws.md: the laws as fp8/testing/law_table.py has them, and the tests that check each.

Run it after a change of the table or of a test's ``law`` markers: tests/meta/test_docs.py compares
the page with what it makes.

    python tools/make_laws_page.py
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

from fp8.testing.law_table import LAWS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fp8.testing.law_table import Law

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "laws.md"
INTRODUCTION = """\
# Laws

A law is one property that a float8 training stack must have. Every comparison of the suite names
the law that it is for; `@pytest.mark.law("P05")` declares which ones a test compares for, and a
failure says which was broken. A number never changes and is never used again: expectations and
records refer to it.

The reports are public bugs of other implementations that a check of the law would have caught,
there or in an emulation of the same fault. A law without tests is one that this suite does not
check yet.

This page is made by `tools/make_laws_page.py` from `fp8/testing/law_table.py` and the tests.
"""

#: what judges the suite itself, and so declares no law
ELSEWHERE = {"P20": ["tests/meta"]}


def page(laws: Mapping[str, Law], root: Path) -> str:
    """The page of these laws and of the tests under `root`."""
    declared = declarations(root) | ELSEWHERE
    summary = [f"| [{law.id}]({anchor(law)}) | {law.title} |" for law in laws.values()]
    parts = [INTRODUCTION, "\n".join(["| law | title |", "| --- | --- |", *summary, ""])]
    parts += [section(law, declared.get(law.id, ())) for law in laws.values()]
    return "\n".join(parts)


def section(law: Law, files: Iterable[str]) -> str:
    """One law: what must hold, who checks it, which reports it stands for."""
    checked = ", ".join(f"[{file.removeprefix('tests/')}](../{file})" for file in files)
    reports = ", ".join(f"[{bug}]({link(bug)})" for bug in law.bugs)
    return (
        f"## {law.id} {law.title}\n\n{law.statement}\n\n"
        f"- Checked in: {checked or 'no test yet'}\n- Reports ({len(law.bugs)}): {reports}\n"
    )


def anchor(law: Law) -> str:
    """Where the law's section is on the page."""
    return "#" + f"{law.id} {law.title}".lower().replace(",", "").replace("^", "").replace(" ", "-")


def link(bug: str) -> str:
    """Where ``owner/repository#number`` is."""
    repository, _, number = bug.partition("#")
    return f"https://github.com/{repository}/issues/{number}"


def declarations(root: Path) -> dict[str, list[str]]:
    """Law to the test files, relative to `root`, that declare it."""
    found: dict[str, list[str]] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        for law in sorted(declared_in(path.read_text(encoding="utf-8"))):
            found.setdefault(law, []).append(path.relative_to(root).as_posix())
    return found


def declared_in(source: str) -> set[str]:
    """The laws that a test file's ``pytest.mark.law`` markers name."""
    return {
        argument.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.law"
        for argument in node.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    }


if __name__ == "__main__":
    PAGE.write_text(page(LAWS, ROOT), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
