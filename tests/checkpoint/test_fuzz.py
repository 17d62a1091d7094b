"""Whatever a file or a setting holds, the answer is a result or one sentence that says why not.

Each case of the table reads something that came from outside. It is given what was valid, changed
in a few places: a value of another kind, an entry too many, one that is missing; of a file, bytes
that are cut off or others. An answer has ten seconds and two gigabytes.

The quick tests try the same values in every run, the slow ones others each time. A failure prints
the value and a line `@reproduce_failure(...)`, which goes above `try_one` to try it again.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import importlib
import io
import json
import os
import re
import signal
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from jaxspec.batch import Shard, Writer, merge
from jaxspec.batch.guard import GuardSettings
from jaxspec.batch.rows import read_rows
from jaxspec.batch.settings import JobSettings
from jaxspec.checkpoint import (
    Model,
    config_from_json,
    load,
    load_dflash,
    load_eagle,
    load_tokenizer,
    recover_files,
    save,
    save_dflash,
    save_eagle,
)
from jaxspec.checkpoint.folder import read_folder
from jaxspec.checkpoint.safetensors import find_tensors
from jaxspec.checkpoint.trees import load_threshold, load_tree
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
from jaxspec.mobile.manifest import Manifest, read_manifest
from jaxspec.mobile.profile import read_web_profile
from jaxspec.models import (
    DFlashHead,
    DFlashParts,
    Eagle3Head,
    EagleHead,
    ModelConfig,
    init_dflash_params,
    init_eagle3_params,
    init_eagle_params,
)
from jaxspec.training.loop import History
from jaxspec.training.plan import make_plan
from jaxspec.training.settings import (
    DeerTrainingSettings,
    DFlashTrainingSettings,
    EagleTrainingSettings,
    LMTrainingSettings,
    MaskedTrainingSettings,
    RunSettings,
    settings_to_json,
)
from jaxspec.training.sources import LastRows, Source
from jaxspec.training.train import train
from jaxspec.tuning import load_acceptance, load_profile
from jaxspec.tuning.skip_search import SearchTrace
from tests.checkpoint.networks import random_network
from tests.shapes import made_unchecked

WRITTEN = {
    '"<deep>"': "[" * 100_000 + "]" * 100_000,
    '"<long>"': "9" * 5000,
    '"<large>"': "1e999",
}
"""Texts of a file, in place of values that Python would not write."""
SCALARS = [
    st.none() | st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31 - 1, 2**31, 2**63, -(2**63), 10**30, 1e300, 0.5, -0.0]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["silu", "llama3", "yarn", "default", "float32", "first", "/dev/zero", "demo"]),
    st.sampled_from([name.strip('"') for name in WRITTEN]),
]
VALUES = st.recursive(
    st.one_of(SCALARS),
    lambda parts: (
        st.lists(parts, max_size=4) | st.dictionaries(st.text(max_size=6), parts, max_size=3)
    ),
    max_leaves=6,
)


def keys_of(value: Any) -> list:
    """Keys of an object, indices of a list; nothing of something else."""
    if isinstance(value, dict):
        return list(value)
    return list(range(len(value))) if isinstance(value, list) else []


def names_in(value: Any) -> tuple[str, ...]:
    """Names of all fields of a JSON value."""
    inner = [name for key in keys_of(value) for name in names_in(value[key])]
    return (*(value if isinstance(value, dict) else ()), *inner)


# Hypothesis itself would draw the first places most, and the same changes again and again.
EVENLY = st.randoms(use_true_random=True)


@st.composite
def changed(draw, valid: Any) -> Any:
    """A copy of a JSON value that differs in up to three places."""
    value, drawn, kinds = json.loads(json.dumps(valid)), draw(EVENLY), [*SCALARS, VALUES]
    for _ in range(drawn.choice([1, 1, 2, 3])):
        if not keys_of(value) or drawn.random() < 0.03:
            return draw(drawn.choice(kinds))
        whole, last = value, drawn.choice(keys_of(value))
        while (inner := keys_of(whole[last])) and drawn.random() < 0.6:
            whole, last = whole[last], drawn.choice(inner)
        kind = drawn.choice(["other", "other", "gone", "more"])
        if kind == "gone":
            del whole[last]
        elif kind == "more" and isinstance(whole, list):
            whole.insert(last, draw(drawn.choice(kinds)))
        elif kind == "more":
            whole[draw(st.text(max_size=6))] = draw(drawn.choice(kinds))
        else:
            whole[last] = draw(drawn.choice(kinds))
    return value


@st.composite
def damaged(draw, whole: bytes) -> bytes:
    """A copy of a file's bytes, cut off or with other bytes in it, NUL among them."""
    drawn = draw(EVENLY)
    data = bytearray(whole[: drawn.randint(0, len(whole))] if drawn.random() < 0.5 else whole)
    for _ in range(drawn.randint(0, 4)):
        if data:
            data[drawn.randrange(len(data))] = drawn.choice([0, drawn.randrange(256)])
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


def as_json(value: Any) -> bytes:
    text = json.dumps(value)
    for name, written in WRITTEN.items():
        text = text.replace(name, written)
    return text.encode()


def as_list(value: Any) -> list:
    return value if isinstance(value, list) else [value]


def as_lines(value: Any) -> bytes:
    return b"".join(
        as_json(part) + b"\n" for part in (value if isinstance(value, list) else [value])
    )


def as_text(value: Any) -> bytes:
    return "\n".join(map(str, as_list(value))).encode(errors="replace")


def as_tensors(header: Any) -> bytes:
    text = as_json(header)
    return struct.pack("<Q", len(text)) + text + bytes(24)


def as_progress(value: Any) -> bytes:
    """Lines of a job's progress file, each with its checksum."""
    texts = map(as_json, as_list(value))
    return b"".join(b"%08x %s\n" % (zlib.crc32(text), text) for text in texts)


def as_phone_file(manifest: Any) -> bytes:
    """A phone file that is nothing but a manifest, with its checksum."""
    data, zeros = b"TFL3" + as_json(manifest) + b"end", b"0" * 64
    return data.replace(zeros, hashlib.sha256(data).hexdigest().encode())


def chat_in(path: Path) -> object:
    tokenizer = load_tokenizer(path.parent)
    return tokenizer.bos_id, tokenizer.render_chat([{"role": "user", "content": "Hi"}])


def coded_by(path: Path) -> object:
    tokenizer = load_tokenizer(path.parent)
    return tokenizer.decode(tokenizer.encode("Hi")), tokenizer.special_ids


def manifest_in(path: Path) -> object:
    manifest = read_manifest(path)
    return manifest.depth, manifest.sizes("verify"), manifest.to_json()


def asked(verb: str) -> Callable[[Path], object]:
    """Reads the settings that `jaxspec train` takes by --config."""
    module = importlib.import_module(f"jaxspec.commands.train_{verb}")
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)

    def case(path: Path) -> object:
        words = ["--out", "out", "--config", str(path)]
        return module.settings_from_arguments(parser.parse_args(words))

    return case


def resumed(path: Path) -> object:
    out = path.with_suffix("")
    out.write_bytes(b"".join(RECORDS))
    with Writer(out, PROGRESS[0], resume=True) as output:
        return output.done


def merged(path: Path) -> object:
    out, joined = path.with_suffix(""), path.with_name("merged.jsonl")
    joined.unlink(missing_ok=True)
    out.write_bytes(b"".join(RECORDS))
    return merge(joined, [out])


def recovered(path: Path) -> object:
    (path.parent / ".originals").mkdir(exist_ok=True)
    return recover_files(path.parent.parent)


def claimed(path: Path) -> None:
    """Begins a run in a state folder; it ends before it has read its text."""

    class Trainer:
        settings = RunSettings((Source("notes", str(path.with_name("notes.txt"))),))

        def open(self, run: object) -> None: ...

        def task(self, *_: object) -> None:
            raise StopIteration

    path.with_name("notes.txt").write_text("One and one are two.\n\n" * 40)
    with contextlib.suppress(StopIteration):
        train(Trainer(), path.parent, console=Console(file=io.StringIO()))  # pyright: ignore


def planned(path: Path) -> object:
    settings = RunSettings((Source("notes", "notes.txt"),))
    return make_plan(settings, path.parent, "cpu", lambda dtypes: dict.fromkeys(dtypes, 0.5), len)


def figures_in(path: Path) -> object:
    history = History(path)
    history.rewind(1)
    return history.seconds


def searched(path: Path) -> object:
    return SearchTrace(path, 4, {"rows": 2}).evaluations("swaps")


TARGET = random_network(
    ModelConfig(
        **{"vocab_size": 48, "embed_dim": 16, "num_layers": 8, "num_heads": 4},
        **{"num_kv_heads": 2, "head_dim": 8, "mlp_dim": 24, "max_positions": 64},
    )
)


def head_saved(kind: str, path: Path) -> None:
    """Writes a head of zeros, with the config.json of its kind."""
    config = TARGET.config.replace(num_layers=1, layer_types=())
    normed, width = config.replace(qk_norm=True), TARGET.embed_dim

    def zeros(init: Callable[..., Any], *args: Any, **more: Any) -> Any:
        shapes = jax.eval_shape(partial(init, *args, **more), key=jax.random.key(0))
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    if kind == "EAGLE":
        head = EagleHead(zeros(init_eagle_params, config, True), config)
        save_eagle(head, path.parent, target_layers=8)
    elif kind == "EAGLE-3":
        params = zeros(init_eagle3_params, config, 3 * width, tap_norms=3)
        head = Eagle3Head(params, config, (2, 4, 5), 48, norm_output=True)
        save_eagle(head, path.parent, target_layers=8)
    else:
        parts = DFlashParts(rank=4, confidence=width + 4) if kind == "DSpark" else DFlashParts()
        params = zeros(init_dflash_params, normed, 2 * width, parts=parts)
        predicts = kind == "DSpark"
        head = DFlashHead(params, normed, (2, 5), 47, 4, 8, anchor_predicts=predicts)
        save_dflash(head, path.parent)


def model_saved(path: Path) -> None:
    save(Model(TARGET, load_tokenizer(path.parent), stop_token_ids=(3,)), path.parent)


def made(kind: Callable) -> Callable[[Any], object]:
    """Calls something with the entries of a dictionary as keywords, as far as it knows them."""
    names = {field.name for field in dataclasses.fields(kind) if field.init}  # pyright: ignore

    def case(value: Any) -> object:
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
    """Something from outside, and what reads it.

    Attributes:
        valid: what is read without an error; `None`: the JSON that `beside` writes.
        read: reads the value, or the file of this path.
        file: name of the file; "": the value is read itself.
        text: writes the value as the bytes of the file.
        beside: writes what else is read, given the path of the file.
        named: an error names one of these or the file. Without a file, also a key of `valid`.
        found: values, and bytes of files, that once ended otherwise than in a result or a sentence.
    """

    valid: Any
    read: Callable[[Any], object]
    file: str = ""
    text: Callable[[Any], bytes] = as_json
    beside: Callable[[Path], object] | None = None
    named: tuple[str, ...] = ()
    found: tuple[Any, ...] = ()

    def prepared(self, folder: Path) -> Any:
        """Returns what is valid, after writing what else is read."""
        path = folder / self.file
        path.parent.mkdir(exist_ok=True)
        if self.beside is not None:
            self.beside(path)
        return json.loads(path.read_text()) if self.valid is None else self.valid

    def answer(self, folder: Path, value: Any) -> object:
        if not self.file:
            return self.read(value)
        path = folder / self.file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(value if isinstance(value, bytes) else self.text(value))
        return self.read(path)


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
SOURCES = (Source("notes", "notes.txt", split=LastRows(2)),)
TRAININGS = {
    verb: settings_to_json(plain)
    for verb, plain in {
        "lm": LMTrainingSettings(SOURCES),
        "masked": MaskedTrainingSettings(SOURCES, tokenizer="folder"),
        "eagle": EagleTrainingSettings(SOURCES, "target", own_text=3),
        "deer": DeerTrainingSettings(SOURCES, "target", "start", own_text=3),
        "dflash": DFlashTrainingSettings(SOURCES, "target", own_text=3),
    }.items()
}
RECORDS = [b'{"line": %d, "sample": 0, "text": "one"}\n' % number for number in (1, 2)]
PROGRESS = [
    {"seed": 0, "config": {"top_k": "0"}, "num_rows": 2, "num_samples": 1, "shard": str(Shard())},
    *(
        [sum(map(len, RECORDS[:number])), zlib.crc32(RECORDS[number - 1]), number, 0]
        for number in (1, 2)
    ),
]
MANIFEST = Manifest(
    **{"version": "1.0", "model": "demo", "quantization": "float32", "capacity": 64},
    **{"num_tokens": 48, "stop_token_ids": (3,), "tokenizer": None, "drafter": {"name": "eagle"}},
    paths=((0,), (0, 0)),
    trees={"step_8": ((0,), (1,))},
    signatures={"verify_8": {"inputs": {"tokens": {"shape": [8], "dtype": "int32"}}}},
    generation_defaults={"temperature": 0.5},
    diffusion={"mask_token_id": 3, "shift": False, "block": 8, "causal": True},
)
SKIPS = {
    **{"num_layers": 4, "attention": [0, 2], "mlp": [1], "num_speculative_tokens": 4},
    **{"threshold": 0.5, "seconds_per_token": 0.1},
}
SCORE = {
    **{"seconds_per_token": 0.1, "num_speculative_tokens": 4, "threshold": 0.5, "tau": 2.0},
    **{"drafted": 3.0, "agreement": None},
}
TRACE = [
    {"step": 0, "about": {"num_layers": 4, "rows": 2}, "measured": {"pass": 0.1}},
    {"step": 1, "search": "swaps", "attention": [1], "mlp": [], "score": SCORE, "seconds": 0.5},
]
TIMED = ("decode", "absorb", "verify_1", "commit_1", "verify_8", "commit_8", "draft_1")
WEB = {
    **{"jaxspec_web": 1, "model": "demo", "device": "a phone", "runtime": "wasm", "levels": 1},
    **{"quantization": "float32", "seconds": {name: [0.1, 0.01] for name in TIMED}},
}
CASES: dict[str, Case] = {
    "config of Llama": Case(CONFIG, config_from_json, named=("raw", "config")),
    "config of Gemma 3": Case(GEMMA, config_from_json, named=("raw", "config")),
    "tokenizer_config.json": Case(
        TOKENIZER, chat_in, "tokenizer_config.json", named=("chat template", "template")
    ),
    "tokenizer.json": Case(SMALL_TOKENIZER, coded_by, "tokenizer.json"),
    "chat template": Case(
        ["{% for m in messages %}", "{{ m.role ~ m['content'] }}", "{% endfor %}", "{{ 2 * 3 }}"],
        chat_in,
        "chat_template.jinja",
        as_text,
        named=("chat template",),
        found=(["{{ 10 ** (10 ** 10) }}"], ["{{ 'a' * 10 ** 10 }}"], ["{{ range(10 ** 9) }}"]),
    ),
    "safetensors": Case(
        HEADER, lambda path: find_tensors(path.parent), "model.safetensors", as_tensors
    ),
    "row": Case(ROW, read_rows, "rows.jsonl"),
    "prompts": Case(ROW, read_prompts, "rows.jsonl"),
    "prompt": Case([ROW, [ROW], "text", [1, 2]], prompt_list, named=("prompt", "prompts")),
    "profile": Case(DEVICE, load_profile, "profile.json"),
    "acceptance": Case(TABLE, load_acceptance, "acceptance.json"),
    "paths": Case([[0], [1], [0, 0]], Eagle, named=("paths",)),
    "parents": Case(
        [-1, 0, 0, 1],
        tree_from_parents,
        named=("parents", "nodes"),
        found=([-1, 0.5], [-1, "0"], [-1, True], None, [-1] + [0] * 10_000),
    ),
    "chain": Case(
        [3],
        lambda value: chain(value[0] if isinstance(value, list) and value else value),
        named=("num_nodes",),
        found=([10**6], [1.5], ["3"], [None], [True]),
    ),
    "tree": Case(
        {"paths": [[0], [1], [0, 0]], "threshold": 0.5},
        lambda path: (load_tree(path), load_threshold(path)),
        "tree.json",
    ),
    "skips": Case(
        SKIPS,
        LayerSkip.read,
        "skips.json",
        found=({**SKIPS, "num_layers": 2**31}, {**SKIPS, "mlp": 5}),
    ),
    "trace of skips": Case(
        TRACE,
        searched,
        "trace.jsonl",
        as_lines,
        found=(
            [{**TRACE[0], "about": 5}],
            [{**TRACE[0], "step": []}],
            [TRACE[0], {"step": 1}],
            [TRACE[0], {**TRACE[1], "attention": 1}],
            [TRACE[0], {**TRACE[1], "score": {}}],
        ),
    ),
    "times of a page": Case(WEB, read_web_profile, "times.json"),
    "phone file": Case(json.loads(MANIFEST.to_json()), manifest_in, "model.tflite", as_phone_file),
    **{
        f"settings of train {verb}": Case(
            plain, asked(verb), "settings.json", named=names_in(plain)
        )
        for verb, plain in TRAININGS.items()
    },
    "run.json": Case(None, claimed, "run.json", beside=claimed, named=("state folder",)),
    "plan.json": Case(None, planned, "plan.json", beside=planned),
    "history": Case(
        [{"step": step, "seconds": 0.5, "loss": 2.0, "tokens_per_second": 9.0} for step in (1, 2)],
        figures_in,
        "history.jsonl",
        as_lines,
    ),
    **{
        f"progress of a job, {read.__name__}": Case(
            PROGRESS,
            read,
            "out.jsonl.progress",
            as_progress,
            named=("out.jsonl", "shards"),
            found=(
                ["<deep>"],
                [5],
                [PROGRESS[0], [40]],
                [*PROGRESS, [0, 0, 3, 0]],
                [{**PROGRESS[0], "num_rows": None}, *PROGRESS[1:]],
                [{**PROGRESS[0], "num_rows": 10**30}, *PROGRESS[1:]],
                [{**PROGRESS[0], "shard": "1/999999999"}, *PROGRESS[1:]],
            ),
        )
        for read in (resumed, merged)
    },
    "journal of a save": Case({"added": ["new.json"]}, recovered, ".saving-1/.journal.json"),
    **{
        f"config of {kind}": Case(
            None,
            lambda path, read=read: read(path.parent, TARGET),
            "config.json",
            beside=partial(head_saved, kind),
            named=("dialect", "mask_token_id", "block_size", "target_layer_ids"),
        )
        for kind, read in (
            ("EAGLE", load_eagle),
            ("EAGLE-3", load_eagle),
            ("DFlash", load_dflash),
            ("DSpark", load_dflash),
        )
    },
    "config.json": Case(None, lambda path: load(path.parent), "config.json", beside=model_saved),
    "generation_config.json": Case(
        None,
        lambda path: read_folder(path.parent).stop_token_ids(None, TARGET.vocab_size),
        "generation_config.json",
        beside=model_saved,
    ),
    "GenerationConfig": Case(
        {**defaults_of(GenerationConfig), "stop": ["end"], "logit_bias": None},
        made(GenerationConfig),
        found=({"json_schema": "[" * 100_000}, {"json_schema": {"type": 3}}),
    ),
    **{kind.__name__: Case(defaults_of(kind), made(kind)) for kind in SETTINGS},
}


@contextlib.contextmanager
def bounded(seconds: float = 10, memory: int = 2 << 30) -> Iterator[None]:
    """Ends what takes longer, or more memory than there is already; Linux has both limits."""
    began, used = time.monotonic(), Path("/proc/self/statm")
    if not used.exists():
        yield
        assert time.monotonic() - began < seconds
        return
    import resource

    def late(*_: object) -> None:
        pytest.fail(f"no answer in {seconds} s")

    before, earlier = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, late)
    most = int(used.read_text().split()[0]) * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)
        resource.setrlimit(resource.RLIMIT_AS, before)


def refusal_of(read: Callable[[], object]) -> ValueError | None:
    try:
        with bounded():
            read()
    except ValueError as error:
        return error
    return None


def is_answered(read: Callable[[], object], named: Iterable[str]) -> None:
    """Passes if something is read, or refused in one sentence that has one of these names."""
    error = refusal_of(read)
    if error is not None:
        # Errors of Python itself say nothing of the file or the setting.
        assert not isinstance(error, UnicodeError | json.JSONDecodeError)
        assert 10 < len(str(error)) < 2000
        names = "|".join(map(re.escape, named))
        assert re.search(rf"(?<!\w)({names})(?!\w)", str(error)), str(error)


@pytest.fixture
def folder(tmp_path, byte_level_tokenizer):
    byte_level_tokenizer.write(tmp_path)
    return tmp_path


def tried(folder: Path, case: Case, examples: int, same: bool = True) -> None:
    made_unchecked((*SETTINGS, GenerationConfig))
    valid = case.prepared(folder)
    named = (*case.named, *([Path(case.file).name] if case.file else names_in(valid)))
    values = changed(valid)
    if case.file:
        values = values | values | values | damaged(case.text(valid))

    @settings(
        max_examples=examples,
        suppress_health_check=list(HealthCheck),
        derandomize=same,
        database=None,
        print_blob=True,
        deadline=None,
    )
    @given(values)
    def try_one(value):
        is_answered(lambda: case.answer(folder, value), named)

    case.answer(folder, valid)
    for value in case.found:
        try_one = example(value)(try_one)
    try_one()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.found])
def test_what_was_found_is_refused(name, folder):
    made_unchecked((GenerationConfig,))
    CASES[name].prepared(folder)
    for value in CASES[name].found:
        assert refusal_of(lambda value=value: CASES[name].answer(folder, value)) is not None, value


@pytest.mark.parametrize("name", CASES)
def test_what_is_changed_is_read_or_refused(name, folder):
    tried(folder, CASES[name], 40)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ten_thousand_changes_are_read_or_refused(name, folder):
    tried(folder, CASES[name], 10_000 // len(CASES), same=False)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs the limits of Linux")
def test_what_takes_too_long_or_too_much_is_no_answer():
    with pytest.raises(pytest.fail.Exception, match="no answer"), bounded(seconds=0.1):
        time.sleep(5)
    with pytest.raises(MemoryError):
        refusal_of(lambda: bytes(3 << 30))


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
