"""Trees: what a person can check by eye, the laws of the arrays, and every error."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.core.checks import MOST_NODES
from jaxspec.core.tree import (
    EAGLE_PATHS,
    chain,
    eagle_tree,
    normalize_paths,
    traced_tree,
    tree_from_parents,
    tree_from_paths,
)

# Parents of up to 10 nodes: any earlier node will do.
parent_lists = st.integers(0, 9).flatmap(
    lambda nodes: st.tuples(st.just(-1), *(st.integers(0, node) for node in range(nodes)))
)


def test_a_small_tree_by_eye():
    #       0
    #     1   2
    #    3 4
    tree = tree_from_paths([(0,), (1,), (0, 0), (0, 1)])
    assert tree.parents.tolist() == [-1, 0, 0, 1, 1]
    assert tree.depths.tolist() == [0, 1, 1, 2, 2]
    assert tree.ranks.tolist() == [0, 0, 1, 0, 1]
    assert tree.paths.tolist() == [[0, -1, -1], [0, 1, -1], [0, 2, -1], [0, 1, 3], [0, 1, 4]]
    assert tree.children.tolist() == [[1, 2], [3, 4], [-1, -1], [-1, -1], [-1, -1]]
    assert tree.ancestors.astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_eagle_preset():
    tree = eagle_tree()
    assert len(tree.parents) - 1 == 25
    assert tree.paths.shape[1] - 1 == 5
    assert np.bincount(tree.depths).tolist() == [1, 4, 8, 8, 3, 2]


@pytest.mark.parametrize("num_nodes", [0, 1, 4])
def test_a_chain_has_no_branches(num_nodes):
    tree = chain(num_nodes)
    assert tree.parents.tolist() == list(range(-1, num_nodes))
    assert tree.depths.tolist() == list(range(num_nodes + 1))
    assert (tree.ancestors == np.tril(np.ones((num_nodes + 1, num_nodes + 1)))).all()
    assert tree.children.shape[1] == 1


@given(parent_lists)
def test_arrays_agree_with_the_parents(parents):
    tree = tree_from_parents(parents)
    children = [[] for _ in parents]
    for node, parent in enumerate(parents):
        path = [node]
        while path[0] != 0:
            path.insert(0, parents[path[0]])
        assert tree.depths[node] == len(path) - 1
        assert tree.paths[node, : len(path)].tolist() == path
        assert (tree.paths[node, len(path) :] == -1).all()
        assert np.flatnonzero(tree.ancestors[node]).tolist() == sorted(path)
        if node:
            assert tree.ranks[node] == len(children[parent])
            children[parent].append(node)
    for node, expected in enumerate(children):
        assert tree.children[node, : len(expected)].tolist() == expected
        assert (tree.children[node, len(expected) :] == -1).all()
    assert tree.paths.shape[1] == tree.depths.max() + 1


@given(st.permutations(EAGLE_PATHS))
def test_the_order_of_paths_does_not_matter(paths):
    assert normalize_paths(paths) == EAGLE_PATHS


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([(0,), (0,)], r"\[0\] is listed twice"),
        ([(0,), ()], "is the root"),
        ([(-1,)], r"\[-1\] has a negative rank"),
        ([(0, 0)], r"\[0, 0\] needs its parent \[0\]"),
        ([(0,), (2,)], r"\[2\] takes rank 2 of the root, but rank 1 is not"),
        ([(0,), (0, 1)], r"\[0, 1\] takes rank 1 of \[0\], but rank 0 is not"),
        (
            [[i] for i in range(20000)] + [[19999]],
            "paths must be of at most 4096 entries, got 20001",
        ),
        ([[0] * 10**6], r"paths\[0\] must be of at most 4096 entries, got 1000000"),
        ([[0] * 4096], r"^paths: \[0, 0[0, ]{,80}\.\.\. needs its parent \[0, [0, ]{,80}\.\.\.;"),
        ([[i] for i in range(4095)] + [[4094]], r"paths: \[4094\] is listed twice"),
        ("abc", "paths must be a sequence, got 'abc'"),
        (None, "paths must be a sequence, got None"),
        ([0, 1], r"paths\[0\] must be a sequence, got 0"),
        ([[0], [0.5]], r"paths\[1\]\[0\] must be a whole number, got 0.5"),
        ([[False]], r"paths\[0\]\[0\] must be a whole number, got False"),
        ([[10**5000]], r"paths\[0\]\[0\] must be below 2147483648"),
    ],
)
def test_paths_that_are_refused(paths, message):
    with pytest.raises(ValueError, match=message):
        normalize_paths(paths)


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([], "must be -1, the root"),
        ([0], "must be -1, the root"),
        ([-1, 1], "node 1 has parent 1.*earlier"),
        ([-1, 0, 3, 0], "node 2 has parent 3.*earlier"),
        ([-1, -1], "node 1 has parent -1.*earlier"),
        ([-1, 0.5, 1], r"parents\[1\] must be a whole number, got 0.5"),
        ([-1.7, 0], r"parents\[0\] must be a whole number, got -1.7"),
        ([-1, False, True], r"parents\[1\] must be a whole number, got False"),
        ([-1, math.nan], r"parents\[1\] must be a whole number, got nan"),
        ("abc", "parents must be a sequence, got 'abc'"),
        (None, "parents must be a sequence, got None"),
        (iter([-1, 0]), "parents must be a sequence, got <list_iterator"),
        ([[-1], [0]], r"parents\[0\] must be a whole number, got \[-1\]"),
        (np.array([[-1, 0]]), r"parents\[0\] must be a whole number, got \[-1, 0\]"),
        (np.array(-1), "parents must be a sequence, got -1"),
        ([-1] + [0] * 10**6, "parents must be of at most 4097 entries, got 1000001"),
        ([10**5000], r"parents\[0\] must be below 2147483648"),
    ],
)
def test_parents_that_are_refused(parents, message):
    with pytest.raises(ValueError, match=message):
        tree_from_parents(parents)


@pytest.mark.parametrize(
    "parents", [np.array([-1, 0, 0], np.int8), [-1.0, 0.0, 0.0], jnp.array([-1, 0, 0]), (-1, 0, 0)]
)
def test_parents_may_be_of_any_type_of_whole_numbers(parents):
    assert tree_from_parents(parents).parents.tolist() == [-1, 0, 0]


def test_the_largest_chain_has_as_many_nodes_as_masks_hold():
    assert len(chain(MOST_NODES).parents) == MOST_NODES + 1


@pytest.mark.parametrize(
    ("num_nodes", "message"),
    [
        (-1, "at least 0, got -1"),
        (10**6, "at most 4096, got 1000000"),
        (1.5, "a whole number, got 1.5"),
        (math.nan, "a whole number, got nan"),
        ("3", "a whole number, got '3'"),
        (True, "a whole number, got True"),
    ],
)
def test_chains_of_other_lengths_are_refused(num_nodes, message):
    with pytest.raises(ValueError, match=f"num_nodes must be {message}"):
        chain(num_nodes)


traced = jax.jit(traced_tree, static_argnums=(2, 3))


@pytest.mark.parametrize("seed", range(5))
def test_a_traced_tree_equals_the_static_one(seed):
    parents = random_parents(np.random.default_rng(seed), 10)
    static = tree_from_parents(parents.tolist())
    depth, branch = static.paths.shape[1] - 1, static.children.shape[1]
    dynamic = traced(jnp.asarray(parents), jnp.ones(10, bool), depth, branch)
    for name, expected, actual in zip(static._fields, static, dynamic, strict=True):
        np.testing.assert_array_equal(actual, expected, err_msg=name)


@pytest.mark.parametrize("seed", range(5))
def test_unused_nodes_of_a_traced_tree_leave_no_mark_on_the_others(seed):
    rng = np.random.default_rng(seed)
    parents = random_parents(rng, 12)
    valid = np.ones(12, bool)
    for node in range(1, 12):
        valid[node] = valid[parents[node]] and rng.random() < 0.7
    used = np.flatnonzero(valid)
    renumbered = {old: new for new, old in enumerate(used)} | {-1: -1}
    static = tree_from_parents([renumbered[parents[node]] for node in used])
    dynamic = jax.tree.map(np.asarray, traced(jnp.asarray(parents), jnp.asarray(valid), 11, 5))

    def renumber(nodes, width):
        assert (nodes[:, width:] == -1).all()
        return np.vectorize(renumbered.get)(nodes[:, :width])

    np.testing.assert_array_equal(dynamic.depths[used], static.depths)
    np.testing.assert_array_equal(dynamic.ranks[used], static.ranks)
    np.testing.assert_array_equal(dynamic.ancestors[np.ix_(used, used)], static.ancestors)
    np.testing.assert_array_equal(
        renumber(dynamic.paths[used], static.paths.shape[1]), static.paths
    )
    np.testing.assert_array_equal(
        renumber(dynamic.children[used], static.children.shape[1]), static.children
    )
    unused = set(range(12)) - set(used)
    assert not unused & set(dynamic.children.ravel().tolist())


def random_parents(rng: np.random.Generator, nodes: int) -> np.ndarray:
    """A random tree of at most 5 children per node, as a list of parents."""
    while True:
        parents = np.array([-1, *(rng.integers(0, node) for node in range(1, nodes))], np.int32)
        if np.bincount(parents[1:]).max() <= 5:
            return parents


def test_every_rank_closed_tree_of_three_nodes():
    """Counted by hand: chain, fork, fork then chain, chain then fork, three children."""
    ranks = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]
    accepted = 0
    for paths in itertools.combinations(ranks, 3):
        try:
            tree_from_paths(paths)
        except ValueError:
            continue
        accepted += 1
    assert accepted == 5
