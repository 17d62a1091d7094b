"""EAGLE-3 heads with the norms of EAGLE 3.1 and of NVIDIA's heads, against NumPy in float64."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoint import CheckpointError, load_eagle, save_eagle
from jaxspec.core.cache import append
from jaxspec.core.masks import causal
from jaxspec.models import ModelConfig, Network, init_params
from tests.checkpoint.published import (
    EPS,
    THETA,
    attended,
    gated_mlp,
    log_softmax,
    rms_norm,
    rotated,
)

VOCAB, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP, LENGTH = 24, 16, 4, 2, 6, 20, 7
TAPS = [1, 2, 4]
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": EMBED,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": MLP,
    "max_position_embeddings": 128,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "eagle_aux_hidden_state_layer_ids": TAPS,
}
DIALECTS = {
    "eagle 3": {},
    "eagle 3.1": {"fc_norm": True, "norm_output": True},
    "eagle 3.1, residual normed": {
        "fc_norm": True,
        "norm_output": True,
        "norm_before_residual": True,
        "norm_before_fc": None,
    },
    "nvidia": {"eagle_config": {"norm_before_fc": True}},
    "eagle 3.1, nested": {
        "fc_norm": True,
        "norm_before_residual": None,
        "eagle_config": {"fc_norm": None, "norm_output": True, "norm_before_residual": True},
    },
    "speculators": {"norm_before_fc": True, "norm_output": True, "fc_norm": False},
}


def asked(dialect: dict, name: str) -> bool:
    return bool(dialect.get(name) or dialect.get("eagle_config", {}).get(name))


def tensors_of(dialect: dict) -> dict[str, np.ndarray]:
    """What a file of this dialect holds."""
    sizes = {
        "fc.weight": (EMBED, len(TAPS) * EMBED),
        "norm.weight": (EMBED,),
        "lm_head.weight": (VOCAB, EMBED),
        "layers.0.input_layernorm.weight": (EMBED,),
        "layers.0.hidden_norm.weight": (EMBED,),
        "layers.0.post_attention_layernorm.weight": (EMBED,),
        "layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, 2 * EMBED),
        "layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, 2 * EMBED),
        "layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, 2 * EMBED),
        "layers.0.self_attn.o_proj.weight": (EMBED, HEADS * HEAD_DIM),
        "layers.0.mlp.gate_proj.weight": (MLP, EMBED),
        "layers.0.mlp.up_proj.weight": (MLP, EMBED),
        "layers.0.mlp.down_proj.weight": (EMBED, MLP),
    }
    if asked(dialect, "fc_norm"):
        sizes |= {f"fc_norm.{i}.weight": (EMBED,) for i in range(len(TAPS))}
    if asked(dialect, "norm_before_fc"):
        sizes["input_norm.weight"] = (len(TAPS) * EMBED,)
    random = np.random.default_rng(0)
    return {
        name: random.normal("norm" in name, 0.3, size).astype("f4") for name, size in sizes.items()
    }


def publish(folder: Path, dialect: dict) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | dialect))
    save_file(tensors_of(dialect), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def target():
    config = ModelConfig(VOCAB, EMBED, 6, 2, 2, 8, 32, 128)
    return Network(init_params(config, jax.random.key(0)), config)


def reference(dialect: dict, embedded, taps) -> tuple[np.ndarray, np.ndarray]:
    """States and laws of a head that reads some pairs, then one of its own last state."""
    weight = {name: tensor.astype(np.float64) for name, tensor in tensors_of(dialect).items()}
    if asked(dialect, "fc_norm"):
        parts = np.split(taps, len(TAPS), axis=1)
        normed = [rms_norm(part, weight[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)]
        taps = np.concatenate(normed, axis=1)
    if "input_norm.weight" in weight:
        taps = rms_norm(taps, weight["input_norm.weight"])
    states = taps @ weight["fc.weight"].T
    keys = values = np.zeros((0, KV_HEADS, HEAD_DIM))
    found = []
    for first in (0, len(taps)):  # what the target has said, then one step further
        now = embedded[first : len(taps) + bool(first)]
        residual = states if not first else found[-1][-1:]
        places = first + np.arange(len(now))
        state = rms_norm(residual, weight["layers.0.hidden_norm.weight"])
        if asked(dialect, "norm_before_residual"):
            residual = state
        pair = [rms_norm(now, weight["layers.0.input_layernorm.weight"]), state]
        heads = {
            name: (
                np.concatenate(pair, -1) @ weight[f"layers.0.self_attn.{name}_proj.weight"].T
            ).reshape(len(now), -1, HEAD_DIM)
            for name in "qkv"
        }
        keys = np.concatenate([keys, rotated(heads["k"], places)])
        values = np.concatenate([values, heads["v"]])
        seen = np.arange(len(keys))[None] <= places[:, None]
        outputs = attended(rotated(heads["q"], places), keys, values, seen)
        residual = residual + outputs @ weight["layers.0.self_attn.o_proj.weight"].T
        normed = rms_norm(residual, weight["layers.0.post_attention_layernorm.weight"])
        kernels = (weight[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        residual = residual + gated_mlp(normed, *kernels)
        last = rms_norm(residual, weight["norm.weight"])
        found.append(last if asked(dialect, "norm_output") else residual)
        laws = log_softmax(last @ weight["lm_head.weight"].T)
    return np.concatenate(found), laws


@pytest.mark.parametrize("name", DIALECTS)
def test_a_published_head_computes_as_the_reference_says(target, name, tmp_path):
    dialect = DIALECTS[name]
    head = load_eagle(publish(tmp_path, dialect), target)
    assert head.taps == tuple(TAPS)
    random = np.random.default_rng(1)
    embedded, taps = random.normal(size=(LENGTH + 1, EMBED)), random.normal(size=(LENGTH, 3, EMBED))
    taps = (taps * [[[1.0], [5.0], [0.1]]]).reshape(LENGTH, -1)
    states = head.states_of(jnp.zeros((LENGTH, 0)), jnp.asarray(taps, jnp.float32))
    cache = head.empty_cache(LENGTH + 1)
    rows = jnp.asarray(embedded, jnp.float32)
    first = head.forward(rows[:-1], states, jnp.arange(LENGTH), causal(LENGTH), cache)
    cache = append(cache, first.new_kv, LENGTH)
    last = head.forward(rows[-1:], first.features[-1:], jnp.array([LENGTH]), causal(1), cache)
    expected, laws = reference(dialect, embedded, taps)
    found = jnp.concatenate([first.features, last.features])
    np.testing.assert_allclose(found, expected, atol=1e-4)
    logprobs = jax.nn.log_softmax(head.unembed(target, last.features))
    np.testing.assert_allclose(logprobs, laws, atol=1e-4)


@pytest.mark.parametrize("name", DIALECTS)
def test_a_head_comes_back_as_it_was_saved(target, name, tmp_path):
    head = load_eagle(publish(tmp_path, DIALECTS[name]), target)
    save_eagle(head, tmp_path / "saved")
    jax.tree.map(np.testing.assert_array_equal, head, load_eagle(tmp_path / "saved", target))
    written = load_file(tmp_path / "saved" / "model.safetensors")
    names = {name.replace("layers.0", "midlayer") for name in tensors_of(DIALECTS[name])}
    assert written.keys() == names


@pytest.mark.parametrize(
    ("dialect", "message"),
    [
        ({"fc_norm": True, "norm_before_fc": True}, "fc_norm and norm_before_fc .* exclude each"),
        ({"use_aux_norm": True}, "sets use_aux_norm, which is not supported"),
        ({"eagle_config": {"use_aux_norm": True}}, "sets use_aux_norm, which is not supported"),
        ({"norm_output": "yes"}, "norm_output must be True or False, got 'yes'"),
    ],
)
def test_what_is_not_covered_is_named(target, dialect, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        load_eagle(publish(tmp_path, dialect), target)


STATED = [
    {"num_hidden_layers": 3},
    {"num_hidden_layers": None, "transformer_layer_config": {"num_hidden_layers": 3}},
]


@pytest.mark.parametrize("dialect", STATED)
def test_a_head_of_several_layers_is_refused_by_name(target, dialect, tmp_path):
    folder = publish(tmp_path, dialect)
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.2.mlp.up_proj.weight"] = tensors["layers.0.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"num_hidden_layers is 3, .* one layer"):
        load_eagle(folder, target)


@pytest.mark.parametrize("dialect", [{"num_hidden_layers": None}, *STATED])
def test_a_head_of_one_layer_may_state_the_layers_of_its_target(target, dialect, tmp_path):
    assert load_eagle(publish(tmp_path, dialect), target).config.num_layers == 1
