"""Checks every annotated shape of `core` and `drafters` while the tests run."""

from collections.abc import Callable, Iterable
from typing import runtime_checkable

from beartype import beartype


def checked(function: Callable) -> Callable:
    """`beartype`, which refuses protocols that were not declared checkable, made to take ours."""
    for hint in function.__annotations__.values():
        if getattr(hint, "_is_protocol", False):
            runtime_checkable(hint)
    return beartype(function)


def made_unchecked(kinds: Iterable[type]) -> None:
    """Lets dataclasses check their settings themselves, as outside of the tests."""
    for kind in kinds:
        while hasattr(kind.__init__, "__wrapped__"):
            kind.__init__ = kind.__init__.__wrapped__  # pyright: ignore
