"""fp8: a reference float8 training library and the suite by which float8 stacks are judged.

The public names load on first use (PEP 562), so that `import fp8` costs nothing in a process that
only has the pytest plug-in installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fp8.conversion import ConversionReport, convert, watch
    from fp8.formats import FORMATS, Format
    from fp8.linear import Float8Linear
    from fp8.quantize import Operand, Quantized, cast
    from fp8.recipes import RECIPES, Product, Recipe
    from fp8.scaling import Granularity, ScaleRule

_HOME = {
    "ConversionReport": "conversion",
    "convert": "conversion",
    "watch": "conversion",
    "FORMATS": "formats",
    "Format": "formats",
    "Float8Linear": "linear",
    "Operand": "quantize",
    "Quantized": "quantize",
    "cast": "quantize",
    "RECIPES": "recipes",
    "Product": "recipes",
    "Recipe": "recipes",
    "Granularity": "scaling",
    "ScaleRule": "scaling",
}

__all__ = [
    "FORMATS",
    "RECIPES",
    "ConversionReport",
    "Float8Linear",
    "Format",
    "Granularity",
    "Operand",
    "Product",
    "Quantized",
    "Recipe",
    "ScaleRule",
    "cast",
    "convert",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fp8' has no attribute {name!r}")
    return getattr(import_module(f"fp8.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
