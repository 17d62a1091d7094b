"""A drafter together with the weights it drafts with."""

from typing import TYPE_CHECKING, Any, NamedTuple

from jaxspec.core.types import Drafter, PyTree
from jaxspec.drafters.plain import NoDraft

if TYPE_CHECKING:
    from jaxspec.checkpoint import Tokenizer


class LoadedDrafter(NamedTuple):
    """A drafter and its weights: the argument `drafter` of `generate` and its like.

    Attributes:
        drafter: the method and its settings.
        params: its weights, a pytree: `params.draft` of every step; `()` for none.
        tokenizer: of the draft model, so that another vocabulary is noticed; `None` to trust it.

    Example:
        >>> import jaxspec
        >>> loaded = jaxspec.DraftModel.of(jaxspec.load("demo-draft"))
        >>> loaded.drafter
        DraftModel(num_speculative_tokens=4, paths=None, chunk=256)
    """

    drafter: Drafter
    params: PyTree
    tokenizer: "Tokenizer | None" = None


DrafterLike = Drafter | LoadedDrafter
"""Drafters that public functions accept: a method without weights, or one with its weights."""


def loaded_drafter(drafter: Any) -> LoadedDrafter:
    """Returns a drafter with its weights: inside the package there is only this form.

    Args:
        drafter: a `DrafterLike`, or `None` for plain decoding.

    Raises:
        ValueError: it is something else.

    Example:
        >>> loaded_drafter(None)
        LoadedDrafter(drafter=NoDraft(), params=(), tokenizer=None)
    """
    if isinstance(drafter, LoadedDrafter):
        return drafter
    if drafter is None:
        return LoadedDrafter(NoDraft(), ())
    if not hasattr(drafter, "propose"):
        raise ValueError(
            "drafter must be one such as PromptLookup(), DraftModel.of(model) or Eagle.of(head), "
            f"got {drafter!r:.80}."
        )
    return LoadedDrafter(drafter, ())
