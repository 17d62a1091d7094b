"""What heads that read a target's states have in common."""

from jaxspec.checkpoint import Model
from jaxspec.models import ModelConfig, Rope


def head_config(target: ModelConfig, num_layers: int = 1) -> ModelConfig:
    """The layers of a head for a target: of its shape, and of the kind that files describe."""
    return ModelConfig(
        vocab_size=target.vocab_size,
        embed_dim=target.embed_dim,
        num_layers=num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        mlp_dim=target.mlp_dim,
        max_positions=target.max_positions,
        norm_eps=target.norm_eps,
        rope=Rope(theta=target.rope.theta),
    )


def check_length(sequence_length: int, target: Model) -> None:
    """Raises a ValueError where the target cannot read so many tokens."""
    if sequence_length > target.config.max_positions:
        raise ValueError(
            f"sequence_length must be at most the target's max_positions "
            f"({target.config.max_positions}), got {sequence_length}."
        )


def check_taps(taps: tuple[int, ...], target: Model) -> None:
    """Raises a ValueError unless these are layers of the target, one at least."""
    if not taps or not all(0 <= layer < target.config.num_layers for layer in taps):
        raise ValueError(
            f"taps must be layers in 0..{target.config.num_layers - 1} of the target, got {taps}."
        )
