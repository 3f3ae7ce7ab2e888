"""The machinery of the suite: oracles, laws, strategies and the pytest plug-in.

The names below load on first use (PEP 562): pytest imports this package in every project of an
environment where fp8 is installed, and must not pay for numpy or torch there.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8.testing.diffing import compare
    from fp8.testing.expectations import Expectations, load_expectations
    from fp8.testing.law_table import LAWS, Law
    from fp8.testing.laws import Judge, LawViolation
    from fp8.testing.planting import planted
    from fp8.testing.records import Record, load_record, save_record

_HOME = {
    "LAWS": "law_table",
    "Expectations": "expectations",
    "Judge": "laws",
    "Law": "law_table",
    "LawViolation": "laws",
    "Record": "records",
    "compare": "diffing",
    "load_expectations": "expectations",
    "load_record": "records",
    "planted": "planting",
    "save_record": "records",
}

__all__ = [
    "LAWS",
    "Expectations",
    "Judge",
    "Law",
    "LawViolation",
    "Record",
    "compare",
    "load_expectations",
    "load_record",
    "planted",
    "save_record",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
