"""A race as an animated picture: one SVG file, in CSS, without scripts."""

import textwrap
from collections.abc import Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from jaxspec.checkpoint.files import replacing_files
from jaxspec.commands.race import Recording

_COLUMNS, _MOST_ROWS = 92, 8
_CHARACTER, _ROW = 7.8, 19.0  # pixels, at a size of 13
_MARGIN, _TITLE = 16.0, 24.0
_AFTER = 2.5
"""Seconds for which the end is shown."""
_STYLE = """
text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre }
text { fill: #1f2328 }
.name { font-weight: 700 }
.dim { fill: #59636e }
.draft { fill: #1a7f37; font-weight: 700 }
.frame { fill: #ffffff; stroke: #d1d9e0 }
.back { fill: #d1d9e0 }
.bar { fill: #1a7f37; transform-box: fill-box; transform-origin: left }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.dim { fill: #9198a1 }
.draft, .bar { fill: #3fb950 }
.frame { fill: #0d1117; stroke: #3d444d }
.back { fill: #3d444d }
}
@media (prefers-reduced-motion: reduce) { * { animation: none !important } }
"""


def check_picture(name: str) -> None:
    """Refuses a name that no picture can be written to.

    Raises:
        ValueError: the name does not end in `.svg`, or is a folder.
    """
    if not name.lower().endswith(".svg") or Path(name).is_dir():
        raise ValueError(f"--svg must name a file that ends in .svg, got {name}.")


def write_picture(
    path: Path, model: str, prompt: str, recordings: Sequence[Recording], slowed: float
) -> None:
    """Writes the picture of a race.

    Args:
        path: the file, which is replaced as a whole.
        model: name of the target.
        prompt: what was continued.
        recordings: the methods, one below the other, the one that does not draft first.
        slowed: seconds of the picture for each second of decoding.
    """
    with replacing_files(path.parent) as folder:
        (folder / path.name).write_text(
            race_svg(model, prompt, recordings, slowed), encoding="utf-8"
        )


_WRAPPER = textwrap.TextWrapper(
    _COLUMNS, expand_tabs=False, replace_whitespace=False, drop_whitespace=False
)


class _Run(NamedTuple):
    """Characters of one row that came in one step from one source."""

    row: int
    column: int
    step: int
    drafted: bool
    text: str


def _runs(recording: Recording) -> tuple[list[_Run], int]:
    """Breaks the text of a recording into rows; returns its runs and the number of rows."""
    characters = [
        (character, number, drafted)
        for number, step in enumerate(recording.steps)
        for piece, drafted in step.pieces
        for character in piece
    ]
    rows, start = [], 0
    text = "".join(character for character, *_ in characters)
    for line in text.split("\n"):
        wrapped = _WRAPPER.wrap(line)
        for row in wrapped or [""]:
            rows.append((start, start + len(row)))
            start += len(row)
        start += 1  # the line's end
    runs = []
    for row, (first, last) in enumerate(rows):
        column = 0
        for (step, drafted), group in groupby(characters[first:last], key=lambda each: each[1:]):
            piece = "".join(character for character, *_ in group)
            runs.append(_Run(row, column, step, drafted, piece))
            column += len(piece)
    return runs, len(rows)


def race_svg(model: str, prompt: str, recordings: Sequence[Recording], slowed: float) -> str:
    """Returns the source of a picture on which methods write the same text, each in its own time.

    Steps have equal shares of it; accepted draft tokens are coloured. The picture begins again
    after the last method has ended. Readers who ask for less motion see the end.

    Args:
        model: name of the target.
        prompt: what was continued.
        recordings: the methods, one below the other, the one that does not draft first.
        slowed: seconds of the picture for each second of decoding.

    Example:
        >>> from jaxspec.commands.race import RecordedStep
        >>> from jaxspec.decoding.metrics import Counts
        >>> step = RecordedStep(Counts(1, 1), 0.5, [("a < b", False)])
        >>> "a &lt; b" in race_svg("demo", "", [Recording("plain", [step])], 2.0)
        True
    """
    lasts = max(recording.seconds for recording in recordings) * slowed + _AFTER
    width = 2 * _MARGIN + _COLUMNS * _CHARACTER
    styles, parts, top = [_STYLE], [], _MARGIN
    first_line = prompt.strip().split("\n")[0]
    shown = textwrap.shorten(first_line, _COLUMNS - len(model) - 4, placeholder=" ...")
    parts.append(
        f'<text x="{_MARGIN}" y="{top + 13}"><tspan class="name">{escape(model)}</tspan>'
        f'<tspan class="dim">  {escape(shown)}</tspan></text>'
    )
    top += _TITLE
    base = recordings[0].seconds
    for lane, recording in enumerate(recordings):
        counts, seconds = recording.steps[-1].counts, recording.seconds
        figures = f"{counts.num_tokens / seconds:,.0f} tokens/s"
        if lane:
            figures += f"   {base / seconds:.2f} times   tau {counts.tau:.2f}"
        runs, num_rows = _runs(recording)
        hidden = max(0, num_rows - _MOST_ROWS)
        height = _TITLE + (num_rows - hidden) * _ROW + 14
        parts.append(
            f'<rect class="frame" x="{_MARGIN / 2}" y="{top}" width="{width - _MARGIN}" '
            f'height="{height:g}" rx="6"/><text class="name" x="{_MARGIN}" y="{top + 18:g}">'
            f"{escape(recording.name)}</text>"
            f'<text class="dim l{lane}e" x="{width - _MARGIN:g}" y="{top + 18:g}" '
            f'text-anchor="end">{escape(figures)}</text>'
        )
        bar = f'x="{_MARGIN}" y="{top + height - 8:g}" width="{width - 2 * _MARGIN:g}" height="3"'
        parts.append(f'<rect class="back" {bar}/><rect class="bar l{lane}b" {bar}/>')
        ended = 100 * seconds * slowed / lasts
        styles.append(
            f"@keyframes l{lane}b {{ 0% {{ transform: scaleX(0) }} {ended:.2f}% "
            f"{{ transform: scaleX(1) }} }}\n"
            f".l{lane}b {{ animation: l{lane}b {lasts:.2f}s linear infinite }}"
        )
        styles.append(_appears(f"l{lane}e", ended, lasts))
        for number in sorted({run.step for run in runs if run.row >= hidden}):
            at = 100 * recording.steps[number].seconds * slowed / lasts
            styles.append(_appears(f"l{lane}s{number}", at, lasts))
        for run in runs:
            if run.row < hidden or not run.text.strip():
                continue
            y = top + _TITLE + (run.row - hidden) * _ROW + 14
            names = f"l{lane}s{run.step}" + (" draft" if run.drafted else "")
            parts.append(
                f'<text class="{names}" x="{_MARGIN + run.column * _CHARACTER:.1f}" y="{y:g}" '
                f'textLength="{len(run.text) * _CHARACTER:.1f}" xml:space="preserve">'
                f"{escape(run.text)}</text>"
            )
        top += height + 8
    slower = "as fast as it ran" if slowed == 1 else f"{slowed:g} times slower than it ran"
    note = f"replayed {slower}; green: drafted and accepted; tau: tokens per target pass"
    parts.append(f'<text class="dim" x="{_MARGIN}" y="{top + 13:g}">{escape(note)}</text>')
    top += _TITLE
    names = ", ".join(recording.name for recording in recordings)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {top:g}" role="img" '
        f'width="{width:g}" height="{top:g}">\n<title>{escape(f"{model} decoded by {names}")}'
        f"</title>\n<style>{''.join(f'{style}' + chr(10) for style in styles)}</style>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _appears(name: str, at: float, lasts: float) -> str:
    """Returns the style of a class that is hidden until `at` percent of the picture."""
    return (
        f"@keyframes {name} {{ 0%, {at:.2f}% {{ opacity: 0 }} {min(100.0, at + 0.01):.2f}% "
        f"{{ opacity: 1 }} }}\n.{name} {{ animation: {name} {lasts:.2f}s infinite }}"
    )
