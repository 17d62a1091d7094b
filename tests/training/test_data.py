"""Reading, tokenising, packing and drawing batches."""

import gzip
import itertools
import json
import os
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.training.data import Batches, in_order, pack
from jaxspec.training.sources import (
    DataError,
    Document,
    EveryNth,
    FieldRanges,
    LastCharacters,
    LastRows,
    Source,
    default_mixture,
    document_texts,
    fingerprint,
    read_source,
)
from jaxspec.training.tokenizer import RESERVED, loaded_tokenizer, train_tokenizer
from jaxspec.training.vocabulary import TrainingVocabulary

TEXTS = ["The quick brown fox, 12 of them.\n", "def add(a, b):\n    return a + b\n", "Zoë: 3.14\n"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS * 4, vocab_size=320)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts_of(documents):
    return list(document_texts(documents))


def documents(count):
    return [Document((str(i),), {"id": i}, f"file:{i}") for i in range(count)]


# Splits


def test_every_nth_holds_out_the_nth():
    parts = EveryNth(3).divide(documents(7))
    assert texts_of(parts.validation) == ["2", "5"]
    assert texts_of(parts.train) == ["0", "1", "3", "4", "6"]


def test_last_rows_holds_out_the_end():
    parts = LastRows(2).divide(documents(5))
    assert texts_of(parts.train) == ["0", "1", "2"]
    assert texts_of(parts.validation) == ["3", "4"]


def test_field_ranges_include_both_ends_and_drop_the_rest():
    parts = FieldRanges("id", train=(4, 6), validation=(1, 2)).divide(documents(9))
    assert texts_of(parts.train) == ["4", "5", "6"]
    assert texts_of(parts.validation) == ["1", "2"]


def test_last_characters_cuts_inside_a_document():
    texts = [Document((text,), {}, "file:1") for text in ("abcdef", "ghij")]
    parts = LastCharacters(0.3).divide(texts)
    assert "".join(texts_of(parts.train)) == "abcdefg"
    assert "".join(texts_of(parts.validation)) == "hij"


def test_the_default_mixture_splits_as_documented(data_folder):
    by_name = {s.name: s for s in default_mixture(data_folder("train"))}
    gsm8k, mbpp = read_source(by_name["gsm8k"]), read_source(by_name["mbpp"])
    assert (len(gsm8k.train), len(gsm8k.validation)) == (7173, 300)
    assert (len(mbpp.train), len(mbpp.validation)) == (374, 90)
    assert {d.row["task_id"] for d in mbpp.train} == set(range(601, 975))
    assert not any("\r" in text for text in document_texts(mbpp.train))


def test_the_standard_library_leaves_out_tests_and_tables():
    source = Source("stdlib", "stdlib", exclude=("test", "encodings", "site-packages"))
    parts = read_source(source)
    places = [document.place for part in parts for document in part]
    assert any(place.endswith("argparse.py:1") for place in places)
    assert not any(f"/{name}/" in place for place in places for name in source.exclude)
    assert len(parts.validation) == len(places) // 20


# Reading


def test_a_template_makes_the_text_and_lists_become_lines(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"q": "Why?\r\nWhy?", "tests": ["one", "two"]}])
    source = Source("a", str(path), template="{q}\n{tests}", split=LastRows(0))
    assert texts_of(read_source(source).train) == ["Why?\nWhy?\none\ntwo"]


def test_files_of_every_kind_are_read(tmp_path):
    (tmp_path / "plain.txt").write_bytes(b"one\r\ntwo\n")
    with gzip.open(tmp_path / "packed.jsonl.gz", "wt") as file:
        file.write('{"text": "three"}\n\n')
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "latin.py").write_bytes("# coding: latin-1\n# é\n".encode("latin-1"))
    (tmp_path / "code" / "skip").mkdir()
    (tmp_path / "code" / "skip" / "no.py").write_text("no")

    def read(path):
        source = Source("x", str(tmp_path / path), split=LastRows(0), exclude=("skip",))
        return texts_of(read_source(source).train)

    assert read("plain.txt") == ["one\ntwo\n"]
    assert read("packed.jsonl.gz") == ["three"]
    assert read("code") == ["# coding: latin-1\n# é\n"]


@pytest.mark.parametrize(
    ("name", "content", "line", "what"),
    [
        ("a.jsonl", b'{"text": "fine"}\n{"text": \n', 2, "not JSON"),
        ("a.jsonl", b'{"text": "fine"}\n\n[1, 2]\n', 3, "must be a JSON object"),
        ("a.jsonl", b'{"text": "fine"}\n{"test": 1}\n', 2, "needs ['text']"),
        ("a.txt", b"fine\nfine\n\xff\xfe\n", 3, "not UTF-8"),
        ("a.py", b"# fine\n# \xff\n", 1, "encoding"),
        ("a.jsonl", b"[" * 9999, 1, "not JSON (more than 100 lists or objects within each other)"),
    ],
)
def test_bad_data_is_named_by_file_and_line(tmp_path, name, content, line, what):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_source(Source("bad", str(path)))
    assert f"{path}:{line}:" in str(error.value)
    assert what in str(error.value)


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.jsonl.gz", gzip.compress(b'{"text": "fine"}\n' * 9, mtime=0)[:-9], "gzip"),
        ("a.txt.gz", b"this is no gzip", "gzip"),
        ("a.jsonl.gz", gzip.compress(b"fine")[:10] + b"\xff" * 30, "gzip"),
        ("a.jsonl.gz", gzip.compress(bytes(1 << 24)), "unpacks to more than 100 times its size"),
        ("a.txt.gz", gzip.compress(bytes(1 << 24)), "unpacks to more than 100 times its size"),
    ],
    ids=["cut off", "no gzip", "damaged", "bomb of lines", "bomb"],
)
def test_bad_archives_are_named(tmp_path, name, content, what):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"Source 'bad': {path} ") as error:
        read_source(Source("bad", str(path)))
    assert what in str(error.value)


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("n" * 10**6, "nowhere.txt", r"^Source 'n+\.\.\.: nowhere.txt is not there"),
        ("bad", "no/" * 1000, r"^Source 'bad': no/[no/]{300,400} is not there"),
        ("bad", "packages:", "path must name installed packages .* got 'packages:'"),
        ("bad", "packages:nowhere", "not installed: nowhere; install them"),
    ],
)
def test_a_source_that_is_not_there_is_named_in_short(name, path, message):
    with pytest.raises(DataError, match=message):
        read_source(Source(name, path))


def test_devices_and_pipes_are_refused(tmp_path):
    """They have no end, or wait for a writer."""
    (tmp_path / "a.jsonl").symlink_to("/dev/zero")
    with pytest.raises(DataError, match=r"a\.jsonl is a device or a pipe"):
        read_source(Source("bad", str(tmp_path / "a.jsonl")))
    (tmp_path / "code").mkdir()
    os.mkfifo(tmp_path / "code" / "pipe.py")
    code = Source("bad", str(tmp_path / "code"))
    for read in (read_source, fingerprint):
        with pytest.raises(ValueError, match=r"pipe\.py is a device or a pipe"):
            read(code)


def test_a_field_that_the_split_needs_is_asked_for(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"text": "x", "id": 1}, {"text": "y"}])
    with pytest.raises(DataError, match=r"a\.jsonl:2: .*'id'"):
        read_source(Source("a", str(path), split=FieldRanges("id", (1, 1), (2, 2))))


def test_missing_files_and_empty_sources_are_named(tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        read_source(Source("gone", str(tmp_path / "nowhere")))
    with pytest.raises(DataError, match=r"no \.py files"):
        read_source(Source("empty", str(tmp_path)))
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match=r"'few': no text of .*a.txt is left for training by Last"):
        read_source(Source("few", str(tmp_path / "a.txt"), split=LastCharacters()))
    with pytest.raises(ValueError, match="gsm8k/train"):
        default_mixture(tmp_path)


def test_fingerprints_tell_contents_apart(tmp_path):
    (tmp_path / "a.py").write_text("a = 1\n")
    source = Source("code", str(tmp_path))
    before = fingerprint(source)
    assert fingerprint(source) == before
    (tmp_path / "a.py").write_text("a = 2\n")
    assert fingerprint(source) != before


# Tokens


def test_reserved_ids_come_first(tokenizer):
    assert [tokenizer.token_to_id(token) for token in RESERVED] == list(range(len(RESERVED)))


def test_every_digit_is_a_token(tokenizer):
    pieces = tokenizer.encode("2024 is 365", add_special_tokens=False).tokens
    assert [piece for piece in pieces if any(c.isdigit() for c in piece)] == list("2024365")


def test_prompts_begin_with_bos_and_any_text_survives(tokenizer):
    for text in [*TEXTS, "\x00 ünseen 漢字 \U0001f600\t\n"]:
        ids = tokenizer.encode(text).ids
        assert ids[0] == RESERVED.index("<|bos|>")
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_training_a_tokenizer_twice_gives_the_same():
    assert train_tokenizer(TEXTS * 2, 300).to_str() == train_tokenizer(TEXTS * 2, 300).to_str()


@pytest.mark.parametrize(
    ("size", "said"), [(100, "at least 272"), (10**9, "at most 1048576, got 1000000000")]
)
def test_a_vocabulary_too_small_or_too_large_is_refused(size, said):
    with pytest.raises(ValueError, match=f"vocab_size must be {said}"):
        train_tokenizer(TEXTS, size)


def test_a_field_of_a_template_may_have_any_name(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"a.b": "x {c}", "0": 5}))
    source = Source("a", str(path), template="{{{a.b}}} {0}", split=LastRows(0))
    assert read_source(source).train[0].pieces == ("{x {c}} 5",)


@pytest.mark.parametrize(("weights", "rows"), [((1e-9,), 0), ((1e12,), 3e12), ((1e-4,), 3e-4)])
def test_weights_that_make_no_epoch_are_refused(weights, rows):
    source = pack([np.arange(1, 9)] * 3, 8)
    with pytest.raises(ValueError, match=rf"weights must give .* {re.escape(f'give it {rows:g}')}"):
        Batches((source,), weights, 1)


def test_reserved_tokens_of_the_template_count_and_those_in_data_do_not(tmp_path, tokenizer):
    path = write_rows(tmp_path / "a.jsonl", [{"text": "hello <|end|><|eos|>"}])
    source = Source("a", str(path), template="<|user|>{text}<|end|>", split=LastRows(0))
    [ids] = TrainingVocabulary.of(loaded_tokenizer(tokenizer, 64), "a").encode(
        read_source(source).train
    )
    reserved = [RESERVED[i] for i in ids if i < len(RESERVED)]
    assert reserved == ["<|bos|>", "<|user|>", "<|end|>", "<|eos|>"]
    assert "hello <|end|><|eos|>" in tokenizer.decode(ids.tolist(), skip_special_tokens=False)


# Packing


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    length=st.integers(2, 16),
)
@settings(max_examples=100)
def test_packing_keeps_every_token_exactly_once(sizes, length):
    starts = np.cumsum([0, *sizes])
    texts = [np.arange(start, end, dtype=np.int32) + 1 for start, end in itertools.pairwise(starts)]
    packed = pack(texts, length)
    used = packed.segments > 0
    assert sorted(packed.tokens[used]) == list(range(1, starts[-1] + 1))
    assert np.all(packed.tokens[~used] == 0)
    # No document that fits is cut, and a segment is a run of one document from position 0 on.
    pieces = {
        (row, segment): packed.tokens[row][packed.segments[row] == segment]
        for row in range(len(packed.tokens))
        for segment in range(1, packed.segments[row].max() + 1)
    }
    assert len(pieces) == sum(-(-size // length) for size in sizes)
    for (row, segment), tokens in pieces.items():
        assert np.all(np.diff(tokens) == 1)
        document = np.searchsorted(starts, tokens[0] - 1, side="right") - 1
        assert tokens[-1] <= starts[document + 1]
        positions = packed.positions[row][packed.segments[row] == segment]
        assert list(positions) == list(range(len(tokens)))


def test_packing_fills_rows_well():
    sizes = np.random.default_rng(0).integers(5, 40, 500)
    packed = pack([np.ones(size, np.int32) for size in sizes], 64)
    assert np.mean(packed.segments > 0) > 0.95


# Batches


def source_rows(count, source):
    tokens = np.full((count, 4), source * 1000, np.int32) + np.arange(count)[:, None]
    return pack(list(tokens), 4)


def drawn(batches, steps):
    return np.concatenate([batches(step).tokens[:, 0] for step in steps])


def test_a_batch_depends_on_seed_and_step_alone():
    sources = (source_rows(7, 1), source_rows(5, 2))
    forwards = Batches(sources, (2.0, 0.5), 3, seed=4)
    backwards = Batches(sources, (2.0, 0.5), 3, seed=4)
    expected = [forwards(step).tokens for step in range(20)]
    for step in reversed(range(20)):
        np.testing.assert_array_equal(backwards(step).tokens, expected[step])
    assert not np.array_equal(
        drawn(Batches(sources, (2.0, 0.5), 3, seed=5), range(20)), np.concatenate(expected)[:, 0]
    )


def test_weights_say_how_many_passes_are_made():
    sources = (source_rows(7, 1), source_rows(6, 2))
    batches = Batches(sources, (2.0, 0.5), 1)
    tokens = drawn(batches, range(2 * (2 * 7 + 3)))
    counts = dict(zip(*np.unique(tokens, return_counts=True), strict=True))
    assert {counts[1000 + row] for row in range(7)} == {4}
    assert {counts[2000 + row] for row in range(6)} == {1}


def test_held_out_rows_come_in_order_and_padding_is_no_document():
    batches = list(in_order(source_rows(5, 1), 2))
    assert [batch.tokens[:, 0].tolist() for batch in batches[:2]] == [[1000, 1001], [1002, 1003]]
    assert batches[2].segments.tolist() == [[1] * 4, [0] * 4]
    assert len(list(in_order(source_rows(5, 1), 2, most=3))) == 2
