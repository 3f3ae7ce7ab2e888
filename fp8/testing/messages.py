"""The text of a failure: which law, which target, what was wrong, how to see it again."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from fp8.testing.law_table import Law


def violation(
    law: Law, check: str, facts: Mapping[str, object], lines: Iterable[str], reproduce: str
) -> str:
    """The message of a violated law.

    Args:
        law: The law.
        check: The name of the check within the test.
        facts: What is true of the example, the target's name included.
        lines: What was wrong.
        reproduce: The command, or nothing.
    """
    described = " ".join(f"{name}={value}" for name, value in facts.items() if name != "target")
    text = [
        f'{law.id} "{law.title}" is broken by {facts["target"]}',
        f"check: {check}",
        f"case: {described}",
        *lines,
        f"law: {law.statement}",
    ]
    if reproduce:
        text.append(f"reproduce: {reproduce}")
    return "\n  ".join(text)
