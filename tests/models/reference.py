"""The families once more, as a plain NumPy loop over tokens and heads, in float64. No cache."""

import numpy as np

from jaxspec.models import ModelConfig


def reference_logits(params, config: ModelConfig, tokens) -> np.ndarray:
    """Logits [tokens, vocab] of a text read from its beginning."""
    weights = _as_float64(params)
    residual = reference_residual(params, config, tokens, config.num_layers)
    features = _norm(weights["norm"], config, residual)
    head = weights["embed"]["embedding"].T if config.tied_head else weights["head"]["kernel"]
    return _softcap(features @ head / config.logit_divisor, config.final_softcap)


def reference_residual(params, config: ModelConfig, tokens, num_layers: int) -> np.ndarray:
    """Returns the residual stream [tokens, embed] of a text after the first layers."""
    weights = _as_float64(params)
    residual = weights["embed"]["embedding"][np.asarray(tokens)] * (config.embed_scale or 1.0)
    for i in range(num_layers):
        layer = weights[f"layer_{i}"]
        inputs = _norm_if_any(layer, "attention_norm", config, residual)
        output = _attention(layer["attention"], config, i, inputs)
        output = _norm_if_any(layer, "attention_post_norm", config, output)
        residual = residual + output * config.residual_scale
        inputs = _norm_if_any(layer, "mlp_norm", config, residual)
        output = (_experts if "experts" in layer else _mlp)(layer, config, inputs)
        output = _norm_if_any(layer, "mlp_post_norm", config, output)
        residual = residual + output * config.residual_scale
    return residual


def _attention(weights, config, layer, inputs):
    kernel, bias = weights["qkv"]["kernel"], weights["qkv"].get("bias", 0.0)
    heads = np.einsum("td,dkgh->tkgh", inputs, kernel) + bias
    group, window = config.num_groups, config.layer_window(layer)
    if config.joint_qk_norm:
        for part, name in ((slice(group), "q_norm"), (slice(group, group + 1), "k_norm")):
            wide = heads[:, :, part].reshape(len(inputs), -1)
            heads[:, :, part] = _norm(weights[name], config, wide).reshape(heads[:, :, part].shape)
    outputs = np.zeros((len(inputs), config.num_kv_heads, group, config.head_dim))
    for k in range(config.num_kv_heads):
        for g in range(group):
            queries, keys, values = heads[:, k, g], heads[:, k, group], heads[:, k, group + 1]
            if config.qk_norm and not config.joint_qk_norm:
                queries = _norm(weights["q_norm"], config, queries)
                keys = _norm(weights["k_norm"], config, keys)
            if config.layer_types[layer] != "unrotated":
                queries = _rotate(queries, config.layer_rope(layer))
                keys = _rotate(keys, config.layer_rope(layer))
            for i in range(len(inputs)):
                first = 0 if window is None else max(0, i - window + 1)
                scores = keys[first : i + 1] @ queries[i] * config.score_scale
                scores = np.exp(_softcap(scores, config.attention_softcap))
                outputs[i, k, g] = scores @ values[first : i + 1] / scores.sum()
    return np.einsum("tkgh,kghd->td", outputs, weights["out"]["kernel"]) + weights["out"].get(
        "bias", 0.0
    )


def _rotate(heads, rope):
    """Unscaled rotation: pair (i, i + pairs) as one complex number."""
    dim = rope.rotated_dim(heads.shape[-1])
    frequencies = rope.theta ** (-np.arange(0, dim, 2) / dim)
    turns = np.exp(1j * np.arange(len(heads))[:, None] * frequencies)
    turned = (heads[:, : dim // 2] + 1j * heads[:, dim // 2 : dim]) * turns
    return np.concatenate([turned.real, turned.imag, heads[:, dim:]], axis=1)


def _mlp(layer, config, inputs):
    mlp = layer["mlp"]
    hidden = np.einsum("td,dcf->ctf", inputs, mlp["gate_up"]["kernel"])
    if config.mlp_bias:
        hidden = hidden + mlp["gate_up"]["bias"][:, None]
    outputs = _activation(config, hidden[0]) * hidden[1] @ mlp["down"]["kernel"]
    return outputs + mlp["down"].get("bias", 0.0)


def _experts(layer, config, inputs):
    experts = layer["experts"]
    outputs = np.zeros_like(inputs)
    for t, token in enumerate(inputs):
        logits = token @ experts["router"]["kernel"]
        probs = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        chosen = np.argsort(-probs)[: config.experts.per_token]
        total = probs[chosen].sum() if config.experts.normalize else 1.0
        for e in chosen:
            gate, up = np.einsum("d,dcf->cf", token, experts["gate_up"]["kernel"][e])
            output = _activation(config, gate) * up @ experts["down"]["kernel"][e]
            outputs[t] += probs[e] / total * output
    if config.experts.shared_dim is None:
        return outputs
    shared = _mlp(layer["shared"], config, inputs)
    return outputs + shared / (1 + np.exp(-inputs @ layer["shared"]["router"]["kernel"]))


def _norm(weights, config, inputs):
    scale = weights["scale"] + config.norm_plus_one
    return inputs / np.sqrt((inputs**2).mean(-1, keepdims=True) + config.norm_eps) * scale


def _norm_if_any(layer, name, config, inputs):
    return _norm(layer[name], config, inputs) if name in layer else inputs


def _activation(config, x):
    if config.activation == "silu":
        return x / (1 + np.exp(-x))
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _softcap(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)


def _as_float64(tree):
    if isinstance(tree, dict):
        return {name: _as_float64(branch) for name, branch in tree.items()}
    return np.asarray(tree, np.float64)
