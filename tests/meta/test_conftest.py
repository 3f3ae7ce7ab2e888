"""The project's own conftest: the folder decides the marker, and what runs when nobody asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import core, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Run = Callable[..., pytest.RunResult]

PROFILES = ("fp8-quick", "fp8-default", "fp8-nightly")

DRAWS = """
from hypothesis import given, settings, strategies as st
drawn = []
@given(n=st.integers(0, 10**9))
def test_draws(n):
    drawn.append(n)
def test_shows(fp8_seed):
    chosen = settings.default
    drawn_once = len(drawn), hash(tuple(drawn))
    print("seen:", chosen.max_examples, chosen.derandomize, fp8_seed, *drawn_once)
"""


@pytest.fixture
def project(
    pytester: pytest.Pytester, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    """Run pytest in a copy of this project's settings with tests of its own."""
    ini = (pytestconfig.rootpath / "pyproject.toml").read_text(encoding="utf-8")
    pytester.path.joinpath("pyproject.toml").write_text(ini, encoding="utf-8")
    pytester.path.joinpath("expectations.toml").write_text("schema = 1\n", encoding="utf-8")
    pytester.makeconftest((pytestconfig.rootpath / "conftest.py").read_text(encoding="utf-8"))
    pytester.makepyfile(fake="target = type('Fake', (), {})()")

    def project(*args: str) -> pytest.RunResult:
        return pytester.runpytest("-o", "fp8_target=fake:target", *args)

    # the conftest sets Hypothesis's profile and seed for the whole process, which is ours
    monkeypatch.setattr(core, "global_force_seed", core.global_force_seed)
    saved = {name: settings.get_profile(name) for name in PROFILES}
    current = settings.get_current_profile_name()
    yield project
    for name, profile in saved.items():
        settings.register_profile(name, profile)
    settings.load_profile(current)


def add(pytester: pytest.Pytester, path: str, source: str = "def test_it():\n    pass\n") -> None:
    file = pytester.path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source, encoding="utf-8")


@pytest.fixture
def one_of_each(pytester: pytest.Pytester) -> None:
    for folder in ("numerics", "compile", "perf", "meta"):
        add(pytester, f"tests/{folder}/test_{folder}.py")
    slow = "import pytest\n@pytest.mark.slow\ndef test_it():\n    pass\n"
    add(pytester, "tests/numerics/deep/test_slow.py", slow)


@pytest.mark.usefixtures("one_of_each")
@pytest.mark.parametrize(
    ("args", "ran"),
    [
        ([], {"numerics", "compile", "meta"}),
        (["-m", "numerics"], {"numerics"}),
        (["-m", "perf"], {"perf"}),
        (["-m", "not compile"], {"numerics", "meta"}),
        (["-m", "numerics or slow"], {"numerics", "slow"}),
        (["-m", "slow"], {"slow"}),
        (["-m", "not perf"], {"numerics", "compile", "meta"}),
        (["--fp8-profile=nightly"], {"numerics", "compile", "meta", "slow"}),
        (["--fp8-profile=nightly", "-m", "not slow"], {"numerics", "compile", "meta"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_runs(project: Run, args: list[str], ran: set[str]) -> None:
    result = project("-v", *args)
    assert result.ret == 0
    passed = [line for line in result.outlines if "PASSED" in line]
    assert {line.split("test_")[1].partition(".py")[0] for line in passed} == ran


@pytest.mark.parametrize("path", ["tests/test_lost.py", "tests/other/test_lost.py"])
def test_a_test_outside_the_folders_is_an_error(
    project: Run, pytester: pytest.Pytester, path: str
) -> None:
    add(pytester, path)
    add(pytester, "tests/meta/test_meta.py")
    result = project()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [f"{path}: tests are in tests/{{numerics,compile,perf,meta}}, nowhere else"]
    )


def test_profiles_and_seeds(project: Run, pytester: pytest.Pytester) -> None:
    add(pytester, "tests/meta/test_draws.py", DRAWS)

    def seen(*args: str) -> list[str]:
        result = project("-s", *args)
        result.assert_outcomes(passed=2)
        return next(line for line in result.outlines if "seen: " in line).split("seen: ")[1].split()

    quick = seen("--fp8-profile=quick")
    assert quick[:4] == ["4", "True", "0", "4"]
    assert seen("--fp8-profile=quick") == quick
    assert seen()[:4] == ["40", "True", "0", "40"]
    seeded = seen("--fp8-profile=quick", "--fp8-seed=5")
    assert seeded[:4] == ["4", "False", "5", "4"]
    assert seen("--fp8-profile=quick", "--fp8-seed=5") == seeded
    drawn = {quick[4], seeded[4], seen("--fp8-profile=quick", "--fp8-seed=6")[4]}
    assert len(drawn) == 3


def test_other_folders_are_not_collected(project: Run, pytester: pytest.Pytester) -> None:
    add(pytester, "tests/numerics/test_numerics.py")
    add(pytester, "tests/compile/test_compile.py", "import not_installed_here\n")
    project("-m", "numerics").assert_outcomes(passed=1)
    project().assert_outcomes(errors=1)


EXPECTED = """
schema = 1
[[expectation]]
id = "known"
target = "fake:target"
law = "P05"
check = "y"
reason = "a reason"
link = "https://example.org"
expires = 2100-01-01
example = "tests/numerics/test_numerics.py::{name}[fake:target]"
"""
THOROUGH = """
import pytest
@pytest.mark.thorough
def test_long(target):
    pass
def test_short(target):
    pass
"""


@pytest.mark.parametrize(("name", "status"), [("test_long", 0), ("test_missing", 1)])
def test_an_example_that_quick_leaves_out_is_there(
    project: Run, pytester: pytest.Pytester, name: str, status: int
) -> None:
    add(pytester, "tests/numerics/test_numerics.py", THOROUGH)
    (pytester.path / "expectations.toml").write_text(EXPECTED.format(name=name), encoding="utf-8")
    result = project("--fp8-profile=quick")
    result.assert_outcomes(passed=1, deselected=1)
    assert result.ret == status
