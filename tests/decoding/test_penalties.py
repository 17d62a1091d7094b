"""`generate` with penalties: every method gives the text of a plain loop, or draws its law."""

import dataclasses

import numpy as np
import pytest

from jaxspec import (
    DraftModel,
    GenerationConfig,
    LayerSkip,
    LoadedDrafter,
    PromptLookup,
    batch,
    generate,
    score,
    stream,
)
from jaxspec.decoding.request import PENALTIES
from jaxspec.models import Skips
from tests.laws.penalties import penalized_by_hand

SETTINGS = {
    "repetition": {"repetition_penalty": 1.4},
    "emitted": {"presence_penalty": 0.5, "frequency_penalty": 0.3},
    "n-grams": {"no_repeat_ngram_size": 2},
    "all": {
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.2,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 6,
    },
}
PROMPTS = [[5, 6, 7, 5, 6], [9, 9, 9]]
NUM_NEW = 16


def by_hand(model, prompt, settings, stop_ids) -> list[int]:
    rules = {PENALTIES[name].field: value for name, value in settings.items()}
    text = list(prompt)
    for _ in range(NUM_NEW):
        logits = np.asarray(score(model, text).logits[-1], np.float64)
        text.append(int(penalized_by_hand(logits, text, len(prompt), stop_ids, rules).argmax()))
        if text[-1] in stop_ids:
            break
    return text[len(prompt) :]


def drafters(model):
    return {
        "plain": None,
        "lookup": PromptLookup(3, 2),
        "draft model": LoadedDrafter(DraftModel(3), model.network),
        "tree": LoadedDrafter(DraftModel(paths=((0,), (1,), (0, 0))), model.network),
        "layer skip": LayerSkip(Skips((True,), (False,)), 3),
    }


@pytest.mark.parametrize("name", SETTINGS)
def test_every_drafter_gives_the_text_of_a_plain_loop(model, name):
    settings = SETTINGS[name]
    free = by_hand(model, PROMPTS[0], settings, ())
    stop_ids = (free[2],)
    config = GenerationConfig(NUM_NEW, stop_token_ids=stop_ids, **settings)
    expected = [by_hand(model, prompt, settings, stop_ids) for prompt in PROMPTS]
    for drafter in drafters(model).values():
        found = generate(model, PROMPTS, config, drafter)
        assert [tokens.tolist() for tokens in found.tokens] == expected


def test_a_stream_and_a_job_apply_them(model):
    config = GenerationConfig(NUM_NEW, stop_token_ids=(), **SETTINGS["all"])
    expected = generate(model, PROMPTS, config).tokens
    streamed = [step.tokens for step in stream(model, PROMPTS[0], config)]
    np.testing.assert_array_equal(np.concatenate(streamed), expected[0])
    output = batch.Collector()
    batch.run(model, batch.rows_of(PROMPTS), output, config)
    records = sorted(output.records, key=lambda record: record["line"])
    assert [record["tokens"] for record in records] == [row.tolist() for row in expected]


def test_rows_may_have_their_own(model):
    prompts, ones = [PROMPTS[0]] * 2, {"stop_token_ids": ()}
    both = generate(
        model, prompts, GenerationConfig(NUM_NEW, repetition_penalty=[1.0, 1.6], **ones)
    )
    for row, penalty in zip(both, (1.0, 1.6), strict=True):
        config = GenerationConfig(NUM_NEW, repetition_penalty=penalty, **ones)
        np.testing.assert_array_equal(row.tokens, generate(model, prompts[0], config)[0].tokens)


def test_open_settings_are_those_of_the_checkpoint(model):
    asks = dataclasses.replace(model, generation_defaults={"repetition_penalty": 1.4})
    stated = GenerationConfig(NUM_NEW, repetition_penalty=1.4, stop_token_ids=())
    expected = generate(model, PROMPTS[0], stated)[0].tokens
    plain = GenerationConfig(NUM_NEW, stop_token_ids=())
    np.testing.assert_array_equal(generate(asks, PROMPTS[0], plain)[0].tokens, expected)
    # 1 asks for none.
    none = dataclasses.replace(plain, repetition_penalty=1)
    without = generate(model, PROMPTS[0], plain)[0].tokens
    assert without.tolist() != expected.tolist()
    np.testing.assert_array_equal(generate(asks, PROMPTS[0], none)[0].tokens, without)


def test_what_is_out_of_range_is_named(model):
    for name, value in (
        ("repetition_penalty", 0),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", "much"),
        ("no_repeat_ngram_size", 1.5),
        ("min_new_tokens", -1),
    ):
        with pytest.raises(ValueError, match=name):
            GenerationConfig(**{name: value})
        asks = dataclasses.replace(model, generation_defaults={name: value})
        with pytest.raises(ValueError, match=name):
            generate(asks, [1])
