"""`python -m benchmarks.fetch`: the data sets that suites measure on and models are trained on.

Each set comes from its public address, is checked against a SHA-256 of its text, and is written as
`data/eval/...` or `data/train/...` (gzip). `data/eval` is for evaluation: nothing may be trained,
tuned or cached on it. This file needs nothing but Python.
"""

import argparse
import gzip
import hashlib
import json
import os
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

RAW = "https://raw.githubusercontent.com"
GSM8K = f"{RAW}/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c"
HUMAN_EVAL = f"{RAW}/openai/human-eval/6d43fb980f9fee3c892a914eda09951f772ad10d"
MBPP = f"{RAW}/google-research/google-research/master/mbpp/mbpp.jsonl"
SPEC_BENCH = f"{RAW}/hemingkx/Spec-Bench/fd2c1cd7d2201ef71db4c5f4e455008f017967bf"
MT_BENCH = f"{RAW}/lm-sys/FastChat/0e6d3e4beaab66f4d3f93db72541a4abab8af28d"
EAGLE = f"{RAW}/SafeAILab/EAGLE/cb7e0841fe0c206c6ed74a197ad5e2a1f13f5a2b"
CHAR_RNN = f"{RAW}/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e"


class DataSet(NamedTuple):
    """A file of the data folder.

    Attributes:
        path: where the file lies in the data folder; always gzip.
        address: the public file that it is made from, gzip or not.
        sha256: checksum of the text, in hexadecimal; line ends are LF.
        licence: the licence, or what is known of it.
        tasks: if given, only rows whose `task_id` lies in one of these ranges, ends included.
    """

    path: str
    address: str
    sha256: str
    licence: str
    tasks: tuple[tuple[int, int], ...] = ()


SETS = (
    DataSet(
        "eval/gsm8k/test.jsonl.gz",
        f"{GSM8K}/grade_school_math/data/test.jsonl",
        "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
        "MIT",
    ),
    DataSet(
        "eval/humaneval/HumanEval.jsonl.gz",
        f"{HUMAN_EVAL}/data/HumanEval.jsonl.gz",
        "1d49078ba3e2b196b9344535bef34a43021f038fad9561d6ee7c53450609a6a2",
        "MIT",
    ),
    DataSet(
        "eval/mbpp/test.jsonl.gz",
        MBPP,
        "9bcaa67d5c2943e95eb9d9127e844f0551a77ac910c664aa45a4ebd75d239bd9",
        "CC BY 4.0 (Austin et al. 2021)",
        tasks=((11, 510),),
    ),
    DataSet(
        "eval/spec_bench/question.jsonl.gz",
        f"{SPEC_BENCH}/data/spec_bench/question.jsonl",
        "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
        "repository Apache-2.0; texts of several owners, to measure with only",
    ),
    DataSet(
        "eval/mt_bench/question.jsonl.gz",
        f"{MT_BENCH}/fastchat/llm_judge/data/mt_bench/question.jsonl",
        "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
        "Apache-2.0",
    ),
    DataSet(
        "eval/eagle_prompts/gsm8k_question.jsonl.gz",
        f"{EAGLE}/eagle/data/gsm8k/question.jsonl",
        "a55920b2f2aac724241124c59e5b8e8168dbbeb2ab0fdbee17d5b0ab6db5ff27",
        "Apache-2.0 (questions MIT)",
    ),
    DataSet(
        "eval/eagle_prompts/humaneval_question.jsonl.gz",
        f"{EAGLE}/eagle/data/humaneval/question.jsonl",
        "ce0244e2b228339e9a11afc63a151719beede1e389fdaec7cd9751d33902180e",
        "Apache-2.0 (questions MIT)",
    ),
    DataSet(
        "train/gsm8k/train.jsonl.gz",
        f"{GSM8K}/grade_school_math/data/train.jsonl",
        "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
        "MIT",
    ),
    DataSet(
        "train/mbpp/train.jsonl.gz",
        MBPP,
        "4ed5fa40e1cd6778d4825b90b2a51a039f83d00fc510d9b4486c259a4a7b1b08",
        "CC BY 4.0 (Austin et al. 2021)",
        tasks=((1, 10), (511, 974)),
    ),
    DataSet(
        "train/tiny_shakespeare/input.txt.gz",
        f"{CHAR_RNN}/data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        "public domain",
    ),
)


class FetchError(RuntimeError):
    """A data set that cannot be had, or is not the one that was expected."""


def text_of(found: bytes, wanted: DataSet, origin: str) -> bytes:
    """Returns the text of a set, out of the bytes of a file.

    Raises:
        FetchError: the text is not the expected one.
    """
    try:
        text = gzip.decompress(found) if found.startswith(b"\x1f\x8b") else found
        text = text.replace(b"\r\n", b"\n")
        # A file of the data folder already holds only the rows that are wanted.
        if hashlib.sha256(text).hexdigest() != wanted.sha256 and wanted.tasks:
            text = b"".join(
                line
                for line in text.splitlines(keepends=True)
                if any(low <= json.loads(line)["task_id"] <= high for low, high in wanted.tasks)
            )
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise FetchError(f"{origin} cannot be read: {error}.") from error
    got = hashlib.sha256(text).hexdigest()
    if got != wanted.sha256:
        raise FetchError(
            f"{origin} is not the expected file: SHA-256 of its text is {got}, expected "
            f"{wanted.sha256}. Nothing was written."
        )
    return text


def fetch(wanted: DataSet, folder: Path, source: Path | None = None) -> bool:
    """Writes one set into a data folder, unless it is there already.

    Args:
        wanted: the set.
        folder: the data folder.
        source: another data folder to copy from; `None`: the public address.

    Returns:
        `True` if the file was written, `False` if it was there.

    Raises:
        FetchError: there is no such file, or its checksum is wrong; nothing is written.
    """
    path = folder / wanted.path
    if path.is_file():
        text_of(path.read_bytes(), wanted, str(path))
        return False
    origin = wanted.address if source is None else str(source / wanted.path)
    try:
        if source is None:
            with urllib.request.urlopen(wanted.address, timeout=60) as answer:
                found = answer.read()
        else:
            found = (source / wanted.path).read_bytes()
    except OSError as error:
        raise FetchError(f"{origin} cannot be fetched: {error}.") from error
    text = text_of(found, wanted, origin)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(gzip.compress(text, mtime=0))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetches every set; returns 1 if one of them could not be had."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fetch", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("data"), help="default: %(default)s")
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="FOLDER", help="a data folder to copy from"
    )
    args = parser.parse_args(arguments)
    failed = 0
    for wanted in SETS:
        try:
            done = "written" if fetch(wanted, args.folder, args.source) else "there already"
            print(f"{args.folder / wanted.path}: {done}; licence: {wanted.licence}")
        except FetchError as error:
            failed += 1
            print(error, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
