"""A DFlash head in the published layout, written by hand, against NumPy in float64."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.checkpoint import load_dflash
from jaxspec.core.cache import pad_caches
from jaxspec.core.masks import causal
from jaxspec.core.types import Context, Params, Recent, Warp
from jaxspec.drafters import DFlash
from jaxspec.models import ModelConfig, Network, init_params
from tests.models.reference import reference_residual

VOCAB, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS, BLOCK = 24, 16, 4, 2, 6, 20, 2, 4
MASK = VOCAB - 1
OUTPUTS = [1, 0]
"""Target layers whose outputs are read, in this order."""
THETA, EPS = 500.0, 1e-5
CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": EMBED,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": MLP,
    "max_position_embeddings": 128,
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "hidden_act": "silu",
    "attention_bias": False,
    "block_size": BLOCK,
    "num_target_layers": 3,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": OUTPUTS},
}


@pytest.fixture(scope="module")
def target():
    config = ModelConfig(VOCAB, EMBED, 3, 2, 2, 8, 32, 128, tied_head=True)
    return Network(init_params(config, jax.random.key(0)), config)


@pytest.fixture(scope="module")
def tensors():
    sizes = {"fc": (EMBED, len(OUTPUTS) * EMBED), "hidden_norm": (EMBED,), "norm": (EMBED,)}
    for i in range(LAYERS):
        sizes |= {
            f"layers.{i}.{name}": size
            for name, size in {
                "input_layernorm": (EMBED,),
                "post_attention_layernorm": (EMBED,),
                "self_attn.q_proj": (HEADS * HEAD_DIM, EMBED),
                "self_attn.k_proj": (KV_HEADS * HEAD_DIM, EMBED),
                "self_attn.v_proj": (KV_HEADS * HEAD_DIM, EMBED),
                "self_attn.o_proj": (EMBED, HEADS * HEAD_DIM),
                "self_attn.q_norm": (HEAD_DIM,),
                "self_attn.k_norm": (HEAD_DIM,),
                "mlp.gate_proj": (MLP, EMBED),
                "mlp.up_proj": (MLP, EMBED),
                "mlp.down_proj": (EMBED, MLP),
            }.items()
        }
    random = np.random.default_rng(0)
    return {
        f"{name}.weight": random.normal(1.0 if "norm" in name else 0.0, 0.3, size).astype("f4")
        for name, size in sizes.items()
    }


def rms_norm(inputs, weight):
    return inputs / np.sqrt((inputs**2).mean(-1, keepdims=True) + EPS) * weight


def rotated(heads, positions):
    """Halves [positions, heads, dim] turned as pairs, at absolute positions."""
    half = HEAD_DIM // 2
    angles = positions[:, None, None] * THETA ** (-np.arange(half) / half)
    first, second = heads[..., :half], heads[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def reference_laws(target, tensors, text) -> np.ndarray:
    """Log-probabilities of the masks behind a text whose last token is pending."""

    def weight(name):
        return tensors[f"{name}.weight"].astype(np.float64)

    embedding = np.asarray(target.params["embed"]["embedding"], np.float64)
    outputs = [reference_residual(target.params, target.config, text, i + 1) for i in OUTPUTS]
    states = np.concatenate(outputs, -1)[:-1]
    context = rms_norm(states @ weight("fc").T, weight("hidden_norm"))
    residual = embedding[[text[-1], *[MASK] * (BLOCK - 1)]]
    places = np.arange(len(text) - 1 + BLOCK)
    for i in range(LAYERS):

        def project(inputs, name, layer=f"layers.{i}.self_attn"):
            return (inputs @ weight(f"{layer}.{name}_proj").T).reshape(len(inputs), -1, HEAD_DIM)

        normed = rms_norm(residual, weight(f"layers.{i}.input_layernorm"))
        both = np.concatenate([context, normed])
        queries = rms_norm(project(normed, "q"), weight(f"layers.{i}.self_attn.q_norm"))
        keys = rms_norm(project(both, "k"), weight(f"layers.{i}.self_attn.k_norm"))
        queries, keys = rotated(queries, places[-BLOCK:]), rotated(keys, places)
        keys, values = (
            np.repeat(part, HEADS // KV_HEADS, axis=1) for part in (keys, project(both, "v"))
        )
        scores = np.exp(np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(HEAD_DIM))
        shares = scores / scores.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", shares, values).reshape(BLOCK, -1)
        residual = residual + attended @ weight(f"layers.{i}.self_attn.o_proj").T
        normed = rms_norm(residual, weight(f"layers.{i}.post_attention_layernorm"))
        gate = normed @ weight(f"layers.{i}.mlp.gate_proj").T
        hidden = gate / (1 + np.exp(-gate)) * (normed @ weight(f"layers.{i}.mlp.up_proj").T)
        residual = residual + hidden @ weight(f"layers.{i}.mlp.down_proj").T
    logits = rms_norm(residual, weight("norm"))[1:] @ embedding.T
    logits[:, MASK] = -np.inf
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_a_published_head_drafts_as_the_reference_says(target, tensors, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, tmp_path / "model.safetensors")
    head = load_dflash(tmp_path, target)
    assert head.taps == (2, 1)
    text = np.random.default_rng(1).integers(0, MASK, 11)
    tokens = jnp.asarray(text, jnp.int32)
    read = target.forward(tokens, jnp.arange(11), causal(11), None, taps=head.taps)
    nothing = jnp.zeros((BLOCK, len(OUTPUTS) * EMBED))
    recent = Recent(jnp.zeros(BLOCK, jnp.int32), nothing[:, :0], nothing, jnp.int32(0))
    context = Context(
        jnp.pad(tokens, (0, 2 * BLOCK)),
        jnp.int32(11),
        jnp.int32(99),
        jnp.array([-1]),
        Warp(temperature=jnp.float32(1.0)),
        target.empty_cache(1),
        recent,
    )
    loaded = DFlash.of(head)
    params = Params(target, head)
    state = loaded.drafter.init(params, read, context)
    state = state._replace(cache=pad_caches(state.cache, 11 + 2 * BLOCK))
    proposal, _ = loaded.drafter.propose(params, jax.random.key(0), state, context)
    expected = reference_laws(target, tensors, text)
    assert proposal.draft_logprobs.shape[0] == BLOCK - 1 == loaded.drafter.block
    np.testing.assert_allclose(proposal.draft_logprobs[:, :MASK], expected[:, :MASK], atol=1e-4)
    assert np.all(np.isneginf(proposal.draft_logprobs[:, MASK]))
