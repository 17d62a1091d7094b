"""A drafter together with the weights it drafts with."""

from typing import TYPE_CHECKING, NamedTuple

from jaxspec.core.types import Drafter, PyTree

if TYPE_CHECKING:
    from jaxspec.checkpoint import Tokenizer


class LoadedDrafter(NamedTuple):
    """What `generate(drafter=...)` takes for drafters that have weights.

    drafter: the method and its settings.
    params: its weights, a pytree: `params.draft` of every step.
    tokenizer: of the draft model, so that another vocabulary is noticed; `None` to trust it.
    """

    drafter: Drafter
    params: PyTree
    tokenizer: "Tokenizer | None" = None
