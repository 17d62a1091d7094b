"""Draft models with another vocabulary than their target's."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxspec import DraftModel, GenerationConfig, Model, generate
from jaxspec.drafters.loaded import OtherTargetError
from jaxspec.drafters.vocabularies import shared_tokens
from jaxspec.models import ModelConfig, Network, init_params
from tests.foreign import LIKE, like_llama2, like_llama3


def model_of(name: str, seed: int) -> Model:
    tokenizer = LIKE[name]()
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size + 8,
        embed_dim=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        mlp_dim=16,
        max_positions=96,
    )
    network = Network(init_params(config, jax.random.key(seed)), config)
    return Model(network, tokenizer, name, (tokenizer.eos_id,))


@pytest.fixture(scope="module")
def target() -> Model:
    return model_of("llama3", 0)


@pytest.fixture(scope="module")
def draft() -> Model:
    return model_of("llama2", 1)


def test_tokens_of_the_same_bytes_are_shared(target, draft):
    ours, theirs = like_llama3(), like_llama2()
    both = shared_tokens(draft, target)
    for text in ("a", " ", "3"):
        here = ours.encode(text, special_tokens=False)[-1]
        assert both.shared[here]
        there = int(both.ids[here])
        assert theirs.token_bytes()[there] == text.encode()
        assert not theirs.backend.id_to_token(there).startswith("<0x")  # as text is really read
    assert both.shared[ours.bos_id]
    assert both.ids[ours.bos_id] == theirs.bos_id
    assert both.ids[ours.eos_id] == theirs.eos_id
    # "and" with its space is one token here and four there: the longest ending is read for it.
    whole = ours.token_id("Ġand")
    assert not both.shared[whole]
    assert theirs.token_bytes()[int(both.ids[whole])] == b"d"
    assert not both.shared[ours.vocab_size :].any()


def test_logits_are_those_of_the_draft_model_in_the_targets_ids(target, draft):
    both = shared_tokens(draft, target)
    features = jax.random.normal(jax.random.key(0), (2, 16))
    logits = np.asarray(both.unembed(features))
    own = np.asarray(draft.network.unembed(features))
    shared = np.asarray(both.shared)
    np.testing.assert_array_equal(logits[:, shared], own[:, np.asarray(both.ids)[shared]])
    assert (logits[:, ~shared] < -1e8).all()


@pytest.mark.parametrize("options", [{}, {"paths": ((0,), (1,), (0, 0))}])
def test_outputs_stay_the_targets(target, draft, options):
    drafter = DraftModel.of(draft, target=target, **options)
    config = GenerationConfig(max_new_tokens=24)
    plain = generate(target, ["3 and 4", "12"], config)
    fast = generate(target, ["3 and 4", "12"], config, drafter)
    assert [row.tokens.tolist() for row in fast] == [row.tokens.tolist() for row in plain]
    # Settings may leave nothing that both have: then drafts are wrong and the text is right.
    alone = [int(np.flatnonzero(~np.asarray(drafter.params.shared))[0]), 3]
    banned = GenerationConfig(max_new_tokens=8, allowed_token_ids=alone[:1], temperature=0.8)
    only = generate(target, "3", banned, drafter)
    assert only[0].tokens.tolist() == [alone[0]] * 8


def test_a_draft_model_that_is_the_target_is_always_right(target):
    drafter = DraftModel.of(target, 3, target=target)
    result = generate(target, "3 and 4", GenerationConfig(max_new_tokens=24), drafter)
    plain = generate(target, "3 and 4", GenerationConfig(max_new_tokens=24))
    assert result[0].tokens.tolist() == plain[0].tokens.tolist()
    # Ids past the tokenizer's are never emitted, and the others are all shared.
    assert np.asarray(drafter.params.shared)[plain[0].tokens].all()
    assert result.metrics.mean_accepted_tokens > 2.5  # the last step's room ends its draft


def test_what_cannot_draft_is_named(target, draft):
    with pytest.raises(OtherTargetError, match=r"DraftModel.of\(draft, target=model\)"):
        generate(target, "3", drafter=DraftModel.of(draft))
    nameless = dataclasses.replace(draft, tokenizer=None)
    with pytest.raises(OtherTargetError, match="llama2 has no tokenizer"):
        DraftModel.of(nameless, target=target)
