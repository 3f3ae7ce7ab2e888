"""What the tests of the plug-in share: a project with a target of a few lines."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

# What a pytest in this process imports first is thrown away with it: torch can't be imported
# twice. Each of these is needed by the tests anyway.
import fp8.testing.laws
import fp8.testing.session
import fp8.testing.summary
import fp8.testing.tally  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Callable

FAKE = """
    \"\"\"A target whose only operation is to double, and a fault for it.\"\"\"
    from contextlib import contextmanager

    factor = 2

    class Target:
        def __init__(self, device):
            self.device = device

        def double(self, x):
            return x * factor

    def target(device):
        return Target(device)

    @contextmanager
    def triples():
        global factor
        factor = 3
        try:
            yield
        finally:
            factor = 2
"""

Run = "Callable[..., pytest.RunResult]"


@pytest.fixture
def run(pytester: pytest.Pytester) -> Callable[..., pytest.RunResult]:
    """Run pytest on a test file, judging the fake target unless told otherwise."""
    pytester.makepyfile(fake=FAKE)

    def run(source: str, *args: str, target: str | None = "fake:target") -> pytest.RunResult:
        header = "import numpy as np\nimport pytest\n"
        lines = source.strip("\n").splitlines()
        indent = len(lines[0]) - len(lines[0].lstrip())
        pytester.makepyfile(test_it=header + "\n".join(line[indent:] for line in lines))
        chosen = () if target is None else (f"--fp8-target={target}",)
        # pythonpath, because it reaches the workers of pytest-xdist, too
        return pytester.runpytest("-o", "pythonpath=.", *chosen, *args)

    return run
