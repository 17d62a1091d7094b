"""Measuring for the search: what is timed, what is counted, and the commands around it."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec import Deer, DraftModel, GenerationConfig, PromptLookup
from jaxspec.cli import main
from jaxspec.commands import tune_tree
from jaxspec.commands.tune_profile import show_profile
from jaxspec.core import loop
from jaxspec.core.tree import tree_from_paths
from jaxspec.decoding.request import prepare
from jaxspec.drafters import LoadedDrafter
from jaxspec.models import Network
from jaxspec.tuning import (
    AcceptanceTable,
    Candidate,
    ExitCounts,
    cost,
    identity_of,
    load_acceptance,
    load_profile,
    measuring,
    probe_paths,
    profiling,
    save_acceptance,
    save_profile,
)
from jaxspec.tuning.measuring import (
    MeasuredTree,
    SpeedPrediction,
    measure_acceptance,
    measure_exits,
    measure_trees,
    prediction_errors,
    with_tree,
)
from jaxspec.tuning.profiling import RejectedTree, measure_profile
from tests.measure.models import filling_model, tiny_model

PHONE = "galaxy-s25-adreno830-vicuna7b-q4"
INFERRED = "eagle1-vicuna7b-tau-4.06-inferred"
CONFIG = GenerationConfig(max_new_tokens=13)
NO_EXITS = "NOTE: chains that end early are left out: only JAX ends them, and --profile is of {}."


@pytest.fixture(scope="module")
def drafter(model):
    """The target drafts for itself: every first choice is right."""
    return DraftModel.of(model)


@pytest.fixture
def timed(monkeypatch):
    """Programs run once, and take as long as is written here by name."""
    seconds = {}

    def time_in_turns(programs, repeats):
        jax.block_until_ready([program() for program in programs.values()])
        return {name: np.full(repeats, seconds[name]) for name in programs}

    for module in (measuring, profiling):
        monkeypatch.setattr(module, "time_in_turns", time_in_turns)
    return seconds


@pytest.mark.parametrize("num_tokens", [1, 2, 6, 9])
def test_rejected_trees_offer_as_many_tokens_as_they_say(num_tokens):
    rejected = RejectedTree(num_tokens)
    assert len(rejected.tree.parents) == rejected.tree_shape[0] == num_tokens
    assert rejected.tree_shape[1] == min(num_tokens - 1, 5)
    assert rejected == RejectedTree(num_tokens)
    assert hash(rejected) == hash(RejectedTree(num_tokens))


def test_a_profile_takes_draft_passes_apart(model, drafter, timed):
    """The time of a level is the time with it less that before it, over the steps."""
    targets = {"1": 0.8, "3": 1.0}
    drafts = {"before 1": 0.2, "with 1": 0.3, "before 2": 0.25, "with 2": 0.41}
    drafts |= {"first 1": 0.2, "first 3": 0.24}
    timed.update(targets)
    calls = []

    def advance(what):
        calls.append(what)
        if what == "timing draft passes":
            timed.update(drafts)

    sizes = {"tokens": (3,), "batches": (2,), "levels": (3,)}
    once = {**sizes, "num_steps": 2, "repeats": 2, "advance": advance}
    profile = measure_profile(model, drafter, **once)
    assert [timing.size for timing in profile.target] == [1, 3]
    assert profile.target_seconds(3) == pytest.approx(0.5)
    assert profile.first_draft_seconds(2) == pytest.approx(0.11)
    assert profile.draft_seconds((1, 1, 2)) == pytest.approx(0.12 + 0.05 + 0.08)
    assert profile.draft[0].spread == 0
    assert profile.name.startswith(f"{model.name} on ")
    assert "one row, greedy: capacity 256" in profile.source
    assert len(calls) == 2 + 4 + 2 + 2
    with pytest.raises(ValueError, match="64 tokens of a prompt and num_steps, 66, got 65"):
        measure_profile(model, drafter, capacity=65, num_steps=2)
    with pytest.raises(ValueError, match="capacity must hold the text of every loop, got 70"):
        measure_profile(model, drafter, tokens=(9,), capacity=70, num_steps=6)
    drafts["with 2"] = 0.2
    with pytest.raises(ValueError, match="draft: a pass of 2 cannot be told from noise"):
        measure_profile(model, drafter, **once)


@pytest.mark.parametrize(
    ("measure", "arguments", "message"),
    [
        (
            measure_profile,
            {"tokens": (10**9,)},
            r"tokens\[0\] must be at most 4097, got 1000000000",
        ),
        (measure_profile, {"batches": (3, 1.5)}, r"batches\[1\] must be a whole number, got 1.5"),
        (measure_profile, {"levels": "12"}, "levels must be a sequence, got '12'"),
        (measure_profile, {"capacity": None}, "capacity must be a whole number, got None"),
        (measure_profile, {"num_steps": 0}, "num_steps must be at least 1, got 0"),
        (measure_profile, {"repeats": True}, "repeats must be a whole number, got True"),
        (measure_profile, {"model": "demo"}, "model must be of type Model, got 'demo'"),
        (measure_profile, {"drafter": PromptLookup()}, "drafter must be of type LoadedDrafter"),
        (measure_acceptance, {"prompts": ["a"], "paths": 5}, "paths must be a sequence, got 5"),
        (measure_acceptance, {"prompts": 5}, "prompts must be a prompt or a list of them, got 5"),
        (
            measure_exits,
            {"prompts": ["a"], "thresholds": (0,)},
            r"thresholds\[0\] must be in \(0, 1",
        ),
        (measure_exits, {"prompts": ["a"], "length": 10**9}, "length must be at most 4096"),
        (measure_trees, {"prompts": ["a"], "trees": [5]}, r"trees\[0\] must be a sequence, got 5"),
        (
            measure_trees,
            {"prompts": ["a"], "trees": [()], "thresholds": (0.5, 0.5)},
            "thresholds must have one entry for each of 1 trees, got 2",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(model, drafter, measure, arguments, message):
    with pytest.raises(ValueError, match=message):
        measure(**{"model": model, "drafter": drafter, **arguments})


def test_a_profile_of_a_drafter_of_blocks_is_of_one_pass(model, timed, capsys):
    """No pass by the number of nodes, and no deeper trees than its blocks."""
    timed.update({"1": 0.8, "3": 1.0, "first 1": 0.2, "first 2": 0.22})
    drafter = Deer.of(filling_model("filling", 4), 2)
    once = {"num_steps": 2, "repeats": 1}
    profile = measure_profile(model, drafter, tokens=(3,), levels=(2, 3), **once)
    assert profile.one_pass
    assert [timing.size for timing in profile.first_draft] == [1, 2]
    assert profile.draft_seconds((1,)) == pytest.approx(0.1)
    assert profile.draft_seconds((1, 3)) == pytest.approx(0.11)
    assert cost(tree_from_paths([(0,), (0, 0)]), profile, 2.0) == pytest.approx((0.11 + 0.5) / 2)
    show_profile(profile)
    assert "blocks of 2 with adaptive=1: draft_cost=0.27,token_cost=0.12" in capsys.readouterr().out


def test_acceptance_of_a_perfect_drafter(model, drafter):
    table = measure_acceptance(model, drafter, ["one, two", "abc"], CONFIG, paths=probe_paths(2, 2))
    assert table.rate((), 0) == table.rate((0,), 0) == 1
    assert table.rate((), 1) == 0
    assert table.tau(((0,), (0, 0))) == 3
    assert table.shares(probe_paths(2, 2)) == (1.0, 0.0)
    assert table.head == identity_of(drafter.params)
    table.check_head(drafter.params)


def test_one_program_counts_drafts_at_every_threshold(model, drafter):
    """It drafts as the drafter of each threshold does, up to the last step of a text.

    The passes are those that really run, the root's apart, which has no scratch.
    """
    passes = []

    class Observed(Network):
        def forward(self, tokens, *args, scratch=None, **kwargs):
            if scratch is not None:
                jax.debug.callback(lambda: passes.append(1))
            return super().forward(tokens, *args, scratch=scratch, **kwargs)

    jax.tree_util.register_dataclass(Observed, data_fields=["params"], meta_fields=["config"])
    observed = drafter._replace(params=Observed(model.network.params, model.network.config))
    thresholds = (0.02, 0.1, 0.5)
    before = loop.decode._cache_size()
    counts = measure_exits(model, drafter, ["one, two"], CONFIG, thresholds=thresholds, length=3)
    assert loop.decode._cache_size() == before + 1
    chain = ((0,), (0, 0), (0, 0, 0))
    for threshold, found in zip(thresholds, counts, strict=True):
        own = with_tree(observed, chain, threshold)
        ran, drafted, accepted = [], [], []
        steps = prepare(model, "one, two", CONFIG, own, 0).decode_stream()
        for _, info in steps:
            jax.effects_barrier()
            ran.append(len(passes))
            if info is not None:
                drafted.append(int(info.proposal.valid[0].sum()) - 1)
                accepted.append(int(info.verdict.num_emitted[0]) - 1)
        assert found.threshold == threshold
        for name, sizes in zip(
            ("drafted", "accepted", "passes"), (drafted, accepted, 1 + np.diff(ran)), strict=True
        ):
            expected = np.bincount(sizes[:-1], minlength=4).tolist()
            assert getattr(found, name) == tuple(expected), name
    assert len({found.drafted for found in counts}) == 3
    # Some passes gave no token: the law was too flat.
    uncounted = [dataclasses.replace(found, passes=()).mean_passes(3) for found in counts]
    assert [found.mean_passes(3) for found in counts] > uncounted


def test_trees_are_timed_without_prefill(model, drafter, timed):
    """Five steps of a chain of two, or thirteen plain ones; the first is taken off."""
    timed.update({"0 whole": 13.0, "0 first step": 1.0, "1 whole": 5.0, "1 first step": 2.0})
    trees = [(), ((0,), (0, 0))]
    plain, chain = measure_trees(model, drafter, trees, ["one, two"], CONFIG, repeats=1)
    assert plain.tau == 1
    assert plain.step_seconds == pytest.approx(12 / 12)
    assert plain.tokens_per_second == pytest.approx(1)
    assert chain.tau == pytest.approx(13 / 5)  # 3, 3, 3, 3 and what is left
    assert chain.step_seconds == pytest.approx(3 / 4)
    with pytest.raises(ValueError, match="ask for more tokens"):
        measure_trees(
            model, drafter, [()], ["one, two"], GenerationConfig(max_new_tokens=1), repeats=1
        )


def test_errors_of_predictions_leave_plain_decoding_out():
    def prediction(paths, predicted, measured):
        candidate = Candidate(paths, 1.0, 1 / predicted)
        return SpeedPrediction(candidate, MeasuredTree(1.0, 1 / measured))

    trees = [prediction(((0,),), speed, 100.0) for speed in (90.0, 104.0, 108.0)]
    errors = prediction_errors([*trees, prediction((), 80.0, 100.0)])
    # Plain decoding was a quarter faster than predicted: speed-ups of 1.125, 1.3 and 1.35 were
    # predicted, and none was measured.
    assert errors == pytest.approx((3, 0.08, 0.1, 0.3, 0.35))
    assert trees[0].as_dict()["error"] == pytest.approx(-0.1)
    for wrong in ([], trees, [prediction((), 50.0, 100.0)]):
        with pytest.raises(ValueError, match="must be of trees and of plain decoding once"):
            prediction_errors(wrong)


def test_only_static_trees_are_tuned(drafter):
    assert with_tree(drafter, [(1,), (0,)]).drafter == DraftModel(paths=((0,), (1,)))
    with pytest.raises(
        ValueError, match=r"static tree \(Eagle, DraftModel, Deer, DFlash\), got PromptLookup"
    ):
        with_tree(LoadedDrafter(PromptLookup(), ()), [(0,)])
    with pytest.raises(ValueError, match="no gap"):
        with_tree(drafter, [(1,)])


def test_profiles_of_other_devices_are_read_and_drawn(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra `plots`")
    out, plot = tmp_path / "again.json", tmp_path / "latency.png"
    argv = ["tune", "profile", "--import", PHONE, "--out", str(out), "--plot", str(plot)]
    assert main([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == load_profile(PHONE).as_dict()
    assert load_profile(out) == load_profile(PHONE)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main(argv[:4]) == 0
    assert "392.120" in capsys.readouterr().out


def test_a_tree_is_chosen_drawn_and_written(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra `plots`")
    argv = ["tune", "tree", "--profile", PHONE, "--acceptance", INFERRED, "--max-nodes", "6"]
    assert main([*argv, "--table", "--out", str(tmp_path / "phone")]) == 0
    shown = capsys.readouterr().out
    rows = {line[:27].strip(): line[27:].split() for line in shown.splitlines()}
    assert rows["plain decoding"] == ["0", "0.00", "87.03", "1.00", "11.49", "1.00"]
    assert rows["EAGLE's 25 nodes"] == ["25", "52.34", "392.12", "4.06", "9.13", "0.80"]
    assert rows["published: searched tree"][-3:] == ["3.22", "19.18", "1.67"]
    assert "INFERRED, not measured" in shown
    assert "rank 0, accepted 73%" in shown
    tree = json.loads((tmp_path / "phone" / "tree.json").read_text())
    assert tree["predicted"]["tokens_per_second"] >= 19.43
    search = json.loads((tmp_path / "phone" / "search.json").read_text())
    assert search["ranking"][0]["paths"] == tree["paths"]
    assert [row["nodes"] for row in search["table"]] == [0, 25, len(tree["paths"])]
    for row in search["table"]:
        step = row["draft_seconds"] + row["target_seconds"]
        assert row["tokens_per_second"] == pytest.approx(row["tau"] / step)
    # The inferred rates: 69.7 % on the path of first choices.
    assert search["accepted_of_eagle_25"]["on_main_path"] == pytest.approx(0.697, abs=5e-4)
    names = {path.name for path in (tmp_path / "phone").iterdir()}
    assert names == {"tree.json", "search.json", "tree.png", "cost.png"}


def test_tuning_from_prompts_to_measured_trees(model, capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra `plots`")
    folder, prompts, out = tmp_path / "model", tmp_path / "prompts.jsonl", tmp_path / "out"
    jaxspec.save(model, folder)
    prompts.write_text('{"question": "one, two"}\n')
    argv = ["tune", "tree", str(folder), str(prompts), "--drafter", f"draft-model:model={folder}"]
    argv += ["--profile", PHONE, "--max-depth", "2", "--max-branch", "2", "--max-new-tokens", "13"]
    assert main([*argv, "--measure", "1", "--repeats", "1", "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert "of 1 trees: off by" in captured.out
    assert "NOTE: --profile: its times are those of Vicuna-7B" in captured.err
    assert json.loads((out / "tree.json").read_text())["paths"] == [[0], [0, 0]]
    search = json.loads((out / "search.json").read_text())
    tree, plain = search["measured"]
    assert (tree["paths"], plain["paths"]) == ([[0], [0, 0]], [])
    assert tree["measured"]["tau_bonus_included"] == pytest.approx(13 / 5)
    assert search["errors_of_prediction"]["worst"] == pytest.approx(abs(tree["error"]))
    assert (out / "predicted.png").read_bytes().startswith(b"\x89PNG")
    table = load_acceptance(out / "acceptance.json")
    assert table.head == identity_of(model.network)
    assert table.exits == ()
    assert NO_EXITS.format("llama.cpp") in captured.err
    here = tmp_path / "here.json"
    save_profile(dataclasses.replace(load_profile(PHONE), runtime="jax 0.10.1"), here)
    assert main([*argv, "--profile", str(here), "--out", str(tmp_path / "by jax")]) == 0
    assert "chains that end early are left out" not in capsys.readouterr().err
    exits = load_acceptance(tmp_path / "by jax" / "acceptance.json").exits
    assert exits
    assert all(sum(counts.passes) == sum(counts.drafted) for counts in exits)
    nobodys = tmp_path / "nobodys.json"
    save_profile(dataclasses.replace(load_profile(PHONE), model=""), nobodys)
    known = ["--acceptance", str(out / "acceptance.json"), "--profile", str(nobodys)]
    assert main([*argv, *known]) == 0
    assert "NOTE: --profile" not in capsys.readouterr().err  # it names no model
    # A table of another head is not priced as if it were this one's.
    assert main([*argv, "--acceptance", INFERRED]) == 2
    assert "belongs to the head (unknown)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("runtime", "shown"),
    [
        ("jax 0.10.1", None),
        ("LiteRT, CPU, 1 threads", "LiteRT, CPU, 1 threads"),
        ("", "no runtime that it names"),
    ],
)
def test_only_a_profile_of_jax_has_chains_that_end_early(runtime, shown, capsys, tmp_path):
    """Exported files draft whole chains, so a search for them must not price others."""
    exits = (ExitCounts(0.5, drafted=(0, 4, 6), accepted=(1, 3, 6), passes=(0, 4, 6)),)
    table, profile = tmp_path / "table.json", tmp_path / "profile.json"
    save_acceptance(AcceptanceTable(((0.6, 0.1), (0.6, 0.1)), exits=exits), table)
    save_profile(dataclasses.replace(load_profile(PHONE), runtime=runtime), profile)
    assert main(["tune", "tree", "--profile", str(profile), "--acceptance", str(table)]) == 0
    captured = capsys.readouterr()
    thresholds = [line.split()[2] for line in captured.out.splitlines() if line.count(".") == 5]
    assert ("0.5" in thresholds) == (shown is None)
    assert captured.err == ("" if shown is None else f"{NO_EXITS.format(shown)}\n")


def test_the_tree_that_is_written_is_the_fastest_that_was_measured(
    model, capsys, tmp_path, monkeypatch
):
    pytest.importorskip("matplotlib", reason="needs the extra `plots`")

    def measured(model, drafter, trees, *_, **__):
        """The last tree by prediction is the fastest; plain decoding, after it, is not."""
        seconds = [*range(len(trees) + 1, 2, -1), float(len(trees))]
        return [MeasuredTree(1.0, step) for step in seconds]

    monkeypatch.setattr(tune_tree, "measure_trees", measured)
    folder, prompts, out = tmp_path / "model", tmp_path / "prompts.jsonl", tmp_path / "out"
    jaxspec.save(model, folder)
    prompts.write_text('{"question": "one, two"}\n')
    argv = ["tune", "tree", str(folder), str(prompts), "--drafter", f"draft-model:model={folder}"]
    argv += ["--profile", PHONE, "--max-depth", "2", "--max-branch", "2", "--max-new-tokens", "13"]
    assert main([*argv, "--measure", "3", "--table", "--out", str(out)]) == 0
    ranking = json.loads((out / "search.json").read_text())["ranking"]
    trees = [each for each in ranking if each["paths"]]
    written = json.loads((out / "tree.json").read_text())
    assert written["paths"] == trees[2]["paths"] != trees[0]["paths"]
    shown = capsys.readouterr().out
    assert f"root ({len(written['paths'])} nodes below)" in shown
    assert "Do not speculate here" not in shown


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("deer:model=FOLDER,block=0", "block must be at least 1, got 0"),
        ("lookup", "--drafter: name one that drafts over a tree"),
    ],
)
def test_a_block_that_means_nothing_is_refused(drafter, message, capsys, tmp_path):
    folder = str(tmp_path)
    jaxspec.save(filling_model("drafter", 4), folder)
    drafter = drafter.replace("FOLDER", folder)
    target = str(tmp_path / "target")
    jaxspec.save(tiny_model(), target)
    assert main(["tune", "profile", target, "--drafter", drafter]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["profile", "--import", "nowhere.json"], "no such file"),
        (["profile", "--import", PHONE, "--out", "no/such/folder.json"], "--out"),
        (["tree", "--profile", PHONE, "--acceptance", "x"], "no shipped table"),
        (["tree", "--profile", PHONE, "--acceptance", INFERRED, "--max-nodes", "30"], "not for 31"),
        (["tree", "--profile", PHONE, "--acceptance", INFERRED, "--measure", "-1"], "PROMPTS"),
        (
            ["tree", "--profile", PHONE, "--acceptance", INFERRED, "--drafter", "lookup"],
            "needs MODEL",
        ),
    ],
)
def test_bad_input_is_one_line(argv, message, capsys):
    try:
        code = main(["tune", *argv])
    except SystemExit as exit_:  # what argparse says of flags that do not go together
        code = exit_.code
    assert code == 2
    assert message in capsys.readouterr().err
