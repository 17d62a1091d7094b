"""The page of a suite: sections with tables, figures for JSON, and their one writer."""

import dataclasses
import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec.checkpoint.files import replacing_files

RESULTS = Path(__file__).resolve().parent / "results"
"""Folder of the recorded pages, one for each suite."""


class Section(NamedTuple):
    """A part of a page: paragraphs, a table and notes, each of which may be missing.

    Attributes:
        title: heading; "" for none.
        text: paragraphs before the table.
        columns: headings of the table.
        rows: cells of the table, as text.
        notes: list after the table.
        level: level of the heading; the page's own is 1.
    """

    title: str = ""
    text: Sequence[str] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()
    level: int = 2

    def as_markdown(self) -> str:
        """Returns the section in Markdown."""
        heading = f"{'#' * self.level} {self.title}" if self.title else ""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows] if self.columns else []
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        notes = "\n".join(f"- {note}" for note in self.notes)
        return "\n\n".join(filter(None, (heading, *self.text, table, notes)))


class Page(NamedTuple):
    """The result of a suite.

    Attributes:
        sections: in the order of the page.
        figures: every figure, by name; records become objects in JSON.
        agree: False if outputs differ that must be equal.
        plots: functions that draw a picture into a file, by the file's name.
        title: heading of the page.
        command: the command line that measures this again.
        date: day of the measurement, as 2026-01-31.
    """

    sections: Sequence[Section]
    figures: Mapping[str, Any]
    agree: bool = True
    plots: Mapping[str, Callable[[Path], None]] = {}
    title: str = ""
    command: str = ""
    date: str = ""

    def as_markdown(self) -> str:
        """Returns the page in Markdown; nothing in it depends on folders."""
        day = f" on {self.date}" if self.date else ""
        made = f"Made by this command{day}, never by hand:\n\n    {self.command}"
        heading = f"# {self.title}\n\n{made}"
        parts = filter(None, (section.as_markdown() for section in self.sections))
        return "\n\n".join([heading, *parts]) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """Returns all figures, ready for JSON."""
        opening = {"title": self.title, "command": self.command, "date": self.date}
        return {**opening, "outputs_agree": self.agree, **as_dict(self.figures)}


def as_dict(value: Any) -> Any:
    """Returns plain values for JSON.

    Records become objects with their fields and properties, arrays become lists. A record with a
    method `as_dict` decides by itself.

    Example:
        >>> class Pair(NamedTuple):
        ...     one: int
        ...     two: int
        ...
        ...     @property
        ...     def ratio(self):
        ...         return self.one / self.two
        >>> as_dict({"pair": Pair(3, 2)})
        {'pair': {'one': 3, 'two': 2, 'ratio': 1.5}}
    """
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): as_dict(each) for name, each in value.items()}
    fields: list[str] = list(getattr(value, "_fields", ()))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
    own = getattr(value, "as_dict", None)
    if fields and own is not None:
        return as_dict(own())
    if fields:
        found = vars(type(value)).items()
        fields += [name for name, member in found if isinstance(member, property)]
        return {name: as_dict(getattr(value, name)) for name in fields}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [as_dict(each) for each in value]
    return value


_FONT = "DejaVu Sans"  # matplotlib brings it


@contextmanager
def drawing(path: Path) -> Iterator[Any]:
    """Gives the axes of a picture and writes it as SVG: the same figures give the same bytes.

    A suite that draws calls `check_plots` before its work.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Text stays text, in one font, not a list of them: the file is smaller.
    fonts: Any = {"svg.fonttype": "none", "font.family": "sans-serif", "font.sans-serif": [_FONT]}
    with rc_context({**fonts, "svg.hashsalt": path.name}):
        figure = Figure(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        yield axes
        figure.legend(loc="outside lower center", fontsize="small", ncols=2)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
        path.write_text(_small(written.getvalue()), encoding="utf-8")


def _small(svg: str) -> str:
    """Leaves out metadata, spaces, and digits below a hundredth of a point."""
    without = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.sub(r"\s*\n\s*", "\n", re.sub(r"(\d\.\d\d)\d+", r"\1", without))


def publish(page: Page, name: str, folder: Path, json_path: str | None = None) -> None:
    """Writes `NAME.md` and plots into a folder, shows the page, and writes its figures as JSON.

    Files of a suite are replaced all together or not at all.

    Args:
        page: a suite's result.
        name: name of the suite.
        folder: folder of the pages; other suites' files in it stay as they are.
        json_path: file of the figures; "-" for standard output, which then holds nothing else.
    """
    text = page.as_markdown()
    folder.mkdir(parents=True, exist_ok=True)
    with replacing_files(folder) as staging:
        (staging / f"{name}.md").write_text(text, encoding="utf-8")
        for file, draw in page.plots.items():
            draw(staging / file)
    print(f"wrote {folder / name}.md", file=sys.stderr)
    print(text, end="", file=sys.stderr if json_path == "-" else sys.stdout)
    if json_path is None:
        return
    figures = json.dumps(page.as_dict(), indent=2)
    if json_path == "-":
        print(figures)
        return
    path = Path(json_path)
    with replacing_files(path.parent) as staging:
        (staging / path.name).write_text(figures + "\n", encoding="utf-8")
    print(f"wrote {path}", file=sys.stderr)
