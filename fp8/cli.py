"""The command ``fp8``: a group of subcommands, each in a module of `fp8.commands`."""

from __future__ import annotations

import click

from fp8.commands.calibrate import calibrate
from fp8.commands.capture import capture
from fp8.commands.diff import diff
from fp8.commands.faults import command as faults
from fp8.commands.map import command as map_
from fp8.commands.report import report
from fp8.commands.slowdowns import command as slowdowns


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fp8", prog_name="fp8")
def main() -> None:
    """Judge float8 training stacks: may this one be trusted, and may we upgrade it?

    The tests themselves run with pytest; `pytest --help` lists their options under "fp8".
    """


main.add_command(calibrate)
main.add_command(capture)
main.add_command(diff)
main.add_command(faults)
main.add_command(report)
main.add_command(map_)
main.add_command(slowdowns)
