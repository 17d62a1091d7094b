"""The suites of forms: forms, commands of their trainings, and the pages."""

import dataclasses
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks.forms import SPLITS, Form, forms
from benchmarks.harness import measure
from benchmarks.suites import SUITES
from benchmarks.suites import forms as suite
from jaxspec import generate
from jaxspec.cli import build_parser
from jaxspec.decoding.metrics import Metrics
from jaxspec.models import DFlashHead
from jaxspec.models.dflash import init_dflash_params
from tests.measure.models import filling_model

NUMBER = 40


def values_of(record: object, place: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    """Returns the values of a record's fields by their places, those of its parts included."""
    if isinstance(record, list):
        record = {str(index): each for index, each in enumerate(record)}
    if not isinstance(record, dict):
        return {place: str(record)}
    parts = [values_of(each, (*place, name)) for name, each in record.items()]
    return {at: value for part in parts for at, value in part.items()}


def test_every_value_of_a_record_is_fixed_or_stands_in_its_form():
    fixed: dict[tuple[str, ...], str] = {}
    kinds = set()
    for form in forms("test", NUMBER):
        values = values_of(json.loads(form.answer))
        kinds.add(values["type",])
        filled = dict(line.split(": ", 1) for line in form.prompt.splitlines()[1:-1])
        assert set(filled.values()) <= set(values.values())
        for place, value in values.items():
            if value not in filled.values():
                assert fixed.setdefault((values["type",], *place), value) == value
    assert len(kinds) == 4


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
    shown = suite.shown_trainings()
    assert [re.findall(r"--out FORMS/(\S+)", each) for each in shown.values()] == [
        [name] for name in commands
    ]
    assert not [each for each in shown.values() if "/checkpoints/" in each]


def test_a_folder_with_a_space_stays_one_word():
    for name, words in suite.trainings(Path("/my models")).items():
        assert words[-1] == f"/my models/{name}"
        assert not [word for word in words if word.startswith("models")]


def test_only_missing_models_are_trained(tmp_path, monkeypatch):
    ran = []

    def make(words, check):
        folder = Path(words[words.index("--out") + 1])
        folder.mkdir(exist_ok=True)
        ran.append(folder.name)
        return subprocess.CompletedProcess(words, folder.name == refused)

    monkeypatch.setattr(suite.subprocess, "run", make)
    monkeypatch.setattr(suite, "_LEARNED", {"train": 4, "align": 4})
    refused = "stage-2"
    made = [*suite.trainings(tmp_path)]

    def train() -> None:
        suite.train_missing(tmp_path, made, lambda name: None)

    with pytest.raises(ValueError, match=r"training of .*stage-2 failed"):
        train()
    refused = ""
    train()
    again = made.index("stage-2")
    assert ran == [*made[: again + 1], *made[again:]]
    train()
    assert len(ran) == len(made) + 1
    suite.train_missing(tmp_path / "other", made[:1], lambda name: None)
    assert ran[len(made) + 1 :] == made[:1]
    rows = [json.loads(line) for line in (tmp_path / "align.jsonl").read_text().splitlines()]
    assert [Form(**row) for row in rows] == [*forms("align", 4)]
    (tmp_path / "eagle" / "command.txt").write_text("jaxspec train eagle --steps 1")
    with pytest.raises(ValueError, match=r"folder: .*eagle was made by another command"):
        train()
    start = SimpleNamespace(digest="of other weights")
    monkeypatch.setattr(suite, "load", lambda name: start)
    with pytest.raises(ValueError, match=r"folder: .*scattered .*or from another demo-block-diff"):
        train()


@pytest.mark.parametrize("times", [1, 3])
def test_a_deepened_target_says_the_same(model, times):
    deeper = suite.deepened(model, times)
    assert deeper.config.num_layers == times * model.config.num_layers
    text = model.tokenizer.encode("How many are 2 + 3?")
    one, other = (generate(each, text, max_new_tokens=8, logprobs=True) for each in (model, deeper))
    assert one[0].tokens.tolist() == other[0].tokens.tolist()
    np.testing.assert_array_equal(one[0].logprobs, other[0].logprobs)


@pytest.mark.slow
@pytest.mark.usefixtures("shipped")
def test_the_suites_are_measured(model, head, data_folder, monkeypatch):
    pytest.importorskip("ai_edge_litert", reason="needs the extra `mobile`")
    drafter, filling = filling_model("deer", 4), filling_model("diffusion", 4)
    config = model.config.replace(num_layers=1)
    params = init_dflash_params(config, config.embed_dim, jax.random.key(0))
    flash = DFlashHead(params, config, taps=(0,), mask_token_id=0, block=17)
    stages = [*filter(None, suite._STAGES.values())]
    made = dict.fromkeys(stages, drafter) | {"draft": model}
    made |= {"demo-block-diffusion": drafter, "demo-deer": drafter, "diffusion": filling}
    made |= {"target": model, "demo": model, "demo-draft": model}
    monkeypatch.setattr(suite, "load", lambda place: made[Path(place).name])
    monkeypatch.setattr(suite, "load_eagle", lambda name, target: head)
    monkeypatch.setattr(suite, "load_dflash", lambda name, target: flash)
    monkeypatch.setattr(suite, "train_missing", lambda folder, names, advance: None)
    places = {name: Path(name) for name in ("demo", "demo-block-diffusion")}
    monkeypatch.setattr(suite, "shipped_folders", lambda: places)
    for name, value in {
        "_NUM_TESTED": 2,
        "_NEW_TOKENS": 8,
        "_LONGEST": 4,
        "_DEPTHS": (1, 4),
        "_CHAINS": (16,),
        "_TIMES_AS_DEEP": (1, 2),
        "_FILLS_AS_DEEP": (1, 2),
        "_PICTURED": 2,
        "_DRAFTS": (1, 2),
        "_NUM_TIMED": 1,
        "_FILE_WEIGHTS": ("float32", "int8"),
        "_FILE_CHAINS": (4,),
        "_NUM_IN_FILES": 1,
        "_FILE_TOKENS": 8,
    }.items():
        monkeypatch.setattr(suite, name, value)
    expected = {"forms": [22, 32, 2, 3, 3, 6, 10, 10, 0], "forms-diffusion": [7, 2, 7, 0]}
    for name, sizes in expected.items():
        asked = dataclasses.replace(SUITES[name], needs=(), max_new_tokens=8)
        count = 1 if asked.prompt_sets else None
        page = measure(name, asked, data_folder, count, 1, progress=False, folder="FORMS")
        assert page.agree
        assert [len(section.rows) for section in page.sections] == sizes
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
    lengths = suite._section_of_lengths({"forms": found})
    assert lengths.columns[2:] == ["0", "1-3", "4-7", "8-15", "16-23", "24-31", "32"]
    assert lengths.rows == [["forms", "DEER", "25%", "0%", "0%", "25%", "0%", "0%", "50%"]]
    (stage,) = suite._section_of_stages([suite.Stage("stage II", found["DEER"], (18.0, 20.0))]).rows
    assert stage[:3] == ["stage II", "19.00 [18.00, 20.00]", "32"]
    assert stage[3:] == ["0.75", "0.75", "0.75", "0.50"]


@pytest.mark.parametrize("accepted", [[0, 0], [32]])
def test_depths_that_no_draft_reached_have_no_figure(accepted):
    (row,) = suite._section_of_depths({"forms": {"DEER": metrics(accepted)}}).rows
    assert row[4] == ("1.00" if accepted[0] else "0.00")
    assert row[-1] == ("1.00" if accepted[0] else "-")
