"""Checks that a drafter's weights belong to a target."""

from jaxspec.core.types import LanguageModel


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
