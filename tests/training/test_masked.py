"""Diffusion training: what is hidden, what it weighs, who sees whom, and a run from end to end."""

import dataclasses
import itertools
import json
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.checkpoint import load
from jaxspec.core.masks import block_causal
from jaxspec.diffusion.process import LOWEST_SHARE, block_training_mask, mask_number, mask_share
from jaxspec.models import Diffusion, Experts, Network, init_params
from jaxspec.training.data import Sequences, pack
from jaxspec.training.lm import LMTrainer
from jaxspec.training.masked import MaskedTokens, MaskedTrainer, first_network, with_layers
from jaxspec.training.settings import (
    SMALL,
    LMTrainingSettings,
    MaskedTrainingSettings,
    OptimizerSettings,
    settings_from_json,
    settings_to_json,
)
from jaxspec.training.sources import LastRows, Source
from jaxspec.training.tokenizer import MASK, RESERVED
from jaxspec.training.train import train
from jaxspec.training.vocabulary import TrainingVocabulary, Turns
from tests.training.runs import CONFIG, QUIET, losses_in

MASK_ID = RESERVED.index(MASK)
TINY = CONFIG.replace(vocab_size=300)


def tiny(shift, block):
    return TINY.replace(diffusion=Diffusion(MASK_ID, shift, block))


def rows(*documents, length=24):
    return pack([np.asarray(document, np.int32) for document in documents], length)


@pytest.mark.parametrize("draw", [mask_share, mask_number])
def test_each_pattern_weighs_what_the_bound_says(draw):
    # The integral over t of t^k (1 - t)^(n - k) / t is (k - 1)! (n - k)! / n!.
    size, draws = 3, 60_000
    maskable = jnp.asarray([True, True, True, False])
    groups = jnp.zeros(4, jnp.int32)
    keys = jax.random.split(jax.random.key(0), draws)
    masked = jax.vmap(lambda key: draw(key, maskable, groups))(keys)
    hidden, weights = np.asarray(masked.hidden), np.asarray(masked.weights)
    assert not hidden[:, 3].any()
    np.testing.assert_array_equal(weights > 0, hidden)
    for pattern in itertools.product([False, True], repeat=size):
        number = sum(pattern)
        if not number:
            continue
        expected = math.factorial(number - 1) * math.factorial(size - number) / math.factorial(size)
        found = np.where((hidden[:, :3] == pattern).all(1), weights.max(1), 0.0)
        # Shares near 0 weigh much: the mean is that of few draws.
        assert abs(found.mean() - expected) < 5 * found.std() / math.sqrt(draws) + LOWEST_SHARE


def test_every_group_draws_for_itself():
    groups = jnp.repeat(jnp.arange(4), 8)
    maskable = jnp.arange(32) % 8 > 0
    masked = mask_number(jax.random.key(1), maskable, groups)
    for group in range(4):
        hidden = np.asarray(masked.hidden)[group * 8 : group * 8 + 8]
        weights = np.asarray(masked.weights)[group * 8 : group * 8 + 8]
        assert 1 <= hidden.sum() <= 7
        np.testing.assert_allclose(weights[hidden], 7 / hidden.sum())
    assert len({int(n) for n in np.asarray(masked.hidden).reshape(4, 8).sum(1)}) > 1


def test_the_mask_of_two_copies_is_the_recorded_one(recorded_folder):
    recorded = np.load(recorded_folder("diffusion", "bd3lm_train_mask.npz"))
    for name in recorded.files:
        places, block = map(int, re.findall(r"\d+", name))
        ours = block_training_mask(jnp.zeros(places, jnp.int32), jnp.arange(places) // block)
        np.testing.assert_array_equal(np.asarray(ours), recorded[name].astype(bool), err_msg=name)


@pytest.mark.parametrize("shift", [False, True])
def test_a_block_is_predicted_as_in_decoding(shift):
    """The pass over two copies says of a block what a pass over its canvas says."""
    block, config = 4, tiny(shift, 4)
    network = Network(init_params(config, jax.random.key(0)), config)
    tokens = np.random.default_rng(0).integers(20, 300, 16).astype(np.int32)
    batch = rows(tokens, length=16)
    objective = MaskedTokens(config, random_lengths=0.0)
    seen = objective._seen(
        network, *(jnp.asarray(field[0]) for field in batch[:3]), jax.random.key(3)
    )
    hidden = np.asarray(seen.masked.hidden)
    canvas = np.where(hidden, MASK_ID, tokens)
    for first in range(0, 16, block):
        upto = first + block
        text = np.concatenate([tokens[:first], canvas[first:upto]]).astype(np.int32)
        features = network.forward(
            text, np.arange(upto, dtype=np.int32), block_causal(upto, block), None
        ).features
        logits = np.asarray(network.unembed(features))
        for place in np.flatnonzero(hidden[first:upto]) + first:
            # Shifted, a block's first place is read off the block before, which is finished.
            said = logits[place - shift]
            np.testing.assert_allclose(np.asarray(seen.logits)[place], said, atol=2e-5)


@pytest.mark.parametrize("block", [None, 4])
def test_documents_of_one_row_do_not_see_each_other(block):
    config = tiny(True, block)
    network = Network(init_params(config, jax.random.key(0)), config)
    objective = MaskedTokens(config, random_lengths=0.0)

    def logits(second):
        # One row, the documents in this order.
        tokens = np.asarray([*range(20, 30), *second], np.int32)
        segments = np.asarray([1] * 10 + [2] * 6, np.int32)
        positions = np.asarray([*range(10), *range(6)], np.int32)
        seen = objective._seen(
            network, *map(jnp.asarray, (tokens, segments, positions)), jax.random.key(5)
        )
        return np.asarray(seen.logits)[1:10]

    np.testing.assert_allclose(logits(range(40, 46)), logits(range(90, 96)), atol=1e-6)


def test_fine_tuning_hides_answers_alone_and_counts_each_the_same():
    bos, eos, user, end, assistant = (
        RESERVED.index(name)
        for name in ("<|bos|>", "<|eos|>", "<|user|>", "<|end|>", "<|assistant|>")
    )
    short = [bos, user, 50, 51, end, assistant, 60, end, eos]
    long = [bos, user, 52, end, assistant, 61, 62, 63, 64, end, eos]
    tokens = jnp.asarray([*short, *long], jnp.int32)
    segments = jnp.asarray([1] * len(short) + [2] * len(long), jnp.int32)
    positions = jnp.asarray([*range(len(short)), *range(len(long))], jnp.int32)
    config = tiny(False, None)
    network = Network(init_params(config, jax.random.key(0)), config)
    marks = Turns(
        roles=(RESERVED.index("<|system|>"), user, assistant), assistant=assistant, end=end
    )
    objective = MaskedTokens(config, random_lengths=0.0, turns=marks, steady=True)
    seen = objective._seen(network, tokens, segments, positions, jax.random.key(0))
    answers = [6, 7, *(len(short) + place for place in (5, 6, 7, 8, 9))]
    assert np.flatnonzero(np.asarray(seen.maskable)).tolist() == answers

    batch = Sequences(*(np.asarray(field)[None] for field in (tokens, segments, positions)))
    key = jax.random.key(7)
    bound, _ = objective(network.params, batch, key)
    seen = objective._seen(network, tokens, segments, positions, jax.random.split(key, 1)[0])
    nats = (
        jax.nn.logsumexp(seen.logits, -1)
        - jnp.take_along_axis(seen.logits, tokens[:, None], 1)[:, 0]
    )
    summed = np.asarray(nats * seen.masked.weights)
    expected = (summed[: len(short)].sum() / 2 + summed[len(short) :].sum() / 5) / 2
    assert float(bound) == pytest.approx(expected, rel=1e-5)


def test_rows_are_cut_at_random_lengths():
    config = tiny(False, None)
    network = Network(init_params(config, jax.random.key(0)), config)
    batch = rows(range(20, 44))
    objective = MaskedTokens(config, random_lengths=1.0)
    sizes = {
        int(
            objective._seen(
                network, *(jnp.asarray(field[0]) for field in batch[:3]), jax.random.key(seed)
            ).maskable.sum()
        )
        for seed in range(6)
    }
    assert len(sizes) > 3


def test_a_bound_needs_a_diffusion_model():
    with pytest.raises(ValueError, match="diffusion"):
        MaskedTokens(TINY)


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    lines = [
        {"question": f"{a} and {b}?", "answer": f"{a + b}"} for a in range(9) for b in range(9)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Source("sums", str(path), template="{question} {answer}", split=LastRows(8))


@pytest.fixture(scope="module")
def causal_folder(sums, tmp_path_factory):
    folder = tmp_path_factory.mktemp("causal")
    settings = LMTrainingSettings(
        (sums,),
        TINY,
        num_steps=5,
        minutes=None,
        sequence_length=32,
        rows_per_batch=4,
        dtype="float32",
        optimizer=OptimizerSettings("adamw", learning_rate=0.01, warmup_steps=5),
    )
    train(LMTrainer(settings), folder / "state", folder / "out", console=QUIET)
    return str(folder / "out")


@pytest.fixture(scope="module")
def masked_settings(sums, causal_folder):
    return MaskedTrainingSettings(
        (sums,),
        block=4,
        start_from=causal_folder,
        layers=(1, 0),
        num_steps=40,
        minutes=None,
        sequence_length=32,
        rows_per_batch=4,
        dtype="float32",
        optimizer=OptimizerSettings("adamw", learning_rate=0.01, warmup_steps=5),
    )


def test_a_run_learns_and_its_folder_decodes(masked_settings, tmp_path):
    trained = train(
        MaskedTrainer(masked_settings), tmp_path / "state", tmp_path / "out", console=QUIET
    )
    diffusion = trained.result.config.diffusion
    assert diffusion == Diffusion(MASK_ID, shift=True, block=4)
    losses = losses_in(tmp_path / "state")
    assert losses[-1] < losses[0] - 0.5
    model = load(tmp_path / "out")
    assert model.config == trained.result.config
    result = jaxspec.denoise(
        model, "3 and 4?", jaxspec.DenoiseConfig(max_new_tokens=4, block_length=4)
    )
    assert MASK_ID not in result[0].tokens
    recipe = (tmp_path / "out/recipe.md").read_text()
    assert "its own block of 4 places" in recipe
    assert "upper bound" in recipe


def test_a_diffusion_model_learns_from_its_own_decisions(masked_settings, tmp_path):
    first = tmp_path / "first"
    train(
        MaskedTrainer(dataclasses.replace(masked_settings, num_steps=5)),
        tmp_path / "state",
        first,
        console=QUIET,
    )
    again = dataclasses.replace(
        masked_settings, start_from=str(first), teacher=str(first), own_text=40, num_steps=5
    )
    train(MaskedTrainer(again), tmp_path / "again", tmp_path / "out", console=QUIET)
    (path, _) = sorted((tmp_path / "again/own_text").iterdir())
    texts = [json.loads(line) for line in path.open()]
    prompts = [text["tokens"][: text["prompt_tokens"]] for text in texts]
    expected = jaxspec.denoise(load(first), prompts, jaxspec.DenoiseConfig(16, 4))
    for text, row in zip(texts, expected, strict=True):
        assert text["tokens"][text["prompt_tokens"] :] == row.tokens.tolist()
        assert text["temperature"] == 0


def test_settings_are_read_back(masked_settings):
    plain = json.loads(json.dumps(settings_to_json(masked_settings)))
    assert settings_from_json(plain, MaskedTrainingSettings) == masked_settings
    scratch = dataclasses.replace(
        masked_settings, start_from=None, layers=None, tokenizer="x", model=tiny(False, None)
    )
    plain = json.loads(json.dumps(settings_to_json(scratch)))
    assert settings_from_json(plain, MaskedTrainingSettings) == scratch


def test_layers_are_taken_in_the_order_asked_for(masked_settings, causal_folder):
    source = load(causal_folder, dtype="float32").network
    taken = first_network(
        masked_settings, TrainingVocabulary.of_model(load(causal_folder), "causal")
    )
    for new, old in ((0, 1), (1, 0)):
        jax.tree.map(
            np.testing.assert_array_equal,
            taken.params[f"layer_{new}"],
            source.params[f"layer_{old}"],
        )
    with pytest.raises(ValueError, match=r"layers must name some of the 2 layers"):
        with_layers(source, (0, 2), None)


def test_a_markov_head_is_left_behind():
    """It was trained for drafts; the loss of masked places does not read it."""
    config = tiny(False, None).replace(diffusion=Diffusion(1, rank=3))
    network = Network(init_params(config, jax.random.key(0)), config)
    taken = with_layers(network, None, Diffusion(1))
    assert set(network.params) - set(taken.params) == {"transitions"}


def test_layers_that_are_taken_stay_sparse_or_dense():
    experts = Experts(4, 2, 8, True, (True, False, True))
    config = tiny(False, None).replace(num_layers=3, layer_types=(), experts=experts)
    network = Network(init_params(config, jax.random.key(0)), config)
    taken = with_layers(network, (1, 2), None)
    assert taken.config.experts.layers == (False, True)
    shapes = jax.eval_shape(partial(init_params, taken.config), jax.random.key(0))
    assert jax.tree.structure(taken.params) == jax.tree.structure(shapes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"start_from": None, "layers": None}, "tokenizer is needed"),
        ({"own_text": 5}, "teacher and own_text go together"),
        ({"start_from": None, "tokenizer": "x"}, "layers are those of start_from"),
        ({"block": -1}, "block must be"),
        ({"model": SMALL.replace(mlp_dim=64)}, "mlp_dim: with start_from .* the shape is that of"),
        ({"random_lengths": 1.5}, "random_lengths must be"),
    ],
)
def test_wrong_settings_are_named(masked_settings, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(masked_settings, **changes)
