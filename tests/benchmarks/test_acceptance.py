"""The suite `acceptance`: rules, edits of code, chains that end early, and the page."""

import ast
import dataclasses
import gzip
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.edits import EDITS, NUM_ROWS
from benchmarks.harness import measure
from benchmarks.prompts import GSM8K, SuitePrompt
from benchmarks.suites import SUITES, acceptance
from benchmarks.suites.acceptance import (
    ByKind,
    ChainFigures,
    Copied,
    Dictated,
    Judged,
    acceptance_page,
    at_equal_tau,
    counts_of,
    decode_rows,
    judging_node_by_node,
    measure_chains,
    measure_kinds,
    measure_rules,
    saved_at_equal_tau,
    verify_node_by_node,
)
from jaxspec import DraftModel, GenerationConfig, generate
from jaxspec.batch.rows import rows_of
from jaxspec.checkpoint import Model
from jaxspec.core import decode
from jaxspec.core.verify import verify
from jaxspec.decoding.metrics import Counts
from jaxspec.drafters import PromptLookup, SuffixLookup
from jaxspec.measure.comparison import Divergence
from tests.measure.models import filling_model


@pytest.fixture(scope="module")
def draft(model) -> Model:
    """A draft model with nearly the weights of the target."""
    rng = np.random.default_rng(0)
    network = jax.tree.map(
        lambda weight: weight * rng.uniform(0.5, 1.5, weight.shape).astype(weight.dtype),
        model.network,
    )
    return dataclasses.replace(model, network=network)


CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def test_every_answer_is_the_function_with_a_small_edit():
    rows = [json.loads(line) for line in gzip.decompress(EDITS.read_bytes()).splitlines()]
    assert len(rows) == NUM_ROWS == len({row["source"] for row in rows})
    assert EDITS.stat().st_size < 20_000
    for row in rows:
        before, after = (CODE.search(row[name])[1] for name in ("prompt", "answer"))
        ast.parse(before)
        ast.parse(after)
        old, new = before.splitlines(), after.splitlines()
        kept = sum(line in old for line in new)
        assert old != new
        assert kept > len(new) / 3


@pytest.mark.parametrize("drafter", [None, PromptLookup(), SuffixLookup()])
def test_a_target_writes_what_it_is_told_to(drafter):
    text = [5, 6, 7, 8, 9, 10, 1, 5, 6, 7, 8, 9, 11, 2]
    dictated = Dictated(jnp.array(text + [2] * 50), vocab_size=12)
    model = Model.of(dictated, max_positions=64, stop_token_ids=(2,))
    (row,) = generate(model, text[:7], drafter, max_new_tokens=20)
    assert row.tokens.tolist() == text[7:]
    assert (row.metrics.tau > 1) == (drafter is not None)


def chain(length: int, threshold: float, tokens: int, drafted: int, accepted: int, **others):
    """Made up, of ten passes."""
    counts = Counts(num_tokens=tokens, num_steps=10, num_nodes=drafted)
    return ChainFigures("draft model", length, threshold, counts, accepted, **others)


# tau 4, 3 and 2; 2, 1.5 and 1.2 drafted tokens for each that was accepted.
EARLY = [chain(16, 0.1, 40, 60, 30), chain(16, 0.3, 30, 30, 20), chain(16, 0.7, 20, 12, 10)]
JUDGED = Judged("EAGLE-1", np.array([[10, 20], [10, 30]]), np.array([[10, 22], [10, 33]]), 0.1)

TEN_PASSES = Counts(num_tokens=25, num_steps=10, num_nodes=20)
KINDS = [ByKind("EAGLE-1", {"all": TEN_PASSES, "0 that repeat little": Counts()}, ())]


@pytest.mark.parametrize(("gap", "agree"), [(1e-6, True), (0.5, False)])
def test_rows_that_differ_by_more_than_a_tie_are_told(gap, agree):
    counts = Counts(num_tokens=30, num_steps=10, num_nodes=40)
    other = Counts(num_tokens=25, num_steps=10, num_nodes=20)
    found = (Divergence(0, 3, 1, 2, gap),)
    jobs = [
        Copied("GSM8K", "prompt lookup", other, "abc", (), 0.25),
        Copied("GSM8K", "suffix lookup", counts, "abc", found, 0.25),
    ]
    page = acceptance_page("demo", [JUDGED], KINDS, jobs, {"suffix lookup": counts}, EARLY, 0.3)
    assert page.agree is agree
    assert [section.title for section in page.sections if section.level == 2][1:] == [
        "Rules of verification at temperature 1",
        "Kinds of prompts",
        "Copied drafts",
        "Copied drafts for a target that does what the edits ask for",
        "Drafts that end early",
    ]
    _, rules, kinds, copied, answers, _, chains = page.sections
    assert kinds.rows == [["EAGLE-1", "2.50", "-", "0"]]
    assert rules.rows == [["EAGLE-1", "2.500", "2.750", "+10.0% [+10.0%, +10.0%]", "10.0%"]]
    assert copied.rows == [
        ["GSM8K", "prompt lookup", "2.50", "", "2.00", "`abc`", "0", "25.0%"],
        [
            *("GSM8K", "suffix lookup", "3.00", "1.200 times prompt lookup", "4.00", "`abc`"),
            *("1", "25.0%"),
        ],
    ]
    assert len(copied.notes) == 1
    assert answers.rows == [["suffix lookup", "3.00", "4.00"]]
    assert chains.rows[0] == [
        *("draft model", "up to 16, threshold 0.1", "4.00", "6.00", "2.00", "0")
    ]
    json.dumps(page.as_dict(), allow_nan=False)


def test_a_chain_that_differs_is_told():
    wrong = chain(4, 0.0, 25, 40, 15, divergences=(Divergence(0, 3, 1, 2, 0.5),))
    page = acceptance_page("demo", [JUDGED], KINDS, [], {}, [wrong], 0.3)
    assert not page.agree
    assert page.sections[-1].notes[0].startswith("DIFFERENT: draft model, fixed, 4, prompt 0")


def test_equal_tau_lies_between_two_thresholds():
    assert at_equal_tau(EARLY, 3.5) == pytest.approx(1.75)
    assert at_equal_tau(EARLY, 2.0) == pytest.approx(1.2)
    assert at_equal_tau(EARLY, 4.01) is None
    assert at_equal_tau(EARLY, 1.99) is None


def test_a_fixed_chain_is_compared_with_its_own_drafter():
    others = [each._replace(drafter="EAGLE-1", num_accepted=1) for each in EARLY]
    fixed = [chain(4, 0.0, 35, 50, 25), chain(5, 0.0, 36, 50, 25), chain(8, 0.0, 50, 80, 40)]
    page = acceptance_page("demo", [JUDGED], KINDS, [], {}, [*others, *fixed, *EARLY], 0.3)
    # tau 3.5: 1.75 instead of 2; tau 5 is out of reach; chains of 5 are not compared.
    assert page.sections[5].rows == [
        ["draft model", "4", "3.50", "2.00", "1.75", "-12%"],
        ["draft model", "8", "5.00", "2.00", "-", "-"],
    ]
    assert [each.change for each in saved_at_equal_tau([*fixed, *EARLY])] == [-0.125, None]


PROMPTS = rows_of([[1, 2, 3], [4, 5, 6, 7]])
SAMPLED = GenerationConfig(12, temperature=1.0, num_samples=2)


def test_the_rule_is_put_back_after_an_error():
    with judging_node_by_node():
        assert decode.verify is verify_node_by_node
    assert decode.verify is verify
    with pytest.raises(KeyError), judging_node_by_node():
        raise KeyError
    assert decode.verify is verify


def test_both_rules_are_measured(model, draft):
    drafter, said = DraftModel.of(draft, 3), []
    (found,) = measure_rules(model, PROMPTS, {"draft model": drafter}, SAMPLED, said.append)
    assert said == ["draft model, whole paths", "draft model, node by node"]
    # The library's own rule judges here again.
    records = decode_rows(model, PROMPTS, SAMPLED, drafter)
    assert found.by_path.sum(axis=0).tolist() == [
        counts_of(records).num_steps,
        counts_of(records).num_tokens,
    ]
    assert found.by_path[:, 1].tolist() == [24, 24]
    assert not np.array_equal(found.by_node, found.by_path)
    low, high = found.gain_interval
    assert low <= found.gain <= high


def test_each_kind_of_prompt_is_counted(model, draft):
    asked = [("sums", "1 + 1"), ("texts", "one"), ("sums", "2")]
    prompts = [SuitePrompt(*each) for each in asked]
    config, drafters = GenerationConfig(8), {"draft model": DraftModel.of(draft, 3)}
    (found,) = measure_kinds(model, prompts, drafters, config, lambda _: None)
    assert found.divergences == ()
    *kinds, little = found.counts
    assert kinds == ["sums", "texts", "all"]
    assert little.endswith(" that repeat little")
    for kind in ("sums", "texts"):
        texts = [each.text for each in prompts if each.category == kind]
        counts = generate(model, texts, config, DraftModel.of(draft, 3)).metrics.counts
        assert found.counts[kind].num_steps == counts.num_steps
        assert found.counts[kind].num_tokens == counts.num_tokens


def test_chains_are_counted_as_generate_counts_them(model, draft, monkeypatch):
    monkeypatch.setattr(acceptance, "_FIXED", (2,))
    monkeypatch.setattr(acceptance, "_THRESHOLDS", (0.02, 0.2))
    monkeypatch.setattr(acceptance, "_LONGEST", 3)
    config, drafters = GenerationConfig(12), {"draft model": DraftModel.of(draft)}
    (fixed, *early), repeated = measure_chains(model, PROMPTS, drafters, config, lambda _: None)
    assert [(each.length, each.threshold) for each in early] == [(3, 0.02), (3, 0.2)]
    assert 0 <= repeated < 1
    for each in (fixed, *early):
        drafter = DraftModel.of(draft, each.length, threshold=each.threshold or 1e-9)
        result = generate(model, [row.prompt for row in PROMPTS], config, drafter)
        counts = result.metrics.counts
        assert each.divergences == ()
        assert (each.counts.num_tokens, each.counts.num_steps) == (24, counts.num_steps)
        assert each.counts.num_nodes == counts.num_nodes > 0
        assert each.num_accepted == sum(i * steps for i, steps in enumerate(counts.accepted))
    assert early[0].counts.num_nodes > early[1].counts.num_nodes


@pytest.mark.slow
@pytest.mark.usefixtures("shipped")
def test_the_suite_is_measured(model, draft, head, data_folder, monkeypatch):
    target = dataclasses.replace(model, name="demo")  # for which the head was made
    models = {"demo": target, "demo-draft": draft, "demo-deer": filling_model("deer", 4)}
    monkeypatch.setattr(acceptance, "load", models.__getitem__)
    monkeypatch.setattr(acceptance, "load_eagle", lambda name, network: head)
    monkeypatch.setattr(acceptance, "write_answers", lambda model, drafter: Counts(3, 1, 2))
    for name, value in {
        "COPIED_FROM": (GSM8K,),
        "_FIXED": (2, 4),
        "_THRESHOLDS": (0.02, 0.2),
        "_LONGEST": 5,
        "_SAMPLES": 2,
    }.items():
        monkeypatch.setattr(acceptance, name, value)
    suite = dataclasses.replace(SUITES["acceptance"], needs=(), max_new_tokens=8)
    page = measure("acceptance", suite, data_folder, 2, progress=False)
    assert page.agree
    _, rules, kinds, copied, answers, saved, chains = page.sections
    sizes = [len(section.rows) for section in (rules, kinds, copied, answers, saved, chains)]
    assert sizes == [6, 7, 5, 2, 3, 12]
    drafted = {row[1]: float(row[4]) for row in copied.rows}
    assert drafted["plain"] == 0 < drafted["EAGLE-1, searched tree"]
    json.dumps(page.as_dict(), allow_nan=False)
