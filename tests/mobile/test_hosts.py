"""Programs of `examples/` that run exported files: each gives the tokens that Python gives."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from jaxspec import TokenRecycling, load, save
from jaxspec.checkpoint import load_eagle, load_tokenizer, save_eagle, shipped_folders
from jaxspec.core.tree import tree_from_paths
from jaxspec.drafters import DFlash, DraftModel, Eagle, LayerSkip, LoadedDrafter, PromptLookup
from jaxspec.drafters.skip_sets import skips_of
from tests.laws.drafters import dflash_head
from tests.mobile.models import half_of
from tests.mobile.web.models import page_model

pytest.importorskip("litert_converter", reason="needs the extra mobile: '.[mobile]'")
pytest.importorskip("ai_edge_litert", reason="needs the extra mobile: '.[mobile]'")

import ai_edge_litert
from ai_edge_litert import interpreter

from jaxspec.mobile import ExportConfig, MobileModel, export, read_manifest
from jaxspec.mobile.extra import missing_for_gpu
from jaxspec.mobile.loops import Plain, Steps

ROOT = Path(__file__).resolve().parents[2]
CPP = ROOT / "examples" / "cpp"
LITERT = Path(ai_edge_litert.__file__).parent
CHAIN, TREE = ((0,), (0, 0), (0, 0, 0)), ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
NUM_TOKENS = 48
PROMPTS = [
    "Question: A baker sells 14 loaves in the morning and 9 in the evening. How many is that?",
    "Question: Ann reads 12 pages a day. How many pages does she read in 5 days?\nAnswer:",
    "A train leaves at 8 and arrives at 11. It takes",
    "There are 24 hours in a day, so in 3 days there are",
    "def is_even(number):\n",
    "def largest(numbers):\n    best = numbers[0]\n    for each in numbers:\n",
    "Write a function that returns the last letter of a word.\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(",
    "import math\n\nprint(math.",
    "<|user|>What is 6 times 7?<|end|><|assistant|>",
    "<|user|>Name a colour.<|end|><|assistant|>",
    "one, two, three, four, one, two, three,",
    "x = 1; y = 2; z = x + y;",
    "The bridge over the river is",
    "Once upon a time there was a king who",
    "  indented\n\n\n\tand tabbed  ",
    "caf\u00e9 \u00bd \u201cquoted\u201d \u2014 dashed\u2026",
    "1234567890",
    "?",
    "It's what they'd said, isn't it? We'LL see.",
]


@pytest.fixture(scope="session")
def host(tmp_path_factory) -> Callable[..., list[dict[str, Any]]]:
    """Compiles the host and returns a function that runs it; what it prints, by prompt."""
    if not (shutil.which("cmake") and any(map(shutil.which, ("c++", "g++", "clang++")))):
        pytest.skip("needs cmake and a C++ compiler on the PATH, which are not here")
    folder = tmp_path_factory.mktemp("host")
    for command in (
        ["cmake", "-S", CPP, "-B", folder, f"-DLITERT_FOLDER={LITERT}"],
        ["cmake", "--build", folder],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert "warning" not in done.stdout + done.stderr

    def run(model: Path, *words: str, prompts=PROMPTS, ids: bool = True) -> Any:
        """Returns an object for each prompt; without `ids`, all that it printed, as bytes."""
        done = subprocess.run(
            [folder / "jaxspec-host", model, *(["--ids"] if ids else []), *words, *prompts],
            # LiteRT looks for its GPU accelerator there.
            env={**os.environ, "LD_LIBRARY_PATH": _joined(os.environ.get("LD_LIBRARY_PATH"))},
            capture_output=True,
            check=False,
        )
        if done.returncode:
            return done.stderr.decode().strip().splitlines()[-1]
        # The accelerator's own log, where it looks for a library that is not here.
        lines = [line for line in done.stdout.splitlines() if not line.startswith(b"INFO: ")]
        return list(map(json.loads, lines)) if ids else done.stdout

    return run


def _joined(folders: str | None) -> str:
    return os.pathsep.join(filter(None, (folders, str(LITERT))))


def written(model, folder: Path, drafter, **settings: Any) -> Path:
    shapes = {"capacity": 128, "prefill": (16, 64), "quantization": "float32", "bundle": "gpu"}
    export(model, folder, drafter, ExportConfig(**(shapes | settings)))
    return folder / "model.tflite"


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    """With a step for each of two trees, as a page has them."""
    folders = shipped_folders()
    if not {"demo", "demo-eagle"} <= set(folders):
        pytest.skip("needs checkpoints/demo and demo-eagle, which are not here")
    model = load("demo")
    drafter = Eagle.of(load_eagle("demo-eagle", model), CHAIN)
    return written(model, tmp_path_factory.mktemp("demo"), drafter, trees=(CHAIN, TREE))


def test_the_host_gives_the_tokens_of_python(host, demo):
    """Ids of the prompt, tokens, and tokens of each call; the text is that of the tokens."""
    file = MobileModel(demo, num_threads=1)
    by_python = {
        "decode": Plain,
        "step_1": partial(Steps, signature="step_1"),
        "step_2": partial(Steps, signature="step_2"),
    }
    answers = {}
    for by, loop in by_python.items():
        answers[by] = host(demo, "--by", by, "--tokens", str(NUM_TOKENS))
        for prompt, answer in zip(PROMPTS, answers[by], strict=True):
            ids = file.tokenizer.encode(prompt)
            decoded = file.generate(ids, NUM_TOKENS, loop=loop)
            assert answer["prompt"] == ids
            assert answer["tokens"] == decoded.tokens.tolist(), prompt
            assert tuple(answer["counts"]) == decoded.counts
    assert max(count for answer in answers["step_2"] for count in answer["counts"]) == 4
    packed = demo.parent / "packed"
    for _ in range(2):  # made, and read
        words = ("--by", "step_1", "--tokens", str(NUM_TOKENS), "--weight-cache", str(packed))
        assert host(demo, *words) == answers["step_1"]
        assert Path(f"{packed}-{file.manifest.checksum[:16]}").stat().st_size > 0
    said = host(demo, "--by", "step_1", "--tokens", str(NUM_TOKENS), ids=False).decode()
    texts = [file.tokenizer.decode(each["tokens"]) for each in answers["step_1"]]
    assert said == "".join(f"{text}\n" for text in texts)
    assert "name one of step_1 step_2" in host(demo)


@pytest.mark.parametrize("quantization", ["float32", "int8"])
@pytest.mark.parametrize(
    "method", ["eagle", "dflash", "recycling", "lookup", "draft model", "layer skip"]
)
def test_a_text_goes_on_to_the_end_of_the_caches(host, tmp_path, method, quantization):
    """Behind the last place where a step fits, and in several texts one after the other."""
    model, head = page_model()
    drafters = {
        "eagle": Eagle.of(head, TREE),
        "dflash": DFlash.of(dflash_head(model.network), paths=TREE),
        "recycling": LoadedDrafter(TokenRecycling(TREE), ()),
        "lookup": PromptLookup(3),
        "draft model": DraftModel.of(half_of(model), 3),
        "layer skip": LayerSkip(skips_of(2, [1], [0]), 3),
    }
    path = written(
        model,
        tmp_path,
        drafters[method],
        capacity=64,
        prefill=(8, 32),
        quantization=quantization,
    )
    prompts = ["12 + 30 is 42, so", "what", "a" * 40, "1 + 1 is"]
    most = []
    file = MobileModel(path, num_threads=1)
    for prompt, answer in zip(prompts, host(path, "--tokens", "99", prompts=prompts), strict=True):
        ids = file.tokenizer.encode(prompt)
        decoded = file.generate(ids, 99)
        assert answer["tokens"] == decoded.tokens.tolist()
        assert tuple(answer["counts"]) == decoded.counts
        assert len(ids) + len(answer["tokens"]) == 64
        most.append(max(answer["counts"]))
    assert max(most) > 1


@pytest.mark.slow
@pytest.mark.skipif(missing_for_gpu() is not None, reason=f"GPU not checked: {missing_for_gpu()}")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_host_runs_on_a_gpu(host, tmp_path, precision):
    """In float32, the tokens of the CPU; in half precision as well, as this text has no near tie.

    SwiftShader has no half precision and computes both alike; a GPU that has it does not.
    """
    model, head = page_model()
    path = written(model, tmp_path, Eagle.of(head, TREE), capacity=64, prefill=(8,))
    words = ("--tokens", "24")
    prompts = ["12 + 30 is 42, so", "what"]
    expected = host(path, *words, prompts=prompts)
    assert host(path, *words, "--gpu", precision, prompts=prompts) == expected


def test_mistakes_are_one_line(host, tmp_path):
    model, head = page_model()
    path = written(model, tmp_path, Eagle.of(head, TREE), capacity=64, prefill=(8,))
    fails = partial(host, path, prompts=["what"])
    assert "--tokens must be a whole number from 1 on" in fails("--tokens", "0")
    assert "--by: this file has decode, prefill_8, step, not step_9." in fails("--by", "step_9")
    assert "calls decode, step and step_N" in fails("--by", "prefill_8")
    exits = LayerSkip(skips_of(2, [1], [0]), 2)
    skips = written(model, tmp_path / "skips", exits, capacity=64, prefill=(8,), bundle="cpu")
    by_threshold = host(skips, "--by", "step_exit", prompts=["what"])
    assert "ends no drafts early; take step instead of step_exit." in by_threshold
    assert "--gpu int8 is not known" in fails("--gpu", "int8")
    assert "--weight-cache: is for the CPU" in fails("--gpu", "fp32", "--weight-cache", "packed")
    old = path.read_bytes().replace(b'{"jaxspec_manifest":2', b'{"jaxspec_manifest":1')
    (tmp_path / "old.tflite").write_bytes(old)
    said = host(tmp_path / "old.tflite", prompts=["what"])
    assert "was exported by another version of jaxspec" in said
    assert "the vocabulary lacks" in host(path, "--", prompts=["--\u00fc"])
    assert "usage: jaxspec-host" in host(path, prompts=[])
    assert "takes 1 to 63 tokens, got 64" in host(path, prompts=["a" * 64])
    assert "the vocabulary lacks" in host(path, prompts=["\u00fc"])
    assert "not valid UTF-8" in host(path, prompts=[b"half \xc3"])
    assert "answers with status" in host(tmp_path / "no.tflite", prompts=["what"])
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    assert "tokenizer.json: damaged JSON, at byte 10" in fails()
    (tmp_path / "tokenizer.json").write_text('{"model": "\\ud800"}')
    assert "half a surrogate pair" in fails()


# ---- the tokenizer alone ------------------------------------------------------------------------

# Reads a line of JSON for each text; prints the ids, or why there are none.
PRINT_IDS = """
#include <iostream>
#include "tokenizer.h"
int main(int, char** words) try {
  Tokenizer tokenizer(words[1]);
  for (std::string line; std::getline(std::cin, line);) try {
    std::string ids;
    for (int id : tokenizer.encode(JsonReader::read(line).text)) {
      ids += (ids.empty() ? "" : ",") + std::to_string(id);
    }
    std::cout << "[" << ids << "]" << std::endl;
  } catch (const Error& error) {
    std::cout << "null" << std::endl;
  }
} catch (const Error& error) {
  std::cerr << error.what();
  return 2;
}
"""
CHARACTERS = [chr(code) for code in (*range(1, 0x300), *range(0x2010, 0x2028), 0x20AC)]
COMMON = [*"  \n\n\t\r'sStTrReEvVmMlLdD0123456789abc.,!?\u017f\u00a0\u0085_-()", "'ll", "  ", " if"]


@pytest.fixture(scope="session")
def ids_in_cpp(tmp_path_factory) -> Callable[[Path, list[str]], list[list[int] | None] | str]:
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler on the PATH, which is not here")
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "ids.cpp").write_text(PRINT_IDS)
    command = [compiler, "-std=c++17", "-O1", "-I", CPP, folder / "ids.cpp", "-o", folder / "ids"]
    subprocess.run(command, check=True)

    def run(path: Path, texts: list[str]) -> Any:
        lines = "".join(f"{json.dumps(text, ensure_ascii=False)}\n" for text in texts)
        done = subprocess.run([folder / "ids", path], input=lines.encode(), capture_output=True)
        if done.returncode:
            return done.stderr.decode()
        return list(map(json.loads, done.stdout.splitlines()))

    return run


LIKE_LLAMA_2 = "characters and bytes, as Llama 2"


@pytest.fixture(scope="session")
def tokenizer_like_llama_2(tmp_path_factory) -> Path:
    """The folder of a small tokenizer in the layout of Llama 2's and Vicuna's."""
    pieces = tokenizers.models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    backend = tokenizers.Tokenizer(pieces)
    steps, decoding = tokenizers.normalizers, tokenizers.decoders
    backend.normalizer = steps.Sequence([steps.Prepend("\u2581"), steps.Replace(" ", "\u2581")])
    backend.decoder = decoding.Sequence(
        [
            *(decoding.Replace("\u2581", " "), decoding.ByteFallback(), decoding.Fuse()),
            decoding.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)],
        show_progress=False,
    )
    backend.train_from_iterator(["a man", "the manual", "12 men, 3 ifs \u00e4 \u00df"] * 3, trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    folder = tmp_path_factory.mktemp("like llama 2")
    described = json.loads(backend.to_str())
    # Tokens of bytes are pieces of the vocabulary alone.
    described["added_tokens"] = described["added_tokens"][: len(special)]
    (folder / "tokenizer.json").write_text(json.dumps(described), encoding="utf-8")
    return folder


def tokenizer_folders(recorded_folder, like_llama_2) -> dict[str, Path]:
    checkpoints = recorded_folder("checkpoints")
    return {
        LIKE_LLAMA_2: like_llama_2,
        "GPT-2's pattern, digits apart": ROOT / "checkpoints" / "demo",
        "Qwen's pattern": checkpoints / "qwen3_dev",
        "Llama 3's pattern": checkpoints / "llama_gqa_dev",
    }


@pytest.mark.parametrize(
    "name",
    ["GPT-2's pattern, digits apart", "Qwen's pattern", "Llama 3's pattern", LIKE_LLAMA_2],
)
def test_it_splits_and_merges_as_the_library(
    ids_in_cpp, recorded_folder, tokenizer_like_llama_2, name
):
    folder = tokenizer_folders(recorded_folder, tokenizer_like_llama_2)[name]
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"needs {folder.name}, which is not here")
    tokenizer = load_tokenizer(folder)
    added = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()]
    draws = random.Random(0)
    kinds = [COMMON] * 4 + [CHARACTERS, PROMPTS, added]
    texts = ["", *CHARACTERS] + [
        "".join(draws.choice(draws.choice(kinds)) for _ in range(draws.randrange(30)))
        for _ in range(1500)
    ]
    assert ids_in_cpp(folder / "tokenizer.json", texts) == [
        tokenizer.encode(text) for text in texts
    ]
    beyond = ["\u4e2d", "\u0301"]
    known = [tokenizer.encode(text) for text in beyond] if name == LIKE_LLAMA_2 else [None, None]
    assert ids_in_cpp(folder / "tokenizer.json", beyond) == known


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "normalizer Lowercase is not covered"),
        ({"pre_tokenizer": {"type": "Metaspace"}}, "pre_tokenizer Metaspace is not covered"),
        ({"pre_tokenizer": {"type": "Digits"}}, "without ByteLevel is not covered"),
        (
            {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
            "add_prefix_space is not covered",
        ),
        ({"decoder": {"type": "WordPiece"}}, "this decoder is not covered"),
        ({"model": {"type": "Unigram"}}, "model Unigram is not covered"),
        ({"post_processor": {"type": "BertProcessing"}}, "BertProcessing is not covered"),
        ({"decoder": 3}, '"decoder" is missing or of another type'),
    ],
)
def test_what_it_does_not_cover_is_refused(ids_in_cpp, recorded_folder, tmp_path, changes, said):
    folder = recorded_folder("checkpoints", "llama_gqa_dev")
    described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(described | changes), encoding="utf-8")
    assert said in ids_in_cpp(tmp_path / "tokenizer.json", [])


# ---- the script for a phone --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_the_script_for_a_phone(tmp_path, backend):
    """With an adb of ours: what it pushes is there, and the tool takes 1 ms and 2 ms a call."""
    if shutil.which("sh") is None:
        pytest.skip("needs a POSIX shell")
    model, head = page_model()
    save(model, tmp_path / "model")
    save_eagle(head, tmp_path / "head")
    rows = "".join(json.dumps({"prompt": f"{n} + {n} is"}) + "\n" for n in range(4))
    (tmp_path / "held-out.jsonl").write_text(rows)
    programs = {
        "adb": 'echo "$*" >>calls.txt; case "$*" in *getprop*) echo "Pixel 99";; '
        '"shell df"*) echo "/dev/data 200000 0 100000 1% /data";; '
        'push*) shift; while [ $# -gt 1 ]; do test -e "$1"; shift; done;; '
        '*signature_to_run_for=step*) echo "Inference (avg): 2.0 ms";; '
        '*signature_to_run_for*) echo "Inference (avg): 1.0 ms";; esac',
        "jaxspec": f'exec {sys.executable} -m jaxspec "$@"',
        "python": f'exec {sys.executable} "$@"',
        "benchmark_model": "",
    }
    for name, source in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh -e\n{source}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        **{"BENCHMARK": "benchmark_model", "QUANTIZE": "float32", "CAPACITY": "64"},
        **{"HOST": "benchmark_model", "LITERT": "benchmark_model"},
    }
    done = subprocess.run(
        [ROOT / "examples" / "phone.sh", "model", "head", "held-out.jsonl", "out", backend, "2"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    searched, timed = done.stdout.split(f"Pixel 99, {backend}, 2 threads, float32;")
    words = ("budget", "drafting", "verification", "tokens/s")
    predicted = searched[searched.index("budgets exclude the root") :]
    assert all(word in predicted for word in (*words, "plain decoding", "the fastest"))
    _, counted, _, header, _, *lines = timed.splitlines()
    assert "tau was counted in JAX" in counted
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in table] == ["plain", "EAGLE's tree", "searched tree"]
    assert table[0][1:] == ["0", "1.00", "1.00", "1000.00", "1.00"]
    assert table[1][1:3] == ["25", "2.00"]
    for row in table[1:]:
        assert float(row[4]) == pytest.approx(1000 * float(row[3]) / 2, rel=0.01)
    assert len(header.strip("|").split("|")) == len(table[0])
    signatures = read_manifest(tmp_path / "out" / "eagle" / "model.tflite").signatures
    assert ("draft" in signatures) == (backend == "cpu")
    calls = (tmp_path / "calls.txt").read_text()
    assert "push out/eagle/model.tflite /data/local/tmp/jaxspec/eagle.tflite" in calls
    on_phone = "/data/local/tmp/jaxspec"
    part = f"shell dd if={on_phone}/parts/step of={on_phone}/searched.tflite conv=notrunc\n"
    assert calls.index("searched.tflite --threads 2") < calls.index(part)  # the file was whole
    parts = sorted((tmp_path / "out" / "searched" / "parts").iterdir())
    assert [path.name for path in parts] == ["decode", "step"]
    assert ("--require_full_delegation" in calls) == (backend == "gpu")
    assert calls.endswith("shell rm -rf /data/local/tmp/jaxspec\n")


def test_without_a_phone_the_script_ends_before_it_exports(tmp_path):
    if shutil.which("sh") is None:
        pytest.skip("needs a POSIX shell")
    for name, source in {"adb": "exit 1", "jaxspec": "exit 9", "python": "exit 9"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{source}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "BENCHMARK": "benchmark_model"}
    script = [ROOT / "examples" / "phone.sh", "model", "head", "held-out.jsonl", "out"]
    done = subprocess.run(script, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("phone.sh: adb reaches no phone:")
    assert not (tmp_path / "out").exists()


# ---- the app for Android -----------------------------------------------------------------------

ANDROID = ROOT / "examples" / "android" / "app" / "src" / "main" / "java" / "com" / "example"
STUBS = Path(__file__).parent / "android"


@pytest.fixture(scope="session")
def app(tmp_path_factory) -> list[str]:
    """Compiles the app with Android's reader of JSON; returns the words that run a class of it."""
    kotlinc, json_jar = shutil.which("kotlinc"), os.environ.get("ANDROID_JSON_JAR")
    if not (kotlinc and shutil.which("java") and json_jar):
        pytest.skip("needs kotlinc and java on the PATH, and ANDROID_JSON_JAR")
    jar = tmp_path_factory.mktemp("app") / "app.jar"
    sources = [*STUBS.glob("*.kt"), *ANDROID.rglob("*.kt")]
    command = [kotlinc, "-Werror", "-include-runtime", "-classpath", json_jar, "-d", jar, *sources]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return ["java", "-cp", f"{jar}{os.pathsep}{json_jar}"]


@pytest.mark.slow
def test_the_app_s_tokenizer_is_the_library_s(app, recorded_folder, tokenizer_like_llama_2):
    draws = random.Random(1)
    for folder in tokenizer_folders(recorded_folder, tokenizer_like_llama_2).values():
        if not (folder / "tokenizer.json").is_file():
            continue
        tokenizer = load_tokenizer(folder)
        added = [token.content for token in tokenizer.backend.get_added_tokens_decoder().values()]
        kinds = [COMMON] * 4 + [CHARACTERS, PROMPTS, added]
        texts = ["", *CHARACTERS, "\u4e2d\u6587", "e\u0301"] + [
            "".join(draws.choice(draws.choice(kinds)) for _ in range(draws.randrange(30)))
            for _ in range(1500)
        ]
        done = subprocess.run(
            [*app, "IdsKt", folder / "tokenizer.json"],
            input="".join(f"{json.dumps([text])}\n" for text in texts).encode(),
            capture_output=True,
            check=True,
        )
        ids, grown = zip(*map(json.loads, done.stdout.splitlines()), strict=True)
        assert list(ids) == [tokenizer.encode(text) for text in texts]
        assert [bytes(text).decode() for text in grown] == list(map(tokenizer.decode, ids))


class ByPython:
    """LiteRT for the app: answers the lines of `android/LiteRt.kt`."""

    def __init__(self, path: Path):
        self.path, self.buffers = path, {}
        self.interpreter = interpreter.Interpreter(str(path), num_threads=1)
        self.runners = {
            name: self.interpreter.get_signature_runner(name)
            for name in self.interpreter.get_signature_list()
        }

    def answer(self, asked: str, *words: Any) -> list[int]:
        if asked == "open":
            packed = f"packed-{read_manifest(self.path).checksum[:16]}"
            assert words == (str(self.path), ["CPU"], str(self.path.parent / packed))
        elif asked == "buffer":
            number, is_input, signature, name = words
            runner = self.runners[signature]
            details = runner.get_input_details() if is_input else runner.get_output_details()
            # Memory that nobody has cleared.
            garbage = 10**9 if details[name]["dtype"] == np.int32 else np.nan
            self.buffers[number] = np.full(details[name]["shape"], garbage, details[name]["dtype"])
        elif asked == "write":
            number, numbers = words
            now = self.buffers[number]
            self.buffers[number] = np.asarray(numbers, now.dtype).reshape(now.shape)
        elif asked == "read":
            return self.buffers[words[0]].reshape(-1).tolist()
        elif asked == "run":
            signature, inputs, outputs = words
            arrays = {name: self.buffers[number] for name, number in inputs.items()}
            for name, array in self.runners[signature](**arrays).items():
                self.buffers[outputs[name]] = array
        return []


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["eagle", "several trees", "recycling", "lookup", "draft model", "layer skip"]
)
def test_the_app_gives_the_tokens_of_python(app, tmp_path, method):
    """Its decoder runs files with LiteRT's Python package in place of the AAR."""
    model, head = page_model()
    trees = (CHAIN, TREE)
    drafters = {
        "eagle": Eagle.of(head, TREE),
        "several trees": Eagle.of(head, CHAIN),
        "recycling": LoadedDrafter(TokenRecycling(TREE), ()),
        "lookup": PromptLookup(3),
        "draft model": DraftModel.of(half_of(model), 3),
        "layer skip": LayerSkip(skips_of(2, [1], [0]), 3, adaptive=None),
    }
    several = {"trees": trees} if method == "several trees" else {}
    path = written(model, tmp_path, drafters[method], capacity=64, prefill=(8, 32), **several)
    expected = {"step_1": 2.5, "step_2": 3.25} if several else {}
    if several:
        described = {
            "trees": [
                {"signature": name, "tokens_per_step": tau} for name, tau in expected.items()
            ],
            "files": {"model.tflite": {"bytes": path.stat().st_size}},
            "chat": {"open": "<|user|>", "reply": "<|assistant|>"},
        }
        (tmp_path / "profile.json").write_text(json.dumps(described))
    file = MobileModel(path, num_threads=1)
    prompts = [file.tokenizer.encode(text) for text in ("12 + 30 is 42, so", "a" * 40, "1 + 1 is")]
    command = [*app, "DecodeKt", tmp_path, "99", *map(json.dumps, prompts)]
    litert, said = ByPython(path), {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        for line in run.stdout:
            said = json.loads(line)
            if isinstance(said, dict):
                break
            run.stdin.write(f"{json.dumps(litert.answer(*said))}\n")
            run.stdin.flush()
    assert run.returncode == 0
    steps = {"step_1", "step_2"} if several else {"step"}
    assert set(said["measured"]) == set(said["texts"]) == {"decode", *steps}
    assert said["expected"] == expected
    assert said["chat"] == (["<|user|>", "<|assistant|>"] if several else [])
    for choice, texts in said["texts"].items():
        for prompt, text in zip(prompts, texts, strict=True):
            loop = Plain if choice == "decode" else partial(Steps, signature=choice)
            decoded = file.generate(prompt, 99, (), loop)
            assert text["tokens"] == decoded.tokens.tolist()
            assert tuple(text["counts"]) == decoded.counts
    for name in steps:
        tree = tree_from_paths(read_manifest(path).trees.get(name) or read_manifest(path).paths)
        assert said["parents"][name] == np.asarray(tree.parents).tolist()
        # A first step's nodes: the pending token, then the tree's drafts; the accepted ones are it.
        text, drafted = said["texts"][name][0], said["drafted"][name]
        assert len(drafted) == (len(tree.parents) if several else 0)
        if several:
            assert drafted[0] == text["tokens"][0]
            assert set(text["tokens"][1 : text["counts"][1]]) <= set(drafted[1:])
