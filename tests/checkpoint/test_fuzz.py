"""Whatever a file or a setting holds, the answer is a result or one sentence that says why not.

Each case of the table reads something that came from outside. It is given what was valid, changed
in a few places: a value of another kind, an entry too many, one that is missing, bytes cut off.
"""

import contextlib
import dataclasses
import json
import os
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jaxspec.batch.guard import GuardSettings
from jaxspec.batch.rows import read_rows
from jaxspec.batch.settings import JobSettings
from jaxspec.checkpoint import config_from_json, load_tokenizer
from jaxspec.checkpoint.safetensors import find_tensors
from jaxspec.core.tree import chain, tree_from_parents
from jaxspec.decoding.request import GenerationConfig, prompt_list
from jaxspec.drafters import (
    Deer,
    DFlash,
    DraftModel,
    Eagle,
    Eagle2,
    LayerSkip,
    PromptLookup,
    SuffixLookup,
    TokenRecycling,
)
from jaxspec.measure.prompts import read_prompts
from jaxspec.tuning import load_acceptance, load_profile
from tests.shapes import made_unchecked

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31 - 1, 2**31, 2**63, -(2**63), 10**30, 1e300, 0.5, -0.0]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["silu", "llama3", "yarn", "default", "float32", "first", "/dev/zero", "demo"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda parts: (
        st.lists(parts, max_size=4) | st.dictionaries(st.text(max_size=6), parts, max_size=3)
    ),
    max_leaves=6,
)


def places_in(value: Any, path: tuple = ()) -> list[tuple]:
    """Paths to every part of a JSON value, itself left out."""
    if isinstance(value, dict):
        parts = list(value.items())
    elif isinstance(value, list):
        parts = list(enumerate(value))
    else:
        parts = []
    return [
        place for key, part in parts for place in ((*path, key), *places_in(part, (*path, key)))
    ]


@st.composite
def changed(draw, valid: Any) -> Any:
    """A copy of a JSON value that differs in up to three places."""
    value = json.loads(json.dumps(valid))
    for _ in range(draw(st.integers(1, 3))):
        places = places_in(value)
        if not places:
            return draw(VALUES)
        *path, last = draw(st.sampled_from(places))
        whole = value
        for key in path:
            whole = whole[key]
        kind = draw(st.sampled_from(["other", "other", "gone", "more"]))
        if kind == "gone":
            del whole[last]
        elif kind == "more" and isinstance(whole, list):
            whole.insert(last, draw(VALUES))
        elif kind == "more":
            whole[draw(st.text(max_size=6))] = draw(VALUES)
        else:
            whole[last] = draw(VALUES)
    return value


@st.composite
def damaged(draw, whole: bytes) -> bytes:
    """A copy of a file's bytes, cut off or with other bytes in it."""
    data = bytearray(whole[: draw(st.integers(0, len(whole)))] if draw(st.booleans()) else whole)
    for _ in range(draw(st.integers(0, 4))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


CONFIG = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}
GEMMA = {
    **CONFIG,
    "model_type": "gemma3_text",
    "head_dim": 8,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_scaling": None,
    "rope_local_base_freq": 10000.0,
}
TOKENIZER = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "__type": "AddedToken"},
    "chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}],
}
HEADER = {
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
    "__metadata__": {"format": "pt"},
}
ROW = {
    "id": 3,
    "prompt": "Two and two",
    "messages": [{"role": "user", "content": "Hi"}],
    "turns": ["One", "Two"],
    "tokens": [1, 2, 3],
}
DEVICE = {
    "name": "phone",
    "device": "a phone",
    "runtime": "",
    "dtype": "float32",
    "quantization": "none",
    "source": "",
    "target_keyed_on": "tokens",
    "target": [{"tokens": 1, "seconds": 0.01}, {"tokens": 8, "seconds": 0.02, "spread": None}],
    "draft": [{"nodes": 1, "seconds": 0.002, "spread": 0.1}],
    "first_draft": [],
}
TABLE = {"rates": [[0.5, 0.25], [0.5, 0.25]], "counts": [], "head": "", "source": ""}


def read_header(folder: Path, header: Any) -> object:
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(24))
    return find_tensors(folder)


def written(name: str, read: Callable[[Path], object]) -> Callable[[Path, Any], object]:
    """Reads a JSON value from a file of this name."""

    def case(folder: Path, value: Any) -> object:
        (folder / name).write_text(json.dumps(value))
        return read(folder / name)

    return case


def with_settings(folder: Path, value: Any) -> object:
    (folder / "tokenizer_config.json").write_text(json.dumps(value))
    tokenizer = load_tokenizer(folder)
    return tokenizer.bos_id, tokenizer.render_chat([{"role": "user", "content": "Hi"}])


def with_tokenizer(folder: Path, value: Any) -> object:
    (folder / "tokenizer.json").write_text(json.dumps(value))
    tokenizer = load_tokenizer(folder)
    return tokenizer.decode(tokenizer.encode("Hi")), tokenizer.special_ids


def with_template(folder: Path, value: Any) -> object:
    parts = value if isinstance(value, list) else [value]
    (folder / "chat_template.jinja").write_text("\n".join(map(str, parts)), errors="replace")
    return load_tokenizer(folder).render_chat([{"role": "user", "content": "Hi"}])


def made(kind: Callable) -> Callable[[Path, Any], object]:
    """Calls something with the entries of a dictionary as keywords, as far as it knows them."""
    names = {field.name for field in dataclasses.fields(kind) if field.init}  # pyright: ignore

    def case(folder: Path, value: Any) -> object:
        given = value if isinstance(value, dict) else {}
        return kind(**{name: part for name, part in given.items() if name in names})

    return case


def defaults_of(kind: Any) -> dict[str, Any]:
    plain = {
        field.name: field.default
        for field in dataclasses.fields(kind)
        if isinstance(field.default, int | float | str | tuple | None)
    }
    return json.loads(json.dumps(plain))


class Case(NamedTuple):
    """Something from outside, and what reads it in a folder.

    Attributes:
        valid: what is read without an error.
        read: reads it.
        named: an error names one of these, or a key of `valid`.
        found: values that once ended otherwise than in a result or a sentence.
    """

    valid: Any
    read: Callable[[Path, Any], object]
    named: tuple[str, ...] = ()
    found: tuple[Any, ...] = ()


SMALL_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {
            **{"id": 2, "content": "</s>", "special": True, "single_word": False},
            **{"lstrip": False, "rstrip": False, "normalized": False},
        }
    ],
    "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "_"},
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": {"type": "Fuse"},
    "model": {
        **{"type": "BPE", "unk_token": None, "fuse_unk": False, "byte_fallback": False},
        **{"vocab": {"H": 0, "i": 1, "</s>": 2, "Hi": 3}, "merges": [["H", "i"]]},
    },
}
SETTINGS = (
    *(Deer, DFlash, DraftModel, Eagle, Eagle2, LayerSkip, PromptLookup, SuffixLookup),
    *(TokenRecycling, JobSettings, GuardSettings),
)
CASES: dict[str, Case] = {
    "config of Llama": Case(CONFIG, lambda folder, value: config_from_json(value), ("config",)),
    "config of Gemma 3": Case(GEMMA, lambda folder, value: config_from_json(value), ("config",)),
    "tokenizer_config.json": Case(TOKENIZER, with_settings, ("tokenizer_config.json", "template")),
    "tokenizer.json": Case(SMALL_TOKENIZER, with_tokenizer, ("tokenizer.json",)),
    "chat template": Case(
        ["{% for m in messages %}", "{{ m.role ~ m['content'] }}", "{% endfor %}", "{{ 2 * 3 }}"],
        with_template,
        ("chat template",),
        (["{{ 10 ** (10 ** 10) }}"], ["{{ 'a' * 10 ** 10 }}"], ["{{ range(10 ** 9) }}"]),
    ),
    "safetensors": Case(HEADER, read_header, ("model.safetensors",)),
    "row": Case(ROW, written("rows.jsonl", read_rows), ("rows.jsonl",)),
    "prompts": Case(ROW, written("rows.jsonl", read_prompts), ("rows.jsonl",)),
    "prompt": Case(
        [ROW, [ROW], "text", [1, 2]], lambda folder, value: prompt_list(value), ("prompt",)
    ),
    "profile": Case(DEVICE, written("profile.json", load_profile), ("profile",)),
    "acceptance": Case(TABLE, written("acceptance.json", load_acceptance), ("acceptance",)),
    "paths": Case([[0], [1], [0, 0]], lambda folder, value: Eagle(value), ("paths",)),
    "parents": Case(
        [-1, 0, 0, 1],
        lambda folder, value: tree_from_parents(value),
        ("parents", "nodes"),
        ([-1, 0.5], [-1, "0"], [-1, True], None, [-1] + [0] * 10_000),
    ),
    "chain": Case(
        [3],
        lambda folder, value: chain(value[0] if isinstance(value, list) and value else value),
        ("num_nodes",),
        ([10**6], [1.5], ["3"], [None], [True]),
    ),
    "GenerationConfig": Case(
        {**defaults_of(GenerationConfig), "stop": ["end"], "logit_bias": None},
        made(GenerationConfig),
        found=({"json_schema": "[" * 100_000}, {"json_schema": {"type": 3}}),
    ),
    **{kind.__name__: Case(defaults_of(kind), made(kind)) for kind in SETTINGS},
}


def refusal_of(read: Callable[[], object]) -> ValueError | None:
    try:
        read()
    except ValueError as error:
        return error
    return None


def is_answered(read: Callable[[], object], named: Iterable[str]) -> None:
    """Passes if something is read, or refused in one sentence that has one of these names."""
    began = time.monotonic()
    error = refusal_of(read)
    assert time.monotonic() - began < 10
    if error is not None:
        # Errors of Python itself say nothing of the file or the setting.
        assert not isinstance(error, UnicodeError | json.JSONDecodeError)
        assert 10 < len(str(error)) < 2000
        assert any(name in str(error) for name in named), str(error)


@pytest.fixture
def folder(tmp_path, byte_level_tokenizer):
    byte_level_tokenizer.write(tmp_path)
    return tmp_path


def tried(folder: Path, case: Case, examples: int) -> None:
    made_unchecked((*SETTINGS, GenerationConfig))
    keys = case.valid if isinstance(case.valid, dict) else ()

    @settings(
        max_examples=examples,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        deadline=None,
    )
    @given(changed(case.valid))
    def try_one(value):
        is_answered(lambda: case.read(folder, value), (*case.named, *keys))

    case.read(folder, case.valid)
    for value in case.found:
        try_one = example(value)(try_one)
    try_one()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.found])
def test_what_was_found_is_refused(name, folder):
    made_unchecked((GenerationConfig,))
    for value in CASES[name].found:
        assert refusal_of(lambda value=value: CASES[name].read(folder, value)) is not None, value


@pytest.mark.parametrize("name", CASES)
def test_what_is_changed_is_read_or_refused(name, folder):
    tried(folder, CASES[name], 40)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ten_thousand_changes_are_read_or_refused(name, folder):
    tried(folder, CASES[name], 10_000 // len(CASES))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_files_that_are_cut_off_or_damaged_are_refused(name, folder):
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
    read_header(folder, HEADER)
    whole = (folder / name).read_bytes()
    read = find_tensors if name == "model.safetensors" else load_tokenizer

    @settings(max_examples=60, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(damaged(whole))
    def try_one(data):
        (folder / name).write_bytes(data)
        is_answered(lambda: read(folder), (name, "chat template"))

    try_one()


WORDS = (
    *("generate", "batch", "bench", "tune", "tree", "train", "lm", "export", "tflite", "serve"),
    *("demo", "info", "--drafter", "eagle", "eagle:head=", "lookup:max_ngram=x", "--model", "-1"),
    *("--max-new-tokens", "1e9", "--temperature", "nan", "--out", "/dev/null", "--help", "", "\0"),
    *("--shard", "9/8", "/nowhere", "--capacity", "0", "--prompts", "deer:block=1.5", "--seed"),
)


@pytest.mark.slow
def test_command_lines_are_answered_in_a_few_lines(tmp_path, capsys):
    from jaxspec.cli import main

    @settings(max_examples=100, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.lists(st.sampled_from(WORDS), max_size=6).filter(lambda words: "demo" not in words))
    def try_one(words):
        with contextlib.chdir(tmp_path):
            try:
                code = main(words)
            except SystemExit as stop:
                code = stop.code
        said = capsys.readouterr()
        assert code in (0, 2, None), (words, code)
        assert "Traceback" not in said.err

    try_one()
    assert os.listdir(tmp_path) == []
