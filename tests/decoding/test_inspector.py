"""The decode inspector: its page says what the trace says, and nothing can break out of it."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import jax
import numpy as np
import pytest

from jaxspec import (
    DraftModel,
    GenerationConfig,
    NoDraft,
    PromptLookup,
    TraceStep,
    generate,
    score,
)
from jaxspec.decoding import inspector
from jaxspec.decoding.inspector import page_data, page_html
from jaxspec.decoding.result import Trace

TREE = [(0,), (1,), (0, 0)]
PROMPTS = ["go go go", "<b>&amp;"]
GREEDY = GenerationConfig(max_new_tokens=12, logprobs=True)
SAMPLED = GenerationConfig(
    max_new_tokens=12, num_samples=2, temperature=1.3, top_k=40, warped_logprobs=True
)
HOSTILE = "</script><script>alert(1)</script><!-- %DATA% \u2028 \x00 é漢 \U0001f600"


class Page(HTMLParser):
    """A page's elements, and what its scripts and styles hold."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.held, self.inside = [], {}, None
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if tag in ("script", "style"):
            self.inside = attrs.get("type", tag)

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self.inside = None

    def handle_data(self, data):
        if self.inside:
            self.held[self.inside] = self.held.get(self.inside, "") + data

    @property
    def data(self):
        return json.loads(self.held["application/json"])


@pytest.fixture(scope="module")
def results(byte_model):
    """Traced results by method: of one node, of chains that may be empty, of sampled trees."""
    tree = DraftModel.of(byte_model, paths=TREE)

    def run(drafter, config, prompts=PROMPTS):
        return generate(byte_model, prompts, config, drafter, return_trace=True)

    return {
        "plain": run(NoDraft(), replace(GREEDY, logprobs=False)),
        "chain": run(PromptLookup(num_speculative_tokens=3), GREEDY),
        "greedy tree": run(tree, GREEDY),
        "sampled tree": run(tree, SAMPLED),
    }


METHODS = ["plain", "chain", "greedy tree", "sampled tree"]


@pytest.mark.parametrize("method", METHODS)
def test_the_tree_of_each_step_is_that_of_the_trace(results, method):
    result = results[method]
    data = Page(page_html(result)).data
    assert len(data["rows"]) == len(result)
    for shown, row in zip(data["rows"], result, strict=True):
        assert "".join(shown["pieces"]) == "".join(row.token_texts())
        assert shown["ids"] == row.tokens.tolist()
        assert len(shown["steps"]) == len(row.trace)
        for entry, step, told in zip(shown["steps"], row.trace, row.trace.table(), strict=True):
            assert data["trees"][entry["tree"]] == step.parents.tolist()
            assert entry["ids"] == step.tokens.tolist()
            assert entry["unused"] == np.flatnonzero(~step.valid).tolist()
            assert entry["path"] == step.path[: len(step.emitted) + 1].tolist()
            assert (entry["width"], entry["count"]) == (step.width, len(step.emitted))
            assert entry["seconds"] == pytest.approx(step.seconds, rel=1e-3)
            texts = [data["texts"][place] for place in entry["texts"]]
            assert texts == [node["text"] for node in told["tree"]]
            assert_same_probs(entry.get("draft"), [node["draft_prob"] for node in told["tree"]])
            kind = "warped_target_prob" if step.warped_logprobs is not None else "target_prob"
            assert_same_probs(entry.get("target"), [node[kind] for node in told["tree"]])
        ends = np.cumsum([entry["count"] for entry in shown["steps"]])
        assert ends[-1] == len(row.tokens)
        assert ends[-1] / len(ends) == pytest.approx(row.metrics.tau)


def assert_same_probs(shown, told):
    shown = [None] * len(told) if shown is None else shown
    assert [prob is None for prob in shown] == [prob is None for prob in told]
    known = [prob for prob in told if prob is not None]
    assert [prob for prob in shown if prob is not None] == pytest.approx(known, rel=1e-3)


def test_probabilities_are_there_where_they_were_recorded(results):
    def steps(method):
        (first, *_) = page_data(results[method])["rows"]
        return first["steps"]

    assert not any({"draft", "target", "own"} & step.keys() for step in steps("plain"))
    assert all("target" in step and "draft" not in step for step in steps("greedy tree"))
    assert all({"draft", "target"} <= step.keys() for step in steps("sampled tree"))


def test_the_probability_of_a_node_is_the_targets_given_the_text_of_its_parent(byte_model, results):
    (row, _) = results["greedy tree"]
    text = row.prompt_tokens.tolist()
    for step in row.trace:
        assert step.tokens[0] == text[-1]
        for node in range(1, len(step.tokens)):
            if step.valid[node]:
                branch = branch_of(step, node)
                alone = score(byte_model, [*text[:-1], *branch]).logprobs[-1]
                assert step.logprobs[node] == pytest.approx(alone, abs=1e-4)
        text += step.emitted.tolist()


def branch_of(step, node):
    tokens = []
    while node >= 0:
        tokens.insert(0, int(step.tokens[node]))
        node = step.parents[node]
    return tokens


def test_warped_probabilities_are_those_that_are_sampled_from(byte_model, results):
    row = results["sampled tree"][0]
    text = row.prompt_tokens.tolist()
    for step in row.trace:
        for node in range(1, len(step.tokens)):
            if step.valid[node]:
                branch = branch_of(step, node)
                logits = score(byte_model, [*text[:-1], *branch]).logits[-2] / SAMPLED.temperature
                lowest = np.sort(logits)[-SAMPLED.top_k]
                kept = np.where(logits >= lowest, logits, -np.inf)
                law = np.asarray(jax.nn.softmax(kept))
                told = np.exp(step.warped_logprobs[node])
                assert told == pytest.approx(law[branch[-1]], abs=1e-4)
        text += step.emitted.tolist()


def test_a_trace_without_log_probabilities_has_none(results):
    for step in results["plain"][0].trace:
        assert step.logprobs is None
        assert step.warped_logprobs is None


def test_times_are_those_that_were_measured(results):
    result = results["chain"]
    data = page_data(result)
    longest = max(result, key=lambda row: len(row.trace))
    assert data["step_seconds"] == pytest.approx(sum(s.seconds for s in longest.trace), rel=1e-3)
    assert 0 < data["step_seconds"] < data["seconds"]
    unmeasured = [
        replace(row, trace=Trace(replace(step, seconds=None) for step in row.trace))
        for row in result
    ]
    bare = replace(result, rows=tuple(unmeasured), metrics=result[0].metrics)
    told = page_data(bare)
    assert told["seconds"] is told["compile_seconds"] is told["profile"] is None
    assert all(step["seconds"] is None for row in told["rows"] for step in row["steps"])


def test_rows_have_the_names_that_notebooks_show(results):
    names = [row["name"] for row in page_data(results["sampled tree"])["rows"]]
    assert names == [f"prompt {index}, sample {sample}" for index in (0, 1) for sample in (0, 1)]
    assert all(name in results["sampled tree"]._repr_html_() for name in names)


def test_texts_cannot_leave_the_data(byte_model, results):
    """Each byte is a token: the texts are taken apart, and stand together in the prompt."""
    row = results["greedy tree"][0]
    hostile = np.asarray(byte_model.tokenizer.encode(HOSTILE), np.int32)
    count = len(row.tokens)
    row = replace(row, prompt_tokens=hostile, tokens=hostile[:count])
    page = page_html(replace(results["greedy tree"], rows=(row,)))
    assert page.isascii()
    read = Page(page)
    assert [tag for tag, _ in read.tags].count("script") == 2
    assert read.data["rows"][0]["prompt"] == HOSTILE
    clean = Page(page_html(results["greedy tree"]))
    assert [tag for tag, _ in read.tags] == [tag for tag, _ in clean.tags]
    assert "".join(read.data["rows"][0]["pieces"]) == "".join(row.token_texts())


def test_numbers_that_are_not_finite_are_left_out(results):
    result = results["greedy tree"]
    row = result[0]
    nan = [replace(step, logprobs=np.full_like(step.logprobs, np.nan)) for step in row.trace]
    row = replace(row, trace=Trace(nan), logprobs=np.full_like(row.logprobs, np.nan))
    (shown,) = Page(page_html(replace(result, rows=(row,)))).data["rows"]
    assert {prob for step in shown["steps"] for prob in step["target"]} == {None}


def test_the_page_loads_nothing_and_runs_one_script(results):
    page = page_html(results["chain"])
    read = Page(page)
    loaded = [
        value for _, attrs in read.tags for name, value in attrs.items() if name in ("src", "href")
    ]
    assert loaded == ["data:,"]
    assert set(re.findall(r"https?://[^\s'\"]*", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|innerHTML|eval\(", page)
    (policy,) = [
        attrs["content"]
        for tag, attrs in read.tags
        if tag == "meta" and attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for kind, held in (("script", "module"), ("style", "style")):
        digest = base64.b64encode(hashlib.sha256(read.held[held].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    assert not any(name.startswith("on") for _, attrs in read.tags for name in attrs)
    assert not any("style" in attrs for _, attrs in read.tags)
    assert len(read.held["module"]) + len(read.held["style"]) < 30_000


def test_a_page_is_written_whole_or_not_at_all(results, tmp_path, monkeypatch):
    result = results["chain"]
    path = tmp_path / "new" / "out.html"
    result.save_html(path)
    assert path.read_text() == page_html(result)
    assert [each.name for each in path.parent.iterdir()] == ["out.html"]

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(inspector, "page_html", fail)
    with pytest.raises(OSError, match="disk full"):
        result.save_html(path)
    assert path.read_text().startswith("<!doctype html>")


def test_what_cannot_be_written_is_refused(byte_model, results, tmp_path):
    with pytest.raises(ValueError, match=r"path must be a file to write, but .* is not a plain"):
        results["chain"].save_html(tmp_path)
    with pytest.raises(ValueError, match="path must be a text or a path, got None"):
        results["chain"].save_html(None)
    untraced = generate(byte_model, "go", max_new_tokens=2)
    with pytest.raises(ValueError, match=r"save_html .*decode with return_trace=True"):
        untraced.save_html(tmp_path / "out.html")
    assert not list(tmp_path.iterdir())


def step_of(tokens, width=5):
    """A chain of four drafts, of which the first stands."""
    return TraceStep(
        tokens=np.asarray(tokens[:5]),
        parents=np.arange(-1, 4),
        valid=np.ones(5, bool),
        draft_logprobs=None,
        law_row=np.zeros(5, int),
        path=np.asarray([0, 1]),
        emitted=np.asarray(tokens[5:7]),
        width=width,
        seconds=0.001,
    )


@pytest.fixture(scope="module")
def long_result(results):
    """A row of 3000 steps."""
    row = results["chain"][0]
    trace = Trace(replace(step_of(range(7)), tokenizer=row.tokenizer) for _ in range(3000))
    tokens = np.tile([5, 6], 3000)
    long = replace(
        row, trace=trace, tokens=tokens, from_draft=np.tile([True, False], 3000), logprobs=None
    )
    return replace(results["chain"], rows=(long,))


def test_a_long_decode_makes_a_page_of_moderate_size(long_result):
    per_step = (len(page_html(long_result)) - len(page_html(replace(long_result, rows=())))) / 3000
    assert per_step < 250  # characters, of a chain of four drafts


class TestInABrowser:
    """Real keys in Chromium, on a phone's width and a desktop's, light and dark."""

    @pytest.fixture
    def address(self, results, tmp_path):
        def of(method, result=None):
            path = tmp_path / f"{method}.html"
            (result or results[method]).save_html(path)
            return path.as_uri()

        return of

    @pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (360, "light"), (1200, "dark")])
    @pytest.mark.parametrize("method", METHODS)
    def test_keys_step_through_the_text(self, browser, results, address, method, width, scheme):
        row = results[method][0]
        count = len(row.trace)
        keys = ["ArrowRight", "ArrowLeft", "End", "Home", *["ArrowRight"] * (count - 1)]
        url = address(method)
        seen = browser(
            "inspect", url, width=width, scheme=scheme, acts=[{"key": key} for key in keys], tabs=20
        )
        assert seen["problems"] == []
        assert seen["requests"] == [["GET", url]] * 2  # opened, and loaded again
        is_dark = max(map(int, re.findall(r"\d+", seen["ground"]))) < 64
        assert is_dark == (scheme == "dark")
        first, right, left, end, home, *walk = seen["seen"]
        assert [each["step"] for each in (first, right, left, end, home)] == [1, 2, 1, count, 1]
        assert end["text"] == walk[-1]["text"] == "".join(row.token_texts())
        walk = [home, *walk]
        for number, (here, step) in enumerate(zip(walk, row.trace, strict=True), start=1):
            assert here["step"] == number
            done = row.trace[:number]
            emitted = sum(len(each.emitted) for each in done)
            assert here["text"] == "".join(row.token_texts()[:emitted])
            assert float(here["tau"]) == pytest.approx(emitted / number, abs=0.0051)
            assert here["width"] == str(step.width)
            kept = min(len(step.path), len(step.emitted) + 1) - 1
            own = int(len(step.emitted) == len(step.path))
            assert here["nodes"] == [1, kept, int(step.valid.sum()) - 1 - kept, own]
            assert here["drafted"] == row.from_draft[:emitted].sum()
            if number > 1:
                assert_looks_well(here)
        assert {"row", "step", "play", "next", "speed", "tree", "text"} <= {*seen["reached"]}

    def test_space_plays_to_the_end(self, browser, results, address):
        count = len(results["chain"][0].trace)
        acts = [
            {"select": "#speed", "value": "30"},
            {"click": "#text"},
            {"key": " ", "until": 3},
            {"key": " "},
            {"key": " ", "until": count},
        ]
        url = address("chain")
        _, _, _, playing, paused, ended = browser(
            "inspect", url, width=700, scheme="light", acts=acts
        )["seen"]
        assert playing["play"] == "Pause"
        assert paused["play"] == ended["play"] == "Play"
        assert ended["text"] == "".join(results["chain"][0].token_texts())

    def test_another_row_is_chosen_by_name(self, browser, results, address):
        acts = [{"select": "#row", "value": "3"}, {"click": "#last"}]
        url = address("sampled tree")
        _, chosen, last = browser("inspect", url, width=360, scheme="dark", acts=acts)["seen"]
        row = results["sampled tree"][3]
        assert chosen["step"] == 1
        assert last["text"] == "".join(row.token_texts())
        assert "draft's" in last["probabilities"]
        assert f"tau {row.metrics.tau:.2f} (bonus token included)" in last["facts"]

    def test_what_was_written_is_text(self, browser, byte_model, results, address):
        row = results["greedy tree"][0]
        hostile = np.asarray(byte_model.tokenizer.encode(HOSTILE), np.int32)
        row = replace(row, prompt_tokens=hostile, tokens=hostile[: len(row.tokens)])
        url = address("hostile", replace(results["greedy tree"], rows=(row,)))
        acts = [{"key": "End"}]
        seen = browser("inspect", url, width=360, scheme="light", acts=acts, table=True)
        assert seen["problems"] == []
        assert seen["seen"][-1]["prompt"] == HOSTILE
        assert seen["seen"][-1]["elements"] == 0

    def test_its_policy_lets_no_request_out(self, browser, address):
        url, elsewhere = address("chain"), "http://127.0.0.1:9/"
        seen = browser("inspect", url, width=360, scheme="light", elsewhere=elsewhere)
        assert seen["refused"] == "connect-src"

    def test_thousands_of_steps_are_one_key_away(self, browser, long_result, address):
        url = address("long", long_result)
        acts = [{"key": "End"}, {"key": "ArrowLeft"}, {"key": "Home"}]
        seen = browser("inspect", url, width=360, scheme="light", acts=acts)
        assert seen["problems"] == []
        _, end, back, home = seen["seen"]
        assert [end["step"], back["step"], home["step"]] == [3000, 2999, 1]
        assert len(end["text"]) == 6000
        assert len(home["text"]) == 2
        assert end["nodes"] == [1, 1, 3, 1]

    def test_a_row_without_steps_is_said(self, browser, byte_model, address):
        none = generate(byte_model, "go", max_new_tokens=0, return_trace=True)
        seen = browser("inspect", address("none", none), width=360, scheme="light")
        assert seen["problems"] == []
        assert seen["seen"][0]["empty"]


def assert_looks_well(seen):
    """WCAG 2.2 AA: contrast of text 4.5, of what marks a control 3; targets 24 pixels."""
    assert [each for each in seen["texts"] if each["contrast"] < 4.5] == []
    assert [each for each in seen["texts"] if each["size"] < 11] == []
    assert [each for each in seen["edges"] if each["contrast"] < 3] == []
    assert seen["unnamed"] == seen["small"] == []
    assert seen["overflow"] <= 0, "a narrow screen scrolls sideways"
