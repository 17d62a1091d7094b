"""Block regeneration: what a drafter writes alone, checked block by block."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import Model, PromptLookup, regenerate, score
from jaxspec.core.masks import bidirectional, block_causal
from jaxspec.drafters import Deer, LoadedDrafter
from tests.laws.drafters import diffuser, network

VOCAB, PROMPT = 24, [3, 7, 1, 19, 4]
MASK = VOCAB - 1


@pytest.fixture(scope="module")
def model():
    return Model(network(VOCAB), name="tiny")


def one_block(draft, text: list[int], block: int) -> list[int]:
    """The likeliest tokens of a masked block behind a text, from one pass over all of it."""
    own = draft.config.diffusion.block
    end = len(text) + block
    slots = end if own is None else -(-end // own) * own
    tokens = jnp.array([*text, *[MASK] * (slots - len(text))])
    seen = bidirectional(slots) if own is None else block_causal(slots, own)
    hidden = draft.forward(tokens, jnp.arange(slots), seen, None)
    first = len(text) - 1  # outputs are shifted
    logits = np.array(draft.unembed(hidden.features[first : first + block]))
    logits[:, MASK] = -np.inf
    return logits.argmax(-1).tolist()


@pytest.mark.parametrize(("own", "cache"), [(4, None), (None, "none")])
def test_blocks_follow_each_other(model, own, cache):
    draft = diffuser(model.network, own)
    found = regenerate(model, LoadedDrafter(Deer(3, cache=cache), draft), PROMPT, 8)
    text = list(PROMPT)
    for block in found.blocks:
        expected = one_block(draft, text, 3)
        assert block.tolist() == expected
        text += expected
    assert len(found.blocks) == 3
    said = score(model, text).logprobs[len(PROMPT) - 1 :]
    assert found.logprob == pytest.approx(said.mean(), abs=1e-5)
    # Greedily the target thinks better of its own tokens, but for where a greedy path leads.
    own_said = score(model, [*PROMPT, *found.target_tokens]).logprobs[len(PROMPT) - 1 :]
    assert found.target_logprob == pytest.approx(own_said.mean(), abs=1e-4)


def test_a_stop_id_ends_the_text(model):
    draft = diffuser(model.network, 4)
    drafter = LoadedDrafter(Deer(3), draft)
    free = regenerate(model, drafter, PROMPT, 9)
    stop = int(free.tokens[4])
    stopping = Model(model.network, name="tiny", stop_token_ids=(stop,))
    found = regenerate(stopping, drafter, PROMPT, 9)
    first = free.tokens.tolist().index(stop)
    assert found.tokens.tolist() == free.tokens[: first + 1].tolist()


def test_what_cannot_write_alone_is_refused(model):
    draft = diffuser(model.network, 4)
    for drafter in (
        LoadedDrafter(PromptLookup(), ()),
        LoadedDrafter(Deer(3, num_nodes=3), draft),
    ):
        with pytest.raises(ValueError, match="can write by itself"):
            regenerate(model, drafter, PROMPT)
    with pytest.raises(ValueError, match="at least 1"):
        regenerate(model, LoadedDrafter(Deer(3), draft), PROMPT, 0)
    with pytest.raises(ValueError, match="do not fit"):
        regenerate(model, LoadedDrafter(Deer(3), draft), PROMPT, 510)
