"""The harness: turns, subsets, differences, prompts, and what a suite may be asked."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.harness import Suite, measure, measure_methods, token_divergences
from benchmarks.page import Page
from benchmarks.prompts import (
    DATA_FOLDER,
    GSM8K,
    HUMANEVAL,
    MBPP,
    PromptSet,
    SuitePrompt,
    first_that_fit,
    read_prompt_set,
)
from benchmarks.suites import SUITES
from jaxspec.decoding.metrics import Counts
from jaxspec.measure.comparison import Divergence
from jaxspec.measure.figures import DecodedText, Sample
from tests.benchmarks.conftest import ONE, TWO

ROOT = Path(__file__).resolve().parents[2]


class Scripted:
    """Emits what it is told to; seconds are the number of the call."""

    def __init__(self, texts=lambda method, prompt: [1, 2, 3, 4, 5]):
        self.calls: list[tuple[str, str]] = []
        self.texts = texts

    def decode(self, method, prompt, seed):
        self.calls.append((method, prompt, seed))
        tokens = self.texts(method, prompt)
        steps = len(tokens) if method == "plain" else 1
        counts = Counts(num_tokens=len(tokens), num_steps=steps)
        return Sample((DecodedText([0], tokens),), float(len(self.calls)), counts)


def test_methods_take_turns_in_rotating_order():
    runner = Scripted()
    measure_methods(runner, ["plain", "b", "c"], {0: "x", 1: "y"}, repeats=2, warm=[], seed=10)
    methods = [method for method, _, _ in runner.calls]
    assert methods == [
        *["plain", "b", "c", "b", "c", "plain", "b", "c", "plain", "c", "plain", "b"]
    ]
    assert [(p, s) for _, p, s in runner.calls] == [*[("x", 10)] * 3, *[("y", 11)] * 3] * 2


def test_a_prompt_is_decoded_untimed_before():
    runner = Scripted()
    found = measure_methods(runner, ["plain", "b"], {3: "x", 4: "y"})
    assert runner.calls[:2] == [("plain", "x", 3), ("b", "x", 3)]
    assert found["plain"].overall.seconds == 3 + 6  # calls 3 and 6: the first two do not count


def test_seconds_are_medians_and_tau_counts_the_bonus_token():
    found = measure_methods(Scripted(), ["plain", "b"], {0: "x"}, repeats=3, warm=[])
    assert found["plain"].overall.seconds == 4.0  # of calls 1, 4 and 5
    assert found["b"].overall.seconds == 3.0  # of calls 2, 3 and 6
    assert found["b"].overall.speedup == pytest.approx(4 / 3)
    assert found["plain"].overall.mean_acceptance_length == 1.0
    assert found["b"].overall.mean_acceptance_length == 5.0


def test_an_interval_needs_two_prompts_and_holds_the_speedup():
    alone = measure_methods(Scripted(), ["plain", "b"], {0: "x"}, warm=[])
    assert alone["b"].overall.speedup_interval is None
    prompts = dict(enumerate("uvwxyz"))
    figures = measure_methods(Scripted(), ["plain", "b"], prompts, warm=[])["b"].overall
    low, high = figures.speedup_interval
    assert low <= figures.speedup <= high


def test_low_repetition_is_chosen_by_the_plain_output():
    def texts(method, prompt):
        loops = (prompt == "loops") == (method == "plain")
        return [7] * 12 if loops else list(range(12))

    prompts, categories = {0: "loops", 1: "fresh"}, ["a", "b"]
    found = measure_methods(Scripted(texts), ["plain", "b"], prompts, categories=categories)
    for figures in found.values():
        assert figures.low_repetition.num_prompts == 1
        assert figures.by_category.keys() == {"a", "b"}
    assert found["plain"].low_repetition.repeated_ngrams == 0
    assert found["b"].low_repetition.repeated_ngrams > 0.5


def test_a_wrong_method_is_a_divergence():
    runner = Scripted(lambda method, prompt: [1, 2, 9] if method == "liar" else [1, 2, 3])
    found = measure_methods(runner, ["plain", "honest", "liar"], {5: "x"})
    assert found["plain"].divergences == found["honest"].divergences == ()
    (divergence,) = found["liar"].divergences
    assert divergence == Divergence(5, 2, 3, 9, None)
    assert not divergence.is_tie


def test_an_output_that_ends_early_differs_where_it_ends():
    long, short = (Sample((DecodedText([0], t),), 1.0, Counts()) for t in ([1, 2], [1]))
    assert token_divergences(0, long, short) == [Divergence(0, 1, 2, None, None)]
    assert token_divergences(0, short, long) == [Divergence(0, 1, None, 2, None)]
    assert token_divergences(0, long, long) == []


@pytest.mark.parametrize("name", SUITES)
def test_suites_are_well_formed(name, data_folder, model, shipped):
    """Prompts can be read, methods can be made or are not for the target, names are known."""
    suite = SUITES[name]
    assert suite.title
    assert suite.about
    assert bool(suite.prompt_sets) == (suite.prompts_per_set > 0)
    for group in suite.prompt_sets:
        read_prompt_set(group, data_folder)
    assert set(suite.batch_methods) <= set(suite.methods)
    assert bool(suite.methods) == bool(suite.models)
    other = type(model)(model.network, model.tokenizer, "another")
    if name != "methods":
        for make in suite.methods.values():
            make(other)


def test_titles_are_different():
    assert len({suite.title for suite in SUITES.values()}) == len(SUITES)


class TestAsked:
    """Requests that a suite takes or refuses."""

    def suite(self, **changes) -> Suite:
        def give(run):
            return Page([], {"given": dict(run.settings), "repeats": run.repeats})

        return Suite("T", "a", give, **changes)

    def test_the_command_repeats_what_was_asked(self, data_folder):
        suite = self.suite(
            prompt_sets=(GSM8K,), prompts_per_set=5, repeats=3, takes={"head": None, "rows": 4}
        )
        page = measure("some", suite, data_folder, 2, None, head="folder/my-head", rows=None)
        assert page.command == (
            "python -m benchmarks some --prompts-per-set 2 --repeats 3 --head my-head"
        )
        assert page.figures["given"] == {"head": "folder/my-head", "rows": 4}

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"head": "x"}, "takes no head"),
            ({"prompts_per_set": 2}, "takes no prompts_per_set"),
            ({"repeats": 2}, "takes no repeats"),
        ],
    )
    def test_a_setting_that_a_suite_does_not_take_is_refused(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            measure("some", self.suite(), **arguments)

    @pytest.mark.parametrize("key", ["prompts_per_set", "repeats"])
    def test_numbers_are_at_least_one(self, key, data_folder):
        suite = self.suite(prompt_sets=(GSM8K,), prompts_per_set=5, repeats=3)
        with pytest.raises(ValueError, match=f"{key} must be at least 1, got 0"):
            measure("some", suite, data_folder, **{key: 0})

    def test_missing_models_are_named(self, tmp_path, monkeypatch, data_folder):
        monkeypatch.setattr("jaxspec.checkpoint.folder._PACKAGE", tmp_path / "jaxspec")
        with pytest.raises(ValueError, match="demo-eagle"):
            measure("some", self.suite(needs=("demo-eagle",)))
        with pytest.raises(ValueError, match="demo, absent"):
            measure("some", self.suite(models=("demo", "absent")))

    def test_missing_data_names_the_command_that_fetches_it(self, tmp_path):
        suite = self.suite(prompt_sets=(GSM8K,), prompts_per_set=1)
        with pytest.raises(ValueError, match=r"python -m benchmarks\.fetch"):
            measure("some", suite, tmp_path)

    def test_the_default_folder_is_inside_the_repository(self):
        assert DATA_FOLDER == ROOT / "data" / "eval"


class TestPrompts:
    """Choice and shape of the prompts that are decoded."""

    def test_a_prompt_is_the_training_text_up_to_the_answer(self, data_folder):
        (only,) = read_prompt_set(HUMANEVAL, data_folder)
        assert only == SuitePrompt("HumanEval", "def add_one(number):\n")
        first, _ = read_prompt_set(MBPP, data_folder)
        assert first == SuitePrompt("MBPP", '"""\nAdd.\n\nf(1)\nf(2)\n"""\n')
        _, second, _ = read_prompt_set(GSM8K, data_folder)
        assert second == SuitePrompt("GSM8K", f"{ONE}\n")

    def test_the_shapes_are_those_of_training(self):
        path = ROOT / "checkpoints" / "demo" / "training.json"
        if not path.is_file():
            pytest.skip("needs checkpoints/demo/training.json, which is not here")
        sources = json.loads(path.read_text())["sources"]
        templates = {source["name"]: source["template"] for source in sources}
        assert templates["gsm8k"] == GSM8K.template + "{answer}"
        assert templates["mbpp"] == MBPP.template + "{code}\n"

    def test_the_first_that_leave_room_are_taken(self, model, data_folder):
        prompts = read_prompt_set(GSM8K, data_folder)
        assert first_that_fit(prompts, model, room=8, count=1) == prompts[1:2]
        assert first_that_fit(prompts, model, room=8, count=9) == prompts[1:]
        exactly = model.config.max_positions - len(f"{ONE}\n")
        assert len(ONE) == len(TWO)
        assert first_that_fit(prompts, model, room=exactly, count=9) == prompts[1:]
        assert first_that_fit(prompts, model, room=exactly + 1, count=9) == []
        mute = dataclasses.replace(model, tokenizer=None)
        with pytest.raises(ValueError, match=r"no tokenizer .* put the model's tokenizer\.json"):
            first_that_fit(prompts, mute, room=8, count=1)

    def test_categories_choose_rows_and_lists_have_entries(self, tmp_path):
        rows = [{"category": c, "turns": [f"{c}?", "And?"]} for c in ("qa", "rag", "qa")]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        group = PromptSet("questions", "rows.jsonl", "{turns[0]}\n", of=("qa",))
        assert read_prompt_set(group, tmp_path) == [SuitePrompt("questions", "qa?\n")] * 2

    def test_a_row_without_a_field_is_named(self, tmp_path):
        (tmp_path / "rows.jsonl").write_text('{"text": "t"}')
        group = PromptSet("code", "rows.jsonl", "{prompt}")
        with pytest.raises(ValueError, match=r"jsonl:1: has no field 'prompt', .* only 'text'"):
            read_prompt_set(group, tmp_path)
