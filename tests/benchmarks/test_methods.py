"""Suites of drafting methods, on tiny models in place of the shipped ones."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

import jaxspec
from benchmarks import methods
from benchmarks.harness import MethodFigures, Suite, measure
from benchmarks.methods import Assisted, batch_indices, measure_batches, num_params
from benchmarks.runners import ASSISTED, TRANSFORMERS
from benchmarks.suites import SUITES
from benchmarks.suites.shipped import dynamic_tree
from jaxspec.commands import methods as made
from jaxspec.commands.methods import if_it_drafts_for, measure_block_costs
from jaxspec.core.tree import EAGLE_PATHS
from jaxspec.decoding.metrics import Counts
from jaxspec.decoding.request import row_bucket_of
from jaxspec.drafters import LoadedDrafter
from jaxspec.measure import step
from jaxspec.measure.comparison import Divergence
from jaxspec.measure.figures import DecodedText, Sample
from jaxspec.measure.step import StepTimes
from jaxspec.models import Diffusion, Network
from jaxspec.tuning import draft_batches
from tests.benchmarks.conftest import ONE, TIMES, TWO
from tests.benchmarks.test_page import tables
from tests.checkpoint.networks import random_network
from tests.foreign import LIKE
from tests.measure.models import WrongRoot


def small(name: str, **changes) -> Suite:
    """A suite with short outputs; `methods` are names of those to keep."""
    suite = dataclasses.replace(SUITES[name], max_new_tokens=8)
    if "methods" in changes:
        changes["methods"] = {
            method: suite.methods[method] if isinstance(method, str) else method
            for method in changes["methods"]
        }
    return dataclasses.replace(suite, **changes)


def run(monkeypatch, root, name, suite, data_folder, prompts_per_set=1):
    """Measures without `transformers`; steps are not really timed."""
    monkeypatch.setattr(step, "measure_drafter", lambda *_, **__: TIMES)
    monkeypatch.setattr(methods, "measure_tree_building", lambda *_, **__: 0.001)
    monkeypatch.setattr("jaxspec.checkpoint.folder._PACKAGE", root.parent / "jaxspec")
    monkeypatch.setattr(methods, "why_not_here", lambda: "torch is at home")
    return measure(name, suite, data_folder, prompts_per_set, 1, progress=False)


@pytest.fixture(scope="module")
def page(checkpoints, data_folder):
    kept = ("prompt lookup", "draft model", "EAGLE-3, searched tree")
    with pytest.MonkeyPatch.context() as monkeypatch:
        suite = small("shipped", methods=kept, models=("demo", "absent"))
        return run(monkeypatch, checkpoints, "shipped", suite, data_folder, 2)


@pytest.fixture(scope="module")
def trees(checkpoints, data_folder):
    kept = ("searched tree", "EAGLE-2, as searched", "EAGLE-3, searched tree")
    with pytest.MonkeyPatch.context() as monkeypatch:
        suite = small("trees", methods=kept, temperatures={"greedy": 0.0})
        return run(monkeypatch, checkpoints, "trees", suite, data_folder, 2)


def test_tables_hold_the_figures(page):
    assert page.agree
    sets, greedy, *_ = found = tables(page.as_markdown())
    assert all(len(line) == len(table[0]) for table in found for line in table)
    assert [line[-1] for line in sets[2:]] == ["2", "1", "2"]
    heading, _, *rows = greedy
    assert [row[0] for row in rows] == ["plain", "prompt lookup", "draft model"]
    comparison = page.figures["targets"]["demo"].settings["greedy"].comparison
    for row, measured in zip(rows, comparison.rows, strict=True):
        cells = dict(zip(heading, row, strict=True))
        assert cells["tau"] == f"{measured.overall.mean_acceptance_length:.2f}"
        assert cells["tokens/s"] == f"{measured.overall.tokens_per_second:.0f}"
        by_category = measured.by_category
        assert cells["MBPP tau"] == f"{by_category['MBPP'].mean_acceptance_length:.2f}"
    assert [row[1] for row in rows] == ["reference", "5 of 5 same", "5 of 5 same"]


def test_every_column_is_explained(page):
    explained = {
        note.split("**")[1]
        for section in page.sections
        for note in section.notes[:19]
        if note.startswith("**")
    }
    for table in tables(page.as_markdown())[1:]:
        for heading in table[0]:
            name = heading.split("[")[0].split()[-1]
            assert name in {"method", *explained}


def test_what_is_missing_is_in_the_figures(page, model):
    assert page.figures["missing"] == ["absent"]
    target = page.figures["targets"]["demo"]
    assert target.left_out == ("EAGLE-3, searched tree",)
    assert target.num_params == num_params(model.params)
    assert target.settings["greedy"].assisted == "torch is at home"


def test_figures_are_plain_values(page):
    shown = json.loads(json.dumps(page.as_dict(), allow_nan=False))["targets"]["demo"]
    greedy = shown["settings"]["greedy"]
    assert greedy["comparison"]["config"]["max_new_tokens"] == 8
    assert greedy["outputs_agree"] is True


def test_no_folder_is_in_the_page(page, checkpoints, data_folder):
    text = page.as_markdown()
    assert str(checkpoints) not in text
    assert str(data_folder) not in text


def test_steps_are_in_the_table_of_trees(trees):
    (table,) = (each for each in tables(trees.as_markdown()) if "building" in each[0])
    assert [row[:6] for row in table[2:]] == [
        ["plain", "0", "2.00", "", "5.00", "8.00"],
        ["searched tree", "3", "2.00", "", "5.00", "8.00"],
        ["EAGLE-2, as searched", "3", "2.00", "1.00", "5.00", "8.00"],
    ]
    assert trees.agree
    steps = trees.as_dict()["targets"]["demo"]["settings"]["greedy"]["steps"]
    assert steps["EAGLE-2, as searched"]["building"] == 0.001
    assert steps["EAGLE-2, as searched"]["times"]["draft_seconds"] == 0.002


def test_a_dynamic_tree_has_the_bounds_of_a_static_one(head):
    drafter = dynamic_tree(head, EAGLE_PATHS).drafter
    assert (drafter.num_nodes, drafter.depth, drafter.beam) == (25, 4, 4)
    assert dynamic_tree(head, ((0,),)).drafter.depth == 1


def test_tasks_are_compared(checkpoints, data_folder, monkeypatch):
    label = "temperature 0.7, top-p 0.9"
    kept = ("layer skip, as searched", "layer skip, K = 8, adaptive")
    suite = small("skips", methods=kept, temperatures={label: 0.7})
    page = run(monkeypatch, checkpoints, "skips", suite, data_folder)
    target = page.figures["targets"]["demo"]
    comparison = target.settings[label].comparison
    assert [row.name for row in comparison.rows] == ["plain", *kept]
    for row in comparison.rows:
        assert {"HumanEval", "chat", "summarisation"} <= row.by_category.keys()
    assert comparison.config.top_p == 0.9
    assert target.draft_params == {}  # no second model


def test_each_setting_is_what_its_name_says(shipped, model):
    target = dataclasses.replace(model, name="demo")
    drafters = {n: make(target) for n, make in SUITES["skip-settings"].methods.items()}
    searched = drafters.pop("as searched")
    assert (searched.num_speculative_tokens, searched.threshold) == (2, 0.5)
    fields = {
        "alpha": "target_rate",
        "epsilon": "step",
        "beta1": "rate_memory",
        "beta2": "threshold_memory",
    }
    usual = dataclasses.asdict(drafters["adaptive"].adaptive)
    for name, drafter in drafters.items():
        set_here = dict(part.split(" = ") for part in name.split(", ") if " = " in part)
        length = float(set_here.pop("K", 8))
        assert drafter.num_speculative_tokens == length, name
        if drafter.adaptive is None:
            _, _, threshold = name.partition("threshold ")
            assert drafter.threshold == float(threshold or searched.threshold), name
        else:
            changed = {fields[key]: float(value) for key, value in set_here.items()}
            assert dataclasses.asdict(drafter.adaptive) == {**usual, **changed}, name
            assert all(usual[field] != value for field, value in changed.items()), name
    other = dataclasses.replace(model, name="another")
    assert SUITES["skips"].methods["layer skip, as searched"](other) is None


def test_a_method_that_lies_is_caught(checkpoints, data_folder, monkeypatch):
    suite = dataclasses.replace(
        small("shipped", temperatures={"greedy": 0.0}), methods={"liar": lambda _: WrongRoot()}
    )
    page = run(monkeypatch, checkpoints, "shipped", suite, data_folder)
    assert not page.agree
    comparison = page.figures["targets"]["demo"].settings["greedy"].comparison
    assert len(comparison["liar"].divergences) == 3


def test_transformers_are_compared_with_our_outputs(checkpoints, data_folder, monkeypatch):
    pytest.importorskip("torch", reason="needs the extra `parity`")
    pytest.importorskip("transformers", reason="needs the extra `parity`")
    why_not_here = methods.why_not_here
    suite = small("shipped", methods=(), temperatures={"greedy": 0.0})
    monkeypatch.setattr("jaxspec.checkpoint.folder._PACKAGE", checkpoints.parent / "jaxspec")
    monkeypatch.setattr(step, "measure_drafter", lambda *_, **__: TIMES)
    assert why_not_here() is None
    page = measure("shipped", suite, data_folder, 1, 1, progress=False)
    rows = page.figures["targets"]["demo"].settings["greedy"].assisted.rows
    assert [row.name for row in rows] == [TRANSFORMERS, ASSISTED]
    assert [row.divergences for row in rows] == [(), ()]
    for figures in (row.overall for row in rows):
        kept = round(figures.mean_accepted_tokens * figures.num_verify_steps)
        assert figures.num_verify_steps + kept == figures.num_tokens == 3 * 8
    plain, own = rows
    assert plain.overall.mean_acceptance_length == plain.overall.speedup == 1.0
    assert own.overall.mean_acceptance_length > 1.0  # the assistant has the target's weights
    assert page.agree


@pytest.mark.parametrize(("gap", "agree"), [(1e-6, True), (0.5, False), (None, False)])
def test_only_a_tie_may_leave_our_output(page, gap, agree):
    setting = page.figures["targets"]["demo"].settings["greedy"]
    figures = setting.comparison.plain.overall
    row = MethodFigures("other", figures, None, {}, (Divergence(0, 3, 1, 2, gap),))
    assert setting.outputs_agree
    assert setting._replace(assisted=Assisted((row,), "v")).outputs_agree is agree
    assert setting._replace(batches={2: {"other": row}}).outputs_agree is agree


class TestBatches:
    """Rows decoded together."""

    def test_batches_hold_every_prompt_and_some_of_each_kind(self):
        assert batch_indices(4, 1) == [[0], [1], [2], [3]]
        assert batch_indices(4, 2) == [[0, 2], [1, 3]]
        assert batch_indices(4, 3) == [[0, 2, 0], [1, 3, 1]]

    def test_a_method_that_lies_is_caught_in_every_row(self, model):
        config = jaxspec.GenerationConfig(max_new_tokens=4)
        prompts, liar = [ONE, ONE, TWO, TWO], {"liar": WrongRoot()}
        found = measure_batches(model, prompts, liar, config, (1, 2), 1, progress=False)
        assert [len(found[size]["liar"].divergences) for size in (1, 2)] == [4, 4]
        assert [each.prompt_index for each in found[2]["liar"].divergences] == [0, 2, 1, 3]
        assert found[2]["plain"].divergences == ()
        assert found[2]["plain"].overall.speedup == 1
        assert found[2]["plain"].overall.speedup_interval == (1, 1)

    def test_speed_ups_are_of_all_batches_together(self, model, monkeypatch):
        """Two batches of 10 tokens take 2 and 4 s plainly, 1 and 4 s with drafts."""
        seconds = {"plain": {"a": 2.0, "b": 4.0}, "m": {"a": 1.0, "b": 4.0}}

        class Given:
            def __init__(self, model, methods, config, carry):
                self.methods = methods

            def decode(self, method, prompt, seed):
                counts = Counts(num_tokens=10, num_steps=5)
                rows = tuple(DecodedText([0], [1]) for _ in prompt)
                return Sample(rows, seconds[method][prompt[0]], counts)

        monkeypatch.setattr(methods, "JaxRunner", Given)
        monkeypatch.setattr(methods, "find_divergence", lambda *_: None)
        shape = SimpleNamespace(tokens=np.zeros((2, 16)))
        monkeypatch.setattr(methods, "prepare", lambda *_: SimpleNamespace(prompts=shape))
        config = jaxspec.GenerationConfig(max_new_tokens=4)
        found = measure_batches(
            model, ["a", "b", "c", "d"], {"m": WrongRoot()}, config, (2,), 3, progress=False
        )
        figures = found[2]["m"].overall
        assert figures.tokens_per_second == 4.0
        assert figures.speedup == pytest.approx(6 / 5)
        assert figures.speedup_interval == pytest.approx((1.0, 2.0))
        assert figures.mean_acceptance_length == 2.0

    def test_sampled_batches_are_refused(self, model):
        config = jaxspec.GenerationConfig(max_new_tokens=4, temperature=1.0)
        with pytest.raises(ValueError, match="temperature must be 0"):
            measure_batches(model, [ONE], {}, config, (1,), 1)
        greedy = jaxspec.GenerationConfig(max_new_tokens=4)
        with pytest.raises(ValueError, match="must be at least 1"):
            measure_batches(model, [ONE], {}, greedy, (0,), 1)


class TestBlocks:
    """Block drafters of the suite `methods`, with the target's own weights as a diffusion model."""

    @pytest.fixture(scope="class")
    def blocks(self, model, checkpoints, data_folder, tmp_path_factory):
        root = tmp_path_factory.mktemp("with-deer") / "checkpoints"
        shutil.copytree(checkpoints, root)
        diffusion = Diffusion(3, shift=True, block=4)
        network = Network(model.params, model.config.replace(diffusion=diffusion))
        jaxspec.save(dataclasses.replace(model, network=network), root / "demo-deer")
        suite = small(
            "methods",
            methods=("DEER, chain of 4", "DEER, tree of 4", "EAGLE-3, searched tree"),
            temperatures={"greedy": 0.0},
            batches=(1, 2),
            batch_methods=("DEER, chain of 4",),
        )
        with pytest.MonkeyPatch.context() as monkeypatch:
            return run(monkeypatch, root, "methods", suite, data_folder)

    def test_chains_and_trees_give_the_text_of_plain_decoding(self, blocks):
        assert blocks.agree
        assert blocks.figures["missing"] == []
        (target,) = blocks.figures["targets"].values()
        assert target.left_out == ("EAGLE-3, searched tree",)

    def test_batches_are_measured(self, blocks):
        figures = blocks.as_dict()["targets"]["demo"]["settings"]["greedy"]["batches"]
        assert figures["2"].keys() == {"plain", "DEER, chain of 4"}
        assert figures["2"]["plain"]["overall"]["mean_acceptance_length"] == 1.0
        assert figures["2"]["DEER, chain of 4"]["divergences"] == []
        assert ["method", "1 row", "2 rows"] in [t[0] for t in tables(blocks.as_markdown())]

    def test_an_adaptive_chain_is_told_what_passes_cost_here(self, model, monkeypatch):
        """Checked by hand: of 9 tokens a pass takes 4 ms, of one 2 ms, and drafting 1 ms."""
        plain = StepTimes(step=0.003, draft=0.0, target=0.002, width=1.0)
        whole = StepTimes(step=0.008, draft=0.001, target=0.004, width=9.0)

        def measure_drafter(params, drafter, warp, repeats):
            return plain if isinstance(drafter, jaxspec.NoDraft) else whole

        monkeypatch.setattr(made, "measure_drafter", measure_drafter)
        costs = measure_block_costs(model, LoadedDrafter(jaxspec.Deer(8), model.network))
        assert (costs.draft_cost, costs.token_cost) == (0.5, 0.1)  # 0.125 to one digit

    def test_only_a_drafter_for_another_target_is_left_out(self, model):
        network = Network(model.params, model.config.replace(diffusion=Diffusion(3, shift=True)))
        drafter = jaxspec.Deer.of(dataclasses.replace(model, network=network))
        assert if_it_drafts_for(model, drafter) is drafter
        larger = random_network(model.config.replace(vocab_size=model.vocab_size + 1))
        other = dataclasses.replace(model, tokenizer=None, network=larger)
        assert if_it_drafts_for(other, drafter._replace(tokenizer=None)) is None
        too_long = drafter._replace(drafter=jaxspec.Deer(4096))
        with pytest.raises(
            ValueError, match="up to 4096 tokens at once, and the context of tiny holds 2048"
        ):
            if_it_drafts_for(model, too_long)

    def test_a_draft_model_with_another_tokenizer_drafts_what_both_have(self, model, monkeypatch):
        tokenizers = {name: make() for name, make in LIKE.items()}
        draft, target = (
            dataclasses.replace(
                model,
                tokenizer=tokenizers[name],
                network=random_network(model.config.replace(vocab_size=300)),
            )
            for name in ("llama2", "llama3")
        )
        monkeypatch.setattr(made, "shipped_models", lambda: {"small": None})
        monkeypatch.setattr(made, "load", lambda name: draft)
        make = made.with_draft_model("small", num_speculative_tokens=2)
        assert make(draft).params is draft.network
        assert make(target).params.shared.any()
        assert make(dataclasses.replace(target, tokenizer=None, network=model.network)) is None


def test_batches_have_the_rows_that_programs_have():
    """Others are filled up, and the time of rows that nobody asked for would count."""
    for suite in SUITES.values():
        assert [row_bucket_of(size) for size in suite.batches] == list(suite.batches)


def test_a_static_tree_has_the_passes_of_a_dynamic_one():
    twin = methods.same_passes(jaxspec.Eagle2(num_nodes=20, depth=3, beam=4, taps=(2, 4, 5)))
    assert draft_batches(twin.paths) == (1, 4, 4, 4)  # the root's, then `depth` of `beam`
    assert twin.taps == (2, 4, 5)
