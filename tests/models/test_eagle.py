"""EAGLE heads: the recorded forwards of the published programs, loading, saving, refusals."""

import dataclasses
import json
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
from jaxspec.models import EagleHead, Network

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
def golden(shared_folder) -> Path:
    return shared_folder("golden", "eagle")


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
def test_a_head_survives_saving(which, request, tmp_path):
    target, folder = request.getfixturevalue(which)
    head = load_eagle(folder, target)
    save_eagle(head, tmp_path / "saved")
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
        ({"without": ["fc.bias"]}, "missing: fc.bias, of shape \\[32\\]"),
        ({"config": {"bias": False}}, "unknown: fc.bias"),
        ({"tensors": {"fc.weight": np.zeros((32, 32), "f4")}}, "of another shape: fc.weight is"),
        ({"tensors": {"more.weight": np.zeros(3, "f4")}}, "unknown: more.weight"),
        ({"config": {"vocab_size": 99}}, "another target: vocab_size is 99 in config.json, 64 in"),
        ({"config": {"bias": 3}}, "bias in config.json must be true or false, got 3"),
        ({"tensors": {"d2t": np.array([3, 2])}}, "d2t must map its 2 draft ids to different ids"),
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


def test_a_torch_file_is_read_without_running_it(first, tmp_path):
    torch = pytest.importorskip("torch")
    target, folder = first
    stored = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = {name: torch.from_numpy(tensor.copy()) for name, tensor in stored.items()}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    ours: EagleHead = load_eagle(tmp_path, target)
    jax.tree.map(np.testing.assert_array_equal, ours, load_eagle(folder, target))
