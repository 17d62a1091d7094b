"""What the suites of jobs share: the shipped target with its head, prompts, and jobs over them."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.batch.job import Drafting, run
from jaxspec.batch.plan import round_up, slots_needed
from jaxspec.batch.report import JobReport
from jaxspec.batch.rows import Row
from jaxspec.batch.writer import Collector
from jaxspec.bench.machine import this_machine
from jaxspec.bench.results import MADE_BY
from jaxspec.bench.shipped import EAGLE_HEAD, MADE_FOR, PromptSet, first_that_fit, read_prompt_set
from jaxspec.checkpoint import Model, load, load_eagle, shipped_heads, shipped_models
from jaxspec.drafters import Eagle, LoadedDrafter
from jaxspec.generation import GenerationConfig, encode_prompt
from jaxspec.trees import tree_of_head

Advance = Callable[[str], None]
"""Told what is measured next."""
PLAIN, DRAFTED = "plain", "drafted"
DRAFTINGS: Mapping[str, Drafting] = {PLAIN: "never", DRAFTED: "always"}
PROMPTS = PromptSet("GSM8K", "gsm8k/test.jsonl.gz", "{question}\n")
SHIPPED_FLAGS = ("--model", MADE_FOR, "--drafter", f"eagle:head={EAGLE_HEAD}")
"""The same target and head, for `jaxspec batch`."""


class Bench(NamedTuple):
    """Runs jobs of one model, which differ in their rows and in how they are decoded.

    prompts: as ids.
    max_new_tokens: of every prompt, at most.
    """

    model: Model
    drafter: LoadedDrafter
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    advance: Advance

    @property
    def config(self) -> GenerationConfig:
        return GenerationConfig(max_new_tokens=self.max_new_tokens)

    def slots_for(self, rows: Sequence[Row]) -> int:
        """What holds each of some rows, with drafts or without."""
        longest = max(len(row.prompt or ()) for row in rows)
        positions, depth = self.model.config.max_positions, self.drafter.drafter.tree_shape[1]
        return round_up(slots_needed(longest, self.max_new_tokens, positions, depth))

    def job(
        self,
        rows: Sequence[Row],
        batch: int,
        drafting: Drafting,
        output: Collector | None = None,
        **settings: Any,
    ) -> JobReport:
        """Decodes rows, so many at once; `settings` are those of `jaxspec.batch.run`."""
        return run(
            self.model,
            rows,
            output or Collector(),
            self.config,
            self.drafter,
            batch=batch,
            drafting=drafting,
            **settings,
        )


def shipped_bench(
    suite: str,
    data_folder: Path,
    prompts_per_set: int,
    max_new_tokens: int,
    repeats: int,
    advance: Advance | None = None,
) -> Bench:
    """The shipped target with its head, and prompts, which are read in place.

    `advance` is `None` where standard error is to be told.

    Raises:
        ValueError: a number is below 1, or the data, the model or its head are missing.
    """
    for name, value in (("prompts_per_set", prompts_per_set), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
    if MADE_FOR not in shipped_models() or EAGLE_HEAD not in shipped_heads():
        raise ValueError(
            f"Suite {suite!r} measures {MADE_FOR} with the head {EAGLE_HEAD}, which are in "
            "checkpoints/ of the repository, and not here."
        )
    model = load(MADE_FOR)
    drafter = Eagle.of(load_eagle(EAGLE_HEAD, model.network), tree_of_head(EAGLE_HEAD))
    prompts = first_that_fit(
        read_prompt_set(PROMPTS, data_folder), model, max_new_tokens, prompts_per_set
    )
    ids = [encode_prompt(model, prompt.text) for prompt in prompts]
    return Bench(model, drafter, ids, max_new_tokens, advance or _say)


def _say(doing: str) -> None:
    print(doing, file=sys.stderr, flush=True)


def command_of(suite: str, prompts_per_set: int, repeats: int) -> str:
    """What to type to measure a suite again."""
    return f"jaxspec bench --suite {suite} --prompts-per-set {prompts_per_set} --repeats {repeats}"


def opening_of(
    title: str, command: str, num_prompts: int, max_new_tokens: int, drafter: str
) -> list[str]:
    """How a suite's part of the page begins."""
    return [
        f"# {title}\n\n{MADE_BY}\n    {command}",
        f"{MADE_FOR}, {num_prompts} prompts of {PROMPTS.category}, greedy, up to "
        f"{max_new_tokens} new tokens, ended by the model's own end tokens, float32. "
        f"Drafted: `{drafter}`. {this_machine()}.",
    ]
