"""The suite `forms`: forms, commands of its trainings, and the page."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.forms import SPLITS, Form, forms
from benchmarks.harness import measure
from benchmarks.suites import SUITES
from benchmarks.suites import forms as suite
from jaxspec.cli import build_parser
from jaxspec.decoding.metrics import Metrics
from tests.measure.models import filling_model

NUMBER = 40


def values_of(record: object) -> list[object]:
    """Returns the values of a record's fields, those of its parts included."""
    if isinstance(record, dict):
        record = list(record.values())
    if isinstance(record, list):
        return [value for each in record for value in values_of(each)]
    return [record]


def keys_of(record: object) -> list[str]:
    """Returns the fields of a record and of its parts, in order."""
    if isinstance(record, dict):
        return [key for name, each in record.items() for key in (name, *keys_of(each))]
    return [key for each in record for key in keys_of(each)] if isinstance(record, list) else []


def test_every_value_of_a_record_is_fixed_or_stands_in_its_form():
    fixed: dict[str, list[str]] = {}
    for form in forms("test", NUMBER):
        record = json.loads(form.answer)
        assert fixed.setdefault(record["type"], keys_of(record)) == keys_of(record)
        filled = dict(line.split(": ", 1) for line in form.prompt.splitlines()[1:-1])
        written = [str(value) for value in values_of(record)]
        assert set(filled.values()) <= set(written)
    assert len(fixed) == 4


def test_forms_are_the_same_every_time_and_in_one_split_only():
    texts = {split: [form.prompt for form in forms(split, NUMBER)] for split in SPLITS}
    assert texts == {split: [form.prompt for form in forms(split, NUMBER)] for split in SPLITS}
    assert len({text for each in texts.values() for text in each}) == 3 * NUMBER


def test_the_trainings_are_commands(tmp_path):
    commands = suite.trainings(tmp_path)
    made = [tmp_path / name for name in commands]
    for number, words in enumerate(commands.values()):
        args = build_parser(words).parse_args(words)
        assert args.out == made[number]
        # A training reads only folders that were made before.
        later = [str(folder) for folder in made[number + 1 :]]
        assert not [word for word in words if word in later]
    shown = suite._section_of_trainings(tmp_path).text[1]
    assert str(tmp_path) not in shown
    assert re.findall(r"--out FORMS/(\S+)", shown) == list(commands)


def test_only_missing_models_are_trained(tmp_path, monkeypatch):
    ran = []

    def make(words, check):
        folder = Path(words[words.index("--out") + 1])
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        ran.append(folder.name)

    monkeypatch.setattr(suite.subprocess, "run", make)
    monkeypatch.setattr(suite, "_LEARNED", {"train": 4, "align": 4})
    suite.train_missing(tmp_path, lambda name: None)
    assert ran == list(suite.trainings(tmp_path))
    (tmp_path / "stage-2" / "config.json").unlink()
    (tmp_path / "stage-2").rmdir()
    suite.train_missing(tmp_path, lambda name: None)
    assert ran[-1] == "stage-2"
    assert len(ran) == len(suite.trainings(tmp_path)) + 1
    rows = [json.loads(line) for line in (tmp_path / "align.jsonl").read_text().splitlines()]
    assert [Form(**row) for row in rows] == [*forms("align", 4)]


@pytest.mark.slow
@pytest.mark.usefixtures("shipped")
def test_the_suite_is_measured(model, head, data_folder, monkeypatch):
    drafter, filling = filling_model("deer", 4), filling_model("diffusion", 4)
    made = {"stage-1-scattered": drafter, "stage-1-suffix": drafter, "stage-2": drafter}
    made |= {"demo-block-diffusion": drafter, "demo-deer": drafter, "diffusion": filling}
    made |= {"target": model, "demo": model, "demo-draft": model}
    monkeypatch.setattr(suite, "load", lambda place: made[Path(place).name])
    monkeypatch.setattr(suite, "load_eagle", lambda name, target: head)
    monkeypatch.setattr(suite, "train_missing", lambda folder, advance: None)
    places = {name: Path(name) for name in ("demo", "demo-block-diffusion")}
    monkeypatch.setattr(suite, "shipped_folders", lambda: places)
    for name, value in {
        "_NUM_TESTED": 2,
        "_NEW_TOKENS": 8,
        "_LONGEST": 4,
        "_DEPTHS": (1, 4),
    }.items():
        monkeypatch.setattr(suite, name, value)
    asked = dataclasses.replace(SUITES["forms"], needs=(), max_new_tokens=8)
    page = measure("forms", asked, data_folder, 1, 1, progress=False, model="FORMS")
    assert page.agree
    sizes = [len(section.rows) for section in page.sections]
    assert sizes == [11, 4, 6, 2, 9, 0]
    json.dumps(page.as_dict(), allow_nan=False)


def metrics(accepted: list[int]) -> Metrics:
    """Returns figures of chains of 32, made up."""
    steps = np.bincount(accepted, minlength=33)
    tokens = sum(accepted) + len(accepted)
    return Metrics(
        num_tokens=tokens,
        num_steps=len(accepted),
        accepted=tuple(int(n) for n in steps),
        drafted=(0,) * 32 + (len(accepted),),
    )


def test_the_page_counts_depths_and_lengths():
    found = {"DEER": metrics([32, 32, 8, 0])}
    depths = suite._section_of_depths({"forms": found})
    (row,) = depths.rows
    assert row[:4] == ["forms", "DEER", "19.00", "32"]
    by_depth = dict(zip(depths.columns[4:], row[4:], strict=True))
    assert by_depth["1"] == "0.75"
    assert by_depth["8"] == "1.00"
    assert by_depth["12"] == "1.00"
    lengths = suite._section_of_lengths(found)
    assert lengths.columns[1:] == ["0", "1-3", "4-7", "8-15", "16-23", "24-31", "32"]
    assert lengths.rows == [["DEER", "25%", "0%", "0%", "25%", "0%", "0%", "50%"]]
    (stage,) = suite._section_of_stages([suite.Stage("stage II", found["DEER"], (18.0, 20.0))]).rows
    assert stage[:3] == ["stage II", "19.00 [18.00, 20.00]", "32"]
    assert stage[3:] == ["0.75", "0.75", "0.75", "0.50"]


@pytest.mark.parametrize("accepted", [[0, 0], [32]])
def test_depths_that_no_draft_reached_have_no_figure(accepted):
    (row,) = suite._section_of_depths({"forms": {"DEER": metrics(accepted)}}).rows
    assert row[4] == ("1.00" if accepted[0] else "0.00")
    assert row[-1] == ("1.00" if accepted[0] else "-")
