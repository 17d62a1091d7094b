"""`jaxspec bench`: drafters against plain decoding, over the prompts of a file.

For a diffusion model: self-speculation against stepwise decoding.
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from jaxspec.checkpoint import Model
from jaxspec.commands import EXIT_DIFFERENT
from jaxspec.commands.canvas import (
    MOST_DRAFTS,
    add_diffusion_arguments,
    check_kind,
    costs_text,
    drafting_asked,
)
from jaxspec.commands.flags import given
from jaxspec.commands.methods import EVERY_METHOD
from jaxspec.commands.options import (
    EVERY_DRAFTER,
    DrafterSpec,
    add_drafter_argument,
    add_generation_arguments,
    add_mesh_argument,
    add_model_arguments,
    add_prompts_argument,
    announce,
    check_writable,
    drafter_spec,
    generation_config,
    load_model,
    make_drafter,
    mesh_asked,
    remark,
    write_figures,
)
from jaxspec.decoding.denoise import DenoiseConfig, measure_costs
from jaxspec.decoding.request import PromptLike, encode_prompt
from jaxspec.diffusion import SelfSpeculation
from jaxspec.drafters import DrafterLike, loaded_drafter
from jaxspec.measure.compare import compare, describe
from jaxspec.measure.comparison import as_tables
from jaxspec.measure.prompts import FIELDS, PromptRow, read_prompts
from jaxspec.measure.step import time_steps
from jaxspec.measure.tasks import TASKS, Question, answers_of, answers_table, read_task


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec bench`."""
    parser.description = (
        "Decodes every prompt plainly and with each drafter, in turns, and prints a table. Exits "
        "with 1 if an output differs by more than a tie: a greedy one, any of a diffusion model. "
        "Such a model decodes stepwise, with 1 to 5 decisions drafted (or --drafts), and with as "
        "many as pay on this machine."
    )
    add_model_arguments(parser)
    add_prompts_argument(parser)
    add_drafter_argument(parser, repeatable=True, every=True)
    add_generation_arguments(parser)
    parser.add_argument(
        "--field", help=f"field of the prompt (default: the first of {', '.join(FIELDS)})"
    )
    parser.add_argument(
        "--task",
        choices=tuple(TASKS),
        help="PROMPTS is the published file of this task: make the prompts of its entries, judge "
        "the answers, and print how many are right. Programs that a model wrote run in processes "
        "of their own, with little time and memory",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="prompts at most")
    parser.add_argument("--shuffle-seed", type=int, metavar="N", help="shuffle before --limit")
    parser.add_argument(
        "--chat", action="store_true", help="wrap each text in the model's chat template"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="timed runs of each")
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write all figures; - or nothing for standard output",
    )
    add_mesh_argument(parser)
    add_diffusion_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measures the drafters over the prompts.

    Returns:
        0; 1 if outputs differ that must be equal.
    """
    path = args.prompts
    config: Any = generation_config(args)
    check_writable(args.json)
    questions: list[Question] = []
    if args.task is None:
        rows = read_prompts(path, args.field, args.limit, args.shuffle_seed)
    else:
        if args.field is not None:
            raise ValueError("--field: the entries of a task have their own; leave it out.")
        questions = read_task(args.task, path, args.limit, args.shuffle_seed)
        rows = [PromptRow(question.prompt, None) for question in questions]
    prompts = [row.prompt for row in rows]
    if args.chat:
        prompts = [
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]
    specs = [spec for spec in args.drafter or [drafter_spec("lookup")] if spec is not None]
    model = load_model(args, mesh_asked(args))
    if args.task is not None and model.tokenizer is None:
        raise ValueError(
            f"--task: {args.model} has no tokenizer, so its answers cannot be read; put the "
            "model's tokenizer.json into its folder."
        )
    check_kind(args, "diffusion" if model.is_diffusion else "causal")
    drafters: Any
    if model.is_diffusion:
        config = DenoiseConfig(**given(args, DenoiseConfig))
        drafters = _ways_to_draft(args, model, prompts, config)
    else:
        drafters = _drafters(args, model, specs)
    announce(
        args,
        model=args.model,
        prompts=f"{len(rows)} of {path}",
        drafters={name: describe(each) for name, each in drafters.items()},
        config=config,
        seed=args.seed,
    )
    categories = [row.category for row in rows]
    comparison = compare(
        model,
        prompts,
        drafters,
        config,
        repeats=args.repeats,
        seed=args.seed,
        categories=categories if any(categories) else None,
    )
    every = not model.is_diffusion and any(spec.text == EVERY_DRAFTER for spec in specs)
    steps = time_steps(model, drafters, config, args.repeats) if every else {}
    tables = as_tables(comparison, steps)
    answers = answers_of(comparison, args.task, questions) if args.task else None
    width = None if sys.stdout.isatty() else 120
    console = Console(stderr=args.json == "-", highlight=False, width=width)
    console.print(tables)
    if answers is not None:
        console.print(answers_table(answers))
    costs = getattr(drafters.get(_AS_MANY_AS_PAY), "costs", ())
    if len(costs) > 1:
        console.print(costs_text(costs))
    of_steps = {name: each.as_dict() for name, each in steps.items()}
    for name, entry in of_steps.items():
        shape = loaded_drafter(drafters.get(name)).drafter.tree_shape
        entry["nodes_without_root"] = shape[0] - 1
    figures = {**comparison.as_dict(), "steps": of_steps}
    if answers is not None:
        figures["answers"] = answers._asdict()
    write_figures(figures, args.json)
    return 0 if comparison.outputs_agree else EXIT_DIFFERENT


def _drafters(
    args: argparse.Namespace, model: Model, specs: Sequence[DrafterSpec]
) -> dict[str, DrafterLike]:
    """Builds the drafters that the arguments name."""
    drafters = {}
    for spec in specs:
        if spec.text != EVERY_DRAFTER:
            drafters[spec.text] = make_drafter(spec, args, model)
            continue
        made = {name: make(model) for name, make in EVERY_METHOD.items()}
        drafters |= {name: drafter for name, drafter in made.items() if drafter is not None}
        left_out = [name for name, drafter in made.items() if drafter is None]
        remark(left_out=", ".join(left_out) or "nothing")
    return drafters


_AS_MANY_AS_PAY = "as many as pay"


def _ways_to_draft(
    args: argparse.Namespace, model: Model, prompts: Sequence[PromptLike], config: DenoiseConfig
) -> dict[str, SelfSpeculation]:
    """Returns self-speculation as the arguments say; without a number of drafts, several ways."""
    asked = drafting_asked(args)
    if asked.get("num_drafts") == 0:
        raise ValueError("--drafts: must be at least 1: drafts are compared with none; got 0.")
    if "num_drafts" in asked:
        return {_drafts(asked["num_drafts"]): SelfSpeculation(**asked)}
    most = SelfSpeculation(min(MOST_DRAFTS, config.max_new_tokens - 1), **asked)
    ways = {
        _drafts(count): dataclasses.replace(most, num_drafts=count)
        for count in range(1, most.num_drafts + 1)
    }
    costs = measure_costs(model, [_typical(model, prompts, config)], config, most)
    ways[_AS_MANY_AS_PAY] = dataclasses.replace(most, costs=costs)
    return ways


def _typical(model: Model, prompts: Sequence[PromptLike], config: DenoiseConfig) -> PromptLike:
    """Returns the prompt of median length of those that fit; the first one if none does."""
    lengths = {}
    for index, prompt in enumerate(prompts):
        # A prompt that does not fit is listed as a failure once it is decoded.
        with contextlib.suppress(ValueError):
            lengths[index] = len(encode_prompt(model, prompt, spare=config.max_new_tokens))
    fitting = sorted(lengths, key=lengths.__getitem__)
    return prompts[fitting[len(fitting) // 2] if fitting else 0]


def _drafts(count: int) -> str:
    return f"{count} draft{'s' * (count != 1)}"
