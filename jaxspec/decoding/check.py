"""`check_drafter`: tests a drafter against the laws that every drafter must obey.

`check_model`, in `model_check.py`, does so with models and shares the report.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

import jax
import numpy as np

from jaxspec.checkpoint import CheckpointError, Model
from jaxspec.checkpoint.hub import check_is_model
from jaxspec.core.checks import Natural, at_least, at_most, checks_arguments
from jaxspec.core.loop import decode
from jaxspec.decoding.generate import generate, score
from jaxspec.decoding.request import MOST_SAMPLES, PENALTIES, GenerationConfig
from jaxspec.drafters import DrafterLike, loaded_drafter
from jaxspec.models.config import ModelConfig
from jaxspec.models.transformer import Network, init_params
from jaxspec.progress import progress_bar

Law = Callable[[], tuple[bool, str]]
"""A law about a drafter or a model: says whether it holds, and the evidence."""

# A correct sampler fails the chi-square law once in this many runs.
_FALSE_ALARMS = 1e-4
# For every law except that one: laws of equal budgets and batches share programs, and compiling
# is nearly all that a check costs.
_NEW_TOKENS = 32
# Tokens of each place that have a cell of their own in the chi-square law.
_NUM_LIKELY = 7


@dataclasses.dataclass(frozen=True)
class LawCheck:
    """Outcome of one law.

    Attributes:
        law: its name.
        holds: True if it held.
        seen: evidence, for reading.
    """

    law: str
    holds: bool
    seen: str


@dataclasses.dataclass(frozen=True)
class DrafterReport:
    """Outcomes of the laws that `check_drafter` or `check_model` ran; shown as a table.

    Attributes:
        checks: one per law, in order.
        subject: what was tested, "drafter" or "model".
    """

    checks: tuple[LawCheck, ...]
    subject: str = "drafter"

    @property
    def holds(self) -> bool:
        """True if every law held."""
        return all(check.holds for check in self.checks)

    def raise_if_broken(self) -> None:
        """Raises `AssertionError` with the whole report if a law was broken."""
        if not self.holds:
            raise AssertionError(f"the {self.subject} breaks a law\n{self}")

    def __repr__(self) -> str:
        width = max(len(check.law) for check in self.checks)
        return "\n".join(
            f"{'ok    ' if check.holds else 'BROKEN'}  {check.law:<{width}}  {check.seen}"
            for check in self.checks
        )


@checks_arguments
def check_drafter(
    drafter: "DrafterLike",
    model: "Model | None" = None,
    *,
    num_samples: Annotated[int, at_least(1), at_most(MOST_SAMPLES)] = MOST_SAMPLES,
    seed: Natural = 0,
    progress: bool = True,
) -> DrafterReport:
    """Tests a drafter against the laws that every drafter must obey.

    - Settings compare and hash by value.
    - Proposals are well formed.
    - Greedy output equals plain decoding.
    - Sampled output follows the target's own distribution (chi-square over the first two tokens).
    - Rows do not influence each other.
    - A fresh but equal drafter compiles nothing.

    Args:
        drafter: the drafter to test, with its weights if it has any.
        model: the target to run with; `None` takes a tiny random network.
        num_samples: continuations drawn for the chi-square test.
        seed: seed of the prompts and draws.
        progress: show a bar where standard error is a terminal.

    Returns:
        A report; `report.raise_if_broken()` turns it into a test.

    Raises:
        ValueError: `drafter` is not a drafter, `model` no model, or a number out of range.
        CheckpointError: the model cannot be used here.

    Example:
        It takes a minute, so this is not run here; the one in `docs/write_a_drafter.md` is.

        >>> import jaxspec
        >>> jaxspec.check_drafter(jaxspec.PromptLookup()).holds  # doctest: +SKIP
        True
    """
    loaded = loaded_drafter(drafter)
    if model is None:
        model = _tiny_model()
    check_is_model(model)
    prompts = _prompts(model, seed)
    laws: dict[str, Law] = {
        "settings are equal and hash alike": partial(_settings_are_values, loaded.drafter),
        "proposals are well formed": partial(_proposals_are_sound, model, loaded, prompts),
        "greedy output equals plain decoding": partial(_greedy_is_plain, model, loaded, prompts),
        "sampled output has the target's distribution": partial(
            _sampling_is_honest, model, loaded, prompts[0], num_samples, seed
        ),
        "rows do not influence each other": partial(_rows_are_alone, model, loaded, prompts),
        "an equal drafter compiles nothing": partial(_no_recompile, model, loaded, prompts),
    }
    return DrafterReport(run_laws(laws, progress))


def run_laws(laws: Mapping[str, Law], progress: bool) -> tuple[LawCheck, ...]:
    """Runs laws in order, behind a bar if `progress`; a law that raises does not hold."""
    checks = []
    with progress_bar(len(laws), progress) as advance:
        for law, check in laws.items():
            advance(law)
            checks.append(_run(law, check))
    return tuple(checks)


def _run(law: str, check: Law) -> LawCheck:
    try:
        return LawCheck(law, *check())
    except CheckpointError:
        raise  # the model cannot be used here, whatever the law
    except Exception as error:
        # Whatever someone else's code raises is a finding, not a crash of the report.
        return LawCheck(law, False, f"{type(error).__name__}: {error}")


def _tiny_model() -> Model:
    config = ModelConfig(
        vocab_size=7,
        embed_dim=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        mlp_dim=32,
        max_positions=256,
    )
    params = init_params(config, jax.random.key(0))
    # A small random head gives nearly flat distributions, which hide a biased sampler.
    params["head"] = jax.tree.map(lambda kernel: 3.0 * kernel, params["head"])
    return Model(Network(params, config), name="tiny random network")


def _prompts(model: Model, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    known = model.vocab_size if model.tokenizer is None else model.tokenizer.vocab_size
    return [rng.integers(0, known, length).tolist() for length in (9, 3, 14)]


def _settings_are_values(drafter: Any) -> tuple[bool, str]:
    if not hasattr(drafter, "__dataclass_fields__"):
        return False, "make it a frozen dataclass of hashable settings"
    fresh = dataclasses.replace(drafter)
    if fresh != drafter or hash(fresh) != hash(drafter):
        return False, "a fresh copy differs; make it a frozen dataclass of hashable settings"
    nodes, depth = drafter.tree_shape
    if drafter.widths[-1] != nodes or list(drafter.widths) != sorted(set(drafter.widths)):
        return False, f"widths {drafter.widths} must ascend and end with all {nodes} tokens"
    return True, f"{nodes - 1} nodes, depth {depth}, pass widths {drafter.widths}"


def _proposals_are_sound(model, loaded, prompts) -> tuple[bool, str]:
    nodes, depth = loaded.drafter.tree_shape
    config = GenerationConfig(max_new_tokens=_NEW_TOKENS, stop_token_ids=(), temperature=1.0)
    result = generate(model, prompts, config, loaded, return_trace=True)
    steps = 0
    for row in result:
        text = row.prompt_tokens.tolist()
        for step in row.trace or ():
            if len(step.tokens) != nodes:
                return False, f"{len(step.tokens)} tokens, but tree_shape says {nodes}"
            if step.tokens[0] != text[-1] or not step.valid[0]:
                return False, "node 0 must repeat the pending token, and be valid"
            orphans = [n for n in range(1, nodes) if step.valid[n] > step.valid[step.parents[n]]]
            if orphans:
                return False, f"nodes {orphans} are valid below an invalid parent"
            if not all(step.valid[step.path]):
                return False, "an invalid node was accepted"
            if len(step.path) > depth + 1:
                return False, f"a path of {len(step.path)} nodes, but the depth is {depth}"
            text += step.emitted.tolist()
            steps += 1
    return True, f"{steps} proposals looked at"


def _greedy_is_plain(model, loaded, prompts) -> tuple[bool, str]:
    config = GenerationConfig(max_new_tokens=_NEW_TOKENS, stop_token_ids=())
    plain = generate(model, prompts, config)
    drafted = generate(model, prompts, config, loaded)
    for row, (ours, expected) in enumerate(zip(drafted.tokens, plain.tokens, strict=True)):
        if not np.array_equal(ours, expected):
            first = int(np.argmax(ours != expected)) if len(ours) == len(expected) else "length"
            return False, f"prompt {row} differs from plain decoding at token {first}"
    tau = drafted.metrics.mean_acceptance_length
    return True, f"{drafted.metrics.num_tokens} tokens, tau {tau:.2f} (bonus included)"


def _sampling_is_honest(model, loaded, prompt, num_samples, seed) -> tuple[bool, str]:
    depth = loaded.drafter.tree_shape[1]
    no_penalties: Any = {name: rule.neutral for name, rule in PENALTIES.items()}
    config = GenerationConfig(
        max_new_tokens=depth + 2,
        temperature=1.0,
        num_samples=num_samples,
        stop_token_ids=(),
        **no_penalties,
    )
    drawn = [row.tokens[:2] for row in generate(model, prompt, config, loaded, seed)]
    cells = _two_token_cells(model, prompt)
    counts = dict.fromkeys(cells, 0)
    for first, second in drawn:
        named = ((int(first), int(second)), (int(first), None), None)
        counts[next(cell for cell in named if cell in cells)] += 1
    expected = np.asarray(list(cells.values())) * num_samples
    observed = np.asarray(list(counts.values()))
    enough = expected >= 5
    expected = np.append(expected[enough], expected[~enough].sum())
    observed = np.append(observed[enough], observed[~enough].sum())
    held = expected > 0
    statistic = np.sum((observed[held] - expected[held]) ** 2 / expected[held])
    freedom = held.sum() - 1
    p_value = float(jax.scipy.special.gammaincc(freedom / 2, statistic / 2))
    seen = f"p = {p_value:.3g} over {held.sum()} outcomes, {num_samples} draws"
    return p_value > _FALSE_ALARMS, seen


def _two_token_cells(model: Model, prompt: list[int]) -> dict:
    """Returns probabilities of the first two tokens: the likeliest named, the rest lumped.

    Keys: (first, second); (first, None) for another second token; None for another first token.
    """

    def next_probs(tokens: list[int]) -> np.ndarray:
        logits = score(model, tokens).logits[-1].astype(np.float64)
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()

    cells, lumped = {}, 1.0
    firsts = next_probs(prompt)
    for first in map(int, np.argsort(-firsts)[:_NUM_LIKELY]):
        seconds = next_probs([*prompt, first])
        likely = list(map(int, np.argsort(-seconds)[:_NUM_LIKELY]))
        for second in likely:
            cells[first, second] = firsts[first] * seconds[second]
        cells[first, None] = firsts[first] * max(0.0, 1.0 - seconds[likely].sum())
        lumped -= firsts[first]
    cells[None] = max(0.0, lumped)
    return cells


def _rows_are_alone(model, loaded, prompts) -> tuple[bool, str]:
    config = GenerationConfig(max_new_tokens=_NEW_TOKENS, stop_token_ids=())
    together = generate(model, prompts, config, loaded)
    for row, prompt in enumerate(prompts):
        # All that a step asks of a batch (the widest draft, the longest text) it answers for copies
        # as for the row alone, without a program for a batch of one.
        copies = generate(model, [prompt] * len(prompts), config, loaded)
        for copy in copies:
            if not np.array_equal(copy.tokens, together[row].tokens):
                return False, f"prompt {row} decodes differently among others and among copies"
    return True, f"{len(prompts)} rows, among each other and among copies of themselves"


def _no_recompile(model, loaded, prompts) -> tuple[bool, str]:
    config = GenerationConfig(max_new_tokens=_NEW_TOKENS, stop_token_ids=())
    generate(model, prompts, config, loaded)
    before = _num_programs()
    fresh = loaded._replace(drafter=dataclasses.replace(loaded.drafter))
    generate(model, prompts, config, fresh)
    compiled = _num_programs() - before
    return compiled == 0, f"{compiled} programs compiled for a fresh copy"


def _num_programs() -> int:
    jitted: Any = decode  # jax does not declare `_cache_size`
    return jitted._cache_size()
