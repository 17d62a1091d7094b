"""The model of lm-evaluation-harness: its answers are those of plain passes and of `generate`.

Without the harness, a stand-in with the parts of its interface (of 0.4.13) that are used.
"""

import importlib.util
import sys
import types

import numpy as np
import pytest

import jaxspec
from jaxspec.extras import MissingExtra
from jaxspec.lm_eval import as_lm
from tests.measure.models import filling_model, tiny_model

TEXT = "one, two, three"


class Request:
    """The fields of `lm_eval.api.instance.Instance` that are read."""

    def __init__(self, *args):
        self.args = args


class Hook:
    """Collects what a cache would keep."""

    def __init__(self, _=None):
        self.kept = []

    def add_partial(self, *entry):
        self.kept.append(entry)


def stand_in() -> dict[str, types.ModuleType]:
    """Modules as of `lm_eval`, without caches, bars and warnings."""

    class TemplateLM:
        def __init__(self):
            self.cache_hook = Hook()

        def loglikelihood(self, requests):
            pairs = []
            for context, continuation in (request.args for request in requests):
                spaces = len(context) - len(context.rstrip())
                if context == "":
                    after = self.tok_encode(continuation, add_special_tokens=False)
                    pair = [self.prefix_token_id], after
                else:
                    moved = context[len(context) - spaces :] + continuation
                    before = self.tok_encode(context.rstrip())
                    pair = before, self.tok_encode(context.rstrip() + moved)[len(before) :]
                pairs.append(((context, continuation), *pair))
            return self._loglikelihood_tokens(pairs)

    def get_rolling_token_windows(tokens, prefix, most, context_len):
        assert context_len == 1
        for start in range(0, len(tokens), most):
            end = min(start + most, len(tokens))
            shifted = [prefix, *tokens]
            # The last window is as long as the others, and predicts its end.
            yield shifted[max(0, end - most) : end] if start else shifted[:end], tokens[start:end]

    def normalize_gen_kwargs(asked, default=256):
        until = asked.get("until", [])
        until = until if isinstance(until, list) else [until]
        return {**asked, "until": until, "max_gen_toks": asked.get("max_gen_toks", default)}

    def module(name, **parts):
        made = types.ModuleType(name)
        vars(made).update(parts)
        return made

    return {
        "lm_eval": module("lm_eval"),
        "lm_eval.api": module("lm_eval.api"),
        "lm_eval.api.model": module("lm_eval.api.model", TemplateLM=TemplateLM),
        "lm_eval.models": module("lm_eval.models"),
        "lm_eval.models.utils": module(
            "lm_eval.models.utils", normalize_gen_kwargs=normalize_gen_kwargs
        ),
        "lm_eval.utils": module(
            "lm_eval.utils",
            get_rolling_token_windows=get_rolling_token_windows,
            make_disjoint_window=lambda pair: (pair[0][: len(pair[0]) - len(pair[1]) + 1], pair[1]),
        ),
    }


@pytest.fixture(params=["stand-in", "lm_eval"])
def harness(request, monkeypatch):
    if request.param == "stand-in":
        for name, module in stand_in().items():
            monkeypatch.setitem(sys.modules, name, module)
    elif importlib.util.find_spec("lm_eval") is None:
        pytest.skip("needs the extra `lm-eval`: '.[lm-eval]'")


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def summed(model, ids, count) -> tuple[float, bool]:
    """A plain loop over the last `count` tokens."""
    scores, total, greedy = jaxspec.score(model, ids), 0.0, True
    for place in range(len(ids) - count, len(ids)):
        total += float(scores.logprobs[place - 1])
        greedy &= int(np.argmax(scores.logits[place - 1])) == ids[place]
    return total, greedy


@pytest.mark.usefixtures("harness")
class TestLikelihoods:
    """Sums of what `jaxspec.score` says."""

    def test_of_continuations(self, model):
        encode = model.tokenizer.encode
        likeliest = jaxspec.generate(model, TEXT, max_new_tokens=3)
        pairs = [("one, two", ", three"), ("one, two, ", "three"), ("", "one")]
        found = as_lm(model).loglikelihood([Request(*pair) for pair in pairs])
        whole = encode(TEXT)
        # Spaces at the end of a context belong to what follows.
        for likelihood, context in zip(found, ("one, two", "one, two,"), strict=False):
            count = len(whole) - len(encode(context))
            assert likelihood == pytest.approx(summed(model, whole, count))
        lm = as_lm(model)
        ids = [lm.prefix_token_id, *encode("one", special_tokens=False)]
        assert found[2] == pytest.approx(summed(model, ids, len(ids) - 1))
        asked = [(("a", "b"), encode(TEXT), likeliest[0].tokens.tolist())]
        assert lm._loglikelihood_tokens(asked)[0][1] is True

    def test_a_text_that_is_too_long_is_cut_at_its_beginning(self, model):
        ids = list(np.random.default_rng(0).integers(1, 200, model.max_positions + 7).tolist())
        found = as_lm(model)._loglikelihood_tokens([(("a", "b"), ids[:-4], ids[-4:])])
        assert found == [pytest.approx(summed(model, ids[-model.max_positions :], 4))]

    def test_of_whole_texts_window_by_window(self, model):
        lm = as_lm(model)
        long = "abc " * model.max_positions
        found = lm.loglikelihood_rolling([Request(TEXT), Request(long)])
        encode = model.tokenizer.encode
        ids = [lm.prefix_token_id, *encode(TEXT, special_tokens=False)]
        assert found[0] == pytest.approx(summed(model, ids, len(ids) - 1)[0])
        tokens, most = encode(long, special_tokens=False), model.max_positions - 1
        expected, start = 0.0, 0
        while start < len(tokens):
            end = min(start + most, len(tokens))
            text = [lm.prefix_token_id, *tokens][max(0, end - most) : end + 1]
            expected += summed(model, text, end - start)[0]
            start = end
        assert found[1] == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("harness")
class TestAnswers:
    """Those of `generate`, each request with its own settings."""

    def test_in_the_order_of_the_requests(self, model):
        lm = as_lm(model, jaxspec.PromptLookup(), progress=False)
        lm.cache_hook = Hook()
        asked = [
            ("one, two, one", {"until": ["zzz"], "max_gen_toks": 9}),
            ("abc", {"until": "b", "max_gen_toks": 12, "do_sample": False}),
            ("xyz xyz", {"until": ["zzz"], "max_gen_toks": 9}),
        ]
        requests = [Request(*each) for each in asked]
        expected = [
            jaxspec.generate(
                model, text, max_new_tokens=how["max_gen_toks"], stop=how["until"]
            ).texts[0]
            for text, how in asked
        ]
        assert lm.generate_until(requests) == expected
        kept = {entry[1]: entry[2] for entry in ((a, b[0], c) for a, b, c in lm.cache_hook.kept)}
        assert kept == dict(zip((text for text, _ in asked), expected, strict=True))

    def test_sampling_is_asked_for(self, model):
        lm, how = as_lm(model, seed=3), {"until": [], "max_gen_toks": 6}
        sampled = {**how, "do_sample": True, "temperature": 1.0, "top_k": 5}
        expected = jaxspec.generate(
            model, "abc", max_new_tokens=6, temperature=1.0, top_k=5, seed=3
        )
        assert lm.generate_until([Request("abc", sampled)]) == expected.texts

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"drafter": "x"}, "^drafter"),
            ({"job": 5}, "^job must be of type JobSettings, got 5"),
            ({"seed": "x"}, "^seed must be a whole number, got 'x'"),
            ({"progress": "no"}, "^progress must be True or False, got 'no'"),
        ],
    )
    def test_wrong_arguments_are_refused_before_the_first_task(self, model, arguments, message):
        with pytest.raises(ValueError, match=message):
            as_lm(model, **arguments)

    def test_a_context_that_leaves_no_room_is_cut(self, model):
        text = "abc " * model.max_positions
        room = model.max_positions - 8
        expected = jaxspec.generate(
            model, model.tokenizer.encode(text)[-room:], max_new_tokens=8
        ).texts
        how = {"until": [], "max_gen_toks": 8}
        assert as_lm(model).generate_until([Request(text, how)]) == expected

    def test_an_answer_that_leaves_no_room_for_a_context_is_refused(self, model):
        lm, asked = as_lm(model), Request("abc", {"until": [], "max_gen_toks": model.max_positions})
        with pytest.raises(ValueError, match=rf"max_gen_toks={model.max_positions} leaves no room"):
            lm.generate_until([asked])
        one_less = {"until": [], "max_gen_toks": model.max_positions - 1}
        expected = jaxspec.generate(
            model, model.tokenizer.encode("abc")[-1:], max_new_tokens=model.max_positions - 1
        )
        assert lm.generate_until([Request("abc", one_less)]) == expected.texts

    def test_chats_are_rendered(self, model):
        chat = [{"role": "user", "content": "abc"}]
        assert as_lm(model).apply_chat_template(chat) == model.tokenizer.render_chat(chat)


def test_a_task_of_the_harness_runs(model):
    """One of two questions, without the network."""
    lm_eval = pytest.importorskip("lm_eval", reason="needs the extra `lm-eval`: '.[lm-eval]'")
    datasets = pytest.importorskip("datasets")
    rows = [{"q": "one, two,", "a": " three"}, {"q": "abc", "a": "d"}]
    task = {
        "task": "counting",
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
        "test_split": "test",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{a}}",
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 5},
        "metric_list": [{"metric": "exact_match"}],
    }
    found = lm_eval.simple_evaluate(as_lm(model, jaxspec.PromptLookup()), tasks=[task])
    samples = found["samples"]["counting"]
    expected = jaxspec.generate(model, [row["q"] for row in rows], max_new_tokens=5, stop="\n")
    answers = [sample["resps"][0][0] for sample in samples]
    assert answers == expected.texts


def test_what_is_missing_is_said(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(MissingExtra, match=r"jaxspec.lm_eval needs the extra `lm-eval`"):
        as_lm(model)
    with pytest.raises(ValueError, match="use `denoise`"):
        as_lm(filling_model("filling", 4))
    with pytest.raises(ValueError, match="has no tokenizer"):
        as_lm(jaxspec.Model(model.network, None))
