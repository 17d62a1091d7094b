"""Text on a terminal and off it."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from jaxspec.commands.live import LiveText, Sources
from tests.bench.models import tiny_model


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


def test_sources_follow_tokens_through_characters_of_several():
    tokenizer = tiny_model().tokenizer
    tokens = np.asarray(tokenizer.encode("aé b"))  # é takes two tokens
    sources = Sources(tokenizer)
    steps = [
        SimpleNamespace(tokens=tokens[:2], from_draft=np.asarray([True, False]), text="a"),
        SimpleNamespace(tokens=tokens[2:4], from_draft=np.asarray([True, False]), text="é "),
        SimpleNamespace(tokens=tokens[4:], from_draft=np.asarray([True]), text="b"),
    ]
    assert [sources.push(step) for step in steps] == [
        [("a", True)],
        [("é", True), (" ", False)],
        [("b", True)],
    ]


def test_text_that_was_held_back_keeps_its_sources():
    tokens = np.asarray(tiny_model().tokenizer.encode("ab"))
    sources = Sources(tiny_model().tokenizer)
    held = SimpleNamespace(tokens=tokens[:1], from_draft=np.asarray([True]), text="")
    assert sources.push(held) == []
    ending = SimpleNamespace(tokens=tokens[1:], from_draft=np.asarray([False]), text="ab")
    assert sources.push(ending) == [("a", True), ("b", False)]
