"""Prompt files: which field, which lines, and what is said of bad ones."""

import gzip
import json
from pathlib import Path

import pytest

from jaxspec.checkpoint import files
from jaxspec.measure.prompts import PromptRow, read_prompts


def write(folder, *entries, name="prompts.jsonl"):
    path = folder / name
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_first_known_field_is_taken(tmp_path):
    path = write(
        tmp_path,
        {"text": "t", "question": "q", "prompt": "p"},
        {"text": "t", "question": "q"},
        {"text": "t", "turns": ["first", "second"]},
        {"turns": ["first", "second"], "category": "chat"},
        "",
        {"prompt": [{"role": "user", "content": "hello"}], "category": 7},
        {"messages": [{"role": "user", "content": "hello"}]},
        {"prompt": [5, 6]},
        {"tokens": [5, 6]},
    )
    assert read_prompts(path) == [
        PromptRow("p", None),
        PromptRow("q", None),
        PromptRow("t", None),
        PromptRow("first", "chat"),
        *[PromptRow([{"role": "user", "content": "hello"}], None)] * 2,
        *[PromptRow([5, 6], None)] * 2,
    ]


def test_a_named_field_is_the_only_one(tmp_path):
    path = write(tmp_path, {"prompt": "p", "code": "c"}, {"prompt": "p"})
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2: has no field 'code', only 'prompt'"):
        read_prompts(path, field="code")
    path = write(tmp_path, {"prompt": "p", "code": "c"})
    assert read_prompts(path, field="code") == [PromptRow("c", None)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "cut off', r":2: not valid JSON"),
        ("[1, 2]", r":2: must be a JSON object, got list"),
        ('{"answer": "x"}', r":2: has no field 'prompt' or 'question' or 'text' or 'turns'"),
        ('{"prompt": ""}', r":2: field 'prompt' must be a text that is not empty"),
        ('{"prompt": 3}', r":2: field 'prompt' must be a text"),
        ('{"turns": []}', r":2: field 'turns' must be a text"),
        ('{"tokens": [5, 0.5]}', r":2: field 'tokens' must be .* token ids, got \[5, 0.5\]"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        read_prompts(write(tmp_path, {"prompt": "fine"}, line))


def test_what_never_ends_is_refused(tmp_path, monkeypatch):
    for path in ("/dev/zero", "/dev/stdin"):
        if Path(path).exists() and not Path(path).is_file():
            with pytest.raises(ValueError, match="is a device or a pipe"):
                read_prompts(path)
    bomb = tmp_path / "bomb.jsonl.gz"
    bomb.write_bytes(gzip.compress(b"\n" * (1 << 24)))
    with pytest.raises(
        ValueError, match=r"bomb\.jsonl\.gz unpacks to more than 100 times its size"
    ):
        read_prompts(bomb)
    monkeypatch.setattr(files, "MOST_JSON", 1 << 16)
    long = write(tmp_path, {"prompt": "fine"}, {"prompt": "a" * (1 << 16)}, {"prompt": "fine"})
    with pytest.raises(ValueError, match=r":2: a line of more than 0\.0625 MiB"):
        read_prompts(long)


def test_bytes_that_are_not_utf8_are_a_bad_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match=":2: not valid JSON"):
        read_prompts(path)


def test_compressed_files_read_the_same(tmp_path):
    plain = write(tmp_path, {"prompt": "one"}, {"prompt": "two"})
    packed = tmp_path / "prompts.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_prompts(packed) == read_prompts(plain)
    packed.write_bytes(gzip.compress(plain.read_bytes() * 1000)[:-20])
    with pytest.raises(ValueError, match="cut off"):
        read_prompts(packed)


def test_limit_comes_after_shuffling(tmp_path):
    path = write(tmp_path, *({"prompt": str(i)} for i in range(50)))
    assert [row.prompt for row in read_prompts(path, limit=3)] == ["0", "1", "2"]
    shuffled = [row.prompt for row in read_prompts(path, limit=3, shuffle_seed=1)]
    assert shuffled == [row.prompt for row in read_prompts(path, limit=3, shuffle_seed=1)]
    assert shuffled != ["0", "1", "2"]
    assert sorted(row.prompt for row in read_prompts(path, shuffle_seed=1)) == sorted(
        map(str, range(50))
    )


def test_an_empty_file_and_a_bad_limit_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no prompts"):
        read_prompts(write(tmp_path, ""))
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        read_prompts(write(tmp_path, {"prompt": "p"}), limit=0)
    with pytest.raises(ValueError, match="path must be a text or a path, got 5"):
        read_prompts(5)
