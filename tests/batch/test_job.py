"""The law of jobs: a row is what `generate` alone makes of it, however the job is run."""

import dataclasses
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import DraftModel, Eagle, GenerationConfig, PromptLookup, batch
from jaxspec.batch import (
    Collector,
    Guard,
    GuardSettings,
    JobReport,
    JobSettings,
    Row,
    job_header,
    rows_of,
)
from jaxspec.batch import job as job_module
from jaxspec.batch import slots as slots_module
from jaxspec.batch import texts as texts_module
from jaxspec.batch.guard import Chunk
from jaxspec.batch.slots import insert
from jaxspec.batch.texts import TextPrograms, run_chunk
from jaxspec.checkpoint import Model
from jaxspec.drafters import LoadedDrafter, SuffixLookup
from jaxspec.sharding import Placement
from tests.batch.conftest import PROMPTS
from tests.laws.drafters import DRAFTERS, FORKED, PATHS, blurred, eagle_head, network

GREEDY = GenerationConfig(max_new_tokens=20)
PENALIZED = dataclasses.replace(
    GREEDY, presence_penalty=0.2, frequency_penalty=0.3, no_repeat_ngram_size=4
)
SAMPLED = GenerationConfig(max_new_tokens=12, temperature=1.0, top_p=0.95)


def drafter_for(model: Model, name: str):
    network = model.network
    return {
        "plain": lambda: None,
        "lookup": lambda: PromptLookup(num_speculative_tokens=3),
        "draft model": lambda: LoadedDrafter(DraftModel(paths=PATHS), blurred(network)),
        "eagle": lambda: LoadedDrafter(Eagle(FORKED, chunk=8), eagle_head(network)),
    }[name]()


def run(
    model,
    rows,
    output,
    config=None,
    drafter=None,
    seed=0,
    *,
    should_stop=None,
    progress=None,
    **how,
) -> JobReport:
    settings = JobSettings(**how)
    return job_module.run(
        model,
        rows,
        output,
        config,
        drafter,
        seed,
        settings,
        should_stop=should_stop,
        progress=progress,
    )


def tokens_by_line(output: Collector) -> dict:
    records = output.records
    found = {(record["line"], record["sample"]): record["tokens"] for record in records}
    assert len(found) == len(records), "a record twice"
    return found


def expected_tokens(model, config, drafter=None, seed=0, prompts=PROMPTS) -> dict:
    rows = jaxspec.generate(model, prompts, config, drafter, seed)
    return {(row.prompt_index + 1, row.sample_index): row.tokens.tolist() for row in rows}


def decoded(model, config, drafter=None, rows=None, **settings) -> dict:
    output = Collector()
    run(model, rows_of(PROMPTS) if rows is None else rows, output, config, drafter, **settings)
    return tokens_by_line(output)


def test_prompts_are_decoded_in_memory_in_their_order(model, capsys):
    prompts = [*PROMPTS, "y" * 5000]
    records = batch.decode(
        model, iter(prompts), PromptLookup(), max_new_tokens=20, job=JobSettings(batch_size=3)
    )
    assert [(record["line"], record["sample"]) for record in records] == [
        (line, 0) for line in range(1, 10)
    ]
    assert "5000 tokens" in records.pop()["error"]
    rows = jaxspec.generate(model, PROMPTS, max_new_tokens=20)
    assert [record["tokens"] for record in records] == [row.tokens.tolist() for row in rows]
    with pytest.raises(TypeError, match=r"max_new_token is no argument.*did you mean max"):
        batch.decode(model, PROMPTS, max_new_token=20)


def test_decoding_in_memory_says_how_far_it_is(model, monkeypatch, capsys):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert len(batch.decode(model, PROMPTS, max_new_tokens=4, num_samples=2)) == 16
    shown = capsys.readouterr().err
    assert "16/16" in shown
    assert "tokens/s, tau 1.00" in shown
    batch.decode(model, PROMPTS, max_new_tokens=4, progress=False)
    assert capsys.readouterr().err == ""


class InTurns(Guard):
    """A guard that never makes up its mind: two steps with drafts, two without."""

    turn = 0

    def choose(self) -> Chunk:
        self.turn += 1
        return Chunk(self.turn % 2 == 1, 2)


@pytest.mark.parametrize("name", ["plain", "lookup", "draft model", "eagle"])
def test_greedy_rows_are_those_of_generate(model, name):
    expected = expected_tokens(model, GREEDY)
    assert (
        decoded(model, GREEDY, drafter_for(model, name), batch_size=3, drafting="always")
        == expected
    )


@pytest.mark.parametrize(
    ("name", "config"), [("lookup", GREEDY), ("eagle", GREEDY), ("lookup", PENALIZED)]
)
def test_changing_between_drafts_and_plain_steps_changes_no_row(model, name, config, monkeypatch):
    """Rows rejoin again and again, and guards may decide as they like."""
    monkeypatch.setattr(job_module, "Guard", InTurns)
    output, drafter = Collector(), drafter_for(model, name)
    report = run(model, rows_of(PROMPTS), output, config, drafter, batch_size=3)
    assert tokens_by_line(output) == expected_tokens(model, config)
    assert 0 < report.num_drafted_steps < report.num_steps
    metrics = [record["metrics"] for record in output.records]
    assert sum(m["num_verify_steps"] for m in metrics) == report.counts.num_steps
    assert sum(m["num_tokens"] for m in metrics) == report.counts.num_tokens == 8 * 20


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_rests_and_rejoins_and_changes_no_row(model, name, monkeypatch):
    """A drafter's state is made anew after each plain step, in any slot."""
    monkeypatch.setattr(job_module, "Guard", InTurns)
    case, deeper = DRAFTERS[name], dataclasses.replace(model, network=network(model.vocab_size))
    drafter = LoadedDrafter(case.make(), case.draft(deeper.network))
    output = Collector()
    report = run(deeper, rows_of(PROMPTS), output, GREEDY, drafter, batch_size=3)
    assert tokens_by_line(output) == expected_tokens(deeper, GREEDY)
    assert 0 < report.num_drafted_steps < report.num_steps


def test_a_row_that_rejoins_is_drafted_for_as_before(model, monkeypatch):
    """The target drafts for itself: every draft is accepted, before and after plain steps."""
    drafter = LoadedDrafter(DraftModel(num_speculative_tokens=3), model.network)
    monkeypatch.setattr(job_module, "Guard", InTurns)
    config = dataclasses.replace(GREEDY, max_new_tokens=64)
    output = Collector()
    report = run(model, rows_of(PROMPTS[:1]), output, config, drafter, batch_size=1)
    plain = report.num_steps - report.num_drafted_steps
    assert plain > 2
    # The last step may be cut by the budget.
    assert report.num_drafted_steps * 4 + plain >= 64 > (report.num_drafted_steps - 1) * 4 + plain


@pytest.mark.parametrize("name", ["plain", "draft model"])
def test_sampled_rows_are_those_of_generate_at_any_batch_size(model, name):
    config, drafter = dataclasses.replace(SAMPLED, num_samples=2), drafter_for(model, name)
    expected = expected_tokens(model, config, drafter, seed=5)
    assert decoded(model, config, drafter, seed=5, batch_size=3) == expected
    assert decoded(model, config, drafter, seed=5, batch_size=16) == expected
    assert len({tuple(tokens) for tokens in expected.values()}) > 12


def texts_read(monkeypatch) -> list[int]:
    """Counts, before each chunk, the places of the corpus that drafts come from."""
    counts, run_chunk = [], texts_module.run_chunk

    def counted(params, *args, **settings):
        counts.append(int(params.draft.count) if params.draft else None)
        return run_chunk(params, *args, **settings)

    counted.lower = run_chunk.lower
    monkeypatch.setattr(texts_module, "run_chunk", counted)
    return counts


@pytest.mark.parametrize("size", [1, 3])
def test_what_rows_emitted_is_looked_up_and_changes_no_row(model, size, monkeypatch):
    expected, counts = expected_tokens(model, GREEDY), texts_read(monkeypatch)
    drafter = SuffixLookup(4)
    assert decoded(model, GREEDY, drafter, batch_size=size, drafting="always") == expected
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] > 3 * 20  # of eight rows with 20 tokens each
    before = run_chunk._cache_size()
    again = decoded(model, GREEDY, drafter, batch_size=size, drafting="always")
    assert again == expected
    assert run_chunk._cache_size() == before  # one program for a corpus of any size


def test_what_rows_emitted_shortens_the_job(model):
    """The second half of the prompts is the first once more."""
    rows = rows_of(PROMPTS * 2)
    steps = [
        run(model, rows, Collector(), GREEDY, each, batch_size=1, drafting="always").num_steps
        for each in (SuffixLookup(8), PromptLookup(8, 16, "recent"))
    ]
    assert steps[0] < 0.75 * steps[1]


def test_sampled_rows_are_not_looked_up_by_others(model, monkeypatch):
    """Drawn tokens depend on the drafts, so they may not depend on who finished before."""
    counts, drafter = texts_read(monkeypatch), SuffixLookup(4)
    expected = expected_tokens(model, SAMPLED, drafter, seed=3)
    output = Collector()
    run(model, rows_of(PROMPTS), output, SAMPLED, drafter, 3, batch_size=3)
    assert tokens_by_line(output) == expected
    assert set(counts) == {None}


def test_order_changes_nothing(model):
    rows = rows_of(PROMPTS)
    expected = decoded(model, SAMPLED, rows=rows, batch_size=3)
    assert decoded(model, SAMPLED, rows=rows[::-1], batch_size=3) == expected
    parts = [decoded(model, SAMPLED, rows=rows[part::2], batch_size=3) for part in range(2)]
    assert parts[0] | parts[1] == expected


def test_chats_are_rows_too(model):
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:3]]
    expected = expected_tokens(model, GREEDY, prompts=chats)
    assert decoded(model, GREEDY, rows=rows_of(chats), batch_size=2) == expected
    assert expected != expected_tokens(model, GREEDY, prompts=PROMPTS[:3])


def test_rows_of_one_line_are_refused(model):
    rows = [Row(7, 0, "a"), Row(7, 1, "b")]
    with pytest.raises(ValueError, match="rows: 2 of them have the line 7"):
        run(model, rows, Collector(), GREEDY)


def test_arguments_of_another_type_are_named(model):
    rows, output = rows_of(["a"]), Collector()
    calls = [
        (lambda: batch.decode("demo", ["a"]), r"model must be a Model, got str; .*load\('demo'\)"),
        (lambda: batch.run("demo", rows, output), "model must be a Model, got str"),
        (lambda: batch.run(model, 5, output), "rows must be of type Sequence, got 5"),
        (lambda: batch.run(model, ["a"], output), r"rows must be rows of read_rows.*got one 'a'"),
        (lambda: batch.run(model, rows, "out"), "output must be a Writer or a Collector.*'out'"),
        (
            lambda: batch.run(model, rows, output, settings=0),
            "settings must be a JobSettings, got 0",
        ),
        (lambda: batch.decode(model, ["a"], job={}), "job must be a JobSettings, got {}"),
        (
            lambda: batch.decode(model, ["a", "b"], choices=[["a"], ["b"]]),
            "choices must be one for the whole job, got 2",
        ),
        (lambda: batch.run(model, rows, output, should_stop=5), "should_stop must be a function"),
        (lambda: batch.run(model, rows, output, progress=5), "progress must be a function"),
        (
            lambda: batch.run(model, [Row("x", 0, "a")], output),
            "rows: of Row.* the line must be a whole number, got 'x'",
        ),
        (lambda: batch.run(model, [Row(1, None, "a")], output), "rows: of Row.* the id must be"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()


def test_an_id_names_the_randomness_and_not_the_line(model):
    prompts = ["same prompt"] * 3
    rows = [Row(i + 1, row_id, p) for i, (row_id, p) in enumerate(zip("aba", prompts, strict=True))]
    found = decoded(model, SAMPLED, rows=rows, batch_size=2)
    assert found[1, 0] == found[3, 0] != found[2, 0]


def test_what_is_done_is_not_done_again(model):
    config = dataclasses.replace(SAMPLED, num_samples=2)
    whole = Collector()
    run(model, rows_of(PROMPTS), whole, config, batch_size=3)
    for kept in (1, 7, 16):
        output = Collector()
        output.append(whole.records[:kept])
        report = run(model, rows_of(PROMPTS), output, config, batch_size=3)
        assert tokens_by_line(output) == tokens_by_line(whole)
        assert (report.num_records, report.num_done, report.num_resumed) == (16, 16, kept)


def test_asked_to_stop_it_finishes_what_runs_and_can_go_on(model):
    output, asked = Collector(), []

    def should_stop() -> bool:
        asked.append(1)
        return len(asked) > 2

    report = run(model, rows_of(PROMPTS), output, GREEDY, batch_size=2, should_stop=should_stop)
    assert report.interrupted
    assert 0 < len(output.records) < len(PROMPTS)
    assert not run(model, rows_of(PROMPTS), output, GREEDY, batch_size=2).interrupted
    assert tokens_by_line(output) == expected_tokens(model, GREEDY)


def test_bad_rows_become_errors_and_the_job_goes_on(model):
    bad = [Row(9, 8, None, "not valid JSON."), Row(10, 9, [5, 9999]), Row(11, 10, "x" * 100)]
    output = Collector()
    report = run(model, [*rows_of(PROMPTS), *bad], output, GREEDY, batch_size=3, capacity=128)
    errors = {r["line"]: r["error"] for r in output.records if "error" in r}
    assert sorted(errors) == [9, 10, 11]
    assert "100 tokens and needs" in errors[11]
    assert "capacity is 128" in errors[11]
    assert (report.num_errors, report.num_done) == (3, 11)
    good = Collector()
    good.append([record for record in output.records if "error" not in record])
    assert tokens_by_line(good) == expected_tokens(model, GREEDY)
    again = run(model, [*rows_of(PROMPTS), *bad], output, GREEDY, batch_size=3, capacity=128)
    assert again.num_resumed == again.num_done == 11


def test_bad_rows_are_done_at_once_and_say_nothing_of_the_time_left(model):
    bad = [Row(line, line, None, "not valid JSON.") for line in range(9, 30)]
    output, reports = Collector(), []
    output.append([{"line": line, "sample": 0, "tokens": []} for line in (1, 9)])
    run(model, [*rows_of(PROMPTS), *bad], output, GREEDY, batch_size=2, progress=reports.append)
    assert reports[0].num_done == 2 + 20  # what was there, and the other bad rows
    assert reports[0].eta_seconds is None
    decoded = [report for report in reports if report.num_done > 22]
    for report in decoded:
        here = report.num_done - 22
        assert report.eta_seconds == report.seconds / here * (7 - here)
    assert [report.eta_seconds for report in decoded][-1] == 0.0


@pytest.mark.parametrize("name", ["plain", pytest.param("eagle", marks=pytest.mark.slow)])
def test_a_shared_prefix_is_read_once_and_changes_nothing(model, name):
    prompts = ["an example of what to do, then: " * 3 + prompt for prompt in PROMPTS]
    output = Collector()
    drafter = drafter_for(model, name)
    report = run(model, rows_of(prompts), output, GREEDY, drafter, batch_size=3, drafting="always")
    assert report.prefix_tokens == 96
    assert tokens_by_line(output) == expected_tokens(model, GREEDY, prompts=prompts)


def test_logprobs_texts_and_reasons_are_those_of_generate(model):
    texts = [row.text for row in jaxspec.generate(model, PROMPTS, GREEDY)]
    pairs = (text[i : i + 2] for text in texts for i in range(4, len(text) - 3))
    ending = next(pair for pair in pairs if pair.isascii())  # two tokens: each is a byte
    config = dataclasses.replace(
        GREEDY, logprobs=True, warped_logprobs=True, stop=(ending, "never in here")
    )
    output = Collector()
    run(model, rows_of(PROMPTS), output, config, PromptLookup(), batch_size=3, drafting="always")
    records = {record["line"]: record for record in output.records}
    rows = jaxspec.generate(model, PROMPTS, config)
    assert {row.finish_reason for row in rows} == {"stop_string", "length"}
    for line, row in enumerate(rows, start=1):
        record = records[line]
        assert record["text"] == row.text
        assert record["tokens"] == row.tokens.tolist()
        assert record["finish_reason"] == row.finish_reason
        for name in ("logprobs", "warped_logprobs"):
            np.testing.assert_allclose(record[name], getattr(row, name), atol=1e-4)


def test_nothing_to_emit_and_nothing_to_decode(model):
    config = GenerationConfig(max_new_tokens=0)
    assert decoded(model, config, batch_size=3) == {(line, 0): [] for line in range(1, 9)}
    assert decoded(model, GREEDY, rows=[]) == {}


def test_a_second_job_compiles_nothing(model):
    decoded(model, GREEDY, PromptLookup(), batch_size=3, drafting="always")
    sizes = run_chunk._cache_size()
    report = run(
        model,
        rows_of(PROMPTS),
        Collector(),
        GREEDY,
        PromptLookup(),
        batch_size=3,
        drafting="always",
    )
    assert run_chunk._cache_size() == sizes
    assert report.compile_seconds < 0.5


def header(model, config=GREEDY, **settings) -> dict:
    how = JobSettings(**settings)
    return job_header(model, rows_of(PROMPTS), config, PromptLookup(), settings=how)


def test_a_header_tells_of_all_that_decides_records(model):
    never, auto, always = ("never", "auto", "always")
    drawn = [header(model, SAMPLED, drafting=drafting) for drafting in (never, auto, always)]
    assert drawn[0] != drawn[1] == drawn[2]
    network = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.network)
    rounded = dataclasses.replace(model, network=network)
    assert header(rounded, drafting=never) != header(rounded, drafting=auto)
    # Greedily in float32 drafts change nothing, unless rows must fit into a given capacity.
    assert header(model, drafting=never) == header(model, drafting=always)
    assert header(model, drafting=never, capacity=64) != header(model, drafting=always, capacity=64)
    assert header(model, capacity=60) == header(model, capacity=64) != header(model, capacity=128)
    assert header(model) != header(model, capacity=64)


def test_a_header_tells_of_the_tokenizer_and_of_what_ends_a_text(model):
    tokenizer = model.tokenizer
    backend = type(tokenizer.backend).from_str(tokenizer.backend.to_str())
    backend.add_special_tokens(["<new>"])
    templates = {"default": tokenizer.templates["default"] + " "}
    for other in (
        dataclasses.replace(tokenizer, backend=backend),
        dataclasses.replace(tokenizer, templates=templates),
        dataclasses.replace(tokenizer, settings={"bos_token": "a"}),
        None,
    ):
        assert header(dataclasses.replace(model, tokenizer=other)) != header(model)
    assert header(dataclasses.replace(model, stop_token_ids=(7,))) != header(model)


def test_bytes_are_as_estimated_and_figures_add_up(model):
    output = Collector()
    drafter = drafter_for(model, "eagle")
    report = run(model, rows_of(PROMPTS), output, GREEDY, drafter, batch_size=3, drafting="always")
    assert report.state_bytes_estimated == report.state_bytes_held > 0
    assert report.slot_steps == 3 * report.num_steps >= report.counts.num_steps
    assert 0 <= report.host_fraction < 1
    assert report.counts.tau == report.counts.num_tokens / report.counts.num_steps
    assert report.as_dict()["drafted_fraction"] == 1


def test_writing_that_outlasts_a_chunk_is_the_hosts_time(model):
    class Slow(Collector):
        def append(self, records):
            time.sleep(0.4 * bool(records))
            super().append(records)

    config = dataclasses.replace(GREEDY, max_new_tokens=4)
    decoded(model, config, batch_size=2)
    output = Slow()
    report = run(model, rows_of(PROMPTS), output, config, batch_size=2)
    # Four waves of two rows; the last is written when no chunk is left to wait for.
    assert report.host_seconds > 3 * 0.4
    assert report.host_fraction == report.host_seconds / report.seconds


def test_memory_decides_how_many_rows(model):
    def report(memory=None, batch_size=None):
        settings = {"memory": memory, "batch_size": batch_size}
        return run(model, rows_of(PROMPTS), Collector(), GREEDY, **settings)

    free = report()
    assert free.batch_size == 8
    needed = free.state_bytes_estimated + free.scratch_bytes
    tight = report(needed - 1)
    assert tight.batch_size == 4
    assert tight.state_bytes_held + tight.scratch_bytes < needed
    with pytest.raises(ValueError, match=r"8 rows of capacity .* need"):
        report(needed - 1, batch_size=8)
    with pytest.raises(ValueError, match=r"1 rows of capacity .* need"):
        report(10)


class InThree(Placement):
    """A mesh's placement, as far as a job asks."""

    data_axis_size = 3

    def __call__(self, states):
        return states


def test_each_part_of_a_mesh_gets_as_many_rows(model, monkeypatch):
    monkeypatch.setattr(texts_module, "placement_of", lambda weights: InThree(None))

    def report(**settings):
        return run(model, rows_of(PROMPTS), Collector(), GREEDY, **settings)

    free = report()
    assert free.batch_size == 9
    assert report(memory=free.state_bytes_estimated + free.scratch_bytes - 1).batch_size == 3
    assert report(batch_size=6).batch_size == 6
    with pytest.raises(
        ValueError, match=r"batch_size: 8 rows .* data=3 of the mesh; give a multiple"
    ):
        report(batch_size=8)


def test_rows_at_once_that_some_group_has_no_room_for_are_refused_at_once(model):
    rows = rows_of([*["short"] * 16, *["long" * 60] * 16, "?" * 3000])
    alone = run(model, rows[:16], Collector(), GREEDY, batch_size=2)
    memory = alone.state_bytes_estimated + alone.scratch_bytes
    output = Collector()
    with pytest.raises(ValueError, match=r"2 rows of capacity .* need"):
        run(model, rows, output, GREEDY, batch_size=2, memory=memory)
    assert not output.records
    assert run(model, rows[:16], Collector(), GREEDY, batch_size=2, memory=memory).num_done == 16


def test_prompts_are_read_in_lengths_that_are_few_and_near(model, monkeypatch):
    lengths, original = set(), TextPrograms.read

    def read(programs, row, *args):
        prompt = programs.prompt_of(row)
        lengths.add((int(prompt.length), len(prompt.tokens)))
        return original(programs, row, *args)

    monkeypatch.setattr(TextPrograms, "read", read)
    prompts = ["a" * 10, "b" * 70, "c" * 200, "d" * 300]
    config = dataclasses.replace(GREEDY, max_new_tokens=4)
    drafter = LoadedDrafter(DraftModel(paths=PATHS, chunk=64), blurred(model.network))
    found = decoded(model, config, drafter, rows_of(prompts), batch_size=2, drafting="always")
    assert lengths == {(10, 16), (70, 96), (200, 224), (300, 512)}
    assert found == expected_tokens(model, config, prompts=prompts)


def test_what_a_rejoining_row_takes_is_counted(model):
    """Texts grow: what a drafter reads anew is longer than any prompt was."""
    config = dataclasses.replace(GREEDY, max_new_tokens=900)
    drafter = drafter_for(model, "draft model")

    def scratch(drafting: str) -> int:
        begun = iter([False, True]).__next__  # stops before the first prompt is read
        settings = {"drafting": drafting, "batch_size": 1, "should_stop": begun}
        return run(model, rows_of(["x"]), Collector(), config, drafter, **settings).scratch_bytes

    assert scratch("auto") > scratch("always") > 0


@pytest.mark.parametrize("num_samples", [1, 2])
def test_one_row_at_a_time_lies_next_to_the_batch(model, num_samples, monkeypatch):
    rows, batches, original = [], [], TextPrograms.read

    def read(*args):
        assert not any(row() for row in rows), "an earlier row is still there"
        ready = (stop.is_deleted() or stop.is_ready() for stop in batches)
        assert all(ready), "an earlier row is still put in place"
        state = original(*args)
        rows.append(weakref.ref(state.context.tokens))
        return state

    def put(*args, **settings):
        states = insert(*args, **settings)
        batches[:] = [states.stop]
        return states

    monkeypatch.setattr(TextPrograms, "read", read)
    monkeypatch.setattr(slots_module, "insert", put)
    config = dataclasses.replace(SAMPLED, num_samples=num_samples)
    decoded(model, config, batch_size=8)
    assert len(rows) == len(PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_auto_never_takes_more_than_it_may(model, seed):
    """By what XLA says of the compiled steps, and by the arrays themselves."""
    rng = np.random.default_rng(seed)
    longest = int(rng.choice([20, 60, 200]))
    lengths = rng.integers(longest // 2, longest, 40)
    prompts = [rng.integers(0, 256, length).tolist() for length in lengths]
    config = GenerationConfig(
        max_new_tokens=int(rng.integers(1, 60)),
        temperature=float(rng.integers(0, 2)),
        logprobs=bool(rng.integers(0, 2)),
    )
    drafter = drafter_for(model, ["plain", "lookup", "draft model", "eagle"][rng.integers(0, 4)])
    memory = int(10 ** rng.uniform(6.35, 6.75))  # of a row of any of these, to all of them
    before = sum(array.nbytes for array in jax.live_arrays() if array.dtype != "key<fry>")
    peak = 0

    def watch(_):
        nonlocal peak
        live = [array for array in jax.live_arrays() if array.dtype != "key<fry>"]
        peak = max(peak, sum(array.nbytes for array in live if not array.is_deleted()) - before)

    output = Collector()
    report = run(model, rows_of(prompts), output, config, drafter, memory=memory, progress=watch)
    assert len(output.records) == 40
    estimated = report.state_bytes_estimated + report.scratch_bytes
    assert report.state_bytes_held + report.scratch_bytes <= memory
    assert peak <= estimated


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"capacity": 0}, "capacity must be at least 1"),
        ({"drafting": "maybe"}, "drafting must be"),
        ({"seed": -1}, "seed must be"),
        ({"config": GenerationConfig(temperature=[0.0] * 8)}, "one number for the whole job"),
    ],
)
def test_settings_that_make_no_sense(model, settings, match):
    with pytest.raises(ValueError, match=match):
        run(model, rows_of(PROMPTS), Collector(), **settings)


@pytest.mark.parametrize(
    ("config", "drafter", "drafting"),
    [
        (SAMPLED, PromptLookup(), "auto"),
        (GREEDY, None, "auto"),
        (GREEDY, PromptLookup(), "always"),
        (GREEDY, PromptLookup(), "never"),
    ],
)
def test_what_a_guard_is_to_expect_is_refused_without_one(model, config, drafter, drafting):
    settings = {"drafting": drafting, "guard": GuardSettings(expected=1.2)}
    with pytest.raises(ValueError, match=r"guard.expected \(--expected-speedup\) needs a guard"):
        run(model, rows_of(PROMPTS), Collector(), config, drafter, **settings)
