"""The display of a race, and its moments."""

import dataclasses
import html
import io
import re
import time
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from jaxspec import (
    DenoiseConfig,
    GenerationConfig,
    PromptLookup,
    SelfSpeculation,
    denoise,
    generate,
)
from jaxspec.commands import race
from jaxspec.commands.picture import race_svg
from jaxspec.commands.race import (
    Race,
    RecordedStep,
    Recording,
    coloured,
    columns_that_fit,
    record,
    recording_of,
    replay,
    slowdown,
)
from jaxspec.decoding.metrics import Counts
from tests.commands.test_live import screen
from tests.measure.models import filling_model, tiny_model

CONFIG = GenerationConfig(max_new_tokens=12)


def recording(seed, name="method", num_steps=20):
    """A stream with steps of 1 to 4 words; the last word of a step is the target's own."""
    rng = np.random.default_rng(seed)
    steps, counts, seconds = [], Counts(), 0.0
    for wait in rng.uniform(0.001, 0.01, num_steps):
        num_drafted = int(rng.integers(4))
        counts += Counts(num_tokens=num_drafted + 1, num_steps=1, num_from_draft=num_drafted)
        seconds += wait
        pieces = [("draft " * num_drafted, True), ("own ", False)]
        steps.append(RecordedStep(counts, seconds, pieces))
    return Recording(name, steps)


def drafted_text(text):
    return "".join(text.plain[span.start : span.end] for span in text.spans)


@pytest.mark.parametrize("seed", range(5))
def test_a_step_is_there_from_its_measured_time_on(seed):
    recorded = recording(seed)
    end = recorded.seconds
    assert recorded.until(0) == []
    assert recorded.until(end) == recorded.steps
    for seconds in [*np.linspace(0, end, 50), *(step.seconds for step in recorded.steps)]:
        there = recorded.until(seconds)
        later = recorded.steps[len(there) :]
        assert all(step.seconds <= seconds for step in there)
        assert all(step.seconds > seconds for step in later)
        assert [*there, *later] == recorded.steps


@pytest.mark.parametrize("drafter", [None, PromptLookup()])
def test_a_recording_is_what_the_method_writes(drafter):
    model, prompt = tiny_model(), "one, two, one"
    (recorded,) = record(model, prompt, CONFIG, {"method": drafter})
    (row,) = generate(model, prompt, CONFIG, drafter)
    assert coloured(recorded.steps).plain == row.text
    times = [step.seconds for step in recorded.steps]
    assert recorded.steps[-1].counts.num_tokens == len(row.tokens)
    assert recorded.steps[-1].counts.num_from_draft == row.from_draft.sum()
    assert [0.0, *times] == sorted({0.0, *times})


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_canvas_is_recorded_as_it_fills(drafts):
    model, config = filling_model("filling", 4), DenoiseConfig(max_new_tokens=8)
    speculation = SelfSpeculation(drafts)
    (recorded,) = record(model, "one, two, one", config, {"method": speculation})
    (row,) = denoise(model, "one, two, one", config, speculation)
    last = recorded.steps[-1].counts
    assert coloured(recorded.steps).plain == row.text
    assert (last.num_tokens, last.num_steps) == (len(row.tokens), row.num_calls)
    assert last.num_from_draft == row.counts.num_from_draft
    masks = [step.canvas.plain.count("░") for step in recorded.steps]
    assert masks == sorted(masks, reverse=True)
    assert masks[-1] == 0
    shown = Console(file=io.StringIO(), width=80, height=24)
    shown.print(Race([recorded], recorded.seconds, 1.0))
    assert f"{last.tau:.2f} per pass, {last.num_from_draft / 8:.0%} drafts" in shown.file.getvalue()


def test_accepted_draft_tokens_are_coloured_and_no_others():
    model, prompt = tiny_model(), "one, two, one, two, one,"
    (recorded,) = record(model, prompt, CONFIG, {"method": PromptLookup()})
    pieces = [piece for step in recorded.steps for piece in step.pieces]
    accepted = "".join(text for text, drafted in pieces if drafted)
    assert recorded.steps[-1].counts.num_from_draft > 0
    assert accepted
    assert drafted_text(coloured(recorded.steps)) == accepted


def test_methods_run_alone_and_first_runs_are_in_no_clock(monkeypatch):
    model, runs, result = tiny_model(), [], generate(tiny_model(), "one", CONFIG)

    def generate_once(model, prompt, config, drafter):
        seconds = 0.1 * (1 + runs.count(drafter))  # the first runs are the fastest here
        runs.append(drafter)
        metrics = dataclasses.replace(result.metrics, seconds=seconds)
        return dataclasses.replace(result, metrics=metrics)

    monkeypatch.setattr(race, "generate", generate_once)
    recordings = record(model, "", CONFIG, {"one": "a", "two": "b"})
    assert runs == ["a", "a", "a", "b", "b", "b"] * 2
    assert [recorded.name for recorded in recordings] == ["one", "two"]
    assert [recorded.seconds for recorded in recordings] == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("drafter", [None, PromptLookup()])
def test_steps_share_the_time_and_end_with_the_targets_own_token(drafter):
    result = generate(tiny_model(), "one, two, one, two, one,", CONFIG, drafter)
    recorded = recording_of("method", result, 3.0)
    num_steps = result.metrics.num_verify_steps
    assert len(recorded.steps) == num_steps
    np.testing.assert_allclose(
        [step.seconds for step in recorded.steps], 3.0 * np.arange(1, num_steps + 1) / num_steps
    )
    for step in recorded.steps[:-1]:
        assert step.counts.num_tokens - step.counts.num_from_draft == step.counts.num_steps


def test_plain_decoding_is_shown_for_four_seconds_and_never_faster_than_it_ran():
    def plain(seconds):
        return Recording("plain", [RecordedStep(Counts(1, 1), seconds, [])])

    assert slowdown(plain(0.32)) == 12.5
    assert slowdown(plain(4.0)) == 1
    assert slowdown(plain(60.0)) == 1


@pytest.mark.parametrize("num_panels", [1, 2, 10, 11])
@pytest.mark.parametrize(("width", "height"), [(40, 23), (80, 23), (160, 49), (200, 49)])
def test_columns_are_wide_or_else_as_few_as_the_height_allows(num_panels, width, height):
    def rows(columns):
        return -(-num_panels // columns)

    columns = columns_that_fit(num_panels, width, height)
    assert 1 <= columns <= num_panels
    if width // columns < 40 and columns > 1:
        assert rows(columns - 1) * 3 > height
    if columns < width // 16:
        assert rows(columns) * 3 <= height


def rows_shown(width, height, seconds, num_methods=11, slowed=12.5):
    recordings = [recording(seed, name=f"method {seed}") for seed in range(num_methods)]
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, height=height)
    console.print(Race(recordings, seconds, slowed))
    return recordings, screen(out.getvalue()).split("\n")


@pytest.mark.parametrize(("width", "height"), [(40, 24), (80, 24), (80, 60), (200, 50)])
@pytest.mark.parametrize("seconds", [0.0, 0.05, 1.0])
def test_all_methods_fit_on_the_screen(width, height, seconds):
    recordings, rows = rows_shown(width, height, seconds)
    assert max(map(cell_len, rows)) <= width
    assert len(rows) < height  # the cursor has a row too
    shown = "\n".join(rows)
    assert all(f"─ {recorded.name}" in shown for recorded in recordings)
    assert "12.5 times slower than it ran" in " ".join(rows[:2])


def test_panels_are_empty_at_first_and_have_the_last_words_and_figures_in_the_end():
    _, before = rows_shown(200, 50, 0.0)
    assert "own" not in "".join(before)
    assert "tau" not in "".join(before)
    (recorded, *_), after = rows_shown(200, 50, 1.0)
    counts, seconds = recorded.steps[-1].counts, recorded.seconds
    shown = "\n".join(after)
    assert shown.count("own") == sum(
        coloured(recording(seed).steps).plain.count("own") for seed in range(11)
    )
    assert f"method 0: {seconds:.3f} s" in shown
    assert f"{counts.num_tokens / seconds:.0f} tokens/s" in shown
    assert f"tau {counts.num_tokens / counts.num_steps:.2f}" in shown


def test_where_not_all_fits_the_end_of_the_text_is_shown():
    recorded = Recording("long", [RecordedStep(Counts(9, 1), 0.1, [("old " * 999 + "new", True)])])
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=40, height=24)
    console.print(Race([recorded], 0.1, 1.0))
    rows = screen(out.getvalue()).split("\n")
    assert "new" in rows[-2]
    assert "as fast as it ran" in " ".join(rows[:2])


def test_a_replay_takes_as_long_as_it_says_and_leaves_the_end_on_the_screen():
    recordings = [recording(seed, name=f"method {seed}") for seed in range(2)]
    last = max(recorded.seconds for recorded in recordings)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=40)
    start = time.perf_counter()
    replay(console, recordings, 3.0)
    assert time.perf_counter() - start >= 3 * last
    shown = screen(out.getvalue())
    assert shown.count("replay of measured times") == 1
    assert shown.count("own") == sum(len(recorded.steps) for recorded in recordings)


def shown_at(svg, seconds):
    """The text of each lane that a picture shows after so many of its seconds."""
    at = {
        name: float(percent) / 100 * float(lasts)
        for name, percent, lasts in re.findall(
            r"@keyframes (l\d+s\d+) \{ 0%, ([\d.]+)% .*\n\.\1 \{ animation: \1 ([\d.]+)s", svg
        )
    }
    texts = {}
    for names, text in re.findall(r'<text class="(l\d+s\d+(?: draft)?)"[^>]*>([^<]*)</text>', svg):
        name = names.split()[0]
        if at[name] <= seconds:
            lane = int(re.findall(r"\d+", name)[0])
            texts[lane] = texts.get(lane, "") + html.unescape(text)
    return texts


def test_a_picture_shows_each_step_at_its_time():
    recordings = [recording(seed, name=f"method {seed}") for seed in range(2)]
    svg = race_svg("demo", "a <prompt>", recordings, 100.0)
    document = ElementTree.fromstring(svg)
    assert document.tag.endswith("svg")
    assert "a &lt;prompt&gt;" in svg
    for seconds in (0.0, 1.0, 3.0, 60.0):
        shown = shown_at(svg, seconds)
        for lane, recorded in enumerate(recordings):
            there = recorded.until(seconds / 100)
            words = coloured(there).plain.split()
            assert abs(shown.get(lane, "").count("n") - "".join(words).count("n")) <= 1
    green = "".join(re.findall(r'draft"[^>]*>([^<]*)<', svg))
    drafted = "".join(drafted_text(coloured(recorded.steps)) for recorded in recordings)
    assert green.replace(" ", "") == drafted.replace(" ", "")


def test_a_picture_loads_nothing_and_runs_nothing():
    recorded = Recording("a&b", [RecordedStep(Counts(1, 1), 0.1, [("</text><script>", True)])])
    svg = race_svg("m", "", [recorded], 1.0)
    assert "<script" not in svg
    assert "http" not in svg.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "as fast as it ran" in svg
