"""Checks of settings: each refuses values with a message that names the setting and its value."""

from typing import Any


def check_at_least(settings: Any, least: int, *names: str) -> None:
    """Refuses settings that are given and below `least`.

    Raises:
        ValueError: naming the setting and its value.

    Example:
        >>> check_at_least({"block": 0}, 1, "block")
        Traceback (most recent call last):
        ...
        ValueError: block must be at least 1, got 0.
    """
    for name, value in _values(settings, names):
        if value is not None and not value >= least:
            raise ValueError(f"{name} must be at least {least}, got {value}.")


def check_above_zero(settings: Any, *names: str) -> None:
    """Refuses settings that are given and not above 0.

    Raises:
        ValueError: naming the setting and its value.
    """
    for name, value in _values(settings, names):
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be above 0, got {value}.")


def check_share(settings: Any, *names: str) -> None:
    """Refuses settings outside of [0, 1].

    Raises:
        ValueError: naming the setting and its value.
    """
    for name, value in _values(settings, names):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {value}.")


def check_one_of(settings: Any, choices: tuple, *names: str) -> None:
    """Refuses settings that are none of `choices`.

    Raises:
        ValueError: naming the setting, the choices and its value.
    """
    for name, value in _values(settings, names):
        if value not in choices:
            raise ValueError(f"{name} must be one of {choices}, got {value!r}.")


def _values(settings: Any, names: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Returns names and values of settings: fields of a record, or arguments by their names."""
    given = settings if isinstance(settings, dict) else vars(settings)
    return [(name, given[name]) for name in names]
