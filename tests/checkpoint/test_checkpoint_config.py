import contextlib
import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.checkpoint import CheckpointError, config_from_json, config_to_json
from jaxspec.models import (
    Diffusion,
    DynamicScaling,
    Experts,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    Rope,
    YarnScaling,
)

SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
OURS = ModelConfig(
    vocab_size=100,
    embed_dim=32,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=48,
    max_positions=256,
    norm_eps=1e-5,
)
FACTORS = tuple(1.0 + i for i in range(4))
FULL, SLIDING = ("full",) * 4, ("sliding",) * 4
MIXED = ("full", "sliding", "sliding", "sliding")
EVEN = ("sliding", "full") * 2
GEMMA = OURS.replace(
    norm_plus_one=True,
    post_norms=True,
    tied_head=True,
    activation="gelu_tanh",
    embed_scale=32**0.5,
    query_scale=16**-0.5,
    layer_types=EVEN,
    sliding_window=8,
)
GEMMA3 = GEMMA.replace(
    qk_norm=True,
    rope=Rope(1_000_000.0, scaling=LinearScaling(8.0)),
    sliding_rope=Rope(10_000.0),
)
MOE = OURS.replace(
    qk_norm=True,
    experts=Experts(
        num=6, per_token=2, mlp_dim=16, normalize=True, layers=(True, False, True, True)
    ),
)
MIXTRAL = Experts(num=6, per_token=2, mlp_dim=48, normalize=True, layers=(True,) * 4)
SHARED = dataclasses.replace(MOE.experts, normalize=False, shared_dim=24)
OLMO2 = OURS.replace(pre_norms=False, post_norms=True, qk_norm=True, joint_qk_norm=True)


def rope(scaling):
    return OURS.replace(rope=Rope(5e5, scaling=scaling))


# Every network a family can describe, for the round trip; the names say what is special.
NETWORKS = {
    "llama": OURS,
    "llama, biases": OURS.replace(qkv_bias=True, out_bias=True, mlp_bias=True),
    "llama, wide heads": OURS.replace(head_dim=16),
    "llama, tied": OURS.replace(tied_head=True),
    "linear": rope(LinearScaling(2.0)),
    "dynamic": rope(DynamicScaling(2.0, 256)),
    "llama3": rope(Llama3Scaling(8.0, 1.0, 4.0, 64)),
    "yarn": rope(YarnScaling(4.0, 64, beta_fast=16.0, mscale=0.7, mscale_all_dim=0.9)),
    "yarn, fixed": rope(YarnScaling(4.0, 64, attention_factor=1.1, truncate=False)),
    "mistral": OURS.replace(layer_types=SLIDING, sliding_window=8),
    "qwen2": OURS.replace(qkv_bias=True, tied_head=True),
    "qwen2, windows": OURS.replace(qkv_bias=True, layer_types=MIXED, sliding_window=8),
    "qwen2, a window at first": OURS.replace(
        qkv_bias=True, layer_types=("sliding", *FULL[1:]), sliding_window=8
    ),
    "qwen3": OURS.replace(qk_norm=True, head_dim=16),
    "qwen3, windows": OURS.replace(qk_norm=True, layer_types=MIXED, sliding_window=8),
    "qwen3_moe": MOE,
    "mixtral": OURS.replace(experts=MIXTRAL, layer_types=SLIDING, sliding_window=8),
    "qwen2_moe": OURS.replace(
        qkv_bias=True, experts=SHARED, layer_types=("sliding", *MIXED[:3]), sliding_window=8
    ),
    "qwen2_moe, no biases": OURS.replace(experts=SHARED),
    "olmo2": OLMO2,
    "olmo2, biases": OLMO2.replace(qkv_bias=True, out_bias=True, head_dim=16),
    "smollm3": OURS.replace(layer_types=("full", "full", "unrotated", "full"), mlp_bias=True),
    "granite": OURS.replace(
        embed_scale=12.0, query_scale=0.01, residual_scale=0.22, logit_divisor=8.0
    ),
    "granite, one multiplier": OURS.replace(logit_divisor=8.0),
    "gemma2": GEMMA.replace(attention_softcap=50.0, final_softcap=30.0),
    "gemma3_text": GEMMA3,
    "llada": OURS.replace(diffusion=Diffusion(99)),
    "llada, converted": OURS.replace(diffusion=Diffusion(0, shift=True), tied_head=True),
    "llada, blocks": OURS.replace(diffusion=Diffusion(99, block=8, rank=2)),
    "Dream": OURS.replace(diffusion=Diffusion(99, shift=True), qkv_bias=True),
    "Dream, blocks": OURS.replace(diffusion=Diffusion(99, block=32, rank=2), qkv_bias=True),
    "sdar": OURS.replace(diffusion=Diffusion(99, block=4, rank=2), qk_norm=True),
    "sdar, no blocks": OURS.replace(diffusion=Diffusion(99, shift=True), qk_norm=True),
    "phi3, partial": OURS.replace(rope=Rope(1e4, fraction=0.5)),
    "phi3, short": OURS.replace(
        max_positions=64, rope=Rope(1e4, scaling=LongRopeScaling(FACTORS, FACTORS, 4.0, 64))
    ),
    "phi3, long": OURS.replace(
        rope=Rope(1e4, scaling=LongRopeScaling(FACTORS, FACTORS, 8.0, 64, attention_factor=1.2))
    ),
}


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_a_config_written_and_read_is_the_same(name):
    config = NETWORKS[name]
    raw = json.loads(json.dumps(config_to_json(config)))
    assert raw["model_type"] == name.split(",")[0] or name.split(",")[0] in str(raw["rope_scaling"])
    # With two LongRoPE tables, how far to go is the reader's choice.
    assert config_from_json(raw, config.max_positions) == config


@pytest.mark.parametrize(
    ("raw", "changes"),
    [
        ({"model_type": "llama"}, {}),
        ({"model_type": "llama", "rope_scaling": None, "num_key_value_heads": None}, {"kv": 4}),
        ({"model_type": "llama", "head_dim": 16}, {"head_dim": 16}),
        ({"model_type": "mistral"}, {"layer_types": SLIDING, "sliding_window": 4096}),
        ({"model_type": "mistral", "sliding_window": None}, {}),
        ({"model_type": "qwen2", "sliding_window": 8}, {"qkv_bias": True}),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 1,
            },
            {"qkv_bias": True, "layer_types": MIXED, "sliding_window": 8},
        ),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 0,
            },
            {"qkv_bias": True, "layer_types": SLIDING, "sliding_window": 8},
        ),
        ({"model_type": "qwen3", "head_dim": None}, {"qk_norm": True}),
        ({"model_type": "qwen3"}, {"qk_norm": True, "head_dim": 128}),
        (
            {"model_type": "smollm3"},
            {"tied_head": True, "rope": Rope(2e6), "layer_types": ("full",) * 3 + ("unrotated",)},
        ),
        (
            {"model_type": "smollm3", "no_rope_layers": [1, 0, 1, 1, 0], "rope_theta": 5e6},
            {"tied_head": True, "rope": Rope(5e6), "layer_types": ("full", "unrotated", *FULL[2:])},
        ),
        ({"model_type": "granite"}, {"query_scale": 1.0}),
        ({"model_type": "granite", "attention_multiplier": 8**-0.5}, {}),
        (
            {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2},
            {"rope": Rope(1e6), "experts": MIXTRAL},
        ),
    ],
)
def test_what_config_json_leaves_out(raw, changes):
    if "kv" in changes:
        changes = {"num_kv_heads": changes["kv"]}
    assert config_from_json({**SIZES, **raw}) == OURS.replace(**changes)


def test_a_gemma3_that_says_almost_nothing_gets_the_published_sizes():
    text = {"hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    raw = {
        "model_type": "gemma3",
        "text_config": {**text, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        "vision_config": {"hidden_size": 1152},
        "eos_token_id": [1, 106],
    }
    config = config_from_json(raw)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.max_positions) == (262_208, 131_072)
    assert config.tied_head
    assert config.query_scale is None
    assert config.rope == Rope(1e6, scaling=LinearScaling(8.0))
    assert config.sliding_rope == Rope(1e4)
    assert [i for i, kind in enumerate(config.layer_types) if kind == "full"] == [5, 11, 17, 23, 29]


def test_a_null_cap_is_no_cap():
    raw = {**SIZES, "model_type": "gemma2", "final_logit_softcapping": None}
    config = config_from_json(raw)
    assert config.final_softcap is None
    assert config.attention_softcap == 50.0
    assert config.layer_types == EVEN


ROPES = {
    "linear": ({"factor": 2.0}, LinearScaling(2.0)),
    "dynamic": ({"factor": 2.0}, DynamicScaling(2.0, 256)),
    "llama3": (
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        Llama3Scaling(8.0, 1.0, 4.0, 64),
    ),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": None},
        YarnScaling(4.0, 64),
    ),
}


@pytest.mark.parametrize("kind", sorted(ROPES))
def test_both_layouts_and_the_old_key_say_the_same_rope(kind):
    entries, scaling = ROPES[kind]
    llama = {**SIZES, "model_type": "llama"}
    layouts = [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": kind, **entries}},
        {"rope_theta": 5e5, "rope_scaling": {"type": kind, **entries}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": kind, **entries}},
    ]
    for layout in layouts:
        assert config_from_json({**llama, **layout}).rope == Rope(5e5, scaling=scaling)


def test_the_original_length_at_the_top_level_wins():
    section = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    raw = {**SIZES, "model_type": "llama", "rope_scaling": section}
    raw["original_max_position_embeddings"] = 32
    assert config_from_json(raw).rope.scaling == YarnScaling(4.0, 32)


def test_the_length_asked_for_chooses_the_longrope_table():
    tables = {"short_factor": list(FACTORS), "long_factor": list(FACTORS)}
    raw = {
        **SIZES,
        "model_type": "phi3",
        "rope_scaling": {"type": "su", **tables},
        "original_max_position_embeddings": 64,
    }
    assert config_from_json(raw).max_positions == 64
    assert config_from_json(raw, max_positions=128).max_positions == 128
    assert config_from_json(raw).rope.scaling == LongRopeScaling(FACTORS, FACTORS, 4.0, 64)


TABLES = {"short_factor": list(FACTORS), "long_factor": list(FACTORS)}
ORIGINAL = {"original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 256),
        ({"rope_type": "linear", "factor": 2.0}, 512),
        ({"rope_type": "yarn", "factor": 8.0, **ORIGINAL}, 512),
        ({"rope_type": "yarn", "factor": 2.0, **ORIGINAL}, 256),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, **ORIGINAL}
            | {"high_freq_factor": 4.0},
            512,
        ),
        ({"rope_type": "longrope", "factor": 8.0, **TABLES, **ORIGINAL}, 512),
    ],
)
def test_texts_may_be_as_long_as_training_or_scaling_reaches(scaling, longest):
    raw = {**SIZES, "model_type": "llama", "rope_scaling": scaling}
    assert config_from_json(raw, max_positions=longest).max_positions == longest
    with pytest.raises(CheckpointError, match=f"at most {longest}, .* got {longest + 1}"):
        config_from_json(raw, max_positions=longest + 1)


def test_dynamic_scaling_reaches_any_length():
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    raw = {**SIZES, "model_type": "llama", "rope_scaling": scaling}
    assert config_from_json(raw, max_positions=10**6).max_positions == 10**6


BAD = [
    ({"model_type": "mamba"}, "model_type must be one of Dream, gemma2, .*, smollm3; .* 'mamba'"),
    ({"model_type": None}, "model_type must be one of"),
    ({"model_type": ["llama"]}, "model_type must be one of"),
    ({"hidden_size": None}, "lacks 'hidden_size'"),
    ({"hidden_size": "32"}, "hidden_size must be a whole number, got '32'"),
    ({"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
    ({"hidden_size": 10**30}, "hidden_size must be below 2147483648"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number"),
    ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number, got True"),
    ({"num_key_value_heads": 3}, "num_kv_heads"),
    ({"rms_norm_eps": "small"}, "rms_norm_eps must be a finite number"),
    ({"rope_theta": float("nan")}, "rope_theta must be a finite number"),
    ({"rope_theta": -1.0}, "theta must be above 0"),
    ({"rope_scaling": {"rope_type": "mrope"}}, "RoPE type .* longrope; .* 'mrope'"),
    ({"rope_scaling": {"rope_type": "linear"}}, "lacks 'factor'"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor must be at least 1"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": 1}}, "must be a sequence, got 1"),
    ({"partial_rotary_factor": 0.5}, "known for phi3 only"),
    ({"hidden_act": "relu"}, "hidden_act must be one of .'silu', .* 'relu'"),
    ({"hidden_act": ""}, "hidden_act must be one of .*, got ''"),
    ({"hidden_act": []}, r"hidden_act must be a text, got \[\]"),
    ({"hidden_act": 0}, "hidden_act must be a text, got 0"),
    ({"model_type": "gemma2", "hidden_activation": None}, "lacks 'hidden_activation'"),
    ({"num_hidden_layers": 4.5}, "num_hidden_layers must be a whole number, got 4.5"),
    ({"num_hidden_layers": "4"}, "num_hidden_layers must be a whole number, got '4'"),
    ({"num_hidden_layers": float("nan")}, "num_hidden_layers must be a whole number, got nan"),
    *(
        ({"model_type": name, "num_hidden_layers": 10**9}, "num_hidden_layers .* at most 4096")
        for name in ("llama", "mistral", "qwen2", "gemma3_text", "smollm3", "olmo2")
    ),
    ({"hidden_size": 33}, "hidden_size must be a multiple of 4, .* got 33"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be True or False, got 'false'"),
    ({"tie_word_embeddings": 2}, "tie_word_embeddings must be True or False, got 2"),
    ({"attention_bias": "no"}, "attention_bias must be True or False, got 'no'"),
    ({"mlp_bias": "x"}, "mlp_bias must be True or False, got 'x'"),
    ({"model_type": "qwen2", "use_sliding_window": "false"}, "use_sliding_window must be True or"),
    ({"model_type": "qwen3", "attention_bias": 5}, "attention_bias must be True or False, got 5"),
    ({"model_type": "olmo2", "attention_bias": 1}, "attention_bias must be True or False, got 1"),
    ({"use_bidirectional_attention": "no"}, "use_bidirectional_attention must be True or False"),
    ({"text_config": 5}, "text_config must be a mapping, got 5"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"use_bidirectional_attention": True}, "encoder"),
    (
        {"model_type": "qwen3", "layer_types": ["linear_attention"] * 4},
        r"layer_types\[0\] must be one of .'full_attention', .* got 'linear_attention'",
    ),
    ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "layer_types must name 4"),
    ({"model_type": "qwen3_moe"}, "lacks 'num_experts'"),
    ({"model_type": "mixtral"}, "lacks 'num_local_experts'"),
    ({"model_type": "qwen2_moe"}, "lacks 'shared_expert_intermediate_size'"),
    ({"model_type": "smollm3", "use_sliding_window": True}, "use_sliding_window, layer_types: "),
    ({"model_type": "smollm3", "layer_types": ["sliding_attention"] * 4}, "layers of a SmolLM3"),
    (
        {"model_type": "smollm3", "no_rope_layers": [1, 0]},
        "no_rope_layers .* of 4 layers .* 2 entries",
    ),
    ({"model_type": "smollm3", "no_rope_layers": [1, 2, 0, 1]}, "must be one of .0, 1., got 2"),
    ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling must be above 0"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_what_cannot_be_understood_is_named(changes, message):
    with pytest.raises(CheckpointError, match=message):
        config_from_json({**SIZES, "model_type": "llama", **changes})


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], r"must be a mapping, got \[\]"),
        ("", "must be a mapping, got ''"),
        ([1], r"must be a mapping, got \[1\]"),
        ({"factor": 8.0}, "type 'default', which settings without a rope_type are of, .* factor"),
        ({"rope_type": None, "factor": 8.0}, "type 'default', .* has no setting factor"),
        ({"rope_type": "default", "factor": 4}, "RoPE type 'default', .* has no setting factor"),
        (
            {"rope_type": "linear", "factor": 2, "low_freq_factor": 1, "bogus": 3},
            "RoPE type 'linear' has no setting low_freq_factor, bogus",
        ),
        ({"rope_type": "linear", "factor": True}, "factor must be a finite number, got True"),
        ({"rope_type": "linear", "factor": 1e300}, "factor must be below"),
        ({"rope_type": "yarn"}, "lacks 'factor'"),
        ({"rope_type": "longrope", **TABLES}, "lacks 'factor'"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "truncate must be True or False"),
        (
            {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
            "lacks 'original_max_position_embeddings'",
        ),
        ({"rope_type": 5}, "rope_type must be a text, got 5"),
        (
            {"rope_type": "linear", "type": "dynamic", "factor": 2.0},
            "RoPE type must be one of .*and",
        ),
        ({"full_attention": {}, "factor": 8.0}, "has no setting factor"),
        ({"full_attention": {"rope_type": "linear"}}, "lacks 'factor'"),
        ({"full_attention": 5}, "full_attention must be a mapping, got 5"),
    ],
)
def test_settings_of_the_rotation_are_of_its_type(place, settings, message):
    with pytest.raises(CheckpointError, match=message):
        config_from_json({**SIZES, "model_type": "llama", place: settings})


@pytest.mark.parametrize(
    ("settings", "scaling"),
    [
        ({}, None),
        ({"rope_type": "default", "rope_theta": 1e4, **ORIGINAL}, None),
        ({"type": "linear", "rope_type": "linear", "factor": 2, **ORIGINAL}, LinearScaling(2.0)),
        ({"type": "yarn", "factor": 4, "finetuned": True, **ORIGINAL}, YarnScaling(4.0, 64)),
        ({"type": "yarn", **ORIGINAL}, YarnScaling(4.0, 64)),
        ({"type": "yarn", "factor": 4.0, "attention_factor": None}, YarnScaling(4.0, 256)),
    ],
)
def test_what_published_settings_carry_beside_is_read(settings, scaling):
    for place in ("rope_scaling", "rope_parameters"):
        raw = {**SIZES, "model_type": "llama", place: settings}
        assert config_from_json(raw).rope == Rope(scaling=scaling)


def test_the_two_places_of_the_rotation_may_not_differ():
    raw = {**SIZES, "model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    both = {**raw, "rope_parameters": {**raw["rope_scaling"], "rope_theta": 5e5}}
    assert config_from_json(both).rope == Rope(5e5, scaling=LinearScaling(2.0))
    with pytest.raises(CheckpointError, match="rope_parameters say different things of factor"):
        config_from_json({**raw, "rope_parameters": {"rope_type": "linear", "factor": 4.0}})


def test_whole_numbers_may_be_written_as_floats():
    raw = {**SIZES, "model_type": "llama", "num_hidden_layers": 4.0, "vocab_size": 1e2}
    assert config_from_json(raw) == OURS


@pytest.mark.parametrize("raw", [[1], None, "llama"])
def test_a_config_is_an_object(raw):
    with pytest.raises(CheckpointError, match="raw must be a mapping, got"):
        config_from_json(raw)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@pytest.mark.parametrize(
    "name",
    ["llama3", "yarn, fixed", "qwen2_moe", "qwen3_moe", "gemma3_text", "phi3, long", "smollm3"],
)
def test_junk_for_any_value_is_our_error_or_another_network(name):
    raw = config_to_json(NETWORKS[name])
    scaling = raw["rope_scaling"] or {}
    further = ["text_config", "layer_types", "mlp_only_layers", "rope_parameters", "num_experts"]

    @settings(max_examples=150)
    @given(st.sampled_from([*raw, *further]), st.sampled_from([*scaling, "rope_type"]), JUNK)
    def check(key, scaling_key, junk):
        for changed in (
            {**raw, key: junk},
            {**raw, "rope_scaling": {**scaling, scaling_key: junk}},
        ):
            with contextlib.suppress(CheckpointError):
                assert isinstance(config_from_json(changed), ModelConfig)

    check()


LLADA = {
    **{"d_model": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": None, "mlp_hidden_size": 48},
    **{"vocab_size": 98, "embedding_size": 100, "max_sequence_length": 256, "rms_norm_eps": 1e-5},
    **{"model_type": "llada", "mask_token_id": 99, "rope_theta": 5e5, "block_type": "llama"},
    "activation_type": "silu",
}
DREAM = {**SIZES, "model_type": "Dream", "mask_token_id": 99}
SDAR = {**SIZES, "model_type": "sdar", "mask_token_id": 99, "block_size": 4, "head_dim": 8}


def test_published_diffusion_models_are_read():
    assert config_from_json(LLADA) == OURS.replace(
        num_kv_heads=4, rope=Rope(5e5), diffusion=Diffusion(99)
    )
    assert config_from_json(DREAM) == OURS.replace(
        qkv_bias=True, diffusion=Diffusion(99, shift=True)
    )
    assert config_from_json(SDAR) == OURS.replace(qk_norm=True, diffusion=Diffusion(99, block=4))


def test_which_place_an_output_decides_is_what_config_json_says():
    assert config_from_json({**DREAM, "shift_logits": False}).diffusion == Diffusion(99)
    assert config_from_json({**SDAR, "shift_logits": True}).diffusion == Diffusion(99, True, 4)
    assert config_from_json({**LLADA, "shift_logits": True}).diffusion == Diffusion(99, True)


@pytest.mark.parametrize(
    ("raw", "changes", "message"),
    [
        (LLADA, {"mask_token_id": None}, "lacks 'mask_token_id'"),
        (LLADA, {"activation_type": None}, "lacks 'activation_type'"),
        (LLADA, {"d_model": 33}, "d_model must be a multiple of 4"),
        (LLADA, {"rope": 1}, "rope must be True in a LLaDA .* has 1"),
        (LLADA, {"mask_token_id": "<m>"}, "mask_token_id must be a whole number, got '<m>'"),
        (LLADA, {"mask_token_id": 100}, r"mask_token_id must be an id below vocab_size \(100\)"),
        (LLADA, {"d_model": None}, "lacks 'd_model'"),
        (LLADA, {"n_layers": "4"}, "n_layers must be a whole number, got '4'"),
        (LLADA, {"include_qkv_bias": True}, "include_qkv_bias must be False in a LLaDA"),
        (LLADA, {"block_type": "sequential"}, "block_type must be 'llama'"),
        (DREAM, {"block_size": 32}, 'add "shift_logits": true, or false'),
        (DREAM, {"shift_logits": "yes"}, "shift_logits must be True or False, got 'yes'"),
        (SDAR, {"block_size": 0}, "block_size must be at least 1, got 0"),
    ],
)
def test_what_is_wrong_with_a_diffusion_config_is_named(raw, changes, message):
    with pytest.raises(CheckpointError, match=message):
        config_from_json({**raw, **changes})


def test_blocks_that_nothing_is_said_of_are_asked_for():
    with pytest.raises(CheckpointError, match="lacks 'block_size'"):
        config_from_json({key: value for key, value in SDAR.items() if key != "block_size"})


@pytest.mark.parametrize("max_positions", [0, -5])
def test_a_length_must_be_positive(max_positions):
    with pytest.raises(CheckpointError, match="max_positions must be at least 1"):
        config_from_json({**SIZES, "model_type": "llama"}, max_positions)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"final_softcap": 30.0}, "final_softcap"),
        ({"qk_norm": True, "mlp_bias": True}, "mlp_bias"),
        ({"out_bias": True}, "qkv_bias"),
        ({"embed_scale": 2.0, "qk_norm": True}, "qk_norm"),
        ({"query_scale": 0.3, "post_norms": True}, "post_norms"),
        ({"layer_types": ("unrotated", *SLIDING[1:]), "sliding_window": 4}, "layer_types"),
        ({"layer_types": ("unrotated", *FULL[1:]), "experts": MIXTRAL}, "experts"),
        ({"experts": dataclasses.replace(MIXTRAL, normalize=False)}, "experts"),
        ({"joint_qk_norm": True, "qk_norm": True}, "joint_qk_norm"),
        ({"attention_softcap": 9.0}, "attention_softcap"),
        ({"sliding_rope": Rope(), "layer_types": EVEN, "sliding_window": 4}, "layer_types"),
    ],
)
def test_a_network_that_no_family_describes_is_not_written(changes, field):
    with pytest.raises(CheckpointError, match=f"cannot be expressed: .*{field}.*Orbax"):
        config_to_json(OURS.replace(**changes))


@pytest.mark.parametrize(("field", "value"), [("norm_eps", 1e-4), ("activation", "gelu_tanh")])
def test_a_field_that_every_family_has_is_written(field, value):
    raw = config_to_json(OURS.replace(**{field: value}))
    assert getattr(config_from_json(raw), field) == value
