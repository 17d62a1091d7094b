"""Penalties by a plain loop over a text: the reference of `core.penalties`."""

from collections.abc import Mapping, Sequence

import numpy as np

NEUTRAL = {
    "repetition": 1.0,
    "presence": 0.0,
    "frequency": 0.0,
    "ngram_size": 0,
    "min_new_tokens": 0,
}
RULES = {
    "repetition": {"repetition": 1.5},
    "a reward for repetition": {"repetition": 0.6},
    "presence": {"presence": 0.7},
    "frequency": {"frequency": 0.4},
    "unigrams": {"ngram_size": 1},
    "bigrams": {"ngram_size": 2},
    "trigrams": {"ngram_size": 3},
    "a minimum": {"min_new_tokens": 4},
    "all": {"repetition": 1.3, "presence": 0.3, "frequency": 0.2, "ngram_size": 2},
}


def penalized_by_hand(
    logits: np.ndarray,
    text: Sequence[int],
    num_prompt: int,
    stop_ids: Sequence[int],
    rules: Mapping[str, float],
) -> np.ndarray:
    """Returns the logits of what follows `text`, whose first `num_prompt` tokens are the prompt."""
    rules, text = {**NEUTRAL, **rules}, list(text)
    logits = np.array(logits)
    for token in set(text):
        divided = logits[token] / rules["repetition"]
        logits[token] = divided if logits[token] > 0 else logits[token] * rules["repetition"]
    emitted = text[num_prompt:]
    for token in set(emitted):
        logits[token] -= rules["presence"] + rules["frequency"] * emitted.count(token)
    if size := int(rules["ngram_size"]):
        last = text[len(text) - (size - 1) :]
        for end in range(size - 1, len(text)):
            if text[end - (size - 1) : end] == last:
                logits[text[end]] = -np.inf
    if len(emitted) < rules["min_new_tokens"]:
        logits[list(stop_ids)] = -np.inf
    return logits
