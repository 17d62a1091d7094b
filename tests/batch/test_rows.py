"""Lines of a file become prompts or errors."""

import gzip
import json

import numpy as np
import pytest

from jaxspec.batch import read_rows, rows_of
from jaxspec.batch.rows import digest_of, encode_rows, number_of, with_fields_of


def write(path, *lines) -> str:
    data = b"".join(
        line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines
    )
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def lines_of(*values) -> list[bytes]:
    return [
        (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n"
        for value in values
    ]


@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz"])
def test_every_way_to_write_a_prompt(tmp_path, name):
    chat = [{"role": "user", "content": "hi"}]
    values = ("text", {"question": "q"}, {"prompt": "p", "id": "a"}, [1, 2.0], {"messages": chat})
    path = write(tmp_path / name, *lines_of(*values, {"turns": ["first", "second"], "id": 7}))
    rows = read_rows(path)
    assert [row.prompt for row in rows] == ["text", "q", "p", [1, 2], chat, "first"]
    assert [row.id for row in rows] == [0, 1, "a", 3, 4, 7]
    assert [row.line for row in rows] == [1, 2, 3, 4, 5, 6]
    assert not any(row.error for row in rows)


BAD = {
    b"\xff\xfe": "not UTF-8",
    b"{": "not valid JSON",
    b'{"messages": ' + b"[" * 101 + b"]" * 101 + b"}": "not valid JSON (more than 100 lists or",
    b"[" * 100_000: "not valid JSON (more than 100 lists or",
    b'""': "not empty",
    b"[]": "not empty",
    b"3": "must be a text",
    b"[1, true]": "must be a text",
    b'{"tokens": [1.5]}': "must be a text",
    b'{"tokens": [1, [2]]}': "must be a text",
    b'{"prompt": "p", "score": 1e400}': "an infinity or a number past 1.7e308",
    b'{"prompt": "p", "score": NaN}': "it holds NaN",
    b'{"other": 1}': "has no field 'prompt'",
    b'{"prompt": "p", "id": -1}': "id must be",
    b'{"prompt": "p", "id": 1.5}': "id must be",
    b'{"prompt": "p", "id": "\\ud800"}': "id must be",
    b'{"prompt": "p", "id": 0}': "line 1's already",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_an_error_with_its_number(tmp_path, line):
    path = write(tmp_path / "in.jsonl", *lines_of("good", b"", line, "good too"))
    first, bad, last = read_rows(path)
    assert (bad.line, bad.prompt) == (3, None)
    assert BAD[line] in bad.error
    record = {"line": 3, "error": bad.error}
    json.dumps(with_fields_of(bad.source, record), allow_nan=False)
    assert (first.prompt, last.prompt, last.line) == ("good", "good too", 4)


def test_what_is_no_file_of_prompts_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no prompts"):
        read_rows(write(tmp_path / "empty.jsonl", b"\n\n"))
    whole = gzip.compress(b'"text"\n' * 1000)
    with pytest.raises(ValueError, match="path must be a text or a path, got 5"):
        read_rows(5)
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(whole[:-9])
    with pytest.raises(ValueError, match="cut off"):
        read_rows(path)


def test_a_broken_line_takes_no_id_from_a_good_one(tmp_path):
    """It would have had the number of its place."""
    broken = b'{"prompt": '
    path = write(tmp_path / "in.jsonl", *lines_of(broken, {"prompt": "p", "id": 0}, broken))
    first, good, _ = read_rows(path)
    assert (first.id, good.id, good.prompt, good.error) == (0, 0, "p", None)


def test_fields_and_chats(tmp_path):
    path = write(tmp_path / "in.jsonl", *lines_of({"body": "b", "prompt": "p"}))
    assert read_rows(path, field="body")[0].prompt == "b"
    assert read_rows(path, chat=True)[0].prompt == [{"role": "user", "content": "p"}]
    assert "'other'" in read_rows(path, field="other")[0].error


def test_ids_name_randomness_by_numbers_of_31_bits():
    assert number_of(5) == 5
    assert number_of("a") == number_of("a") != number_of("b")
    assert all(0 <= number_of(str(i)) < 1 << 31 for i in range(100))


class Hostile:
    """Its own code fails wherever it is asked."""

    def __array__(self, *args, **kwargs):
        raise KeyError("array")

    def __repr__(self):
        raise AttributeError("repr")


def test_what_a_model_cannot_read_is_an_error_of_its_row(model):
    given = rows_of(["ab", [5, 9999], "x" * 3000, Hostile(), [1, Hostile()]])
    assert digest_of(given) == digest_of(given)
    rows = encode_rows(model, given)
    assert rows[3].error == "the prompt cannot be read: KeyError('array')."
    assert "[1] must be a whole number, got Hostile that cannot be shown" in rows[4].error
    assert rows[0].tokens.tolist() == model.tokenizer.encode("ab")
    assert "ids outside" in rows[1].error
    assert "the context of tiny holds 2048" in rows[2].error


def test_a_digest_sees_every_part_of_every_row():
    rows = rows_of(["a", [1, 2]])
    for same in (np.array([1, 2]), [np.int64(1), np.int64(2)]):
        assert digest_of(rows) == digest_of(rows_of(["a", same]))
    for other in (
        rows[::-1],
        rows[:1],
        [rows[0]._replace(id=9), rows[1]],
        [rows[0]._replace(line=9), rows[1]],
        [rows[0]._replace(prompt="b"), rows[1]],
        [rows[0]._replace(error="e"), rows[1]],
    ):
        assert digest_of(other) != digest_of(rows)
