"""Records as arguments of a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from fp8.testing.records import Record

FILE = click.Path(dir_okay=False, path_type=Path)


class UnusableFileError(click.ClickException):
    """Not 1, which is a verdict."""

    exit_code = 2


def load(path: Path) -> Record:
    """Read a record. Raises UnusableFileError."""
    from fp8.testing.records import RecordError, load_record

    try:
        return load_record(path)
    except RecordError as error:
        raise UnusableFileError(str(error)) from error
