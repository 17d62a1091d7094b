"""From text files to a checkpoint folder, and the command line before it."""

import argparse
import dataclasses
import io
import json
import shutil

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxspec.checkpoint import CheckpointError, load
from jaxspec.checkpoint.huggingface import load_network
from jaxspec.checkpoint.tokenizer import load_tokenizer
from jaxspec.commands import train_lm as command
from jaxspec.core.masks import causal
from jaxspec.decoding.generate import generate
from jaxspec.decoding.request import GenerationConfig
from jaxspec.models import Experts, LinearScaling, Rope
from jaxspec.training import generated, plan
from jaxspec.training.data import Batches, pack
from jaxspec.training.lm import LMTrainer
from jaxspec.training.plan import RunPlan, make_plan, seconds_per_step
from jaxspec.training.settings import (
    SMALL,
    LMTrainingSettings,
    OptimizerSettings,
    default_state_folder,
    settings_from_json,
    settings_to_json,
)
from jaxspec.training.sources import (
    EveryNth,
    FieldRanges,
    LastCharacters,
    LastRows,
    Source,
    read_source,
)
from jaxspec.training.tokenizer import RESERVED
from jaxspec.training.train import train
from tests.training.runs import CONFIG, QUIET

TINY = CONFIG.replace(vocab_size=300)


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [{"question": f"{a} and {b}?", "answer": f"{a + b}"} for a in range(9) for b in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def tiny_settings(sums):
    source = Source("sums", str(sums), template="{question} {answer}", split=LastRows(8))
    return LMTrainingSettings(
        (source,),
        TINY,
        num_steps=30,
        minutes=None,
        sequence_length=32,
        rows_per_batch=4,
        dtype="float32",
        optimizer=OptimizerSettings("adamw", learning_rate=0.01, warmup_steps=5),
    )


@pytest.fixture(scope="module")
def trained(tiny_settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    out = folder / "out"
    result = train(
        LMTrainer(tiny_settings), folder / "state", out, command="jaxspec ...", console=QUIET
    )
    return result, out


def logits(network, ids):
    ids = np.asarray(ids, np.int32)
    hidden = network.forward(ids, np.arange(len(ids), dtype=np.int32), causal(len(ids)), None)
    return np.asarray(network.unembed(hidden.features))


def test_the_folder_holds_all_that_a_reader_needs(trained):
    result, out = trained
    assert {path.name for path in out.iterdir()} >= {
        "config.json",
        "generation_config.json",
        "metrics.json",
        "model.safetensors",
        "recipe.md",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    }
    recipe = (out / "recipe.md").read_text()
    assert "jaxspec ..." in recipe
    assert "sums" in recipe
    metrics = json.loads((out / "metrics.json").read_text())
    expected = metrics["tokens_per_second"] * metrics["flops_per_token"]
    expected /= metrics["peak_gflops_per_second"] * 1e9
    assert metrics["utilisation"] == pytest.approx(expected, rel=0.05, abs=1e-4)
    assert f"of a measured peak of {metrics['peak_gflops_per_second']:,} GFLOP/s" in recipe
    assert metrics["validation"]["sums"]["nats"] < np.log(300)
    assert settings_from_json(json.loads((out / "training.json").read_text())).model == TINY
    assert result.metrics == metrics


def test_saved_weights_are_the_trained_ones_in_bfloat16(trained):
    result, out = trained
    network = load_network(out, "float32")
    rounded = jax.tree.map(lambda leaf: leaf.astype("bfloat16").astype("float32"), result.result)
    assert network.config == result.result.config
    np.testing.assert_array_equal(logits(network, range(20, 30)), logits(rounded, range(20, 30)))


def test_the_saved_tokenizer_renders_chats_and_stops_at_their_turns(trained):
    _, out = trained
    tokenizer = load_tokenizer(out)
    messages = [{"role": "user", "content": "1 and 2?"}]
    ids = tokenizer.encode_chat(messages, add_generation_prompt=True)
    reserved = [RESERVED[i] for i in ids if i < len(RESERVED)]
    assert reserved == ["<|bos|>", "<|user|>", "<|end|>", "<|assistant|>"]
    generation = json.loads((out / "generation_config.json").read_text())
    assert [RESERVED[i] for i in generation["eos_token_id"]] == ["<|eos|>", "<|end|>"]


def test_transformers_reads_the_folder_alike(trained):
    torch = pytest.importorskip("torch", reason="needs the extra `parity`")
    transformers = pytest.importorskip("transformers", reason="needs the extra `parity`")
    _, out = trained
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = load_tokenizer(out).encode("3 and 4? 7")
    assert tokenizer("3 and 4? 7").input_ids == ids
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0].numpy()
    np.testing.assert_allclose(logits(load_network(out, "float32"), ids), theirs, atol=2e-4)
    messages = [{"role": "user", "content": "3 and 4?"}]
    assert tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    ) == load_tokenizer(out).render_chat(messages, add_generation_prompt=True)
    assert model.generation_config.eos_token_id == [1, 8]


def test_the_same_call_again_changes_nothing(trained, tiny_settings, tmp_path):
    result, out = trained
    again = train(LMTrainer(tiny_settings), out.parent / "state", tmp_path / "again", console=QUIET)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        out / "model.safetensors"
    ).read_bytes()
    assert again.metrics == result.metrics


def test_a_state_folder_belongs_to_one_run(trained, tiny_settings):
    _, out = trained
    other = dataclasses.replace(tiny_settings, seed=1)
    with pytest.raises(ValueError, match=r"seed: 0 before, 1 now"):
        train(LMTrainer(other), out.parent / "state", console=QUIET)
    assert default_state_folder(other, "x") != default_state_folder(tiny_settings, "x")


def test_a_run_from_before_a_setting_existed_goes_on_with_its_default(
    trained, tiny_settings, tmp_path
):
    result, out = trained
    state = tmp_path / "state"
    shutil.copytree(out.parent / "state", state)
    run = json.loads((state / "run.json").read_text())
    del run["settings"]["early_exit"], run["settings"]["model"]["qk_norm"]
    del run["settings"]["optimizer"]["clip"], run["settings"]["sources"][0]["licence"]
    (state / "run.json").write_text(json.dumps(run))
    other = dataclasses.replace(tiny_settings, early_exit=0.5)
    with pytest.raises(ValueError, match=r"early_exit: 0\.0 before, 0\.5 now"):
        train(LMTrainer(other), state, console=QUIET)
    assert train(LMTrainer(tiny_settings), state, console=QUIET).metrics == result.metrics


def test_a_draft_model_learns_from_its_teacher(trained, tiny_settings, tmp_path):
    _, out = trained
    teacher = shutil.copytree(out, tmp_path / "teacher")
    settings = dataclasses.replace(
        tiny_settings, model=TINY.replace(embed_dim=8, mlp_dim=16), teacher=str(teacher)
    )
    draft = train(LMTrainer(settings), tmp_path / "state", tmp_path / "draft", console=QUIET)
    assert 0 < draft.metrics["validation"]["sums"]["agreement"] <= 1
    assert (tmp_path / "draft" / "tokenizer.json").read_bytes() == (
        out / "tokenizer.json"
    ).read_bytes()
    assert f"teacher: `{teacher}`, whose files have" in (tmp_path / "draft/recipe.md").read_text()

    config = teacher / "config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(ValueError, match="differs in the files of 'teacher'"):
        train(LMTrainer(settings), tmp_path / "state", console=QUIET)


@pytest.fixture(scope="module")
def prompts(trained, sums):
    """Rows of documents, as prompts are cut from."""
    source = Source("sums", str(sums), template="{question} {answer}", split=LastRows(8))
    documents = trained[0].vocabulary.encode(read_source(source).train)
    return Batches((pack(documents, 32),), (1.0,), generated.PROMPTS_PER_PART, seed=3)


def texts_in(folder):
    return [json.loads(line) for path in sorted(folder.iterdir()) for line in path.open()]


def test_own_text_is_what_the_teacher_says_after_a_beginning_of_a_document(
    trained, prompts, tmp_path
):
    teacher = load(trained[1])
    generated.write_texts(teacher, prompts, 40, tmp_path)
    texts = texts_in(tmp_path)
    assert [text["temperature"] for text in texts] == [0.0, 1.0] * 20
    (packed,) = prompts.sources
    documents = {
        tuple(row[segment == i].tolist())
        for row, segment in zip(packed.tokens, packed.segments, strict=True)
        for i in range(1, segment.max() + 1)
    }
    for text in texts:
        prompt = tuple(text["tokens"][: text["prompt_tokens"]])
        assert any(document[: len(prompt)] == prompt for document in documents)
        assert len(prompt) < len(text["tokens"]) <= 32
    greedy = [text for text in texts if text["temperature"] == 0][:6]
    again = generate(
        teacher,
        [text["tokens"][: text["prompt_tokens"]] for text in greedy],
        GenerationConfig(max_new_tokens=16),
    )
    for text, row in zip(greedy, again, strict=True):
        assert text["tokens"][text["prompt_tokens"] :] == row.tokens.tolist()
        assert text["text"] == row.text
    read = generated.read_texts(tmp_path, 40)
    assert [len(part) for part in read] == [38, 2]
    both = (*read.train, *read.validation)
    assert [list(text.tokens) for text in both] == [t["tokens"] for t in texts]
    assert [text.prompt_size for text in both] == [t["prompt_tokens"] for t in texts]


def test_a_row_of_single_tokens_gives_a_prompt_too(trained, tmp_path):
    singles = pack([np.full(1, token, np.int32) for token in range(20, 25)], 32)
    rows = Batches((singles,), (1.0,), generated.PROMPTS_PER_PART)
    generated.write_texts(load(trained[1]), rows, 3, tmp_path)
    assert [text["prompt_tokens"] for text in texts_in(tmp_path)] == [1, 1, 1]


def test_own_text_goes_on_where_it_was_interrupted(trained, prompts, tmp_path, monkeypatch):
    teacher = load(trained[1])
    generated.write_texts(teacher, prompts, 70, tmp_path / "whole")
    parts = []

    def interrupted(*args, **kwargs):
        parts.append(len(parts))
        if len(parts) == 2:
            raise KeyboardInterrupt
        return generate(*args, **kwargs)

    monkeypatch.setattr(generated, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generated.write_texts(teacher, prompts, 70, tmp_path / "parts")
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["00000.jsonl"]
    generated.write_texts(teacher, prompts, 70, tmp_path / "parts")
    assert len(parts) == 4  # one, the interrupted one, and the two that were missing
    generated.write_texts(teacher, prompts, 70, tmp_path / "parts")
    assert len(parts) == 4
    assert texts_in(tmp_path / "parts") == texts_in(tmp_path / "whole")
    assert len(texts_in(tmp_path / "parts")) == 70


def test_a_draft_model_learns_from_what_its_teacher_wrote(trained, tiny_settings, tmp_path):
    _, out = trained
    settings = dataclasses.replace(
        tiny_settings,
        model=TINY.replace(embed_dim=8, mlp_dim=16),
        teacher=str(out),
        own_text=64,
        own_text_weight=2.0,
    )
    draft = train(LMTrainer(settings), tmp_path / "state", tmp_path / "draft", console=QUIET)
    assert 0 < draft.metrics["validation"]["own-text"]["agreement"] <= 1
    texts = texts_in(tmp_path / "state" / "own_text")
    learned = [len(text["tokens"]) for i, text in enumerate(texts) if i // 2 % 20 != 19]
    assert draft.metrics["tokens_of_one_pass"]["own-text"] == sum(learned)
    assert "own-text: 64 texts" in (tmp_path / "draft" / "recipe.md").read_text()


def test_a_run_can_begin_with_saved_weights(trained, tiny_settings, tmp_path):
    result, out = trained
    settings = dataclasses.replace(
        tiny_settings,
        start_from=str(out),
        num_steps=1,
        optimizer=OptimizerSettings("adamw", learning_rate=1e-9),
    )
    warm = train(LMTrainer(settings), tmp_path / "state", console=QUIET)
    assert warm.metrics["validation"]["sums"]["nats"] == pytest.approx(
        result.metrics["validation"]["sums"]["nats"], abs=0.05
    )
    wider = dataclasses.replace(settings, model=TINY.replace(mlp_dim=64))
    with pytest.raises(ValueError, match="start_from"):
        train(LMTrainer(wider), tmp_path / "wider", console=QUIET)


def test_minutes_become_steps_once(tiny_settings, tmp_path):
    settings = dataclasses.replace(tiny_settings, num_steps=None, minutes=0.002)
    first = train(LMTrainer(settings), tmp_path, console=QUIET)
    again = train(LMTrainer(settings), tmp_path, console=QUIET)
    assert first.metrics["steps"] == again.metrics["steps"] >= 1


def test_the_faster_dtype_is_taken_and_written_down(tiny_settings, tmp_path, monkeypatch):
    timed = []

    def seconds_per_step(train_steps, state, batches):
        timed.append(tuple(train_steps))
        return {"float32": 0.2, "bfloat16": 0.1}

    monkeypatch.setattr("jaxspec.training.train.seconds_per_step", seconds_per_step)
    settings = dataclasses.replace(tiny_settings, dtype="auto", num_steps=2)
    console = Console(file=io.StringIO(), width=200)
    out = tmp_path / "out"
    trained = train(LMTrainer(settings), tmp_path / "state", out, console=console)
    assert trained.metrics["dtype"] == "bfloat16"
    assert json.loads((out / "training.json").read_text())["dtype"] == "bfloat16"
    assert "products in bfloat16" in (out / "recipe.md").read_text()
    assert "products in bfloat16" in console.file.getvalue()
    # The choice is made once: going on asks no more.
    assert train(LMTrainer(settings), tmp_path / "state", console=QUIET).metrics == trained.metrics
    assert timed == [("float32", "bfloat16")]


@pytest.mark.parametrize(("float32", "bfloat16"), [(0.5, 0.25), (0.25, 0.5)])
def test_a_plan_is_timed_once_and_its_minutes_are_of_the_dtype_chosen(
    tiny_settings, tmp_path, float32, bfloat16
):
    settings = dataclasses.replace(tiny_settings, dtype="auto", num_steps=None, minutes=1.0)
    times, peaks = {"float32": float32, "bfloat16": bfloat16}, {"float32": 1e9, "bfloat16": 3e9}
    plan = make_plan(settings, tmp_path, "one", lambda dtypes: times, peaks.__getitem__)
    dtype = "float32" if float32 < bfloat16 else "bfloat16"
    assert plan == RunPlan(240, dtype, peaks[dtype])

    def never(asked):
        raise AssertionError

    longer = dataclasses.replace(settings, minutes=2.0)
    assert make_plan(longer, tmp_path, "one", never, never) == plan._replace(num_steps=480)
    # Going on elsewhere: the run is as long as planned, its peak is that of the new device.
    elsewhere = make_plan(settings, tmp_path, "other", never, lambda dtype: 5e9)
    assert elsewhere == plan._replace(peak=5e9)


def test_a_plan_from_before_dtypes_were_timed_is_read(tiny_settings, tmp_path):
    (tmp_path / "plan.json").write_text('{"seconds_per_step": 2.0}')
    settings = dataclasses.replace(tiny_settings, num_steps=None, minutes=1.0)
    plan = make_plan(settings, tmp_path, "one", lambda dtypes: {}, lambda dtype: 1e9)
    assert plan == RunPlan(30, "float32", 1e9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"peak_device": "one"}', "peak must be a finite number, got None"),
        ('{"peak_device": "one", "peak": 0}', "peak must be above 0"),
        ('{"dtype": "float32"}', "seconds_per_step must be"),
        ('{"dtype": 5, "seconds_per_step": 1.0}', "dtype must be a text"),
        ("{", "not valid JSON"),
    ],
)
def test_a_damaged_plan_is_named(tiny_settings, tmp_path, text, message):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"plan\.json.*{message}.* Delete this file"):
        make_plan(tiny_settings, tmp_path, "one", lambda dtypes: {}, lambda dtype: 1e9)


def test_minutes_for_too_many_steps_are_refused(tiny_settings, tmp_path):
    settings = dataclasses.replace(tiny_settings, num_steps=None, minutes=1e30)
    with pytest.raises(ValueError, match=r"minutes must be for at most .* got 1e\+30"):
        make_plan(settings, tmp_path, "one", lambda dtypes: {"float32": 0.1}, lambda dtype: 1e9)


def test_a_damaged_tokenizer_of_a_run_is_named(tiny_settings, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        train(LMTrainer(tiny_settings), tmp_path, console=QUIET)


def test_steps_are_timed_in_turns_on_one_state(monkeypatch):
    calls, now = [], 0.0

    def train_step(name, seconds):
        def step(state, batch):
            nonlocal now
            calls.append((name, state, batch))
            now += seconds
            return state + 1, {}

        return step

    monkeypatch.setattr(plan.time, "perf_counter", lambda: now)
    steps = {"slow": train_step("slow", 2.0), "fast": train_step("fast", 0.5)}
    assert seconds_per_step(steps, 0, lambda step: 10 * step) == {"slow": 2.0, "fast": 0.5}
    assert [state for _, state, _ in calls] == list(range(len(calls)))
    assert calls[:4] == [("slow", 0, 0), ("fast", 1, 0), ("slow", 2, 10), ("fast", 3, 10)]


# Settings and the command line


def test_settings_survive_json(tiny_settings):
    source = Source("b", "b.jsonl", split=FieldRanges("id", (1, 5), (6, 7)))
    settings = dataclasses.replace(
        tiny_settings,
        sources=(*tiny_settings.sources, source),
        model=TINY.replace(
            rope=Rope(theta=500.0, scaling=LinearScaling(2.0)),
            experts=Experts(4, 2, 16, True, (False, True)),
        ),
    )
    plain = json.loads(json.dumps(settings_to_json(settings)))
    assert settings_from_json(plain) == settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": ()}, "at least one source"),
        ({"minutes": 1.0}, "either num_steps or minutes"),
        ({"num_steps": 0}, "num_steps must be at least 1"),
        ({"sequence_length": 65}, "at most max_positions"),
        ({"rows_per_batch": 2**31 - 1}, r"update of at most 16,777,216 tokens, got 2147483647 \*"),
        ({"layer_drop": 1.0}, r"layer_drop must be in \[0, 1\)"),
        ({"early_exit": -0.1}, r"early_exit must be in \[0, 1\)"),
        ({"dtype": "float8"}, "dtype must be"),
        ({"own_text": 5}, "name one .--teacher"),
        ({"own_text": -1}, "own_text must be at least 0"),
        ({"own_text_weight": 0.0}, "own_text_weight must be in"),
        ({"seed": 2**31}, "seed must be below"),
    ],
)
def test_settings_out_of_range_are_named(tiny_settings, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(tiny_settings, **changes)


def test_unknown_settings_are_named(tiny_settings):
    plain = settings_to_json(tiny_settings)
    with pytest.raises(ValueError, match=r"no settings \['learning_rat'\]"):
        settings_from_json({**plain, "optimizer": {"learning_rat": 1.0}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": [{"name": "x"}]}, r"sources\[0\]\.path is missing"),
        ({"sources": {"name": "x"}}, "sources must be a list of settings"),
        ({"model": 5}, "model must be settings by their names, got 5"),
        ({"model": []}, r"model must be settings by their names, got \[\]"),
        ({"optimizer": []}, r"optimizer must be settings by their names, got \[\]"),
        ({"model": {"diffusion": {}}}, r"model\.diffusion\.mask_token_id is missing"),
        ({"model": {"rope": {"scaling": {"YarnScaling": {}}}}}, r"YarnScaling\.factor is missing"),
        ({"model": {"layer_types": 5}}, "model: layer_types must be a sequence"),
        ({"sources": [{"name": "x", "path": "x", "split": {"LastRows": {}}}]}, r"count is missing"),
    ],
)
def test_fields_of_a_file_of_settings_are_named(changes, message, tmp_path):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"sources": [{"name": "x", "path": "x"}], **changes}))
    with pytest.raises(ValueError, match=rf"settings\.json, or a flag: .*{message}"):
        parsed("--config", str(path), "--steps", "3", "--layers", "2")


def test_unknown_settings_are_named_before_the_default_text_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"x" * 100_000: 1}))
    with pytest.raises(
        ValueError, match=r"settings\.json: \w+ has no settings \['x+\.\.\.; it has"
    ):
        parsed("--config", str(path))


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.settings_from_arguments(parser.parse_args(["--out", "x", *arguments]))


def test_flags_go_before_the_file_and_the_file_before_defaults(tmp_path):
    path = tmp_path / "settings.json"
    path.write_text(
        json.dumps(
            {
                "sources": [{"name": "notes", "path": "notes.txt"}],
                "num_steps": 7,
                "minutes": None,
                "model": {"num_layers": 3},
                "optimizer": {"clip": 2.0},
            }
        )
    )
    settings = parsed("--config", str(path), "--minutes", "2", "--learning-rate", "0.5")
    assert (settings.num_steps, settings.minutes) == (None, 2.0)
    assert (settings.optimizer.clip, settings.optimizer.learning_rate) == (2.0, 0.5)
    assert settings.model == SMALL.replace(num_layers=3, layer_types=())
    assert settings.sources == (Source("notes", "notes.txt"),)


def test_sources_by_flags(tmp_path):
    settings = parsed(
        "--data", "gsm8k=a.jsonl", "--data", "own=b.jsonl", "--weight", "own=0.5",
        "--template", r"own={prompt}\n{answer}: \\n \frac", "--data", "notes=notes.txt",
        "--steps", "3",
    )  # fmt: skip
    known, own, notes = settings.sources
    assert (own.split, notes.split) == (EveryNth(20), LastCharacters(0.1))
    assert (known.path, known.split) == ("a.jsonl", LastRows(300))
    assert (own.path, own.weight) == ("b.jsonl", 0.5)
    assert own.template == "{prompt}\n{answer}: \\n \\frac"
    assert (settings.num_steps, settings.minutes) == (3, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--data-folder"),
        (("--data", "gsm8k"), "--data must be NAME="),
        (("--data", "a=a.txt", "--weight", "b=1"), "there is no such source"),
        (("--data", "a=a.txt", "--weight", "a=abc"), "--weight must be NAME=NUMBER, got 'abc'"),
        (("--data", "a=a.txt", "--weight", "a=1e-9"), r"weight must be in \[0\.001, 1000"),
        (("--data", "a=a.txt", "--weight", "a=1e12"), r"weight must be in \[0\.001, 1000"),
        (("--data", "a=a.txt", "--template", "a={b:{c}}"), "source 'a': template must name"),
        (("--data", "a=a.txt", "--template", "a={b:>1000000000}"), "template must name fields"),
        (("--data", "a=a.txt", "--template", "a={b!r}"), "template must name fields"),
        (("--data", "a=a.txt", "--template", "a={}"), "template must name fields"),
        (("--data", "a=a.txt", "--template", "a={b"), "template: expected '}'.* written twice"),
    ],
)
def test_wrong_flags_are_named(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there is no data/train
    with pytest.raises(ValueError, match=message):
        parsed(*arguments)
