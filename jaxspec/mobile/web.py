"""A model as a static folder: a page that runs it in a browser, by LiteRT.js.

The folder holds the page, the `.tflite` and `profile.json`: the trees, the tokens that a step over
each is expected to emit, a self-test, and checksums. The page times each tree on its device and
takes the fastest, plain decoding among them. A second file, the kit, holds passes of several sizes;
the page times them on request, and a tree is searched by their times.
"""

import dataclasses
import hashlib
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from jaxspec.checkpoint import CheckpointError, Model, Tokenizer
from jaxspec.checkpoint.files import replacing_files, write_json
from jaxspec.core.tree import Path as RankPath
from jaxspec.core.tree import chain_paths, normalize_paths
from jaxspec.decoding.inspector import TREE_VIEW
from jaxspec.drafters import Eagle, LoadedDrafter
from jaxspec.mobile.calibration import Calibration
from jaxspec.mobile.contents import ExportConfig, in_one_dtype
from jaxspec.mobile.export import MODEL_FILE, calibrated, export
from jaxspec.mobile.loops import Plain, Steps
from jaxspec.mobile.memory import draft_pass_weights, estimate_phone_memory
from jaxspec.mobile.profile import timed_signatures, valid_integers
from jaxspec.mobile.runtime import MobileModel
from jaxspec.tuning import AcceptanceTable, LatencyProfile, Limits, likeliest_paths, search_tree
from jaxspec.tuning.measuring import with_tree

PROFILE_FILE, KIT_FILE = "profile.json", "kit.tflite"
FORMAT = 2
"""Version of `profile.json`."""
PREFILL = (16, 64)
MAX_TREES = 4
HEAP_LIMIT = 1984 << 20
"""Bytes of a wasm heap that a browser could allocate, of its 2 GiB."""
PAGE_FOLDER = Path(__file__).resolve().parent / "web"
PAGE_FILES = (
    *("index.html", "style.css", "page.js", "worker.js", "session.js", "engine.js", "choose.js"),
    *("storage.js", "tokenizer.js", TREE_VIEW.name),
)
_TOKENIZER_FILE = "tokenizer.json"
_CHECKED_FILES = (MODEL_FILE, KIT_FILE, _TOKENIZER_FILE)
_PACKAGE_FILES = ("package.json", "package-lock.json")
_LITERT = "@litertjs/core"
# Files of each package that the page loads, and their place in its folder.
_VENDORED = {
    f"{_LITERT}/dist/index.js": "litert/index.js",
    f"{_LITERT}/wasm": "litert/wasm",
    "@litertjs/wasm-utils/dist/index.js": "wasm-utils/index.js",
    "@huggingface/tokenizers/dist/tokenizers.min.mjs": "tokenizers/tokenizers.js",
    "@huggingface/tokenizers/LICENSE": "tokenizers/LICENSE",
    "@noble/hashes/sha2.js": "hashes/sha2.js",
    "@noble/hashes/_md.js": "hashes/_md.js",
    "@noble/hashes/_u64.js": "hashes/_u64.js",
    "@noble/hashes/utils.js": "hashes/utils.js",
    "@noble/hashes/LICENSE": "hashes/LICENSE",
}
# Import maps do not apply in workers.
_BARE, _RELATIVE = '"@litertjs/wasm-utils"', '"../wasm-utils/index.js"'
_KIT_TOKENS, _KIT_NODES = (2, 4, 6, 8, 16), (1, 2, 4)
_TREE_SIZES = (2, 4, 8)
_CHAIN_DEPTH = 4
_TEST_STEPS = 3
_TEST_PROMPTS = (
    "def count_words(text):\n    counts = {}\n    for word in text.split():\n",
    "Question: Tom has 5 boxes with 9 pens in each box. How many pens does Tom have?\nAnswer:",
    "one, two, three, one, two, three, one, two,",
    "Once upon a time there was a little",
)
_TEST_TOKENS, _TEST_ENOUGH = 64, 6
# The shipped `demo` answers them rightly.
_QUESTIONS = (
    "Emma reads 20 pages a day. How many pages does she read in 5 days?",
    "Lisa has 3 boxes of 10 pencils. How many pencils does she have?",
    "A bag of rice costs $10. How much do 2 bags cost?",
)


class WebExport(NamedTuple):
    """A written page.

    Attributes:
        profile: as in `profile.json`.
        payload: bytes by part, as a browser loads them.
    """

    profile: dict[str, Any]
    payload: dict[str, int]


def choose_trees(
    acceptance: AcceptanceTable,
    profile: LatencyProfile | None = None,
    given: Sequence[RankPath] | None = None,
) -> tuple[tuple[RankPath, ...], ...]:
    """Chooses a few small trees for a page, a chain among them, the smallest first.

    On wasm every further row costs much time, so the trees are those of 2, 4 and 8 nodes (the root
    excluded) with the most expected tokens, and a chain.

    Args:
        acceptance: of the drafter.
        profile: of a device: the tree that is fastest there is added.
        given: a tree to add.
    """
    depth, branch = min(5, acceptance.max_depth), min(4, acceptance.max_branch)
    wanted: list[Iterable[RankPath]] = []
    if given is not None:
        wanted.append(given)
    if profile is not None:
        reach = min(25, profile.max_tokens - 1)
        wanted.append(search_tree(acceptance, profile, max_nodes=reach).best_draft.paths)
    wanted.append(chain_paths(min(_CHAIN_DEPTH, depth)))
    for size in _TREE_SIZES:
        wanted.append(likeliest_paths(acceptance, Limits(size, depth, size, branch, size)))
    distinct = list(dict.fromkeys(normalize_paths(list(paths)) for paths in wanted))
    return tuple(sorted(distinct[:MAX_TREES], key=len))


def export_web(
    model: Model,
    folder: str | Path,
    drafter: LoadedDrafter,
    trees: Sequence[Sequence[RankPath]],
    acceptance: AcceptanceTable,
    config: ExportConfig | None = None,
    advance: Callable[[str], None] = lambda _: None,
) -> WebExport:
    """Writes the page, the model and all that they load into a folder for any web server.

    Args:
        model: the target, with its tokenizer.
        folder: made if it does not exist; other files in it stay.
        drafter: with an EAGLE head; its own tree is not used.
        trees: rank paths of each, the root left out.
        acceptance: measured with this head, for the tokens that a step is expected to emit.
        config: capacity and quantization; int8 by default.
        advance: called before each part.

    Raises:
        ValueError: there is no EAGLE head or tokenizer, npm is missing or fails, no text was found
            on which each tree's whole path is accepted, or as `export`.
    """
    if not isinstance(drafter.drafter, Eagle):
        raise ValueError("drafter: the page drafts with an EAGLE head; give one.")
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ValueError("model: the page reads and writes text, and this model has no tokenizer.")
    if acceptance.head:  # published tables name no head
        acceptance.check_head(drafter.params)
    model, drafter = in_one_dtype(model, drafter)
    config = config or ExportConfig(prefill=PREFILL)
    drafts = tuple(normalize_paths(paths) for paths in trees)
    shapes = dataclasses.replace(config, bundle="gpu", trees=drafts, verify=(), levels=())
    with replacing_files(Path(folder)) as staging:
        advance("fetching LiteRT.js")
        vendor(staging / "vendor")
        for name in PAGE_FILES:
            source = TREE_VIEW if name == TREE_VIEW.name else PAGE_FOLDER / name
            shutil.copyfile(source, staging / name)
        advance("writing the model")
        calibration = calibrated(model, config, staging)
        manifest = export(model, staging, drafter, shapes, calibration)
        advance("writing the kit")
        kit = _write_kit(model, staging, drafter, drafts, shapes, calibration)
        advance("looking for a self-test")
        test = find_self_test(staging / MODEL_FILE)
        passes = sum(max(map(len, paths)) for paths in drafts)
        heap = partial(_heap_bytes, model, drafter, config)
        kit["heap_bytes"] = heap(staging / KIT_FILE, len(kit["signatures"]), len(kit["signatures"]))
        profile = {
            "format": FORMAT,
            "model": manifest.model,
            "quantization": manifest.quantization,
            "capacity": manifest.capacity,
            "num_tokens": manifest.num_tokens,
            "stop_token_ids": list(manifest.stop_token_ids),
            "depth": manifest.depth,
            "prefill": list(manifest.sizes("prefill")),
            "trees": [_described(acceptance, *each) for each in manifest.trees.items()],
            "acceptance": acceptance.source,
            "chat": chat_affixes(tokenizer),
            "examples": examples_for(tokenizer),
            "heap_bytes": heap(staging / MODEL_FILE, len(manifest.signatures), passes),
            "heap_limit": HEAP_LIMIT,
            "self_test": test,
            "files": {name: _fingerprint(staging / name) for name in _CHECKED_FILES},
            "kit": kit,
        }
        write_json(staging / PROFILE_FILE, profile)
        return WebExport(profile, _payload(staging))


def vendor(folder: Path) -> None:
    """Fetches the libraries of the page by npm, pinned and checked by the lock file.

    Raises:
        ValueError: npm is missing, or fails.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise ValueError(
            "npm: it fetches LiteRT.js, and it is not on the PATH: install Node.js (Debian: "
            "apt-get install nodejs npm; it is needed for exporting only, not for serving)."
        )
    with TemporaryDirectory() as work:
        for name in _PACKAGE_FILES:
            shutil.copyfile(PAGE_FOLDER / name, Path(work) / name)
        command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(
                f"npm: it could not fetch LiteRT.js: {done.stderr.strip()[-600:]} -- It needs the "
                "network once; later exports take it from npm's cache."
            )
        for source, place in _VENDORED.items():
            path, target = Path(work, "node_modules", source), folder / place
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.copytree(path, target)
            else:
                shutil.copyfile(path, target)
    # LiteRT.js has the same licence, and its package does not contain the text.
    shutil.copyfile(folder / "tokenizers/LICENSE", folder / "litert/LICENSE")
    loader = folder / _VENDORED[f"{_LITERT}/dist/index.js"]
    source = loader.read_text(encoding="utf-8")
    assert source.count(_BARE) == 1, "another version of LiteRT.js than package.json pins"
    loader.write_text(source.replace(_BARE, _RELATIVE), encoding="utf-8")


def chat_affixes(tokenizer: Tokenizer) -> dict[str, str] | None:
    """Finds the text that a chat template puts around messages, for hosts that cannot run it.

    Returns:
        Three texts: `open` before the first message of the user, `reply` between a message and its
        answer, `turn` between an answer and the next message. `None`: there is no template, or it
        does more than that.
    """
    user, answer, again = "\ue000one\ue001", "\ue000two\ue001", "\ue000three\ue001"
    first = [{"role": "user", "content": user}]
    both = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": again}]
    try:
        short, long = tokenizer.render_chat(first), tokenizer.render_chat(both)
    except (CheckpointError, ValueError):
        return None
    if short.count(user) != 1 or not long.startswith(short + answer) or long.count(again) != 1:
        return None
    opening, reply = short.split(user)
    turn, end = long.removeprefix(short + answer).split(again)
    return {"open": opening, "reply": reply, "turn": turn} if end == reply else None


def examples_for(tokenizer: Tokenizer) -> list[dict[str, str]]:
    """Returns the prompts that a page offers: those that the model's tokenizer can spell.

    They are texts to continue where there is no chat that a page can render.
    """
    chats = chat_affixes(tokenizer) is not None
    examples = [
        {"mode": "chat", "text": each}
        if chats
        else {"mode": "text", "text": f"Question: {each}\nAnswer:"}
        for each in _QUESTIONS
    ]
    return [
        each
        for each in examples
        if tokenizer.decode(tokenizer.encode(each["text"])) == each["text"]
    ]


def find_self_test(path: Path) -> dict[str, Any]:
    """Finds a text and its next tokens, on which every tree's whole path is accepted.

    A page reads the text, calls each step a few times and compares. Of several such texts the one
    whose tokens are likeliest by the widest margin is taken, as backends round differently.

    Raises:
        ValueError: no such text was found.
    """
    file = MobileModel(path, num_threads=1)
    trees = {name: max(map(len, paths)) for name, paths in file.manifest.trees.items()}
    deepest = max(trees, key=lambda name: trees[name])
    assert file.tokenizer is not None
    found: list[tuple[float, dict[str, Any]]] = []
    for text in _TEST_PROMPTS:
        prompt = file.tokenizer.encode(text)[: file.manifest.capacity // 4]
        steps = partial(Steps, signature=deepest)
        tokens = min(_TEST_TOKENS, file.manifest.capacity // 2)
        decoded = file.generate(prompt, tokens, (), loop=steps)
        at = 0
        for count in decoded.counts:
            start = [*prompt, *decoded.tokens[: max(0, at - 1)].tolist()]
            at += count
            if count == trees[deepest] + 1 and len(found) < _TEST_ENOUGH:
                tested = _tested(file, start, trees)
                found += [] if tested is None else [(_margin(file, start, tested), tested)]
    if not found:
        raise ValueError(
            "trees: no text was found on which each tree's whole path is accepted, and a self-test "
            "needs one: this head hardly drafts for this model, or a tree is too deep for it."
        )
    return max(found, key=lambda each: each[0])[1]


def _tested(
    file: MobileModel, start: Sequence[int], trees: dict[str, int]
) -> dict[str, Any] | None:
    """Makes a self-test behind a text; `None` if one of the trees has no whole path in it."""
    expected: dict[str, list[int]] = {}
    for name, depth in trees.items():
        rounds = file.stream(start, loop=partial(Steps, signature=name))
        emitted = [next(rounds).tokens for _ in range(1 + _TEST_STEPS)]
        if depth + 1 not in map(len, emitted):
            return None
        expected[name] = [token for tokens in emitted for token in tokens]
    longest = max(expected.values(), key=len)
    rounds = file.stream(start, loop=Plain)
    plain = [next(rounds).tokens[0] for _ in longest]
    if any(tokens != plain[: len(tokens)] for tokens in expected.values()):
        return None  # a near tie
    expected = {"decode": plain[: 1 + _TEST_STEPS], **expected}
    return {"prompt": list(start), "num_steps": _TEST_STEPS, "steps": expected}


def _margin(file: MobileModel, start: Sequence[int], test: dict[str, Any]) -> float:
    """Returns the smallest gap of the two best logits over the tokens of a self-test."""
    longest = max(test["steps"].values(), key=len)
    file.prefill(start)
    margin, length = np.inf, len(start)
    for token in longest[:-1]:
        file.call("decode", pending=[token], length=[length])
        best = np.partition(file.read("decode", "logits")[0], -2)[-2:]
        margin, length = min(margin, float(best[1] - best[0])), length + 1
    return margin


def _write_kit(
    model: Model,
    folder: Path,
    drafter: LoadedDrafter,
    trees: Sequence[Sequence[RankPath]],
    config: ExportConfig,
    calibration: Calibration | None,
) -> dict[str, Any]:
    """Writes a file with passes of several sizes; returns the inputs to time them with."""
    deepest = max(trees, key=lambda paths: max(map(len, paths)))
    loaded = with_tree(drafter, deepest)
    fitting = tuple(size for size in _KIT_TOKENS if size <= config.capacity // 2)
    shapes = dataclasses.replace(
        config, prefill=config.prefill[:1], trees=(), verify=fitting, levels=_KIT_NODES
    )
    with TemporaryDirectory(dir=folder) as work:
        manifest = export(model, work, loaded, shapes, calibration)
        (Path(work) / MODEL_FILE).replace(folder / KIT_FILE)
    return {
        "levels": manifest.depth,
        "signatures": {name: valid_integers(manifest, name) for name in timed_signatures(manifest)},
    }


def _heap_bytes(
    model: Model,
    drafter: LoadedDrafter,
    config: ExportConfig,
    path: Path,
    signatures: int,
    draft_passes: int,
) -> int:
    """Estimates wasm's heap: the file, every use of a weight packed, each function's caches."""
    memory = estimate_phone_memory(
        model.config,
        config.quantization,
        config.capacity,
        drafter.params.params,
        draft_pass_weights(model.params, drafter),
        draft_passes,
        separate_signatures=signatures,
    )
    return path.stat().st_size + memory.total - memory.table + signatures * memory.caches


def _described(
    acceptance: AcceptanceTable, signature: str, paths: tuple[RankPath, ...]
) -> dict[str, Any]:
    """Describes a tree as the page takes it; parents count the root, which is node 0."""
    places = {(): 0, **{path: place for place, path in enumerate(paths, start=1)}}
    return {
        "signature": signature,
        "nodes": len(paths),
        "depth": max(map(len, paths)),
        "paths": [list(path) for path in paths],
        "parents": [-1, *(places[path[:-1]] for path in paths)],
        "tokens_per_step": acceptance.tau(paths),  # tau, the bonus INCLUDED
    }


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _payload(folder: Path) -> dict[str, int]:
    """Returns bytes by part. A browser loads one of LiteRT's builds: the largest is counted."""
    wasm = folder / "vendor" / "litert" / "wasm"
    builds = [path.stat().st_size for path in wasm.glob("*.wasm")]
    glue = [path.stat().st_size for path in wasm.glob("*.js")]
    loader = (folder / "vendor/litert/index.js", folder / "vendor/wasm-utils/index.js")
    page = (folder / name for name in PAGE_FILES)
    return {
        "page": _size(page),
        "LiteRT.js, one of its builds": max(builds) + max(glue) + _size(loader),
        "tokenizer's code": _size((folder / "vendor/tokenizers").glob("*.js")),
        "checksum's code": _size((folder / "vendor/hashes").glob("*.js")),
        "tokenizer.json": _size([folder / _TOKENIZER_FILE]),
        "profile.json": _size([folder / PROFILE_FILE]),
        "model.tflite": _size([folder / MODEL_FILE]),
        "kit.tflite, on request only": _size([folder / KIT_FILE]),
    }


def _size(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)
