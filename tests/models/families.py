"""One tiny network of each family, every weight random: no norm is an identity, no bias zero."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models import Experts, ModelConfig, Network, Rope, param_shapes

LLAMA = ModelConfig(
    vocab_size=61,
    embed_dim=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=40,
    max_positions=128,
)
_GEMMA = LLAMA.replace(
    norm_plus_one=True,
    post_norms=True,
    activation="gelu_tanh",
    tied_head=True,
    embed_scale=24**0.5,
    query_scale=12**-0.5,
    layer_types=("sliding", "full", "sliding"),
    sliding_window=4,
)
FAMILIES = {
    "llama": LLAMA,
    "llama with biases": LLAMA.replace(qkv_bias=True, out_bias=True, mlp_bias=True),
    "mistral": LLAMA.replace(layer_types=("sliding",) * 3, sliding_window=5, head_dim=6),
    "qwen2": LLAMA.replace(qkv_bias=True, tied_head=True),
    "qwen3": LLAMA.replace(qk_norm=True, head_dim=16),
    "qwen3_moe": LLAMA.replace(
        qk_norm=True,
        experts=Experts(num=5, per_token=2, mlp_dim=12, normalize=True, layers=(True, False, True)),
    ),
    "moe, not normalised": LLAMA.replace(
        experts=Experts(num=5, per_token=3, mlp_dim=12, normalize=False, layers=(True,) * 3)
    ),
    "mixtral": LLAMA.replace(
        experts=Experts(num=4, per_token=2, mlp_dim=40, normalize=True, layers=(True,) * 3)
    ),
    "qwen2_moe": LLAMA.replace(
        qkv_bias=True,
        experts=Experts(
            5, 2, mlp_dim=12, normalize=False, layers=(False, True, True), shared_dim=20
        ),
    ),
    "olmo2": LLAMA.replace(pre_norms=False, post_norms=True, qk_norm=True, joint_qk_norm=True),
    "smollm3": LLAMA.replace(layer_types=("full", "unrotated", "full"), tied_head=True),
    "granite": LLAMA.replace(
        embed_scale=3.0, query_scale=0.2, residual_scale=0.4, logit_divisor=0.7, tied_head=True
    ),
    "gemma2": _GEMMA.replace(attention_softcap=3.0, final_softcap=2.0),
    "gemma3": _GEMMA.replace(
        qk_norm=True, rope=Rope(theta=1_000_000.0), sliding_rope=Rope(theta=100.0)
    ),
    "phi3": LLAMA.replace(rope=Rope(fraction=0.5), num_kv_heads=4),
}


def tiny(name: str, seed: int = 0) -> Network:
    config = FAMILIES[name]
    rng = np.random.default_rng(seed)

    def draw(leaf):
        return jnp.asarray(rng.normal(size=leaf.shape) * 0.25 + 0.1, leaf.dtype)

    return Network(jax.tree.map(draw, param_shapes(config)), config)
