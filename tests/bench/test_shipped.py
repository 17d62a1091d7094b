"""`jaxspec bench --suite shipped`: which prompts, which rows, and the page that is written."""

import dataclasses
import gzip
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec.bench import assisted, batches, shipped
from jaxspec.bench.assisted import Pass, generation_of
from jaxspec.bench.batches import measure_batches
from jaxspec.bench.comparison import Divergence
from jaxspec.bench.page import write_part
from jaxspec.bench.results import MADE_BY, as_dict, as_markdown
from jaxspec.bench.shipped import (
    SUITES,
    Assisted,
    AssistedRow,
    PromptSet,
    SuitePrompt,
    dynamic_tree,
    first_that_fit,
    if_it_drafts_for,
    measure,
    measure_costs,
    read_prompt_set,
)
from jaxspec.bench.step import StepTimes
from jaxspec.checkpoint import hub, save_eagle
from jaxspec.cli import main
from jaxspec.commands import bench as command
from jaxspec.core.tree import EAGLE_PATHS
from jaxspec.drafters import LoadedDrafter
from jaxspec.models import Diffusion, EagleHead, Network, init_eagle_params
from tests.bench.models import WrongRoot
from tests.checkpoint.networks import random_network

ROOT = Path(__file__).resolve().parents[2]
GSM8K, HUMANEVAL, MBPP = SUITES["shipped"].prompt_sets
(EAGLE_GSM8K,) = SUITES["trees"].prompt_sets
ONE, TWO = "How many are 1 + 1?", "How many are 2 + 3?"
# All but the first have 17 to 32 bytes, so that their programs are the same.
ROWS = {
    GSM8K.file: [{"question": "x" * 3000}, {"question": ONE}, {"question": TWO}],
    HUMANEVAL.file: [{"prompt": "def add_one(number):\n"}],
    MBPP.file: [
        {"text": "Add.\r\n", "test_list": ["f(1)", "f(2)"]},
        {"text": "Subtract.", "test_list": []},
    ],
    EAGLE_GSM8K.file: [{"turns": [ONE]}, {"turns": [TWO]}],
    "spec_bench/question.jsonl.gz": [
        {"category": "roleplay", "turns": [ONE]},
        {"category": "summarization", "turns": [TWO]},
    ],
}


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    for file, rows in ROWS.items():
        path = folder / file
        path.parent.mkdir()
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return folder


@pytest.fixture(scope="module")
def checkpoints(model, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("root")
    for name in ("demo", "demo-draft"):
        jaxspec.save(model, root / "checkpoints" / name)
    return root / "checkpoints"


def small_suite(monkeypatch, checkpoints: Path, name: str = "shipped", **changes) -> None:
    """Makes the suite short, of tiny models, without `transformers`; steps are not really timed."""
    suite = dataclasses.replace(SUITES[name], max_new_tokens=8, **changes)
    monkeypatch.setitem(SUITES, name, suite)
    times = StepTimes(step=0.008, draft=0.002, target=0.005, width=4.0)
    monkeypatch.setattr(shipped, "measure_drafter", lambda *_, **__: times)
    monkeypatch.setattr(shipped, "measure_tree_building", lambda *_, **__: 0.001)
    monkeypatch.setattr(hub, "_PACKAGE", checkpoints.parent / "jaxspec")
    monkeypatch.setattr(shipped, "why_not_here", lambda: "torch is at home")


@pytest.fixture(scope="module")
def result(checkpoints, data_folder):
    with pytest.MonkeyPatch.context() as monkeypatch:
        small_suite(monkeypatch, checkpoints)
        return measure("shipped", data_folder, prompts_per_set=2, repeats=1, progress=False)


@pytest.fixture(scope="module")
def head(model) -> EagleHead:
    config = model.config.replace(num_layers=1)
    return EagleHead(init_eagle_params(config, True, jax.random.key(0)), config)


@pytest.fixture(scope="module")
def trees(head, checkpoints, data_folder, tmp_path_factory):
    """The suite of trees, with a random head and a small tree beside it."""
    root = tmp_path_factory.mktemp("with-head")
    shutil.copytree(checkpoints, root / "checkpoints")
    save_eagle(head, root / "checkpoints" / "demo-eagle")
    (root / "checkpoints" / "demo-eagle" / "tree.json").write_text('{"paths": [[0], [1], [0, 0]]}')
    methods = SUITES["trees"].methods
    kept = ("searched tree", "EAGLE-2, as searched", "EAGLE-3, searched tree")
    with pytest.MonkeyPatch.context() as monkeypatch:
        small_suite(
            monkeypatch,
            root / "checkpoints",
            "trees",
            methods={name: methods[name] for name in kept},
            temperatures={"greedy": 0.0},
        )
        return measure("trees", data_folder, prompts_per_set=2, repeats=1, progress=False)


@pytest.fixture(scope="module")
def with_skips(checkpoints, tmp_path_factory) -> Path:
    """The folder of checkpoints with a set for the tiny target in it."""
    root = tmp_path_factory.mktemp("with-skips")
    shutil.copytree(checkpoints, root / "checkpoints")
    skips = {"num_layers": 1, "attention": [0], "mlp": []}
    settings = {"num_speculative_tokens": 2, "threshold": 0.5}
    folder = root / "checkpoints" / "demo-skips"
    folder.mkdir()
    (folder / "skips.json").write_text(json.dumps({**skips, **settings}))
    return root / "checkpoints"


@pytest.fixture(scope="module")
def skips(with_skips, data_folder):
    """The suite of tasks, of the methods that skip layers."""
    methods = SUITES["skips"].methods
    kept = ("layer skip, as searched", "layer skip, K = 8, adaptive")
    with pytest.MonkeyPatch.context() as monkeypatch:
        small_suite(
            monkeypatch,
            with_skips,
            "skips",
            methods={name: methods[name] for name in kept},
            temperatures={"temperature 0.7, top-p 0.9": 0.7},
        )
        return measure("skips", data_folder, prompts_per_set=1, repeats=1, progress=False)


class TestPrompts:
    """Which prompts of the files are decoded, and in what shape."""

    def test_a_prompt_is_the_training_text_up_to_the_answer(self, data_folder):
        (only,) = read_prompt_set(HUMANEVAL, data_folder)
        assert only == SuitePrompt("HumanEval", "def add_one(number):\n")
        first, _ = read_prompt_set(MBPP, data_folder)
        assert first == SuitePrompt("MBPP", '"""\nAdd.\n\nf(1)\nf(2)\n"""\n')
        _, second, _ = read_prompt_set(GSM8K, data_folder)
        assert second == SuitePrompt("GSM8K", f"{ONE}\n")

    def test_the_shapes_are_those_of_training(self):
        if not (ROOT / "checkpoints" / "demo" / "training.json").is_file():
            pytest.skip("needs checkpoints/demo/training.json, which is not here")
        settings = json.loads((ROOT / "checkpoints" / "demo" / "training.json").read_text())
        templates = {source["name"]: source["template"] for source in settings["sources"]}
        assert templates["gsm8k"] == GSM8K.template + "{answer}"
        assert templates["mbpp"] == MBPP.template + "{code}\n"

    def test_the_first_that_leave_room_are_taken(self, model, data_folder):
        prompts = read_prompt_set(GSM8K, data_folder)
        assert first_that_fit(prompts, model, room=8, count=1) == prompts[1:2]
        assert first_that_fit(prompts, model, room=8, count=9) == prompts[1:]
        exactly = model.config.max_positions - len(f"{ONE}\n")
        assert first_that_fit(prompts, model, room=exactly, count=9) == prompts[1:]
        assert first_that_fit(prompts, model, room=exactly + 1, count=9) == []

    def test_categories_choose_rows_and_lists_have_entries(self, tmp_path):
        rows = [{"category": c, "turns": [f"{c}?", "And?"]} for c in ("qa", "rag", "qa")]
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        group = PromptSet("questions", "rows.jsonl", "{turns[0]}\n", of=("qa",))
        assert read_prompt_set(group, tmp_path) == [SuitePrompt("questions", "qa?\n")] * 2

    def test_a_row_without_a_field_is_named(self, tmp_path):
        (tmp_path / "humaneval").mkdir()
        (tmp_path / HUMANEVAL.file).write_bytes(gzip.compress(b'{"text": "t"}'))
        with pytest.raises(ValueError, match=r"gz:1: has no field 'prompt', .* only 'text'"):
            read_prompt_set(HUMANEVAL, tmp_path)


class TestPage:
    """What `as_markdown` says of a measured suite."""

    def tables(self, page: str) -> list[list[list[str]]]:
        blocks = (block.splitlines() for block in page.split("\n\n") if block.startswith("|"))
        return [[line.strip("|").split("|") for line in block] for block in blocks]

    def test_it_begins_with_its_command(self, result):
        typed = "jaxspec bench --suite shipped --prompts-per-set 2 --repeats 1"
        head = f"# Figures of the shipped models\n\n{MADE_BY}"
        assert as_markdown(result).startswith(f"{head}\n    {typed}\n")

    def test_a_suite_replaces_its_own_part_of_the_page(self, result, tmp_path):
        page, other = tmp_path / "page.md", "# Other figures\n\n## demo\n\ntext"
        page.write_text(f"# Figures of the shipped models\n\nold\n\n{other}\n")
        write_part(as_markdown(result), page)
        assert page.read_text() == f"{as_markdown(result)}\n{other}\n"
        write_part(as_markdown(result), page)
        assert page.read_text() == f"{as_markdown(result)}\n{other}\n"

    def test_tables_hold_the_figures(self, result):
        sets, greedy, *_ = tables = self.tables(as_markdown(result))
        assert all(len(line) == len(table[0]) for table in tables for line in table)
        assert len(sets) == 2 + 3
        assert [line[-1].strip() for line in sets[2:]] == ["2", "1", "2"]
        heading, _, *rows = ([cell.strip() for cell in line] for line in greedy)
        assert [row[0] for row in rows] == ["plain", "prompt lookup", "draft model"]
        comparison = result.targets["demo"].settings["greedy"].comparison
        for row, measured in zip(rows, comparison.rows, strict=True):
            cells = dict(zip(heading, row, strict=True))
            assert cells["tau"] == f"{measured.overall.mean_acceptance_length:.2f}"
            assert cells["tokens/s"] == f"{measured.overall.tokens_per_second:.0f}"
            by_category = measured.by_category
            assert cells["MBPP tau"] == f"{by_category['MBPP'].mean_acceptance_length:.2f}"
        assert [row[1] for row in rows] == ["reference", "5 of 5 same", "5 of 5 same"]

    def test_every_column_is_explained(self, result):
        page = as_markdown(result)
        for table in self.tables(page)[1:]:
            for heading in table[0]:
                name = heading.split("[")[0].split()[-1]
                assert name == "method" or f"- **{name}**: " in page
        assert "bonus token INCLUDED" in page

    def test_it_says_what_is_not_there(self, result):
        page = as_markdown(result)
        left_out = "Left out, as their heads or sets are not here or for another target"
        assert f"{left_out}: EAGLE-1, searched tree; " in page
        assert "Rows of `transformers` are left out: torch is at home." in page
        assert "Rows of `transformers` are left out: they are measured greedily only." in page
        assert "Not here, so not measured: demo-small." in page
        assert "not compared" in page

    def test_it_says_what_was_measured_and_where(self, result, model, checkpoints, data_folder):
        page = as_markdown(result)
        assert f"\n\n{shipped.num_params(model.params):,} parameters; draft model: " in page
        assert str(result.targets["demo"].settings["greedy"].comparison.machine) in page
        assert str(checkpoints) not in page
        assert str(data_folder) not in page

    def test_the_page_of_the_repository_was_made_by_the_command(self):
        path = ROOT / "checkpoints" / "RESULTS.md"
        if not path.is_file():
            pytest.skip("needs checkpoints/RESULTS.md, which is not here")
        assert f"{MADE_BY}\n    jaxspec bench --suite " in path.read_text(encoding="utf-8")


class TestTrees:
    """`--suite trees`: static against dynamic trees."""

    def test_a_dynamic_tree_has_the_bounds_of_a_static_one(self, head):
        drafter = dynamic_tree(head, EAGLE_PATHS).drafter
        assert (drafter.num_nodes, drafter.depth, drafter.beam) == (25, 4, 4)
        assert dynamic_tree(head, ((0,),)).drafter.depth == 1

    def test_the_table_has_the_columns_of_the_paper(self, trees):
        page = as_markdown(trees)
        assert "\n    jaxspec bench --suite trees --prompts-per-set 2 --repeats 1\n" in page
        heading = "| method | budget | drafting | building | verification | step | tau | tokens/s |"
        _, _, table = page.partition(f"\n{heading}\n")
        rows = [line.strip("| ").split(" | ") for line in table.split("\n\n")[0].splitlines()[1:]]
        comparison = trees.targets["demo"].settings["greedy"].comparison
        assert [row[:6] for row in rows] == [
            ["plain", "0", "2.00", "", "5.00", "8.00"],
            ["searched tree", "3", "2.00", "", "5.00", "8.00"],
            ["EAGLE-2, as searched", "3", "2.00", "1.00", "5.00", "8.00"],
        ]
        for row, measured in zip(rows, comparison.rows, strict=True):
            assert row[6] == f"{measured.overall.mean_acceptance_length:.2f}"
        assert "another target: EAGLE-3, searched tree." in page
        assert "transformers` are left out: this suite compares our own methods." in page
        assert trees.outputs_agree

    def test_every_figure_is_written(self, trees):
        shown = json.loads(json.dumps(as_dict(trees), allow_nan=False))["targets"]["demo"]
        assert shown["left_out"] == ["EAGLE-3, searched tree"]
        assert shown["settings"]["greedy"]["steps"]["EAGLE-2, as searched"] == {
            "nodes_without_root": 3,
            "tokens_in_target_pass": 4.0,
            "building_seconds": 0.001,
            "draft_seconds": 0.002,
            "target_seconds": 0.005,
            "step_seconds": 0.008,
        }


class TestSkips:
    """`--suite skips` and `--suite skip-settings`: drafting with the target's own layers."""

    def test_tasks_stand_beside_each_other(self, skips):
        comparison = skips.targets["demo"].settings["temperature 0.7, top-p 0.9"].comparison
        names = [row.name for row in comparison.rows]
        assert names == ["plain", "layer skip, as searched", "layer skip, K = 8, adaptive"]
        for row in comparison.rows:
            assert {"HumanEval", "chat", "summarisation"} <= row.by_category.keys()
        assert comparison.config.top_p == 0.9
        assert skips.targets["demo"].draft_params == {}  # no second model

    def test_each_setting_is_what_its_name_says(self, with_skips, model, monkeypatch):
        monkeypatch.setattr(hub, "_PACKAGE", with_skips.parent / "jaxspec")
        target = dataclasses.replace(model, name="demo")
        methods = SUITES["skip-settings"].methods
        drafters = {name: make(target) for name, make in methods.items()}
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

    def test_a_set_is_for_its_target_only(self, with_skips, model, monkeypatch):
        monkeypatch.setattr(hub, "_PACKAGE", with_skips.parent / "jaxspec")
        other = dataclasses.replace(model, name="demo-small")
        assert SUITES["skips"].methods["layer skip, as searched"](other) is None


class TestCommand:
    """`jaxspec bench --suite shipped`, from the command line."""

    def run(self, *argv) -> int:
        return main(["bench", "--suite", "shipped", *map(str, argv)])

    def test_it_writes_the_page_and_the_figures(self, capsys, monkeypatch, result, tmp_path):
        monkeypatch.setattr(command, "measure", lambda *_: result)
        page, figures = tmp_path / "RESULTS.md", tmp_path / "figures.json"
        page.write_text("# Figures of the shipped models\n\nold\n")
        assert self.run("--out", page, "--json", figures) == 0
        assert page.read_text(encoding="utf-8") == as_markdown(result) == capsys.readouterr().out
        assert json.loads(figures.read_text()) == json.loads(json.dumps(as_dict(result)))
        assert {path.name for path in tmp_path.iterdir()} == {"RESULTS.md", "figures.json"}
        assert self.run("--out", page, "--json") == 0
        shown = json.loads(capsys.readouterr().out)
        greedy = shown["targets"]["demo"]["settings"]["greedy"]
        assert greedy["comparison"]["config"]["max_new_tokens"] == 8
        assert greedy["transformers"] == {"left_out": "torch is at home"}

    def test_a_method_that_lies_makes_it_fail(
        self, monkeypatch, checkpoints, data_folder, tmp_path
    ):
        small_suite(
            monkeypatch,
            checkpoints,
            methods={"liar": lambda target: WrongRoot()},
            temperatures={"greedy": 0.0},
        )
        page = tmp_path / "page.md"
        arguments = ["--prompts-per-set", 1, "--repeats", 1]
        assert self.run("--data-folder", data_folder, "--out", page, *arguments) == 1
        assert "- DIFFERENT: liar, prompt 0, token " in page.read_text(encoding="utf-8")

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["--data-folder", "no/such"], f"--data-folder no/such: {GSM8K.file} is not there"),
            (["--prompts-per-set", "0"], "prompts_per_set must be at least 1, got 0"),
            (["--out", "no/such/page.md"], "--out no/such/page.md: must be a file in a folder"),
        ],
    )
    def test_mistakes_are_one_line(self, capsys, monkeypatch, tmp_path, argv, message):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "checkpoints").mkdir()
        assert self.run(*argv) == 2
        out, err = capsys.readouterr()
        assert message in err
        assert err.count("\n") == 1
        assert out == ""

    def test_without_a_model_it_says_so(self, capsys, monkeypatch, data_folder, tmp_path):
        monkeypatch.setattr(hub, "_PACKAGE", tmp_path / "jaxspec")
        out = tmp_path / "page.md"
        assert self.run("--data-folder", data_folder, "--out", out) == 2
        assert "None of the models of suite 'shipped' is here: demo" in capsys.readouterr().err

    def test_what_the_suite_fixes_is_refused(self, capsys):
        with pytest.raises(SystemExit) as exit_:
            self.run("--temperature", 1, "--field", "text")
        assert exit_.value.code == 2
        assert "--suite shipped fixes field, temperature; leave that" in capsys.readouterr().err


@pytest.fixture(scope="module")
def with_transformers(checkpoints, data_folder):
    pytest.importorskip("torch", reason="needs the extra `parity`")
    pytest.importorskip("transformers", reason="needs the extra `parity`")
    with pytest.MonkeyPatch.context() as monkeypatch:
        why_not_here = shipped.why_not_here
        small_suite(monkeypatch, checkpoints, methods={}, temperatures={"greedy": 0.0})
        monkeypatch.setattr(shipped, "why_not_here", why_not_here)
        return measure("shipped", data_folder, prompts_per_set=1, repeats=1, progress=False)


class TestTransformers:
    """The same weights in `transformers`."""

    def test_passes_tell_what_was_drafted_and_kept(self):
        prompt, tokens = [5, 6, 7], [1, 2, 3, 4, 9]
        # Two drafted and one of them kept; then four drafted and two kept.
        found = generation_of(prompt, tokens, [Pass(0, 5), Pass(4, 5)], [9], depth=4)
        assert found.from_draft.tolist() == [True, False, True, True, False]
        assert found.metrics.drafted_histogram == (0, 0, 1, 0, 1)
        assert found.metrics.acceptance_histogram == (0, 1, 1, 0, 0)
        assert found.metrics.mean_acceptance_length == 2.5
        assert found.finish_reason == "stop_token"

    def test_outputs_are_ours_and_every_pass_is_counted(self, with_transformers):
        rows = with_transformers.targets["demo"].settings["greedy"].assisted.rows
        assert [row.divergences for row in rows] == [(), ()]
        for figures in (row.overall for row in rows):
            kept = round(figures.mean_accepted_tokens * figures.num_verify_steps)
            assert figures.num_verify_steps + kept == figures.num_tokens == 3 * 8
        plain, own = rows
        assert plain.overall.mean_acceptance_length == plain.overall.speedup == 1.0
        # The assistant has the target's own weights.
        assert own.overall.mean_acceptance_length > 1.0

    def test_they_are_rows_of_the_table(self, with_transformers):
        page = as_markdown(with_transformers)
        assert "\n| transformers, plain | 3 of 3 same | 1.00 | 1.00 | 1.00 | 1.00 | " in page
        assert "\n| transformers, assisted | 3 of 3 same | " in page
        shown = json.loads(json.dumps(as_dict(with_transformers), allow_nan=False))
        rows = shown["targets"]["demo"]["settings"]["greedy"]["transformers"]["rows"]
        assert [row["name"] for row in rows] == [assisted.PLAIN, assisted.ASSISTED]
        assert rows[1]["overall"]["num_tokens"] == 24

    @pytest.mark.parametrize(("gap", "agree"), [(1e-6, True), (0.5, False), (None, False)])
    def test_only_a_tie_may_leave_our_output(self, result, gap, agree):
        setting = result.targets["demo"].settings["greedy"]
        figures = setting.comparison.plain.overall
        row = AssistedRow("other", figures, None, {}, (Divergence(0, 3, 1, 2, gap),))
        assert setting.outputs_agree
        assert setting._replace(assisted=Assisted((row,), "v")).outputs_agree is agree


class TestBlocks:
    """The suite of block drafters, with the target's own weights as a diffusion model."""

    @pytest.fixture(scope="class")
    def blocks(self, model, checkpoints, data_folder, tmp_path_factory):
        root = tmp_path_factory.mktemp("with-deer")
        shutil.copytree(checkpoints, root / "checkpoints")
        diffusion = Diffusion(3, shift=True, block=4)
        network = Network(model.params, model.config.replace(diffusion=diffusion))
        drafter = dataclasses.replace(model, network=network)
        jaxspec.save(drafter, root / "checkpoints" / "demo-deer")
        methods = SUITES["blocks"].methods
        kept = ("DEER, chain of 4", "DEER, tree of 4", "DFlash, chain")
        with pytest.MonkeyPatch.context() as monkeypatch:
            small_suite(
                monkeypatch,
                root / "checkpoints",
                "blocks",
                methods={name: methods[name] for name in kept},
                temperatures={"greedy": 0.0},
                batches=(1, 2),
                batch_methods=("DEER, chain of 4",),
            )
            return measure("blocks", data_folder, prompts_per_set=1, repeats=1, progress=False)

    def test_chains_and_trees_give_the_text_of_plain_decoding(self, blocks):
        assert blocks.outputs_agree
        assert blocks.missing == ("demo-small",)
        (target,) = blocks.targets.values()
        assert target.left_out == ("DFlash, chain",)

    def test_batches_are_in_the_page(self, blocks):
        page = as_markdown(blocks)
        assert "Rows decoded together, the same prompts in batches" in page
        assert "| 1 row | 2 rows |" in page
        figures = as_dict(blocks)["targets"]["demo"]["settings"]["greedy"]["batches"]
        assert figures["2"].keys() == {"plain", "DEER, chain of 4"}
        assert figures["2"]["plain"]["mean_acceptance_length"] == 1.0
        assert "(1.00x [1.00, 1.00]; 1.00)" in page
        assert figures["2"]["DEER, chain of 4"]["divergences"] == []

    def test_a_batch_with_other_text_makes_it_fail(self, model, blocks):
        config = jaxspec.GenerationConfig(max_new_tokens=4)
        batches = measure_batches(model, [ONE, TWO], {"liar": WrongRoot()}, config, (2,), 1)
        assert batches[2]["plain"].divergences == ()
        assert len(batches[2]["liar"].divergences) == 2
        (target,) = blocks.targets.values()
        setting = target.settings["greedy"]._replace(batches=batches)
        assert not setting.outputs_agree
        result = blocks._replace(targets={"demo": target._replace(settings={"greedy": setting})})
        assert not result.outputs_agree
        assert "- DIFFERENT: liar, 2 rows, prompt 1, token " in as_markdown(result)
        shown = as_dict(result)["targets"]["demo"]["settings"]["greedy"]["batches"]
        assert len(json.loads(json.dumps(shown))["2"]["liar"]["divergences"]) == 2

    def test_batches_hold_every_prompt_and_some_of_each_kind(self, model):
        config = jaxspec.GenerationConfig(max_new_tokens=4)
        prompts = [ONE, ONE, TWO, TWO]
        found = measure_batches(model, prompts, {"liar": WrongRoot()}, config, (1, 2, 3), 1)
        assert [len(found[size]["liar"].divergences) for size in (1, 2, 3)] == [4, 4, 6]
        of_pairs = [each.prompt_index for each in found[2]["liar"].divergences]
        assert of_pairs == [0, 2, 1, 3]
        assert found[2]["plain"].speedup == 1
        assert found[2]["plain"].speedup_interval == (1, 1)

    def test_speed_ups_are_of_all_batches_together(self, model, monkeypatch):
        """By hand: two batches of 10 tokens take 2 and 4 s plainly, 1 and 4 s with drafts."""
        seconds = {None: {"a": 2.0, "b": 4.0}, "drafter": {"a": 1.0, "b": 4.0}}

        def generate(model, rows, config, method, seed):
            facts = {"num_tokens": 10, "num_verify_steps": 5, "idle_fraction": 0.5}
            metrics = SimpleNamespace(seconds=seconds[method][rows[0]], **facts)
            return SimpleNamespace(metrics=metrics)

        monkeypatch.setattr(batches, "generate", generate)
        monkeypatch.setattr(batches, "_divergences", lambda *arguments: ())
        shape = SimpleNamespace(tokens=np.zeros((2, 16)))
        monkeypatch.setattr(batches, "prepare", lambda *arguments: SimpleNamespace(prompts=shape))
        config = jaxspec.GenerationConfig(max_new_tokens=4)
        found = measure_batches(model, ["a", "b", "c", "d"], {"m": "drafter"}, config, (2,), 3)
        figures = found[2]["m"]
        assert figures.tokens_per_second == 4.0
        assert figures.speedup == pytest.approx(6 / 5)
        assert figures.speedup_interval == pytest.approx((1.0, 2.0))
        assert (figures.mean_acceptance_length, figures.idle_fraction) == (2.0, 0.5)

    def test_sampled_batches_are_refused(self, model):
        config = jaxspec.GenerationConfig(max_new_tokens=4, temperature=1.0)
        with pytest.raises(ValueError, match="temperature must be 0"):
            measure_batches(model, [ONE], {}, config, (1,), 1)

    def test_an_adaptive_chain_is_told_what_passes_cost_here(self, model, monkeypatch):
        """By hand: of 9 tokens a pass takes 4 ms, of one 2 ms, and drafting 1 ms."""
        plain = StepTimes(step=0.003, draft=0.0, target=0.002, width=1.0)
        whole = StepTimes(step=0.008, draft=0.001, target=0.004, width=9.0)

        def measure_drafter(params, drafter, warp, repeats):
            return plain if isinstance(drafter, jaxspec.NoDraft) else whole

        monkeypatch.setattr(shipped, "measure_drafter", measure_drafter)
        costs = measure_costs(model, LoadedDrafter(jaxspec.Deer(8), model.network))
        assert (costs.draft_cost, costs.token_cost) == (0.5, 0.1)  # 0.125 to one digit

    def test_only_a_drafter_for_another_target_is_left_out(self, model):
        network = Network(model.params, model.config.replace(diffusion=Diffusion(3, shift=True)))
        drafter = jaxspec.Deer.of(dataclasses.replace(model, network=network))
        assert if_it_drafts_for(model, drafter) is drafter
        larger = random_network(model.config.replace(vocab_size=model.vocab_size + 1))
        other = dataclasses.replace(model, tokenizer=None, network=larger)
        assert if_it_drafts_for(other, drafter._replace(tokenizer=None)) is None
        too_long = drafter._replace(drafter=jaxspec.Deer(4096))
        with pytest.raises(ValueError, match="block must be at most"):
            if_it_drafts_for(model, too_long)
