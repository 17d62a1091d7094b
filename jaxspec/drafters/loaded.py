"""A drafter together with the weights it drafts with, and whether they belong to a target."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from jaxspec.core.checks import Count, Natural, checked, shown
from jaxspec.core.types import Drafter, LanguageModel, PyTree
from jaxspec.drafters.plain import NoDraft
from jaxspec.models.summary import summary_html, summary_line, weight_facts

if TYPE_CHECKING:
    from jaxspec.checkpoint import Tokenizer


class LoadedDrafter(NamedTuple):
    """A drafter and its weights: the argument `drafter` of `generate` and its like.

    Attributes:
        drafter: the method and its settings.
        params: its weights, a pytree: `params.draft` of every step; `()` for none.
        tokenizer: of the draft model, so that another vocabulary is noticed; `None` to trust it.
        made_for: digest of the target's weights that it was trained for, so that another target is
            noticed; `None` to trust it.

    Example:
        >>> import jaxspec
        >>> loaded = jaxspec.DraftModel.of(jaxspec.load("demo-draft"))
        >>> loaded.drafter
        DraftModel(num_speculative_tokens=4, paths=None, chunk=256, threshold=0.0)
    """

    drafter: Drafter
    params: PyTree
    tokenizer: "Tokenizer | None" = None
    made_for: str | None = None

    def _facts(self) -> dict[str, str]:
        settings = textwrap.shorten(repr(self.drafter), 120, placeholder=" ...)")
        return {"drafter": settings, **weight_facts(self.params)}

    def __repr__(self) -> str:
        return summary_line(self, self._facts())

    def _repr_html_(self) -> str:
        return summary_html(self, self._facts())


_MAKERS = {
    "Model": "DraftModel.of(model), or Deer.of(model) for a diffusion model",
    "Network": "DraftModel.of(model) with the whole model",
    "EagleHead": "Eagle.of(head) or Eagle2.of(head)",
    "Eagle3Head": "Eagle.of(head) or Eagle2.of(head)",
    "DFlashHead": "DFlash.of(head)",
}
_SIZES = {"taps": Sequence[Natural], "tree_shape": tuple[Count, Natural], "widths": Sequence[Count]}
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
        LoadedDrafter(drafter: NoDraft(), weights: none)
    """
    if isinstance(drafter, LoadedDrafter):
        _check_method(drafter.drafter)
        for leaf in jax.tree.leaves(drafter.params):
            if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                raise ValueError(
                    "drafter: its weights, LoadedDrafter.params, must be a pytree of arrays, or () "
                    f"for none; got {shown(leaf)}."
                )
        return drafter
    if drafter is None:
        return LoadedDrafter(NoDraft(), ())
    _check_method(drafter)
    return LoadedDrafter(drafter, ())


def _check_method(drafter: Any) -> None:
    """Refuses what has not the members of a `Drafter`, or sizes that no draft has."""
    if isinstance(drafter, type):
        name = drafter.__name__
        raise ValueError(f"drafter: got the class {name}; give an instance, such as {name}().")
    if not hasattr(drafter, "propose"):
        kind = type(drafter).__name__
        makes = _MAKERS.get(kind)
        raise ValueError(
            f"drafter: got only the weights, {kind}; give {makes}."
            if makes
            else "drafter must be one such as PromptLookup(), DraftModel.of(model) or "
            f"Eagle.of(head), got {shown(drafter)}."
        )
    kind = type(drafter).__name__
    for name in ("taps", "tree_shape", "widths", "init"):
        if not hasattr(drafter, name):
            raise ValueError(f"drafter: {kind} has no `{name}`; see jaxspec.core.types.Drafter.")
    found = {
        name: checked(f"drafter: {name} of {kind}", getattr(drafter, name), hint)
        for name, hint in _SIZES.items()
    }
    widths, (num_nodes, _) = found["widths"], found["tree_shape"]
    if list(widths) != sorted({*widths}) or widths[-1:] != (num_nodes,):
        raise ValueError(
            f"drafter: widths of {kind} must ascend to the {num_nodes} nodes of its tree_shape, "
            f"got {shown(widths)}."
        )


class OtherTargetError(ValueError):
    """A drafter was made for another target."""


def check_made_for(
    target: LanguageModel,
    kind: str,
    *,
    vocab_size: int | None = None,
    embed_dim: int | None = None,
    taps: tuple[int, ...] = (),
) -> None:
    """Refuses a head or drafter of another target.

    Args:
        target: the model to draft for.
        kind: its name in the message, such as "head".
        vocab_size: of the target it was made for; `None` if it may differ.
        embed_dim: of the target it was made for; `None` if it may differ.
        taps: layers of the target whose inputs it reads.

    Raises:
        OtherTargetError: the message names all differences.
    """
    different = [
        f"{name} is {theirs}, the target's {ours}"
        for name, theirs, ours in (
            ("width", embed_dim, target.embed_dim),
            ("vocabulary", vocab_size, target.vocab_size),
        )
        if theirs not in (None, ours)
    ]
    if different:
        raise OtherTargetError(
            f"drafter: the {kind} is for another target: its {'; its '.join(different)}."
        )
    if taps:
        layers = len(target.empty_cache(1).layers)
        lacking = [layer for layer in taps if not 0 <= layer < layers]
        if lacking:
            raise OtherTargetError(
                f"drafter: the {kind} is for another target: it reads the inputs of layers "
                f"{list(taps)}, and the target has {layers}, numbered from 0."
            )
