"""Messages of long work about its progress."""

from types import SimpleNamespace

import pytest

from jaxspec import progress
from jaxspec.progress import error_console, progress_bar


def test_a_file_gets_a_line_a_minute(capsys, monkeypatch):
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(progress, "time", clock)
    with progress_bar(4) as advance:
        for doing, clock.now in (("a", 1.0), ("b", 61.0), ("c", 119.0), ("d", 121.0)):
            advance(doing)
    said = capsys.readouterr()
    assert said.err.splitlines() == ["1 of 4 done, now b", "3 of 4 done, now d"]
    assert said.out == ""


def test_nothing_is_said_unless_it_is_to_be_shown(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_SECONDS_A_LINE", 0)
    with progress_bar(1, shown=False) as advance:
        advance("a")
    assert capsys.readouterr().err == ""


def test_an_interruption_says_how_far_the_outermost_bar_was():
    def interrupted():
        with progress_bar(3) as advance, progress_bar(9) as inner:
            advance("a")
            inner("b")
            advance("c")
            assert progress.how_far() == "1 of 3 done, now c"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as interruption:
        interrupted()
    assert interruption.value.__notes__ == ["0 of 9 done, now b", "1 of 3 done, now c"]
    assert progress.how_far() == ""


def test_notebooks_get_plain_lines(capsys, monkeypatch, recwarn):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    console = error_console()
    with console.status("b"):  # drawn by ipywidgets there, with a warning where they are not
        console.print("a")
    assert capsys.readouterr().err == "a\n"
    assert not recwarn
