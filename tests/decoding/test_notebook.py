"""Pictures of results: well-formed, escaped, and true to what happened."""

import itertools
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from jaxspec import (
    DraftModel,
    Generation,
    GenerationConfig,
    GenerationResult,
    TraceStep,
    chain,
    eagle_tree,
    generate,
)
from jaxspec.decoding.metrics import Counts, Metrics
from jaxspec.decoding.notebook import (
    generation_html,
    result_html,
    step_svg,
    trace_html,
    tree_svg,
    visible,
)
from jaxspec.decoding.result import Trace

NAMESPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def step(tokenizer):
    """Root "a" with children "b" (accepted, above "<" and "c") and " ", and an unused node."""
    tokens = [tokenizer.encode(text)[0] for text in ("a", "b", " ", "<", "c", "d")]
    laws = np.log(np.full((2, tokenizer.vocab_size), 1 / tokenizer.vocab_size, np.float32))
    return TraceStep(
        tokens=np.asarray(tokens),
        parents=np.asarray([-1, 0, 0, 1, 1, 2]),
        valid=np.asarray([True, True, True, True, True, False]),
        draft_logprobs=laws,
        law_row=np.asarray([0, 0, 0, 1, 1, 1]),
        path=np.asarray([0, 1, 3]),
        emitted=np.asarray([tokens[1], tokens[3], tokens[4]]),
        width=8,
        tokenizer=tokenizer,
    )


def generation_of(tokenizer, text, from_draft=None, prompt="p"):
    tokens = np.asarray(tokenizer.encode(text), np.int32)
    source = np.zeros(len(tokens), bool) if from_draft is None else np.asarray(from_draft)
    steps = (len(tokens), 0)
    counts = Counts(len(tokens), len(tokens), accepted=steps, drafted=steps)
    return Generation(
        prompt_tokens=np.asarray(tokenizer.encode(prompt), np.int32),
        tokens=tokens,
        text=text,
        finish_reason="length",
        from_draft=source,
        logprobs=None,
        warped_logprobs=None,
        metrics=Metrics.of([counts], [tokens.tolist()]),
        tokenizer=tokenizer,
    )


class Reader(HTMLParser):
    """Collects what a page shows, and fails on tags that are not closed in order."""

    def __init__(self, source):
        super().__init__()
        self.shown, self.open, self.tags = "", [], []
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.append((tag, dict(attrs)))

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.shown += data


@pytest.fixture(scope="module")
def decoded(byte_model):
    """Two samples of a random network that drafts for itself, traced."""
    drafter = DraftModel.of(byte_model, paths=[(0,), (1,), (0, 0)])
    sampling = GenerationConfig(max_new_tokens=12, temperature=1.0, num_samples=2, logprobs=True)
    return generate(byte_model, "go", sampling, drafter, return_trace=True)


def test_pictures_of_real_results_tell_what_happened(decoded):
    assert not Reader(decoded._repr_html_()).open
    for row in decoded:
        spans = token_spans(row._repr_html_())
        assert [("solid" in span["style"]) for span in spans] == row.from_draft.tolist()
        assert all("log-probability" in span["title"] for span in spans)
        table = row.trace.table()
        assert sum(len(step["accepted"]) for step in table) == row.from_draft.sum()
        assert sum(len(step["emitted"]) for step in table) == len(row.tokens)
        assert np.concatenate([step.emitted for step in row.trace]).tolist() == row.tokens.tolist()
        for step in row.trace:
            assert len(ElementTree.fromstring(step._repr_html_()))
        assert Reader(row.trace._repr_html_()).shown.count("tree of step")


def token_spans(source):
    return [attrs for tag, attrs in Reader(source).tags if tag == "span" and "title" in attrs]


def boxes(svg):
    return list(ElementTree.fromstring(svg).iter(f"{NAMESPACE}rect"))


def labels(svg):
    return [text.text for text in ElementTree.fromstring(svg).iter(f"{NAMESPACE}text")]


def test_tokens_are_marked_by_their_source_in_two_ways(tokenizer):
    source = [True, False, True]
    spans = token_spans(generation_html(generation_of(tokenizer, "xyz", source)))
    assert [("solid" in span["style"]) for span in spans] == source
    assert [("dotted" in span["style"]) for span in spans] == [not drafted for drafted in source]
    assert len({span["style"] for span in spans}) == 2


def test_running_text_reads_as_the_text_itself(tokenizer):
    text = "if a < b && c:\n\tprint('é 漢')"
    shown = Reader(generation_html(generation_of(tokenizer, text))).shown
    assert text in shown.replace("↵", "").replace("⇥", "")


def test_a_character_of_several_tokens_belongs_to_the_one_that_completes_it(tokenizer):
    assert generation_of(tokenizer, "é漢").token_texts() == ["", "é", "", "", "漢"]


def test_text_cannot_bring_in_markup(tokenizer, step):
    hostile = '"><script>alert(1)</script><b onclick="x">&amp;'
    generation = generation_of(tokenizer, hostile, prompt=hostile)
    bad_step = replace(step, tokens=np.asarray(tokenizer.encode(hostile)[:6]))
    for page in (
        generation_html(generation),
        result_html(GenerationResult((generation,), generation.metrics)),
        trace_html(Trace((bad_step,))),
    ):
        tags = Reader(page).tags
        assert "script" not in {tag for tag, _ in tags}
        assert not any(name.startswith("on") for _, attrs in tags for name in attrs)
    assert hostile in Reader(generation_html(generation)).shown


def test_special_tokens_and_control_characters_are_spelled_out(tokenizer):
    special = tokenizer.token_id("<s>")
    generation = replace(
        generation_of(tokenizer, "\x07"),
        tokens=np.asarray([special, *tokenizer.encode("\x07")]),
        from_draft=np.zeros(2, bool),
    )
    shown = Reader(generation_html(generation)).shown
    assert "<s>" in shown
    assert r"\x07" in shown
    assert "\x07" not in shown


def test_without_a_tokenizer_ids_are_shown(tokenizer, step):
    generation = replace(generation_of(tokenizer, "ab"), tokenizer=None)
    assert " ".join(map(str, generation.tokens)) in Reader(generation_html(generation)).shown
    assert str(step.tokens[0]) in labels(step_svg(replace(step, tokenizer=None)))


@pytest.mark.parametrize("count", [1, 8, 11])
def test_a_long_result_says_what_it_leaves_out(tokenizer, count):
    row = generation_of(tokenizer, "ab")
    shown = Reader(GenerationResult((row,) * count, row.metrics)._repr_html_()).shown
    assert ("and 3 more" in shown) == (count == 11)
    assert "bonus included" in shown


def test_a_result_of_samples_names_them(tokenizer):
    row = generation_of(tokenizer, "ab")
    result = GenerationResult((row, replace(row, sample_index=1)), row.metrics)
    assert "sample 1" in Reader(result_html(result)).shown


@pytest.mark.parametrize("tree", [chain(0), chain(4), eagle_tree()])
def test_a_tree_shows_every_node_once_and_none_over_another(tree):
    svg = tree_svg(tree)
    places = [(float(box.get("x")), float(box.get("y"))) for box in boxes(svg)]
    assert len(set(places)) == len(tree.parents)
    assert labels(svg) == [str(node) for node in range(len(tree.parents))]
    lefts = dict(zip(range(len(places)), (left for left, _ in places), strict=True))
    for node, parent in enumerate(tree.parents[1:].tolist(), start=1):
        assert lefts[node] > lefts[parent]
    by_column = {}
    for (left, top), box in zip(places, boxes(svg), strict=True):
        by_column.setdefault(left, []).append((top, float(box.get("height"))))
    for column in by_column.values():
        column.sort()
        for (top, height), (below, _) in itertools.pairwise(column):
            assert top + height < below


def test_a_step_marks_the_accepted_path_and_the_targets_own_token(step):
    shown = labels(step_svg(step))
    assert [label for label in shown if label.startswith("✓ ")] == ["✓ b", "✓ <", "✓ accepted"]
    assert shown.count("-") == 1  # the unused node: its token means nothing
    assert "·" in shown  # the rejected space
    assert shown.count("c") == 2  # rejected as a draft, then emitted by the target
    assert "the target's own" in shown
    assert len(boxes(step_svg(step))) == 6 + 1 + 4  # nodes, the target's token, the legend


def test_a_step_that_a_stop_cut_short_shows_only_what_was_emitted(step):
    shown = labels(step_svg(replace(step, emitted=step.emitted[:1])))
    assert [label for label in shown if label.startswith("✓ ")] == ["✓ b", "✓ accepted"]
    assert "the target's own" not in shown


def test_deterministic_drafts_show_no_probability(step):
    assert any(label.endswith("%") for label in labels(step_svg(step)))
    greedy = replace(step, draft_logprobs=None)
    assert not any(label.endswith("%") for label in labels(step_svg(greedy)))


def test_a_trace_is_a_table_of_plain_values(step, tokenizer):
    (row,) = Trace((step,)).table()
    assert row["path"] == [0, 1, 3]
    assert row["accepted"] == ["b", "<"]
    assert row["emitted"] == ["b", "<", "c"]
    assert row["distributions"] == 2
    assert row["width"] == 8
    assert [node["accepted"] for node in row["tree"]] == [True, True, False, True, False, False]
    assert [node["valid"] for node in row["tree"]].count(False) == 1
    assert row["tree"][0]["draft_prob"] is None
    assert row["tree"][1]["draft_prob"] == pytest.approx(1 / tokenizer.vocab_size)
    plain = {type(value) for node in row["tree"] for value in node.values()}
    assert plain <= {int, float, str, bool, type(None)}


def test_a_trace_as_a_page_offers_its_trees(step):
    page = trace_html(Trace((step,) * 9))
    assert len(re.findall("<svg", page)) == 8
    assert Reader(page).shown.count("tree of step") == 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [(" the", "·the"), ("a  b ", "a  b·"), ("\n\n", "↵↵"), ("\tx", "⇥x"), ("\x1b[0m", r"\x1b[0m")],
)
def test_white_space_is_visible(text, expected):
    assert visible(text) == expected
