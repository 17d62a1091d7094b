"""Every drafting method under test: ONE table. A new method adds a row, and obeys every law."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core.types import Drafter, PyTree
from jaxspec.drafters import (
    AdaptiveBlock,
    Deer,
    DFlash,
    DraftModel,
    Eagle,
    Eagle2,
    LayerSkip,
    NoDraft,
    PromptLookup,
    SuffixLookup,
    TokenRecycling,
    Union,
)
from jaxspec.drafters.corpus import SortedTexts, corpus_of
from jaxspec.drafters.union import UnionParams
from jaxspec.drafters.vocabularies import SharedTokens
from jaxspec.models import (
    Convolution,
    DFlashHead,
    DFlashParts,
    Diffusion,
    DraftVocabulary,
    Eagle3Head,
    EagleHead,
    ModelConfig,
    Network,
    Skips,
    init_dflash_params,
    init_eagle3_params,
    init_eagle_params,
    init_params,
)
from jaxspec.models.dflash import NO_MORE
from jaxspec.models.storage import widened


class Case(NamedTuple):
    """One drafting method.

    make: builds the drafter afresh: equal settings, another object.
    draft: its weights, made to fit a target well enough that some drafts are accepted.
    slow: its laws are marked so: a method much like another row's.
    """

    make: Callable[[], Drafter]
    draft: Callable[[Network], PyTree] = lambda target: ()
    slow: bool = False


def network(vocab_size: int, seed: int = 0, **settings) -> Network:
    """A small random network, confident enough to repeat itself now and then."""
    config = ModelConfig(
        vocab_size=vocab_size,
        embed_dim=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_dim=32,
        max_positions=512,
        **settings,
    )
    return Network(init_params(config, jax.random.key(seed)), config)


def blurred(target: Network, size: float = 0.05) -> Network:
    """The target with noise on its weights: a draft model that is right most of the time."""
    leaves, structure = jax.tree.flatten(widened(target).params)
    keys = jax.random.split(jax.random.key(99), len(leaves))
    noisy = [
        leaf + size * jnp.std(leaf) * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return Network(jax.tree.unflatten(structure, noisy), target.config)


def eagle_head(target: Network) -> EagleHead:
    """A random head over all tokens but the first: its drafts are accepted by chance."""
    config = target.config.replace(
        num_layers=1, layer_types=("full",), sliding_window=None, qk_norm=False
    )
    ids = jnp.arange(1, target.vocab_size)
    params = init_eagle_params(config, True, jax.random.key(3))
    return EagleHead(params, config, True, DraftVocabulary.of(target, ids))


def eagle3_head(target: Network, tap_norms: int = 0, **settings: bool) -> Eagle3Head:
    """A random head that reads two of the target's layers."""
    config = target.config.replace(
        num_layers=1, layer_types=("full",), sliding_window=None, qk_norm=False
    )
    params = init_eagle3_params(config, 2 * target.embed_dim, jax.random.key(4), tap_norms)
    return Eagle3Head(params, config, (0, 1), target.vocab_size, **settings)


def eagle31_head(target: Network) -> Eagle3Head:
    """A random head that norms each of those layers, and the state that it hands on."""
    return eagle3_head(target, tap_norms=2, norm_output=True)


def diffuser(target: Network, block: int | None, shift: bool = True, rank: int = 0) -> Network:
    """The target's weights as a diffusion model, whose mask is the last token.

    It predicts the token after the pending one as the target does, except that it sees masks too.
    With a rank it has a random Markov head.
    """
    diffusion = Diffusion(target.vocab_size - 1, shift, block, rank=rank)
    full = ("full",) * target.num_layers
    config = target.config.replace(layer_types=full, sliding_window=None, diffusion=diffusion)
    if not rank:
        return Network(target.params, config)
    random = init_params(config, jax.random.key(8))["transitions"]
    return Network({**target.params, "transitions": random}, config)


def dflash_head(
    target: Network, parts: DFlashParts = NO_MORE, seed: int = 6, **settings
) -> DFlashHead:
    """A random head over one layer's inputs."""
    full = ("full",) * target.num_layers
    config = target.config.replace(layer_types=full, sliding_window=None, qk_norm=True)
    params = init_dflash_params(config, target.embed_dim, jax.random.key(seed), parts)
    return DFlashHead(params, config, (1,), target.vocab_size - 1, 4, **settings)


def dspark_head(target: Network) -> DFlashHead:
    """A random head whose laws and lengths depend on the token before."""
    parts = DFlashParts(rank=4, confidence=target.embed_dim + 4)
    return dflash_head(target, parts, 7, anchor_predicts=True)


def dflash2_head(target: Network) -> DFlashHead:
    """A random head with convolutions, and a selector among three tokens."""
    head = dflash_head(target, DFlashParts(Convolution(2, 4), 4, gated=True), likeliest=3)
    # Convolutions are identities at first.
    noise = jax.random.normal(jax.random.key(7), (64,))
    params = jax.tree.map(lambda leaf: leaf + 0.3 * jnp.resize(noise, leaf.shape), head.params)
    return dataclasses.replace(head, params=params)


def of_another_vocabulary(target: Network) -> SharedTokens:
    """A blurred target whose ids are in reversed order, and which lacks the first two tokens."""
    network, vocab = blurred(target), target.vocab_size
    ids = jnp.arange(vocab)[::-1]
    table = network.params["embed"]["embedding"][ids]
    head = {"head": {"kernel": network.params["head"]["kernel"][:, ids]}}
    changed = {**network.params, "embed": {"embedding": table}, **head}
    shared = jnp.arange(vocab) > 1
    return SharedTokens(Network(changed, network.config), ids, shared)


def corpus(target: Network) -> SortedTexts:
    """Random texts, whose ends are found by chance."""
    rng = np.random.default_rng(7)
    return corpus_of([rng.integers(0, target.vocab_size, size) for size in (40, 1, 90)], reach=6)


PATHS = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
# Its second node has children and its first has none: rows of a level's pass are not its nodes.
FORKED = ((0,), (1,), (1, 0), (1, 1), (1, 1, 0))

PLAIN = Case(NoDraft)

DRAFTERS: dict[str, Case] = {
    "lookup": Case(lambda: PromptLookup(num_speculative_tokens=3)),
    "suffix lookup": Case(lambda: SuffixLookup(4, max_ngram=6), corpus),
    "suffix lookup, own text": Case(lambda: SuffixLookup(3), slow=True),
    "union": Case(
        lambda: Union(Eagle(FORKED, chunk=8), SuffixLookup(5, max_ngram=6), min_match=6),
        lambda target: UnionParams(corpus(target), eagle_head(target)),
    ),
    "token recycling": Case(lambda: TokenRecycling(FORKED)),
    "draft model, chain": Case(lambda: DraftModel(num_speculative_tokens=3), blurred),
    "draft model, early exit": Case(lambda: DraftModel(3, threshold=0.1), blurred),
    "draft model, tree": Case(lambda: DraftModel(paths=PATHS), blurred),
    "draft model, another vocabulary": Case(
        lambda: DraftModel(num_speculative_tokens=3), of_another_vocabulary
    ),
    "eagle, part of the vocabulary": Case(lambda: Eagle(FORKED, chunk=8), eagle_head),
    "layer skip": Case(lambda: LayerSkip(Skips((False, True), (False, False)), 3, threshold=0.2)),
    "layer skip, any set": Case(
        lambda: LayerSkip(None, 3, threshold=0.2),
        lambda target: Skips(jnp.array([0.0, 0.0]), jnp.array([0.0, 1.0])),
        slow=True,
    ),
    "deer": Case(lambda: Deer(3), lambda target: diffuser(target, 4)),
    "deer, adaptive": Case(
        lambda: Deer(3, adaptive=AdaptiveBlock(token_cost=0.4, explore=2, patience=4)),
        lambda target: diffuser(target, 4),
    ),
    "deer, both sides": Case(lambda: Deer(3), lambda target: diffuser(target, None)),
    "deer, tree": Case(lambda: Deer(3, PATHS), lambda target: diffuser(target, 2), slow=True),
    "deer, dynamic tree": Case(
        lambda: Deer(3, num_nodes=6, branch=3), lambda target: diffuser(target, 4)
    ),
    "deer, two passes": Case(
        lambda: Deer(4, steps=2, sep_token_id=1), lambda target: diffuser(target, 4), slow=True
    ),
    "deer, own places, nothing kept": Case(
        lambda: Deer(3, temperature=0.0, sep_token_id=1, cache="none"),
        lambda target: diffuser(target, None, shift=False),
        slow=True,
    ),
    "deer, Markov head": Case(lambda: Deer(3), lambda target: diffuser(target, 4, rank=4)),
    "deer, Markov head, dynamic tree": Case(
        lambda: Deer(3, num_nodes=6, branch=3, adaptive=AdaptiveBlock(explore=1, patience=2)),
        lambda target: diffuser(target, 4, rank=4),
        slow=True,
    ),
    "dflash": Case(lambda: DFlash(3, taps=(1,)), dflash_head),
    "dflash, dynamic tree": Case(
        lambda: DFlash(3, num_nodes=6, taps=(1,), adaptive=AdaptiveBlock(explore=1, patience=2)),
        dflash_head,
        slow=True,
    ),
    "dspark": Case(lambda: DFlash(3, taps=(1,), confidence=0.3), dspark_head),
    "dspark, tree": Case(
        lambda: DFlash(4, FORKED, taps=(1,), confidence=0.3), dspark_head, slow=True
    ),
    "dflash 2": Case(lambda: DFlash(3, FORKED, taps=(1,)), dflash2_head),
    "dflash 2, adaptive": Case(
        lambda: DFlash(3, taps=(1,), adaptive=AdaptiveBlock(explore=1, patience=2)),
        dflash2_head,
        slow=True,
    ),
    "dflash 2, dynamic tree": Case(
        lambda: DFlash(3, num_nodes=6, branch=3, taps=(1,)), dflash2_head, slow=True
    ),
    "eagle 2": Case(lambda: Eagle2(num_nodes=6, depth=2, beam=2), eagle_head, slow=True),
    "eagle, early exit": Case(
        lambda: Eagle(((0,), (0, 0), (0, 0, 0)), threshold=0.05), eagle_head, slow=True
    ),
    "eagle 3": Case(lambda: Eagle(FORKED, taps=(0, 1)), eagle3_head, slow=True),
    "eagle 3.1": Case(lambda: Eagle(FORKED, taps=(0, 1)), eagle31_head, slow=True),
}


def marked(cases: dict[str, Case]) -> list:
    """Their names, to parametrize by."""
    return [
        pytest.param(name, marks=pytest.mark.slow) if case.slow else name
        for name, case in cases.items()
    ]
