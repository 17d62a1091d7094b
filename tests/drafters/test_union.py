"""Lookup and a head in one proposal: who drafts, and what the head remembers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from jaxspec import DraftModel, GenerationConfig, generate
from jaxspec.checkpoint import Model, Tokenizer
from jaxspec.core.loop import decode_stream
from jaxspec.core.masks import causal
from jaxspec.core.types import Params
from jaxspec.drafters import Eagle, PromptLookup, SuffixLookup, TokenRecycling, Union
from jaxspec.drafters.union import UnionParams
from tests.laws.drafters import FORKED, corpus, eagle_head, network
from tests.laws.test_drafters import LENGTHS, ROOMS, free_request, growing_plan, target

DRAFTER = Union(Eagle(FORKED, chunk=8), SuffixLookup(4, max_ngram=6), min_match=6)
ROWS = [row for row, room in enumerate(ROOMS) if room > 1]


def test_who_drafts_and_what_the_head_remembers():
    """The chain where enough tokens match; the head's tree, of the text so far, elsewhere.

    Steps with a chain leave no gap in the head's cache.
    """
    head, asked = eagle_head(target()), free_request("greedy")
    params = Params(target(), UnionParams(corpus(target()), head))
    plan = growing_plan(DRAFTER)
    stream = decode_stream(params, asked.prompts, drafter=DRAFTER, plan=plan)
    texts = {row: asked.prompts.tokens[row, : LENGTHS[row]].tolist() for row in ROWS}
    lookup = jax.jit(lambda context: DRAFTER.lookup.look_up(params.draft.lookup, context))
    states, _ = next(stream)
    looked = {True: 0, False: 0}
    contexts = jax.device_get(states.context._replace(cache=()))
    for states, info in stream:
        info = jax.device_get(info)
        for row in ROWS:
            texts[row] += info.emitted[row, : info.count[row]].tolist()
            context = jax.tree.map(lambda leaf, row=row: leaf[row], contexts)
            if context.room < 2:
                continue
            chain, weight = lookup(context)
            looks = bool(weight >= 6)
            proposal = jax.tree.map(lambda leaf, row=row: leaf[row], info.proposal)
            parents = [-1, 0, 1, 2, 3, 0] if looks else [-1, *DRAFTER.head.tree.parents[1:]]
            assert proposal.tree.parents.tolist() == parents
            if looks:
                assert proposal.tokens[:5].tolist() == chain.tokens.tolist()
                expected = np.asarray(chain.valid) & (np.arange(5) < context.room)
                assert proposal.valid.tolist() == [*expected, False]
            looked[looks] += 1
        contexts = jax.device_get(states.context._replace(cache=()))
    assert min(looked.values()) > 10
    final = jax.device_get((states.context.length, states.draft.cache))
    for row in ROWS[:3]:
        tokens = jnp.array(texts[row])
        places = jnp.arange(len(tokens))
        hidden = target().forward(tokens, places, causal(len(tokens)), None)
        pairs = target().embed(tokens[1:]), hidden.features[:-1]
        fresh = head.forward(*pairs, places[:-1], causal(len(tokens) - 1), None).new_kv[0]
        length, cache = final
        known = int(cache.length[row])
        assert length[row] - 2 - DRAFTER.tree_shape[1] <= known < length[row]
        kept = cache.layers[0]
        np.testing.assert_allclose(kept.keys[row][..., :known], fresh.keys[..., :known], atol=1e-4)
        np.testing.assert_allclose(kept.values[row][:, :known], fresh.values[:, :known], atol=1e-4)


def test_weights_of_both_are_checked(model):
    config, head = GenerationConfig(max_new_tokens=4), Eagle(FORKED)
    of_larger = SuffixLookup.of([[1, 2, model.vocab_size]], Model(network(model.vocab_size + 1)))
    for drafter, message in (
        (Union.of(head), "an EAGLE drafter needs a head"),
        (Union.of(head, of_larger), f"corpus holds the id {model.vocab_size}"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(model, [1], config, drafter)


def test_both_drafters_are_of_one_tokenizer(model):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    others = dataclasses.replace(model, tokenizer=Tokenizer(backend))
    head, lookup = DraftModel.of(model), SuffixLookup.of([[1, 2]], model)
    assert Union.of(head, lookup).tokenizer is model.tokenizer
    assert Union.of(head).tokenizer is model.tokenizer
    with pytest.raises(ValueError, match="lookup: its tokenizer differs from that of head"):
        Union.of(head, SuffixLookup.of([[1, 2]], others))
    # A head without a tokenizer: it is the corpus that is of another target.
    config, lookup = GenerationConfig(max_new_tokens=4), SuffixLookup.of([[1, 2]], others)
    with pytest.raises(ValueError, match="encode the texts to look up with the target's"):
        generate(model, [1], config, Union.of(Eagle(FORKED), lookup))
    with pytest.raises(ValueError, match="use a draft model of the same family"):
        generate(model, [1], config, Union.of(DraftModel.of(others)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Union.of(TokenRecycling()), "head: TokenRecycling learns from the drafts that it"),
        (lambda: Union.of(Eagle(FORKED), PromptLookup()), "lookup must be a SuffixLookup, got Pro"),
        (lambda: Union.of(Eagle(FORKED), min_match=0), "min_match must be at least 1, got 0"),
    ],
)
def test_unions_that_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
