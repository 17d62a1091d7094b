"""The public face: what prompts may look like, what ends a row, what comes back."""

import dataclasses
import itertools
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import monitoring

import jaxspec
from jaxspec import (
    Deer,
    DFlash,
    DraftModel,
    Eagle,
    Eagle2,
    GenerationConfig,
    LayerSkip,
    LoadedDrafter,
    Model,
    NoDraft,
    PromptLookup,
    Tokenizer,
    compilation,
    generate,
    load_eagle,
    score,
    stream,
)
from jaxspec.checkpoint import CheckpointError, load_dflash, memory, save_orbax
from jaxspec.compilation import CompileClock
from jaxspec.core.cache import pad_caches
from jaxspec.core.decode import begin, speculative_step
from jaxspec.core.loop import bytes_of_row, decode, run, unfinished
from jaxspec.decoding.generate import likelihoods
from jaxspec.decoding.request import prepare
from jaxspec.decoding.result import cut_at
from jaxspec.models import (
    DFlashHead,
    Eagle3Head,
    EagleHead,
    ModelConfig,
    Network,
    Skips,
    init_dflash_params,
    init_eagle3_params,
    init_eagle_params,
    init_params,
)

CONTEXT = 96


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token per byte, and two special ones."""
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=258,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([""], trainer)
    chat = "{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}"
    return Tokenizer(backend, {"eos_token": "</s>"}, {"default": chat})


@pytest.fixture(scope="module")
def model(tokenizer) -> Model:
    """A random network whose vocabulary is padded beyond its tokenizer's."""
    config = ModelConfig(
        vocab_size=272,
        embed_dim=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        mlp_dim=48,
        max_positions=CONTEXT,
    )
    network = Network(init_params(config, jax.random.key(1)), config)
    return Model(network, tokenizer, "tiny", (), {"temperature": 0.7})


@pytest.fixture(scope="module")
def letters(tokenizer) -> list[int]:
    return tokenizer.encode("abcdefghijklmnopqrstuvwxyz")


def own_draft(model: Model):
    """The target drafts for itself: every greedy draft is accepted."""
    return DraftModel.of(model, num_speculative_tokens=4)


def test_prompts_may_be_text_ids_arrays_chats_and_lists_of_them(model, tokenizer):
    config = GenerationConfig(max_new_tokens=3)
    ids = tokenizer.encode("hello")
    chat = [{"role": "user", "content": "hi"}]
    expected = generate(model, "hello", config)[0].tokens
    for prompt in (ids, np.asarray(ids), jax.numpy.asarray(ids), ["hello"], [ids]):
        np.testing.assert_array_equal(generate(model, prompt, config)[0].tokens, expected)
    chats = np.empty(1, object)  # as tables in files hold them
    chats[0] = chat[0]
    rows = generate(model, ["hello", chats], config)
    np.testing.assert_array_equal(rows[0].tokens, expected)
    assert rows[1].prompt_tokens.tolist() == tokenizer.encode("user:hi;")
    assert [row.prompt_index for row in rows] == [0, 1]


DEEP: dict = {}
for _ in range(5000):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompts: got none"),
        ([[]], {}, r"prompts\[0\] is empty"),
        ("", {}, r"prompts\[0\] is empty"),
        ([[1, 2], [1] * CONTEXT], {}, rf"prompts\[1\] has {CONTEXT} tokens"),
        ([range(3 * 10**8)], {}, r"prompts\[0\] has 300000000 tokens"),
        (range(3 * 10**8), {}, r"prompts\[0\] has 300000000 tokens"),
        (iter(range(10**7)), {}, "prompts: got more than 1000000"),
        ("ab cd " * 10**6, {}, r"prompts\[0\]: its 6000000 characters are too many: the first"),
        (
            [{"role": "user", "content": "ab cd " * 10**6}],
            {},
            r"prompts\[0\]: its 60\d+ characters are too many: the first",
        ),
        ([[DEEP]], {}, r"messages\[0\] must be a .* got dict too long to show"),
        (np.array(5), {}, "prompts must be a prompt or a list of them, got .*5"),
        (DEEP, {}, "prompts must be a prompt or a list of them, got dict too long to show"),
        ([1], {"banned_token_ids": range(10**9)}, "banned_token_ids must be of at most .* entries"),
        ([1, 272], {}, r"outside 0\.\.271: \[272\]"),
        ([-1], {}, r"outside 0\.\.271"),
        ([1], {"temperature": -0.1}, r"temperature must be in \[0, 3e\+38\), got -0.1"),
        ([1], {"temperature": [1.0, 1.0]}, "temperature: got 2 values for 1 prompts"),
        ([1], {"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
        ([1], {"top_p": 1.1}, r"top_p must be in \(0, 1\]"),
        ([1], {"top_p": 1e-45}, "top_p must be at least 1.2e-38, got 1e-45"),
        ([1], {"top_k": 273}, "top_k must be at most the vocabulary, 272"),
        ([1], {"top_k": -1}, "top_k must be at least 0"),
        ([1], {"min_p": 1.0}, r"min_p must be in \[0, 1\)"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens must be at least 0"),
        ([1], {"num_samples": 0}, "num_samples must be at least 1"),
        ([1], {"repetition_penalty": 0}, r"repetition_penalty must be in \(1e-30, 1e\+30\)"),
        ([1], {"logit_bias": {999: 1.0}}, "logit_bias has ids outside"),
        ([1], {"banned_token_ids": [999]}, "banned_token_ids has ids outside"),
        ([1], {"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ([1], {"stop": ["x", ""]}, r"stop\[1\] must be a text that is not empty, got ''"),
        ([1], {"stop_token_ids": [-7]}, r"stop_token_ids\[0\] must be at least 0, got -7"),
        ([1], {"max_new_tokens": 2.5}, "max_new_tokens must be a whole number"),
        ([1], {"max_new_tokens": "5"}, "max_new_tokens must be a whole number.*got '5'"),
        ([1], {"temperature": np.inf}, "temperature must be a finite number.*got inf"),
        ([1], {"temperature": 1e39}, r"temperature must be in \[0, 3e\+38\), got 1e\+39"),
        ([1], {"max_new_tokens": 2**31}, "max_new_tokens must be below 2147483648"),
        ([1], {"top_k": 2**40}, "top_k must be below 2147483648"),
        ([1], {"num_samples": 2.5}, "num_samples must be a whole number, got 2.5"),
        ([1], {"stop": None}, "stop must be a text or a sequence, got None"),
        ([1], {"stop": [3]}, r"stop\[0\] must be a text, got 3"),
        ([1], {"stop": Path("a")}, "stop must be a text or a sequence, got "),
        ([1], {"stop_token_ids": 2}, "stop_token_ids must be a sequence, got 2"),
        ([1], {"logit_bias": {5: None}}, r"logit_bias\[5\] must be a number, got None"),
        ([1], {"logit_bias": [1.0]}, r"logit_bias must be a mapping, got \[1.0\]"),
        ([1], {"logit_bias": {"a": 1.0}}, "logit_bias: each key must be a whole number, got 'a'"),
        ([1], {"logit_bias": {5: np.inf}}, r"logit_bias\[5\] must be below 1e30 .*got inf"),
        ("caf\ud83d", {}, "not valid Unicode: .* at character 3"),
        (
            [1],
            {"logit_bias": {5: np.nan}},
            r"logit_bias\[5\] must be a number, got nan",
        ),
        ([1.5, 2.5], {}, r"prompts\[0\] must be text, chat messages or a list of whole"),
        ([[1.7, 2.2]], {}, r"prompts\[0\]\[0\] must be a whole number, got 1.7"),
        ([[1, [2]]], {}, r"prompts\[0\]\[1\] must be a whole number, got \[2\]"),
        ([[1], [True]], {}, r"prompts\[1\]\[0\] must be a whole number, got True"),
        ([[1], ["a"]], {}, r"prompts\[1\]\[0\] must be a whole number, got 'a'"),
        ([[1], b"a"], {}, r"prompts\[1\] must be text, chat messages or a list of whole"),
        ([[1], [{"content": "a"}]], {}, r"prompts\[1\]: messages\[0\] must be a dictionary"),
        ([[1], [{"role": "user"}, 3]], {}, r"prompts\[1\]: messages\[1\] must be a dictionary"),
        ([[1], "\ud800"], {}, r"prompts\[1\]: text is not valid Unicode"),
        (itertools.repeat([1]), {}, "prompts: got more than 1000000; give fewer"),
        ([1], {"num_samples": 4097}, "num_samples must be at most 4096, got 4097"),
        ([1], {"stop": "\ud800"}, r"stop\[0\] is not valid Unicode"),
        ([1], {"stop": ["a", "b\ud800"]}, r"stop\[1\] is not valid Unicode: .* at character 1"),
        ([1], {"stop": ""}, "stop must be a text that is not empty, got ''"),
        (None, {}, "prompts must be a prompt or a list of them, got None"),
        ([None], {}, r"prompts\[0\] must be text, chat messages or a list of whole"),
        ([[1], float("nan")], {}, r"prompts\[1\] must be text, .*, got nan"),
    ],
)
def test_bad_arguments_are_named(model, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, GenerationConfig(**options))


def test_prompts_come_from_whatever_has_an_order(model):
    config = GenerationConfig(max_new_tokens=4)
    texts = ["ab", "cd"]
    expected = [tokens.tolist() for tokens in generate(model, texts, config).tokens]
    for prompts in (tuple(texts), np.asarray(texts), (text for text in texts)):
        assert [tokens.tolist() for tokens in generate(model, prompts, config).tokens] == expected
    result = generate(model, iter(texts), config, PromptLookup(), drafting="never")
    assert [tokens.tolist() for tokens in result.tokens] == expected
    with pytest.raises(ValueError, match="prompts must be a prompt or a list"):
        generate(model, {"ab", "cd"})


def test_tables_give_prompts_by_column_and_take_results(model):
    pandas = pytest.importorskip("pandas", reason="needs the extra `notebooks`")
    table = pandas.DataFrame({"prompt": ["ab", "cd"]}, index=[7, 9])
    config = GenerationConfig(max_new_tokens=4, num_samples=2)
    with pytest.raises(ValueError, match=r"a whole table \(DataFrame\); give the column"):
        generate(model, table)
    with pytest.raises(ValueError, match=r"prompts\[0\] must be text, .*, got nan"):
        generate(model, pandas.Series([None, "ab"]).astype(object).fillna(np.nan))
    result = generate(model, table["prompt"], config)
    rows = result.to_pandas()
    assert rows["prompt"].tolist() == [0, 0, 1, 1]
    assert rows["sample"].tolist() == [0, 1, 0, 1]
    assert rows["text"].tolist() == result.texts
    assert rows["num_tokens"].tolist() == [len(row.tokens) for row in result]


def test_no_text_is_no_prompt_though_the_tokenizer_would_begin_it_with_bos():
    draft = jaxspec.load("demo-draft")
    assert draft.tokenizer.encode("")
    with pytest.raises(ValueError, match=r"prompts\[0\] is empty"):
        generate(draft, "")


def test_a_stop_string_may_begin_with_the_space_that_decoding_drops():
    for text, kept in (("Q: 1", ""), ("1 Q: 2", "1")):
        assert cut_at(text, (" Q",)) == kept


def test_a_tiny_temperature_is_greedy(model):
    greedy = generate(model, [1, 2], GenerationConfig(max_new_tokens=6))[0]
    for temperature in (1e-6, 2e-38, 1e-40):
        config = GenerationConfig(max_new_tokens=6, temperature=temperature)
        row = generate(model, [1, 2], config)[0]
        np.testing.assert_array_equal(row.tokens, greedy.tokens)
        assert row.finish_reason == greedy.finish_reason


@pytest.mark.parametrize("seed", [1 << 31, -1, True, 1.5, "1", None, [1]], ids=repr)
def test_a_seed_must_fit_the_generator(model, seed):
    for call in (generate, lambda *args, **named: next(stream(*args, **named))):
        with pytest.raises(ValueError, match=r"^seed must be "):
            call(model, [1], seed=seed)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, [2]], r"tokens\[1\] must be a whole number, got \[2\]"),
        ([1.5], r"tokens\[0\] must be a whole number, got 1.5"),
        (3, "tokens must be text, chat messages or a list of whole token ids, got 3"),
        ("\ud800", "tokens: text is not valid Unicode"),
    ],
)
def test_what_is_scored_or_streamed_is_named(model, prompt, message):
    with pytest.raises(ValueError, match=message):
        score(model, prompt)
    with pytest.raises(ValueError, match=r"^prompts"):
        next(stream(model, prompt))


def test_a_trace_is_asked_for_by_a_truth_value(model):
    with pytest.raises(ValueError, match="return_trace must be True or False, got 'no'"):
        generate(model, [1], return_trace="no")


def test_text_needs_a_tokenizer_and_a_chat_a_template(model):
    bare = dataclasses.replace(model, tokenizer=None)
    with pytest.raises(ValueError, match="tiny has no tokenizer"):
        generate(bare, "hello")
    with pytest.raises(ValueError, match="stop_token_ids"):
        generate(bare, [1], GenerationConfig(stop="x"))
    assert generate(bare, [1], GenerationConfig(max_new_tokens=2))[0].text is None
    untemplated = dataclasses.replace(model, tokenizer=Tokenizer(model.tokenizer.backend))
    with pytest.raises(ValueError, match="template"):
        generate(untemplated, [{"role": "user", "content": "hi"}])


def test_settings_may_be_keywords(model):
    config = GenerationConfig(max_new_tokens=9, stop_token_ids=())
    expected = generate(model, [1, 2], dataclasses.replace(config, max_new_tokens=4))[0].tokens
    found = generate(model, [1, 2], config, max_new_tokens=4)[0].tokens
    np.testing.assert_array_equal(found, expected)
    streamed = stream(model, [1, 2], max_new_tokens=4, stop_token_ids=())
    np.testing.assert_array_equal(np.concatenate([step.tokens for step in streamed]), expected)
    with pytest.raises(TypeError, match=r"temprature is no argument .* temperature"):
        generate(model, [1], temprature=1)


def test_config_and_drafter_may_stand_in_each_others_place(model):
    config, drafter = GenerationConfig(max_new_tokens=4), PromptLookup(2)
    expected = generate(model, [1, 2], config)[0].tokens
    for places in ((config, drafter), (drafter, config), (None, config), (drafter,)):
        result = generate(model, [1, 2], *places, max_new_tokens=4)
        np.testing.assert_array_equal(result[0].tokens, expected)
        assert result.drafters == (drafter if drafter in places else None,)
    (first, *_) = stream(model, [1, 2], drafter, max_new_tokens=4)
    assert len(first.trace.tokens) == drafter.tree_shape[0]
    with pytest.raises(ValueError, match="config must be a GenerationConfig, got PromptLookup"):
        generate(model, [1], drafter, drafter)


def test_drafts_deeper_than_the_context_are_refused(model):
    most = PromptLookup(CONTEXT + 1)
    with pytest.raises(ValueError, match=rf"drafts up to {CONTEXT + 1} tokens .* holds {CONTEXT}"):
        generate(model, [1], drafter=most)


def test_what_makes_a_drafter_is_said(model):
    for given, call in ((model, "DraftModel.of"), (model.network, "DraftModel.of")):
        with pytest.raises(ValueError, match=call):
            generate(model, [1], given)
    with pytest.raises(ValueError, match="an instance"):
        generate(model, [1], drafter=PromptLookup)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: generate("demo", "a"), r"model must be a Model, got str; give .*load\('demo'\)"),
        (lambda: next(stream("demo", "a")), "model must be a Model, got str"),
        (lambda: score("demo", "a"), "model must be a Model, got str"),
        (lambda: jaxspec.denoise("demo", "a"), "model must be a Model, got str"),
        (lambda: jaxspec.save("demo", "folder"), "model must be a Model, got str"),
        (lambda: save_orbax("demo", "folder"), "model must be a Model, got str"),
        (lambda: DraftModel.of("demo"), "model must be a Model, got str"),
        (lambda: Deer.of("demo"), "model must be a Model, got str"),
        (lambda: load_eagle("demo-eagle", "demo"), r"target must be a Model.*load\('demo'\)"),
        (lambda: load_dflash("head", "demo"), "target must be a Model, got str"),
        (lambda: Eagle.of("demo-eagle"), r"load_eagle\(folder, model\).*got str"),
        (lambda: Eagle2.of("demo-eagle"), r"load_eagle\(folder, model\).*got str"),
        (lambda: DFlash.of("head"), r"load_dflash\(folder, model\).*got str"),
    ],
)
def test_what_makes_a_model_or_a_head_is_said(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_networks_and_models_are_told_apart(model):
    for call in (generate, score):
        with pytest.raises(ValueError, match=r"got Network; give .*Model\.of\(network\)"):
            call(model.network, [1])
    with pytest.raises(ValueError, match="target must be a Model, got Network"):
        DraftModel.of(model, target=model.network)


def test_results_show_themselves_in_a_line(model):
    result = generate(model, [[1], [2]], max_new_tokens=3, return_trace=True, stop_token_ids=())
    assert repr(result) == "GenerationResult(rows: 2, tokens: 6, tau: 1.00)"
    assert "trace=Trace(steps: 3)" in repr(result[0])


def test_a_model_shows_itself_in_a_line(model):
    config = model.config.replace(num_layers=1, layer_types=("full",))
    heads = (
        EagleHead(init_eagle_params(config, True, jax.random.key(0)), config),
        Eagle3Head(init_eagle3_params(config, 96, jax.random.key(0)), config, (0, 1, 2), 272),
        DFlashHead(init_dflash_params(config, 32, jax.random.key(0)), config, (1,), 0, 4),
    )
    drafters = (DraftModel.of(model), Eagle.of(heads[0]), LoadedDrafter(NoDraft(), heads[0].params))
    for shown in (model, model.network, *heads, *drafters):
        assert len(repr(shown)) < 250
        assert "\n" not in repr(shown)
        table = shown._repr_html_()
        for said in (type(shown).__name__, "weights", "float32"):
            assert said in repr(shown)
            assert said in table
        assert len(table) < 2000
    count = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    assert f"weights: {count:,}, dtype: float32" in repr(model)
    assert len(repr(model.tokenizer)) < 250
    asked = dataclasses.replace(model, name="<b>")._repr_html_()
    assert "&lt;b&gt;" in asked


def test_a_rule_of_the_checkpoint_is_refused_not_ignored(model):
    for rule, value in (("min_length", 3), ("suppress_tokens", [1])):
        asks = dataclasses.replace(model, generation_defaults={rule: value})
        with pytest.raises(ValueError, match=rule):
            generate(asks, [1])


def test_a_draft_model_with_another_vocabulary_is_refused(model, tokenizer):
    config = model.config.replace(vocab_size=64)
    other = Model(Network(init_params(config, jax.random.key(0)), config), name="other")
    with pytest.raises(ValueError, match="64 ids, the target's 272"):
        generate(model, [1], drafter=DraftModel.of(other))


def test_families_may_pad_one_vocabulary_to_different_sizes(model):
    for size in (264, 288):
        config = model.config.replace(vocab_size=size)
        network = Network(init_params(config, jax.random.key(0)), config)
        padded = Model(network, model.tokenizer, "padded")
        options = GenerationConfig(max_new_tokens=8)
        drafted = generate(model, "hello", options, DraftModel.of(padded, 2))
        np.testing.assert_array_equal(
            drafted[0].tokens, generate(model, "hello", options)[0].tokens
        )


@pytest.mark.parametrize("only", [False, True])
def test_banned_ids_are_never_sampled_and_those_past_the_tokenizer_if_asked(model, only):
    config = GenerationConfig(
        max_new_tokens=64,
        temperature=5.0,
        num_samples=8,
        banned_token_ids=range(100),
        tokenizer_ids_only=only,
    )
    for drafter in (None, own_draft(model)):
        tokens = np.concatenate(generate(model, "hello", config, drafter).tokens)
        assert tokens.min() >= 100
        assert (tokens.max() < model.tokenizer.vocab_size) == only


def test_an_id_past_the_tokenizer_may_be_all_that_is_allowed(model):
    config = GenerationConfig(max_new_tokens=3, allowed_token_ids=[271])
    for drafter in (None, own_draft(model)):
        (row,) = generate(model, "hello", config, drafter)
        assert (row.tokens.tolist(), row.text) == ([271] * 3, "")
    bare = dataclasses.replace(model, tokenizer=None)
    with pytest.raises(ValueError, match="tokenizer_ids_only: tiny has no tokenizer"):
        generate(bare, [1], tokenizer_ids_only=True)


def test_logit_bias_decides(model):
    config = GenerationConfig(max_new_tokens=4, logit_bias={65: 1e4})
    assert generate(model, "hello", config)[0].tokens.tolist() == [65] * 4


@pytest.mark.parametrize("drafter", [None, PromptLookup()])
def test_a_budget_is_never_exceeded(model, drafter):
    config = GenerationConfig(max_new_tokens=[0, 1, 7])
    rows = generate(model, ["hello"] * 3, config, drafter)
    assert [len(row.tokens) for row in rows] == [0, 1, 7]
    assert {row.finish_reason for row in rows} == {"length"}
    np.testing.assert_array_equal(rows[1].tokens, rows[2].tokens[:1])
    none = generate(model, "hello", GenerationConfig(max_new_tokens=0), drafter, return_trace=True)
    assert (len(none[0].tokens), none[0].text, none[0].trace) == (0, "", ())


@pytest.mark.parametrize("own", [False, True])
def test_the_context_is_filled_to_its_last_place(model, own):
    row = generate(model, [7] * (CONTEXT - 3), drafter=own_draft(model) if own else None)[0]
    assert len(row.tokens) == 3
    assert row.finish_reason == "length"


def test_a_stop_id_cuts_inside_an_accepted_block(model):
    plain = generate(model, "hello", GenerationConfig(max_new_tokens=24))[0].tokens.tolist()
    for stop_id in dict.fromkeys(plain):
        config = GenerationConfig(max_new_tokens=24, stop_token_ids=[stop_id, 5])
        row = generate(model, "hello", config, own_draft(model))[0]
        assert row.tokens.tolist() == plain[: plain.index(stop_id) + 1]
        assert row.finish_reason == "stop_token"


def test_a_stop_string_cuts_the_text_and_streams_the_same(model, letters):
    config = GenerationConfig(max_new_tokens=24, allowed_token_ids=letters)
    plain = generate(model, "hello", config)[0]
    assert len(plain.text) == 24
    for start in (0, 4, 7):
        string = plain.text[start : start + 3]
        stops = dataclasses.replace(config, stop=[string, "0never0"])
        row = generate(model, "hello", stops, own_draft(model))[0]
        end = plain.text.index(string)
        assert row.text == plain.text[:end]
        assert row.tokens.tolist() == plain.tokens[: end + 3].tolist()
        assert row.finish_reason == "stop_string"
        steps = list(stream(model, "hello", stops, own_draft(model)))
        assert "".join(step.text for step in steps) == row.text
        assert [step.finish_reason for step in steps][-1] == "stop_string"


def test_a_token_that_is_stop_id_and_stop_string_cuts_the_text(model, letters):
    config = GenerationConfig(max_new_tokens=12, allowed_token_ids=letters)
    plain = generate(model, "hello", config)[0]
    stops = dataclasses.replace(config, stop=plain.text[3], stop_token_ids=[int(plain.tokens[3])])
    row = generate(model, "hello", stops)[0]
    assert row.text == plain.text[: plain.text.index(plain.text[3])]


def test_logprobs_are_the_targets_own(model):
    config = GenerationConfig(
        max_new_tokens=12, temperature=0.5, logprobs=True, warped_logprobs=True
    )
    for drafter in (None, own_draft(model)):
        row = generate(model, "hello", config, drafter)[0]
        text = np.concatenate([row.prompt_tokens, row.tokens])
        scored = score(model, text.tolist())
        expected = scored.logprobs[len(row.prompt_tokens) - 1 :]
        np.testing.assert_allclose(row.logprobs, expected, atol=1e-4)
        logits = scored.logits[len(row.prompt_tokens) - 1 : -1] / 0.5
        warped = jax.nn.log_softmax(logits)[np.arange(len(row.tokens)), row.tokens]
        np.testing.assert_allclose(row.warped_logprobs, warped, atol=1e-4)


def test_from_draft_tells_drafted_tokens_from_the_targets(model):
    row = generate(model, "hello", GenerationConfig(max_new_tokens=15), own_draft(model))[0]
    assert row.from_draft.tolist() == [True, True, True, True, False] * 3
    assert row.metrics.mean_acceptance_length == 5.0
    assert row.metrics.mean_accepted_tokens == 4.0
    assert row.metrics.acceptance_per_position == (1.0, 1.0, 1.0, 1.0)
    plain = generate(model, "hello", GenerationConfig(max_new_tokens=4))[0]
    assert not plain.from_draft.any()
    assert plain.metrics.tau == 1.0


def test_rows_depend_on_seed_place_and_sample_alone(model):
    config = GenerationConfig(max_new_tokens=16, temperature=1.0, num_samples=2)
    rows = generate(model, ["hello", "other"], config, seed=3)
    again = generate(model, ["hello", "changed"], config, seed=3)
    for row in (0, 1):
        np.testing.assert_array_equal(rows[row].tokens, again[row].tokens)
    assert [row.sample_index for row in rows] == [0, 1, 0, 1]
    different = [rows[0], rows[1], generate(model, "hello", config, seed=4)[0]]
    assert len({tuple(row.tokens) for row in different}) == 3


@pytest.mark.parametrize("own", [False, True])
def test_samples_equal_rows_that_were_prefilled_by_themselves(model, own):
    """The key of a row is named by the seed, the prompt's place and the sample's number."""
    texts, num_samples, seed = ["hello", "a longer one"], 3, 11
    drafter = own_draft(model) if own else None
    config = GenerationConfig(
        max_new_tokens=[9, 12], temperature=[1.0, 1.5], num_samples=num_samples
    )
    rows = generate(model, texts, config, drafter, seed)

    places = [(place, number) for place in range(2) for number in range(num_samples)]
    apart = GenerationConfig(
        max_new_tokens=[config.max_new_tokens[place] for place, _ in places],
        temperature=[config.temperature[place] for place, _ in places],
    )
    request = prepare(model, [texts[place] for place, _ in places], apart, drafter, seed)
    numbers = np.asarray([(seed, *place) for place in places], np.int32)
    (capacity,) = request.plan.capacities

    @jax.jit
    def decode_apart(params, prompts):
        start = partial(
            begin, drafter=request.drafter, text_capacity=capacity, chunk=request.plan.chunk
        )
        states = pad_caches(jax.vmap(start, (None, 0))(params, prompts), capacity)
        return run(partial(speculative_step, drafter=request.drafter), params, states, unfinished)

    states = decode_apart(request.params, request.prompts._replace(seed=numbers))
    for row, (text, length) in enumerate(
        zip(np.asarray(states.context.tokens), states.context.length.tolist(), strict=True)
    ):
        assert rows[row].tokens.tolist() == text[request.prompt_lengths[row] : length].tolist()
        assert (rows[row].prompt_index, rows[row].sample_index) == places[row]
        assert rows[row].prompt_tokens.tolist() == model.tokenizer.encode(texts[places[row][0]])
    assert len({tuple(row.tokens) for row in rows}) == len(rows)


def test_temperatures_may_differ_by_row(model):
    config = GenerationConfig(max_new_tokens=12, temperature=[0.0, 1.0])
    for drafter in (None, own_draft(model)):
        rows = generate(model, ["hello", "hello"], config, drafter)
        greedy = generate(model, "hello", GenerationConfig(max_new_tokens=12))[0]
        np.testing.assert_array_equal(rows[0].tokens, greedy.tokens)


def test_trace_and_stream_tell_the_same_story_as_the_result(model):
    config = GenerationConfig(max_new_tokens=20, temperature=1.0)
    drafter = own_draft(model)
    row = generate(model, "hello", config, drafter)[0]
    traced = generate(model, "hello", config, drafter, return_trace=True)[0]
    streamed = list(stream(model, "hello", config, drafter))
    np.testing.assert_array_equal(row.tokens, traced.tokens)
    np.testing.assert_array_equal(row.tokens, np.concatenate([s.emitted for s in traced.trace]))
    np.testing.assert_array_equal(row.tokens, np.concatenate([s.tokens for s in streamed]))
    np.testing.assert_array_equal(row.from_draft, np.concatenate([s.from_draft for s in streamed]))
    assert "".join(step.text for step in streamed) == row.text
    assert [step.finish_reason for step in streamed] == [None] * (len(streamed) - 1) + ["length"]
    for step in traced.trace:
        accepted = step.tokens[step.path[1:]]
        np.testing.assert_array_equal(accepted, step.emitted[: len(accepted)])
        np.testing.assert_allclose(np.exp(step.draft_logprobs).sum(axis=1), 1.0, atol=1e-5)


def test_stream_is_for_one_row(model):
    with pytest.raises(ValueError, match="got 2"):
        next(stream(model, ["a", "b"]))


@pytest.mark.parametrize("drafter", [None, PromptLookup()])
def test_logits_that_are_not_finite_end_a_row(model, drafter):
    broken = jax.tree.map(lambda leaf: leaf * np.nan, model.params)
    sick = dataclasses.replace(model, network=Network(broken, model.config))
    for temperature in (0.0, 1.0):
        config = GenerationConfig(max_new_tokens=4, temperature=temperature)
        row = generate(sick, "hello", config, drafter)[0]
        assert (row.finish_reason, len(row.tokens)) == ("not_finite", 0)
    (step,) = stream(sick, "hello", GenerationConfig(max_new_tokens=4), drafter)
    assert (step.finish_reason, len(step.tokens), step.text) == ("not_finite", 0, "")


@pytest.mark.parametrize("token", [5, 4095])
def test_one_logit_that_is_no_number_is_seen_in_a_large_vocabulary(token):
    """XLA's maximum of a long row drops NaN on CPUs."""
    config = ModelConfig(
        vocab_size=4096,
        embed_dim=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        mlp_dim=8,
        max_positions=64,
        tied_head=True,
    )
    params = init_params(config, jax.random.key(0))
    table = params["embed"]["embedding"].at[token].set(np.nan)
    sick = Model(Network({**params, "embed": {"embedding": table}}, config))
    for temperature in (0.0, 1.0):
        options = GenerationConfig(max_new_tokens=4, temperature=temperature)
        row = generate(sick, [1, 2, 3], options)[0]
        assert (row.finish_reason, len(row.tokens)) == ("not_finite", 0)


@dataclasses.dataclass(frozen=True)
class Shaped(NoDraft):
    """A drafter of any sizes."""

    tree_shape: Any
    widths: Any


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("lookup", "drafter must be one such as PromptLookup"),
        (LoadedDrafter(None, None), "drafter must be one such as PromptLookup"),
        (LoadedDrafter(PromptLookup(), "x"), "LoadedDrafter.params, must be a pytree of arrays"),
        (Shaped("a", (1,)), "drafter: tree_shape of Shaped must be 2 entries, got 'a'"),
        (Shaped((-1, -1), ()), r"drafter: tree_shape of Shaped\[0\] must be at least 1, got -1"),
        (Shaped((2, 1), ()), "drafter: widths of Shaped must ascend to the 2 nodes"),
        (DraftModel(), "DraftModel needs a model's weights"),
        (Eagle(), "an EAGLE drafter needs a head"),
        (Eagle2(), "an EAGLE drafter needs a head"),
        (LayerSkip(), "LayerSkip needs a set"),
        (LayerSkip(Skips((True,), (True,))), "skip.attention must have 2 entries, one per layer"),
    ],
)
def test_drafters_that_lack_something_are_refused(model, drafter, message):
    with pytest.raises(ValueError, match=message):
        generate(model, "hello", GenerationConfig(max_new_tokens=4), drafter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 99}, "its vocabulary is 99, the target's 272"),
        ({"embed_dim": 16}, "its width is 16, the target's 32"),
    ],
)
def test_a_head_for_another_target_is_refused(model, change, message):
    settings = {"num_layers": 1, "layer_types": ("full",)} | change
    head = EagleHead({}, model.config.replace(**settings))
    with pytest.raises(ValueError, match=message):
        generate(model, "hello", GenerationConfig(max_new_tokens=4), Eagle.of(head))


@pytest.mark.parametrize("low", [-1e30, float(np.finfo(np.float32).min), -1e300, np.float32(-1e9)])
def test_a_very_low_bias_bans(low, model):
    (token,) = generate(model, "hello", max_new_tokens=1)[0].tokens
    (other,) = generate(model, "hello", max_new_tokens=1, logit_bias={token: low})[0].tokens
    assert other != token


def test_nothing_allowed_is_a_reason_to_stop_too(model):
    config = GenerationConfig(max_new_tokens=4, logit_bias=dict.fromkeys(range(272), -np.inf))
    assert generate(model, "hello", config)[0].finish_reason == "no_token"


def test_a_call_compiles_once_and_a_fresh_but_equal_call_not_at_all(model):
    compiled = []

    def listen(event: str, duration: float, **_):
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    monitoring.register_event_duration_secs_listener(listen)
    try:
        for expected in (1, 0):
            compiled.clear()
            config = GenerationConfig(max_new_tokens=11, temperature=0.7, top_p=0.9)
            generate(model, ["one", "prompt", "more"], config, PromptLookup(3, 3))
            assert len(compiled) == expected
    finally:
        monitoring.unregister_event_duration_listener(listen)


def test_three_to_six_prompts_share_a_program(model):
    programs = decode._cache_size()
    for count, temperature in ((3, 0.7), (4, 0.7), (6, 1.3), (5, 0.2)):
        config = GenerationConfig(max_new_tokens=5, temperature=temperature, top_k=7)
        result = generate(model, [[token] for token in range(count)], config, PromptLookup(2))
        assert len(result) == len(result.drafters) == count
    assert decode._cache_size() == programs + 1


def test_other_stops_share_a_program(model):
    programs = decode._cache_size()
    for ends in (
        {"stop": "x", "stop_token_ids": ()},
        {"stop": ["longer than", "x"], "stop_token_ids": [5]},
        {"stop": "\n\n", "stop_token_ids": [5, 6, 7]},
    ):
        generate(model, [1, 2], max_new_tokens=5, **ends)
    assert decode._cache_size() == programs + 1


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("num_samples", [1, 2])
def test_rows_that_fill_up_the_program_change_nothing(model, own, num_samples, monkeypatch):
    prompts = ["a longer one than the others", "hello", [7]]
    config = GenerationConfig(
        max_new_tokens=[3, 12, 7],
        temperature=[1.5, 0.0, 0.7],
        num_samples=num_samples,
        frequency_penalty=0.1,
        stop=["e"],
    )
    calls = [
        lambda traced=traced: generate(
            model, prompts, config, own_draft(model) if own else None, 5, return_trace=traced
        )
        for traced in (False, True)
    ]
    assert prepare(model, prompts, config, None, 5).num_rows == 6 * num_samples
    filled = [call() for call in calls]
    monkeypatch.setattr(jaxspec.decoding.request, "row_bucket_of", lambda count, parts: count)
    assert prepare(model, prompts, config, None, 5).num_rows == 3 * num_samples
    for ours, exact in zip(filled, [call() for call in calls], strict=True):
        assert ours.metrics.counts == exact.metrics.counts
        assert len(ours.drafters) == len(ours) == len(exact) == 3 * num_samples
        for row, expected in zip(ours, exact, strict=True):
            assert row.tokens.tolist() == expected.tokens.tolist()
            assert row.from_draft.tolist() == expected.from_draft.tolist()
            assert (row.text, row.finish_reason) == (expected.text, expected.finish_reason)
            assert row.metrics == expected.metrics
            assert row.prompt_tokens.tolist() == expected.prompt_tokens.tolist()
            assert [step.emitted.tolist() for step in row.trace or ()] == [
                step.emitted.tolist() for step in expected.trace or ()
            ]


def test_rows_that_fill_up_the_program_are_left_out_where_they_do_not_fit(model, monkeypatch):
    def check_texts_fit(each, length, batch_size, shares):
        if batch_size > 4:
            raise CheckpointError("too many")

    monkeypatch.setattr(jaxspec.decoding.request, "check_texts_fit", check_texts_fit)
    monkeypatch.setattr(jaxspec.decoding.request, "SHORT_TEXT", 0)
    config = GenerationConfig(max_new_tokens=4)
    for count in (1, 2, 3, 4):
        assert prepare(model, [[1]] * count, config, None, 0).num_rows == count
    with pytest.raises(CheckpointError, match="too many"):
        prepare(model, [[1]] * 5, config, None, 0)


def test_what_a_call_would_hold_is_foretold(model, monkeypatch):
    """Caches of the target and of the drafter, and logits; nothing is compiled to find them."""
    config = GenerationConfig(max_new_tokens=100)

    def held(drafter):
        request = prepare(model, [[1]] * 16, config, drafter, 0)
        return bytes_of_row(request.params, request.prompts, request.drafter, request.plan)

    caches = sum(leaf.nbytes for leaf in jax.tree.leaves(model.network.empty_cache(128).layers))
    plain, drafted = held(None), held(DraftModel.of(model, num_speculative_tokens=2))
    assert caches + 4 * 272 < plain < caches + 4 * 272 + 128 * 8
    assert caches + 2 * 4 * 272 <= drafted - plain < caches + 2 * 4 * 272 + 4000
    programs = decode._cache_size()
    monkeypatch.setattr(memory, "available_memory", lambda: 16 * plain)
    prepare(model, [[1]] * 16, config, None, 0)
    with pytest.raises(CheckpointError, match=r"16 texts of 128 tokens need .*caches and logits"):
        generate(model, [[1]] * 16, config, DraftModel.of(model, num_speculative_tokens=2))
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    with pytest.raises(CheckpointError, match=r"1 texts of 16 tokens need"):
        score(model, [1, 2, 3])
    assert decode._cache_size() == programs


def test_what_drafts_would_hold_is_foretold(model, monkeypatch):
    """The accepted path is picked from the keys and values of all nodes, which XLA holds."""
    config = GenerationConfig(max_new_tokens=8)
    request = prepare(model, [[1]], config, PromptLookup(CONTEXT), 0)
    foretold = bytes_of_row(request.params, request.prompts, request.drafter, request.plan)
    held = request.peak_bytes() - sum(leaf.nbytes for leaf in jax.tree.leaves(request.params))
    assert 0.6 * held < foretold < 1.5 * held
    monkeypatch.setattr(memory, "available_memory", lambda: foretold // 2)
    with pytest.raises(CheckpointError, match=r"1 texts of .* tokens need"):
        prepare(model, [[1]], config, PromptLookup(CONTEXT), 0)


def test_what_a_trace_would_hold_is_foretold(model, monkeypatch):
    """The laws of drawn drafts, each as wide as the vocabulary, are most of it."""
    monkeypatch.setattr(memory, "_available_host_memory", lambda: 10**6)
    config = GenerationConfig(max_new_tokens=90, temperature=1.0)
    programs = decode._cache_size()
    drawn = DraftModel.of(model, num_speculative_tokens=4)
    with pytest.raises(CheckpointError, match=r"return_trace: 90 steps need .*max_new_tokens"):
        generate(model, [[1]] * 2, config, drawn, return_trace=True)
    asked = []

    def check_trace_fits(each, num_steps):
        asked.append((each, num_steps))
        if len(asked) % 2:
            raise CheckpointError("the first guess is too large")

    monkeypatch.setattr(jaxspec.decoding.request, "check_trace_fits", check_trace_fits)
    for num_rows, drafter, laws in ((2, drawn, 4), (1, drawn, 4), (1, PromptLookup(4), 0)):
        prepare(model, [[1]] * num_rows, config, drafter, 0).check_trace_fits()
        guessed, exact = (each - num_rows * 2048 for each, num_steps in asked[-2:])
        assert guessed == num_rows * 5 * 4 * 272
        assert 0 <= exact - num_rows * laws * 4 * 272 < num_rows * 200
        assert {num_steps for _, num_steps in asked} == {90}
    assert decode._cache_size() == programs


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("seconds", [0.003, 0.03])
def test_an_interrupt_leaves_everything_usable(model, traced, seconds):
    """That of a notebook, in the middle of a program or between two steps."""
    config = GenerationConfig(max_new_tokens=40, temperature=1.0, choices=["yes, " * 8, "no" * 20])
    calls = [partial(generate, model, "hello", config, PromptLookup(3), 1, traced)]
    calls += [partial(score, model, "hello")]
    expected, scored = (call() for call in calls)
    timer = threading.Timer(seconds, signal.raise_signal, (signal.SIGINT,))

    def decode_for_ever():
        timer.start()
        while True:
            generate(model, "hello", config, PromptLookup(3), 2, traced)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            decode_for_ever()
    finally:
        timer.join()
        signal.signal(signal.SIGINT, handler)
    again, scored_again = (call() for call in calls)
    assert again[0].tokens.tolist() == expected[0].tokens.tolist()
    np.testing.assert_array_equal(scored.logits, scored_again.logits)


def test_plain_decoding_is_the_same_program_with_a_one_node_tree(model):
    config = GenerationConfig(max_new_tokens=9)
    generate(model, "hello", config)
    programs = decode._cache_size()
    generate(model, "hello", config, NoDraft())
    assert decode._cache_size() == programs


def test_score_agrees_with_its_own_logits(model):
    scored = score(model, "hello")
    assert scored.logits.shape == (5, 272)
    ids = model.tokenizer.encode("hello")
    expected = jax.nn.log_softmax(scored.logits[:-1])[np.arange(4), ids[1:]]
    np.testing.assert_allclose(scored.logprobs, expected, atol=1e-5)
    logprobs, likeliest = likelihoods(model, "hello")
    np.testing.assert_allclose(logprobs, scored.logprobs, atol=1e-5)
    assert likeliest.tolist() == np.argmax(scored.logits[:-1], axis=-1).tolist()
    assert score(model, [7] * CONTEXT).logits.shape == (CONTEXT, 272)  # nothing is decoded
    with pytest.raises(ValueError, match="tokens is empty"):
        score(model, "")


def test_compiling_within_compiling_counts_once():
    """Tracing within lowering is reported first, then the lowering that it was a part of."""
    (event, *_) = sorted(compilation._DURATIONS)
    with CompileClock() as clock:
        for inner, whole in ((0.02, 0.05), (0.0, 0.01)):
            time.sleep(whole)
            monitoring.record_event_duration_secs(event, inner)
            monitoring.record_event_duration_secs(event, whole)
    assert clock.seconds == pytest.approx(0.06, abs=0.005)
