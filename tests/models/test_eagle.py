"""EAGLE heads: the recorded forwards of the published programs, loading, saving, refusals."""

import dataclasses
import json
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoint import CheckpointError, load_eagle, save_eagle
from jaxspec.checkpoint.huggingface import load_network
from jaxspec.core.cache import append
from jaxspec.core.masks import causal
from jaxspec.core.types import KVCache
from jaxspec.models import Eagle3Head, Network
from jaxspec.models.eagle import DraftVocabulary

ATOL = 1e-4


def write_folder(folder: Path, config: dict, arrays, prefix: str) -> Path:
    """A checkpoint folder of the recorded weights whose names begin with `prefix`."""
    folder.mkdir()
    raw = {"model_type": "llama", "max_position_embeddings": 512, **config}
    (folder / "config.json").write_text(json.dumps(raw))
    names = [name for name in arrays.files if name.startswith(prefix)]
    tensors = {name.removeprefix(prefix): np.ascontiguousarray(arrays[name]) for name in names}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def golden(recorded_folder) -> Path:
    return recorded_folder("eagle")


@pytest.fixture(scope="module")
def first(golden, tmp_path_factory) -> tuple[Network, Path]:
    """A target, and the folder of its EAGLE-1 head."""
    folder = tmp_path_factory.mktemp("eagle1")
    config = json.loads((golden / "eagle1_tiny_config.json").read_text())
    weights = np.load(golden / "eagle1_tiny_weights.npz")
    head = {**config["eagle"], "bias": config["eagle"]["fc_bias"]}
    target = load_network(write_folder(folder / "target", config["target"], weights, "target/"))
    return target, write_folder(folder / "head", head, weights, "eagle/")


@pytest.fixture(scope="module")
def third(golden, tmp_path_factory) -> tuple[Network, Path]:
    """A target, and the folder of its EAGLE-3 head."""
    folder = tmp_path_factory.mktemp("eagle3")
    config = json.loads((golden / "eagle3_tiny_config.json").read_text())
    weights = np.load(golden / "eagle3_tiny_weights.npz")
    head = {**config["target"], **config["eagle3"]}
    target = load_network(write_folder(folder / "target", config["target"], weights, "target/"))
    return target, write_folder(folder / "head", head, weights, "eagle3/")


def test_recorded_forwards_of_the_target(golden, first):
    """The features that the head learns from: after the target's final norm."""
    target, _ = first
    recorded = np.load(golden / "eagle1_target_forward.npz")
    tokens = jnp.asarray(recorded["input_ids"])
    length = tokens.shape[1]

    def row(tokens):
        features = target.forward(tokens, jnp.arange(length), causal(length), None).features
        return features, target.unembed(features)

    features, logits = jax.vmap(row)(tokens)
    np.testing.assert_allclose(features, recorded["features"], atol=ATOL)
    np.testing.assert_allclose(logits, recorded["logits"], atol=ATOL)


def test_recorded_forwards_of_eagle1(golden, first):
    """Prefill, more of the text, siblings of a tree, and their children over scratch."""
    target, folder = first
    head, recorded = load_eagle(folder, target), np.load(golden / "eagle1_head_forward.npz")

    def run(part: str, positions, mask, cache: KVCache, scratch=None):
        embedded = target.embed(jnp.asarray(recorded[f"{part}_input_ids"][0]))
        states = jnp.asarray(recorded[f"{part}_hidden"][0])
        hidden = head.forward(embedded, states, positions, mask, cache, scratch=scratch)
        np.testing.assert_allclose(hidden.features, recorded[f"{part}_out"][0], atol=ATOL)
        return hidden

    cache = head.empty_cache(16)
    prefill = run("A", jnp.arange(10), causal(10), cache)
    logits = head.unembed(target, prefill.features)
    np.testing.assert_allclose(logits, recorded["A_logits"][0], atol=ATOL)
    keys = np.swapaxes(prefill.new_kv[0].keys, 1, 2)
    np.testing.assert_allclose(keys, recorded["A_k_cache"][0], atol=ATOL)
    np.testing.assert_allclose(prefill.new_kv[0].values, recorded["A_v_cache"][0], atol=ATOL)
    cache = append(cache, prefill.new_kv, 10)
    cache = append(cache, run("B", 10 + jnp.arange(3), causal(3), cache).new_kv, 3)
    siblings, children = (jnp.asarray(recorded[f"{part}_tree_mask"], bool) for part in "CD")
    level = run("C", jnp.asarray(recorded["C_position_ids"]), siblings, cache)
    run("D", jnp.asarray(recorded["D_position_ids"]), children, cache, level.new_kv)


def test_recorded_forwards_of_eagle3(golden, third):
    """Prefill from the target's taps, then one step on the head's own state."""
    target, folder = third
    head, recorded = load_eagle(folder, target), np.load(golden / "eagle3_head_forward.npz")
    assert head.taps == (2, 4, 5)
    for row in range(2):
        tokens = jnp.asarray(recorded["input_ids"][row])
        whole = target.forward(tokens, jnp.arange(12), causal(12), None, taps=head.taps)
        np.testing.assert_allclose(whole.taps, recorded["aux_features_concat"][row], atol=ATOL)
        states = head.states_of(whole.features, whole.taps)[:11]
        cache = head.empty_cache(16)
        hidden = head.forward(target.embed(tokens[1:]), states, jnp.arange(11), causal(11), cache)
        np.testing.assert_allclose(hidden.features, recorded["A_out_prenorm"][row], atol=ATOL)
        logits = head.unembed(target, hidden.features)
        np.testing.assert_allclose(logits, recorded["A_draft_logits"][row], atol=ATOL)
        cache = append(cache, hidden.new_kv, 11)
        hidden = head.forward(
            target.embed(jnp.asarray(recorded["B_input_ids"][row])),
            jnp.asarray(recorded["B_hidden"][row]),
            jnp.array([11]),
            causal(1),
            cache,
        )
        np.testing.assert_allclose(hidden.features, recorded["B_out_prenorm"][row], atol=ATOL)
        logits = head.unembed(target, hidden.features)
        np.testing.assert_allclose(logits, recorded["B_draft_logits"][row], atol=ATOL)


@pytest.mark.parametrize("which", ["first", "third"])
def test_a_head_survives_saving(which, request, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    target, folder = request.getfixturevalue(which)
    head = dataclasses.replace(load_eagle(folder, target), paths=((0,), (1,), (0, 0)))
    save_eagle(head, "~/saved")
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "saved").iterdir()}
    (tmp_path / "any file").touch()
    assert modes == {(tmp_path / "any file").stat().st_mode & 0o777}
    again = load_eagle(tmp_path / "saved", target)
    jax.tree.map(np.testing.assert_array_equal, head, again)
    written, published = (
        load_file(path / "model.safetensors") for path in (tmp_path / "saved", folder)
    )
    for name in written.keys() & published.keys():
        np.testing.assert_array_equal(written[name], published[name])
    assert published.keys() - written.keys() <= {"embed_tokens.weight", "t2d"}


def change(folder: Path, new: Path, config=(), tensors=(), without=()) -> Path:
    """A copy of a head's folder with some things changed."""
    new.mkdir()
    raw = json.loads((folder / "config.json").read_text()) | dict(config)
    (new / "config.json").write_text(json.dumps(raw))
    stored = load_file(folder / "model.safetensors") | dict(tensors)
    kept = {name: tensor for name, tensor in stored.items() if name not in without}
    save_file(kept, new / "model.safetensors")
    return new


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"without": ["fc.weight"]}, "holds no EAGLE head: its weights have no fc.weight"),
        ({"without": ["fc.bias"]}, "missing: fc.bias, of shape \\[32\\]"),
        ({"config": {"bias": False}}, "unknown: fc.bias"),
        ({"tensors": {"fc.weight": np.zeros((32, 32), "f4")}}, "of another shape: fc.weight is"),
        ({"tensors": {"more.weight": np.zeros(3, "f4")}}, "unknown: more.weight"),
        ({"config": {"vocab_size": 99}}, "another target: vocab_size is 99 in config.json, 64 in"),
        ({"config": {"bias": 3}}, "bias must be True or False, got 3"),
        ({"tensors": {"d2t": np.array([3, 2])}}, "d2t must map its 2 draft ids to different ids"),
        ({"tensors": {"d2t": np.array([0.5, 1], "f4")}}, "d2t must hold whole numbers"),
        ({"tensors": {"d2t": np.array([np.nan, 1], "f4")}}, "d2t must hold whole numbers"),
        ({"tensors": {"d2t": np.zeros((2, 2), np.int64)}}, r"d2t must have one axis .*\(2, 2\)"),
        ({"tensors": {"d2t": np.zeros(0, np.int64)}}, r"d2t must have one axis .*\(0,\)"),
        ({"tensors": {"d2t": np.zeros(65, np.int64)}}, r"d2t must have .* 1 to 64 .*\(65,\)"),
    ],
)
def test_heads_that_do_not_fit_are_refused(first, changes, message, tmp_path):
    target, folder = first
    with pytest.raises(CheckpointError, match=message):
        load_eagle(change(folder, tmp_path / "changed", **changes), target)


def test_a_head_for_another_width_is_refused(first, tiny_network):
    narrow = dataclasses.replace(tiny_network.config, embed_dim=16, vocab_size=64)
    with pytest.raises(
        CheckpointError, match=r"hidden_size is 32 in config\.json, 16 in the target"
    ):
        load_eagle(first[1], Network(tiny_network.params, narrow))


def test_a_target_with_too_few_layers_for_eagle3_is_refused(first, third):
    with pytest.raises(ValueError, match="takes at least 7 layers; the target has 3"):
        load_eagle(third[1], first[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"without": ["d2t"]}, "drafts from 48 tokens of the target's 64, but d2t.* is missing"),
        ({"tensors": {"d2t": np.zeros(47, np.int64)}}, "drafts from 48 tokens.* lists 47"),
        (
            {"config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}},
            r"another target: it reads layers \[2, 4, 9\], the target has 8",
        ),
    ],
)
def test_eagle3_heads_that_do_not_fit_are_refused(third, changes, message, tmp_path):
    target, folder = third
    with pytest.raises(CheckpointError, match=message):
        load_eagle(change(folder, tmp_path / "changed", **changes), target)


def test_a_draft_vocabulary_without_its_map_is_refused_for_eagle1_too(first, tmp_path):
    target, folder = first
    lost = change(folder, tmp_path / "changed", config={"draft_vocab_size": 5})
    with pytest.raises(CheckpointError, match=r"drafts from 5 tokens .* but d2t.* is missing"):
        load_eagle(lost, target)


def test_prefixes_of_other_dialects_are_read(first, third, tmp_path):
    target, folder = third
    renamed = {
        "model." + name.replace("midlayer", "layers.0"): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    other = tmp_path / "speculators"
    other.mkdir()
    (other / "config.json").write_text((folder / "config.json").read_text())
    save_file(renamed, other / "model.safetensors")
    jax.tree.map(
        np.testing.assert_array_equal, load_eagle(folder, target), load_eagle(other, target)
    )


def with_norm_before(folder: Path, target: Network, tmp_path: Path) -> Eagle3Head:
    """A head in the speculators format, whose layer's settings are nested."""
    raw = json.loads((folder / "config.json").read_text())
    own = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    config = {name: raw.pop(name) for name in own if name in raw}
    config |= {"norm_before_residual": True, "transformer_layer_config": raw}
    other = tmp_path / "nested"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config))
    save_file(load_file(folder / "model.safetensors"), other / "model.safetensors")
    return load_eagle(other, target)


def test_the_residual_may_be_normed(third, tmp_path):
    """With `norm_before_residual`, attention's output is added to the normed state."""
    target, folder = third
    usual, normed = load_eagle(folder, target), with_norm_before(folder, target, tmp_path)
    assert normed.norm_before_residual
    assert normed.config == usual.config
    embedded, states = jax.random.normal(jax.random.key(0), (2, 3, target.embed_dim))
    # With states that are normed already and a norm that scales nothing, both are the same.
    scale = usual.params["state_norm"]["scale"]
    unscaled = {**usual.params, "state_norm": {"scale": jnp.ones_like(scale)}}
    flat = states / jnp.sqrt(jnp.mean(states**2, axis=1, keepdims=True))

    def run(head: Eagle3Head, states):
        head = dataclasses.replace(head, params=unscaled)
        return head.forward(embedded, states, jnp.arange(3), causal(3), None).features

    np.testing.assert_allclose(run(usual, flat), run(normed, flat), atol=1e-3)
    np.testing.assert_allclose(run(normed, 7 * flat), run(normed, flat), atol=1e-3)
    assert np.abs(run(usual, 7 * flat) - run(normed, flat)).max() > 1
    save_eagle(normed, tmp_path / "saved")
    assert load_eagle(tmp_path / "saved", target).norm_before_residual


def test_taps_may_be_named_by_what_comes_out(third, tmp_path):
    """As SpecForge writes them: one less than by what goes in."""
    target, folder = third
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}}
    (tmp_path / "copy").mkdir()
    head = load_eagle(change(folder, tmp_path / "copy" / "head", config=nested), target)
    assert head.taps == (1, 3, 7)


def test_biases_of_qwen2_are_neither_invented_nor_dropped(first, tmp_path):
    target, folder = first
    qwen = {"config": {"model_type": "qwen2"}}
    with pytest.raises(CheckpointError, match=r"missing: layers\.0\.self_attn\.q_proj\.bias"):
        load_eagle(change(folder, tmp_path / "without", **qwen), target)
    sizes = {"q": 32, "k": 32, "v": 32}
    stored = load_file(folder / "model.safetensors")
    sizes = {name: len(stored[f"layers.0.self_attn.{name}_proj.weight"]) for name in sizes}
    biases = {
        f"layers.0.self_attn.{name}_proj.bias": np.full(size, 0.5, "f4")
        for name, size in sizes.items()
    }
    head = load_eagle(change(folder, tmp_path / "with", tensors=biases, **qwen), target)
    found = [leaf for leaf in jax.tree.leaves(head.params) if np.all(leaf == 0.5)]
    assert sum(leaf.size for leaf in found) == sum(sizes.values())
    stated = {"config": {"qkv_bias": False}}
    with pytest.raises(CheckpointError, match=r"unknown: layers\.0\.self_attn\.k_proj\.bias"):
        load_eagle(change(folder, tmp_path / "denied", tensors=biases, **stated), target)


def test_heads_of_llama3_have_no_bias_and_turn_slower(first, tmp_path):
    target, folder = first
    config = {"bias": False, "rope_theta": 5e5}
    head = load_eagle(
        change(folder, tmp_path / "llama3", config=config, without=["fc.bias"]), target
    )
    assert "bias" not in head.params["fc"]
    assert head.config.rope.theta == 5e5


def test_a_head_may_know_how_deep_its_target_is(first, third, tmp_path):
    target, folder = first
    head = load_eagle(folder, target)
    save_eagle(head, tmp_path / "fits", target_layers=target.num_layers)
    load_eagle(tmp_path / "fits", target)
    save_eagle(head, tmp_path / "deeper", target_layers=9)
    with pytest.raises(CheckpointError, match=r"target_num_hidden_layers is 9 .* 3 in the target"):
        load_eagle(tmp_path / "deeper", target)


def test_reduced_logits_are_those_of_the_target(first):
    """The divisor of logits (Granite) and their cap (Gemma 2) hold for them, too."""
    target, folder = first
    changed = target.config.replace(final_softcap=0.5, logit_divisor=3.0)
    head, ids = load_eagle(folder, target), jnp.array([1, 5, 6])
    states = jax.random.normal(jax.random.key(0), (2, target.embed_dim))
    for network in (target, Network(target.params, changed)):
        some = dataclasses.replace(head, vocabulary=DraftVocabulary.of(network, ids))
        np.testing.assert_allclose(
            some.unembed(network, states), head.unembed(network, states)[:, ids], atol=1e-5
        )


class RunsCode:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_is_refused_unread(first, tmp_path):
    target, folder = first
    shutil.copy(folder / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(RunsCode(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match="is a pickle"):
        load_eagle(tmp_path, target)
    assert not (tmp_path / "ran").exists()


def test_the_refusal_of_a_pickle_converts_it(first, tmp_path):
    torch = pytest.importorskip("torch", reason="needs torch: '.[parity]'")
    target, folder = first
    stored = load_file(folder / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    tensors = {name: torch.from_numpy(tensor.copy()) for name, tensor in stored.items()}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError) as error:
        load_eagle(tmp_path, target)
    (program,) = re.findall(r'python -c "(.*)"$', str(error.value))
    subprocess.run([sys.executable, "-c", program], check=True)
    jax.tree.map(
        np.testing.assert_array_equal, load_eagle(tmp_path, target), load_eagle(folder, target)
    )
