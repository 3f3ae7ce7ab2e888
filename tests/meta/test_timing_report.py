"""The report: a table that can be read, remarks that nobody should miss, JSON that is complete."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from fp8.testing import timing
from fp8.testing.timing import Plan, TimingUnavailableError, as_json, compare, measure, reported
from fp8.testing.timing.results import Conditions, Measurement
from fp8.testing.timing.simulated import SimulatedDevice, SimulatedKernel

if TYPE_CHECKING:
    from collections.abc import Callable

PLAN = Plan(quantity="device")
CAPPED = Conditions(1725, 3201, 698.0, 64, frozenset({"SW power cap"}), ())


def measured(
    plan: Plan = PLAN,
    *,
    conditions: Conditions = CAPPED,
    notes: tuple[str, ...] = (),
    **kernels: SimulatedKernel,
) -> Measurement:
    still = {
        name: replace(kernel, block_noise=0.0, sample_noise=0.0) for name, kernel in kernels.items()
    }
    device = SimulatedDevice(seed=0, conditions=lambda _: conditions, notes=notes)
    return measure(device, still, plan)


def test_the_table() -> None:
    made = measured(
        bf16=SimulatedKernel(3.0),
        fp8=SimulatedKernel(2.0, first_ms=12_345.0),
    )
    assert str(reported(made)) == GOLDEN


GOLDEN = """\
times in ms; speed-up against bf16
       device   host   call   1st call   2nd call   peak MiB       speed-up, device         speed-up, call
──────────────────────────────────────────────────────────────────────────────────────────────────────────
bf16        3   0.01      3      1,000          3        0.0                      –                      –
fp8         2   0.01      2     12,345          2        0.0   1.500 [1.500, 1.500]   1.500 [1.500, 1.500]
fp8: FASTER, 1.500 times as fast as bf16 by device time [1.500, 1.500] (99% interval of 5 pairs): by more than 2%
simulated: 5 ABBA rounds in 0.5 s; the intervals are narrow enough
bf16: device time by simulated, SM 1725 MHz, memory 3201 MHz, 698 W, 64 °C, clock limited by SW power cap
fp8: device time by simulated, SM 1725 MHz, memory 3201 MHz, 698 W, 64 °C, clock limited by SW power cap"""  # noqa: E501, RUF001


def test_a_host_bound_callable_is_named_and_its_speed_ups_differ() -> None:
    made = measured(
        Plan(),
        bf16=SimulatedKernel(3.0),
        fp8=SimulatedKernel(2.0, host_ms=6.0),
    )
    assert [made.host_bound(name) for name in made.names] == [False, True]
    text = str(reported(made))
    assert "1.500 [1.500, 1.500]   0.500 [0.500, 0.500]" in text
    assert "fp8: SLOWER, 0.500 times as fast as bf16 by call time" in text
    assert "fp8: HOST-BOUND" in text
    assert "bf16: HOST-BOUND" not in text


def test_void_blocks_unsteadiness_and_blindness_are_told() -> None:
    hot = Conditions(reasons=frozenset({"HW thermal"}), foreign=(4,))
    made = measured(
        conditions=hot,
        notes=("a note",),
        bf16=SimulatedKernel(3.0),
        fp8=SimulatedKernel(2.0, compiles=frozenset(range(999))),
    )
    text = str(reported(made))
    assert "fp8: UNRESOLVED: 25 of 25 pairs are void" in text
    for name in ("bf16", "fp8"):
        assert f"{name}: 50 of 50 blocks are VOID: HW thermal" in text
        assert f"{name}: 50 of 50 blocks are VOID: foreign process" in text
    assert "fp8: 50 of 50 blocks are VOID: compiled" in text
    assert "fp8: NOT STEADY after 12 blocks of warm-up" in text
    assert "\na note\n" in text
    assert made.host_bound("fp8") is None
    blind = str(reported(measured(conditions=Conditions(), a=SimulatedKernel(1.0))))
    assert "throttling not available, other processes not available" in blind


def test_names_are_shown_as_they_are() -> None:
    text = str(
        reported(measured(**{"[bold]a": SimulatedKernel(1.0), "b[/]": SimulatedKernel(1.0)}))
    )
    assert "[bold]a" in text
    assert "b[/]: ALIKE" in text


def test_json_has_every_sample() -> None:
    made = measured(a=SimulatedKernel(1.0), b=SimulatedKernel(2.0))
    back = json.loads(json.dumps(as_json(made), allow_nan=False))
    assert back["plan"]["quantity"] == "device"
    assert list(back["starts"]) == ["a", "b"]
    assert len(back["rounds"]) == len(made.rounds)
    first = back["rounds"][0]["a"][0]
    assert first["device_ms"] == list(made.rounds[0]["a"][0].device_ms)
    assert first["conditions"]["reasons"] == ["SW power cap"]


# ------------------------------------------------------------------------------------ for users


def test_compare_measures_on_the_device_and_prints(capsys: pytest.CaptureFixture[str]) -> None:
    kernels = {"a": SimulatedKernel(2.0), "b": SimulatedKernel(1.0)}
    report = compare(kernels, plan=PLAN, device=SimulatedDevice(seed=0))  # type: ignore[arg-type]
    assert report.comparisons["b"].verdict == "FASTER"
    assert "b: FASTER" in capsys.readouterr().out
    compare(kernels, plan=PLAN, device=SimulatedDevice(seed=0), show=False)  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""


def test_compare_needs_two() -> None:
    with pytest.raises(ValueError, match=r"two or more, got \['a'\]"):
        compare({"a": lambda: None})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_compare_without_a_gpu_calls_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    called: list[int] = []
    with pytest.raises(TimingUnavailableError, match="needs an NVIDIA GPU"):
        compare({"a": lambda: called.append(1), "b": lambda: called.append(2)})
    assert called == []


@pytest.mark.parametrize("name", timing.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(timing, name) is not None


def test_another_name_is_not_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        timing.nothing  # noqa: B018


# ------------------------------------------------------------------------------------ the page


def examples() -> list[str]:
    page = Path(__file__).parents[2] / "docs" / "timing.md"
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


class OnTheCpu:
    """Calls what it should measure."""

    name, notes, rotate_bytes, called = "a stand-in", (), 2 * 3 * 2**20, 0

    def now(self) -> float:
        return 0.0

    def prepare(self, subject: Callable[[], object], plan: Plan) -> object:
        subject()
        self.called += 1
        return SimulatedDevice(seed=0).prepare(SimulatedKernel(1.0), plan)


@pytest.mark.filterwarnings("ignore::fp8.regimes.RegimeWarning")  # of layers made this small
@pytest.mark.parametrize("example", examples(), ids=["steps", "kernels"])
def test_the_examples_of_the_page_run(
    example: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = OnTheCpu()
    monkeypatch.setattr("fp8.testing.timing.cuda.open_gpu", lambda: nullcontext(device))
    monkeypatch.setattr(torch, "compile", lambda model: model)
    small = example.replace('"cuda"', '"cpu"')
    for size in ("12288", "8192", "4096"):
        small = small.replace(size, str(int(size) // 64))
    exec(compile(small, "docs/timing.md", "exec"), {"__name__": "example"})  # noqa: S102
    assert device.called == 2
    assert "a stand-in: " in capsys.readouterr().out
