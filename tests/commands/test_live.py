"""Text on a terminal and off it."""

import io
import re
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text

from jaxspec.commands.live import LiveText, Sources, waiting_for_first
from tests.measure.models import tiny_model


def show(pieces, terminal, width=20):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, height=10)
    with LiveText(console) as live:
        for piece in pieces:
            live.push([piece], "status")
    return out.getvalue()


def test_off_a_terminal_it_is_the_text_and_nothing_else():
    text = "one\ntwo" + " long" * 20
    assert show([(text, True), ("!", False)], terminal=False) == text + "!\n"


def test_on_a_terminal_no_word_is_lost_and_drafts_are_coloured():
    words = [f"word{i}" for i in range(30)]
    shown = show([(word + " ", i % 2 == 0) for i, word in enumerate(words)], terminal=True)
    assert all(word in shown for word in words)
    assert "\x1b[32mword0 " in shown
    assert "status" in shown


def screen(output):
    """Returns the rows that a terminal without a right edge shows after the output."""
    rows, y, x = [""], 0, 0
    for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
        if part == "\x1b[2K":
            rows[y] = ""
        elif part == "\x1b[1A":
            y -= 1
        elif part == "\r":
            x = 0
        elif part == "\n":
            x, y = 0, y + 1
            rows += [""] * (y == len(rows))
        elif not part.startswith("\x1b"):
            rows[y] = rows[y][:x].ljust(x) + part + rows[y][x + len(part) :]
            x += len(part)
    return "\n".join(row.rstrip() for row in rows).rstrip("\n")


@pytest.mark.parametrize(
    ("pieces", "width", "shown"),
    [
        (["aaaa bbbbb", " ", "ccc"], 10, "aaaa bbbbb\nccc"),
        (["aaaa bbbbb", " ", "ccc"], 9, "aaaa\nbbbbb ccc"),
        (["aaaa bbbbb", " ", "ccc"], 11, "aaaa bbbbb\nccc"),
        (["aaaa bbbbb", " ", "ccc"], 14, "aaaa bbbbb ccc"),
        (["aaaa bbbbb", " ", " ", "ccc", "d"], 10, "aaaa bbbbb\ncccd"),
        (["aaaa bbbbb", " ", "\n", " ", "ccc"], 10, "aaaa bbbbb\n ccc"),
        (["aaaabbbbbccc", " ", "ddddddd", " ", "e"], 10, "aaaabbbbbc\ncc ddddddd\ne"),
        (["aaaa bb", "bbb", "b c", "\n", "\n", "d"], 10, "aaaa\nbbbbbb c\n\nd"),
        (["a\tb", "\t", "c"], 12, "a       b\nc"),
        (["日本", " ", "日本", " ", "a"], 9, "日本 日本\na"),
    ],
)
def test_rows_break_where_the_words_do(monkeypatch, pieces, width, shown):
    monkeypatch.setattr("jaxspec.commands.live.REFRESH_SECONDS", 0)
    assert screen(show([(piece, False) for piece in pieces], True, width)) == shown


@pytest.mark.parametrize("width", [7, 10, 13, 20])
def test_the_pieces_do_not_change_the_rows(width):
    rng = np.random.default_rng(width)
    words = ["x" * size for size in rng.integers(1, 2 * width, 60)]
    text = "".join(word + end for word, end in zip(words, rng.choice([" ", "\n"], 60), strict=True))
    rows = Text(text.rstrip()).wrap(Console(width=width), width)
    expected = "\n".join(row.plain.rstrip() for row in rows)
    assert screen(show([(text, True)], True, width)) == expected
    assert screen(show([(character, True) for character in text], True, width)) == expected


def test_a_status_is_for_terminals_and_goes_when_the_first_step_is_there(monkeypatch, capsys):
    assert list(waiting_for_first(iter([1, 2]), "wait")) == [1, 2]
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    steps = waiting_for_first(iter([1, 2]), "wait")
    assert next(steps) == 1
    shown = capsys.readouterr()
    assert "wait" in shown.err
    assert screen(shown.err) == ""
    assert shown.out == ""
    assert list(steps) == [2]
    assert capsys.readouterr().err == ""


def test_an_exception_keeps_the_text():
    out = io.StringIO()

    def interrupted():
        with LiveText(Console(file=out, width=40)) as live:
            live.push([("kept", False)], "status")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert out.getvalue() == "kept\n"


def test_what_a_model_writes_is_no_command_to_the_terminal():
    shown = show([("\x1b]0;title\x07", False)], terminal=True)
    assert "\x1b]0;" not in shown
    assert "\u241b]0;title" in shown


def step(tokens, drafted, text, finish_reason=None):
    return SimpleNamespace(
        tokens=tokens, from_draft=np.asarray(drafted), text=text, finish_reason=finish_reason
    )


def test_sources_follow_tokens_through_characters_of_several():
    tokenizer = tiny_model().tokenizer
    tokens = np.asarray(tokenizer.encode("aé b"))  # é takes two tokens
    sources = Sources(tokenizer)
    steps = [
        step(tokens[:2], [True, False], "a"),
        step(tokens[2:4], [True, False], "é "),
        step(tokens[4:], [True], "b", "length"),
    ]
    assert [sources.push(step) for step in steps] == [
        [("a", True)],
        [("é", True), (" ", False)],
        [("b", True)],
    ]


def test_text_that_was_held_back_keeps_its_sources():
    tokens = np.asarray(tiny_model().tokenizer.encode("ab"))
    sources = Sources(tiny_model().tokenizer)
    assert sources.push(step(tokens[:1], [True], "")) == []
    assert sources.push(step(tokens[1:], [False], "ab", "length")) == [("a", True), ("b", False)]


def test_the_rest_is_what_was_held_back_and_no_stop_string():
    tokens = np.asarray(tiny_model().tokenizer.encode("abcé"))
    sources = Sources(tiny_model().tokenizer)
    sources.push(step(tokens[:4], [False, True, True, False], "a"))
    assert sources.rest() == [("bc", True), ("\ufffd", False)]
    assert sources.rest() == []
    sources.push(step(tokens[:3], [False] * 3, "a", "stop_string"))
    assert sources.rest() == []
