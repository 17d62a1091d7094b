"""Parts of published heads, as their definitions say, in NumPy in float64."""

import numpy as np

EPS, THETA = 1e-5, 500.0


def rms_norm(inputs: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return inputs / np.sqrt((inputs**2).mean(-1, keepdims=True) + EPS) * weight


def rotated(heads: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Halves [positions, heads, dim] turned as pairs, at absolute positions."""
    half = heads.shape[-1] // 2
    angles = positions[:, None, None] * THETA ** (-np.arange(half) / half)
    first, second = heads[..., :half], heads[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attended(queries, keys, values, seen) -> np.ndarray:
    """What queries [places, heads, dim] make of keys and values that fewer heads share."""
    keys, values = (
        np.repeat(part, queries.shape[1] // part.shape[1], axis=1) for part in (keys, values)
    )
    scores = np.exp(np.einsum("qhd,khd->hqk", queries, keys) / np.sqrt(queries.shape[-1]))
    scores = scores * seen[None]
    shares = scores / scores.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", shares, values).reshape(len(queries), -1)


def gated_mlp(inputs, gate, up, down) -> np.ndarray:
    gates = inputs @ gate.T
    return (gates / (1 + np.exp(-gates)) * (inputs @ up.T)) @ down.T


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))
