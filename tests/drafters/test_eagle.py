"""EAGLE drafting against recorded generations, draft by draft."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import GenerationConfig, generate
from jaxspec.checkpoint import Model, load_eagle
from jaxspec.core.loop import DecodePlan, decode, decode_stream
from jaxspec.core.masks import causal
from jaxspec.core.tree import EAGLE_PATHS, chain_paths, tree_from_parents
from jaxspec.core.types import Params
from jaxspec.drafters import Eagle, Eagle2
from tests.laws.test_drafters import free_request
from tests.models.test_eagle import first, golden, third  # noqa: F401  (fixtures)


def siblings(count: int) -> tuple[tuple[int, ...], ...]:
    return tuple((rank,) for rank in range(count))


CHAIN5 = chain_paths(5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_nodes": 9, "depth": 1, "beam": 2}, "num_nodes must be at most .* = 6, got 9"),
        ({"depth": 10**6}, "depth must be at most 4096, got 1000000"),
        ({"beam": 4096}, "beam: 4096 nodes of each of 5 levels give .* at most 1048576"),
    ],
)
def test_settings_of_dynamic_trees_that_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Eagle2(**settings)


@pytest.mark.parametrize("case", ["eagle1_mc_sim_7b_63/2", "chain5/2"])
def test_recorded_drafts_of_eagle1(golden, first, case):  # noqa: F811
    """The same tokens at every node, as many accepted, from the first step to the last."""
    recorded = json.loads((golden / "eagle1_generate_greedy.json").read_text())[case]
    target, folder = first
    paths = CHAIN5 if case.startswith("chain") else EAGLE_PATHS
    drafter = Eagle.of(load_eagle(folder, target), paths)
    # The reference lets the target choose a token before it drafts for the first time.
    start = len(recorded["prompt"]) + 1
    (row,) = generate(
        Model(target, None),
        recorded["output"][:start],
        GenerationConfig(max_new_tokens=len(recorded["output"]) - start + 8),
        drafter,
        return_trace=True,
    )
    assert row.tokens.tolist()[: len(recorded["output"]) - start] == recorded["output"][start:]
    for ours, theirs in zip(row.trace, recorded["steps"], strict=False):
        within = ours.valid  # the last step may be cut short by the budget
        assert ours.tokens[within].tolist() == np.array(theirs["tree_candidates"])[within].tolist()
        assert len(ours.path) - 1 == theirs["accept_length"]
    assert len(row.trace) >= len(recorded["steps"])


@pytest.mark.parametrize(
    ("file", "heads"), [("eagle2_generate_greedy", "first"), ("eagle3_generate_greedy", "third")]
)
def test_recorded_dynamic_trees(golden, request, file, heads):  # noqa: F811
    """The same tokens, in the same tree, as many accepted, in every step."""
    ((_, recorded),) = json.loads((golden / f"{file}.json").read_text()).items()
    target, folder = request.getfixturevalue(heads)
    drafter = Eagle2.of(
        load_eagle(folder, target),
        num_nodes=recorded["total_token"] - 1,
        depth=recorded["depth"],
        beam=recorded["top_k"],
    )
    start = len(recorded["prompt"]) + 1
    rest = recorded["output"][start:]
    # Room for a whole tree after the last recorded token, so that no step is cut short.
    config = GenerationConfig(max_new_tokens=len(rest) + recorded["depth"] + 2)
    (row,) = generate(
        Model(target, None), recorded["output"][:start], config, drafter, return_trace=True
    )
    assert row.tokens.tolist()[: len(rest)] == rest
    for ours, theirs in zip(row.trace, recorded["steps"], strict=False):
        assert ours.tokens.tolist() == theirs["draft_tokens"]
        ancestors = tree_from_parents(ours.parents.tolist()).ancestors
        assert ancestors.tolist() == np.array(theirs["tree_mask"], bool).tolist()
        assert len(ours.path) - 1 == theirs["accept_length"]
    assert len(row.trace) >= len(recorded["steps"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda head: Eagle.of(head, chain_paths(513)),
            "up to 513 tokens at once, and the context",
        ),
        (lambda head: Eagle.of(head, siblings(65)), "takes rank 64, but the head drafts from 64"),
        (lambda head: Eagle2.of(head, beam=65), "takes rank 64, but the head drafts from 64"),
    ],
)
def test_trees_too_large_for_the_head_are_refused(first, make, message):  # noqa: F811
    target, folder = first
    drafter = make(load_eagle(folder, target))
    with pytest.raises(ValueError, match=message):
        generate(Model(target, None), [1, 2, 3], GenerationConfig(4), drafter)


@pytest.mark.parametrize("heads", ["first", "third"])
def test_a_head_drafts_over_the_tree_beside_it(heads, tmp_path, request):
    target, folder = request.getfixturevalue(heads)
    without = load_eagle(folder, target)
    assert Eagle.of(without).drafter.paths == EAGLE_PATHS
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tree.json").write_text('{"paths": [[0], [0, 0]]}')
    head = load_eagle(tmp_path, target)
    assert Eagle.of(head).drafter == Eagle(((0,), (0, 0)), head.taps)
    assert Eagle.of(head, siblings(2)).drafter.paths == siblings(2)
    (tmp_path / "tree.json").write_text('{"paths": [[0], [0, 0]], "threshold": 0.3}')
    head = load_eagle(tmp_path, target)
    assert Eagle.of(head).drafter.threshold == 0.3
    assert Eagle.of(head, threshold=0.0).drafter.threshold == 0
    assert Eagle.of(head, siblings(2)).drafter.threshold == 0
    # Its tree makes no other program of what reads the head alone.
    assert jax.tree.structure(head) == jax.tree.structure(without)
    (tmp_path / "tree.json").write_text('{"paths": []}')
    with pytest.raises(ValueError, match="plain decoding is faster"):
        Eagle.of(load_eagle(tmp_path, target))
    (tmp_path / "tree.json").write_text("[[1]]")
    with pytest.raises(ValueError, match=r"tree\.json: .*rank 0 is not in the tree"):
        load_eagle(tmp_path, target)


# Two nodes of a level have children, and only the second has a child with children: the published
# program takes the rows of parents wrongly here, and its output stays the same, only accepted less.
LATE = ((0,), (1,), (0, 0), (1, 0), (0, 0, 0), (1, 0, 0), (1, 0, 0, 0))


def test_every_draft_follows_its_own_path(first):  # noqa: F811
    """The head run over the text and a node's path, without cache or tree, gives its children."""
    target, folder = first
    head, drafter = load_eagle(folder, target), Eagle(LATE)
    request, plan = free_request("greedy"), DecodePlan((64,), chunk=16)
    stream = decode_stream(
        Params(target, head), request.prompts, request.automaton, drafter=drafter, plan=plan
    )
    states, _ = next(stream)
    text = states.context.tokens[0, : int(states.context.length[0])]
    _, info = next(stream)
    drafted, tree = np.asarray(info.proposal.tokens[0]), drafter.tree
    hidden = target.forward(text, jnp.arange(len(text)), causal(len(text)), None)

    def ranked(path) -> list[int]:
        embedded = target.embed(jnp.concatenate([text[1:], jnp.asarray(path, jnp.int32)]))
        inputs = hidden.features[:-1]
        for _ in range(len(path) + 1):
            count = len(inputs)
            outputs = head.forward(
                embedded[:count], inputs, jnp.arange(count), causal(count), None
            ).features
            inputs = jnp.concatenate([inputs, outputs[-1:]])
        return np.argsort(-head.unembed(target, inputs[-1:])[0]).tolist()

    for parent in np.unique(tree.parents[1:]):
        best = ranked(drafted[tree.paths[parent, 1 : tree.depths[parent] + 1]])
        for child in np.flatnonzero(tree.parents == parent):
            if child:
                assert drafted[child] == best[tree.ranks[child]], drafter.paths[child - 1]


@pytest.mark.parametrize(
    ("heads", "make"),
    [
        ("first", lambda head: Eagle.of(head, LATE)),
        pytest.param("third", lambda head: Eagle.of(head, LATE), marks=pytest.mark.slow),
        pytest.param(
            "first",
            lambda head: Eagle2.of(head, num_nodes=6, depth=2, beam=2),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["eagle", "eagle 3", "eagle 2"],
)
def test_true_states_replace_predicted_ones(heads, make, request):
    """After any number of steps the head's cache is that of a fresh pass over the whole text."""
    target, folder = request.getfixturevalue(heads)
    head = load_eagle(folder, target)
    drafter = make(head).drafter
    asked, plan = free_request("greedy"), DecodePlan((64,), chunk=16)
    states = decode(
        Params(target, head), asked.prompts, asked.automaton, drafter=drafter, plan=plan
    )

    @jax.jit
    def fresh_pass(tokens):
        places = jnp.arange(len(tokens))
        hidden = target.forward(tokens, places, causal(len(tokens)), None, taps=head.taps)
        inputs = head.states_of(hidden.features, hidden.taps)[:-1]
        pairs = target.embed(tokens[1:]), inputs
        return head.forward(*pairs, places[:-1], causal(len(tokens) - 1), None).new_kv[0]

    for row in range(3):
        length = int(states.context.length[row])
        fresh = fresh_pass(states.context.tokens[row, :length])
        known = int(states.draft.cache.length[row])
        assert length - 1 - drafter.tree_shape[1] - 1 <= known < length
        kept = states.draft.cache.layers[0]
        np.testing.assert_allclose(kept.keys[row][..., :known], fresh.keys[..., :known], atol=1e-4)
        np.testing.assert_allclose(kept.values[row][:, :known], fresh.values[:, :known], atol=1e-4)
