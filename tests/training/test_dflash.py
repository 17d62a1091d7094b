"""DFlash heads: what a block is trained on is what the drafter does; a run from end to end."""

import argparse
import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint import load, load_dflash
from jaxspec.commands import train_dflash as dflash_command
from jaxspec.core.forms import exchanged
from jaxspec.core.masks import causal
from jaxspec.core.types import Context, Params, Recent, Warp
from jaxspec.decoding.generate import generate
from jaxspec.decoding.request import GenerationConfig
from jaxspec.drafters import DFlash
from jaxspec.models import (
    Convolution,
    DFlashParts,
    Diffusion,
    ModelConfig,
    Network,
    init_dflash_params,
    param_shapes,
)
from jaxspec.training.data import Sequences, pack_answers
from jaxspec.training.dflash import AnchoredBlocks, DFlashTrainer, layers_config
from jaxspec.training.efficiency import block_flops_per_token
from jaxspec.training.settings import (
    DECODING,
    OWN_TEXT,
    TAU,
    DFlashTrainingSettings,
    settings_from_json,
    settings_to_json,
)
from jaxspec.training.target import Observed, head_config, target_states
from jaxspec.training.tokenizer import MASK, RESERVED
from jaxspec.training.train import train
from tests.training.runs import (
    CONFIG,
    DRAFTING,
    QUIET,
    assert_a_killed_run_ends_with_the_same_bits,
    assert_stored_in_bfloat16,
    losses_in,
    write_model,
    write_sums,
)

MASK_ID = RESERVED.index(MASK)
LENGTH, BLOCK = 24, 5


# The objective


@pytest.fixture(scope="module")
def target(tiny_network):
    return tiny_network


def objective_for(target, **changes) -> AnchoredBlocks:
    values = {"taps": (1, 0), "mask_token_id": MASK_ID, "block": BLOCK, "anchors": 6, "gamma": 2.0}
    return AnchoredBlocks(layers_config(target.config, 2, 24), **{**values, **changes})


@pytest.fixture(scope="module")
def params(target):
    return init_dflash_params(objective_for(target).config, 64, jax.random.key(7))


@pytest.fixture(scope="module")
def answers():
    """Four texts in rows of 24 places, two of them in one row; one prompt is a single token."""
    rng = np.random.default_rng(0)
    sizes, prompts = (22, 11, 9, 17), (6, 4, 1, 12)
    texts = [rng.integers(10, 90, size).astype(np.int32) for size in sizes]
    packed = pack_answers(texts, prompts, LENGTH)
    assert len(packed.tokens) == 3
    return packed


def row_of(answers: Sequences, index: int) -> Sequences:
    return jax.tree.map(lambda field: jnp.asarray(field[index]), answers)


@jax.jit
def drafted(target: Network, head, text, length):
    """The laws of a block that the drafter itself states behind the first `length` tokens."""
    drafter, places = DFlash(head.num_drafted, taps=head.taps), len(text)
    read = target.forward(text, jnp.arange(places), causal(places), None, taps=head.taps)
    nothing = jnp.zeros((head.block, head.params["fc"]["kernel"].shape[0]))
    recent = Recent(jnp.zeros(head.block, jnp.int32), nothing[:, :0], nothing, jnp.int32(0))
    warp = Warp(temperature=jnp.float32(1.0))
    stop_ids, cache = jnp.array([-1]), target.empty_cache(1)
    context = Context(text, length, jnp.int32(99), stop_ids, warp, cache, recent)
    pair = Params(target, head)
    state = drafter.init(pair, read, context)
    return drafter.propose(pair, jax.random.key(0), state, context)[0].draft_logprobs


@jax.jit
def laws_of(target: Network, text):
    """The target's laws of the token after each of a text."""
    places = len(text)
    read = target.forward(text, jnp.arange(places), causal(places), None)
    return jax.nn.softmax(target.unembed(read.features))


@pytest.mark.parametrize("rank", [0, 3], ids=["alone", "markov"])
def test_the_loss_is_that_of_drafting_from_one_anchor_at_a_time(target, answers, rank):
    objective, key = objective_for(target, anchor_predicts=rank > 0), jax.random.key(3)
    parts = DFlashParts(rank=rank)
    params = init_dflash_params(objective.config, 64, jax.random.key(7), parts)
    loss, metrics = jax.jit(objective)(params, Observed(answers, target), key)
    matched = dataclasses.replace(objective, loss="overlap")
    loss_of_laws, shown = jax.jit(matched)(params, Observed(answers, target), key)
    head = objective.head(params, target)
    of_laws, overlaps = 0.0, np.zeros(head.num_drafted)
    tables = params.pop("transitions", None)
    alone = objective.head(params, target)
    total = weight = nats = tokens = 0.0
    hits, places = np.zeros(head.num_drafted), np.zeros(head.num_drafted)
    for index, row_key in enumerate(jax.random.split(key, len(answers.tokens))):
        row = row_of(answers, index)
        for place, counted in zip(*objective.draw(row, row_key), strict=True):
            if not counted:
                continue
            document = np.asarray(row.segments) == int(row.segments[place])
            start = int(np.flatnonzero(document)[0])
            text = np.asarray(row.tokens)[document]
            pending = int(place) - start
            padded = np.zeros(LENGTH + 2 * BLOCK, np.int32)
            padded[: pending + 1] = text[: pending + 1]
            laws = drafted(target, alone, jnp.asarray(padded), jnp.int32(pending + 1))
            if tables is not None:
                previous = text[pending : pending + head.num_drafted]
                rows = tables["previous"]["embedding"][previous]
                laws = laws[: len(previous)] + rows @ tables["following"]["embedding"].T
                laws = jax.nn.log_softmax(laws)
            padded[: len(text)] = text
            said_by_target = laws_of(target, jnp.asarray(padded))[pending:]
            for i, token in enumerate(text[pending + 1 : pending + 1 + head.num_drafted]):
                share = np.exp(-i / objective.gamma)
                said = float(laws[i, token])
                total, weight = total - share * said, weight + share
                nats, tokens = nats - said, tokens + 1
                hits[i] += said >= float(jnp.max(laws[i]))
                places[i] += 1
                both = float(jnp.sum(jnp.minimum(jnp.exp(laws[i]), said_by_target[i])))
                of_laws, overlaps[i] = of_laws - share * np.log(both), overlaps[i] + both
    assert tokens > 40
    assert float(metrics["tokens"]) == tokens
    np.testing.assert_allclose(loss, total / weight, rtol=1e-5)
    np.testing.assert_allclose(metrics["nats"], nats / tokens, rtol=1e-5)
    at_depth = [float(metrics[f"top1_at_{i + 1}"]) for i in range(head.num_drafted)]
    np.testing.assert_allclose(at_depth, hits / places, rtol=1e-6)
    np.testing.assert_allclose(loss_of_laws, of_laws / weight, rtol=1e-5)
    at_depth = [float(shown[f"overlap_at_{i + 1}"]) for i in range(head.num_drafted)]
    np.testing.assert_allclose(at_depth, overlaps / places, rtol=1e-5)


def test_anchors_are_what_may_be_pending_within_an_answer(target, answers):
    """These are the prompt's last token and all of the answer but its last; each at most once."""
    row = row_of(answers, 0)
    follows = {i for i in range(LENGTH - 1) if row.answer[i + 1]}
    assert follows == set(range(5, 21))
    seen = set()
    for seed in range(20):
        places, counted = objective_for(target).draw(row, jax.random.key(seed))
        assert np.all(counted)
        assert len(set(places.tolist())) == 6
        seen |= set(places.tolist())
    assert seen == follows
    places, counted = objective_for(target, anchors=99).draw(row, jax.random.key(0))
    assert set(places[counted].tolist()) == follows
    assert len(places) == LENGTH


def test_a_mask_in_the_text_and_empty_rows_do_not_count(target, params, answers):
    objective = objective_for(target, anchors=99)
    one = jax.tree.map(lambda field: field[:1], answers)
    with_mask = one._replace(tokens=np.where(np.arange(LENGTH) == 12, MASK_ID, one.tokens))
    empty = jax.tree.map(lambda field: np.zeros_like(field), one)
    key, counts = jax.random.key(0), []
    for rows in (one, with_mask, empty):
        loss, metrics = jax.jit(objective)(params, Observed(rows, target), key)
        gradient = jax.jit(jax.grad(objective, has_aux=True))(params, Observed(rows, target), key)[
            0
        ]
        assert np.isfinite(float(loss))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
        counts.append(int(metrics["tokens"]))
    whole = sum(min(BLOCK - 1, 21 - anchor) for anchor in range(5, 21))
    assert counts == [whole, whole - (BLOCK - 1), 0]


def test_states_from_before_are_those_computed_anew(target, params, answers):
    objective, key = objective_for(target), jax.random.key(1)
    observe = jax.jit(partial(target_states, taps=objective.taps))
    states = observe(target, answers)
    anew = jax.jit(objective)(params, Observed(answers, target), key)[0]
    answers = answers._replace(**states._asdict())
    kept = jax.jit(objective)(params, Observed(answers, target), key)[0]
    np.testing.assert_allclose(anew, kept, rtol=1e-6)


def test_narrow_products_give_nearly_the_same_loss(target, params, answers):
    exact, narrow = (
        jax.jit(objective_for(target, dtype=dtype))(
            params, Observed(answers, target), jax.random.key(0)
        )[0]
        for dtype in ("float32", "bfloat16")
    )
    assert float(exact) != float(narrow)
    np.testing.assert_allclose(exact, narrow, rtol=0.02)


def test_a_confidence_head_learns_the_overlap(target, answers):
    """Its own part of the loss is the least at that, and it alone is what changes there."""
    objective, key = objective_for(target, anchor_predicts=True), jax.random.key(3)
    embed = objective.config.embed_dim
    whole, without = (
        init_dflash_params(objective.config, 64, jax.random.key(7), DFlashParts(None, 3, False, n))
        for n in (embed + 3, 0)
    )
    batch = Observed(answers, target)
    loss, metrics = jax.jit(objective)(whole, batch, key)
    plain, _ = jax.jit(objective)(without, batch, key)
    chances = [metrics[f"overlap_at_{i + 1}"] for i in range(BLOCK)]
    assert all(0 < float(chance) < 1 for chance in chances)
    # A head that says the same of every place is right on average at best.
    kernel, logit = jnp.zeros((embed + 3, 1)), jnp.log(chances[0] / (1 - chances[0]))
    flat = whole | {"confidence": {"kernel": kernel, "bias": logit[None]}}
    found, said = jax.jit(objective)(flat, batch, key)
    assert float(said["confidence_error_at_1"]) < float(metrics["confidence_error_at_1"])
    assert float(plain) < float(found) < float(loss)


def test_a_selector_learns_from_places_whose_token_it_may_select(target, answers):
    objective, key = objective_for(target, likeliest=20), jax.random.key(3)
    parts = DFlashParts(Convolution(2, 8), 3, gated=True)
    params = init_dflash_params(objective.config, 64, jax.random.key(7), parts)
    batch = Observed(answers, target)
    grad = jax.jit(jax.grad(objective, has_aux=True))
    gradient, metrics = grad(params, batch, key)
    shares = [float(metrics[f"candidate_at_{i + 1}"]) for i in range(BLOCK - 1)]
    assert 0 < max(shares) < 1
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))
    # With one candidate there is nothing to learn about the choice.
    alone = jax.jit(jax.grad(dataclasses.replace(objective, likeliest=1), has_aux=True))
    tables = alone(params, batch, key)[0]["transitions"]
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(tables))


@pytest.mark.parametrize("loss", ["cross-entropy", "overlap"])
@pytest.mark.parametrize("kept", [False, True])
def test_flops_of_a_token_are_what_the_compiler_counts(kept, loss):
    """So nothing is computed that training does not need, such as what the context attends to."""
    config = ModelConfig(512, 128, 2, 4, 2, 32, 256, 128, tied_head=True)
    layers, length, rows = layers_config(config, 2, None), 64, 2
    objective = AnchoredBlocks(layers, (0, 1), MASK_ID, block=8, anchors=16, gamma=3.5, loss=loss)
    first = partial(init_dflash_params, layers, 2 * config.embed_dim)
    shapes = jax.eval_shape(first, jax.random.key(0))
    field = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    answers, network = Sequences(field, field, field, field), Network(param_shapes(config), config)
    reads_laws = loss != "cross-entropy"
    width = config.embed_dim if reads_laws else 0
    if kept:
        answers = answers._replace(
            features=jax.ShapeDtypeStruct((rows, length, width), jnp.float32),
            taps=jax.ShapeDtypeStruct((rows, length, 2 * config.embed_dim), jnp.float32),
        )
    batch = Observed(answers, network)
    step = jax.jit(jax.grad(objective, has_aux=True))
    with exchanged({}):  # the compiler does not look into native code
        compiled = step.lower(shapes, batch, jax.eval_shape(lambda: jax.random.key(0))).compile()
    # The second layer's input is all that is read behind the first, except for laws.
    share = 0.0 if kept else 1.0 if reads_laws else 0.5
    of_token = block_flops_per_token(shapes, layers, config, length, 8, 16, share, reads_laws, 7)
    expected = rows * length * of_token
    assert expected < compiled.cost_analysis()["flops"] < 1.25 * expected


def test_the_heads_layers_are_of_the_targets_shape(target):
    config = layers_config(target.config, 3, None)
    assert (config.num_layers, config.mlp_dim, config.qk_norm) == (3, 64, True)
    assert head_config(target.config).num_layers == 1


# A run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target with random weights, and text for it to continue."""
    folder = tmp_path_factory.mktemp("dflash")
    write_sums(folder)
    write_model(folder / "target", CONFIG)
    return folder


def settings_for(folder, **changes) -> DFlashTrainingSettings:
    values = {
        "target": str(folder / "target"),
        "layers": 1,
        "mlp_dim": 24,
        "taps": (0, 1),
        "block": 4,
        "anchors": 8,
        "texts": str(folder / "texts"),
    }
    return DFlashTrainingSettings((write_sums(folder),), **{**DRAFTING, **values, **changes})


@pytest.fixture(scope="module", params=[False, True], ids=["anew", "cached"])
def run(folder, request):
    """Settings, what training gave, and the folder that holds `state` and `out`."""
    settings = settings_for(folder, cache_features=request.param)
    place = folder / f"run-{request.param}"
    trained = train(
        DFlashTrainer(settings), place / "state", place / "out", command="c", console=QUIET
    )
    return settings, trained, place


def test_the_loss_falls_and_the_folder_says_how(run):
    settings, trained, place = run
    losses = losses_in(place / "state")
    assert len(losses) == settings.num_steps
    # Half of the texts are draws of a random target: little of them can be learned.
    assert np.mean(losses[-10:]) < 0.9 * np.mean(losses[:3])
    metrics = json.loads((place / "out" / "metrics.json").read_text())
    assert metrics == trained.metrics
    assert metrics["validation"][OWN_TEXT].keys() == {"nats", "top1_at_1", "top1_at_2", "top1_at_3"}
    tau = metrics["validation"][DECODING][TAU]
    assert 2 <= tau <= 4
    recipe = (place / "out" / "recipe.md").read_text()
    assert f"tau = {tau:.3f} tokens per target pass, the bonus token INCLUDED" in recipe
    assert "drafts of 3 tokens" in recipe
    assert "layers 0, 1. Blocks of 4 places" in recipe
    assert "exp(-(i - 1) / 1.75)" in recipe
    assert (place / "out" / "losses.png").exists()
    stored = json.loads((place / "out" / "training.json").read_text())
    assert settings_from_json(stored, DFlashTrainingSettings) == settings


def test_the_folder_is_read_back_and_drafts_without_changing_the_text(run):
    settings, trained, place = run
    model = load(settings.target)
    head = load_dflash(place / "out", model.network)
    assert head.made_for == model.digest is not None
    assert dataclasses.replace(head, params=()) == dataclasses.replace(trained.result, params=())
    assert_stored_in_bfloat16(head.params, trained.result.params)
    prompts = ["3 and 4", "8 and 2 make", "5 and", "1 and 7 make 8"]
    config = GenerationConfig(max_new_tokens=16)
    plain = generate(model, prompts, config)
    fast = generate(model, prompts, config, DFlash.of(head))
    for one, other in zip(plain, fast, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
    assert fast.metrics.mean_acceptance_length > 1


def test_an_interrupted_run_ends_with_the_same_bits(run, tmp_path, monkeypatch):
    settings, _, place = run
    assert_a_killed_run_ends_with_the_same_bits(
        DFlashTrainer, settings, place / "out", tmp_path, monkeypatch
    )


MORE = {
    "markov": {"markov": 4, "confidence": True, "cache_features": True},
    "selector": {"selector": 4},
    "over": {"markov": 4, "start_from": "run-False/out"},
}


@pytest.mark.parametrize("name", MORE)
def test_more_parts_are_trained_and_read_back(folder, name, tmp_path, request):
    changes = dict(MORE[name])
    if "start_from" in changes:
        train(
            DFlashTrainer(settings_for(folder)), tmp_path / "first", folder / "first", console=QUIET
        )
        changes |= {"start_from": str(folder / "first"), "layers": 2, "mlp_dim": None}
        changes |= {"taps": None, "block": 8}
    settings = settings_for(folder, **changes)
    trained = train(
        DFlashTrainer(settings), tmp_path / "state", tmp_path / "out", command="c", console=QUIET
    )
    losses = losses_in(tmp_path / "state")
    assert np.mean(losses[-10:]) < 0.95 * np.mean(losses[:3])
    stored = json.loads((tmp_path / "out" / "training.json").read_text())
    assert settings_from_json(stored, DFlashTrainingSettings) == settings
    model = load(settings.target)
    head = load_dflash(tmp_path / "out", model.network)
    assert dataclasses.replace(head, params=()) == dataclasses.replace(trained.result, params=())
    assert head.parts.rank == 4
    assert head.anchor_predicts == (name == "markov")
    assert head.num_drafted == (4 if name == "markov" else 3)
    assert (head.parts.convolution is not None) == (name == "selector")
    if name == "over":
        kept = load_dflash(folder / "first", model.network)
        for part, leaves in kept.params.items():
            jax.tree.map(np.testing.assert_array_equal, leaves, head.params[part])
    recipe = (tmp_path / "out" / "recipe.md").read_text()
    said = {"markov": "Markov head of rank 4 and a conf", "over": "A Markov head of rank 4, over"}
    assert said.get(name, "path selector of rank 4") in recipe
    prompts = ["3 and 4", "8 and 2 make"]
    config = GenerationConfig(max_new_tokens=16)
    plain, fast = (generate(model, prompts, config, drafter) for drafter in (None, DFlash.of(head)))
    assert [row.tokens.tolist() for row in fast] == [row.tokens.tolist() for row in plain]


def test_a_state_folder_belongs_to_one_run(run):
    settings, _, place = run
    other = dataclasses.replace(settings, anchors=9)
    with pytest.raises(ValueError, match="anchors: 8 before, 9 now"):
        train(DFlashTrainer(other), place / "state", console=QUIET)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "nowhere"}, "must be a model's folder or owner/name"),
        ({"sequence_length": 65}, r"at most the target's max_positions \(64\), got 65"),
        ({"taps": (1, 2)}, r"layers in 0\.\.1 of the target, got \(1, 2\)"),
        ({"taps": ()}, "at least one layer"),
        ({"taps": None, "layers": 2}, "no 2 different ones"),
        ({"block": 1}, "block must be at least 2"),
        ({"block": 33}, r"at most sequence_length \(32\), got 33"),
        ({"layers": 0}, "layers must be at least 1"),
        ({"anchors": 0}, "anchors must be at least 1"),
        ({"gamma": 0.0}, "gamma must be above 0"),
        ({"mlp_dim": 0}, "mlp_dim must be at least 1"),
        ({"markov": -1}, "markov must be at least 0"),
        ({"selector": 4, "markov": 4}, "selector makes a whole head"),
        ({"start_from": "x"}, "say what to train over it"),
        ({"start_from": "x", "markov": 4}, "layers is that of the head in start_from"),
        ({"own_text": 0}, "one of both"),
        ({"decoding_prompts": -1}, "decoding_prompts must be at least 0"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_done(folder, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train(DFlashTrainer(settings_for(folder, **changes)), tmp_path / "state", console=QUIET)
    assert not (tmp_path / "state").exists()


def test_only_causal_targets_and_other_folders_than_theirs(folder, tmp_path):
    with pytest.raises(ValueError, match="the target's own folder"):
        train(DFlashTrainer(settings_for(folder)), tmp_path, folder / "target", console=QUIET)
    filling = CONFIG.replace(diffusion=Diffusion(MASK_ID))
    write_model(tmp_path / "filling", filling)
    settings = settings_for(folder, target=str(tmp_path / "filling"))
    with pytest.raises(ValueError, match="target must be a causal model"):
        train(DFlashTrainer(settings), tmp_path / "state", console=QUIET)


# Settings and the command line


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    dflash_command.add_arguments(parser)
    return dflash_command.settings_from_arguments(parser.parse_args(["--out", "x", *arguments]))


def test_flags_become_settings():
    settings = parsed(
        "--target", "t", "--data", "notes=notes.txt", "--layers", "3", "--mlp-dim", "480",
        "--taps", "2,6,10", "--block", "10", "--anchors", "16", "--gamma", "4", "--steps", "9",
        "--texts", "written", "--cache-features", "--decoding-prompts", "2",
    )  # fmt: skip
    assert (settings.layers, settings.mlp_dim, settings.taps) == (3, 480, (2, 6, 10))
    assert (settings.block, settings.anchors, settings.decay_over(10)) == (10, 16, 4.0)
    assert (settings.own_text, settings.texts, settings.cache_features) == (4000, "written", True)
    assert (settings.num_steps, settings.decoding_prompts) == (9, 2)
    plain = json.loads(json.dumps(settings_to_json(settings)))
    assert settings_from_json(plain, DFlashTrainingSettings) == settings
    assert parsed("--target", "t", "--data", "a=a.txt").decay_over(16) == 7.0
    dspark = parsed("--target", "t", "--data", "a=a.txt", "--markov", "64", "--confidence")
    assert (dspark.markov, dspark.confidence, dspark.selector) == (64, True, 0)
    answered = parsed("--target", "t", "--data", "a=a.txt", "--answers", "answers.jsonl")
    assert (answered.own_text, answered.answers) == (0, "answers.jsonl")


def test_a_target_must_be_named():
    with pytest.raises(ValueError, match="--target FOLDER"):
        parsed("--data", "notes=notes.txt")
