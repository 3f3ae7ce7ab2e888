"""``python -m fp8``: the command, by the interpreter that it is to run in."""

from fp8.cli import main

main(prog_name="fp8")
