"""DFlash, DSpark and DFlash 2 heads in their published layouts, against NumPy in float64.

The files are written by hand. Laws of a draft that depend on drawn tokens are compared for the
tokens that were drawn.
"""

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.checkpoint import CheckpointError, load_dflash, save_dflash
from jaxspec.checkpoint.folder import read_folder
from jaxspec.core.cache import pad_caches
from jaxspec.core.masks import causal
from jaxspec.core.types import Context, Params, Proposal, Recent, Warp
from jaxspec.drafters import DFlash
from jaxspec.models import Convolution, DFlashHead, ModelConfig, Network, init_params
from tests.checkpoint.published import (
    EPS,
    THETA,
    attended,
    gated_mlp,
    log_softmax,
    rms_norm,
    rotated,
)
from tests.models.reference import reference_residual

VOCAB, EMBED, HEADS, KV_HEADS, HEAD_DIM, MLP, LAYERS, BLOCK = 24, 16, 4, 2, 6, 20, 2, 4
MASK = VOCAB - 1
OUTPUTS = [1, 0]
"""Target layers whose outputs are read, in this order."""
RANK, GROUP, TOP_K = 5, 4, 6
LAYER = {
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
    "vocab_size": VOCAB,
}
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 7,
    "use_sliding_window": True,
}
MARKOV = {
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
OWN = {"mask_token_id": MASK, "target_layer_ids": OUTPUTS}
DFLASH = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    **LAYER,
    "block_size": BLOCK,
    "num_target_layers": 3,
    "dflash_config": OWN,
}
DSPARK = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    **LAYER,
    "block_size": BLOCK,
    "num_target_layers": 3,
    "num_anchors": 8,
    **OWN,
    **MARKOV,
}
CONFIGS = {
    "dflash": DFLASH,
    "dflash, sliding": {**DFLASH, **SLIDING, "is_causal": False},
    "dflash, sliding and causal": {**DFLASH, **SLIDING},
    "dspark": DSPARK,
    "dspark, first place silent": {
        **{name: value for name, value in DSPARK.items() if "confidence" not in name},
        "sample_from_anchor": False,
    },
    "dspark of speculators": {
        "speculators_model_type": "dspark",
        "transformer_layer_config": {**LAYER, **SLIDING, "model_type": "qwen3"},
        "aux_hidden_state_layer_ids": [layer + 1 for layer in OUTPUTS],
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "draft_vocab_size": VOCAB,
        "sample_from_anchor": True,
        "sliding_window_non_causal": True,
        **MARKOV,
        "confidence_head_with_markov": False,
    },
    "dflash 2": {
        **DFLASH,
        **SLIDING,
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "dflash_config": {
            **OWN,
            "block_size": BLOCK,
            "conv_kernel_size": 2,
            "conv_group_size": GROUP,
            "selector_rank": RANK,
            "selector_top_k": TOP_K,
        },
    },
}


@pytest.fixture(scope="module")
def target():
    config = ModelConfig(VOCAB, EMBED, 3, 2, 2, 8, 32, 128, tied_head=True)
    return Network(init_params(config, jax.random.key(0)), config)


def sizes_of(config: dict) -> dict[str, tuple[int, ...]]:
    """The tensors that a published file of this kind holds."""
    flat = {**config, **config.get("dflash_config", {})}
    sizes = {
        "fc.weight": (EMBED, len(OUTPUTS) * EMBED),
        "hidden_norm.weight": (EMBED,),
        "norm.weight": (EMBED,),
    }
    for i in range(LAYERS):
        parts = {
            "input_layernorm.weight": (EMBED,),
            "post_attention_layernorm.weight": (EMBED,),
            "self_attn.q_proj.weight": (HEADS * HEAD_DIM, EMBED),
            "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, EMBED),
            "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, EMBED),
            "self_attn.o_proj.weight": (EMBED, HEADS * HEAD_DIM),
            "self_attn.q_norm.weight": (HEAD_DIM,),
            "self_attn.k_norm.weight": (HEAD_DIM,),
            "mlp.gate_proj.weight": (MLP, EMBED),
            "mlp.up_proj.weight": (MLP, EMBED),
            "mlp.down_proj.weight": (EMBED, MLP),
        }
        if "conv_kernel_size" in flat:
            for name in ("attention_conv", "mlp_conv"):
                parts[f"{name}.base_kernel"] = (2, 2, EMBED)
                parts[f"{name}.kernel_projection.weight"] = (4 * EMBED // GROUP, EMBED)
        sizes |= {f"layers.{i}.{name}": size for name, size in parts.items()}
    if "markov_rank" in flat:
        sizes["markov_head.markov_w1.weight"] = (VOCAB, RANK)
        sizes["markov_head.markov_w2.weight"] = (VOCAB, RANK)
    if flat.get("enable_confidence_head"):
        width = EMBED + (RANK if flat["confidence_head_with_markov"] else 0)
        sizes["confidence_head.proj.weight"] = (1, width)
        sizes["confidence_head.proj.bias"] = (1,)
    if "selector_rank" in flat:
        sizes["candidate_selector.predecessor_codebook"] = (VOCAB, RANK)
        sizes["candidate_selector.successor_codebook"] = (VOCAB, RANK)
        sizes["candidate_selector.hidden_projection.weight"] = (RANK, EMBED)
    return sizes


class Published(NamedTuple):
    """A head's folder, its config.json and its tensors."""

    folder: Path
    config: dict
    tensors: dict[str, np.ndarray]


def publish(folder: Path, config: dict, **more: tuple[int, ...]) -> Published:
    random = np.random.default_rng(0)
    tensors = {
        name: random.normal("norm" in name, 0.3, size).astype("f4")
        for name, size in {**sizes_of(config), **more}.items()
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return Published(folder, config, tensors)


@pytest.fixture(scope="module", params=CONFIGS)
def published(request, tmp_path_factory) -> Published:
    return publish(tmp_path_factory.mktemp("published"), CONFIGS[request.param])


def convolved(inputs, own, added) -> np.ndarray:
    """A convolution over a block, channel by channel, as DFlash 2's paper page defines it."""
    outputs = np.zeros_like(inputs)
    for place, channel in np.ndindex(inputs.shape):
        for back in range(min(len(own), place + 1)):
            factor = own[back, channel] + added[place, back, channel // GROUP]
            outputs[place, channel] += factor * inputs[place - back, channel]
    return outputs


def reference_features(target, head: Published, text) -> np.ndarray:
    """Features of the places of a block whose first is the last token of a text."""
    weight = {name: tensor.astype(np.float64) for name, tensor in head.tensors.items()}
    nested = head.config.get("transformer_layer_config", head.config)
    causal_slides = not (
        head.config.get("is_causal") is False or head.config.get("sliding_window_non_causal")
    )
    embedding = np.asarray(target.params["embed"]["embedding"], np.float64)
    outputs = [reference_residual(target.params, target.config, text, i + 1) for i in OUTPUTS]
    states = np.concatenate(outputs, -1)[:-1]
    context = rms_norm(states @ weight["fc.weight"].T, weight["hidden_norm.weight"])
    residual = embedding[[text[-1], *[MASK] * (BLOCK - 1)]]
    places = np.arange(len(text) - 1 + BLOCK)
    own = places[-BLOCK:]
    for i in range(LAYERS):
        layer = f"layers.{i}"
        slides = nested.get("layer_types", ["full_attention"] * LAYERS)[i].startswith("sliding")
        seen = np.ones((BLOCK, len(places)), bool)
        if slides:
            seen &= own[:, None] - places[None] < nested["sliding_window"]
            if causal_slides:
                seen &= places[None] <= own[:, None]

        def project(inputs, name, layer=layer):
            outputs = inputs @ weight[f"{layer}.self_attn.{name}_proj.weight"].T
            return outputs.reshape(len(inputs), -1, HEAD_DIM)

        def around(name, inputs, sublayer, layer=layer):
            """A sub-layer between its two convolutions, if there are any."""
            if f"{layer}.{name}.base_kernel" not in weight:
                return sublayer(inputs)
            base = weight[f"{layer}.{name}.base_kernel"]
            added = inputs @ weight[f"{layer}.{name}.kernel_projection.weight"].T
            before, after = added.reshape(BLOCK, 2, 2, EMBED // GROUP).swapaxes(0, 1)
            return convolved(sublayer(convolved(inputs, base[0], before)), base[1], after)

        def attention(normed, layer=layer, project=project, seen=seen):
            both = np.concatenate([context, normed])
            queries = rms_norm(project(normed, "q"), weight[f"{layer}.self_attn.q_norm.weight"])
            keys = rms_norm(project(both, "k"), weight[f"{layer}.self_attn.k_norm.weight"])
            queries, keys = rotated(queries, own), rotated(keys, places)
            outputs = attended(queries, keys, project(both, "v"), seen)
            return outputs @ weight[f"{layer}.self_attn.o_proj.weight"].T

        def mlp(normed, layer=layer):
            kernels = (weight[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
            return gated_mlp(normed, *kernels)

        normed = rms_norm(residual, weight[f"{layer}.input_layernorm.weight"])
        residual = residual + around("attention_conv", normed, attention)
        normed = rms_norm(residual, weight[f"{layer}.post_attention_layernorm.weight"])
        residual = residual + around("mlp_conv", normed, mlp)
    return rms_norm(residual, weight["norm.weight"])


def reference_laws(target, head: Published, features, tokens) -> np.ndarray:
    """Log-probabilities of a chain's tokens, given features and the tokens before them."""
    weight = {name: tensor.astype(np.float64) for name, tensor in head.tensors.items()}
    embedding = np.asarray(target.params["embed"]["embedding"], np.float64)
    laws = []
    for place, previous in zip(features, tokens, strict=True):
        logits = place @ embedding.T
        logits[MASK] = -np.inf
        if "markov_rank" in head.config:
            row = weight["markov_head.markov_w1.weight"][previous]
            logits = logits + weight["markov_head.markov_w2.weight"] @ row
        if "candidate_selector.predecessor_codebook" in weight:
            gate = weight["candidate_selector.hidden_projection.weight"] @ place
            row = weight["candidate_selector.predecessor_codebook"][previous] * gate
            best = np.argsort(-logits)[:TOP_K]
            changed = np.full(VOCAB, -np.inf)
            edges = weight["candidate_selector.successor_codebook"][best] @ row
            changed[best] = logits[best] + edges
            logits = changed
        laws.append(log_softmax(logits))
    return np.array(laws)


TEXT = np.random.default_rng(1).integers(0, MASK, 11)


def draft(target, head: DFlashHead, temperature=1.0, **settings) -> Proposal:
    """A draft behind `TEXT`."""
    length, tokens = len(TEXT), jnp.asarray(TEXT, jnp.int32)
    read = target.forward(tokens, jnp.arange(length), causal(length), None, taps=head.taps)
    nothing = jnp.zeros((BLOCK, len(OUTPUTS) * EMBED))
    recent = Recent(jnp.zeros(BLOCK, jnp.int32), nothing[:, :0], nothing, jnp.int32(0))
    warp = Warp() if temperature is None else Warp(temperature=jnp.float32(temperature))
    context = Context(
        jnp.pad(tokens, (0, 2 * BLOCK)),
        jnp.int32(length),
        jnp.int32(99),
        jnp.array([-1]),
        warp,
        target.empty_cache(1),
        recent,
    )
    loaded = DFlash.of(head, **settings)
    params = Params(target, head)
    loaded.drafter.check_fit(params)
    state = loaded.drafter.init(params, read, context)
    state = state._replace(cache=pad_caches(state.cache, length + 2 * BLOCK))
    return loaded.drafter.propose(params, jax.random.key(0), state, context)[0]


def test_a_published_head_drafts_as_the_reference_says(target, published):
    head = load_dflash(published.folder, target)
    assert read_folder(published.folder).kind == "dflash"
    assert head.taps == (2, 1)
    proposal = draft(target, head)
    is_dspark = published.config.get("architectures") == ["Qwen3DSparkModel"]
    assert head.anchor_predicts == published.config.get("sample_from_anchor", is_dspark)
    assert len(proposal.draft_logprobs) == head.num_drafted == BLOCK - 1 + head.anchor_predicts
    features = reference_features(target, published, TEXT)[-head.num_drafted :]
    expected = reference_laws(target, published, features, np.asarray(proposal.tokens)[:-1])
    np.testing.assert_allclose(proposal.draft_logprobs, expected, atol=1e-4)
    assert np.all(np.isneginf(proposal.draft_logprobs[:, MASK]))


@pytest.mark.parametrize("name", ["dspark", "dflash 2"])
def test_a_published_head_drafts_a_tree_as_the_reference_says(target, name, tmp_path):
    """Every node's law is given the token of the node, which its siblings do not know."""
    published = publish(tmp_path, CONFIGS[name])
    head = load_dflash(published.folder, target)
    proposal = draft(target, head, paths=((0,), (1,), (0, 0), (1, 0), (1, 0, 0)))
    features = reference_features(target, published, TEXT)[-head.num_drafted :]
    parents, depths = (0, 1, 2, 4), (0, 1, 1, 2)
    tokens = np.asarray(proposal.tokens)[list(parents)]
    expected = reference_laws(target, published, features[list(depths)], tokens)
    np.testing.assert_allclose(proposal.draft_logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_a_path_selector_ranks_the_tokens_of_a_place_once(
    target, temperature, tmp_path, monkeypatch
):
    """The draft is that of a ranking for each node."""
    head = load_dflash(publish(tmp_path, CONFIGS["dflash 2"]).folder, target)
    paths = ((0,), (1,), (0, 0), (1, 0), (1, 0, 0))
    rankings, top_k, follow = [], jax.lax.top_k, DFlashHead.follow

    def counted(logits, count):
        if count == TOP_K:
            rankings.append(len(logits))
        return top_k(logits, count)

    def for_each_node(head, logits, features, previous):
        logits, features = (jnp.repeat(part, len(previous), axis=0) for part in (logits, features))
        return follow(head, logits, features, previous)

    monkeypatch.setattr(jax.lax, "top_k", counted)
    once = draft(target, head, temperature, paths=paths)
    assert rankings == [1, 1, 1]
    monkeypatch.setattr(DFlashHead, "follow", for_each_node)
    expected = draft(target, head, temperature, paths=paths)
    assert rankings[3:] == [1, 2, 1]
    np.testing.assert_array_equal(once.tokens, expected.tokens)
    if temperature is not None:
        np.testing.assert_allclose(once.draft_logprobs, expected.draft_logprobs, atol=1e-6)


def test_the_likeliest_path_is_greedy_from_left_to_right(target, published):
    head = load_dflash(published.folder, target)
    proposal = draft(target, head, temperature=None)
    assert proposal.draft_logprobs is None
    features = reference_features(target, published, TEXT)[-head.num_drafted :]
    tokens = [TEXT[-1]]
    for place in features:
        tokens.append(reference_laws(target, published, place[None], tokens[-1:])[0].argmax())
    np.testing.assert_array_equal(proposal.tokens, tokens)


def reference_acceptance(published: Published, features, tokens) -> np.ndarray:
    """Chances of acceptance, given features of places and the tokens before them."""
    inputs = features
    if published.config["confidence_head_with_markov"]:
        rows = published.tensors["markov_head.markov_w1.weight"][tokens]
        inputs = np.concatenate([features, rows], -1)
    weight = published.tensors["confidence_head.proj.weight"][0]
    sums = inputs @ weight.astype(np.float64) + published.tensors["confidence_head.proj.bias"]
    return 1 / (1 + np.exp(-sums))


def test_a_draft_ends_before_the_first_token_of_little_confidence(target, published):
    head = load_dflash(published.folder, target)
    if not head.parts.confidence:
        with pytest.raises(ValueError, match="confidence needs a head with a confidence head"):
            draft(target, head, confidence=0.5)
        return
    features = reference_features(target, published, TEXT)
    whole = draft(target, head)
    tokens = np.asarray(whole.tokens)
    chances = reference_acceptance(published, features, tokens[:-1])
    found = head.acceptance(jnp.asarray(features, jnp.float32), whole.tokens[:-1])
    np.testing.assert_allclose(found, chances, atol=1e-5)
    assert whole.valid.all()
    for threshold in (0.0, *(np.sort(chances)[:-1] + 1e-3), 1.0):
        proposal = draft(target, head, confidence=float(threshold))
        np.testing.assert_array_equal(proposal.tokens, tokens)
        kept = np.logical_and.accumulate(chances >= threshold)
        np.testing.assert_array_equal(proposal.valid, [True, *kept])


def test_a_head_comes_back_as_it_was_saved(target, published, tmp_path):
    head = load_dflash(published.folder, target)
    save_dflash(head, tmp_path)
    again = load_dflash(tmp_path, target)
    jax.tree.map(np.testing.assert_array_equal, head, again)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == published.tensors.keys()
    jax.tree.map(np.testing.assert_array_equal, written, published.tensors)


def test_the_targets_own_ends_are_not_read(target, tmp_path):
    """DeepSpec's files hold them, frozen."""
    ends = {"embed_tokens.weight": (VOCAB, EMBED), "lm_head.weight": (VOCAB, EMBED)}
    with_ends = load_dflash(publish(tmp_path / "with", DSPARK, **ends).folder, target)
    without = load_dflash(publish(tmp_path / "without", DSPARK).folder, target)
    jax.tree.map(np.testing.assert_array_equal, with_ends, without)


def changed(config: dict, own: dict | None = None, **values) -> dict:
    """A config.json with some entries changed, those of `own` within `dflash_config`."""
    if own is not None:
        values["dflash_config"] = {**config["dflash_config"], **own}
    return {name: value for name, value in {**config, **values}.items() if value != "left out"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(DSPARK, markov_head_type="gated"), "sets markov_head_type 'gated', which is not"),
        (changed(DSPARK, markov_rank=0), "sets confidence_head_with_markov True"),
        (changed(DSPARK, draft_vocab_size=9), "sets draft_vocab_size 9"),
        (changed(DSPARK, final_logit_softcapping=30.0), r"final_logit_softcapping 30\.0"),
        (changed(DSPARK, architectures=["Gemma4DSparkModel"]), "is no DFlash head"),
        (changed(DSPARK, markov_rank="5"), "markov_rank must be a whole number, got '5'"),
        (changed(DSPARK, sample_from_anchor=3), "sample_from_anchor must be True or False, got 3"),
        (changed(DSPARK, mask_token_id="left out"), "lacks 'mask_token_id'"),
        (
            changed(CONFIGS["dspark of speculators"], sample_from_anchor="left out"),
            "does not have sample_from_anchor",
        ),
        (changed(DSPARK, block_size=2.5), "block_size must be a whole number, got 2.5"),
        (changed(DSPARK, num_hidden_layers=4000), "there are 4000 layers, .* of 2 at most"),
        (changed(DFLASH, transformer_layer_config=5), "_layer_config must be a mapping, got 5"),
        (changed(DFLASH, own={"target_layer_ids": 5}), "target_layer_ids must be a sequence"),
        (changed(DFLASH, own={"target_layer_ids": []}), "target_layer_ids must name at least one"),
        (changed(DFLASH, own={"output_multiplier": 0.2}), r"sets output_multiplier 0\.2"),
        (changed(DFLASH, own={"projector_type": "domino"}), "sets projector_type 'domino'"),
        (changed(DFLASH, own={"shift_label": True}), "sets shift_label True"),
        (changed(CONFIGS["dflash 2"], markov_rank=4), "sets markov_rank 4"),
        (changed(CONFIGS["dflash 2"], own={"conv_group_size": 3}), r"must divide hidden_size \(16"),
        (changed(CONFIGS["dflash 2"], own={"selector_top_k": VOCAB}), "selector_top_k .* below"),
        (changed(CONFIGS["dflash 2"], sliding_window=3), "sliding_window 3 is less than a block"),
        (changed(CONFIGS["dflash 2"], own={"conv_kernel_size": None}), "unknown: layers.0.att"),
    ],
)
def test_what_is_not_covered_is_named(target, config, message, tmp_path):
    folder = publish(tmp_path / "head", CONFIGS["dflash 2"] if "conv" in str(config) else config)
    (folder.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load_dflash(folder.folder, target)


def test_parts_that_no_published_layout_joins_are_not_saved(target, tmp_path):
    head = load_dflash(publish(tmp_path / "head", CONFIGS["dflash 2"]).folder, target)
    assert head.parts.convolution == Convolution(2, GROUP)
    other = dataclasses.replace(head, anchor_predicts=True)
    with pytest.raises(CheckpointError, match="No published layout holds a path selector with"):
        save_dflash(other, tmp_path / "saved")


def test_places_that_depend_on_one_another_are_drafted_from_left_to_right(target, tmp_path):
    head = load_dflash(publish(tmp_path / "head", DSPARK).folder, target)
    with pytest.raises(ValueError, match=r"steps must be 1, got 2: .* the one before it"):
        draft(target, head, steps=2)
