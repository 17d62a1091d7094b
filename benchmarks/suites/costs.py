"""Suites of single costs: passes, steps, rows, the start of the program, rounded weights."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import Suite, SuiteRun, measure_methods
from benchmarks.page import Page, Section
from benchmarks.prompts import PROMPT_SETS
from jaxspec.checkpoint import Model, load
from jaxspec.core.types import Params, Warp
from jaxspec.decoding.generate import generate, score
from jaxspec.decoding.request import GenerationConfig, prepare, row_bucket_of
from jaxspec.drafters import DraftModel, NoDraft, PromptLookup
from jaxspec.measure.agreement import TextAgreement, agreement
from jaxspec.measure.compare import JaxRunner
from jaxspec.measure.figures import PLAIN
from jaxspec.measure.machine import num_bytes, read_bandwidth, this_machine
from jaxspec.measure.passes import CAPACITY, NUM_TOKENS, measure_passes
from jaxspec.measure.step import measure_drafter
from jaxspec.models import ModelConfig, Network, init_params

PASS_AIMS = {320: (1.3, 2.1, 3.5), 768: (1.3, 1.6, 2.7)}
"""Aims for T(1) over the reading time, T(8) / T(1) and T(26) / T(1), by embedding width."""
_MACHINE_NOTE = "THE MACHINE WAS BUSY: only ratios count."


def _about_machine() -> list[str]:
    machine = this_machine()
    return [f"{machine}.", *([_MACHINE_NOTE] if machine.busy else [])]


def llama(embed_dim: int) -> Network:
    """Returns a 12-layer Llama with heads of 64, few key heads and random weights."""
    config = ModelConfig(
        vocab_size=4096,
        embed_dim=embed_dim,
        num_layers=12,
        num_heads=embed_dim // 64,
        num_kv_heads=1 if embed_dim < 768 else 2,
        head_dim=64,
        mlp_dim=3 * embed_dim,
        max_positions=CAPACITY,
        tied_head=True,
    )
    return Network(init_params(config, jax.random.key(0)), config)


class PassCosts(NamedTuple):
    """Times of one network's passes.

    Attributes:
        embed_dim: width of the network.
        weight_bytes: bytes of all weights.
        bandwidth: bytes per second at which an array as large as the weights is read.
        seconds: median seconds of one pass, by number of tokens, the root included.
    """

    embed_dim: int
    weight_bytes: int
    bandwidth: float
    seconds: dict[int, float]

    @property
    def over_reading(self) -> float:
        """Returns T(1) over the time of reading the weights once."""
        return self.seconds[1] * self.bandwidth / self.weight_bytes

    def ratio(self, num_tokens: int) -> float:
        """Returns T(num_tokens) / T(1)."""
        return self.seconds[num_tokens] / self.seconds[1]

    def as_dict(self) -> dict[str, Any]:
        """Returns all figures, ready for JSON."""
        ratios = {num_tokens: self.ratio(num_tokens) for num_tokens in self.seconds}
        return {**self._asdict(), "over_reading": self.over_reading, "ratios": ratios}


def _measure_passes(run: SuiteRun) -> Page:
    try:
        dims = [int(word) for word in run.settings["dims"].split(",")]
    except ValueError:
        raise ValueError(f"dims must be widths as 320,768, got {run.settings['dims']!r}.") from None
    costs, notes = [], []
    with run.steps(len(dims)) as advance:
        for dim in dims:
            advance(f"width {dim}")
            network = llama(dim)
            size, seconds = num_bytes(network.params), measure_passes(network, repeats=run.repeats)
            costs.append(PassCosts(dim, size, read_bandwidth(size), seconds))
            if dim in PASS_AIMS:
                one, eight, many = PASS_AIMS[dim]
                notes.append(
                    f"Aims at width {dim}: T(1) / reading {one}, T(8) / T(1) {eight}, T(26) / T(1) "
                    f"{many} at most."
                )
    table = Section(
        text=[
            f"Passes of Llamas with random weights over {CAPACITY} cache places, float32, one "
            "row; T(n) is the time of a pass over n tokens, the root included; reading is the time "
            "of reading the weights once.",
            *_about_machine(),
        ],
        columns=[
            *("width", "weights", "T(1)", "T(1) / reading"),
            *(f"T({n}) / T(1)" for n in NUM_TOKENS[1:]),
        ],
        rows=[
            [
                str(cost.embed_dim),
                f"{cost.weight_bytes / 1e6:.1f} MB",
                f"{1e3 * cost.seconds[1]:.2f} ms",
                f"{cost.over_reading:.2f}",
                *(f"{cost.ratio(n):.2f}" for n in NUM_TOKENS[1:]),
            ]
            for cost in costs
        ],
        notes=notes,
    )
    return Page([table], {"passes": costs, "aims": PASS_AIMS, "machine": this_machine()})


SMALL_TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
WARPS = {
    "greedy": Warp(),
    "temperature 1": Warp(temperature=jnp.ones(1)),
    "top-p 0.95": Warp(temperature=jnp.ones(1), top_p=jnp.full(1, 0.95)),
}
STEP_AIMS = {"greedy": 1.12, "temperature 1": 1.2, "top-p 0.95": 1.2}


class StepCost(NamedTuple):
    """Times of one drafter's steps with one way of sampling, in seconds per step.

    Attributes:
        drafter: name of the drafter.
        sampling: name of the way of sampling.
        step: a whole step.
        draft: its draft alone.
        target: target passes alone, of the widths that the steps had, weighted by how often.
        width: mean tokens in a target pass.
        aim: the largest ratio to be content with.
    """

    drafter: str
    sampling: str
    step: float
    draft: float
    target: float
    width: float
    aim: float

    @property
    def ratio(self) -> float:
        """Time of a step over the time of its draft and target pass alone."""
        return self.step / (self.draft + self.target)


def _measure_steps(run: SuiteRun) -> Page:
    model, draft = load(run.settings["model"]), load(run.settings["draft_model"])
    drafters = {
        PLAIN: (NoDraft(), ()),
        "lookup": (PromptLookup(), ()),
        "draft chain": (DraftModel(), draft.network),
        "draft tree": (DraftModel(paths=SMALL_TREE), draft.network),
    }
    costs = []
    with run.steps(len(drafters) * len(WARPS)) as advance:
        for name, (drafter, weights) in drafters.items():
            for sampling, warp in WARPS.items():
                advance(f"{name}, {sampling}")
                params, steps = Params(model.network, weights), run.settings["steps"]
                times = measure_drafter(params, drafter, warp, steps, run.repeats)
                costs.append(StepCost(name, sampling, *times, aim=STEP_AIMS[sampling]))
    table = Section(
        text=[
            f"{model.name}, one row: a step over its draft and its target pass alone. The rest is "
            "verification, commit and bookkeeping. A ratio above its aim is marked.",
            *_about_machine(),
        ],
        columns=[
            "drafter",
            "sampling",
            "step ms",
            "draft ms",
            "target ms",
            "width",
            "ratio",
            "aim",
        ],
        rows=[
            [
                cost.drafter,
                cost.sampling,
                *(f"{seconds * 1e3:.3f}" for seconds in (cost.step, cost.draft, cost.target)),
                f"{cost.width:.1f}",
                f"{cost.ratio:.3f}" + (" !" if cost.ratio > cost.aim else ""),
                f"{cost.aim:.2f}",
            ]
            for cost in costs
        ],
    )
    return Page([table], {"steps": costs, "machine": this_machine()})


ROWS_CAPACITY, ROWS_PROMPT, ROWS_AIM = 256, 64, 6.0


class RowsSpeed(NamedTuple):
    """Tokens per second of one row and of a batch.

    Attributes:
        num_rows: rows of the batch.
        one: tokens per second of one row.
        batch: tokens per second of all rows of the batch.
    """

    num_rows: int
    one: float
    batch: float

    @property
    def ratio(self) -> float:
        """Speed of the batch over that of one row."""
        return self.batch / self.one


def measure_rows(model: Model, num_rows: int, repeats: int) -> RowsSpeed:
    """Decodes one row and `num_rows`, plainly and in turns, to the end of the cache.

    Prompts are random ids of one length; no stop id ends a row.
    """
    config = GenerationConfig(max_new_tokens=ROWS_CAPACITY - ROWS_PROMPT - 1, stop_token_ids=())
    shape = (num_rows, ROWS_PROMPT)
    tokens = np.random.default_rng(0).integers(16, min(4096, model.vocab_size), size=shape)
    batches = {0: tokens[:1].tolist(), 1: tokens.tolist()}
    capacities = prepare(model, batches[0], config, None, 0).plan.capacities
    assert capacities == (ROWS_CAPACITY,), f"the cache should have one capacity, got {capacities}"
    runner = JaxRunner(model, {PLAIN: None}, config, carry=False)
    speeds = [
        measure_methods(runner, [PLAIN], {index: batch}, repeats)[PLAIN].overall.tokens_per_second
        for index, batch in batches.items()
    ]
    return RowsSpeed(num_rows, *speeds)


def _measure_rows(run: SuiteRun) -> Page:
    model, num_rows = load(run.settings["model"]), run.settings["rows"]
    if num_rows < 1 or row_bucket_of(num_rows) != num_rows:
        raise ValueError(
            f"rows must be 1, 2, 6 or a multiple of 8, as others are filled up; got {num_rows}."
        )
    found = measure_rows(model, num_rows, run.repeats)
    table = Section(
        text=[
            f"{model.name}, plain decoding to the end of a cache of {ROWS_CAPACITY} places; median "
            f"of {run.repeats} runs.",
            *_about_machine(),
        ],
        columns=["rows", "one row, tokens/s", "all rows, tokens/s", "ratio", "aim"],
        rows=[
            [
                str(found.num_rows),
                f"{found.one:.0f}",
                f"{found.batch:.0f}",
                f"{found.ratio:.2f}",
                f"{ROWS_AIM:g}",
            ]
        ],
    )
    return Page([table], {"rows": found, "aim": ROWS_AIM, "machine": this_machine()})


START_AIMS = {"import": 1.5, "first token, cold": 10.0, "first token, warm": 4.0}
"""Seconds that `import jaxspec` and the first token of `jaxspec demo` should take at most."""
# Off a terminal the demo marks its first method with a line.
_PLAIN_HEADING = b"# plain\n"


def measure_startup(
    repeats: int, demo_arguments: Sequence[str], advance=lambda _: None
) -> dict[str, float]:
    """Returns median seconds by the names of `START_AIMS`; every run is a process.

    Every cold run has an empty compilation cache, in which the warm run follows it.
    """
    seconds = {name: [] for name in START_AIMS}
    for _ in range(repeats):
        advance("import")
        seconds["import"].append(_import_seconds())
        with tempfile.TemporaryDirectory() as cache:
            for name in ("first token, cold", "first token, warm"):
                advance(name)
                seconds[name].append(_first_token_seconds(cache, demo_arguments))
    return {name: float(np.median(values)) for name, values in seconds.items()}


def _import_seconds() -> float:
    code = "import time; t = time.perf_counter(); import jaxspec; print(time.perf_counter() - t)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    return float(done.stdout)


def _first_token_seconds(cache: str, demo_arguments: Sequence[str]) -> float:
    """Returns the seconds from starting the process to the first text after the prompt."""
    command = [sys.executable, "-m", "jaxspec", "demo", *demo_arguments]
    environment = {**os.environ, "JAXSPEC_CACHE": cache}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as demo:
        assert demo.stdout is not None
        shown = b""
        while not shown.partition(_PLAIN_HEADING)[2].strip():
            piece = os.read(demo.stdout.fileno(), 4096)
            if not piece:
                raise ValueError(f"{' '.join(command)} ended without a token.")
            shown += piece
        seconds = time.perf_counter() - start
        demo.terminate()
    return seconds


def _measure_startup(run: SuiteRun) -> Page:
    drafter = f"draft-model:model={run.settings['draft_model']}"
    models = ("--model", run.settings["model"], "--drafter", drafter)
    with run.steps(run.repeats * len(START_AIMS)) as advance:
        seconds = measure_startup(run.repeats, models, advance)
    table = Section(
        text=[
            "Seconds of `import jaxspec`, and from starting `jaxspec demo` to its first token, "
            f"with an empty and with a filled compilation cache; medians of {run.repeats}.",
            *_about_machine(),
        ],
        columns=["start", "seconds", "aim, below"],
        rows=[[name, f"{value:.2f}", f"{START_AIMS[name]:g}"] for name, value in seconds.items()],
    )
    return Page([table], {"seconds": seconds, "aims": START_AIMS, "machine": this_machine()})


def _measure_weights(run: SuiteRun) -> Page:
    num_new = run.suite.max_new_tokens
    config = GenerationConfig(max_new_tokens=num_new)
    figures: dict[str, dict[str, TextAgreement]] = {}
    prompts: list[str] = []
    with run.steps(2 * len(run.suite.needs)) as advance:
        for name in run.suite.needs:
            exact, rounded = load(name, "float32"), load(name, "float32", weights="int8")
            advance(f"{name}, continuations")
            prompts = [prompt.text for prompt in run.prompts(exact, num_new)]
            texts = [
                (row.prompt_tokens.tolist(), row.tokens.tolist())
                for row in generate(exact, prompts, config)
            ]
            advance(f"{name}, agreement")
            figures[name] = {
                part: agreement(_logits_of(part, texts, exact, rounded)) for part in TEXT_PARTS
            }
    table = Section(
        text=[
            f'`weights="int8"` next to float32 over {len(prompts)} held-out prompts and, behind '
            f"each, up to {num_new} tokens that the float32 model decodes greedily. "
            "Both models read the same texts. A position belongs to the part that its next token "
            "is in. KL is the divergence of the distribution of int8 from that of float32."
        ],
        columns=["model", "part of the texts", "positions", "KL, nats per token", "same top-1"],
        rows=[
            [name, part, str(found.positions), f"{found.kl:.2g}", f"{found.top1:.1%}"]
            for name, parts in figures.items()
            for part, found in parts.items()
        ],
    )
    return Page([table], {"agreement": figures})


TEXT_PARTS = ("prompts", "continuations")


def _logits_of(
    part: str, texts: Sequence[tuple[list[int], list[int]]], *models: Model
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for prompt, continuation in texts:
        last = len(prompt) - 1
        places = slice(last) if part == "prompts" else slice(last, -1)
        exact, other = (score(model, [*prompt, *continuation]).logits[places] for model in models)
        yield exact, other


COST_SUITES: Mapping[str, Suite] = {
    "passes": Suite(
        title="Target passes over several tokens",
        about="time of a target pass over n tokens over that of a pass over one",
        measure=_measure_passes,
        repeats=15,
        takes={"dims": ",".join(map(str, PASS_AIMS))},
    ),
    "step": Suite(
        title="A step over its draft and target pass alone",
        about="time of a whole step over that of its draft and target pass alone",
        measure=_measure_steps,
        repeats=15,
        takes={"model": "demo", "draft_model": "demo-draft", "steps": 24},
    ),
    "rows": Suite(
        title="Many rows over one",
        about="plain tokens per second of 32 rows over those of one",
        measure=_measure_rows,
        repeats=5,
        takes={"model": "demo", "rows": 32},
    ),
    "startup": Suite(
        title="The start of the program",
        about="seconds of the import and to the first token of the demo",
        measure=_measure_startup,
        repeats=3,
        takes={"model": "demo", "draft_model": "demo-draft"},
    ),
    "weights": Suite(
        title="What weights in 8 bits cost",
        about='agreement of `weights="int8"` with float32: KL and the likeliest token',
        measure=_measure_weights,
        prompt_sets=PROMPT_SETS,
        prompts_per_set=20,
        needs=("demo", "demo-draft"),
    ),
}
