"""Profiles of drafting, measured once, from which `generate` chooses whether to draft.

The compiled loop of `generate` measures nothing. A profile has the times of a plain step and of a
drafted one, and the tokens that a drafted step emits. It is kept for the machine, the model, the
drafter and the settings that it was measured with. (A job of `jaxspec.batch` runs long enough to
measure itself: see its guard.) Costs of a diffusion model's passes are kept in the same way.
"""

import dataclasses
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, get_args

import jax
import numpy as np
from jaxlib import version as jaxlib_version

from jaxspec import native
from jaxspec.checkpoint.files import read_json, write_json
from jaxspec.compilation import cache_folder
from jaxspec.core.cache import pad_caches
from jaxspec.core.checks import Checked, Positive, at_least, shown
from jaxspec.core.decode import speculative_step
from jaxspec.core.grammar import Grammar
from jaxspec.core.loop import run, unfinished
from jaxspec.core.stopping import StopAutomaton
from jaxspec.core.types import DecodeState, Drafter, Params, PyTree
from jaxspec.decoding.denoise import DenoiseConfig, measure_costs
from jaxspec.decoding.request import (
    PENALTIES,
    GenerationConfig,
    PromptLike,
    Request,
    encode_prompt,
    encode_prompts,
    prepare,
    prompt_list,
    with_rules_of,
)
from jaxspec.diffusion import SelfSpeculation
from jaxspec.drafters import DrafterLike, NoDraft, loaded_drafter
from jaxspec.extras import installed_version
from jaxspec.sharding import mesh_of, on_mesh_of

if TYPE_CHECKING:
    from jaxspec.checkpoint import Model

DraftingMode = Literal["auto", "always", "never"]
MARGIN = 0.05
"""Share by which drafting must be faster than plain decoding, so that noise never chooses it."""
# Written for `jaxspec demo`. Their lengths share a bucket, so that one program serves all of them.
PROMPTS = (
    "Question: A baker makes 12 trays of rolls with 8 rolls on each tray. She sells 70 rolls in "
    "the morning and half of the rest in the afternoon. How many rolls are left?\nAnswer:",
    "def count_words(text):\n    counts = {}\n    for word in text.split():\n"
    "        counts[word] = counts.get(word, 0) + 1\n    return counts\n\n\n"
    "def count_letters(text):\n",
    "Question: Tom has 5 boxes with 9 pens in each box. He gives 3 pens to each of his 7 friends. "
    "How many pens does Tom have now?\nAnswer: Tom has 5 * 9 =",
)
NUM_TOKENS = 64
"""Tokens that each built-in prompt is continued by."""
_MOST_ROUNDS = 5
_ENOUGH_SECONDS = 5.0
"""No further round of timed runs begins after so long."""
_Kept = TypeVar("_Kept", "DraftingProfile", SelfSpeculation)


@dataclasses.dataclass(frozen=True)
class DraftingProfile(Checked):
    """Times of steps with drafts and without, and the choice that follows.

    Attributes:
        plain_seconds: seconds of a plain step.
        drafted_seconds: seconds of a step that drafts, its draft included.
        tau: tokens that a row emits per step that drafts, the bonus token INCLUDED.

    Raises:
        ValueError: a field is not a number, or it is out of range.

    Example:
        >>> profile = DraftingProfile(plain_seconds=0.01, drafted_seconds=0.04, tau=2.0)
        >>> profile.speedup, profile.drafts
        (0.5, False)
    """

    plain_seconds: Positive
    drafted_seconds: Positive
    tau: Annotated[float, at_least(1)]

    @property
    def speedup(self) -> float:
        """Tokens per second of drafting over those of plain decoding."""
        return self.tau * self.plain_seconds / self.drafted_seconds

    @property
    def drafts(self) -> bool:
        """True where drafting is faster by more than `MARGIN`."""
        return self.speedup > 1 + MARGIN

    def __str__(self) -> str:
        return (
            f"drafting would decode at {self.speedup:.2f} times plain speed on this machine "
            f"(needs {1 + MARGIN}): {'drafts' if self.drafts else 'decodes plainly'}"
        )


def drafting_profile(
    model: "Model",
    drafter: DrafterLike,
    prompts: PromptLike | Sequence[PromptLike] | None = None,
    config: GenerationConfig | None = None,
    rows: int = 1,
) -> DraftingProfile:
    """Measures whether drafting pays here, for `generate(..., drafting=profile)`.

    Plain steps and steps with drafts are timed in turns, after a first run that is not timed. The
    times do not include the reading of prompts. How many drafts are accepted depends on the text:
    the built-in prompts (arithmetic and Python) are a guess, your own prompts are better.

    Args:
        model: the target.
        drafter: the drafter.
        prompts: see `generate`; `None`: the prompts of `jaxspec demo`, cut to half of the context.
        config: see `generate`; `None`: greedy, 64 tokens, whatever they are. A number is one for
            all prompts.
        rows: prompts to decode at once.

    Raises:
        ValueError: as `generate` does; `rows` is below 1; nothing was decoded; or built-in prompts
            are asked for and the model has no tokenizer.

    Example:
        >>> import jaxspec
        >>> model, drafter = jaxspec.load("demo"), jaxspec.PromptLookup()
        >>> config = jaxspec.GenerationConfig(max_new_tokens=16)
        >>> profile = drafting_profile(model, drafter, "1, 2, 3, 1, 2, 3,", config)
        >>> result = jaxspec.generate(model, "4, 5, 4,", config, drafter, drafting=profile)
        >>> result.drafting == profile
        True
    """
    if rows < 1:
        raise ValueError(f"rows must be at least 1, got {rows}.")
    config = config or GenerationConfig(max_new_tokens=NUM_TOKENS, stop_token_ids=())
    given = _built_in(model) if prompts is None else prompt_list(prompts)
    batches = [
        [given[(first + row) % len(given)] for row in range(rows)]
        for first in range(0, len(given), rows)
    ]
    requests = {
        (index, drafts): prepare(model, batch, config, drafter if drafts else None, 0)
        for index, batch in enumerate(batches)
        for drafts in (False, True)
    }
    loops = {name: _loop(request) for name, request in requests.items()}
    runs = {name: _Run.of(loop(), requests[name]) for name, loop in loops.items()}
    if not all(run.steps for run in runs.values()):
        raise ValueError("prompts: no step was decoded; ask for at least one token of each.")
    medians = {name: float(np.median(times)) for name, times in _seconds(loops).items()}

    def per_step(drafts: bool) -> float:
        names = [name for name in loops if name[1] == drafts]
        return sum(medians[name] for name in names) / sum(runs[name].steps for name in names)

    drafted = [run for (_, drafts), run in runs.items() if drafts]
    tau = sum(run.tokens for run in drafted) / sum(run.row_steps for run in drafted)
    return DraftingProfile(per_step(False), per_step(True), tau)


def profile_asked(
    drafting: DraftingMode | DraftingProfile,
    model: "Model",
    drafter: DrafterLike | None,
    config: GenerationConfig,
    num_rows: int,
) -> DraftingProfile | None:
    """Returns the profile that decides whether a call drafts; `None` if none does.

    For "auto" it is measured if it is not known yet: with the built-in prompts, the sampling of
    `config` (the first prompt's where prompts differ), and the next smaller power of two of
    `num_rows`. It is kept in memory, and on disk next to compiled programs where those are kept.

    Args:
        drafting: see `generate`.
        model: the target.
        drafter: the drafter. Without one, nothing is to be decided.
        config: settings of the call.
        num_rows: rows of the call's program.

    Raises:
        ValueError: `drafting` is something else; or as `drafting_profile` raises.
    """
    loaded = loaded_drafter(drafter)
    if not isinstance(drafting, DraftingProfile) and drafting not in get_args(DraftingMode):
        raise ValueError(
            "drafting must be 'always', 'auto', 'never' or a DraftingProfile, got "
            f"{shown(drafting)}."
        )
    if drafting in ("always", "never") or loaded.drafter == NoDraft():
        return None
    if isinstance(drafting, DraftingProfile):
        return drafting
    settings, rows = (
        _settings_measured(with_rules_of(model, config)),
        1 << num_rows.bit_length() - 1,
    )
    return _measured_once(
        _key(model, loaded.drafter, loaded.params, str(settings), rows),
        DraftingProfile,
        lambda: drafting_profile(model, loaded, _built_in(model), settings, rows),
    )


def with_costs(
    model: "Model", prompt: PromptLike, config: DenoiseConfig, speculation: SelfSpeculation
) -> SelfSpeculation:
    """Returns settings of a diffusion model with which as many decisions are drafted as pay here.

    What passes cost is measured with the prompt if it is not known yet for one of this length, up
    to the next power of two. It is kept as profiles are.

    Args:
        model: a diffusion language model.
        prompt: see `denoise`.
        config: settings of the call.
        speculation: the most decisions to draft; `costs` are replaced.

    Raises:
        ValueError: as `denoise` does.
    """
    speculation = dataclasses.replace(speculation, costs=None)
    (ids,) = encode_prompts(model, [prompt], config.max_new_tokens)
    settings = f"{config}, up to {1 << (len(ids) - 1).bit_length()} tokens"

    def measure() -> SelfSpeculation:
        first, *others = measure_costs(model, [ids], config, speculation)
        # Rounded, as they are part of the program: it may be compiled already.
        costs = (1.0, *(float(f"{cost / first:.2g}") for cost in others))
        return dataclasses.replace(speculation, costs=costs)

    return _measured_once(_key(model, speculation, (), settings, 1), SelfSpeculation, measure)


def _measured_once(key: dict[str, str], kind: type[_Kept], measure: Callable[[], _Kept]) -> _Kept:
    """Returns what is known for a key; measures it if nothing is."""
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    if name not in _known:
        folder = cache_folder()
        path = None if folder is None else folder / "drafting" / f"{name}.json"
        found = None if path is None else _read(path, key, kind)
        if found is None:
            found = measure()
            if path is not None:
                _write(path, key, found)
        _known[name] = found
    return _known[name]


_known: dict[str, Any] = {}
"""Profiles and costs of this process."""


def _built_in(model: "Model") -> list[PromptLike]:
    """Returns ids of the built-in prompts, cut so that as many tokens can follow."""
    if model.tokenizer is None:
        raise ValueError(
            f"drafting: {model.name} has no tokenizer to read the built-in prompts with; give "
            "drafting=drafting_profile(model, drafter, prompts), of jaxspec.decoding.profile."
        )
    longest = max(1, model.max_positions // 2)
    return [encode_prompt(model, prompt)[:longest] for prompt in PROMPTS]


class _Run(NamedTuple):
    """Counts of a run: steps of the batch, steps of all rows, tokens."""

    steps: int
    row_steps: int
    tokens: int

    @classmethod
    def of(cls, states: DecodeState, request: Request) -> "_Run":
        steps = np.asarray(states.stats.num_steps)
        lengths = np.asarray(states.context.length)[: len(request.prompt_lengths)]
        tokens = int(lengths.sum()) - sum(request.prompt_lengths)
        return cls(int(steps.max()), int(steps.sum()), tokens)


def _loop(request: Request) -> Callable[[], DecodeState]:
    """Reads the prompts; returns the loop over the steps that follow."""
    states, _ = next(request.decode_stream())
    capacity = request.plan.capacities[-1]
    finish = partial(_finish, request.params, states, request.automaton, request.grammar)

    def loop() -> DecodeState:
        with on_mesh_of(request.params):
            ended = finish(drafter=request.drafter, capacity=capacity)
        return jax.block_until_ready(ended)

    return loop


@partial(jax.jit, static_argnames=("drafter", "capacity"))
def _finish(
    params: Params,
    states: DecodeState,
    automaton: StopAutomaton | None,
    grammar: Grammar | None,
    *,
    drafter: Drafter,
    capacity: int,
) -> DecodeState:
    step = partial(speculative_step, drafter=drafter, automaton=automaton, grammar=grammar)
    return run(step, params, pad_caches(states, capacity), unfinished)


def _seconds(loops: dict[Any, Callable[[], DecodeState]]) -> dict[Any, list[float]]:
    """Times each loop several times, in turns: a machine's speed drifts for all of them."""
    seconds: dict[Any, list[float]] = {name: [] for name in loops}
    begun = time.perf_counter()
    for number in range(_MOST_ROUNDS):
        for name in list(loops)[:: (-1) ** number]:
            start = time.perf_counter()
            loops[name]()
            seconds[name].append(time.perf_counter() - start)
        if time.perf_counter() - begun > _ENOUGH_SECONDS:
            break
    return seconds


def _settings_measured(config: GenerationConfig) -> GenerationConfig:
    def first(names: Iterable[str]) -> dict[str, Any]:
        given = {name: getattr(config, name) for name in names}
        return {
            name: None if values is None else np.ravel(values)[0].item()
            for name, values in given.items()
        }

    sampling = first(("temperature", "top_k", "top_p", "min_p"))
    return GenerationConfig(
        max_new_tokens=NUM_TOKENS,
        stop_token_ids=(),
        **first(PENALTIES),
        **(sampling if sampling["temperature"] else {}),
    )


def _key(
    model: "Model", drafter: Any, draft_weights: PyTree, settings: str, rows: int
) -> dict[str, str]:
    """Describes all that a profile depends on."""
    device, mesh = jax.local_devices()[0], mesh_of(model.params)
    settings_of_model = type(model.network) if model.is_own else model.config
    kind = native.processor() if device.platform == "cpu" else device.device_kind
    return {
        "jaxspec": installed_version(),
        "jaxlib": jaxlib_version.__version__,
        "native_code": native.checksum(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "device": f"{kind}, {native.num_cores()} cores, {native.status().reason}",
        "mesh": "none" if mesh is None else str(dict(mesh.shape)),
        "model": f"{model.name}, {model.dtype}, {settings_of_model}",
        "weights": _fingerprint(model.params),
        "drafter": repr(drafter),
        "draft_weights": _fingerprint(draft_weights),
        "settings": settings,
        "rows": str(rows),
    }


def _fingerprint(weights: PyTree) -> str:
    """Hashes the shapes of arrays and the values of the smallest, which training changes too.

    Numbers are left out: a drafter learns them from prompt to prompt (`CarriesOn`).
    """
    arrays = [leaf for leaf in jax.tree.leaves(weights) if np.ndim(leaf)]
    shapes = [(leaf.shape, str(leaf.dtype)) for leaf in arrays]
    found = hashlib.sha256(repr(shapes).encode())
    for leaf in sorted(arrays, key=lambda leaf: leaf.size)[:8]:
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()[:24]


def _read(path: Path, key: dict[str, str], kind: type[_Kept]) -> _Kept | None:
    """Reads a profile; `None` if there is none for this key, or the file is damaged."""
    try:
        entry = read_json(path)
        return kind(**entry["profile"]) if entry["key"] == key else None
    except (ValueError, TypeError, KeyError):
        return None


def _write(path: Path, key: dict[str, str], profile: DraftingProfile | SelfSpeculation) -> None:
    """Writes a profile whole or not at all; a disk that cannot be written to is no error."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            write_json(Path(folder) / path.name, {"key": key, "profile": vars(profile)})
            os.replace(Path(folder) / path.name, path)
