"""Token recycling against a loop in plain Python."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import GenerationConfig, TokenRecycling, generate
from jaxspec.checkpoint import Model
from jaxspec.core.decode import Prompt, begin
from jaxspec.core.loop import decode_stream, plan_decoding
from jaxspec.core.masks import causal
from jaxspec.core.types import Context, Hidden, KVCache, Params, Recent, Warp
from tests.core.table_model import TableModel
from tests.laws.drafters import PATHS
from tests.laws.test_drafters import BUDGET, LENGTHS, ROOMS, free_request, growing_plan, target

TREE = TokenRecycling(((0,), (1,), (0, 0), (1, 0)))  # 1 and 2 below the root, 3 and 4 below those


def test_a_table_by_eye():
    """After 0 come 1 and 2; after 1: 2, 3; after 2: 3, 0; after 3: 0, 1. The prompt is 0, 1, 2."""
    order = np.array([[1, 2, 0, 3], [2, 3, 0, 1], [3, 0, 1, 2], [0, 1, 2, 3]])
    logits = np.zeros((4, 4), np.float32)
    np.put_along_axis(logits, order, np.array([[9.0, 5.0, 1.0, 0.0]]), axis=1)
    prompts = Prompt(
        tokens=jnp.array([[0, 1, 2, 0]]),
        length=jnp.array([3]),
        room=jnp.array([20]),
        seed=jnp.zeros((1, 2), jnp.int32),
        stop_ids=jnp.full((1, 1), -1),
        warp=Warp(),
    )
    params = Params(TableModel(jnp.asarray(logits)), ())
    stream = decode_stream(params, prompts, drafter=TREE, plan=plan_decoding(4, 20, TREE))
    states, _ = next(stream)
    assert states.draft.table[0].tolist() == [[1, 2], [2, 3], [-1, -1], [-1, -1]]

    states, info = next(stream)  # nothing is known yet of the pending token, 2
    assert info.proposal.valid[0].tolist() == [True, False, False, False, False]
    assert info.emitted[0, : info.count[0]].tolist() == [3]

    states, info = next(stream)  # nor of 3, but now of 2
    assert states.draft.table[0].tolist() == [[1, 2], [2, 3], [3, 0], [-1, -1]]
    assert info.emitted[0, : info.count[0]].tolist() == [0]

    states, info = next(stream)
    assert states.draft.table[0].tolist() == [[1, 2], [2, 3], [3, 0], [0, 1]]
    assert info.proposal.tokens[0].tolist() == [0, 1, 2, 2, 3]
    assert info.proposal.valid[0].all()
    assert info.emitted[0, : info.count[0]].tolist() == [1, 2, 3]


@jax.jit
def scores(network, sequences, places):
    """The target's logits after a place of each sequence."""

    def one(tokens, place):
        count = tokens.shape[0]
        hidden = network.forward(tokens, jnp.arange(count), causal(count), None)
        return network.unembed(hidden.features[place][None])[0]

    return jax.vmap(one)(sequences, places)


def likeliest(texts: list[list[int]], branch: int) -> list[list[int]]:
    """The target's likeliest tokens after each text."""
    size = 64
    padded = np.array([text + [0] * (size - len(text)) for text in texts])
    logits = np.asarray(scores(target(), padded, np.array([len(text) - 1 for text in texts])))
    return np.argsort(-logits, axis=1)[:, :branch].tolist()


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_drafts_equal_a_plain_loop(mode):
    """Rows of all lengths and budgets; rejected nodes fill the table, too."""
    asked, drafter = free_request(mode), TokenRecycling(PATHS)
    tree, branch = drafter.tree, 2
    rows = [row for row, room in enumerate(ROOMS) if room > 0]
    texts = {row: asked.prompts.tokens[row, : LENGTHS[row]].tolist() for row in rows}
    tables = {}
    for row, text in texts.items():
        heads = [text[: end + 1] for end in range(len(text) - 1)]
        found = likeliest(heads, branch) if heads else []
        tables[row] = dict(zip(text[:-1], found, strict=True))
    stream = decode_stream(
        Params(target(), ()), asked.prompts, drafter=drafter, plan=growing_plan(drafter)
    )
    next(stream)
    num_drafted = num_steps = 0
    for _, info in stream:
        info = jax.device_get(info)
        for row in rows:
            text, room = texts[row], LENGTHS[row] + ROOMS[row] - len(texts[row])
            if room == 0:
                continue
            paths, expected = {0: [text[-1]]}, {0: text[-1]}
            for node in range(1, len(tree.parents)):
                parent, rank = int(tree.parents[node]), int(tree.ranks[node])
                known = tables[row].get(expected.get(parent))
                if known is not None and tree.depths[node] < room:
                    expected[node] = known[rank]
                    paths[node] = [*paths[parent], known[rank]]
            valid = info.proposal.valid[row]
            assert np.flatnonzero(valid).tolist() == list(expected)
            assert info.proposal.tokens[row][valid].tolist() == list(expected.values())
            found = likeliest([text[:-1] + path for path in paths.values()], branch)
            tables[row] |= dict(zip(expected.values(), found, strict=True))
            texts[row] = text + info.emitted[row, : info.count[row]].tolist()
            num_drafted += len(expected) - 1
            num_steps += 1
    assert num_drafted > 2 * num_steps
    assert len(texts[0]) == LENGTHS[0] + BUDGET


def test_a_long_prompt_is_read_in_parts():
    """Prompts that end before, at and after the end of a part; a token's last place counts."""
    bucket, vocab, lengths = 100, 12, [1, 2, 64, 65, 66, 100]
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab, (len(lengths), bucket)).astype(np.int32)
    logits = rng.normal(size=(len(lengths), bucket, vocab)).astype(np.float32)
    nothing = jnp.zeros((1, 0))
    params = Params(TableModel(jnp.zeros((vocab, vocab))), ())

    def init(tokens, length, logits):
        context = Context(
            tokens=tokens,
            length=length,
            room=jnp.int32(9),
            stop_ids=jnp.array([-1]),
            warp=Warp(),
            cache=KVCache((), length - 1),
            recent=Recent(jnp.zeros(1, jnp.int32), nothing, nothing, jnp.int32(0)),
        )
        hidden = Hidden(logits, jnp.zeros((bucket, 0)), ())  # the features of a `TableModel`
        return TREE.init(params, hidden, context).table

    tables = jax.vmap(init)(jnp.asarray(tokens), jnp.array(lengths), jnp.asarray(logits))
    for row, length in enumerate(lengths):
        expected = np.full((vocab, 2), -1)
        for place in range(length - 1):
            expected[tokens[row, place]] = np.argsort(-logits[row, place])[:2]
        assert tables[row].tolist() == expected.tolist()


def test_banned_tokens_are_not_drafted():
    """Only two tokens are allowed, and they are drafted."""
    config = GenerationConfig(12, allowed_token_ids=(3, 5))
    (row,) = generate(Model(target()), [3, 5, 3], config, TREE, return_trace=True)
    drafted = {int(token) for step in row.trace for token in step.tokens[step.valid]}
    assert drafted == {3, 5}
    assert row.metrics.tau > 1


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ((), "paths: a tree without a node drafts nothing"),
        (((1,),), r"paths: \[1\] takes rank 1 of the root, but rank 0 is not in the tree"),
    ],
)
def test_trees_that_are_refused(paths, message):
    with pytest.raises(ValueError, match=message):
        TokenRecycling(paths)


def test_a_tree_wider_than_the_vocabulary_is_refused():
    model = Model(target())
    drafter = TokenRecycling(tuple((rank,) for rank in range(model.config.vocab_size + 1)))
    with pytest.raises(ValueError, match="more children than the target has tokens, 24; got 25"):
        generate(model, [1], GenerationConfig(4), drafter)


@pytest.mark.slow  # as users compile: without optimisations XLA takes another way
@pytest.mark.parametrize("bucket", [64, 128])
def test_reading_a_prompt_sorts_nothing(bucket):
    """A sort of whole rows of logits takes thirty times as long as the choice of a few tokens."""
    drafter, params = TokenRecycling(), Params(target(), ())
    tokens = jnp.zeros((len(LENGTHS), bucket), jnp.int32)
    prompts = free_request("greedy").prompts._replace(tokens=tokens)
    read = partial(begin, params, drafter=drafter, text_capacity=bucket + 8, chunk=bucket)
    text = jax.jit(jax.vmap(read)).lower(prompts).compile().as_text()
    assert " sort(" not in text
