"""`generate` with choices, a regular expression or a JSON schema."""

import dataclasses
import itertools
import json
import re
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import decoders

from jaxspec import (
    DraftModel,
    GenerationConfig,
    LoadedDrafter,
    PromptLookup,
    batch,
    generate,
    stream,
)
from jaxspec.bounded import Bounded
from jaxspec.core.grammar import is_closed, walk
from jaxspec.core.loop import decode
from jaxspec.core.types import Stop
from jaxspec.decoding import grammars, patterns
from jaxspec.decoding.grammars import Language, compiled, languages_of
from jaxspec.decoding.result import FINISH_REASONS
from jaxspec.decoding.schemas import size_of_schema
from jaxspec.extras import MissingExtra
from tests.foreign import like_llama2

PROMPTS = ["Yes or no?", "A number:", "One more"]
CHOICES = ["yes", "no", "yes, but", "möglich"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "old": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "old", "tags"],
}


def is_valid(found: dict) -> bool:
    """The schema, read by a person."""
    return (
        {*found} == {"name", "old", "tags"}
        and isinstance(found["name"], str)
        and len(found["name"]) <= 6
        and isinstance(found["old"], bool)
        and {*found["tags"]} <= {"a", "b"}
        and len(found["tags"]) <= 2
    )


def needs_compiler() -> None:
    pytest.importorskip("outlines_core", reason="needs the extra `grammar`: '.[grammar]'")


def doubling(levels: int) -> dict:
    """A schema of few characters that is endless if it is written out."""
    defs = {
        f"d{level}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{level + 1}"}] * 2}
        for level in range(levels)
    }
    return {"$defs": {**defs, f"d{levels}": {"type": "null"}}, "$ref": "#/$defs/d0"}


ARRAY, OF_A = {"type": "array"}, {"$ref": "#/$defs/a"}


def settings(**changes) -> GenerationConfig:
    return GenerationConfig(**{"max_new_tokens": 60, **changes})


def test_the_text_is_one_of_the_choices(model):
    result = generate(model, PROMPTS, settings(choices=CHOICES))
    assert {*result.texts} <= {*CHOICES}
    sampled = settings(choices=CHOICES, temperature=3.0, num_samples=16)
    texts = generate(model, PROMPTS, sampled).texts
    assert {*texts} <= {*CHOICES}
    assert len({*texts}) > 1


def test_a_text_that_may_go_on_ends_with_a_stop_id(model):
    rows = generate(model, PROMPTS[0], settings(choices=CHOICES, temperature=3.0, num_samples=24))
    for row in rows:
        goes_on = row.text == "yes"
        assert row.finish_reason == ("stop_token" if goes_on else "grammar")
        assert (row.tokens[-1] in model.stop_token_ids) == goes_on
    without = settings(choices=["yes", "yes, but"], stop_token_ids=())
    assert generate(model, PROMPTS[0], without)[0].text in ("yes", "yes, but")


def test_each_prompt_may_have_its_own(model):
    each = [["left", "right"], ["up"], ["left", "right"]]
    result = generate(model, PROMPTS, settings(choices=each))
    for text, choices in zip(result.texts, each, strict=True):
        assert text in choices
    with pytest.raises(ValueError, match="choices: got 2 values for 3 prompts"):
        generate(model, PROMPTS, settings(choices=each[:2]))


def test_drafts_change_no_text(model):
    config = settings(choices=[*CHOICES, "a much longer text than the others: yes, yes, yes"])
    plain = generate(model, PROMPTS, config)
    drafted = generate(model, PROMPTS, config, PromptLookup(6))
    assert drafted.texts == plain.texts
    assert drafted.metrics.tau > plain.metrics.tau == 1


def test_streams_and_jobs_obey(model):
    config = settings(choices=CHOICES)
    expected = generate(model, PROMPTS, config)
    steps = list(stream(model, PROMPTS[0], config))
    assert "".join(step.text for step in steps) == expected.texts[0]
    assert steps[-1].finish_reason == expected[0].finish_reason
    output = batch.Collector()
    batch.run(model, batch.rows_of(PROMPTS), output, config)
    records = sorted(output.records, key=lambda record: record["line"])
    assert [record["text"] for record in records] == expected.texts
    with pytest.raises(ValueError, match="choices must be one for the whole job, got 2"):
        batch.run(model, batch.rows_of(PROMPTS), output, settings(choices=[["a"], ["b"]]))


def test_the_end_of_the_budget_is_seen_coming(model):
    """Digits could go on for ever; the closing bracket needs the last token."""
    needs_compiler()
    for budget in (3, 4, 9):
        (row,) = generate(model, PROMPTS[1], settings(regex=r"\[[0-9]+\]", max_new_tokens=budget))
        assert re.fullmatch(r"\[[0-9]+\]", row.text)
        assert len(row.tokens) <= budget
    # Two tokens hold no such text, so nothing is held back.
    (row,) = generate(model, PROMPTS[1], settings(regex=r"\[[0-9]+\]", max_new_tokens=2))
    assert row.finish_reason == "length"
    assert re.fullmatch(r"\[[0-9]+", row.text)


def test_settings_that_forbid_every_token_say_so(model):
    """Every token of the text may occur once, and the text needs one twice."""
    config = settings(choices=["oooo"], no_repeat_ngram_size=1)
    (row,) = generate(model, PROMPTS[0], config)
    assert row.finish_reason == FINISH_REASONS[Stop.NO_TOKEN]
    assert "oooo".startswith(row.text)
    # Also for drafts that are drawn: their law is the target's up to that place.
    choices = ["aoooo", "boooo", "coooo"]
    sampled = settings(choices=choices, temperature=1.0, num_samples=300, no_repeat_ngram_size=1)
    drafter = LoadedDrafter(DraftModel(3), model.network)
    shares = [
        np.mean([row.text[:1] == "a" for row in generate(model, PROMPTS[0], sampled, each, seed=3)])
        for each in (None, drafter)
    ]
    assert abs(shares[0] - shares[1]) < 0.12


def test_sizes_of_grammars_are_few(model):
    """Other texts of about the same size share a program."""
    before = None
    for choices in (["yes", "no"], ["left", "right"], ["red", "blue", "green"]):
        generate(model, PROMPTS[0], settings(choices=choices))
        before = decode._cache_size() if before is None else before
    assert decode._cache_size() == before


def test_a_space_that_the_decoder_drops_is_no_part_of_the_text():
    tokenizer = like_llama2()
    assert not tokenizer.drops_first_space
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    assert tokenizer.drops_first_space
    grammar, (start,) = compiled(tokenizer, tokenizer.vocab_size, (Language("choices", ("an",)),))
    space, letter = tokenizer.token_id("▁"), tokenizer.token_id("a")
    after = walk(grammar, jnp.int32(start), jnp.array([space, letter, tokenizer.token_id("n")]))
    assert bool(is_closed(grammar, after)[-1])
    assert tokenizer.decode([space, letter, tokenizer.token_id("n")]) == "an"
    assert walk(grammar, jnp.int32(start), jnp.array([letter, space])).tolist()[-1] < 0


@pytest.mark.parametrize(
    "regex",
    [r"[0-9]{1,3}(\.[0-9]{2})?", "(ab|cd)*e", "[^x]{2,5}", "ü+|日本語", r"\d\d:\d\d", "(?i)yes|no"],
)
def test_sampled_texts_match_a_regular_expression(model, regex):
    needs_compiler()
    config = settings(regex=regex, temperature=2.0, num_samples=12, max_new_tokens=24)
    for row in generate(model, PROMPTS[1], config, PromptLookup(3)):
        assert re.fullmatch(regex, row.text), row.text


def test_every_text_is_valid_for_a_schema(model):
    needs_compiler()
    config = settings(json_schema=SCHEMA, temperature=1.0, num_samples=7, max_new_tokens=90)
    lookup = PromptLookup(6)
    for drafter in (None, lookup):
        for text in generate(model, PROMPTS, config, drafter).texts:
            assert is_valid(json.loads(text)), text
    greedy = settings(json_schema=json.dumps(SCHEMA), max_new_tokens=90)
    plain, drafted = (generate(model, PROMPTS, greedy, drafter) for drafter in (None, lookup))
    for row, other in zip(plain, drafted, strict=True):
        np.testing.assert_array_equal(row.tokens, other.tokens)
    # Names and brackets are forced, so they are drafted without a draft model.
    assert drafted.metrics.tau > 1.5


def test_schemas_are_read_as_people_have_them():
    class Person:
        @staticmethod
        def model_json_schema():
            return SCHEMA

    forms = [SCHEMA, json.dumps(SCHEMA), Person, [SCHEMA, SCHEMA]]
    found = [languages_of(None, None, form) for form in forms]
    assert found[0] == found[1] == found[2]
    (whole,) = languages_of(None, None, {"type": "string", "maxLength": 3.0})
    assert whole.texts == ('{"type": "string", "maxLength": 3}',)
    assert found[3] == found[0] * 2


def nested(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("once", "kept"),
    [
        ({"choices": ["a", "b"]}, ("a", "b")),
        ({"choices": [["a"], ["b", "c"]]}, (("a",), ("b", "c"))),
        ({"regex": ["a", "b"]}, ("a", "b")),
        ({"json_schema": [{"type": "null"}]}, '{"type": "null"}'),
    ],
)
def test_what_is_read_only_once_is_kept(once, kept):
    ((name, given),) = once.items()
    config = GenerationConfig(**{name: map(as_given, given)})
    assert getattr(config, name) == kept
    again = dataclasses.replace(config, max_new_tokens=3)
    assert getattr(again, name) == kept


def as_given(part):
    return iter(part) if isinstance(part, list) else part


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"choices": []}, r"choices: got \[\]"),
        ({"choices": [1]}, r"choices: got \[1\]"),
        ({"choices": [["a"], "b"]}, r"choices: got \[\['a'\], 'b'\]"),
        ({"choices": ["a\ud800"]}, "choices: a text is not valid Unicode"),
        ({"choices": (f"{i}" for i in itertools.count())}, "choices: got more than 262144"),
        ({"choices": ["a" * 2**22, "b"]}, "choices: texts of 4194305 characters in all"),
        ({"choices": "yes"}, "give a list of texts"),
        ({"choices": ["yes", ""]}, "none empty"),
        ({"choices": ["yes", 3]}, "choices: got"),
        ({"regex": ""}, "regex: got ''"),
        ({"regex": 3}, "regex: got 3"),
        ({"regex": "\ud800"}, "regex is not valid Unicode"),
        (
            {"regex": "a{1000000}"},
            "regex: it has 1000000 parts, if its .*at most 10000",
        ),
        ({"regex": "((ab{100}){100}c){2}"}, "regex: it has 20202 parts"),
        ({"regex": r"(\p{Lu}|[]{}]{1,9}){5000}"}, "regex: it has 50000 parts"),
        ({"regex": "a" * 2**17}, "regex: it has 131072 characters, and at most 65536"),
        ({"json_schema": "no json"}, "json_schema: got 'no json'"),
        ({"json_schema": 3}, "json_schema: got 3"),
        ({"json_schema": "[" * 100_000}, r"json_schema: got '\[\["),
        ({"json_schema": nested(5_000)}, r"json_schema: got \{'items': \{'items': \{"),
        ({"json_schema": json.dumps(nested(500))}, "json_schema: .*more than 100 lists or obj"),
        ({"json_schema": {"type": "string", "maxLength": 10**9}}, "json_schema: # has 1"),
        ({"json_schema": json.dumps(doubling(40))}, "json_schema: #/[$]defs/d.* has .* parts"),
        ({"choices": ["a"], "regex": "a"}, "choices and regex exclude each other"),
    ],
)
def test_what_is_no_grammar_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        GenerationConfig(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"regex": "a(b"}, "regex: .*in 'a\\(b'"),
        ({"regex": "(?=a)a"}, "regex: "),
        ({"regex": "^a"}, "regex: .*Leave out \\^ and \\$"),
        ({"regex": "[^\\s\\S]"}, "regex: a part of it matches no text"),
        ({"json_schema": {"type": "array", "items": True}}, "json_schema: [^\n]*$"),
        (
            {"json_schema": {"properties": {"a": {"type": "string", "pattern": "a)|(b"}}}},
            "json_schema: pattern at #/properties/a: .* Check its brackets",
        ),
    ],
)
def test_what_the_compiler_refuses_is_named(model, wrong, message):
    needs_compiler()
    with pytest.raises(ValueError, match=message):
        generate(model, PROMPTS[0], settings(**wrong))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"choices": ["a" * 65_000]}, "choices: a machine for it has 20001 states or more, and"),
        ({"choices": ["ab" * 2**20, "b"]}, "choices: a machine for it has 20001 states or more"),
        ({"regex": "a{10000}b{10000}"}, "regex: it has 20000 parts"),
        ({"regex": "((a|b)*a(a|b){25})"}, "regex: compiling it takes more than 1 seconds, or"),
        (
            {"json_schema": {"type": "string", "pattern": "(a|b)*a(a|b){25}"}},
            "json_schema: compiling it takes more than 1 seconds, or 64 MiB",
        ),
    ],
)
def test_what_would_take_too_much_is_refused(model, wrong, message, monkeypatch):
    needs_compiler()
    process = Bounded(patterns.__file__, seconds=1, memory=1 << 26)
    monkeypatch.setattr(grammars, "_PROCESS", process)
    began = time.monotonic()
    with pytest.raises(ValueError, match=message):
        generate(model, PROMPTS[0], settings(**wrong))
    assert time.monotonic() - began < 10


def test_many_choices_are_quick(model):
    choices = [f"number {number}" for number in range(100_000)]
    began = time.monotonic()
    result = generate(model, PROMPTS[0], settings(choices=choices))
    assert time.monotonic() - began < 10
    assert result.texts[0] in choices
    long = ["y" * 15_000, "n" * 4000]
    began = time.monotonic()
    (row,) = generate(model, PROMPTS[0], settings(choices=long))
    assert time.monotonic() - began < 10
    assert any(text.startswith(row.text) for text in long)


def nested(levels: int) -> dict:
    """A schema in which one reference leads to the next, the last to a boolean."""
    defs = {
        f"d{level}": {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"$ref": f"#/$defs/d{level + 1}"}},
            "required": ["a", "b"],
        }
        for level in range(levels)
    }
    return {"$defs": {**defs, f"d{levels}": {"type": "boolean"}}, "$ref": "#/$defs/d0"}


def test_a_schema_is_read_to_the_end_of_its_references(model):
    """Past a depth the compiler leaves properties out, and a comma behind."""
    needs_compiler()
    assert size_of_schema(nested(6)).depth == 7
    config = settings(json_schema=nested(6), temperature=1.0, max_new_tokens=150)
    for text in generate(model, PROMPTS, config).texts:
        found = json.loads(text)
        for _ in range(6):
            assert {*found} == {"a", "b"}
            found = found["b"]
        assert isinstance(found, bool)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "#"}, "# refers to itself"),
        ({"$defs": {"a": {"items": OF_A, **ARRAY}}, **OF_A}, "#/[$]defs/a refers to itself"),
        ({"$defs": {"a": {"properties": {"b": OF_A}}}, **OF_A}, "#/[$]defs/a refers to itself"),
        ({"$ref": "#/nowhere"}, "refers to #/nowhere, which is not in it"),
        ({"$ref": "https://elsewhere/a.json"}, "refers to https://elsewhere/a.json"),
        ({"properties": {"a": {"type": "integer", "minimum": 3}}}, "minimum at #/properties/a "),
        ({"items": {"anyOf": [{"not": {}}]}, **ARRAY}, "not at #/items/anyOf/0 "),
        ({"properties": {}, "anyOf": [{}]}, "anyOf at # "),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "pattern at # "),
        ({"type": ["string", "null"], "format": "uri"}, "format .uri. at # "),
        ({"properties": {"a": {}}, "required": ["a", "z"]}, "required .z. at # "),
        ({"properties": {'"': {}}}, "the name '\"' at # "),
        ({"allOf": [{"type": "string"}, {"maxLength": 3}]}, "allOf at # "),
        ({"properties": {}, "required": 3}, "required at # must be a sequence, got 3"),
        ({"properties": {"a": {}}, "required": "a"}, "required at # must be a sequence"),
        ({"prefixItems": [{}] * 3, **ARRAY, "maxItems": 1}, "maxItems at # cannot"),
        ({"prefixItems": [{}] * 3, "minItems": 4}, "minItems at # cannot"),
        ({"type": "string", "maxLength": -1}, "maxLength at # must be at least 0, got -1"),
        ({"type": "string", "maxLength": True}, "maxLength at # must be a whole number"),
        ({"items": {"maxItems": 2.5}, **ARRAY}, "maxItems at #/items must be a whole number"),
        ({"minItems": 3, "maxItems": 1, **ARRAY}, "minItems at # must be at most its maxItems, 1"),
        ({"type": "string", "pattern": 5}, "pattern at # must be a text, got 5"),
        ({"type": "object", "additionalProperties": "no"}, "additionalProperties at # must be"),
        ({"enum": []}, "enum at # must be a list with an entry"),
        ({"anyOf": []}, "anyOf at # must be a list with an entry"),
        ({"type": []}, "type at # must be a list with an entry"),
        ({"type": "text"}, "type at # must be .*'text'"),
        ({"$ref": 5}, "[$]ref at # must be a text"),
    ],
)
def test_a_schema_that_would_not_be_obeyed_is_refused(schema, message):
    with pytest.raises(ValueError, match=f"json_schema: .*{message}"):
        GenerationConfig(json_schema=schema)


def test_what_only_describes_is_no_keyword():
    described = {"title": "A", "description": "b", "default": 3, "examples": [3], "x-minimum": 1}
    for schema in (
        {"type": "integer", "format": "int64", **described},
        {"type": "string", "enum": ["a"], **described},
        {"allOf": [OF_A], "$defs": {"a": {"type": "null"}, "unused": OF_A}, **described},
        {"properties": {"minimum": {"type": "null"}}, "additionalProperties": False},
    ):
        assert languages_of(None, None, schema)


def test_a_text_that_cannot_be_spelled_is_refused(model):
    banned = [token for token, text in enumerate(model.tokenizer.token_bytes()) if b"o" in text]
    with pytest.raises(ValueError, match="choices: no text of 'no' can be spelled"):
        generate(model, PROMPTS[0], settings(choices=["no"], banned_token_ids=banned))


def test_a_model_without_tokenizer_has_no_grammar(model):
    own = dataclasses.replace(model, tokenizer=None)
    with pytest.raises(ValueError, match="has no tokenizer to spell texts with"):
        generate(own, [1, 2], settings(choices=CHOICES))


def test_the_extra_is_named(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "outlines_core", None)
    with pytest.raises(MissingExtra, match="regex needs the extra `grammar`"):
        generate(model, PROMPTS[0], settings(regex="never compiled before"))
