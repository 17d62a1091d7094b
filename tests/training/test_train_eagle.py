"""From a target's folder to a head's, and the command line before it."""

import argparse
import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxspec.checkpoint import CheckpointError, load, load_eagle
from jaxspec.commands import train_eagle as eagle_command
from jaxspec.decoding.generate import generate
from jaxspec.decoding.request import GenerationConfig
from jaxspec.drafters import Eagle
from jaxspec.models import Network, init_params
from jaxspec.training.data import Corpus, Sequences, pack
from jaxspec.training.eagle import EagleTrainer, _draft_ids
from jaxspec.training.lm import LMTrainer
from jaxspec.training.settings import (
    OWN_TEXT,
    EagleTrainingSettings,
    LMTrainingSettings,
    settings_from_json,
    settings_to_json,
)
from jaxspec.training.target import TargetStates, cached_states
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

TREE = ((0,), (1,), (0, 0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target with random weights, and text for it to continue."""
    folder = tmp_path_factory.mktemp("eagle")
    write_sums(folder)
    write_model(folder / "target", CONFIG)
    return folder


def settings_for(folder, **changes) -> EagleTrainingSettings:
    values = {
        "target": str(folder / "target"),
        "draft_vocab": 48,
        "paths": TREE,
    }
    return EagleTrainingSettings((write_sums(folder),), **{**DRAFTING, **values, **changes})


KINDS = {
    "first": {"version": 1},
    "third": {"version": 3, "taps": (0, 1), "num_unrolled": 2, "cache_features": True},
}


@pytest.fixture(scope="module", params=sorted(KINDS))
def run(folder, request):
    """Settings, what training gave, and the folder that holds `state` and `out`."""
    settings = settings_for(folder, **KINDS[request.param])
    place = folder / request.param
    trained = train(
        EagleTrainer(settings), place / "state", place / "out", command="c", console=QUIET
    )
    return settings, trained, place


def test_the_loss_falls_and_the_folder_says_how(run):
    settings, trained, place = run
    losses = losses_in(place / "state")
    assert len(losses) == settings.num_steps
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:3])
    metrics = json.loads((place / "out" / "metrics.json").read_text())
    assert metrics == trained.metrics
    figures = metrics["validation"]["own-text"]
    assert 0 <= figures["top1_at_2"] <= figures["top2_at_2"] <= 1
    tau = metrics["validation"]["decoding"]["tau_with_bonus"]
    assert 1 <= tau <= 3
    recipe = (place / "out" / "recipe.md").read_text()
    assert "bonus token INCLUDED" in recipe
    assert f"tau = {tau:.3f}" in recipe
    assert "prompts only" in recipe
    stored = json.loads((place / "out" / "training.json").read_text())
    assert settings_from_json(stored, EagleTrainingSettings) == settings


def test_the_folder_is_read_back_and_drafts_without_changing_the_text(run):
    settings, trained, place = run
    model = load(settings.target)
    head = load_eagle(place / "out", model.network)
    assert type(head) is type(trained.result)
    assert head.config == trained.result.config
    assert head.taps == trained.result.taps
    assert head.paths == trained.result.paths == settings.paths
    assert head.made_for == model.digest is not None
    assert_stored_in_bfloat16(head.params, trained.result.params)
    prompts = [[0, 20, 30, 40], [0, 50, 60]]
    config = GenerationConfig(max_new_tokens=16)
    plain = generate(model, prompts, config)
    drafted = generate(model, prompts, config, Eagle.of(head, TREE))
    for one, other in zip(plain, drafted, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
    assert drafted.metrics.num_draft_tokens > 0
    accepted = {int(t) for row in drafted for t in row.tokens[row.from_draft]}
    assert accepted <= set(np.asarray(head.draft_ids).tolist())


def test_the_draft_vocabulary_counts_sources_and_own_texts_alike():
    def packed(*counts: tuple[int, int]):
        return pack([np.repeat(*pair).astype(np.int32) for pair in counts], 16)

    # By shares: 0.6 + 0.1 of token 1, 0.3 of 2, 0.1 + 0.4 of 3, 0.5 of 4.
    sources = Corpus({"a": packed((1, 6), (2, 3), (3, 1))}, {}, {"a": 2.0})
    own = Corpus({OWN_TEXT: packed((4, 5), (3, 4), (1, 1))}, {}, {})
    ids, coverage = _draft_ids(sources, own, 3, 8)
    assert (ids.tolist(), coverage) == ([1, 3, 4], pytest.approx(1.0))
    ids, coverage = _draft_ids(sources, own, 1, 8)
    assert (ids.tolist(), coverage) == ([1], pytest.approx(0.1))
    ids, coverage = _draft_ids(sources, sources, 2, 8)
    assert (ids.tolist(), coverage) == ([1, 2], pytest.approx(0.9))
    assert _draft_ids(sources, own, 0, 8) == (None, 1.0)


def test_the_draft_vocabulary_is_as_large_as_asked_and_its_share_is_said(run):
    settings, trained, place = run
    files = sorted((place / "state" / "own_text").glob("*.jsonl"))
    texts = [json.loads(line)["tokens"] for path in files for line in path.open()]
    held_out = [index // 2 % 20 == 19 for index in range(len(texts))]
    read = [text for text, out in zip(texts, held_out, strict=True) if not out]
    counts = np.bincount(np.concatenate(read), minlength=CONFIG.vocab_size)
    ids = np.asarray(trained.result.draft_ids)
    assert len(ids) == settings.draft_vocab
    assert np.all(np.diff(ids) > 0)
    coverage = counts[ids].sum() / counts.sum()
    assert trained.metrics["draft_vocab_coverage"] == round(float(coverage), 4)


def test_an_interrupted_run_ends_with_the_same_bits(run, tmp_path, monkeypatch):
    settings, _, place = run
    assert_a_killed_run_ends_with_the_same_bits(
        EagleTrainer, settings, place / "out", tmp_path, monkeypatch
    )


def test_a_state_folder_belongs_to_one_run_of_one_target(run, folder, tmp_path):
    settings, _, place = run
    other = dataclasses.replace(settings, draft_vocab=40)
    with pytest.raises(ValueError, match="draft_vocab: 48 before, 40 now"):
        train(EagleTrainer(other), place / "state", console=QUIET)
    lm = LMTrainingSettings(settings.sources, CONFIG, sequence_length=32)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.json").write_text("{}")
    with pytest.raises(ValueError, match=r"run\.json is no record of a run: it lacks 'settings'"):
        train(EagleTrainer(settings), tmp_path / "empty", console=QUIET)
    with pytest.raises(ValueError, match="a run of another kind"):
        train(LMTrainer(lm), place / "state", console=QUIET)
    path = folder / "target" / "config.json"
    before = path.read_text()
    try:
        path.write_text(before + "\n")
        with pytest.raises(ValueError, match="differs in the files of 'target'"):
            train(EagleTrainer(settings), place / "state", console=QUIET)
    finally:
        path.write_text(before)


def test_a_head_is_for_its_own_target(run, tmp_path):
    settings, trained, place = run
    wider = CONFIG.replace(embed_dim=24)
    network = Network(init_params(wider, jax.random.key(0)), wider)
    with pytest.raises(CheckpointError, match=r"hidden_size is 16 in .* 24 in the target"):
        load_eagle(place / "out", network)
    model = dataclasses.replace(load(settings.target), network=network)
    with pytest.raises(ValueError, match="width is 16, the target's 24"):
        generate(model, [[0, 20]], drafter=Eagle.of(trained.result, TREE))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "nowhere"}, "must be a model's folder or owner/name"),
        ({"sequence_length": 65}, r"at most the target's max_positions \(64\), got 65"),
        ({"draft_vocab": 280}, r"below the target's vocabulary \(280\), got 280"),
        ({"draft_vocab": 1}, "a node of the tree .paths. has 2 children"),
        ({"version": 3}, "at least 7 layers; the target has 2"),
        ({"version": 3, "taps": (1, 2)}, r"layers in 0\.\.1 of the target, got \(1, 2\)"),
        ({"rows_per_batch": 0}, "rows_per_batch must be at least 1"),
        ({"version": 2}, "EAGLE-2 drafts with the heads of version 1"),
        ({"taps": (0,)}, "taps are of EAGLE-3"),
        ({"own_text": 0}, "nothing to learn from"),
        ({"noise": -1.0}, "noise must be at least 0"),
        ({"paths": ()}, "at least one node"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_is_done(folder, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        train(EagleTrainer(settings_for(folder, **changes)), tmp_path / "state", console=QUIET)
    assert not (tmp_path / "state").exists()


def test_the_targets_folder_is_not_written_over(folder, tmp_path):
    with pytest.raises(ValueError, match="the target's own folder"):
        train(EagleTrainer(settings_for(folder)), tmp_path, folder / "target", console=QUIET)


# States on disk


def sequences_of(count: int, first: int) -> Sequences:
    tokens = np.arange(first, first + 3 * count, dtype=np.int32).reshape(count, 3)
    return Sequences(
        tokens, np.ones_like(tokens), np.tile(np.arange(3, dtype=np.int32), (count, 1))
    )


def states_of(sequences: Sequences) -> TargetStates:
    tokens = jax.numpy.asarray(sequences.tokens, jax.numpy.bfloat16)
    return TargetStates(
        tokens[:, :, None] * jax.numpy.ones((1, 1, 4)), tokens[:, :, None][:, :, :0]
    )


def test_states_are_computed_once_and_survive_an_interruption(tmp_path):
    parts = {"a": sequences_of(5, 0), "b": sequences_of(2, 40)}
    calls = []

    def observe(sequences):
        if isinstance(sequences.tokens, np.ndarray):  # not when shapes are asked for
            calls.append(len(sequences.tokens))
            if len(calls) == 4:
                raise KeyboardInterrupt
        return states_of(sequences)

    with pytest.raises(KeyboardInterrupt):
        cached_states(observe, parts, 2, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    for _ in range(2):
        cached = cached_states(observe, parts, 2, tmp_path)
        for name, part in parts.items():
            expected = states_of(part)
            assert cached[name].features.dtype == expected.features.dtype
            np.testing.assert_array_equal(cached[name].features, expected.features)
            assert cached[name].taps.shape == (len(part.tokens), 3, 0)
    assert calls == [2] * 5  # three batches of the first part, one of the other, done twice


def test_a_disk_without_room_is_noticed_before(tmp_path, monkeypatch):
    usage = argparse.Namespace(free=10)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    with pytest.raises(ValueError, match="leave out cache_features"):
        cached_states(states_of, {"a": sequences_of(5, 0)}, 2, tmp_path)


# Settings and the command line


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    eagle_command.add_arguments(parser)
    return eagle_command.settings_from_arguments(parser.parse_args(["--out", "x", *arguments]))


def test_flags_become_settings(tmp_path):
    tree = tmp_path / "tree.json"
    tree.write_text(json.dumps({"paths": [[0], [0, 0]]}))
    settings = parsed(
        "--target", "t", "--data", "notes=notes.txt", "--version", "3", "--taps", "1,3,5",
        "--draft-vocab", "1024", "--cache-features", "--tree", str(tree), "--steps", "9",
        "--optimizer", "adamw", "--unroll", "3",
    )  # fmt: skip
    assert (settings.version, settings.taps, settings.num_unrolled) == (3, (1, 3, 5), 3)
    assert (settings.draft_vocab, settings.cache_features) == (1024, True)
    assert (settings.own_text, settings.sources_weight) == (2000, 0.0)
    assert settings.paths == ((0,), (0, 0))
    assert (settings.num_steps, settings.minutes) == (9, None)
    plain = json.loads(json.dumps(settings_to_json(settings)))
    assert settings_from_json(plain, EagleTrainingSettings) == settings


def test_wrong_flags_are_named(tmp_path):
    with pytest.raises(ValueError, match="--target FOLDER"):
        parsed("--data", "notes=notes.txt")
    tree = tmp_path / "tree.json"
    tree.write_text("[0, 1]")
    with pytest.raises(ValueError, match=r"tree .*paths\[0\] must be a sequence, got 0"):
        parsed("--target", "t", "--data", "notes=notes.txt", "--tree", str(tree))
