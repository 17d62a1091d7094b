"""Pages and figures: what is written is what was measured, whole or not at all."""

import dataclasses
import json
from typing import NamedTuple

import numpy as np
import pytest

from benchmarks.page import Page, Section, as_dict, publish
from jaxspec.measure.comparison import Divergence

ROWS = [["plain", "1.00"], ["lookup", "2.50"]]
PAGE = Page(
    [Section("A table", ["About it."], ["method", "tau"], ROWS, ["A note."]), Section("Empty")],
    {"rows": ROWS, "gap": Divergence(0, 3, 1, 2, 1e-6)},
    title="Figures",
    command="python -m benchmarks some",
)


def tables(markdown: str) -> list[list[list[str]]]:
    """The cells of every table."""
    blocks = (block.splitlines() for block in markdown.split("\n\n") if block.startswith("|"))
    return [[[c.strip() for c in line.strip("|").split("|")] for line in b] for b in blocks]


def test_a_table_comes_back_as_it_was():
    (table,) = tables(PAGE.as_markdown())
    assert table[0] == ["method", "tau"]
    assert table[2:] == ROWS


def test_only_the_page_has_a_heading_of_the_first_level():
    headings = [line for line in PAGE.as_markdown().splitlines() if line.startswith("#")]
    assert headings == ["# Figures", "## A table", "## Empty"]


def test_a_page_names_its_day():
    dated = PAGE._replace(date="2026-01-31")
    assert "Made by this command on 2026-01-31, never by hand:\n\n    python" in dated.as_markdown()
    assert dated.as_dict()["date"] == "2026-01-31"


def test_pages_and_figures_are_written_and_others_stay(tmp_path, capsys):
    (tmp_path / "other.md").write_text("as it was")
    publish(PAGE, "some", tmp_path, str(tmp_path / "figures.json"))
    assert (tmp_path / "some.md").read_text() == PAGE.as_markdown() == capsys.readouterr().out
    assert json.loads((tmp_path / "figures.json").read_text()) == PAGE.as_dict()
    assert (tmp_path / "other.md").read_text() == "as it was"
    assert {path.name for path in tmp_path.iterdir()} == {"other.md", "some.md", "figures.json"}


def test_figures_on_standard_output_are_alone_there(tmp_path, capsys):
    publish(PAGE, "some", tmp_path, "-")
    out, err = capsys.readouterr()
    assert json.loads(out) == PAGE.as_dict()
    assert PAGE.as_markdown() in err


def test_a_page_whose_plot_fails_changes_nothing(tmp_path):
    (tmp_path / "some.md").write_text("old")

    def fail(path):
        path.write_text("half a picture")
        raise RuntimeError("no ink")

    with pytest.raises(RuntimeError, match="no ink"):
        publish(PAGE._replace(plots={"some.png": fail}), "some", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["some.md"]
    assert (tmp_path / "some.md").read_text() == "old"


def test_plots_lie_next_to_the_page(tmp_path):
    publish(PAGE._replace(plots={"some.png": lambda path: path.touch()}), "some", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"some.md", "some.png"}


def test_records_become_objects_with_their_properties():
    class Pair(NamedTuple):
        one: int
        two: float

        @property
        def ratio(self) -> float:
            return self.one / self.two

    @dataclasses.dataclass(frozen=True)
    class Own:
        secret: int

        def as_dict(self):
            return {"told": 1}

    found = as_dict({"a": Pair(3, 2.0), 7: [np.arange(2), np.float32(0.5)], "own": Own(5)})
    assert found == {
        "a": {"one": 3, "two": 2.0, "ratio": 1.5},
        "7": [[0, 1], 0.5],
        "own": {"told": 1},
    }
    assert as_dict(Divergence(0, 3, 1, 2, 1e-6))["is_tie"] is True
    json.dumps(found, allow_nan=False)
