import dataclasses

import pytest

from jaxspec.models import Diffusion, Experts, LongRopeScaling, ModelConfig, Rope, YarnScaling
from tests.models.families import FAMILIES, LLAMA


@pytest.mark.parametrize("name", FAMILIES)
def test_equal_configs_are_equal_and_hash_alike(name):
    config = FAMILIES[name]
    copy = dataclasses.replace(config)
    assert copy == config
    assert hash(copy) == hash(config)
    assert config.replace(norm_eps=1e-3) != config


def test_no_layer_types_stands_for_all_full():
    assert LLAMA.layer_types == ("full",) * 3
    assert LLAMA.replace(layer_types=("full",) * 3) == LLAMA


def test_layers_choose_their_rotation_and_window():
    config = FAMILIES["gemma3"]
    assert [config.layer_window(i) for i in range(3)] == [4, None, 4]
    assert [config.layer_rope(i).theta for i in range(3)] == [100.0, 1_000_000.0, 100.0]
    assert FAMILIES["gemma2"].layer_rope(0) == FAMILIES["gemma2"].layer_rope(1)
    assert [FAMILIES["smollm3"].layer_rope(i) for i in range(3)] == [Rope(), None, Rope()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"num_kv_heads": 3}, r"num_heads must be a multiple of num_kv_heads \(3\), got 4"),
        ({"activation": "relu"}, "activation must be one of .*got 'relu'"),
        ({"layer_types": ("full",)}, "layer_types must name 3 layers"),
        ({"layer_types": ("full", "full", "round")}, r"layer_types.2. must be one of .*'round'"),
        ({"layer_types": ("sliding",) * 3}, "sliding_window must be given"),
        ({"sliding_window": 0}, "sliding_window must be at least 1"),
        ({"final_softcap": -1.0}, "final_softcap must be above 0"),
        ({"diffusion": Diffusion(61)}, r"mask_token_id must be an id below vocab_size \(61\)"),
        (
            {"diffusion": Diffusion(0), "layer_types": ("sliding",) * 3, "sliding_window": 4},
            "diffusion: layers that slide look back only",
        ),
        ({"norm_eps": 0.0}, "norm_eps must be above 0"),
        ({"logit_divisor": 0.0}, "logit_divisor must be above 0, got 0.0"),
        ({"joint_qk_norm": True}, "joint_qk_norm .* qk_norm must be True"),
        ({"rope": Rope(fraction=0.4)}, "rope.fraction must rotate an even number"),
        (
            {"rope": Rope(scaling=LongRopeScaling((1.0,), (1.0,) * 4, 2.0, 64))},
            "rope.scaling.short_factors must have 4 entries.*got 1",
        ),
        (
            {"experts": Experts(4, 2, 8, True, (True,))},
            r"experts.layers must have 3 entries \(num_layers\), got 1",
        ),
    ],
)
def test_impossible_settings_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        LLAMA.replace(**changes)


def test_impossible_parts_are_refused_by_name():
    with pytest.raises(ValueError, match=r"rope\.theta must be above 0"):
        Rope(theta=0.0)
    with pytest.raises(ValueError, match=r"fraction must be in \(0, 1\]"):
        Rope(fraction=1.5)
    with pytest.raises(ValueError, match=r"scaling.factor must be at least 1"):
        Rope(scaling=YarnScaling(0.5, 64))
    with pytest.raises(ValueError, match=r"per_token must be in 1..4"):
        Experts(num=4, per_token=5, mlp_dim=8, normalize=True, layers=(True,))
    with pytest.raises(ValueError, match=r"mlp_dim must be at least 1"):
        Experts(num=4, per_token=2, mlp_dim=0, normalize=True, layers=(True,))
    with pytest.raises(ValueError, match=r"experts.shared_dim must be at least 1, got 0"):
        Experts(num=4, per_token=2, mlp_dim=8, normalize=True, layers=(True,), shared_dim=0)


def test_a_head_of_keys_serves_a_group_of_queries():
    config = ModelConfig(8, 8, 1, 6, 2, 4, 8, 8)
    assert config.num_groups == 3
    assert config.score_scale == 0.5
    assert config.replace(query_scale=0.1).score_scale == 0.1
