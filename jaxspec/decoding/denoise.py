"""`denoise` and `denoise_stream`: prompts in, text out of a diffusion language model.

Passing `speculation=` is the only difference between stepwise and self-speculative decoding:
stepwise decoding is the same program with no drafts.
"""

import dataclasses
import time
from collections.abc import Callable, Generator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import jax
import numpy as np

from jaxspec.checkpoint.hub import check_is_model
from jaxspec.checkpoint.memory import check_cache_fits
from jaxspec.core.checks import (
    Checked,
    Count,
    above_up_to,
    between,
    checked,
    one_of,
    shown,
    within,
)
from jaxspec.core.loop import round_up
from jaxspec.core.types import Params, Stop
from jaxspec.decoding.metrics import Counts
from jaxspec.decoding.request import (
    PromptLike,
    Scale,
    TokenIds,
    check_call,
    check_in_vocabulary,
    config_of,
    encode_prompts,
    one_per_prompt,
    peak_bytes,
    prompt_arrays,
    stop_ids_of,
)
from jaxspec.decoding.result import FINISH_REASONS, Rows
from jaxspec.diffusion.canvases import block_counts
from jaxspec.diffusion.passes import CACHES, DenoisePlan
from jaxspec.diffusion.self_speculative import (
    DenoiseInfo,
    DenoiseOutcome,
    DenoisePrompt,
    begin_rows,
    denoise_rows,
    outcome_of,
    run_rounds,
    step_stream,
)
from jaxspec.diffusion.speculation import STEPWISE, DenoiseState, SelfSpeculation
from jaxspec.diffusion.unmask import (
    ORDERS,
    EvenPace,
    LinearPace,
    Pace,
    Rules,
    ThresholdPace,
    linear_shares,
)
from jaxspec.sharding import DATA, mesh_of, on_mesh_of, shares_of_memory, spread_rows

if TYPE_CHECKING:
    from jaxspec.checkpoint import Model, Tokenizer

SCHEDULES = ("even", "linear")
_CANVAS_MULTIPLE = 32
DEFAULT_BLOCK = 32
"""Positions per block where neither the network nor the caller says."""


@dataclasses.dataclass(frozen=True)
class DenoiseConfig(Checked):
    """Settings of filling in masks.

    Attributes:
        max_new_tokens: masks after each prompt.
        block_length: positions that are filled in before the next block begins; must divide
            `max_new_tokens`. `None` takes the network's own, or 32, or all if that is less.
        steps: decisions in all, spread evenly over the blocks; `None` for one per token. Steps that
            would decide nothing, since there are more than tokens, are not taken.
        schedule: "even" spreads the masks of a block over its steps. "linear" follows time as Dream
            does, and fills in all that is left at the last step of a block.
        eps: end of time in the "linear" schedule, which runs from 1 down to it.
        threshold: fill in all tokens at least this probable, and at least one, in each step,
            whatever number of steps that takes (Fast-dLLM). LOSSY: the text differs from that of
            one token per step.
        order: the positions that come first: "low_confidence" (the surest ones; LLaDA's name, after
            those that it masks again), "random", or Dream's "entropy", "topk_margin" and
            "maskgit_plus".
        temperature: 0 (the default) takes the likeliest tokens. One, or one for each prompt.
        guidance: scale of classifier-free guidance, up to 1e4; 0 for none. It costs a second pass.
        cache: kind of cache between passes: "none" (exact), "blocks" (exact, for networks that are
            causal over blocks), "prefix" or "dual" (APPROXIMATE, for the others). `None` takes the
            exact one that does least.
        stop_token_ids: a row ends with the first of these; `None` takes the model's own, `()` none.
        allow_mask_token: the mask itself may be chosen, as in the published programs; such
            positions stay masked.

    Raises:
        ValueError: an argument is out of range; the message names it.

    Example:
        >>> import jaxspec
        >>> model = jaxspec.load("demo-block-diffusion")
        >>> config = jaxspec.DenoiseConfig(max_new_tokens=16, steps=8)
        >>> jaxspec.denoise(model, "Name a colour.", config)[0].num_calls < 16
        True
    """

    max_new_tokens: Count = 128
    block_length: Count | None = None
    steps: Count | None = None
    schedule: Annotated[str, one_of(*SCHEDULES)] = "even"
    eps: Annotated[float, between(0, 1)] = 1e-3
    threshold: Annotated[float, above_up_to(0, 1)] | None = None
    order: Annotated[str, one_of(*ORDERS)] = "low_confidence"
    temperature: Scale | Sequence[Scale] = 0.0
    guidance: Annotated[float, within(0, 1e4)] = 0.0
    cache: Annotated[str, one_of(*CACHES)] | None = None
    stop_token_ids: TokenIds | None = None
    allow_mask_token: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.threshold is not None:
            self._check_threshold()

    def _check_threshold(self) -> None:
        if self.steps is not None or self.schedule != "even":
            raise ValueError("threshold: decides how many steps there are; leave out steps.")
        if self.order not in ("low_confidence", "maskgit_plus"):
            raise ValueError(
                "threshold: is a probability, so order must be 'low_confidence' or 'maskgit_plus', "
                f"got {self.order!r}."
            )


@dataclasses.dataclass(frozen=True)
class Denoised:
    """One filled-in continuation of one prompt.

    Attributes:
        prompt_tokens: ids of the prompt.
        tokens: ids after it, up to the stop id if there is one.
        text: their text, special tokens left out; `None` without a tokenizer.
        finish_reason: "stop_token", "length", or "not_finite" (the network gave no usable logits).
        num_calls: passes that the row took part in; the pass that reads the whole blocks of the
            prompt is not counted.
        num_canvases: canvases with text or drafts in those passes; equal to `num_calls` without
            speculation. A pass with N drafts computes N + 1, also where fewer could be drafted.
        drafted: entry i: passes that checked i drafted decisions.
        accepted: entry i: passes that confirmed i of them.
    """

    prompt_tokens: np.ndarray
    tokens: np.ndarray
    text: str | None
    finish_reason: str
    num_calls: int
    num_canvases: int
    drafted: np.ndarray
    accepted: np.ndarray

    @property
    def counts(self) -> Counts:
        """Counts of the text as those of `generate`: a step is a pass, a draft is a decision."""
        drafted, accepted = (tuple(map(int, each)) for each in (self.drafted, self.accepted))
        kept = sum(i * steps for i, steps in enumerate(accepted))
        num_drafted = sum(i * steps for i, steps in enumerate(drafted))
        return Counts(len(self.tokens), self.num_calls, num_drafted, kept, accepted, drafted)

    @property
    def tokens_per_call(self) -> float:
        """Tokens of the text over passes; 1 for stepwise decoding with one token per step."""
        return len(self.tokens) / max(self.num_calls, 1)

    @property
    def acceptance_rate(self) -> float | None:
        """Confirmed over drafted decisions; `None` if none was drafted."""
        counts = np.arange(len(self.drafted))
        drafted = int(self.drafted @ counts)
        return None if drafted == 0 else int(self.accepted @ counts) / drafted


@dataclasses.dataclass(frozen=True, repr=False)
class DenoiseResult(Rows[Denoised]):
    """Rows in order of prompts.

    Attributes:
        rows: continuations; `result[i]` is row i.

    Example:
        >>> import jaxspec
        >>> model = jaxspec.load("demo-block-diffusion")
        >>> config = jaxspec.DenoiseConfig(max_new_tokens=16)
        >>> result = jaxspec.denoise(model, ["Name a colour.", "Name a fish."], config)
        >>> len(result), result[1].finish_reason in ("length", "stop_token")
        (2, True)
    """

    rows: tuple[Denoised, ...]


def denoise(
    model: "Model",
    prompts: PromptLike | Sequence[PromptLike],
    config: DenoiseConfig | None = None,
    speculation: SelfSpeculation | None = None,
    seed: int = 0,
    **settings: Any,
) -> DenoiseResult:
    """Continues prompts with a diffusion language model, in one compiled program.

    Args:
        model: a diffusion language model from `load`: LLaDA, Dream, SDAR and the like.
        prompts: one prompt or several: a string, token ids, or chat messages.
        config: settings; 128 new tokens, greedy, by default.
        speculation: drafts several decisions ahead and checks them in one pass (`SelfSpeculation`);
            without `lossy_top_k` the output is that of stepwise decoding. `None` decodes stepwise.
        seed: seed of the randomness, in 0..2**31 - 1. A row depends on it and on its place among
            the prompts.
        **settings: fields of `DenoiseConfig`, such as `steps=32`, in place of those of `config`.

    Returns:
        One `Denoised` per prompt.

    Raises:
        ValueError: the model is causal, settings do not fit the model or each other, or a prompt
            is empty, too long, or holds the mask.

    Example:
        >>> import jaxspec
        >>> model = jaxspec.load("demo-block-diffusion")
        >>> config = jaxspec.DenoiseConfig(max_new_tokens=16)
        >>> stepwise = jaxspec.denoise(model, "Name a colour.", config)
        >>> fast = jaxspec.denoise(model, "Name a colour.", config, jaxspec.SelfSpeculation(4))
        >>> fast.texts == stepwise.texts, fast[0].num_calls <= stepwise[0].num_calls
        (True, True)
    """
    config = config_of(config, settings, DenoiseConfig)
    request = prepare_denoising(model, prompts, config, speculation, seed)
    return request.result(request.denoise())


class DenoiseStep(NamedTuple):
    """Record of one step of one row.

    Attributes:
        tokens: `[max_new_tokens]`, the positions after the prompt before the step's pass; masks
            where nothing is decided.
        drafts: `[drafts, max_new_tokens]`, further canvases that the pass read, each with one more
            decision drafted; of a tree, the path of the first choices.
        num_accepted: drafts that were kept.
    """

    tokens: np.ndarray
    drafts: np.ndarray
    num_accepted: int


def denoise_stream(
    model: "Model",
    prompts: PromptLike | Sequence[PromptLike],
    config: DenoiseConfig | None = None,
    speculation: SelfSpeculation | None = None,
    seed: int = 0,
    **settings: Any,
) -> Generator[list[DenoiseStep | None], None, DenoiseResult]:
    """Yields the steps of `denoise` as they are taken: one entry per row.

    The entry of a row that has ended is `None`. With the "prefix" and "dual" caches a row may wait
    for others before it opens a block; its step then shows the canvas unchanged.

    Args:
        model: see `denoise`.
        prompts: see `denoise`.
        config: see `denoise`.
        speculation: see `denoise`.
        seed: see `denoise`.
        **settings: see `denoise`.

    Returns:
        The `DenoiseResult`, as the value of `yield from`.

    Raises:
        ValueError: as `denoise` does.

    Example:
        >>> import jaxspec
        >>> model = jaxspec.load("demo-block-diffusion")
        >>> config = jaxspec.DenoiseConfig(max_new_tokens=16)
        >>> steps = list(jaxspec.denoise_stream(model, "Name a colour.", config))
        >>> steps[0][0].tokens.shape, steps[0][0].num_accepted
        ((16,), 0)
    """
    config = config_of(config, settings, DenoiseConfig)
    request = prepare_denoising(model, prompts, config, speculation, seed)
    states = request.begin()
    depths = np.asarray(request.speculation.tree.depths)
    firsts = np.searchsorted(depths, np.arange(1 + request.speculation.num_drafts))
    while True:
        running = np.asarray(states.canvas.stop) == Stop.RUNNING
        if not running.any():
            return request.result(outcome_of(states))
        states, info = request.step(states)
        info: Any = jax.device_get(info)
        canvases = request.continuations(info.canvases)
        yield [
            DenoiseStep(
                canvases[row][0],
                canvases[row][firsts[1 : info.num_drafted[row] + 1]],
                int(info.num_accepted[row]),
            )
            if running[row]
            else None
            for row in range(request.num_rows)
        ]


def measure_costs(
    model: "Model",
    prompts: PromptLike | Sequence[PromptLike],
    config: DenoiseConfig | None = None,
    speculation: SelfSpeculation | None = None,
    repeats: int = 3,
) -> tuple[float, ...]:
    """Returns the seconds of a pass with 0, 1, ..., `num_drafts` drafts, on this machine.

    The result is for `dataclasses.replace(speculation, costs=...)`. The first blocks of the prompts
    are decoded, and the time of all passes is divided by their number: with some caches a pass
    reads one block, several or the whole canvas, and how often depends on what is drafted. The
    median of the runs counts; compiling is done before them.

    Args:
        model: see `denoise`.
        prompts: prompts in the number and of the lengths that will be decoded together.
        config: see `denoise`.
        speculation: `costs` and `limit` are ignored; `None` takes the default.
        repeats: least runs of each number of drafts; quick ones are repeated for half a second.

    Raises:
        ValueError: as `denoise` does, or `repeats` is not at least 1.
    """
    repeats = checked("repeats", repeats, Count)
    config, speculation = config or DenoiseConfig(), speculation or SelfSpeculation()
    # As wide a window as all drafts will need: it is part of what a pass costs.
    widest = prepare_denoising(model, prompts, config, speculation, 0).plan
    shared = {"window": widest.window, "canvas_size": widest.canvas_size}
    runs = []
    for count in range(speculation.num_drafts + 1):
        drafted = dataclasses.replace(speculation, num_drafts=count, costs=None, limit=None)
        request = prepare_denoising(model, prompts, config, drafted, 0)
        plan = dataclasses.replace(request.plan, **shared)
        most = max(1, max(_MEASURED_BLOCKS * plan.block, _MEASURED_TOKENS) // (count + 1))
        runs.append(dataclasses.replace(request, plan=plan).timed(most))
    for run in runs:
        run()  # compiles
    seconds, end = [], time.perf_counter() + _MEASURED_SECONDS
    while len(seconds) < repeats or time.perf_counter() < end:
        seconds.append([run() for run in runs])
    return tuple(map(median, zip(*seconds, strict=True)))


_MEASURED_BLOCKS, _MEASURED_TOKENS, _MEASURED_SECONDS = 4, 64, 0.5
"""Least blocks, tokens and seconds that costs are measured over: short runs differ much."""


@dataclasses.dataclass(frozen=True)
class DenoiseRequest:
    """A call of `denoise`, checked and turned into arrays.

    Attributes:
        params: weights of the network.
        prompts: one entry per row.
        plan: static settings of the program.
        speculation: settings of drafting.
        num_rows: rows that were asked for; on a mesh, copies of the first may fill up its parts.
        tokenizer: tokenizer of the model; `None` if it has none.
    """

    params: Params
    prompts: DenoisePrompt
    plan: DenoisePlan
    speculation: SelfSpeculation
    num_rows: int
    tokenizer: "Tokenizer | None"

    @property
    def static(self) -> dict[str, Any]:
        """The static settings of every program."""
        return {"plan": self.plan, "speculation": self.speculation}

    def denoise(self) -> DenoiseOutcome:
        """Fills in all rows in one program."""
        with on_mesh_of(self.params):
            return denoise_rows(self.params, self._spread(), **self.static)

    def peak_bytes(self) -> int:
        """Returns the most bytes that the program of `denoise` holds at once, by its compiler."""
        with on_mesh_of(self.params):
            lowered = denoise_rows.lower(self.params, self._spread(), **self.static)
            return peak_bytes(lowered.compile())

    def begin(self) -> DenoiseState:
        """Returns the rows before the first pass."""
        with on_mesh_of(self.params):
            return begin_rows(self.params, self._spread(), **self.static)

    def step(self, states: DenoiseState) -> tuple[DenoiseState, DenoiseInfo]:
        """Runs one step; `states` is donated."""
        with on_mesh_of(self.params):
            return step_stream(self.params, states, **self.static)

    def timed(self, most: int) -> Callable[[], float]:
        """Returns a timer that runs at most `most` rounds and reports seconds per round."""
        states = self.begin()

        def run() -> float:
            jax.block_until_ready(states)
            start = time.perf_counter()
            with on_mesh_of(self.params):
                ended = run_rounds(self.params, states, most=most, **self.static)
            _, count = jax.block_until_ready(ended)
            return (time.perf_counter() - start) / max(1, int(count))

        return run

    def continuations(self, canvases: np.ndarray) -> list[np.ndarray]:
        """Returns the positions after the prompt, of all canvases of each row."""
        lengths = np.asarray(self.prompts.length).tolist()
        return [
            canvases[row][..., length : length + self.plan.max_new]
            for row, length in enumerate(lengths[: self.num_rows])
        ]

    def result(self, outcome: DenoiseOutcome) -> DenoiseResult:
        """Returns the rows of what `denoise` gave."""
        prompts = [
            np.asarray(self.prompts.tokens[row][: int(self.prompts.length[row])])
            for row in range(self.num_rows)
        ]
        return DenoiseResult(tuple(denoised_rows(self.tokenizer, self.plan, prompts, outcome)))

    def _spread(self) -> DenoisePrompt:
        """Returns the prompts, on the devices that the model lies on."""
        mesh = mesh_of(self.params)
        return self.prompts if mesh is None else spread_rows(mesh, self.prompts)


def denoised_rows(
    tokenizer: "Tokenizer | None",
    plan: DenoisePlan,
    prompts: Sequence[np.ndarray],
    outcome: DenoiseOutcome,
) -> list[Denoised]:
    """Returns the texts of rows that have ended; rows after those of `prompts` are left out.

    Args:
        tokenizer: tokenizer of the model; `None` if it has none.
        plan: static settings of the program.
        prompts: ids of each row's prompt.
        outcome: the rows.
    """
    host: Any = jax.device_get(outcome)
    rows = []
    for row, prompt in enumerate(prompts):
        stop = Stop(int(host.canvas.stop[row]))
        filled = host.canvas.tokens[row, len(prompt) : len(prompt) + plan.max_new]
        # Decisions past the length asked for, or past a stop id, are not part of the text.
        ends = np.flatnonzero(np.isin(filled, host.stop_ids[row]))
        masks = np.flatnonzero(filled == plan.rules.mask_token_id)
        if stop == Stop.NOT_FINITE:
            filled = filled[: masks[0]] if len(masks) else filled
        elif len(ends):
            stop, filled = Stop.TOKEN, filled[: ends[0] + 1]
        else:
            stop = Stop.LENGTH
        rows.append(
            Denoised(
                prompt_tokens=prompt,
                tokens=filled,
                text=None if tokenizer is None else tokenizer.decode(filled.tolist()),
                finish_reason=FINISH_REASONS[stop],
                num_calls=int(host.stats.num_calls[row]),
                num_canvases=int(host.stats.num_canvases[row]),
                drafted=host.stats.drafted[row],
                accepted=host.stats.accepted[row],
            )
        )
    return rows


def prepare_denoising(
    model: "Model",
    prompts: PromptLike | Sequence[PromptLike],
    config: DenoiseConfig,
    speculation: SelfSpeculation | None,
    seed: int,
) -> DenoiseRequest:
    """Checks the arguments of `denoise` and builds the arrays of its rows.

    Raises:
        ValueError: as `denoise` does.
    """
    speculation = STEPWISE if speculation is None else speculation
    plan = plan_denoising(model, config, speculation, seed)
    encoded = encode_prompts(model, prompts, config.max_new_tokens)
    for index, ids in enumerate(encoded):
        check_no_mask(model, ids, f"prompts[{index}]")
    temperature = one_per_prompt("temperature", config.temperature, len(encoded), np.float32)
    mesh, num_rows = mesh_of(model.params), len(encoded)
    if mesh is not None:
        more = -num_rows % mesh.shape[DATA]
        encoded += encoded[:1] * more
        temperature = np.append(temperature, temperature[:1].repeat(more))
    plan = plan.sized(canvas_size_of(plan, max(map(len, encoded))))
    held = 0 if plan.cache == "none" else plan.canvas_size
    shares = shares_of_memory(mesh, rows=True)
    dtype = model.network.dtype
    scored = plan.window * plan.num_nodes
    if plan.cache == "blocks":
        scored = plan.block * block_counts(plan, speculation.tree)[-1]
    check_cache_fits(model.config, dtype, held, len(encoded), shares, scored=scored)
    rows = denoise_prompts(model, config, plan, encoded, temperature, seed)
    return DenoiseRequest(
        Params(model.network, ()), rows, plan, speculation, num_rows, model.tokenizer
    )


def plan_denoising(
    model: "Model", config: DenoiseConfig, speculation: SelfSpeculation, seed: int
) -> DenoisePlan:
    """Checks the arguments that all prompts of a call share; returns the plan without a size.

    Raises:
        ValueError: as `denoise` does.
    """
    check_is_model(model)
    diffusion = model.config.diffusion
    if diffusion is None:
        raise ValueError(
            f"model: {model.name} is causal and cannot fill in masks; use `generate`, or load a "
            "diffusion language model."
        )
    check_call(config, DenoiseConfig, seed)
    check_in_vocabulary(model, config.stop_token_ids or (), "stop_token_ids")
    if not isinstance(speculation, SelfSpeculation):
        raise ValueError(f"speculation must be a SelfSpeculation, got {shown(speculation)}.")
    block = _block_length(diffusion.block, config)
    num_blocks = config.max_new_tokens // block
    if speculation.num_drafts >= config.max_new_tokens:
        raise ValueError(
            f"num_drafts must be below max_new_tokens ({config.max_new_tokens}): each draft fills "
            f"in one position at least; got {speculation.num_drafts}."
        )
    if (speculation.lossy_top_k or 0) > model.vocab_size:
        raise ValueError(
            f"lossy_top_k must be at most the {model.vocab_size} tokens of the model, got "
            f"{speculation.lossy_top_k}."
        )
    cache = _cache(diffusion.block, config)
    steps = _steps_per_block(config, num_blocks)
    opens_with_first = diffusion.shift and cache in ("prefix", "dual")
    if opens_with_first and steps == 1 and block > 1:
        raise ValueError(
            f"steps: with the {cache!r} cache, a network whose outputs are shifted fills in one "
            f"position at a block's first step; give two steps per block ({2 * num_blocks}) or "
            f"more, got {num_blocks}."
        )
    tokenizer = model.tokenizer
    rules = Rules(
        block=block,
        order=config.order,
        mask_token_id=diffusion.mask_token_id,
        num_tokens=model.vocab_size if tokenizer is None else tokenizer.vocab_size,
        allow_mask_token=config.allow_mask_token,
        opens_with_first=opens_with_first,
        num_likeliest=speculation.lossy_top_k or 0,
    )
    per_decision = _per_decision(config, block, steps)
    return DenoisePlan(
        rules=rules,
        shift=diffusion.shift,
        block_causal=diffusion.block is not None,
        cache=cache,
        canvas_size=0,
        max_new=config.max_new_tokens,
        window=_window(rules, cache, config, per_decision, speculation.num_drafts),
        per_decision=per_decision,
        num_nodes=len(speculation.tree.parents),
        one_shape=speculation.deterministic,
    )


def check_no_mask(model: "Model", ids: Sequence[int], name: str) -> None:
    """Refuses a prompt that holds the mask.

    Raises:
        ValueError: it does.
    """
    mask = model.config.diffusion and model.config.diffusion.mask_token_id
    if mask in ids:
        raise ValueError(
            f"{name} holds the mask (id {mask}), which stands for what is to be filled in; leave "
            "it out."
        )


def canvas_size_of(plan: DenoisePlan, num_tokens: int) -> int:
    """Returns the positions of a canvas for prompts of up to `num_tokens` tokens."""
    # A causal block may begin before the prompt ends and end after the text that was asked for;
    # passes over several blocks read more.
    overhang = 2 * plan.block if plan.block_causal else 0
    overhang = plan.window if plan.cache == "blocks" else overhang
    return round_up(prompt_bucket_of(num_tokens) + plan.max_new + overhang, _CANVAS_MULTIPLE)


def prompt_bucket_of(num_tokens: int) -> int:
    """Returns the size that a prompt is padded to: no power of two, as passes read all of it."""
    return round_up(num_tokens, _CANVAS_MULTIPLE)


def denoise_prompts(
    model: "Model",
    config: DenoiseConfig,
    plan: DenoisePlan,
    encoded: Sequence[Sequence[int]],
    temperature: np.ndarray,
    seed: int,
    padded: int | None = None,
) -> DenoisePrompt:
    """Builds the arrays of rows.

    Args:
        model: the network's stop ids count.
        config: settings.
        plan: of the program.
        encoded: ids of each prompt.
        temperature: of each prompt.
        seed: see `denoise`.
        padded: length that prompts are padded to; `None`: their `prompt_bucket_of`.
    """
    rows, num_blocks = len(encoded), plan.max_new // plan.block
    guidance: Any = np.full(rows, config.guidance, np.float32) if config.guidance else None
    drawn: Any = temperature if temperature.any() else None
    bucket = prompt_bucket_of(max(map(len, encoded))) if padded is None else padded
    return DenoisePrompt(
        **prompt_arrays(encoded, bucket, seed, stop_ids_of(model, config)),
        pace=_pace(config, _steps_per_block(config, num_blocks), rows, plan.rules),
        temperature=drawn,
        guidance=guidance,
    )


def block_asked(own: int | None, block_length: int | None) -> int | None:
    """Returns the positions per block: the network's own, or those asked for; `None` for neither.

    Raises:
        ValueError: they differ.
    """
    if own is not None and block_length not in (None, own):
        raise ValueError(
            f"block_length must be {own}, which this network was trained with, got {block_length}."
        )
    return own or block_length


def _block_length(own: int | None, config: DenoiseConfig) -> int:
    block = block_asked(own, config.block_length) or min(DEFAULT_BLOCK, config.max_new_tokens)
    count = config.max_new_tokens
    if count % block:
        nearest = [each for each in (count - count % block, round_up(count, block)) if each]
        raise ValueError(
            f"max_new_tokens must be a multiple of block_length ({block}), got {count}; take "
            f"{' or '.join(map(str, nearest))}."
        )
    return block


def _steps_per_block(config: DenoiseConfig, num_blocks: int) -> int:
    steps = config.max_new_tokens if config.steps is None else config.steps
    if steps % num_blocks:
        raise ValueError(
            f"steps must be a multiple of the number of blocks ({num_blocks}), got {steps}."
        )
    return steps // num_blocks


def _cache(own_block: int | None, config: DenoiseConfig) -> str:
    fitting = ("none", "prefix", "dual") if own_block is None else ("blocks", "none")
    cache = config.cache or ("none" if own_block is None else "blocks")
    if cache not in fitting:
        kind = "sees both sides" if own_block is None else "is causal over blocks"
        raise ValueError(
            f"cache must be one of {fitting} for a network that {kind}, got {cache!r}."
        )
    if cache != "none" and config.guidance:
        raise ValueError(f"guidance needs cache='none', got {cache!r}.")
    if cache != "none" and config.allow_mask_token:
        raise ValueError(f"allow_mask_token needs cache='none', got {cache!r}.")
    return cache


def _per_decision(config: DenoiseConfig, block: int, steps: int) -> int:
    even = config.threshold is None and config.schedule == "even"
    return -(-block // steps) if even else block


def _window(
    rules: Rules, cache: str, config: DenoiseConfig, per_decision: int, num_drafts: int
) -> int:
    if cache == "blocks":
        # A full block that is not cached yet, the blocks that drafts fill, and the one after them.
        filled = min(num_drafts * per_decision, config.max_new_tokens) // rules.block
        return rules.block * (2 + filled)
    whole = config.max_new_tokens
    if cache != "none":
        # Drafts go on in the next block, for the pass that opens it.
        return min(rules.block * (1 + (num_drafts > 0)), whole)
    if rules.allow_mask_token:
        return whole
    # All blocks that drafts can reach.
    return min(rules.block * (1 - (-num_drafts * per_decision // rules.block)), whole)


def _pace(config: DenoiseConfig, steps: int, rows: int, rules: Rules) -> Pace:
    of_rows: Any = np.full  # NumPy's arrays, which jit takes for JAX's
    if config.threshold is not None:
        return ThresholdPace(of_rows(rows, np.log(config.threshold), np.float32))
    if config.schedule == "linear":
        most = config.max_new_tokens if rules.allow_mask_token else rules.block
        shares = linear_shares(steps, config.eps, most)
        if steps > most and rules.opens_with_first:
            shares = np.append(np.float32(0), shares)  # the first step, which fills in one
        of_each: Any = np.tile(shares, (rows, 1))
        return LinearPace(of_each)
    # Each step fills in one at least, as long as there are masks.
    return EvenPace(of_rows(rows, min(steps, rules.block), np.int32))
