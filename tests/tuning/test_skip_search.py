"""The search for sub-layers to skip: scores of sets, the methods, the trace, the command."""

import errno
import gzip
import itertools
import json
import os
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import GenerationConfig, generate
from jaxspec.checkpoint import Model, shipped_folders
from jaxspec.cli import main
from jaxspec.commands import tune_skips
from jaxspec.core.types import Params
from jaxspec.drafters import LayerSkip
from jaxspec.drafters.skip_sets import skipped_layers, skips_of
from jaxspec.measure import compare
from jaxspec.models import Skips
from jaxspec.training.loop import History
from jaxspec.tuning import (
    LatencyProfile,
    Timing,
    load_profile,
    save_profile,
    skip_costs,
    skip_search,
)
from jaxspec.tuning.latency import PartialPasses
from jaxspec.tuning.skip_agreement import measure_agreement, regular_patterns
from jaxspec.tuning.skip_costs import Costs, measure_skip_costs
from jaxspec.tuning.skip_objective import (
    ExpectedSeconds,
    MeasuredSeconds,
    SkipScore,
    score_of,
    step_starts,
)
from jaxspec.tuning.skip_search import METHODS, SearchTrace, best_of, search, uniform_sets
from jaxspec.tuning.skip_text import (
    FixedText,
    TextDrafts,
    Window,
    draft_everywhere,
    generated_window,
    given_window,
    read_window,
)
from tests.laws.drafters import network
from tests.measure.models import tiny_model

DEPTH = 3
COSTS = Costs(attention=0.2, mlp=0.3, rest=0.1, passes={1: 1.0, 2: 1.5, 3: 1.8, 4: 2.0})
PROMPT = [3, 1, 4, 1, 5]
SKIP = skips_of(2, [1], [])


@pytest.fixture(scope="module")
def model():
    return Model(network(vocab_size=12))


@pytest.fixture(scope="module")
def window(model):
    return generated_window(model, [PROMPT, PROMPT[::-1]], max_new_tokens=40)


@pytest.fixture(scope="module")
def objective(model, window):
    return ExpectedSeconds(model.network, window, COSTS, DEPTH, thresholds=(0.0, 0.3))


def test_the_score_is_the_formula():
    """Two drafts: one is unsure of its second token and right, one is sure and wrong."""
    agrees = np.array([[[True, True, False]], [[False, True, True]]])
    confidence = np.array([[[0.9, 0.4, 0.9]], [[0.9, 0.9, 0.9]]])
    drafts, counted = TextDrafts(agrees, confidence), np.ones((2, 1), bool)
    score = score_of(drafts, counted, 0.1, COSTS, lengths=(3,), thresholds=(0.5,))
    # Drafted: 2 and 3; accepted: 2 and 0; both passes need a width of 4.
    assert score.tau == 2.0
    assert score.drafted == 2.5
    assert score.acceptance_rate == 0.4
    np.testing.assert_allclose(score.seconds_per_token, (2.5 * 0.1 + 2.0) / 2)
    # Always exiting after one token: passes of 2, accepted 1 and 0.
    alone = score_of(drafts, counted, 0.1, COSTS, lengths=(3,), thresholds=(1.0,))
    np.testing.assert_allclose(alone.seconds_per_token, (0.1 + 1.5) / 1.5)
    assert score_of(drafts, counted, 0.1, COSTS, (3,), (0.5, 1.0)) == alone
    # Two at most: both draft two in passes of 3, accepted 2 and 0.
    two = score_of(drafts, counted, 0.1, COSTS, lengths=(2,), thresholds=(0.5,))
    np.testing.assert_allclose(two.seconds_per_token, (2 * 0.1 + 1.8) / 2)
    assert score_of(drafts, counted, 0.1, COSTS, (2, 3), (0.5,)) == two


def test_steps_begin_where_the_last_one_ended():
    emitted = np.array([[2, 9, 3, 9, 9, 1, 4], [1, 2, 9, 1, 1, 1, 1]])
    counted = np.array([[True] * 7, [True] * 3 + [False] * 4])
    begins = step_starts(emitted, counted)
    assert [np.flatnonzero(row).tolist() for row in begins] == [[0, 2, 5, 6], [0, 1]]


@pytest.mark.parametrize("threshold", [0.0, 0.3])
def test_drafts_computed_at_once_are_those_of_decoding(model, window, threshold):
    """Walked from step to step over the model's own text, they are its run, step by step."""
    reading = read_window(Params(model.network, ()), window.tokens)
    last = window.tokens.shape[1] - DEPTH
    drafts = draft_everywhere(
        Params(model.network, ()),
        jnp.asarray(window.tokens),
        reading,
        jnp.arange(last + 1),
        Skips(*(jnp.asarray(part, jnp.float32) for part in SKIP)),
        depth=DEPTH,
    )
    drafter = LayerSkip(SKIP, DEPTH, threshold, adaptive=None)
    result = generate(
        model, [PROMPT], GenerationConfig(max_new_tokens=40), drafter, return_trace=True
    )
    start, expected = window.first, []
    while start <= last:
        agrees, confidence = np.asarray(drafts.agrees)[0, start], drafts.confidence[0, start]
        drafted = 1 + np.cumprod(np.asarray(confidence)[:-1] >= threshold).sum()
        accepted = min(np.cumprod(agrees).sum(), drafted)
        # Past a wrong token the drafter reads another text: only that it went on is known.
        expected.append((min(drafted, accepted + 1), accepted))
        start += accepted + 1
    steps = [(int(np.sum(step.valid)) - 1, len(step.path) - 1) for step in result[0].trace]
    steps = [(min(drafted, accepted + 1), accepted) for drafted, accepted in steps]
    assert steps[: len(expected)] == expected
    assert len(expected) > 5
    assert {accepted for _, accepted in expected} >= {0, 1}


def test_the_objective_says_the_same_again_from_one_program(objective):
    score = objective(SKIP)
    compiled = draft_everywhere._cache_size()
    assert objective(skips_of(2, [0, 1], [1])) != score
    assert objective(SKIP) == score
    assert draft_everywhere._cache_size() == compiled


def test_nothing_skipped_is_all_accepted(objective):
    score = objective(skips_of(2, [], []))
    # Drafting is dear then: of lengths 1, 2 and 3 the first is the best.
    assert (score.num_speculative_tokens, score.tau) == (1, 2.0)
    np.testing.assert_allclose(score.seconds_per_token, (1.1 + 1.5) / 2)


def test_short_rows_are_left_out(model, window):
    """A row that ends early counts up to its end, and padding does not."""
    ragged = Window(window.tokens, np.array([window.tokens.shape[1], 8]), window.first)
    one = Window(window.tokens[:1], ragged.lengths[:1], window.first)
    both, alone = (
        ExpectedSeconds(model.network, each, COSTS, DEPTH, (0.0,)) for each in (ragged, one)
    )
    assert both.text.counted.sum() == alone.text.counted.sum() + 2
    assert both.text.counted[1].tolist() == [True] * 2 + [False] * (both.text.counted.shape[1] - 2)


def test_costs_are_differences_of_measured_drafts(model, monkeypatch):
    seconds = {"whole": 3.3, "no_attention": 2.1, "no_mlp": 1.5, "nothing": 0.3}

    def timed(programs, repeats):
        drafts = {name: np.asarray(program()) for name, program in programs.items()}
        assert all(tokens.shape == (1, DEPTH + 1) for tokens in drafts.values())
        assert repeats == 3
        return {name: np.array([seconds[name]]) for name in programs}

    monkeypatch.setattr(skip_costs, "time_in_turns", timed)
    passes = {1: 1.0, 2: 1.5, 4: 2.0}
    monkeypatch.setattr(skip_costs, "measure_passes", lambda *_, **__: passes)
    costs = measure_skip_costs(model.network, DEPTH, repeats=3)
    np.testing.assert_allclose(costs.attention, 0.2)
    np.testing.assert_allclose(costs.mlp, 0.3)
    np.testing.assert_allclose(costs.draft_token(1, 0), 0.3)
    assert skip_costs.costs_from(json.loads(json.dumps(costs.as_dict()))) == costs
    assert costs.target_pass(np.array([1, 2, 3, 4]), (1, 2, 4)).tolist() == [1.0, 1.5, 2.0, 2.0]


def weighted(skip: Skips, weights) -> SkipScore:
    """A score that is a product of what each sub-layer contributes: its best set is known."""
    bits = np.array([*skip.attention, *skip.mlp])
    return SkipScore(float(np.exp(np.dot(bits, weights))), 4, 0.5, 2.0, 4.0)


@pytest.fixture
def trace(tmp_path):
    return lambda num_layers: SearchTrace(tmp_path / "trace.jsonl", num_layers, {})


def test_greedy_search_finds_the_best_set_of_a_product_and_ends(trace):
    weights = [-0.3, 0.2, -0.1, 0.4, 0.1, -0.2, 0.3, -0.4]
    history = search(
        lambda skip: weighted(skip, weights), METHODS["greedy"], 99, trace(4), "greedy"
    )
    best = best_of(history).skip
    assert best == Skips((True, False, True, False), (False, True, False, True))
    assert len(history) < 99


def test_bayes_beats_random_in_the_median(trace):
    pytest.importorskip("bayes_opt")
    trace, best = trace(6), {"bayes": [], "random": []}
    for seed in range(3):
        weights = np.random.default_rng(seed).normal(0.1, 0.3, size=12)
        for name, found in best.items():
            history = search(
                lambda skip, weights=weights: weighted(skip, weights),
                METHODS[name],
                30,
                trace,
                f"{name} {seed}",
                seed=seed,
            )
            floor = np.exp(np.minimum(weights, 0).sum())
            found.append(best_of(history).seconds / floor)
    assert np.median(best["bayes"]) < np.median(best["random"])
    assert np.median(best["bayes"]) < 1.02


@pytest.mark.parametrize("name", METHODS)
def test_a_killed_search_goes_on_as_if_it_had_not_been(tmp_path, name):
    if name == "bayes":
        pytest.importorskip("bayes_opt")
    weights = [-0.3, 0.2, -0.1, 0.4, 0.1, -0.2]

    def run(path, objective):
        trace = SearchTrace(path, 3, {"model": "a"}, measure=lambda: path.name)
        search(objective, METHODS[name], 9, trace, name, seed=4)
        return trace.measured

    def whole(skip):
        return weighted(skip, weights)

    turns = itertools.count()

    def killed(skip):
        if next(turns) == 6:
            raise KeyboardInterrupt
        return whole(skip)

    run(tmp_path / "whole", whole)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", killed)
    with (tmp_path / "killed").open("a") as file:
        file.write('{"step": 7, "sear')  # what was being written
    assert run(tmp_path / "killed", whole) == "killed"
    whole_lines, killed_lines = (
        [json.loads(line) for line in (tmp_path / which).read_text().splitlines()]
        for which in ("whole", "killed")
    )
    assert len(whole_lines) == 10
    for one, other in zip(whole_lines, killed_lines, strict=True):
        differ = {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}
        assert differ <= {"seconds", "measured"}


def test_no_set_is_evaluated_twice(trace):
    trace = trace(2)
    for name in ("random", "greedy"):
        history = search(lambda skip: weighted(skip, [1, -1, 2, 3]), METHODS[name], 99, trace, name)
        assert len({each.skip for each in history}) == len(history)
    assert len(trace.evaluations("random")) == 16  # all there are


def test_searches_begin_with_uniform_sets():
    nothing, *others = uniform_sets(8)
    assert not any(nothing.attention)
    assert others[-1] == skips_of(8, [1, 3, 5], [1, 3, 5])
    assert uniform_sets(2) == [skips_of(2, [], [])]


def test_a_trace_of_something_else_is_refused(tmp_path):
    SearchTrace(tmp_path / "trace", 3, {"model": "a", "rows": [[1, 2]]})
    SearchTrace(tmp_path / "trace", 3, {"model": "a", "rows": ((1, 2),)})
    with pytest.raises(ValueError, match="the trace of another search: model, num_layers differ"):
        SearchTrace(tmp_path / "trace", 4, {"model": "b", "rows": [[1, 2]]})


@pytest.mark.parametrize(
    "text",
    [
        "not JSON\n",
        "not JSON\nnor this\n",
        "[1]\n",
        '{"loss": 1.0}\n',
        '{"step": 0, "about": {"num_layers": 3}}\n',
        '{"step": 7, "about": {"num_layers": 3, "model": "b"}, "measured": 1}\n',
    ],
)
def test_what_is_no_trace_of_ours_is_left_as_it_is(tmp_path, text):
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"not a trace of `jaxspec tune skips`|of another search"):
        SearchTrace(path, 3, {"model": "a"})
    assert path.read_text() == text


def test_the_shipped_set_is_the_best_of_its_trace():
    """The trace is that of a search for the model that is shipped now."""
    if not {"demo", "demo-skips"} <= set(shipped_folders()):
        pytest.skip("needs checkpoints/demo and checkpoints/demo-skips, which are not here")
    folder = shipped_folders()["demo-skips"]
    found = json.loads((folder / "skips.json").read_text())
    trace = gzip.decompress((folder / "trace.jsonl.gz").read_bytes())
    head, *lines = map(json.loads, trace.splitlines())
    best = min(lines, key=lambda line: line["score"]["seconds_per_token"])
    assert best["score"]["seconds_per_token"] == found["seconds_per_token"]
    drafter = LayerSkip.read("demo-skips")
    assert drafter.skip == skips_of(found["num_layers"], best["attention"], best["mlp"])
    assert drafter.num_speculative_tokens == best["score"]["num_speculative_tokens"]
    assert drafter.threshold == best["score"]["threshold"]
    network = jaxspec.load("demo").network
    assert skip_search.network_fingerprint(network) == head["about"]["model"] == found["model"]


def test_networks_are_told_apart(model):
    again = network(vocab_size=12)
    fingerprint = skip_search.network_fingerprint
    assert fingerprint(again) == fingerprint(model.network)
    assert fingerprint(network(12, seed=1)) != fingerprint(again)


@pytest.mark.parametrize(
    ("depth", "thresholds", "message"),
    [
        (0, (0.5,), "num_speculative_tokens must be at least 1, got 0"),
        (3, (0.5, 1.5), r"threshold must be in \[0, 1\], got 1.5"),
        (99, (0.5,), "no row of the window has room for a draft of 99"),
    ],
)
def test_objectives_refuse_what_does_not_fit(model, depth, thresholds, message):
    window = Window(np.zeros((2, 45), np.int32), np.array([45, 30]), first=4)
    with pytest.raises(ValueError, match=message):
        ExpectedSeconds(model.network, window, COSTS, depth, thresholds)


def test_a_window_longer_than_the_context_is_refused(model):
    with pytest.raises(ValueError, match="fit the model's context of 512 tokens, got 600"):
        generated_window(model, [[1] * 100], max_new_tokens=500)
    with pytest.raises(ValueError, match="fit the model's context of 512 tokens, got 513"):
        given_window(model, [[1] * 513], prompt_tokens=4)
    with pytest.raises(ValueError, match=r"prompts must have one length, got \[1, 2\]"):
        generated_window(model, [[1], [1, 2]], max_new_tokens=4)


@pytest.mark.slow
def test_decoding_itself_can_be_the_objective(model):
    measured = MeasuredSeconds(model, [PROMPT], 24, DEPTH, 0.0, repeats=1)
    score = measured(SKIP)
    (row,) = generate(
        model,
        PROMPT,
        GenerationConfig(max_new_tokens=24),
        LayerSkip(SKIP, DEPTH, 0.0, adaptive=None),
    )
    assert score.tau == row.metrics.mean_acceptance_length
    assert score.seconds_per_token > 0


@pytest.fixture
def command(tmp_path, monkeypatch):
    """`jaxspec tune skips` on a tiny model, with costs that are given."""
    jaxspec.save(tiny_model(), tmp_path / "model")
    lines = [json.dumps({"text": f"{number}, one, two, one, two"}) for number in range(80)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(skip_costs, "measure_skip_costs", lambda target, depth: COSTS)

    def run(*flags: str) -> int:
        arguments = {
            "--out": tmp_path / "out",
            "--data": f"numbers={tmp_path / 'text.jsonl'}",
            "--rows": 2,
            "--prompt-tokens": 4,
            "--new-tokens": 8,
            "--num-speculative-tokens": 3,
        }
        fixed = [str(part) for pair in arguments.items() for part in pair]
        methods = ["--method", "random", "--method", "greedy"]
        return main(["tune", "skips", str(tmp_path / "model"), *fixed, *methods, *flags])

    return run


def test_the_command_writes_what_the_drafter_reads(command, tmp_path, capsys):
    assert command("--evaluations", "4") == 0
    shown = capsys.readouterr().out
    assert "greedy: " in shown
    assert "bonus token included" in shown
    assert "2 outputs identical" in shown
    result = json.loads((tmp_path / "out" / "skips.json").read_text())
    assert result["measured"]["these"]["identical"] == result["measured"]["these"]["prompts"]
    assert all(seconds > 0 for seconds in result["search_seconds"].values())
    assert (tmp_path / "out" / "search.png").stat().st_size > 0
    trace = (tmp_path / "out" / "trace.jsonl").read_text()
    best = min(
        record["score"]["seconds_per_token"] for record in map(json.loads, trace.splitlines()[1:])
    )
    result = json.loads((tmp_path / "out" / "skips.json").read_text())
    assert result["seconds_per_token"] == best
    assert result["plain_seconds_per_token"] == 1.0
    drafter = LayerSkip.read(tmp_path / "out" / "skips.json")
    assert drafter.num_speculative_tokens == result["num_speculative_tokens"] <= 3

    # Again, it has nothing left to do; with another model or setting, it says so.
    assert command("--evaluations", "4") == 0
    assert (tmp_path / "out" / "trace.jsonl").read_text() == trace
    assert command("--text", "given") == 2
    assert "is the trace of another search" in capsys.readouterr().err
    where = f"layer-skip:skips={tmp_path / 'out' / 'skips.json'}"
    argv = ["generate", str(tmp_path / "model"), "abc", "--max-new-tokens", "4", "--drafter", where]
    assert main(argv) == 0


def test_a_search_on_a_full_disk_says_so_and_goes_on_later(command, tmp_path, capsys, monkeypatch):
    """Half a line is left; the next run gives what a run without trouble gives."""
    trace, kept, left = tmp_path / "out" / "trace.jsonl", History.add, iter(range(4))

    def add(history, **record):
        if next(left, None) is not None:
            return kept(history, **record)
        with trace.open("a") as file:
            file.write(json.dumps(record)[:20])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(trace))

    def searched():
        assert command("--evaluations", "4") == 0
        assert not [path.name for path in (tmp_path / "out").iterdir() if path.name[0] == "."]
        records = map(json.loads, trace.read_text().splitlines())
        return [record | {"seconds": None, "measured": None} for record in records]

    monkeypatch.setattr(History, "add", add)
    assert command("--evaluations", "4") == 2
    (said,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert "No space left on device" in said
    assert "trace.jsonl" in said
    assert not (tmp_path / "out" / "skips.json").exists()
    assert len(trace.read_text().splitlines()) == 5
    monkeypatch.undo()
    monkeypatch.setattr(skip_costs, "measure_skip_costs", lambda target, depth: COSTS)
    after = searched()
    shutil.rmtree(tmp_path / "out")
    assert after == searched()


def test_ctrl_c_says_that_the_same_command_goes_on(command, tmp_path, capsys, monkeypatch):
    kept, left = History.add, iter(range(4))

    def add(history, **record):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return kept(history, **record)

    with monkeypatch.context() as patch:
        patch.setattr(History, "add", add)
        assert command("--evaluations", "4") == 130
    said = f"interrupted: the same command continues from the evaluations in {tmp_path}/out/trace"
    assert said in capsys.readouterr().err
    assert len((tmp_path / "out" / "trace.jsonl").read_text().splitlines()) == 4
    assert command("--evaluations", "4") == 0


def test_the_command_searches_for_the_device_of_a_profile(command, tmp_path, capsys, monkeypatch):
    """With its times; nothing is measured here but what drafts are accepted."""
    monkeypatch.setattr(skip_costs, "measure_skip_costs", None)
    runs = []

    def counted(*arguments, repeats):
        runs.append(repeats)
        return compare(*arguments, repeats=repeats)

    monkeypatch.setattr(tune_skips, "compare", counted)
    layers = tiny_model().config.num_layers
    target = tuple(Timing(size, 0.010 + 0.001 * size) for size in (1, 4))
    partial = PartialPasses(layers, whole=0.010, no_attention=0.006, no_mlp=0.005, nothing=0.001)
    made = {"model": "another", "quantization": "int4"}
    profile = LatencyProfile("a phone", target, draft=(), partial=partial, **made)
    path, out = tmp_path / "phone.json", tmp_path / "out"
    save_profile(profile, path)
    assert load_profile(path) == profile
    assert command("--evaluations", "3", "--profile", str(path)) == 0
    captured = capsys.readouterr()
    assert "x plain decoding (predicted for the profile's device)" in captured.out
    assert "its times are those of another (weights: int4)" in captured.err
    assert runs == [1, 1]
    result = json.loads((out / "skips.json").read_text())
    assert result["machine"] == "a phone"
    assert result["plain_seconds_per_token"] == pytest.approx(0.011)
    # Whole steps draft their full length, so the formula holds without an exit.
    assert result["threshold"] == 0
    drafter = LayerSkip.read(out / "skips.json")
    kept = [len(part) - sum(part) for part in drafter.skip]
    token = 0.001 + kept[0] * 0.004 / layers + kept[1] * 0.005 / layers
    longest = drafter.num_speculative_tokens
    step = longest * token + 0.011 + 0.001 * longest
    assert result["seconds_per_token"] == pytest.approx(step / result["tau_bonus_included"])
    for name in ("these", "other"):
        measured = result["measured"][name]
        assert measured["speedup_is_predicted"]
        expected = 0.011 * measured["tau_bonus_included"] / step
        assert measured["speedup"] == pytest.approx(expected)
    # The trace belongs to the profile.
    assert command("--evaluations", "3") == 2
    assert "profile, thresholds differ" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "flags", "message"),
    [
        ({"partial": None, "draft": (Timing(1, 1.0),)}, [], "has no times of passes with layers"),
        ({"partial": PartialPasses(99, 1.0, 1.0, 1.0, 1.0)}, [], "timed with a model of 99 layers"),
        ({}, ["--num-speculative-tokens", "4"], "timed for 1 to 4 tokens, the root included, not"),
        ({}, ["--threshold", "0.5"], "--threshold: with --profile, whole steps are searched"),
        ({}, ["--objective", "measured"], "--objective measured does not read times"),
        ({}, ["--agreement"], "--agreement does not read times"),
    ],
)
def test_profiles_that_do_not_fit_are_refused(command, tmp_path, capsys, changes, flags, message):
    layers = tiny_model().config.num_layers
    fitting = {"draft": (), "partial": PartialPasses(layers, 1.0, 1.0, 1.0, 1.0)}
    profile = LatencyProfile("p", (Timing(1, 1.0), Timing(4, 1.0)), **{**fitting, **changes})
    save_profile(profile, tmp_path / "p.json")
    assert command("--profile", str(tmp_path / "p.json"), *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_prints_agreement(command, tmp_path, capsys):
    assert command("--agreement") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    best = {row[0]: row[1] for row in rows if row and row[0] in ("50%", "67%", "75%")}
    assert len(best) == 3
    assert all(0 <= float(share.rstrip("%")) <= 100 for share in best.values())
    assert not (tmp_path / "out").exists()


def test_patterns_skip_what_they_say():
    for share in (0.5, 2 / 3, 0.75):
        for name, skip in regular_patterns(12, share).items():
            assert sum(map(sum, skip)) == round(24 * share), name
    half = regular_patterns(6, 0.5)
    assert skipped_layers(half["last layers"]) == {"attention": [3, 4, 5], "mlp": [3, 4, 5]}
    assert skipped_layers(half["middle layers"]) == {"attention": [2, 3, 4], "mlp": [2, 3, 4]}
    assert skipped_layers(half["attention first"]) == {"attention": [*range(6)], "mlp": []}
    assert not any(map(any, regular_patterns(6, 0.0)["every other layer"]))
    assert all(map(all, regular_patterns(6, 1.0)["every other layer"]))
    with pytest.raises(ValueError, match=r"share must be in \[0, 1\], got 1.5"):
        regular_patterns(6, 1.5)


def test_agreement_is_the_share_of_tokens_that_agree(model, window):
    text = FixedText(model.network, window, DEPTH)
    agreements = measure_agreement(text, (0.0, 0.5))
    whole, half = agreements[:5], agreements[5:]
    assert all((each.tokens, each.first) == (1.0, 1.0) for each in whole)
    agrees = text.drafts(regular_patterns(2, 0.5)["last layers"]).agrees[text.counted]
    (last,) = (each for each in half if each.pattern == "last layers")
    assert (last.share, last.tokens, last.first) == (0.5, agrees.mean(), agrees[:, 0].mean())
    assert last.tokens < 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-speculative-tokens", "0"], "num_speculative_tokens must be at least 1, got 0"),
        (["--threshold", "1.5"], "threshold must be in [0, 1], got 1.5"),
        (["--new-tokens", "2045"], "the model's context of 2048 tokens, got 2049"),
        (["--rows", "0"], "--rows must be at least 1, got 0"),
        (["--rows", "9"], "Only 4 held-out documents have 4 tokens, 18 are needed"),
    ],
)
def test_the_command_refuses_what_makes_no_sense(command, capsys, flags, message):
    assert command(*flags) == 2
    assert message in capsys.readouterr().err


def test_no_text_and_no_set_are_said(tmp_path, capsys):
    jaxspec.save(tiny_model(), tmp_path / "model")
    model = str(tmp_path / "model")
    assert main(["tune", "skips", model, "--out", str(tmp_path / "out")]) == 2
    assert "give --data-folder FOLDER or --data NAME=PATH" in capsys.readouterr().err
    assert main(["generate", model, "abc", "--drafter", "layer-skip"]) == 2
    assert "layer-skip:skips=FILE" in capsys.readouterr().err
