"""Checks every annotated shape of `core` and `drafters` while the tests run."""

from collections.abc import Callable
from typing import runtime_checkable

from beartype import beartype


def checked(function: Callable) -> Callable:
    """`beartype`, which refuses protocols that were not declared checkable, made to take ours."""
    for hint in function.__annotations__.values():
        if getattr(hint, "_is_protocol", False):
            runtime_checkable(hint)
    return beartype(function)
