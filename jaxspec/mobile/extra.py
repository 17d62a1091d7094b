"""The packages of the extra `mobile`, imported where they are used."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs_extra(what: str) -> Iterator[None]:
    """Says which extra to install where an import inside fails.

    Raises:
        ValueError: a package of the extra is not there.
    """
    try:
        yield
    except ImportError as error:
        raise ValueError(
            f"{what} needs the extra `mobile` ({error.name} is missing): "
            "pip install 'jaxspec[mobile]'."
        ) from None
