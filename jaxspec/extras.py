"""Optional packages: the one place that knows what the distribution and its extras are called.

The distribution is `jaxspec-decoding`. PyPI's `jaxspec` is another package.
"""

import re
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


def check_version(package: str, oldest: str, what: str, extra: str) -> None:
    """Refuses a package of an extra that is too old; one that is not installed passes.

    Args:
        package: as indexes call it.
        oldest: version that is taken.
        what: the subject of the message, such as "Running an exported model".
        extra: the extra that holds the package.

    Raises:
        ValueError: naming both versions and the extra to install.

    Example:
        >>> check_version("jax", "999.1", "Decoding", "test")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: Decoding needs jax 999.1 or newer, and ... is installed: pip install ...
    """
    try:
        found = version(package)
    except PackageNotFoundError:
        return
    if _numbers(found) < _numbers(oldest):
        raise ValueError(
            f"{what} needs {package} {oldest} or newer, and {found} is installed: "
            f"{install_hint(extra)}."
        )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
