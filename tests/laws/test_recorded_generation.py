"""Generation from recorded checkpoints: the tokens, round by round, that `transformers` gave."""

import dataclasses
import json
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import DraftModel, GenerationConfig, Model, PromptLookup, generate, load
from jaxspec.models import Network

PLAIN = GenerationConfig(max_new_tokens=24, logprobs=True)
DRAFTED = GenerationConfig(max_new_tokens=24)


class Recorded(NamedTuple):
    """A checkpoint and what was recorded with it."""

    model: Model
    arrays: dict[str, np.ndarray]
    outcomes: dict

    @property
    def prompt(self) -> list[int]:
        return self.arrays["greedy_prompt"][0].tolist()


@pytest.fixture(scope="module", params=["llama_gqa_dev", "qwen3_dev"])
def recorded(request, recorded_folder) -> Recorded:
    folder = recorded_folder("checkpoints", request.param)
    return Recorded(
        load(folder, dtype=jnp.float32),
        dict(np.load(folder / "oracle.npz")),
        json.loads((folder / "oracle.json").read_text()),
    )


def drafted(recorded: Recorded, method: str):
    """The drafter that a recording was made with."""
    if method == "prompt_lookup":
        return PromptLookup(num_speculative_tokens=4, max_ngram=2)
    return DraftModel.of(Model(first_layers(recorded.model.network, 2)), 4)


def first_layers(network: Network, count: int) -> Network:
    """The same network without its last layers."""
    config = network.config
    gone = {f"layer_{i}" for i in range(count, config.num_layers)}
    params = {name: part for name, part in network.params.items() if name not in gone}
    layer_types = config.layer_types[:count]
    return Network(params, config.replace(num_layers=count, layer_types=layer_types))


def test_greedy_tokens_and_their_logprobs(recorded):
    (row,) = generate(recorded.model, recorded.prompt, PLAIN)
    assert row.tokens.tolist() == recorded.arrays["greedy_tokens"].tolist()
    np.testing.assert_allclose(row.logprobs, recorded.arrays["greedy_logprobs"], atol=2e-4)
    assert row.finish_reason == "length"


@pytest.mark.parametrize("method", ["prompt_lookup", "assisted"])
def test_rounds_of_speculative_decoding(recorded, method):
    """The same drafts offered, as many accepted, as many target passes."""
    (row,) = generate(
        recorded.model, recorded.prompt, DRAFTED, drafted(recorded, method), return_trace=True
    )
    assert row.tokens.tolist() == recorded.arrays["greedy_tokens"].tolist()
    outcome = recorded.outcomes[method]
    length = len(recorded.prompt)
    rounds = []
    for step in row.trace:
        candidates = step.tokens[step.valid][1:].tolist()
        rounds.append((length, candidates, len(step.path) - 1))
        length += len(step.emitted)
    # Tokens that could not be emitted are recorded as candidates; they are never offered here.
    assert rounds == [
        (one["prefix_len"], one["candidates"][: length - one["prefix_len"] - 1], one["accepted"])
        for one in outcome["rounds"]
    ]
    assert row.metrics.num_verify_steps == outcome["target_calls"]


@pytest.mark.parametrize("method", [None, "prompt_lookup", "assisted"])
def test_generation_ends_with_the_recorded_stop(recorded, method):
    case = recorded.outcomes["stop_case"]
    # As many ids as the model has of its own: the programs of the other tests serve here too.
    stop_ids = (case["eos_token_id"],) * len(recorded.model.stop_token_ids)
    if method is None:
        config = dataclasses.replace(PLAIN, stop_token_ids=stop_ids)
        (row,) = generate(recorded.model, recorded.prompt, config)
    else:
        config = dataclasses.replace(DRAFTED, stop_token_ids=stop_ids)
        drafter = drafted(recorded, method)
        (row,) = generate(recorded.model, recorded.prompt, config, drafter, return_trace=True)
    assert row.tokens.tolist() == case["tokens"]
    assert row.finish_reason == "stop_token"


def test_prompts_of_different_lengths_share_a_batch(recorded):
    """The recording pads the second prompt on the left; its first token is the unpadded one's."""
    mask = recorded.arrays["batch_attention_mask"].astype(bool)
    prompts = [
        row[seen].tolist()
        for row, seen in zip(recorded.arrays["batch_input_ids"], mask, strict=True)
    ]
    assert len(prompts[0]) != len(prompts[1])
    together = generate(recorded.model, prompts, PLAIN)
    logits = recorded.arrays["batch_last_logits"].astype(np.float64)
    for row, prompt, scores in zip(together, prompts, logits, strict=True):
        assert row.tokens[0] == np.argmax(scores)
        expected = -np.log(np.exp(scores - scores.max()).sum())
        np.testing.assert_allclose(row.logprobs[0], expected, atol=2e-4)
        (alone,) = generate(recorded.model, prompt, PLAIN)
        assert alone.tokens.tolist() == row.tokens.tolist()
