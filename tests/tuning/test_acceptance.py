"""Acceptance tables: counting, what they predict, and what they refuse."""

import dataclasses
import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import tree_from_paths
from jaxspec.core.tree import EAGLE_PATHS
from jaxspec.decoding.result import TraceStep
from jaxspec.tuning import (
    AcceptanceTable,
    ExitCounts,
    RankCounts,
    calibrated_table,
    count_acceptance,
    identity_of,
    load_acceptance,
    probe_paths,
    rank_paths,
    save_acceptance,
)
from jaxspec.tuning.acceptance import SHAPES, shipped_tables

INFERRED = "eagle1-vicuna7b-tau-4.06-inferred"
RATES = ((0.6, 0.2), (0.5, 0.1), (0.4, 0.1))


def step(paths, accepted, valid=None) -> TraceStep:
    """One step over a tree that accepted the node at a rank path."""
    tree = tree_from_paths(paths)
    nodes = len(paths) + 1
    place = {path: node for node, path in enumerate(((), *rank_paths(tree)))}
    path = [place[accepted[:depth]] for depth in range(len(accepted) + 1)]
    everyone = np.ones(nodes, bool)
    return TraceStep(
        tokens=np.zeros(nodes, np.int32),
        parents=np.asarray(tree.parents),
        valid=everyone if valid is None else np.asarray(valid),
        draft_logprobs=None,
        law_row=np.zeros(nodes, np.int32),
        path=np.asarray(path, np.int32),
        emitted=np.zeros(len(path), np.int32),
        width=nodes,
    )


def test_counting_by_parent_and_rank():
    tree = ((0,), (1,), (0, 0), (1, 0))
    steps = [
        step(tree, (0, 0)),
        step(tree, (1,)),
        step(tree, ()),
        step(tree, (0,), valid=[True, True, True, False, False]),  # no room for depth 2
    ]
    assert count_acceptance(steps) == {
        (): RankCounts((4, 4), (2, 1)),
        (0,): RankCounts((1,), (1,)),
        (1,): RankCounts((1,), (0,)),
    }


def sampled_steps(paths, num_steps: int, seed: int) -> list[TraceStep]:
    """Steps in which children are accepted by `RATES`, whatever the parent."""
    random, nodes, steps = np.random.default_rng(seed), set(paths), []
    for _ in range(num_steps):
        accepted = ()
        for row in RATES:
            rank = int(np.searchsorted(np.cumsum(row), random.uniform()))
            if (*accepted, rank) not in nodes:
                break
            accepted = (*accepted, rank)
        steps.append(step(paths, accepted))
    return steps


def test_a_measured_table_finds_the_rates_and_the_tau_behind_the_steps():
    paths = probe_paths(3, 2)
    steps = sampled_steps(paths, 3000, seed=0)
    table = AcceptanceTable.from_counts(count_acceptance(steps))
    assert table.max_depth == 3
    assert table.rate((), 1) == pytest.approx(0.2, abs=0.03)
    assert table.rate((0, 0), 0) == pytest.approx(0.4, abs=0.05)
    # Never offered a second child, as their ranks add up to 1 already: like others of the depth.
    assert table.rate((1,), 1) == pytest.approx(0.1, abs=0.04)
    measured = np.mean([len(one.emitted) for one in steps])
    assert table.tau(paths) == pytest.approx(measured, rel=0.01)


def test_shares_of_accepted_tokens():
    """Shares of a tree follow from its chances, and are those counted in steps over it."""
    table = AcceptanceTable(((0.5, 0.25), (0.5, 0.1)))
    tree = [(0,), (1,), (0, 0), (0, 1), (1, 0)]
    # Chances 0.5, 0.25, 0.25, 0.05, 0.125. Main path: 0, 00. Its neighbours: 1, 01.
    assert table.shares(tree) == pytest.approx((0.75 / 1.175, 0.3 / 1.175))
    paths = probe_paths(3, 2)
    steps = sampled_steps(paths, 3000, seed=0)
    accepted = [paths[node - 1] for each in steps for node in each.path[1:]]
    main = np.mean([not any(path) for path in accepted])
    beside = np.mean([path[-1] > 0 and not any(path[:-1]) for path in accepted])
    measured = AcceptanceTable.from_counts(count_acceptance(steps))
    assert measured.shares(paths) == pytest.approx((main, beside), abs=0.01)
    with pytest.raises(ValueError, match="no node is ever accepted"):
        AcceptanceTable(((0.0,),)).shares([(0,)])


def test_chances_multiply_along_a_path_and_tau_adds_them_up():
    table = AcceptanceTable(RATES)
    assert table.chance((0, 1, 0)) == pytest.approx(0.6 * 0.1 * 0.4)
    assert table.tau([(0,), (1,), (0, 1)]) == pytest.approx(1 + 0.6 + 0.2 + 0.06)
    assert table.tau([]) == 1


def test_rank_paths_undo_tree_from_paths():
    assert rank_paths(tree_from_paths(EAGLE_PATHS)) == EAGLE_PATHS


def test_the_probing_tree_is_a_tree_with_the_main_path_and_its_neighbours():
    paths = probe_paths(5, 4)
    assert rank_paths(tree_from_paths(paths)) == paths
    expected = {(0,) * depth + (rank,) for depth, rank in itertools.product(range(5), range(4))}
    assert expected <= set(paths)


@pytest.mark.parametrize(("path", "message"), [((2,), "rank 2"), ((0, 0, 0, 0), "depth 4")])
def test_a_table_says_nothing_of_what_it_has_not_seen(path, message):
    with pytest.raises(ValueError, match=message):
        AcceptanceTable(RATES).chance(path)


@pytest.mark.parametrize("rates", [(), ((),), ((0.7, 0.4),), ((-0.1,),), ((float("nan"),),)])
def test_chances_must_be_chances(rates):
    with pytest.raises(ValueError, match="rates"):
        AcceptanceTable(rates)


def test_counts_must_make_sense():
    with pytest.raises(ValueError, match=r"counts of \[0\]"):
        AcceptanceTable(RATES, {(0,): RankCounts((3,), (4,))})
    with pytest.raises(ValueError, match="no draft token was offered"):
        AcceptanceTable.from_counts({})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: AcceptanceTable(((True,),)), r"rates\[0\]\[0\] must be a finite number, got True"),
        (lambda: AcceptanceTable("ab"), "rates must be a sequence, got 'ab'"),
        (lambda: AcceptanceTable(RATES, head=5), "head must be a text, got 5"),
        (lambda: AcceptanceTable(RATES, [1]), r"counts must be a mapping, got \[1\]"),
        (lambda: AcceptanceTable(RATES, {(): 1}), r"counts\[\(\)\] must be of type RankCounts"),
        (lambda: AcceptanceTable(RATES, {"a": 1}), "counts: each key must be a sequence, got 'a'"),
        (lambda: AcceptanceTable(RATES, exits="x"), "exits must be a sequence, got 'x'"),
        (lambda: AcceptanceTable(RATES, exits=(1,)), r"exits\[0\] must be of type ExitCounts"),
        (lambda: AcceptanceTable.from_counts(3), "counts must be a mapping, got 3"),
        (lambda: RankCounts((1.5,), (1,)), r"offered\[0\] must be a whole number, got 1.5"),
        (lambda: RankCounts((1,), (-1,)), r"accepted\[0\] must be at least 0, got -1"),
        (lambda: ExitCounts(2, (1,), (1,)), r"threshold must be in \[0, 1\], got 2.0"),
        (lambda: ExitCounts(0.5, (0,), ()), "drafted and accepted must count the same steps"),
        (
            lambda: ExitCounts(0.5, (0, 2), (1, 1), (0, 1)),
            r"passes must count the 2 steps of drafted, got \(0, 1\); leave it out",
        ),
        (lambda: probe_paths(1.5), "max_depth must be a whole number, got 1.5"),
        (lambda: probe_paths(2, 0), "max_branch must be at least 1, got 0"),
        (lambda: probe_paths(5, 10**6), "max_branch must be at most 4096, got 1000000"),
        (lambda: probe_paths(5, 4000), "5 and 4000 give a tree of more than 4096 nodes"),
        (lambda: probe_paths(91, 2), "91 and 2 give a tree of more than 4096 nodes"),
        (lambda: rank_paths([-1]), "tree must be of type Tree"),
        (lambda: calibrated_table("4"), "tau must be a finite number, got '4'"),
        (lambda: calibrated_table(shape=()), "shape must be of at least one entry"),
        (lambda: calibrated_table(decay=1e300), r"decay must be in \(0, 1\], got 1e\+300"),
        (lambda: calibrated_table(max_depth=10**9), "max_depth must be at most 4096"),
    ],
)
def test_what_is_no_number_or_too_many_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rates": None}, "rates must be a sequence, got None"),
        ({"rates": [[0.5, "a"]]}, r"rates\[0\]\[1\] must be a finite number, got 'a'"),
        ({"counts": {}}, "counts must be a sequence, got {}"),
        ({"counts": [1]}, r"counts\[0\] must be a mapping, got 1"),
        (
            {"counts": [{"parent": [0], "offered": [1.5], "accepted": [1]}]},
            r"counts\[0\]: offered\[0\] must be a whole number, got 1.5",
        ),
        ({"counts": [{"parent": [0]}]}, r"counts\[0\] must have the fields offered, accepted, par"),
        (
            {"exits": [{"threshold": True, "drafted": [1], "accepted": [1]}]},
            r"exits\[0\]: threshold",
        ),
        ({"head": None}, "head must be a text, got None"),
    ],
)
def test_files_with_wrong_fields_are_refused(change, message, tmp_path):
    file = tmp_path / "table.json"
    file.write_text(json.dumps({**AcceptanceTable(RATES).as_dict(), **change}))
    with pytest.raises(ValueError, match=rf"acceptance table .*table\.json: {message}"):
        load_acceptance(file)


@pytest.mark.parametrize(("max_depth", "max_branch", "nodes"), [(89, 2, 4094), (1, 4096, 4096)])
def test_large_probing_trees_are_built_at_once(max_depth, max_branch, nodes):
    paths = probe_paths(max_depth, max_branch)
    assert len(set(paths)) == len(paths) == nodes
    assert max(map(sum, paths)) == max_branch - 1


def test_tables_survive_a_file(tmp_path):
    steps = sampled_steps(probe_paths(3, 2), 40, seed=1)
    table = AcceptanceTable.from_counts(count_acceptance(steps), head="abc", source="a test")
    save_acceptance(table, tmp_path / "table.json")
    assert load_acceptance(tmp_path / "table.json") == table
    (tmp_path / "table.json").write_text('{"rates": [[0.5]]}')
    with pytest.raises(ValueError, match="counts"):
        load_acceptance(tmp_path / "table.json")
    with pytest.raises(ValueError, match=INFERRED):
        load_acceptance("eagle9")


def test_a_table_of_another_head_is_refused():
    head, other = {"fc": np.ones((4, 4))}, {"fc": np.zeros((4, 4))}
    table = dataclasses.replace(AcceptanceTable(RATES), head=identity_of(head))
    table.check_head({"fc": np.ones((4, 4))})
    table.check_head({"fc": jnp.ones((4, 4), jnp.bfloat16)})
    with pytest.raises(ValueError, match="belongs to the head"):
        table.check_head(other)
    with pytest.raises(ValueError, match="unknown"):
        AcceptanceTable(RATES).check_head(head)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (count_acceptance, "steps must be the steps of a trace, got 5"),
        (identity_of, "params must be a pytree of arrays, got 5"),
    ],
)
def test_what_has_no_acceptance_or_identity_is_named(function, message):
    with pytest.raises(ValueError, match=message):
        function(5)
    with pytest.raises(ValueError, match="got None"):
        function(None)


def test_the_shipped_table_is_inferred_and_gives_the_published_tau():
    assert shipped_tables() == [INFERRED]
    table = load_acceptance(INFERRED)
    assert table.source.startswith("INFERRED")
    assert table.tau(EAGLE_PATHS) == pytest.approx(4.06)
    assert table == calibrated_table()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("decay", [1.0, 0.9])
def test_calibration_hits_its_tau(shape, decay):
    table = calibrated_table(3.0, SHAPES[shape], decay)
    assert table.tau(EAGLE_PATHS) == pytest.approx(3.0)
    assert table.rates[1][0] == pytest.approx(decay * table.rates[0][0])


@pytest.mark.parametrize("tau", [0.5, 9.0])
def test_calibration_refuses_what_no_rates_give(tau):
    with pytest.raises(ValueError, match="bonus included"):
        calibrated_table(tau)
