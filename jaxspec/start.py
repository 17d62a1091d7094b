"""Ctrl-C in the second in which the command `jaxspec` imports its modules: a quiet end.

The package imports this module first. Nothing changes in a program that imports the package.
"""

# The inner module: `signal` imports `enum`, which takes longer than all that comes before.
import _signal  # pyright: ignore[reportMissingImports]
import os
import sys

EXIT_INTERRUPTED = 130


def end_at_once(number: int, frame: object) -> None:
    """Ends the process, as a handler of a signal."""
    os._exit(EXIT_INTERRUPTED)


def _is_command() -> bool:
    """Returns True in `jaxspec ...` and in `python -m jaxspec ...`."""
    program = os.path.basename(sys.argv[0]).removesuffix(".exe")
    # While a package is imported for `-m`, its name stands only where Python's own flags are.
    return program == "jaxspec" or (program == "-m" and "jaxspec" in sys.orig_argv)


# Who started the process may have chosen that Ctrl-C is ignored.
if _is_command() and _signal.getsignal(_signal.SIGINT) == _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, end_at_once)
