"""What the tests of compiled code share: a target's recipes, and whether there is a compiler."""

from __future__ import annotations

import shutil

import pytest

from fp8.testing import models, oracle


@pytest.fixture(params=tuple(oracle.RECIPES))
def recipe(request, target, judge):
    """Each recipe that the target converts to."""
    return models.require_recipe(judge, target, request.param)


@pytest.fixture
def inductor(target, judge):
    """What a test of inductor needs; on a CPU it writes C++."""
    compiler = target.device.type == "cuda" or shutil.which("g++") or shutil.which("clang++")
    judge.require(
        bool(compiler),
        "inductor compiles C++ on a CPU and there is no compiler: install g++ (package g++ of "
        "Debian and Ubuntu, gcc-c++ of Fedora)",
    )
