"""``fp8 capture``: operands from any model and batch, for ``pytest --fp8-tensors=FILE``."""

from __future__ import annotations

import pkgutil
import shlex
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from torch import nn

    from fp8.testing.capture import Recording


@click.command()
@click.option("--model", required=True, metavar="MODULE:BUILD", help="Called for the model.")
@click.option("--batch", required=True, metavar="MODULE:BATCH", help="Called for the loss.")
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The .safetensors file to write.",
)
@click.option(
    "--layers",
    multiple=True,
    metavar="GLOB",
    help="Only layers whose name matches, such as '*.3.mlp.*'. Repeatable. Default: every Linear.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    metavar="N",
    help="Keep the first N tokens of a layer.",
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="What the operands are rounded to.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="torch.manual_seed.")
def capture(
    model: str,
    batch: str,
    out: Path,
    layers: tuple[str, ...],
    max_tokens: int,
    dtype: str,
    seed: int,
) -> None:
    """Write what a model's linear layers see in one training step.

    BUILD() returns the model, a torch.nn.Module. BATCH(model) runs it and returns the scalar loss.
    For each nn.Linear the file then has its input NAME.x, its weight NAME.w and the gradient of
    its output NAME.g. Modules are also looked for in the current folder. With this in mine.py:

    \b
      import torch
      from torch import nn
    \b
      def build():
          return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 48))
    \b
      def batch(model):
          x = torch.randn(128, 64)
          target = torch.randint(48, (128,))
          return nn.functional.cross_entropy(model(x), target)

    the first command captures, and the second says what float8 costs on it:

    \b
      fp8 capture --model mine:build --batch mine:batch --out mine.safetensors
      pytest tests/numerics/test_tensors.py --fp8-tensors=mine.safetensors
    """  # noqa: D301 - click's \\b is the character
    from rich.console import Console

    if not out.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {out.parent}", param_hint="--out")
    sys.path.insert(0, str(Path.cwd()))
    build, run = _resolve("--model", model), _resolve("--batch", batch)
    status = Console(stderr=True)

    import torch

    from fp8.testing.capture import CaptureError
    from fp8.testing.capture import capture as capture_step
    from fp8.testing.captured import require_safetensors

    try:
        require_safetensors()  # now, rather than after the work is done
    except ModuleNotFoundError as error:
        raise click.ClickException(str(error)) from error
    torch.manual_seed(seed)
    with status.status(f"building {model}"):
        built = build()
    if not isinstance(built, torch.nn.Module):
        name = type(built).__name__
        raise click.BadParameter(f"{model} returned {name}, no module", param_hint="--model")
    try:
        with status.status(f"running {batch}, forward and backward"):
            recording = capture_step(
                built,
                run,
                out,
                filter_fn=_filter(layers),
                max_tokens=max_tokens,
                dtype=getattr(torch, dtype),
                metadata={
                    "made by": "fp8 capture",
                    "model": model,
                    "batch": batch,
                    "seed": str(seed),
                    "torch": torch.__version__,
                },
            )
    except CaptureError as error:
        raise click.ClickException(str(error)) from error
    _show(Console(), recording, out)


def _resolve(option: str, spec: str) -> Callable[..., Any]:
    """The callable that ``package.module:name`` names."""
    if ":" not in spec:
        raise click.BadParameter(f"got {spec!r}, needs package.module:name", param_hint=option)
    try:
        found = pkgutil.resolve_name(spec)
    except (ImportError, AttributeError, ValueError) as error:
        raise click.BadParameter(f"can't load {spec!r}: {error}", param_hint=option) from error
    if not callable(found):
        name = type(found).__name__
        raise click.BadParameter(f"{spec!r} is a {name}, needs a function", param_hint=option)
    function: Callable[..., Any] = found
    return function


def _filter(patterns: tuple[str, ...]) -> Callable[[nn.Linear, str], bool] | None:
    if not patterns:
        return None
    return lambda _, name: any(fnmatch(name, pattern) for pattern in patterns)


def _show(console: Console, recording: Recording, out: Path) -> None:
    """Every layer, captured or not; then what to do with the file."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"{len(recording.layers)} layers captured", title_justify="left")
    table.add_column("layer", overflow="fold")
    for heading in ("tokens", "in", "out", "bytes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, layer in recording.layers.items():
        (tokens, inputs), outputs = layer.x.shape, len(layer.w)
        table.add_row(escape(name), *(f"{n:,}" for n in (tokens, inputs, outputs, layer.nbytes)))
    console.print(table)
    for name, reason in recording.omitted.items():
        console.print(f"omitted {name}: {reason}", markup=False, highlight=False)
    console.print(
        f"{out}: {out.stat().st_size:,} bytes\n"
        f"next: pytest tests/numerics/test_tensors.py --fp8-tensors={shlex.quote(str(out))}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
