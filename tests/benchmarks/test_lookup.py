"""Edits of code, the target that writes their answers, and the page of the suite `lookup`."""

import ast
import json
import re

import jax.numpy as jnp
import pytest

from benchmarks.edits import EDITS, NUM_ROWS
from benchmarks.suites.lookup import Copied, Dictated, lookup_page
from jaxspec import generate
from jaxspec.checkpoint import Model
from jaxspec.decoding.metrics import Counts
from jaxspec.drafters import PromptLookup, SuffixLookup
from jaxspec.measure.comparison import Divergence

CODE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def test_every_answer_is_the_function_with_a_small_edit():
    rows = [json.loads(line) for line in EDITS.read_text().splitlines()]
    assert len(rows) == NUM_ROWS == len({row["source"] for row in rows})
    assert EDITS.stat().st_size < 150_000
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


@pytest.mark.parametrize(("gap", "agree"), [(1e-6, True), (0.5, False)])
def test_rows_that_differ_by_more_than_a_tie_are_told(gap, agree):
    counts = Counts(num_tokens=30, num_steps=10, num_nodes=40)
    job = Copied("GSM8K", "suffix lookup", counts, "abc", (Divergence(0, 3, 1, 2, gap),), 0.25)
    page = lookup_page("demo", [job], {"suffix lookup": counts})
    assert page.agree is agree
    jobs, answers = page.sections
    assert jobs.rows == [["GSM8K", "suffix lookup", "3.00", "4.00", "`abc`", "1", "25.0%"]]
    assert len(jobs.notes) == 1
    assert answers.rows == [["suffix lookup", "3.00", "4.00"]]
