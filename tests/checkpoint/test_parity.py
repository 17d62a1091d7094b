"""Every family against the reference implementation, on tiny checkpoints that it writes itself."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import GenerationConfig, LayerSkip, PromptLookup, generate
from jaxspec.checkpoint import Model, Tokenizer, config_from_json, load, save, shipped_models
from jaxspec.drafters.skip_sets import skips_of
from tests.checkpoint.networks import assert_same_network

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WIDTH = 32  # of every pass, so that each network is compiled once
WINDOW = 7  # shorter than the text
NUM_TOKENS = 24
NUM_GREEDY = 6


def rope(kind: str, theta: float = 10_000.0, **entries: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **entries}}


def longrope(**entries: Any) -> dict[str, Any]:
    tables = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.5, 2.0, 4.0, 9.0]}
    return {
        "original_max_position_embeddings": 16,
        **rope("longrope", original_max_position_embeddings=16, **tables, **entries),
    }


LLAMA3 = rope(
    "llama3",
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW}
MOE = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],
}


class Case(NamedTuple):
    """A reference class and what is set in its config.

    pattern: what the Hub layout says instead of `layer_types`.
    max_positions: for `load`.
    num_tokens: length of the text.
    """

    family: str
    settings: dict[str, Any]
    pattern: dict[str, Any] = {}  # noqa: RUF012
    max_positions: int | None = None
    num_tokens: int = NUM_TOKENS


CASES = {
    "llama": Case("Llama", {}),
    "llama, tied, biased, wide heads": Case(
        "Llama",
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    ),
    "llama, llama3 scaling": Case("Llama", LLAMA3),
    "llama, linear scaling": Case("Llama", rope("linear", factor=3.0)),
    "llama, dynamic scaling": Case("Llama", rope("dynamic", factor=3.0)),
    "llama, yarn": Case(
        "Llama", rope("yarn", 500.0, factor=4.0, original_max_position_embeddings=16)
    ),
    "llama, yarn with mscale": Case(
        "Llama",
        {
            "head_dim": 16,
            "max_position_embeddings": 256,
            **rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                mscale=0.7,
                mscale_all_dim=0.3,
                beta_fast=4.0,
                truncate=False,
            ),
        },
    ),
    "mistral": Case("Mistral", {"sliding_window": WINDOW, "head_dim": 16}),
    "mistral without window": Case("Mistral", {"sliding_window": None}),
    "mixtral": Case("Mixtral", {"num_local_experts": 5}),
    "mixtral, window": Case("Mixtral", {"sliding_window": WINDOW, "head_dim": 16}),
    "qwen2, tied": Case("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_moe": Case("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 28}),
    "qwen2_moe, normalised, windows, no biases": Case(
        "Qwen2Moe",
        {
            **MOE,
            "mlp_only_layers": [],
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "shared_expert_intermediate_size": 28,
        },
    ),
    "qwen3": Case("Qwen3", {"head_dim": 16}),
    "qwen3, windows": Case(
        "Qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
    ),
    "qwen3_moe": Case("Qwen3Moe", {**MOE, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe, not normalised, windows": Case(
        "Qwen3Moe",
        {
            **MOE,
            "mlp_only_layers": [],
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
        },
    ),
    "gemma2": Case(
        "Gemma2",
        {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3_text": Case(
        "Gemma3",
        {
            **GEMMA,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        pattern={"sliding_window_pattern": 2},
    ),
    "phi3": Case("Phi3", {"sliding_window": WINDOW}),
    "phi3, partial": Case("Phi3", rope("default", partial_rotary_factor=0.5)),
    "phi3, short longrope": Case("Phi3", longrope(), num_tokens=16 - NUM_GREEDY),
    "phi3, long longrope": Case("Phi3", longrope(), max_positions=64),
    "olmo2": Case("Olmo2", {}),
    "olmo2, tied, biased, wide heads": Case(
        "Olmo2", {"tie_word_embeddings": True, "attention_bias": True, "head_dim": 16}
    ),
    "smollm3, by its rule": Case(
        "SmolLM3",
        {"no_rope_layer_interval": 2},
        pattern={"no_rope_layers": None, "no_rope_layer_interval": 2},
    ),
    "smollm3, own head, biased": Case(
        "SmolLM3",
        {
            "no_rope_layers": [0, 1, 0],
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "granite": Case(
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 1.5,
        },
    ),
    "granite, tied, neutral multipliers": Case("Granite", {"tie_word_embeddings": True}),
}


@pytest.fixture(scope="module")
def torch():
    pytest.importorskip("transformers", reason="needs the parity extra")
    torch = pytest.importorskip("torch", reason="needs the parity extra")
    # Networks this small lose more by handing work to threads, on a busy machine far more.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=sorted(CASES))
def case(request) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def reference(torch, case):
    """A reference network whose every number is random: norms and biases too."""
    import transformers

    name = case.family
    config_name = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, config_name)(**{**SIZES, **case.settings})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    network = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            else:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    return network


@pytest.fixture(scope="module")
def folder(reference, tmp_path_factory) -> Path:
    """As the reference writes it: the layout of transformers 5."""
    folder = tmp_path_factory.mktemp("checkpoint")
    reference.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(folder, case) -> Model:
    return load(folder, max_positions=case.max_positions)


@pytest.fixture(scope="module")
def tokens(case) -> np.ndarray:
    return np.random.default_rng(1).integers(3, SIZES["vocab_size"], case.num_tokens)


def reference_logits(network, tokens) -> np.ndarray:
    import torch

    with torch.no_grad():
        return network(torch.tensor(np.array(tokens)[None])).logits[0].numpy()


@jax.jit
def _logits(network, tokens):
    causal = jnp.tril(jnp.ones((WIDTH, WIDTH), bool))
    hidden = network.forward(tokens, jnp.arange(WIDTH), causal, None)
    return network.unembed(hidden.features)


def our_logits(network, tokens) -> np.ndarray:
    """Right padding changes nothing for what comes before it, and keeps one shape."""
    padded = np.zeros(WIDTH, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_logits(network, padded))[: len(tokens)]


def greedy(logits_of, network, tokens) -> list[int]:
    text = [int(token) for token in tokens]
    for _ in range(NUM_GREEDY):
        text.append(int(np.argmax(logits_of(network, text)[-1])))
    return text


def hub_layout(raw: dict[str, Any], case: Case) -> dict[str, Any]:
    """A config.json of transformers 5 as version 4 wrote it."""
    old = {**raw, **case.pattern, "torch_dtype": raw["dtype"]}
    del old["dtype"]
    old.pop("layer_types", None)
    section = dict(old.pop("rope_parameters"))
    if "full_attention" in section:
        old["rope_local_base_freq"] = section["sliding_attention"]["rope_theta"]
        section = dict(section["full_attention"])
    old["rope_theta"] = section.pop("rope_theta")
    if "partial_rotary_factor" in section:
        old["partial_rotary_factor"] = section.pop("partial_rotary_factor")
    if case.family == "Phi3":
        section["type"] = section.pop("rope_type")
    old["rope_scaling"] = None if "default" in section.values() else section
    if case.family == "Qwen3Moe":
        old["num_experts"] = old.pop("num_local_experts")
    return old


def test_logits_and_greedy_tokens_agree(reference, loaded, tokens):
    expected = reference_logits(reference, tokens)
    assert np.std(expected) > 0.3  # else any mistake would pass
    np.testing.assert_allclose(our_logits(loaded.network, tokens), expected, atol=2e-4)
    text = greedy(reference_logits, reference, tokens)
    assert greedy(our_logits, loaded.network, tokens) == text


# One of each kind of layer.
@pytest.mark.parametrize("drafter", [PromptLookup(3), LayerSkip(skips_of(3, [1], [0]), 3)])
@pytest.mark.parametrize(
    "case", ["mixtral", "qwen2_moe", "olmo2", "smollm3, by its rule", "granite"], indirect=True
)
def test_drafted_tokens_are_those_of_the_reference(reference, loaded, tokens, drafter):
    prompts = [tokens.tolist(), tokens[:9].tolist()]
    config = GenerationConfig(max_new_tokens=NUM_GREEDY, stop_token_ids=())
    for prompt, row in zip(prompts, generate(loaded, prompts, config, drafter), strict=True):
        text = greedy(reference_logits, reference, prompt)
        assert row.tokens.tolist() == text[len(prompt) :]


def test_the_hub_layout_means_the_same(folder, loaded, case):
    raw = json.loads((folder / "config.json").read_text())
    assert "rope_parameters" in raw
    old = hub_layout(raw, case)
    assert config_from_json(old, case.max_positions) == loaded.config


def test_the_reference_loads_what_we_save(reference, loaded, tokens, tmp_path):
    import transformers

    save(loaded, tmp_path)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    expected = reference_logits(reference, tokens)
    np.testing.assert_allclose(reference_logits(again.eval(), tokens), expected, atol=1e-4)
    # We write the Hub's layout, and read it as we read theirs.
    raw = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" not in raw
    assert_same_network(
        load(tmp_path, max_positions=loaded.config.max_positions).network, loaded.network
    )


def test_a_multimodal_gemma3_is_read_as_its_text_model(torch, tmp_path):
    import transformers

    text = {**SIZES, **GEMMA, "num_hidden_layers": 2}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=60
    )
    torch.manual_seed(0)
    network = transformers.Gemma3ForConditionalGeneration(config).eval()
    network.save_pretrained(tmp_path)
    tokens = np.arange(3, 3 + NUM_TOKENS)
    expected = reference_logits(network, tokens)
    np.testing.assert_allclose(our_logits(load(tmp_path).network, tokens), expected, atol=2e-4)


LANGUAGE_MODELS = sorted(
    name
    for name, folder in shipped_models().items()
    if "ForCausalLM" in (folder / "config.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_the_reference_reads_the_shipped_models_as_we_do(torch, name):
    import transformers

    model = load(name)
    tokens = np.array(model.tokenizer.encode("Anna has 3 apples and buys 4 more."))[:WIDTH]
    network, report = transformers.AutoModelForCausalLM.from_pretrained(
        shipped_models()[name], dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values()), report
    expected = reference_logits(network.eval(), tokens)
    np.testing.assert_allclose(our_logits(model.network, tokens), expected, atol=2e-4)


def test_the_reference_loads_the_tokenizer_we_save(torch, byte_level_tokenizer, tmp_path):
    import transformers

    template = "{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}"
    Tokenizer(
        byte_level_tokenizer.backend, byte_level_tokenizer.settings, {"default": template}
    ).write(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "the cat sat€ <think>"
    assert again.encode(text) == byte_level_tokenizer.encode(text)
    assert again.eos_token_id == byte_level_tokenizer.eos_id
    chat = [{"role": "user", "content": "the mat"}]
    assert again.apply_chat_template(chat, tokenize=False) == "<s>the mat"


def test_sharded_half_precision_checkpoints_are_widened(torch, tmp_path):
    import transformers

    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(torch.bfloat16)
    network.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tokens = np.arange(3, 3 + NUM_TOKENS)
    expected = reference_logits(network.float().eval(), tokens)
    np.testing.assert_allclose(our_logits(load(tmp_path).network, tokens), expected, atol=2e-4)
