"""`check_model`: tests what a network computes against the laws of `core.types.LanguageModel`.

Every law compares two ways to the same logits. The passes are few and small, and most laws share
the program of one of them: a pass of `_WIDTH` tokens over a cache.
"""

import itertools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint import Model
from jaxspec.core.cache import append
from jaxspec.core.checks import Natural, checks_arguments
from jaxspec.core.masks import causal
from jaxspec.core.protocol import check_members, check_sizes
from jaxspec.core.tree import tree_from_parents
from jaxspec.core.types import KVCache, LanguageModel, LayerKV, Params, Tree
from jaxspec.decoding.check import DrafterReport, Law, run_laws
from jaxspec.sharding import on_mesh_of

# Nodes of the tree, its root included, and tokens of the text before it.
_PARENTS = (-1, 0, 0, 1, 2, 1)
_WIDTH = len(_PARENTS)
_CAPACITY = 2 * _WIDTH + 4
_LONGEST = 2 * _WIDTH
_SHIFTS = (1, 2, 3)
"""Added to a token's id to get another one."""
# Largest difference that counts as rounding, as a share of the largest logit, by bytes of a number.
_ROUNDING = {2: 5e-2, 4: 1e-4, 8: 1e-9}


class _Pass(NamedTuple):
    """Results of one pass; see `core.types.Hidden`."""

    logits: jax.Array
    features: jax.Array
    new_kv: tuple[LayerKV, ...]


class _Probe(NamedTuple):
    """A network and the texts that it is tested with.

    Attributes:
        text: `_WIDTH` ids, which the cache holds when a tree is read.
        tokens: ids of the tree's nodes; those of siblings differ.
        tree: of `_WIDTH` nodes.
        noise: a cache of length 0 whose places hold random numbers.
    """

    network: Any
    text: np.ndarray
    tokens: np.ndarray
    tree: Tree
    noise: KVCache

    @property
    def params(self) -> Params:
        """The network as its programs take it."""
        return Params(self.network, ())

    def read(self, tokens: Any, positions: Any, mask: Any, cache: Any, scratch: Any = None):
        """Returns the `_Pass` over tokens."""
        tokens, positions = (jnp.asarray(ids, jnp.int32) for ids in (tokens, positions))
        return _read(self.params, tokens, positions, jnp.asarray(mask, bool), cache, scratch)

    def cached(self) -> KVCache:
        """Returns a cache of `text`, with noise past its length."""
        read = self.read(self.text, np.arange(_WIDTH), causal(_WIDTH), self.noise)
        return append(self.noise, read.new_kv, _WIDTH)

    def read_tree(self, tokens: Any, cache: KVCache) -> _Pass:
        """Returns the pass over the tree, behind the text in the cache."""
        positions = cache.length + np.asarray(self.tree.depths)
        return self.read(tokens, positions, self.tree.ancestors, cache)

    def read_path(self, node: int, cache: KVCache) -> list[_Pass]:
        """Returns passes over the nodes from the root to `node`, each over those before it."""
        path = [each for each in np.asarray(self.tree.paths)[node].tolist() if each >= 0]
        passes = []
        for each in path:
            passes.append(self.read(self.tokens[[each]], cache.length[None], [[True]], cache))
            cache = append(cache, passes[-1].new_kv, 1)
        return passes


@checks_arguments
def check_model(
    model: "Model | LanguageModel", *, seed: Natural = 0, progress: bool = True
) -> DrafterReport:
    """Tests a model against the laws that every `jaxspec.core.types.LanguageModel` must obey.

    - Members and sizes are those of the protocol. The other laws need this one.
    - A text read over a cache gives the logits of the same text read at once.
    - A pass over a tree equals passes over its nodes, one by one.
    - Positions are those given: equal siblings are scored alike.
    - What a token does not see (by `mask`, or past the cache's length) changes nothing.
    - Keys and values in `scratch` count as those in the cache.
    - A pass writes nothing: weights and cache stay, and the same pass gives the same again.
    - Rows do not influence each other, under `jax.vmap`.

    Args:
        model: a model, or a network alone.
        seed: seed of the texts.
        progress: show a bar where standard error is a terminal.

    Returns:
        A report; `report.raise_if_broken()` turns it into a test.

    Raises:
        ValueError: the network lacks a member of the protocol or is no pytree of arrays, or the
            model's texts are too short to test it.

    Example:
        >>> import jaxspec
        >>> print(jaxspec.check_model(jaxspec.load("demo-draft")))  # doctest: +ELLIPSIS
        ok      members and sizes are those of the protocol ...
        >>> jaxspec.check_model(object())  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: network: object has no `vocab_size`; it must be the number of ids that it ...
    """
    network: Any = model.network if isinstance(model, Model) else model
    check_members(network)
    if isinstance(model, Model) and model.max_positions < _LONGEST:
        raise ValueError(
            f"model: {model.name} holds texts of {model.max_positions} tokens, and the laws read "
            f"{_LONGEST}; give a larger max_positions."
        )
    sizes: dict[str, Law] = {
        "members and sizes are those of the protocol": partial(_sizes_fit, network)
    }
    checks = run_laws(sizes, False)
    if not checks[0].holds:
        return DrafterReport(checks, "model")
    probe = _probe(network, seed)
    laws: dict[str, Law] = {
        "a cached text equals one read at once": partial(_cache_is_text, probe),
        "a pass over a tree equals passes one by one": partial(_tree_is_its_paths, probe),
        "positions are those given": partial(_positions_are_given, probe),
        "what is not seen changes nothing": partial(_masks_are_honoured, probe),
        "scratch counts as the cache": partial(_scratch_is_cache, probe),
        "a pass writes nothing": partial(_nothing_is_written, probe),
        "rows do not influence each other": partial(_rows_are_alone, probe, seed),
    }
    with (
        on_mesh_of(network),
        # Accelerators round factors to fewer bits by default, which would hide a small fault.
        jax.default_matmul_precision("highest"),
    ):
        checks += run_laws(laws, progress)
    return DrafterReport(checks, "model")


def _pass(params: Params, tokens, positions, mask, cache, scratch) -> _Pass:
    network = params.target
    hidden = network.forward(tokens, positions, mask, cache, scratch=scratch)
    return _Pass(network.unembed(hidden.features), hidden.features, hidden.new_kv)


_read = jax.jit(_pass)


@jax.jit
def _read_rows(params: Params, tokens, positions, masks, caches) -> _Pass:
    row = partial(_read, params, scratch=None)
    return jax.vmap(row)(tokens, positions, masks, caches)


def _probe(network: Any, seed: int) -> _Probe:
    rng = np.random.default_rng(seed)
    vocab = network.vocab_size
    text, tokens = rng.integers(0, vocab, (2, _WIDTH))
    tree = tree_from_parents(_PARENTS)
    # Siblings are different tokens, as far as there are any.
    tokens[2], tokens[5] = (tokens[1] + 1) % vocab, (tokens[3] + 1) % vocab

    def filled(array: Any) -> jax.Array:
        return jnp.asarray(3.0 * rng.standard_normal(array.shape)).astype(array.dtype)

    cache = network.empty_cache(_CAPACITY)
    noise = KVCache(jax.tree.map(filled, cache.layers), jnp.zeros_like(cache.length))
    return _Probe(network, text, tokens, tree, noise)


def _gap(ours: _Pass, expected: _Pass, nodes: Any, others: Any) -> tuple[float, int]:
    """Returns the largest difference of logits as a share of the largest one, and its node.

    Args:
        ours: the pass in question.
        expected: the pass to compare with.
        nodes: of `ours`.
        others: the same nodes in `expected`.
    """
    found, right = (
        np.asarray(each.logits, np.float64)[np.asarray(which)]
        for each, which in ((ours, nodes), (expected, others))
    )
    if not (np.isfinite(found).all() and np.isfinite(right).all()):
        bad = ~np.isfinite(found).all(axis=1) | ~np.isfinite(right).all(axis=1)
        return float("inf"), int(np.argmax(bad))
    each = np.abs(found - right).max(axis=1) / max(np.abs(right).max(), np.finfo(np.float32).tiny)
    return float(each.max()), int(np.argmax(each))


def _rounding(read: _Pass) -> float:
    return _ROUNDING.get(read.features.dtype.itemsize, _ROUNDING[2])


def _outcome(gap: float, read: _Pass, seen: str, fault: str) -> tuple[bool, str]:
    if not np.isfinite(gap):
        return False, f"logits are not finite: {fault}"
    if gap > _rounding(read):
        return False, f"logits differ by {gap:.2g} of the largest: {fault}"
    return True, f"{seen}; they differ by {gap:.1g} of the largest logit at most"


def _sizes_fit(network: Any) -> tuple[bool, str]:
    try:
        check_sizes(network)
    except ValueError as error:
        return False, str(error)
    layers = len(jax.eval_shape(lambda network: network.empty_cache(1), network).layers)
    return True, f"vocabulary {network.vocab_size}, width {network.embed_dim}, {layers} layers"


def _cache_is_text(probe: _Probe) -> tuple[bool, str]:
    both = np.concatenate([probe.text, probe.tokens])
    at_once = probe.read(both, np.arange(2 * _WIDTH), causal(2 * _WIDTH), None)
    places = np.arange(_WIDTH)
    first = probe.read(probe.text, places, causal(_WIDTH), probe.noise)
    gap, place = _gap(first, at_once, places, places)
    if gap > _rounding(first):
        fault = f"token {place} over an empty cache (length 0); places past `cache.length` and "
        return _outcome(gap, first, "", fault + "tokens that `mask` leaves out are not to be seen")
    second = probe.read(probe.tokens, _WIDTH + places, causal(_WIDTH), probe.cached())
    gap, place = _gap(second, at_once, places, _WIDTH + places)
    fault = f"token {_WIDTH + place} over a cache of {_WIDTH}; is the prefix seen up to "
    fault += "`cache.length`, and are `positions` and `mask` used?"
    return _outcome(gap, second, f"{2 * _WIDTH} tokens", fault)


def _tree_is_its_paths(probe: _Probe) -> tuple[bool, str]:
    cache = probe.cached()
    tree = probe.read_tree(probe.tokens, cache)
    worst = (0.0, 0)
    for node in range(_WIDTH):
        alone = probe.read_path(node, cache)[-1]
        worst = max(worst, (_gap(tree, alone, [node], [0])[0], node))
    fault = (
        f"node {worst[1]}, at depth {int(probe.tree.depths[worst[1]])}; a node sees what its row "
    )
    fault += "of `mask` says, at its own entry of `positions`"
    return _outcome(worst[0], tree, f"{_WIDTH} nodes, depth {probe.tree.paths.shape[1] - 1}", fault)


def _positions_are_given(probe: _Probe) -> tuple[bool, str]:
    tokens = probe.tokens.copy()
    tokens[2] = tokens[1]
    tree = probe.read_tree(tokens, probe.cached())
    gap, _ = _gap(tree, tree, [2], [1])
    fault = "two equal siblings, in places 1 and 2 of the pass; read `positions`, not places"
    return _outcome(gap, tree, "two equal siblings", fault)


def _masks_are_honoured(probe: _Probe) -> tuple[bool, str]:
    cache = probe.cached()
    before = probe.read_tree(probe.tokens, cache)
    ancestors, vocab = np.asarray(probe.tree.ancestors), probe.network.vocab_size
    # Attention may hardly look at one token, so each node changes, several times.
    for node, shift in itertools.product(range(1, _WIDTH), _SHIFTS):
        tokens = probe.tokens.copy()
        tokens[node] = (tokens[node] + shift) % vocab
        unseeing = np.flatnonzero(~ancestors[:, node])
        gap, index = _gap(probe.read_tree(tokens, cache), before, unseeing, unseeing)
        if gap > _rounding(before):
            fault = f"node {unseeing[index]}, after another token took the place of node {node}, "
            return _outcome(gap, before, "", fault + "which `mask` does not let it see")
    past = np.arange(_CAPACITY) >= _WIDTH
    noisy = KVCache(
        tuple(
            LayerKV(
                jnp.where(past[None, None, :], -layer.keys, layer.keys),
                jnp.where(past[None, :, None], -layer.values, layer.values),
            )
            for layer in cache.layers
        ),
        cache.length,
    )
    gap, place = _gap(probe.read_tree(probe.tokens, noisy), before, range(_WIDTH), range(_WIDTH))
    fault = f"node {place}, after other numbers came into places of the cache past `cache.length`"
    return _outcome(gap, before, "unseen nodes and places past the length changed", fault)


def _scratch_is_cache(probe: _Probe) -> tuple[bool, str]:
    cache = probe.cached()
    depths = np.asarray(probe.tree.depths)
    num_earlier, worst = int(depths.max()), 0.0
    # The first place of scratch is not seen. Attention may hardly look at one noise, so try a few.
    mask = [[False] + [True] * (num_earlier + 1)]
    for node in np.flatnonzero(depths == num_earlier).tolist():
        *earlier, alone = probe.read_path(node, cache)
        for place, sign in itertools.product(range(_WIDTH // 2), (1, -1)):
            unseen = tuple(
                LayerKV(
                    sign * layer.keys[:, :, place : place + 1],
                    sign * layer.values[:, place : place + 1],
                )
                for layer in probe.noise.layers
            )
            scratch = tuple(
                LayerKV(
                    jnp.concatenate([each.keys for each in layer], axis=2),
                    jnp.concatenate([each.values for each in layer], axis=1),
                )
                for layer in zip(unseen, *(each.new_kv for each in earlier), strict=True)
            )
            position = cache.length[None] + num_earlier
            read = probe.read(probe.tokens[[node]], position, mask, cache, scratch)
            worst = max(worst, _gap(read, alone, [0], [0])[0])
    seen = f"{num_earlier} places of scratch, one more not seen"
    fault = (
        f"a token over {seen}; `mask` names places of scratch first, then the tokens of the pass"
    )
    return _outcome(worst, probe.read_tree(probe.tokens, cache), seen, fault)


def _nothing_is_written(probe: _Probe) -> tuple[bool, str]:
    cache = probe.cached()
    leaves = jax.tree.leaves((probe.network, cache))
    kept = [np.array(leaf) for leaf in jax.tree.leaves(cache)]
    positions = (cache.length + np.asarray(probe.tree.depths)).astype(jnp.int32)
    arguments = (jnp.asarray(probe.tokens, jnp.int32), positions, jnp.asarray(probe.tree.ancestors))
    # Not compiled: a compiled pass is given copies, and what it writes there is lost.
    first = _pass(probe.params, *arguments, cache, None)
    again = _pass(probe.params, *arguments, cache, None)
    now = jax.tree.leaves((probe.network, cache))
    if len(now) != len(leaves) or any(a is not b for a, b in zip(now, leaves, strict=True)):
        return False, "the network or the cache holds other arrays after a pass"
    if not all(map(np.array_equal, kept, jax.tree.leaves(cache))):
        return False, "the cache holds other numbers after a pass; return them in `new_kv`"
    if not all(map(np.array_equal, jax.tree.leaves(first), jax.tree.leaves(again))):
        return False, "the same pass gives another result the second time"
    return True, "weights and cache are as before, the same pass gives the same"


def _rows_are_alone(probe: _Probe, seed: int) -> tuple[bool, str]:
    cache = probe.cached()
    shorter = cache._replace(length=jnp.full_like(cache.length, 2))
    other = np.random.default_rng((seed, 1)).integers(0, probe.network.vocab_size, _WIDTH)
    ancestors = np.asarray(probe.tree.ancestors)
    rows = [
        (probe.tokens, _WIDTH + np.asarray(probe.tree.depths), ancestors, cache),
        (other, 2 + np.arange(_WIDTH), np.asarray(causal(_WIDTH)), shorter),
    ]
    tokens, positions, masks, caches = (
        jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *parts)
        for parts in zip(*rows, strict=True)
    )
    ids = (tokens.astype(jnp.int32), positions.astype(jnp.int32))
    together = _read_rows(probe.params, *ids, masks, caches)
    worst, of_row = 0.0, 0
    for index, row in enumerate(rows):
        alone = probe.read(*row)
        mine = jax.tree.map(lambda leaf, index=index: leaf[index], together)
        gap, _ = _gap(mine, alone, range(_WIDTH), range(_WIDTH))
        worst, of_row = max((worst, of_row), (gap, index))
    fault = f"row {of_row} of two that jax.vmap reads together"
    return _outcome(worst, together, "two rows of different lengths, under jax.vmap", fault)
