"""`drafting="auto"`: what a profile says, that it decides, and that it is measured once."""

import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import jaxspec
from jaxspec import GenerationConfig, NoDraft, PromptLookup, generate, stream
from jaxspec.cli import main
from jaxspec.decoding import profile as profiles
from jaxspec.decoding.profile import DraftingProfile, drafting_profile
from tests.measure.models import filling_model

PROMPT = "one, two, one, two, one"
CONFIG = GenerationConfig(max_new_tokens=16)
SLOWER = DraftingProfile(plain_seconds=1.0, drafted_seconds=2.5, tau=2.0)
FASTER = DraftingProfile(plain_seconds=1.0, drafted_seconds=1.5, tau=2.0)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The folder of compiled programs, which is empty, in a process that knows no profile."""
    monkeypatch.setattr(profiles, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(profiles, "_known", {})
    return tmp_path


@pytest.fixture
def measured(monkeypatch, cache) -> list[tuple]:
    """Makes every measurement give `SLOWER`; lists the settings and rows of each."""
    calls = []

    def measure(model, drafter, prompts, config, rows):
        calls.append((config, rows))
        return SLOWER

    monkeypatch.setattr(profiles, "drafting_profile", measure)
    return calls


def kept(cache: Path) -> list[Path]:
    return list((cache / "drafting").iterdir())


@pytest.mark.parametrize(
    ("plain", "drafted", "tau", "drafts"),
    [
        (1.0, 1.5, 2.0, True),
        (1.0, 2.5, 2.0, False),
        (1.0, 1.0, 1.0, False),
        # Faster, but by less than the margin; then by more.
        (1.0, 1.0, 1 + 0.9 * profiles.MARGIN, False),
        (1.0, 1.0, 1 + 1.1 * profiles.MARGIN, True),
        (0.001, 0.002, 3.0, True),
    ],
)
def test_drafting_pays_where_tau_outweighs_the_longer_step(plain, drafted, tau, drafts):
    profile = DraftingProfile(plain, drafted, tau)
    # Seconds of a hundred tokens, each way.
    assert profile.speedup == pytest.approx((100 * plain) / (100 / tau * drafted))
    assert profile.drafts == drafts


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0.0, 1.0, 1.0), "plain_seconds must be above 0, got 0.0"),
        ((1.0, math.nan, 1.0), "drafted_seconds must be a finite number, got nan"),
        ((1.0, 1.0, math.inf), "tau must be a finite number, got inf"),
        (("1", 1.0, 1.0), "plain_seconds must be a finite number, got '1'"),
        ((True, 1.0, 1.0), "plain_seconds must be a finite number, got True"),
        ((1.0, 1.0, 0.5), "tau must be at least 1"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        DraftingProfile(*values)


@pytest.mark.parametrize(
    ("drafting", "drafts"),
    [("always", True), ("never", False), (FASTER, True), (SLOWER, False)],
)
def test_a_profile_decides_and_the_tokens_stay_the_same(model, drafting, drafts):
    plain = generate(model, PROMPT, CONFIG)[0]
    drafter = PromptLookup()
    result = generate(model, PROMPT, CONFIG, drafter, drafting=drafting)
    assert result[0].tokens.tolist() == plain.tokens.tolist()
    assert (result.metrics.num_draft_tokens > 0) == drafts
    assert result.drafting == (drafting if isinstance(drafting, DraftingProfile) else None)
    # The next prompt may choose otherwise.
    assert result.drafters == (drafter,)
    steps = list(stream(model, PROMPT, CONFIG, drafter, drafting=drafting))
    assert [token for step in steps for token in step.tokens.tolist()] == plain.tokens.tolist()
    assert (max(step.trace.width for step in steps) > 1) == drafts


def test_a_trace_follows_the_choice(model):
    traced = generate(model, PROMPT, CONFIG, PromptLookup(), return_trace=True, drafting=SLOWER)
    assert {step.width for step in traced[0].trace} == {1}


def test_auto_measures_once_for_each_kind_of_request(model, measured, cache):
    drafter = PromptLookup()
    for _ in range(2):
        result = generate(model, PROMPT, CONFIG, drafter, drafting="auto")
        assert result.drafting == SLOWER
        assert result.metrics.num_draft_tokens == 0
    list(stream(model, PROMPT, CONFIG, drafter, seed=7, drafting="auto"))
    assert len(measured) == 1
    # Another process reads the file.
    profiles._known.clear()
    assert generate(model, PROMPT, CONFIG, drafter, drafting="auto").drafting == SLOWER
    assert len(measured) == 1
    warm = GenerationConfig(max_new_tokens=4, temperature=0.5, top_k=3)
    generate(model, PROMPT, warm, drafter, drafting="auto")
    generate(model, [PROMPT] * 3, CONFIG, drafter, drafting="auto")
    generate(model, [PROMPT] * 5, CONFIG, drafter, drafting="auto")  # the same program
    generate(model, PROMPT, CONFIG, PromptLookup(max_ngram=3), drafting="auto")
    asked = [(config.temperature, config.top_k, rows) for config, rows in measured]
    assert asked == [(0.0, 0, 1), (0.5, 3, 1), (0.0, 0, 4), (0.0, 0, 1)]
    assert len(kept(cache)) == 4


def test_other_weights_of_the_same_name_are_measured_anew(model, measured):
    generate(model, PROMPT, CONFIG, PromptLookup(), drafting="auto")
    trained = jax.tree.map(lambda leaf: leaf * 1.01, model.network)
    other = jaxspec.Model(trained, model.tokenizer, model.name)
    generate(other, PROMPT, CONFIG, PromptLookup(), drafting="auto")
    assert len(measured) == 2


@pytest.mark.parametrize("drafter", [None, NoDraft()])
def test_without_a_drafter_nothing_is_measured(model, measured, drafter):
    result = generate(model, PROMPT, CONFIG, drafter, drafting="auto")
    assert result.drafting is None
    assert not measured


def _damaged(entry: dict) -> list[str]:
    profile = entry["profile"]
    return [
        "",
        "[]",
        json.dumps(entry)[:-9],
        json.dumps({**entry, "key": {**entry["key"], "rows": "2"}}),
        json.dumps({"profile": profile}),
        json.dumps({**entry, "profile": [1.0, 2.0, 3.0]}),
        json.dumps({**entry, "profile": {**profile, "tau": "2.0"}}),
        json.dumps({**entry, "profile": {**profile, "plain_seconds": -1.0}}),
        json.dumps({**entry, "profile": {**profile, "more": 1.0}}),
        json.dumps({**entry, "profile": {"tau": 2.0}}),
    ]


def test_a_file_that_is_damaged_or_of_something_else_is_measured_anew(model, measured, cache):
    generate(model, PROMPT, CONFIG, PromptLookup(), drafting="auto")
    (path,) = kept(cache)
    whole = path.read_text()
    assert json.loads(whole)["profile"] == vars(SLOWER)
    damaged = _damaged(json.loads(whole))
    for count, text in enumerate(damaged, start=2):
        path.write_text(text)
        profiles._known.clear()
        generate(model, PROMPT, CONFIG, PromptLookup(), drafting="auto")
        assert len(measured) == count, text
        assert path.read_text() == whole
    assert kept(cache) == [path]


def test_without_a_folder_it_is_kept_in_memory(model, measured, monkeypatch):
    monkeypatch.setattr(profiles, "cache_folder", lambda: None)
    for _ in range(2):
        generate(model, PROMPT, CONFIG, PromptLookup(), drafting="auto")
    assert len(measured) == 1


def test_a_disk_that_cannot_be_written_to_is_no_error(model, measured, cache):
    (cache / "drafting").write_text("a file where the folder should be")
    assert generate(model, PROMPT, CONFIG, PromptLookup(), drafting="auto").drafting == SLOWER


class _Clock:
    """Time passes only in steps: 1 second for a plain one, `drafted` for one with drafts."""

    def __init__(self, drafted: float):
        self.now, self.drafted, self.calls = 0.0, drafted, Counter()
        self._finish = profiles._finish

    def perf_counter(self) -> float:
        return self.now

    def finish(self, *arguments, drafter, capacity):
        states = self._finish(*arguments, drafter=drafter, capacity=capacity)
        plain = drafter == NoDraft()
        # The first run of a program takes long, because it is compiled.
        slow = 100.0 if not self.calls[plain] else 1.0
        self.calls[plain] += 1
        steps = int(states.stats.num_steps.max())
        self.now += slow * steps * (1.0 if plain else self.drafted)
        return states


@pytest.mark.parametrize("rows", [1, 2])
def test_the_measured_seconds_and_tau_are_those_of_the_steps(model, monkeypatch, rows):
    clock = _Clock(drafted=1.5)
    monkeypatch.setattr(profiles, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    monkeypatch.setattr(profiles, "_finish", clock.finish)
    prompts = [PROMPT, "abcabcabc"]
    config = GenerationConfig(max_new_tokens=64)  # long enough to repeat itself
    profile = drafting_profile(model, PromptLookup(), prompts, config, rows)
    decoded = generate(model, prompts, config, PromptLookup())
    assert profile.plain_seconds == pytest.approx(1.0)
    assert profile.drafted_seconds == pytest.approx(1.5)
    assert profile.tau == pytest.approx(decoded.metrics.tau)
    assert profile.tau > 1
    assert clock.calls[True] == clock.calls[False] >= 2


def test_auto_measures_for_real(model, cache):
    config = GenerationConfig(max_new_tokens=16, temperature=0.7)
    result = generate(model, PROMPT, config, PromptLookup(), seed=3, drafting="auto")
    assert result.drafting.tau >= 1
    assert (result.metrics.num_draft_tokens > 0) == result.drafting.drafts
    chosen = PromptLookup() if result.drafting.drafts else None
    same = generate(model, PROMPT, config, chosen, seed=3)
    assert result[0].tokens.tolist() == same[0].tokens.tolist()


def test_the_built_in_prompts_fit_a_short_context(model):
    short = model.config.replace(max_positions=32)
    network = type(model.network)(model.network.params, short)
    profile = drafting_profile(jaxspec.Model(network, model.tokenizer), PromptLookup())
    assert profile.tau >= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafting": "sometimes"}, "drafting must be 'always', 'auto', 'never' or a Drafting"),
        ({"drafting": None}, "drafting must be .* got None"),
        ({"drafting": True}, "drafting must be .* got True"),
    ],
)
def test_bad_arguments_are_named(model, options, message):
    for drafter in (None, PromptLookup()):
        with pytest.raises(ValueError, match=message):
            generate(model, PROMPT, CONFIG, drafter, **options)


def test_what_cannot_be_measured_is_refused(model):
    mute = jaxspec.Model(model.network)
    with pytest.raises(ValueError, match="no tokenizer to read the built-in prompts"):
        generate(mute, [1, 2, 3], CONFIG, PromptLookup(), drafting="auto")
    with pytest.raises(ValueError, match="use `denoise`"):
        generate(filling_model("filling", 4), PROMPT, CONFIG, PromptLookup(), drafting="auto")
    with pytest.raises(ValueError, match="no step was decoded"):
        drafting_profile(model, PromptLookup(), PROMPT, GenerationConfig(max_new_tokens=0))
    with pytest.raises(ValueError, match="rows must be at least 1, got 0"):
        drafting_profile(model, PromptLookup(), rows=0)


class TestCommand:
    """`jaxspec generate --drafting`."""

    @pytest.fixture
    def argv(self, folder) -> list[str]:
        argv = ["generate", folder, PROMPT, "--max-new-tokens", "8", "--drafter", "lookup"]
        return [*argv, "--drafting", "auto"]

    def test_one_line_says_what_was_chosen(self, capsys, measured, argv):
        assert main(argv) == 0
        out, err = capsys.readouterr()
        assert (
            "drafting would decode at 0.80 times plain speed on this machine (needs 1.05): "
            "decodes plainly\n"
        ) in err
        assert main(argv[:-2]) == 0
        plain, err = capsys.readouterr()
        assert out == plain
        assert "times plain speed" not in err

    def test_json_has_the_profile(self, capsys, measured, argv):
        assert main([*argv, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["drafting"] == {**vars(SLOWER), "speedup": 0.8, "drafts": False}
        assert shown["metrics"]["num_draft_tokens"] == 0
        assert main([*argv[:-2], "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["drafting"] == "always"

    def test_it_needs_a_drafter(self, capsys, folder):
        assert main(["generate", folder, PROMPT, "--drafting", "auto"]) == 2
        assert "--drafting: needs --drafter." in capsys.readouterr().err

    def test_it_is_not_for_files(self, capsys):
        argv = ["generate", "model.tflite", PROMPT, "--runtime", "litert", "--drafting", "auto"]
        assert main(argv) == 2
        assert "--drafting: needs --runtime jax" in capsys.readouterr().err
