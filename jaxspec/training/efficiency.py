"""FLOPs that a token costs in training, and the share of the devices' peak that a run reaches."""

import math
from typing import NamedTuple

import jax

from jaxspec.core.types import PyTree
from jaxspec.models import ModelConfig, param_shapes


class Efficiency(NamedTuple):
    """Turns a rate of tokens into a share of the devices' peak.

    Attributes:
        flops_per_token: FLOPs that a token costs in training, see `flops_per_token`.
        peak: measured FLOP/s of all devices in the dtype used.

    >>> Efficiency(flops_per_token=7.0, peak=7000.0).utilisation(tokens_per_second=500.0)
    0.5
    """

    flops_per_token: float
    peak: float

    def utilisation(self, tokens_per_second: float) -> float:
        """Returns the model FLOPs utilisation, 1 at the peak."""
        return tokens_per_second * self.flops_per_token / self.peak


def flops_per_token(config: ModelConfig, length: int) -> float:
    """Returns the FLOPs that one token costs in training: 6 N + 12 L H Q T.

    PaLM (Chowdhery et al. 2022), appendix B. N are the weights that a token is multiplied with. Of
    the tables they are the output head and the second one of a Markov head; of the experts, those
    that a token visits. L layers, H heads, Q their width, T = `length` tokens in a sequence, all of
    them counted as seen. A third is the forward pass.
    """
    weights = 0.0
    for path, leaf in jax.tree_util.tree_leaves_with_path(param_shapes(config)):
        names = {str(entry.key) for entry in path}
        if "kernel" not in names:
            continue
        share = 1.0
        if "experts" in names and "router" not in names:
            assert config.experts is not None
            share = config.experts.per_token / config.experts.num
        weights += share * math.prod(leaf.shape)
    if config.tied_head:
        weights += config.vocab_size * config.embed_dim
    weights += config.vocab_size * config.markov_rank
    attention = config.num_layers * config.num_heads * config.head_dim * length
    return 6 * weights + 12 * attention


def head_flops_per_token(
    shapes: PyTree,
    config: ModelConfig,
    target: ModelConfig,
    length: int,
    num_drafted: int,
    num_unrolled: int | None,
    reads_target: bool,
    whole_laws: bool,
) -> float:
    """Returns the FLOPs that one token costs in training an EAGLE head, as `flops_per_token`.

    Args:
        shapes: shapes of the head's weights.
        config: shape of its layer.
        target: shape of the target.
        length: tokens in a sequence.
        num_drafted: number of tokens that it drafts from.
        num_unrolled: passes of EAGLE-3's head over each token; `None`: EAGLE-1, one pass, whose
            output head is the target's and gets no gradient, but is read for the target's states
            too.
        reads_target: True if the target's pass is part of every update.
        whole_laws: True if the target's whole output head is read too, besides the rows of the
            tokens that EAGLE-1 drafts from; EAGLE-3 always does.
    """
    kernels = _kernels(shapes)
    attention = 12 * config.num_heads * config.head_dim * length
    if num_unrolled is None:
        flops = 6 * sum(kernels.values()) + attention + 6 * config.embed_dim * num_drafted
    else:
        fusion = kernels.pop("fc/kernel")
        flops = num_unrolled * (6 * sum(kernels.values()) + attention) + 6 * fusion
    if whole_laws or num_unrolled is not None:
        flops += 2 * target.embed_dim * target.vocab_size
    return flops + (_pass_flops_per_token(target, length) if reads_target else 0)


def block_flops_per_token(
    shapes: PyTree,
    config: ModelConfig,
    target: ModelConfig,
    length: int,
    block: int,
    anchors: int,
    target_share: float,
    reads_laws: bool,
    num_drafted: int,
    rank: int = 0,
    frozen: bool = False,
) -> float:
    """Returns the FLOPs that one token costs in training a DFlash head, as `flops_per_token`.

    Every token of text becomes context. `anchors` blocks of each sequence also pass through the
    layers, and places that predict through the target's output head, which gets no gradient.

    Args:
        shapes: shapes of the head's weights.
        config: shape of its layers.
        target: shape of the target.
        length: tokens in a sequence.
        block: places of a block, the anchor included.
        anchors: blocks of a sequence.
        target_share: share of the target's layers that every update passes through: up to the last
            tapped one, or 0 where its states are kept.
        reads_laws: True if the target's output head is read at each predicted place too.
        num_drafted: places of a block that predict.
        rank: that of a Markov head.
        frozen: True if nothing else is trained.
    """
    kernels = _kernels(shapes)
    fusion = kernels.pop("fc/kernel")
    context = 2 * config.num_layers * config.num_kv_heads * config.head_dim * config.embed_dim
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * (length + block)
    # A pass back costs twice a pass; the target's output head has half of one.
    passes, of_output_head = (1, 1) if frozen else (3, 2)
    of_place = passes * (2 * sum(kernels.values()) + attention)
    of_logits = 2 * (of_output_head + reads_laws) * target.embed_dim * target.vocab_size
    of_logits += 6 * rank * target.vocab_size
    of_block = block * of_place + num_drafted * of_logits
    flops = 2 * passes * (fusion + context) + anchors / length * of_block
    return flops + target_share * _pass_flops_per_token(target, length)


def _kernels(shapes: PyTree) -> dict[str, int]:
    """Returns the number of weights of each kernel, by its path."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): math.prod(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
        if "kernel" in jax.tree_util.keystr(path)
    }


def _pass_flops_per_token(config: ModelConfig, length: int) -> float:
    """Returns the FLOPs of a token in a network's forward pass without its output head."""
    output_head = 6 * config.embed_dim * config.vocab_size
    return (flops_per_token(config, length) - output_head) / 3
