import dataclasses

import jax
import numpy as np
import pytest

from jaxspec.checkpoint import CheckpointError
from jaxspec.checkpoint.names import (
    TABLES,
    TIED_HEAD,
    check_counts,
    copy_into,
    copy_out,
    match_tensors,
    placements,
)
from jaxspec.checkpoint.safetensors import StoredTensor
from jaxspec.models import Experts, ModelConfig, param_shapes

SIZES = {
    "vocab_size": 20,
    "embed_dim": 12,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 4,
    "mlp_dim": 10,
    "max_positions": 32,
}
GEMMA = {"norm_plus_one": True, "post_norms": True, "tied_head": True}
EXPERTS = Experts(num=3, per_token=2, mlp_dim=5, normalize=True, layers=(False, True))
SHARED = dataclasses.replace(EXPERTS, shared_dim=7)
OLMO2 = {"pre_norms": False, "post_norms": True, "qk_norm": True, "joint_qk_norm": True}
CONFIGS = {
    "llama": ModelConfig(**SIZES, qkv_bias=True, out_bias=True, mlp_bias=True),
    "mistral": ModelConfig(**SIZES),
    "mixtral": ModelConfig(**SIZES, experts=EXPERTS),
    "qwen2": ModelConfig(**SIZES, qkv_bias=True, tied_head=True),
    "qwen2_moe": ModelConfig(**SIZES, qkv_bias=True, experts=SHARED),
    "qwen3": ModelConfig(**SIZES, qk_norm=True),
    "qwen3_moe": ModelConfig(**SIZES, qk_norm=True, experts=EXPERTS),
    "gemma2": ModelConfig(**SIZES, **GEMMA),
    "gemma3_text": ModelConfig(**SIZES, **GEMMA, qk_norm=True),
    "phi3": ModelConfig(**SIZES),
    "olmo2": ModelConfig(**SIZES, **OLMO2),
    "smollm3": ModelConfig(**SIZES, layer_types=("full", "unrotated")),
    "granite": ModelConfig(**SIZES, residual_scale=0.5),
    "llada": ModelConfig(**SIZES),
    "Dream": ModelConfig(**SIZES, qkv_bias=True),
    "sdar": ModelConfig(**SIZES, qk_norm=True),
}


def leaf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    flat, _ = jax.tree_util.tree_flatten_with_path(param_shapes(config))
    return {"/".join(entry.key for entry in path): leaf.shape for path, leaf in flat}


def stored_tensors(placed, leaves) -> dict[str, StoredTensor]:
    return {
        placement.name: StoredTensor(None, "F32", placement.stored_shape(leaves[path]), 0, 0)
        for path, group in placed.items()
        for placement in group
    }


def test_every_family_has_a_table():
    assert CONFIGS.keys() == TABLES.keys()


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_every_number_is_stored_once_and_found_again(family):
    """Leaves of all-different numbers, written out and read into NaNs, come back whole."""
    config = CONFIGS[family]
    leaves = leaf_shapes(config)
    placed = placements(family, config, leaves)
    assert placed.keys() == leaves.keys()
    num_stored = 0
    for path, shape in leaves.items():
        leaf = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        again = np.full(shape, np.nan, np.float32)
        for placement in placed[path]:
            tensor = copy_out(placement, leaf, np.dtype(np.float32))
            num_stored += tensor.size
            copy_into(placement, again, tensor)
        np.testing.assert_array_equal(again, leaf)
    assert num_stored == sum(np.prod(shape) for shape in leaves.values())


def test_the_product_with_a_stored_matrix_is_the_product_with_the_leaf():
    """The layout as such: y = x W^T of the file is the fused, per-kv-head kernel's entry."""
    config = CONFIGS["llama"]
    leaves = leaf_shapes(config)
    path = "layer_0/attention/qkv/kernel"
    draw = np.random.default_rng(0)
    kernel = draw.normal(size=leaves[path]).astype(np.float32)
    stored = {
        placement.name: copy_out(placement, kernel, np.dtype(np.float32))
        for placement in placements("llama", config, leaves)[path]
    }
    inputs = draw.normal(size=12).astype(np.float32)
    fused = np.einsum("d,dkgh->kgh", inputs, kernel)
    query = stored["model.layers.0.self_attn.q_proj.weight"] @ inputs
    key = stored["model.layers.0.self_attn.k_proj.weight"] @ inputs
    value = stored["model.layers.0.self_attn.v_proj.weight"] @ inputs
    np.testing.assert_allclose(query.reshape(2, 3, 4), fused[:, :3], rtol=1e-5)
    np.testing.assert_allclose(key.reshape(2, 4), fused[:, 3], rtol=1e-5)
    np.testing.assert_allclose(value.reshape(2, 4), fused[:, 4], rtol=1e-5)


def test_missing_unknown_and_misshaped_tensors_are_all_listed():
    config = CONFIGS["llama"]
    leaves = leaf_shapes(config)
    placed = placements("llama", config, leaves)
    stored = stored_tensors(placed, leaves)
    del stored["model.norm.weight"], stored["model.layers.1.mlp.up_proj.weight"]
    stored["model.embed_tokens.weight"] = stored["lm_head.weight"]._replace(shape=(21, 12))
    stored["model.layers.2.mlp.up_proj.weight"] = stored["lm_head.weight"]
    with pytest.raises(CheckpointError) as caught:
        match_tensors(placed, leaves, stored, TIED_HEAD if config.tied_head else ())
    lines = str(caught.value).splitlines()
    assert "4 tensors are wrong" in lines[0]
    assert sorted(line.strip() for line in lines[1:]) == [
        "missing: model.layers.1.mlp.up_proj.weight, of shape [10, 12]",
        "missing: model.norm.weight, of shape [12]",
        "of another shape: model.embed_tokens.weight is [21, 12], config.json makes it [20, 12]",
        "unknown: model.layers.2.mlp.up_proj.weight, of shape [20, 12]",
    ]


def test_of_many_wrong_tensors_the_first_of_each_kind_are_listed():
    leaves = leaf_shapes(CONFIGS["llama"])
    placed = placements("llama", CONFIGS["llama"], leaves)
    stored = stored_tensors(placed, leaves)
    other = {f"x.{number}.{name}": stored[name] for number in range(300) for name in stored}
    with pytest.raises(CheckpointError) as caught:
        match_tensors(placed, leaves, other)
    lines = str(caught.value).splitlines()
    assert f"{301 * len(stored)} tensors are wrong" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == [
        *(["missing:"] * 5 + ["and"] + ["unknown:"] * 5 + ["and"]),
    ]
    assert lines[-1].strip() == f"and {300 * len(stored) - 5} more"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 4096, "layer_types": ()}, "are 4096 layers, and the file has .* 2 at most"),
        (
            {"experts": dataclasses.replace(EXPERTS, num=10**9)},
            "are 1000000000 experts, and the file has tensors of 25 at most",
        ),
    ],
)
def test_more_than_a_file_holds_is_refused_at_once(changes, message):
    config = CONFIGS["qwen3"]
    leaves = leaf_shapes(config)
    stored = stored_tensors(placements("qwen3", config, leaves), leaves)
    check_counts(TABLES["qwen3_moe"], config, stored)
    with pytest.raises(CheckpointError, match=message):
        check_counts(TABLES["qwen3_moe"], config.replace(**changes), stored)


def test_a_head_that_is_carried_along_counts_only_when_it_is_not_tied():
    leaves = leaf_shapes(CONFIGS["qwen2"])
    placed = placements("qwen2", CONFIGS["qwen2"], leaves)
    stored = stored_tensors(placed, leaves)
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = stored["lm_head.weight"]
    assert "lm_head.weight" not in match_tensors(placed, leaves, stored, TIED_HEAD)
    with pytest.raises(CheckpointError, match=r"unknown: lm_head\.weight"):
        match_tensors(placed, leaves, stored)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_multimodal_checkpoint_is_found(prefix):
    config = CONFIGS["gemma3_text"]
    leaves = leaf_shapes(config)
    placed = placements("gemma3_text", config, leaves)
    plain = stored_tensors(placed, leaves)
    stored = {prefix + name.removeprefix("model."): tensor for name, tensor in plain.items()}
    stored["vision_tower.vision_model.embeddings.weight"] = plain["model.norm.weight"]
    stored["model.multi_modal_projector.mm_input.weight"] = plain["model.norm.weight"]
    assert match_tensors(placed, leaves, stored, TIED_HEAD if config.tied_head else ()) == plain
