"""The mutants of the library: small wrong programs that Cosmic Ray makes, and which of them count.

A mutant counts if it compiles, if it is another program than the library (annotations, blocks for
type checkers and the texts of errors apart), and if it is another program than each of the mutants
before it. "The same program" means the same bytecode: Trivial Compiler Equivalence (Papadakis et
al., 2015, https://doi.org/10.1109/ICSE.2015.103).
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import tomllib
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

ROOT = Path(__file__).parent.parent
MODULES = ("formats", "scaling", "quantize", "recipes", "matmul", "linear", "conversion")
#: the survivors that are known, and why each survives
KNOWN = ROOT / "tools" / "surviving_mutants.toml"

#: why a mutant may not count
BROKEN = "not Python"
UNSEEN = "the library's own bytecode, or only annotations, typing blocks or error texts differ"
TWICE = "the bytecode of another mutant"


@dataclass(frozen=True)
class Place:
    """One thing that an operator of Cosmic Ray can do to a module: its `occurrence`-th.

    `text` has the operator, the line and the column. The draw goes by it, so that a change of the
    library elsewhere leaves a sample nearly as it was.
    """

    module: str
    operator: str
    occurrence: int
    text: str

    def rank(self, seed: int) -> bytes:
        """Where the draw comes to it: a number like any other."""
        return hashlib.sha256(f"{seed} {self.module} {self.text}".encode()).digest()


@dataclass(frozen=True)
class Mutant:
    """A module with one token changed.

    Attributes:
        place: Where it comes from.
        name: The qualified name of the function, class or constant around the change, or "".
        number: The number of the changed line.
        line: The line as it was, without the space around it.
        becomes: The line as it is now.
        source: The whole module as it is now.
    """

    place: Place
    name: str
    number: int
    line: str
    becomes: str
    source: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What names this mutant even when lines move."""
        return (self.place.module, self.name, self.line, self.becomes)

    def __str__(self) -> str:
        where = f"fp8/{self.place.module}.py:{self.number} {self.name}".rstrip()
        return f"{where}: {self.line}  ->  {self.becomes}"


@dataclass(frozen=True)
class Drawn:
    """The mutants to try, and how many others did not count, by reason."""

    mutants: tuple[Mutant, ...]
    left_out: Counter[str]


def draw(seed: int, sample: int | None, modules: tuple[str, ...] = MODULES) -> Drawn:
    """So many mutants, each as likely as any other; all of them with `sample` None."""
    places = [place for module in modules for place in places_of(module)]
    places.sort(key=lambda place: place.rank(seed))
    mutants: list[Mutant] = []
    left_out: Counter[str] = Counter()
    seen = {canonical(source_of(module)) for module in modules}
    own = set(seen)
    for place in places:
        if len(mutants) == sample:
            break
        mutant = mutate(place)
        code = canonical(mutant.source)
        if code is None:
            left_out[BROKEN] += 1
        elif code in own:
            left_out[UNSEEN] += 1
        elif code in seen:
            left_out[TWICE] += 1
        else:
            seen.add(code)
            mutants.append(mutant)
    return Drawn(tuple(mutants), left_out)


@cache
def source_of(module: str) -> str:
    """The library's module as it is."""
    return (ROOT / "fp8" / f"{module}.py").read_text(encoding="utf-8")


def places_of(module: str) -> list[Place]:
    """Everything that Cosmic Ray's operators can do to a module."""
    source = source_of(module)
    lines = source.splitlines()
    nodes = list(ast_nodes(get_ast(source)))
    found = []
    seen: Counter[str] = Counter()
    for name in sorted(operator_names()):
        operator = get_operator(name)
        # Operators with arguments are for names that somebody has to choose.
        if operator.arguments() or name == "core/NoOp":
            continue
        made = operator()
        positions = (start for node in nodes for start, _ in made.mutation_positions(node))
        for occurrence, (number, column) in enumerate(positions):
            text = f"{name} {column} {lines[number - 1].strip()}"
            seen[text] += 1
            found.append(Place(module, name, occurrence, f"{text} {seen[text]}"))
    return found


def mutate(place: Place) -> Mutant:
    """The mutant of a place."""
    before = source_of(place.module)
    after = mutate_code(before, get_operator(place.operator)(), place.occurrence)
    number, line, becomes = _change(before.splitlines(), after.splitlines())
    return Mutant(place, _name_at(before, number), number, line, becomes, after)


def _change(before: list[str], after: list[str]) -> tuple[int, str, str]:
    """The number of the first line that changed, counted from 1; the lines before and after."""
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    _, i, i_end, j, j_end = next(code for code in matcher.get_opcodes() if code[0] != "equal")
    return i + 1, _joined(before[i:i_end]), _joined(after[j:j_end])


def _joined(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


def _name_at(source: str, number: int) -> str:
    """The qualified name of the innermost definition that has this line; "" for none."""
    having = [d for d in definitions(source) if d.first <= number <= d.last]
    return max(having, key=lambda d: d.first).name if having else ""


@dataclass(frozen=True)
class Definition:
    """A function, a class or a constant of the module: its qualified name, first and last line."""

    name: str
    first: int
    last: int


def definitions(source: str) -> list[Definition]:
    """What a module defines, also inside of functions and classes."""

    def inside(node: ast.AST, prefix: str) -> Iterator[Definition]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                yield Definition(prefix + child.name, first, child.end_lineno or first)
                yield from inside(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.Assign | ast.AnnAssign) and not prefix:
                target = child.target if isinstance(child, ast.AnnAssign) else child.targets[0]
                yield Definition(ast.unparse(target), child.lineno, child.end_lineno or 0)

    return list(inside(ast.parse(source), ""))


# --- the same program or another ----------------------------------------------------------------


class _Unseen(ast.NodeTransformer):
    """Takes out what no run shows: annotations, blocks for type checkers, the texts of errors."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        if any(isinstance(n, ast.Name) and n.id == "TYPE_CHECKING" for n in ast.walk(node.test)):
            return None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        # A field needs some annotation; with annotations as strings only its text differs.
        node.annotation = ast.Constant("")
        return self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if isinstance(node.exc, ast.Call):
            node.exc.args, node.exc.keywords = [], []
        return self.generic_visit(node)


def canonical(source: str) -> CodeType | None:
    """The bytecode of what a run shows, whatever its lines and columns; None for no Python."""
    try:
        tree = _Unseen().visit(ast.parse(source))
        for node in ast.walk(tree):
            if hasattr(node, "lineno"):
                node.lineno = node.end_lineno = 1
                node.col_offset = node.end_col_offset = 0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # such as for: x is 0
            return compile(ast.fix_missing_locations(tree), "", "exec", dont_inherit=True)
    except SyntaxError:
        return None


# --- known survivors ----------------------------------------------------------------------------


def known(path: Path = KNOWN) -> dict[tuple[str, str, str, str], str]:
    """Why each known survivor survives, by the mutant's key."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    return {
        (entry["module"], entry["name"], entry["line"], becomes): entry["why"]
        for entry in entries
        for becomes in entry["becomes"]
    }
