"""Optional packages: the one place that knows what the distribution and its extras are called.

The distribution is `jaxspec-decoding`. PyPI's `jaxspec` is another package.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "jaxspec-decoding"


class MissingExtra(ImportError, ValueError):
    """A package of an extra is not installed. The message says which extra to install."""


def installed_version() -> str:
    """Returns the version of the installed distribution; "unknown" for a checkout without one."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"


def install_hint(extra: str) -> str:
    """Returns the commands that install an extra, from an index and from a clone.

    Args:
        extra: one of pyproject.toml's extras, or several with commas between them.

    Example:
        >>> install_hint("mobile")
        "pip install 'jaxspec-decoding[mobile]' (in a clone: pip install '.[mobile]')"
    """
    return f"pip install '{DISTRIBUTION}[{extra}]' (in a clone: pip install '.[{extra}]')"


@contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Names the extra to install if an import inside the block fails.

    Args:
        what: the subject of the message, such as "Exporting".
        extra: the extra that holds what the block imports.

    Raises:
        MissingExtra: a package of the extra is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise MissingExtra(
            f"{what} needs the extra `{extra}` ({error.name} is missing): {install_hint(extra)}."
        ) from None
