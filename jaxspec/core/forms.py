"""Functions that another runtime computes in another form.

A few pieces of a model are written here as XLA runs them best, and other runtimes refuse that form:
a phone's GPU takes no gather. Such a function is `exchangeable`: whoever lowers a model for another
runtime traces it within `exchanged(...)`, and everything else stays the same code.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_forms: ContextVar[Mapping[Callable, Callable] | None] = ContextVar("forms", default=None)


def exchangeable(function: Callable[P, R]) -> Callable[P, R]:
    """Marks a function that `exchanged` may put another form in place of."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        forms = _forms.get() or {}
        return forms.get(call, function)(*args, **kwargs)

    return call


def is_exchanged() -> bool:
    """Says whether a model is being lowered for another runtime."""
    return _forms.get() is not None


@contextmanager
def exchanged(forms: Mapping[Callable, Callable]) -> Iterator[None]:
    """Within it, calls of the functions in `forms` run what they are mapped to.

    It acts while functions are traced: one that was jitted and traced before keeps its form.
    """
    token = _forms.set(forms)
    try:
        yield
    finally:
        _forms.reset(token)
