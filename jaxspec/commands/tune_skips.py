"""`jaxspec tune skips`: which sub-layers the target should skip when it drafts for itself."""

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from jaxspec.bench import compare
from jaxspec.bench.machine import Machine, this_machine
from jaxspec.checkpoint import Model
from jaxspec.commands.options import add_model_arguments, announce, load_model
from jaxspec.drafters import LayerSkip
from jaxspec.generation import GenerationConfig

METHODS = ("bayes", "random", "greedy")
# Where an exit is worth trying; 0 never exits.
THRESHOLDS = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec tune skips`."""
    parser.description = (
        "Searches the attention and MLP sub-layers to skip in drafting (Draft & Verify), on "
        "held-out rows of training text. Running the same command again goes on from the trace; "
        "with more --evaluations it searches on. `generate --drafter layer-skip:skips=FILE` "
        "drafts with what it found."
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--out", type=Path, help="folder for skips.json, trace.jsonl and search.png"
    )
    parser.add_argument(
        "--agreement",
        action="store_true",
        help="search nothing: print how often the model agrees with itself when half, two thirds "
        "and three quarters of its sub-layers are skipped in regular patterns",
    )
    data = parser.add_argument_group("text, of which the held-out part is read")
    data.add_argument(
        "--data-folder", type=Path, help="holds gsm8k/train.jsonl.gz and mbpp/train.jsonl.gz"
    )
    data.add_argument("--data", action="append", default=[], metavar="NAME=PATH")
    data.add_argument("--template", action="append", default=[], metavar="NAME=TEXT")
    data.add_argument("--rows", type=int, default=16, metavar="N", help="default: %(default)s")
    data.add_argument(
        "--prompt-tokens", type=int, default=64, metavar="N", help="default: %(default)s"
    )
    data.add_argument(
        "--new-tokens", type=int, default=96, metavar="N", help="default: %(default)s"
    )
    data.add_argument(
        "--text",
        choices=("own", "given"),
        default="own",
        help="judge drafts of what the model itself writes after each prompt (default), or of what "
        "stands there",
    )
    tune = parser.add_argument_group("search")
    tune.add_argument(
        "--method", choices=METHODS, action="append", help="repeatable (default: bayes)"
    )
    tune.add_argument(
        "--objective",
        choices=("expected", "measured"),
        default="expected",
        help="seconds per token: computed from drafts on fixed text and measured costs (default), "
        "or measured in decoding, which compiles every set",
    )
    tune.add_argument(
        "--evaluations", type=int, default=200, metavar="N", help="default: %(default)s"
    )
    tune.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="searches of each random method"
    )
    tune.add_argument(
        "--num-speculative-tokens",
        type=int,
        default=8,
        metavar="K",
        help="longest draft (default: %(default)s); the best length up to it counts",
    )
    tune.add_argument(
        "--threshold",
        type=float,
        metavar="P",
        help="of the exit (default: the best of several; 0.8 if measured)",
    )


def run(args: argparse.Namespace) -> int:
    """Searches as the arguments say and writes what was found; 0 when it is there."""
    # Imported here, so that other commands do not wait for optax and Orbax.
    from jaxspec.training import skip_search
    from jaxspec.training.skip_objective import (
        Costs,
        ExpectedSeconds,
        MeasuredSeconds,
        costs_from,
        measure_costs,
    )

    _check_counts(args)
    if args.agreement:
        return _show_agreement(args)
    if args.out is None:
        raise ValueError("--out FOLDER is needed, for what the search finds.")
    methods = tuple(dict.fromkeys(args.method or METHODS[:1]))
    if "bayes" in methods and importlib.util.find_spec("bayes_opt") is None:
        raise ValueError(f"--method bayes: {skip_search.NEEDS_EXTRA}")
    thresholds = _thresholds(args)
    model = load_model(args)
    # As many again are for the check at the end.
    rows = _held_out_rows(model, args, 2 * args.rows)
    rows, fresh = rows[::2], [row[: args.prompt_tokens] for row in rows[1::2]]
    prompts = [row[: args.prompt_tokens] for row in rows]
    about = {
        "model": skip_search.fingerprint(model.network),
        # Traces of before drafts were walked step by step hold means over all slots: not these.
        "objective": f"{args.objective}, step by step",
        "num_speculative_tokens": args.num_speculative_tokens,
        "thresholds": thresholds,
        "text": args.text,
        "new_tokens": args.new_tokens,
        "rows": [row.tolist() for row in rows],
    }
    announce(
        model=args.model,
        sub_layers=2 * model.config.num_layers,
        text=f"{args.rows} rows of {args.prompt_tokens} + {args.new_tokens} tokens, {args.text}",
        methods=", ".join(methods),
    )
    args.out.mkdir(parents=True, exist_ok=True)
    depth = args.num_speculative_tokens
    trace = skip_search.Trace(
        args.out / "trace.jsonl",
        model.config.num_layers,
        about,
        lambda: {
            "machine": this_machine()._asdict(),
            "costs": measure_costs(model.network, depth).as_dict(),
        },
    )
    costs: Costs = costs_from(trace.measured["costs"])
    machine = Machine(**trace.measured["machine"])
    if machine.busy:
        print(
            f"NOTE: costs were measured at a load of {machine.load:.1f} on {machine.cores} cores: "
            "do not trust them, move the trace away and search when the machine is quiet.",
            file=sys.stderr,
        )
    if args.objective == "measured":
        objective = MeasuredSeconds(model, prompts, args.new_tokens, depth, thresholds[0])
    else:
        window = _window(model, args, rows)
        objective = ExpectedSeconds(model.network, window, costs, depth, thresholds)

    histories: dict[str, Sequence[skip_search.Evaluation]] = {}
    for method in methods:
        for seed in range(1 if method == "greedy" else args.seeds):
            name = f"{method} {seed}"
            with _Bar(name, args.evaluations) as watch:
                histories[name] = skip_search.search(
                    objective,
                    skip_search.METHODS[method],
                    args.evaluations,
                    trace,
                    name,
                    seed=seed,
                    watch=watch,
                )
    best = skip_search.best_of([each for history in histories.values() for each in history])
    facts = {
        "plain_seconds_per_token": costs.passes[1],
        "found_by": [name for name, history in histories.items() if best in history],
        "evaluations": {name: len(history) for name, history in histories.items()},
        "best_seconds_per_token": {
            name: skip_search.best_of(history).seconds for name, history in histories.items()
        },
        "model": about["model"],
        "objective": args.objective,
        "machine": str(machine),
        "text": f"{args.rows} rows of {args.prompt_tokens} + {args.new_tokens} tokens, {args.text}",
        "search_seconds": {name: trace.seconds(name) for name in histories},
    }
    _report(histories, best, costs)
    length, threshold = best.worth.num_speculative_tokens, best.worth.threshold
    drafter = LayerSkip(best.skip, length, threshold, adaptive=None)
    measured = _measure(model, drafter, {"these": prompts, "other": fresh}, args.new_tokens)
    skip_search.write_result(args.out, best, {**facts, "measured": measured})
    skip_search.draw_searches(args.out / "search.png", histories)
    print(f"wrote {args.out / 'skips.json'}", file=sys.stderr)
    return 0


def _show_agreement(args: argparse.Namespace) -> int:
    """Prints a row for each share of sub-layers and a column for each pattern."""
    from jaxspec.training.skip_agreement import SHARES, measure_agreement
    from jaxspec.training.skip_objective import FixedText

    model = load_model(args)
    rows = _held_out_rows(model, args, args.rows)
    text = FixedText(model.network, _window(model, args, rows), args.num_speculative_tokens)
    agreements = measure_agreement(text, SHARES)
    patterns = list(dict.fromkeys(each.pattern for each in agreements))
    table = Table(
        title=f"Share of tokens on which {args.model} agrees with itself, sub-layers skipped",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for column in ("skipped", "best", *patterns):
        table.add_column(column, justify="right")
    for share in SHARES:
        of_share = agreements[: len(patterns)]
        agreements = agreements[len(patterns) :]
        best = max(each.tokens for each in of_share)
        cells = [f"{each.tokens:.1%} ({each.first:.1%})" for each in of_share]
        table.add_row(f"{share:.0%}", f"{best:.1%}", *cells)
    console = Console(highlight=False, width=120)
    console.print(table)
    console.print(
        f"{int(text.counted.sum())} drafts of {text.depth} tokens on {args.rows} held-out rows, "
        f"text: {args.text}. Each draft reads the text, not what it drafted. In parentheses: of "
        "the first token of each draft."
    )
    return 0


def _held_out_rows(model: Model, args: argparse.Namespace, count: int):
    from jaxspec.training.skip_objective import check_window, held_out_rows

    check_window(model, args.prompt_tokens + args.new_tokens)
    length = args.prompt_tokens + (args.new_tokens if args.text == "given" else 0)
    return held_out_rows(model, _sources(args), length, count)


def _window(model: Model, args: argparse.Namespace, rows: Sequence[Any]):
    from jaxspec.training.skip_objective import given_window, own_window

    if args.text == "given":
        return given_window(model, rows, args.prompt_tokens)
    return own_window(model, [row[: args.prompt_tokens] for row in rows], args.new_tokens)


def _check_counts(args: argparse.Namespace) -> None:
    for name in ("rows", "prompt_tokens", "new_tokens", "evaluations", "seeds"):
        if getattr(args, name) < 1:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be at least 1, got {getattr(args, name)}.")
    # Out of range, these are refused by the drafter's own words.
    LayerSkip(None, args.num_speculative_tokens, args.threshold or 0.0)


def _thresholds(args: argparse.Namespace) -> tuple[float, ...]:
    if args.threshold is not None:
        return (args.threshold,)
    return (0.8,) if args.objective == "measured" else THRESHOLDS


def _sources(args: argparse.Namespace):
    from jaxspec.training.command import sources_from_arguments

    sources = sources_from_arguments(argparse.Namespace(**vars(args), weight=[]))
    if not sources:
        raise ValueError("No text to search on: give --data-folder FOLDER or --data NAME=PATH.")
    return sources


class _Bar:
    """A bar on a terminal, a line now and then elsewhere."""

    def __init__(self, name: str, total: int):
        self.console = Console(stderr=True, highlight=False)
        self.bar = Progress(
            TextColumn(name),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.name, self.total = name, total
        self.task = self.bar.add_task("", total=total, figures="compiling")

    def __enter__(self):
        self.bar.start()
        return self.watch

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()

    def watch(self, history: Sequence[Any]) -> None:
        figures = f"best {1e3 * min(each.seconds for each in history):.3f} ms/token"
        self.bar.update(self.task, completed=len(history), figures=figures)
        if not self.console.is_terminal and len(history) % 25 == 0:
            self.console.print(f"{self.name}: {len(history)}/{self.total}  {figures}")


def _report(histories: Mapping[str, Sequence[Any]], best: Any, costs: Any) -> None:
    """The arithmetic behind the best set, and what every method came to."""
    plain = costs.passes[1]
    for method in METHODS:
        found = [
            min(each.seconds for each in history)
            for name, history in histories.items()
            if name.split()[0] == method
        ]
        if found:
            print(
                f"{method}: {1e3 * statistics.median(found):.3f} ms/token, median of {len(found)} "
                f"searches ({1e3 * min(found):.3f} to {1e3 * max(found):.3f})"
            )
    worth = best.worth
    draft = costs.draft_token(*(len(part) - sum(part) for part in best.skip))
    step = worth.seconds_per_token * worth.tau
    passes = step - worth.drafted * draft
    agreement = "" if worth.agreement is None else f"; agreement {worth.agreement:.1%}"
    print(
        f"best: skips {sum(best.skip.attention)} attention and {sum(best.skip.mlp)} MLP sub-layers "
        f"of {len(best.skip.mlp)} each; up to {worth.num_speculative_tokens} tokens, exit below "
        f"{worth.threshold:g}{agreement}\n"
        f"a plain pass takes {1e3 * plain:.3f} ms; of that a draft token takes {draft / plain:.2f} "
        f"and the pass that verifies {passes / plain:.2f}\n"
        f"a step drafts {worth.drafted:.2f} tokens, {worth.acceptance_rate:.0%} of them accepted: "
        f"tau {worth.tau:.2f} (bonus token included)\n"
        f"which allows tau / ({worth.drafted:.2f} * {draft / plain:.2f} + {passes / plain:.2f}) = "
        f"{plain / worth.seconds_per_token:.2f}x plain decoding, "
        f"{1e3 * worth.seconds_per_token:.3f} ms/token"
    )


def _measure(
    model: Model,
    drafter: LayerSkip,
    prompts: Mapping[str, Sequence[Any]],
    max_new_tokens: int,
) -> dict[str, Any]:
    """What decoding itself does, on the prompts of the search and on others; prints and returns."""
    config, measured = GenerationConfig(max_new_tokens=max_new_tokens), {}
    for name, some in prompts.items():
        if not some:
            continue
        rows = [np.asarray(prompt).tolist() for prompt in some]
        comparison = compare(model, rows, {"this set": drafter}, config, repeats=2)
        _, row = comparison.rows
        found = row.overall
        measured[name] = {
            "prompts": len(rows),
            "tau_bonus_included": found.mean_acceptance_length,
            "speedup": found.speedup,
            "speedup_interval": found.speedup_interval,
            "identical": row.num_identical,
        }
        interval = ""
        if found.speedup_interval is not None:
            interval = " [{:.2f}, {:.2f}]".format(*found.speedup_interval)
        print(
            f"measured on {name} prompts ({len(rows)}): tau {found.mean_acceptance_length:.2f} "
            f"(bonus token included), {found.speedup:.2f}{interval}x plain decoding, "
            f"{row.num_identical} outputs identical"
        )
    if measured and max(each["speedup"] for each in measured.values()) < 1:
        print("Do not speculate with it here: plain decoding is faster.")
    return measured
