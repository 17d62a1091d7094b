"""The exact output law of a verifier, measured on the function itself.

A verifier may use its uniforms in one way only: node i stands when `uniforms[i]` lies below a
threshold, and the emitted token grows with `uniforms[0]`. So bisection on the function finds every
threshold to the last bit of a float64, and the probability of a verdict is a product of cell
widths. No rule of rejection sampling is written down here: a wrong rule is measured as faithfully
as a right one. That verdicts really are constant on the cells, and that no uniform decides twice,
is checked at their corners.

Summed over every draft with its exact probability, this gives the law of the emitted text.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core.types import Proposal, Tree, Verdict

ALMOST_ONE = 1 - 2.0**-53  # the largest uniform there is
BISECTIONS = 54
CORNERS = 6
INSET = 1e-14  # how far from a cell's edge its corner is probed: past rounding errors
NARROW = 1e-9  # cells below this width are not probed

# Decides from uniforms in [0, 1), one per node, a proposal and logits.
VerifyFn = Callable[[jax.Array, Proposal, jax.Array], Verdict]
# laws[d][prefix] is the law of the token that follows a prefix of d tokens.
Laws = Sequence[np.ndarray]


class Drafts(NamedTuple):
    """Every draft that may happen. The first axis counts drafts.

    probability: of each draft; 1 for each of several deterministic ones, judged one by one.
    """

    tokens: np.ndarray
    valid: np.ndarray
    probability: np.ndarray


class Measured(NamedTuple):
    """Outcomes of one draft. The first axis counts the ways to end: at each node.

    weights: probability that verification ends at the node.
    emitted: law of the emitted token there.
    consistent: at all the corners of the cell the verdict was the one expected there.
    """

    weights: jax.Array
    emitted: jax.Array
    consistent: jax.Array


def sampled_drafts(
    tree: Tree, laws: Laws, valid: Callable[[np.ndarray], np.ndarray] | None = None
) -> Drafts:
    """Every draw of a tree's tokens, siblings without replacement, with its probability.

    Where a law runs out of tokens, unused ones stand in, as fillers of probability zero do.

    Args:
        tree: a static tree.
        laws: the drafter's.
        valid: tokens to valid nodes; all of them by default.
    """
    vocab, nodes = laws[0].shape[-1], len(tree.parents)
    tokens = np.array([(0, *rest) for rest in itertools.product(range(vocab), repeat=nodes - 1)])
    for node, earlier in itertools.combinations(range(nodes - 1, 0, -1), 2):
        if tree.parents[node] == tree.parents[earlier]:
            tokens = tokens[tokens[:, node] != tokens[:, earlier]]
    probability = np.ones(len(tokens))
    rows = np.arange(len(tokens))
    for node in range(1, nodes):
        parent = tree.parents[node]
        left = laws_at(tree, laws, tokens, [parent])[:, 0].copy()
        unused = np.ones_like(left)
        for sibling in range(1, node):
            if tree.parents[sibling] == parent:
                left[rows, tokens[:, sibling]] = 0
                unused[rows, tokens[:, sibling]] = 0
        left = np.where(left.sum(1, keepdims=True) > 0, left, unused)
        probability *= left[rows, tokens[:, node]] / left.sum(1)
    used = np.array(np.broadcast_to(True if valid is None else valid(tokens), tokens.shape))
    used[:, 0] = True
    return Drafts(tokens, used, probability)


def laws_at(tree: Tree, laws: Laws, tokens: np.ndarray, nodes: Iterable[int]) -> np.ndarray:
    """The laws of what follows each of `nodes`: [drafts, nodes, vocab]."""
    paths = [tree.paths[node, 1 : tree.depths[node] + 1] for node in nodes]
    found = [laws[len(path)][tuple(tokens[:, path].T)] for path in paths]
    shape = (len(tokens), laws[0].shape[-1])
    return np.stack([np.broadcast_to(law, shape) for law in found], axis=1)


def measure(
    verify: VerifyFn, tree: Tree, proposal: Proposal, target_logits: jax.Array, key: jax.Array
) -> Measured:
    """Measures `verify` on one draft of a static tree. `key` picks the corners to probe."""
    nodes, vocab = target_logits.shape
    on_path, tried = _walks(tree)

    def holds(question: _Question, uniform: jax.Array) -> jax.Array:
        uniforms = question.others.at[question.varied].set(uniform)
        verdict = verify(uniforms, proposal, target_logits)
        stands = jnp.any(verdict.path == question.varied)
        return jnp.where(question.varied > 0, stands, verdict.next_token <= question.token)

    # One question for each node: its ancestors accepted, is it? And one for each end of the walk
    # and each token: is the emitted token at most this one?
    node, (last, token) = np.arange(1, nodes), np.mgrid[:nodes, : vocab - 1].reshape(2, -1)
    reached = jnp.concatenate([on_path[node], on_path[last]])
    questions = _Question(
        others=jnp.where(reached, 0.0, ALMOST_ONE),
        varied=jnp.concatenate([node, np.zeros_like(last)]),
        token=jnp.concatenate([np.zeros_like(node), token]),
    )
    answers = jax.vmap(lambda question: _bisect(partial(holds, question)))(questions)
    thresholds = jnp.pad(answers[: nodes - 1], (1, 0))
    steps = answers[nodes - 1 :].reshape(nodes, vocab - 1)
    steps = jnp.pad(steps, ((0, 0), (0, 1)), constant_values=1.0)

    # `steps[last, token]`: probability that the token emitted after `last` is at most `token`.
    rejected = tried & ~on_path
    low = jnp.where(rejected, thresholds[None, :], 0.0)
    high = jnp.where(on_path, thresholds[None, :], 1.0).at[:, 0].set(1.0)
    weights = jnp.prod(high - low, axis=1)

    def agrees(last: jax.Array, key: jax.Array) -> jax.Array:
        """The verdict somewhere in the cell of the walk to `last`, mostly in a corner, fits."""
        where_key, inside_key = jax.random.split(key)
        inside = jax.random.uniform(inside_key, (nodes,))
        corner = jax.random.randint(where_key, (nodes,), 0, 3)
        between = low[last] + inside * (high - low)[last]
        edges = jnp.where(corner == 0, low[last] + INSET, high[last] - INSET)
        uniforms = jnp.where(corner < 2, edges, between).at[0].set(inside[0])
        verdict = verify(uniforms, proposal, target_logits)
        return (
            jnp.all(verdict.path == jnp.asarray(tree.paths)[last])
            & (verdict.num_emitted == jnp.asarray(tree.depths)[last] + 1)
            & (verdict.next_token == jnp.sum(steps[last] <= uniforms[0]))
        )

    keys = jax.random.split(key, (nodes, CORNERS))
    fits = jax.vmap(jax.vmap(agrees, (None, 0)))(jnp.arange(nodes), keys)
    narrow = jnp.min(high - low, axis=1) < NARROW
    return Measured(weights, jnp.diff(steps, axis=1, prepend=0.0), jnp.all(fits, axis=1) | narrow)


def law_of_emitted(
    verify: VerifyFn, uniforms: jax.Array, proposal: Proposal, target_logits: jax.Array
) -> jax.Array:
    """Law of the emitted token, entry 0 of the uniforms left open and the others given."""

    def at_most(token: jax.Array) -> jax.Array:
        def holds(uniform):
            return verify(uniforms.at[0].set(uniform), proposal, target_logits).next_token <= token

        return _bisect(holds)

    steps = jax.vmap(at_most)(jnp.arange(target_logits.shape[-1] - 1))
    return jnp.diff(steps, prepend=0.0, append=1.0)


class _Question(NamedTuple):
    """A question: the value of one uniform at which a predicate turns, the others being given."""

    others: jax.Array
    varied: jax.Array
    token: jax.Array


def _walks(tree: Tree) -> tuple[jax.Array, jax.Array]:
    """For an end at each node: which nodes are accepted, and which are looked at on the way."""
    nodes = len(tree.parents)
    on_path = np.array(tree.ancestors)
    on_path[:, 0] = False  # the root is given
    tried = np.zeros((nodes, nodes), bool)
    for last, other in itertools.product(range(nodes), range(1, nodes)):
        rivals = [n for n in range(1, nodes) if on_path[last, n] and n >= other]
        same_parent = [n for n in rivals if tree.parents[n] == tree.parents[other]]
        tried[last, other] = bool(same_parent) or tree.parents[other] == last
    return jnp.asarray(on_path), jnp.asarray(tried)


def _bisect(holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Finds the point at which a predicate over [0, 1) turns from true to false."""

    def halve(_, ends):
        low, high = ends
        middle = (low + high) / 2
        good = holds(middle)
        return jnp.where(good, middle, low), jnp.where(good, high, middle)

    return jax.lax.fori_loop(0, BISECTIONS, halve, (jnp.float64(0), jnp.float64(1)))[1]


def emitted_law(tree: Tree, drafts: Drafts, measured: Measured, target: Laws) -> np.ndarray:
    """Joint law of the first depth + 1 tokens of the text.

    Where fewer were emitted, the target's own autoregressive law continues.
    """
    length = tree.paths.shape[1]
    vocab = target[0].shape[-1]
    joint = np.zeros((vocab,) * length)
    weights, emitted = np.asarray(measured.weights), np.asarray(measured.emitted)
    for last in range(len(tree.parents)):
        path = tree.paths[last, 1 : tree.depths[last] + 1]
        mass = np.zeros((vocab,) * (len(path) + 1))
        share = (drafts.probability * weights[:, last])[:, None] * emitted[:, last]
        np.add.at(mass, tuple(drafts.tokens[:, path].T), share if len(path) else share.sum(0))
        for depth in range(len(path) + 1, length):
            mass = mass[..., None] * target[depth]
        joint += mass
    return joint


def autoregressive_law(target: Laws) -> np.ndarray:
    """Joint law of one token from each table."""
    joint = np.ones(())
    for law in target:
        joint = joint[..., None] * law
    return joint
