"""The judge: every assertion of the suite, each naming the law and counting what it compared.

A test asks for the fixture `judge`, declares its laws with ``@pytest.mark.law("P05")``, begins
each example with `Judge.example` and then compares. What fails is first looked up among the
expected deviations; if it isn't one, `LawViolation` says what was wrong and how to see it again.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from fp8.testing import comparing, records
from fp8.testing.comparing import Comparison, QualityLimits
from fp8.testing.expectations import Expectations
from fp8.testing.law_table import LAWS, Law
from fp8.testing.messages import violation
from fp8.testing.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["LAWS", "Judge", "Law", "LawUsageError", "LawViolation"]

#: Two-sided limits of the quality law. Over 900 correct cases the largest differences between
#: an implementation and the oracle were 0.0034 dB overall and 0.072 dB for a row; the smallest
#: defect worth catching (one dropped bias, one row of 256) moves them by tenths of a dB.
QUALITY_OVERALL_DB = 0.02
QUALITY_ROW_DB = 0.2


class LawViolation(AssertionError):  # noqa: N818 - the field's word; it is no program error
    """A target broke a law."""


class LawUsageError(Exception):
    """A test uses the judge wrongly: it says nothing about the target."""


class Judge:
    """Compares on behalf of one test and one target.

    Args:
        target: The target's name.
        laws: The laws that the test declares; comparing for another one is an error.
        tally: Where to count.
        test: The test's node id.
        facts: What is true of every example: device, versions.
        expectations: Known deviations.
        reproduce: One command line that runs this test again.
    """

    def __init__(
        self,
        *,
        target: str,
        laws: Iterable[str],
        tally: Tally | None = None,
        test: str = "",
        facts: Mapping[str, object] | None = None,
        expectations: Expectations | None = None,
        reproduce: str = "",
    ) -> None:
        self.target = target
        self.test = test
        self.compared = 0
        self.examples = 0
        self._laws = frozenset(laws)
        unknown = sorted(self._laws - LAWS.keys())
        if unknown:
            msg = f"law {unknown[0]!r} is unknown; known: {', '.join(LAWS)}"
            raise LawUsageError(msg)
        self._all = tally if tally is not None else Tally()
        self._tally = self._all.target(target)
        self._always = {"target": target, **(facts or {})}
        self._facts: dict[str, object] = self._always
        self._expectations = expectations if expectations is not None else Expectations()
        self._reproduce = reproduce
        self._laws_of_example: set[str] = set()

    @property
    def facts(self) -> Mapping[str, object]:
        """What is true of the example at hand."""
        return self._facts

    def require(self, ok: bool, reason: str) -> None:
        """Skip the test unless the target can do what it needs.

        Args:
            ok: Whether it can.
            reason: What is missing; the summary lists it.
        """
        __tracebackhide__ = True
        if not ok:
            self._tally.skipped[reason] += 1
            pytest.skip(reason)

    def example(self, **facts: object) -> None:
        """Begin an example.

        Args:
            **facts: What distinguishes it (recipe, dtype, M, K, N, seed, layout, …), as JSON
                values: messages show them and expectations ask for them.
        """
        self.examples += 1
        self._facts = {**facts, **self._always}
        self._laws_of_example.clear()

    def bitwise(
        self, law: str, check: str, got: Any, expected: Any, *, fmt: str | None = None
    ) -> bool:
        """The same bits; a NaN equals every NaN of its format. See `comparing.bitwise`.

        Returns:
            True, or False when the difference is an expected deviation.

        Raises:
            LawViolation: They differ. (So do all the comparisons below.)
        """
        __tracebackhide__ = True
        return self._settle(law, check, comparing.bitwise(got, expected, fmt))

    def bound(self, law: str, check: str, got: Any, expected: Any, bound: Any) -> bool:
        """|got − expected| ≤ bound, elementwise in float64. See `comparing.within`."""
        __tracebackhide__ = True
        return self._settle(law, check, comparing.within(got, expected, bound))

    def quality(
        self,
        law: str,
        check: str,
        got: Any,
        oracle: Any,
        exact: Any,
        *,
        overall: float = QUALITY_OVERALL_DB,
        row: float = QUALITY_ROW_DB,
        accumulation: float = 0.0,
        aligned: bool = False,
    ) -> bool:
        """SQNR against `exact` as good as the oracle's, no better. See `comparing.quality`."""
        __tracebackhide__ = True
        limits = QualityLimits(overall, row, accumulation, aligned)
        return self._settle(law, check, comparing.quality(got, oracle, exact, limits))

    def equal(self, law: str, check: str, got: object, expected: object) -> bool:
        """Equal Python values of equal type (a shape, a dtype, a list of names)."""
        __tracebackhide__ = True
        if got == expected and type(got) is type(expected):
            return self._settle(law, check, Comparison(1))
        line = f"expected {expected!r}, got {got!r}"
        if got == expected:
            line += f" (a {type(expected).__name__} and a {type(got).__name__})"
        return self._settle(law, check, Comparison(1, 1, (line,)))

    def true(self, law: str, check: str, condition: object, message: str) -> bool:
        """A condition that has no expected and got of its own; `message` says what was wrong."""
        __tracebackhide__ = True
        return self._settle(
            law, check, Comparison(1) if condition else Comparison(1, 1, (message,))
        )

    def raises(
        self,
        law: str,
        check: str,
        fn: Callable[[], object],
        exceptions: type[Exception] | tuple[type[Exception], ...],
        mentions: Sequence[str] = (),
    ) -> bool:
        """`fn` must raise one of `exceptions`, and its message must mention every word.

        Args:
            law: The law.
            check: The check's name.
            fn: What must be refused.
            exceptions: The types that are right.
            mentions: Words that the message must hold, in either case.
        """
        __tracebackhide__ = True
        allowed = exceptions if isinstance(exceptions, tuple) else (exceptions,)
        wanted = " or ".join(e.__name__ for e in allowed)
        try:
            value = fn()
        except LawViolation:
            raise
        except Exception as error:  # noqa: BLE001 - the wrong type of error is what is found here
            line = _wrong_error(error, allowed, wanted, mentions)
            found = Comparison(1) if line is None else Comparison(1, 1, (line,))
            return self._settle(law, check, found, cause=error)
        line = f"expected {wanted}, but it returned {_brief(value)}"
        return self._settle(law, check, Comparison(1, 1, (line,)))

    def attempt(self, law: str, check: str, fn: Callable[[], Any]) -> tuple[bool, Any]:
        """Run what must not fail.

        That it ran is no comparison of values: a test that only attempts has compared nothing.

        Returns:
            (True, what `fn` returned), or (False, None) when its error is an expected deviation.
        """
        __tracebackhide__ = True
        try:
            value = fn()
        except LawViolation:
            raise
        except Exception as error:  # noqa: BLE001 - any error breaks the law; the cause is kept
            line = f"expected a result, but it raised {type(error).__name__}: {error}"
            return self._settle(law, check, Comparison(1, 1, (line,)), cause=error), None
        return self._settle(law, check, Comparison(0)), value

    def record(self, name: str, value: Any, kind: str) -> None:
        """Keep a measurement for ``--fp8-record``. See `records.measured` for the kinds.

        Its identity is target, test and name; what several examples measure under one name is
        numbered in the order it was measured.
        """
        facts = {k: v for k, v in self._facts.items() if k not in self._always}
        self._all.measurements.append(
            {
                "target": self.target,
                "test": self.test,
                "name": name,
                "kind": kind,
                "value": records.measured(value, kind),
                "facts": facts,
            }
        )

    def note(self, text: str) -> None:
        """Add a line to the target's part of the summary."""
        self._tally.notes.add(text)

    def check_compared(self) -> None:
        """Fail a test that would pass without having compared a value."""
        __tracebackhide__ = True
        if not self.compared:
            msg = f"compared nothing: {self.test or 'this test'} passed without comparing a value"
            pytest.fail(msg, pytrace=False)

    def finish(self) -> None:
        """Count the test: it ran, to whatever end."""
        self._tally.tests += 1
        self._tally.examples += max(1, self.examples)

    def _settle(
        self, law_id: str, check: str, found: Comparison, cause: Exception | None = None
    ) -> bool:
        """Count a comparison and decide what its failure means."""
        __tracebackhide__ = True
        if law_id not in self._laws:
            self._undeclared(law_id)
        count = self._tally.law(law_id)
        count.comparisons += 1
        count.values += found.compared
        if law_id not in self._laws_of_example:
            self._laws_of_example.add(law_id)
            count.examples += 1
        self.compared += found.compared
        entry = self._expectations.find(self.target, law_id, check, self._facts)
        if found.ok:
            if entry is not None:
                self._all.matched[entry.id] += 1
            return True
        if entry is not None:
            self._tally.deviations[entry.id] += 1
            return False
        self._tally.violated.setdefault(law_id, set()).add(self.test)
        message = violation(LAWS[law_id], check, self._facts, found.lines, self._reproduce)
        raise LawViolation(message) from cause

    def _undeclared(self, law_id: str) -> NoReturn:
        __tracebackhide__ = True
        if law_id not in LAWS:
            msg = f"law {law_id!r} is unknown; known: {', '.join(LAWS)}"
            raise LawUsageError(msg)
        declared = ", ".join(sorted(self._laws)) or "none"
        msg = (
            f"{self.test or 'this test'} compares for law {law_id} without declaring it: add "
            f'@pytest.mark.law("{law_id}") (declared: {declared})'
        )
        raise LawUsageError(msg)


def _wrong_error(
    error: Exception,
    allowed: tuple[type[Exception], ...],
    wanted: str,
    mentions: Sequence[str],
) -> str | None:
    """What is wrong with an error, or None."""
    if not isinstance(error, allowed):
        return f"expected {wanted}, got {type(error).__name__}: {error}"
    text = str(error).casefold()
    missing = [word for word in mentions if word.casefold() not in text]
    if missing:
        return f"expected a message that mentions {', '.join(map(repr, missing))}, got: {error}"
    return None


def _brief(value: object) -> str:
    """A value in a few words: a tensor's type, dtype and shape rather than its elements."""
    with suppress(AttributeError):
        return f"a {type(value).__name__} {value.dtype} {tuple(value.shape)}"  # type: ignore[attr-defined]
    return repr(value)[:200]
