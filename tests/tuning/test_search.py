"""The search: equal to brute force, to the recorded searches of others, and to the paper's sums."""

import dataclasses
import functools
import itertools
import json
import math
import os
import time

import numpy as np
import pytest

from benchmarks.tree_searches import (
    calibration_sensitivity,
    choose_sequoia,
    other_searches,
    paper_grid,
    sequoia_paths,
    sequoia_table,
)
from jaxspec import chain, eagle_tree, search_tree, tree_from_paths
from jaxspec.core.tree import EAGLE_PATHS, chain_paths
from jaxspec.tuning import (
    AcceptanceTable,
    ExitCounts,
    LatencyProfile,
    Limits,
    RankCounts,
    Timing,
    calibrated_table,
    cost,
    draft_batches,
    likeliest_paths,
    load_acceptance,
    load_profile,
    load_threshold,
    load_tree,
    predict,
    save_acceptance,
    save_tree,
)
from jaxspec.tuning.latency import profile_from_dict
from jaxspec.tuning.tree_exact import best_trees

PHONE = load_profile("galaxy-s25-adreno830-vicuna7b-q4")
INFERRED = load_acceptance("eagle1-vicuna7b-tau-4.06-inferred")


@functools.cache
def all_trees(nodes: int, depth: int, branch: int) -> list[tuple]:
    """Every tree of that many nodes below its root, as sorted rank paths: grown leaf by leaf."""
    if nodes == 0:
        return [()]
    found = set()
    for smaller in all_trees(nodes - 1, depth, branch):
        for parent in ((), *smaller):
            rank = sum(path[:-1] == parent for path in smaller)
            if len(parent) < depth and rank < branch:
                found.add(tuple(sorted((*smaller, (*parent, rank)))))
    return sorted(found)


def test_brute_force_knows_all_trees():
    """The counts of the paper's space: branching to 3, depth 3 to 5."""
    counts = [
        sum(3 <= max(map(len, tree)) <= 5 for tree in all_trees(nodes, 5, 3))
        for nodes in range(3, 9)
    ]
    assert counts == [1, 6, 26, 90, 283, 837]


def random_acceptance(seed: int) -> AcceptanceTable:
    """Rates that differ from parent to parent."""
    random = np.random.default_rng(seed)
    rates = tuple(tuple(random.dirichlet([3, 1, 1, 2])[:3].tolist()) for _ in range(5))
    counts = {}
    for depth in range(4):
        for parent in itertools.product(range(3), repeat=depth):
            accepted = tuple(random.multinomial(40, random.dirichlet([3, 1, 1, 2]))[:3].tolist())
            counts[parent] = RankCounts((40,) * 3, accepted)
    return AcceptanceTable(rates, counts)


def random_profile(seed: int) -> LatencyProfile:
    """Times that do not even rise with size, so that nothing can be taken for granted."""
    random = np.random.default_rng(seed)
    return LatencyProfile(
        "random",
        tuple(Timing(size, 1 + random.uniform(0, 2)) for size in range(1, 10)),
        tuple(Timing(size, random.uniform(0.05, 0.3)) for size in range(1, 4)),
        tuple(Timing(levels, random.uniform(0.1, 0.4)) for levels in (1, 3, 5)),
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_a_drafter_of_blocks_pays_for_one_draft_pass(seed):
    """Its search is exact too, and deeper trees cost only what they read more."""
    random = np.random.default_rng(seed)
    falling = [sorted(random.dirichlet([3, 2, 1])[:2].tolist(), reverse=True) for _ in range(4)]
    acceptance = AcceptanceTable(tuple(map(tuple, falling)))
    first = (Timing(1, 0.1), Timing(3, 0.15), Timing(5, 0.4))
    profile = dataclasses.replace(random_profile(seed), first_draft=first, one_pass=True)
    found = search_tree(acceptance, profile, max_nodes=5, max_depth=4, max_branch=2)
    best = {}
    for paths in (tree for nodes in range(6) for tree in all_trees(nodes, 4, 2)):
        depth = max(map(len, paths), default=0)
        drafting = profile.first_draft_seconds(depth) if paths else 0.0
        seconds = drafting + float(profile.target_seconds(len(paths) + 1))
        speed = acceptance.tau(paths) / seconds
        best[len(paths)] = max(best.get(len(paths), 0.0), speed)
    assert {each.nodes: each.tokens_per_second for each in found.by_budget} == pytest.approx(best)
    assert found.best.tokens_per_second == pytest.approx(max(best.values()))
    deep = chain(4)
    expected = profile.first_draft_seconds(4) + float(profile.target_seconds(5))
    assert cost(deep, profile, 2.0) == pytest.approx(expected / 2)
    assert profile_from_dict(profile.as_dict(), "here") == profile


@pytest.mark.parametrize(("seed", "width", "depth"), [(0, None, 5), (1, 2, 4), (2, 3, 3)])
def test_the_exact_search_equals_brute_force(seed, width, depth):
    """For every budget to 8 nodes: no tree is cheaper, and the figures are the tree's own."""
    acceptance, profile = random_acceptance(seed), random_profile(seed)

    def price(paths) -> float:
        return cost(tree_from_paths(paths), profile, acceptance.tau(paths))

    found = search_tree(
        acceptance, profile, max_nodes=8, max_depth=depth, max_width=width, max_branch=3
    )
    for candidate in found.ranking + found.by_budget:
        assert 1 / candidate.tokens_per_second == pytest.approx(price(candidate.paths))
    for budget in found.by_budget:
        cheapest = min(
            price(tree)
            for tree in all_trees(budget.nodes, depth, 3)
            if max(draft_batches(tree), default=0) <= 3
            and all(
                sum(len(path) == level for path in tree) <= (width or 8)
                for level in range(1, depth + 1)
            )
        )
        assert 1 / budget.tokens_per_second == pytest.approx(cheapest, rel=1e-9)
    fastest = max(budget.tokens_per_second for budget in found.by_budget)
    assert found.best.tokens_per_second == pytest.approx(fastest)


def test_every_shape_keeps_its_likeliest_tree():
    acceptance = random_acceptance(7)
    trees = best_trees(acceptance, Limits(nodes=6, depth=4, width=6, branch=3, batch=2))
    best = {}
    for nodes in range(7):
        for tree in all_trees(nodes, 4, 3):
            batches = draft_batches(tree)
            if max(batches, default=0) <= 2:
                shape = nodes, batches
                best[shape] = max(best.get(shape, 0), acceptance.tau(tree))
    assert len(trees.tau) == len(best)
    for index, tau in enumerate(trees.tau):
        paths = trees.paths(index)
        shape = len(paths), draft_batches(paths)
        assert tau == pytest.approx(best[shape])
        assert acceptance.tau(paths) == pytest.approx(tau)


def test_the_sums_of_the_paper():
    """9.13 and 19.43 tokens/s for tau 4.06 and 3.22 (bonus included) on the published budgets."""
    assert 1 / cost(eagle_tree(), PHONE, 4.06) == pytest.approx(9.13, abs=0.005)
    # Six nodes in five levels. Which tree the paper used is not known; its cost does not say.
    six = tree_from_paths([(1,), *chain_paths(5)])
    assert 1 / cost(six, PHONE, 3.22) == pytest.approx(19.43, abs=0.005)
    for run in PHONE.published:
        reported = run.tau / (run.draft_seconds + run.target_seconds)
        assert reported == pytest.approx({25: 9.13, 6: 19.43}[run.nodes], abs=0.005)
        assert run.tokens_per_second == pytest.approx(reported, rel=0.02)
    assert 1 / cost(chain(0), PHONE, 1.0) == pytest.approx(11.49)


def test_flat_drafting_is_the_formula_of_the_paper():
    flat = LatencyProfile("flat", PHONE.target, (Timing(1, 0.01), Timing(4, 0.01)))
    expected = (0.01 * 5 + float(flat.target_seconds(26))) / 4.06
    assert cost(eagle_tree(), flat, 4.06) == pytest.approx(expected)


def test_the_search_over_the_space_of_the_paper_beats_its_tree():
    """With the table that is inferred from tau 4.06 (bonus included) of EAGLE's tree."""
    found = search_tree(INFERRED, PHONE, max_nodes=12, max_width=8, max_branch=3)
    assert found.best.tokens_per_second >= 19.43
    assert found.best.nodes <= 8
    others = other_searches(INFERRED, PHONE, found.limits).best
    assert set(others) == {"paper's grid", "Medusa", "Sequoia", "EAGLE's tree"}
    assert others["EAGLE's tree"].tokens_per_second < found.plain.tokens_per_second
    fastest = max(each.tokens_per_second for each in others.values())
    assert found.best.tokens_per_second >= fastest * (1 - 1e-9)
    assert found.plain in found.ranking
    speeds = [each.tokens_per_second for each in found.ranking]
    assert speeds == sorted(speeds, reverse=True)


def test_the_choice_survives_other_calibrations():
    """The inferred rates are a guess; a tree chosen by them stays near the best under others."""
    found = search_tree(INFERRED, PHONE, max_nodes=8, max_branch=3)
    rows = calibration_sensitivity(PHONE, found.best.paths, max_nodes=8)
    assert {row.shape for row in rows} == {"sequoia", "steep", "flat"}
    assert rows[0].best.tokens_per_second == pytest.approx(found.best.tokens_per_second)
    for row in rows:
        assert row.best.tokens_per_second >= row.chosen.tokens_per_second > 11.49
        assert row.chosen.tokens_per_second > 0.93 * row.best.tokens_per_second


def test_not_speculating_wins_where_drafts_are_useless():
    found = search_tree(AcceptanceTable(((0.05, 0.01),) * 3), PHONE, max_nodes=6)
    assert found.best == found.plain
    assert found.best.paths == ()
    assert found.tree.parents.tolist() == [-1]
    assert found.best.tokens_per_second == pytest.approx(11.49)
    # Who asks for a draft all the same is best served by one token.
    assert found.best_draft.paths == ((0,),)
    assert found.best_draft.tokens_per_second < 11.49


# Of ten steps at 0.5, four drafted one token, three two and three three; one at 0.1 drafted fewer.
# There, two of those with one token and one of those with two took a pass that gave no token.
EXITS = (
    ExitCounts(0.1, drafted=(0, 1, 0, 9), accepted=(2, 2, 3, 3)),
    ExitCounts(0.5, drafted=(0, 4, 3, 3), accepted=(2, 3, 2, 3), passes=(0, 2, 4, 4)),
)
ENDING = AcceptanceTable(((0.6, 0.1), (0.6, 0.1)), exits=EXITS)


def test_a_chain_that_ends_early_costs_what_it_drafts():
    """Target passes of 2, 3 and, for drafts of three tokens, 4: `bank(4)` has no width between.

    Draft passes are those that were counted, also where no token came of them.
    """
    profile = LatencyProfile(
        "steep",
        tuple(Timing(size, float(size)) for size in range(1, 6)),
        (Timing(1, 0.1),),
        (Timing(1, 0.2), Timing(3, 0.4)),
    )
    found = predict(chain_paths(3), ENDING, profile, 0.5)
    assert found.tau == pytest.approx(1 + 0.8 + 0.5 + 0.3)
    drafting = 0.4 + 0.4 * 0.1 + 0.4 * 0.2
    assert found.step_seconds == pytest.approx(drafting + 0.4 * 2 + 0.3 * 4 + 0.3 * 4)
    shorter = predict(chain_paths(2), ENDING, profile, 0.5)
    assert shorter.tau == pytest.approx(1 + 0.8 + 0.5)
    assert shorter.step_seconds == pytest.approx(0.3 + 0.8 * 0.1 + 0.4 * 2 + 0.6 * 3)
    uncounted = predict(chain_paths(3), ENDING, profile, 0.1)
    assert uncounted.step_seconds == pytest.approx(0.4 + 0.1 * 2 + 0.9 * (0.2 + 4))
    with pytest.raises(ValueError, match=r"no counts for threshold 0.3, only for \[0.1, 0.5\]"):
        predict(chain_paths(2), ENDING, profile, 0.3)


def test_chains_that_end_early_are_ranked_if_asked_for(tmp_path):
    found = search_tree(ENDING, PHONE, early_exit=True, num_best=4)
    assert {(each.threshold, each.depth) for each in found.exits} == {
        (threshold, depth) for threshold in (0.1, 0.5) for depth in (2, 3)
    }
    assert found.best_draft == found.exits[0] == found.ranking[0]
    speeds = [each.tokens_per_second for each in found.ranking]
    assert speeds == sorted(speeds, reverse=True)
    save_tree(found.best_draft, tmp_path / "tree.json")
    assert load_threshold(tmp_path / "tree.json") == found.best_draft.threshold > 0
    assert search_tree(ENDING, PHONE, early_exit=True, max_depth=2).exits[0].depth == 2
    without = search_tree(ENDING, PHONE)
    assert without.exits == ()
    assert without.best_draft.threshold == 0
    save_acceptance(ENDING, tmp_path / "table.json")
    assert load_acceptance(tmp_path / "table.json") == ENDING


def test_what_cannot_be_priced_is_left_out_and_said():
    narrow = LatencyProfile("narrow", PHONE.target[:2], (Timing(1, 0.01), Timing(2, 0.01)))
    found = search_tree(INFERRED, narrow)
    assert found.limits.nodes == 6
    others = other_searches(INFERRED, narrow, found.limits)
    reasons = dict(line.split(": ", 1) for line in others.left_out)
    assert reasons["EAGLE's tree"].startswith("1 of 1, the first: profile narrow: ")
    assert "EAGLE's tree" not in others.best
    assert all(max(draft_batches(each.paths), default=0) <= 2 for each in found.ranking)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_nodes": 26}, "1 to 26 tokens.*not for 27"),
        ({"max_depth": 6}, "max_depth: the acceptance table reaches 5, got 6"),
        ({"max_branch": 5}, "max_branch: the acceptance table reaches 4, got 5"),
        ({"max_width": 0}, "max_width must be at least 1, got 0"),
        ({"max_nodes": True}, "max_nodes must be a whole number, got True"),
        ({"max_nodes": 2.5}, "max_nodes must be a whole number, got 2.5"),
        ({"max_nodes": "3"}, "max_nodes must be a whole number, got '3'"),
        ({"max_nodes": math.nan}, "max_nodes must be a whole number, got nan"),
        ({"max_nodes": 10**9}, "max_nodes must be at most 4096, got 1000000000"),
        ({"max_depth": 1.5}, "max_depth must be a whole number, got 1.5"),
        ({"num_best": -1}, "num_best must be at least 1, got -1"),
        ({"num_best": 1.5}, "num_best must be a whole number, got 1.5"),
        ({"num_best": None}, "num_best must be a whole number, got None"),
        ({"early_exit": "no"}, "early_exit must be True or False, got 'no'"),
    ],
)
def test_limits_beyond_what_was_measured_are_refused(limits, message):
    with pytest.raises(ValueError, match=message):
        search_tree(INFERRED, PHONE, **limits)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: search_tree(PHONE, INFERRED), "acceptance must be of type AcceptanceTable"),
        (lambda: search_tree(INFERRED, None), "profile must be of type LatencyProfile, got None"),
        (lambda: cost([-1, 0], PHONE, 1.0), r"tree must be of type Tree, got \[-1, 0\]"),
        (lambda: cost(chain(2), PHONE, math.nan), "tau must be a finite number, got nan"),
        (lambda: predict("ab", INFERRED, PHONE), "paths must be a sequence, got 'ab'"),
        (lambda: predict([(0,)], INFERRED, PHONE, 1.5), r"threshold must be in \[0, 1\], got 1.5"),
        (lambda: draft_batches(["ab"]), r"paths\[0\] must be a sequence, got 'ab'"),
        (lambda: likeliest_paths(INFERRED, (1,) * 5), "limits must be of type Limits, got"),
        (lambda: Limits(1, 1, 1, 0, 1), "branch must be at least 1, got 0"),
        (lambda: Limits(1, 2**30, 1, 1, 1), "depth must be at most 4096, got 1073741824"),
        (lambda: Limits(2.5, 1, 1, 1, 1), "nodes must be a whole number, got 2.5"),
        (lambda: save_tree({"paths": []}, "tree.json"), "found must be of type Candidate"),
    ],
)
def test_other_arguments_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_tau_counts_the_bonus_token():
    with pytest.raises(ValueError, match="tau counts the bonus token"):
        cost(chain(2), PHONE, 0.9)


def test_the_grid_lies_within_the_space_of_the_paper():
    grid = paper_grid(INFERRED, max_batch=4)
    assert len({frozenset(paths) for paths in grid}) == len(grid) > 50
    for paths in grid:
        tree_from_paths(paths)
        widths = [sum(len(path) == level for path in paths) for level in range(1, 6)]
        assert 3 <= len(paths) <= 25
        assert 3 <= max(map(len, paths)) <= 5
        assert max(widths) <= 8
        assert max(path[-1] for path in paths) < 3
        assert max(draft_batches(paths)) <= 4


def test_greedy_growth_is_optimal_for_a_number_of_nodes():
    acceptance = random_acceptance(3)
    paths = likeliest_paths(acceptance, Limits(7, 5, 7, 3, 7))
    best = max(map(acceptance.tau, all_trees(7, 5, 3)))
    assert acceptance.tau(paths) == pytest.approx(best)


def test_a_tree_is_written_with_its_figures(tmp_path):
    found = search_tree(INFERRED, PHONE, max_nodes=5, max_branch=2)
    save_tree(found.best, tmp_path / "tree.json", profile=found.profile)
    entry = json.loads((tmp_path / "tree.json").read_text())
    assert tuple(map(tuple, entry["paths"])) == found.best.paths
    assert entry["tokens_with_root"] == entry["nodes_without_root"] + 1 == found.best.nodes + 1
    assert entry["predicted"]["tau_bonus_included"] == found.best.tau
    assert entry["profile"] == PHONE.name


@pytest.fixture(scope="module")
def golden(recorded_folder):
    return recorded_folder("eagle")


def test_medusas_recorded_searches(golden):
    """The same nodes in the same order."""
    for recorded in json.loads((golden / "medusa_tree_search.json").read_text()):
        (branch,) = set(recorded["max_child"])
        nodes = recorded["num_iterations"] + 1
        limits = Limits(nodes, recorded["max_depth"], nodes, branch, nodes)
        table = AcceptanceTable(tuple(map(tuple, recorded["accuracies"])))
        assert likeliest_paths(table, limits) == list(map(tuple, recorded["accept_nodes"]))


def test_sequoias_recorded_searches(golden):
    """The same table, budget, depth, time per token and tree."""
    tables = np.load(golden / "sequoia_dp.npz")
    for recorded in json.loads((golden / "sequoia_dp.json").read_text()):
        rates = recorded["acceptance_vector"][1:-1]
        table = sequoia_table(rates, recorded["max_budget"], recorded["max_depth"])
        theirs = tables[f"{recorded['name']}/T"]
        reached = np.isfinite(theirs) & (theirs > 0)
        np.testing.assert_array_equal(np.isfinite(table), reached)
        np.testing.assert_allclose(table[reached], theirs[reached], rtol=1e-6)
        seconds = dict(zip(recorded["valid_budget"], recorded["target_time"], strict=True))
        tokens, levels = choose_sequoia(table, seconds, recorded["draft_time"])
        assert (tokens, levels) == (recorded["best_budget"], recorded["best_depth_levels"])
        best = table[tokens, levels].max()
        assert best == pytest.approx(recorded["expected_accept"])
        per_token = (levels * recorded["draft_time"] + seconds[tokens]) / best
        assert per_token == pytest.approx(recorded["best_time_per_token"])
        tree = tree_from_paths(sequoia_paths(table, rates, tokens, levels))
        children = [[child for child in row if child >= 0] for row in tree.children.tolist()]
        assert children == recorded["successors"]


def test_recorded_trees_read_and_written_as_paths(golden):
    for recorded in json.loads((golden / "tree_buffers.json").read_text()).values():
        paths = tuple(map(tuple, recorded["sorted_choices"]))
        counts = [
            sum(len(path) == level + 1 for path in paths) for level in range(recorded["depth"])
        ]
        assert counts == list(recorded["nodes_per_depth"])
        assert len(draft_batches(paths)) == recorded["depth"]


def test_batches_are_of_nodes_with_children():
    assert draft_batches(EAGLE_PATHS) == (1, 4, 4, 1, 1)
    assert draft_batches([]) == ()
    assert calibrated_table().tau([]) == 1


def test_trees_survive_a_file(tmp_path):
    found = search_tree(INFERRED, PHONE, max_nodes=6)
    save_tree(found.best, tmp_path / "tree.json")
    assert set(load_tree(tmp_path / "tree.json")) == set(found.best.paths)
    assert load_tree("eagle-25") == EAGLE_PATHS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[0], [1]", "must hold a JSON list of rank paths"),
        ("[0, 1]", r"paths\[0\] must be a sequence, got 0"),
        ("3", "paths must be a sequence, got 3"),
        ('{"tree": []}', "must hold a JSON list of rank paths"),
        ("[[0.5]]", r"paths\[0\]\[0\] must be a whole number, got 0.5"),
        pytest.param("[" * 100_000, "no JSON .more than 100 lists or objects", id="deep JSON"),
        pytest.param(f"[[{'1' * 5000}]]", "no JSON", id="a long number"),
        pytest.param(" " * (2**24 + 1), "is larger than 16 MiB", id="a large file"),
        ('{"paths": [[0]], "threshold": NaN}', "threshold must be a finite number, got nan"),
        ('{"paths": [[0]], "threshold": 1e999}', "threshold must be a finite number, got inf"),
        ('{"paths": [[0]], "threshold": 2}', r"threshold must be in \[0, 1\], got 2.0"),
        ('{"paths": [[0]], "threshold": true}', "threshold must be a finite number, got True"),
        ("[[1]]", "rank 0 is not in the tree"),
        ('{"paths": []}', "plain decoding is faster"),
        (None, "No such file.*or eagle-25"),
    ],
)
def test_files_that_hold_no_tree_are_refused(text, message, tmp_path):
    file = tmp_path / "tree.json"
    if text is not None:
        file.write_text(text)
    for load in (load_tree, load_threshold) if text != '{"paths": []}' else (load_tree,):
        with pytest.raises(ValueError, match=rf"tree .*tree\.json.*{message}"):
            load(file)


def test_whole_numbers_in_files_may_be_floats(tmp_path):
    (tmp_path / "tree.json").write_text('{"paths": [[0.0], [1.0]], "threshold": 1}')
    assert load_tree(tmp_path / "tree.json") == ((0,), (1,))


@pytest.mark.parametrize("load", [load_tree, load_threshold, load_profile, load_acceptance])
@pytest.mark.parametrize("source", [None, 5, True, b"tree.json", ["tree.json"], "a\0"])
def test_what_is_no_path_is_refused(load, source):
    with pytest.raises(ValueError, match=r"source must be a (text or a )?path"):
        load(source)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
@pytest.mark.parametrize("load", [load_tree, load_threshold, load_profile, load_acceptance])
def test_pipes_and_devices_are_not_waited_for(load, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match=rf"{path} is (a device or a pipe|not a file)"):
            load(path)


def test_a_search_that_would_take_long_is_refused_with_its_limits():
    table = AcceptanceTable(tuple((0.12,) * 8 for _ in range(4)))
    limits = Limits(nodes=500, depth=4, width=500, branch=8, batch=300)
    start = time.process_time()
    with pytest.raises(ValueError, match=r"Limits.nodes=500.*pairs of subtrees.*search fewer"):
        best_trees(table, limits)
    assert time.process_time() - start < 60
