"""The packages of the extras `mobile` and `mobile-lm`, imported where they are used."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs_extra(what: str, extra: str = "mobile") -> Iterator[None]:
    """Says which extra to install where an import inside fails.

    Raises:
        ValueError: a package of the extra is not there.
    """
    try:
        yield
    except ImportError as error:
        raise ValueError(
            f"{what} needs the extra `{extra}` ({error.name} is missing): "
            f"pip install 'jaxspec[{extra}]'."
        ) from None
