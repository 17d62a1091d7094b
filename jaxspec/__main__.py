"""`python -m jaxspec`."""

from jaxspec.cli import command_line

command_line()
