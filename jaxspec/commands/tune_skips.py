"""`jaxspec tune skips`: the sub-layers that the target skips when it drafts for itself."""

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from jaxspec.checkpoint import Model
from jaxspec.commands.interrupts import telling
from jaxspec.commands.options import (
    add_model_arguments,
    announce,
    load_model,
    note_other_model,
)
from jaxspec.decoding.request import GenerationConfig
from jaxspec.drafters import LayerSkip
from jaxspec.extras import MissingExtra, needs_extra
from jaxspec.measure import compare
from jaxspec.measure.machine import Machine, this_machine
from jaxspec.progress import progress_bar
from jaxspec.tuning import LatencyProfile, load_profile, skip_costs, skip_search
from jaxspec.tuning.plots import draw_searches, plot
from jaxspec.tuning.skip_agreement import SHARES, measure_agreement
from jaxspec.tuning.skip_objective import ExpectedSeconds, MeasuredSeconds
from jaxspec.tuning.skip_search import Evaluation, SearchTrace
from jaxspec.tuning.skip_text import (
    FixedText,
    check_window,
    generated_window,
    given_window,
    held_out_rows,
)

METHODS = tuple(skip_search.METHODS)
# Thresholds of the exit to try; 0 never exits.
THRESHOLDS = (0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec tune skips`."""
    parser.description = (
        "Searches the attention and MLP sub-layers to skip in drafting (Draft & Verify), on "
        "held-out rows of training text. The same command continues an interrupted search from its "
        "trace; with more --evaluations it searches further. `generate --drafter "
        "layer-skip:skips=FILE` drafts with the result."
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--out", type=Path, help="folder for skips.json, trace.jsonl and search.png"
    )
    parser.add_argument(
        "--agreement",
        action="store_true",
        help="do not search: print how often the model agrees with itself when half, two thirds "
        "and three quarters of its sub-layers are skipped in regular patterns",
    )
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="search for the device of this profile (of `jaxspec export kit` without "
        "--drafter and `tune profile --import`), where a whole step drafts a fixed number of "
        "tokens; default: times are measured here",
    )
    data = parser.add_argument_group("text, of which the held-out part is read")
    data.add_argument(
        "--data-folder", type=Path, help="folder of gsm8k/train.jsonl.gz and mbpp/train.jsonl.gz"
    )
    data.add_argument("--data", action="append", default=[], metavar="NAME=PATH")
    data.add_argument("--template", action="append", default=[], metavar="NAME=TEXT")
    data.add_argument(
        "--text",
        choices=("generated", "given"),
        default="generated",
        help="generated: the model continues the prompts (default); given: the documents",
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
    for group, flag, default, meaning in (
        (data, "--rows", 16, "rows of text"),
        (data, "--prompt-tokens", 64, "tokens of each prompt"),
        (data, "--new-tokens", 96, "tokens after each prompt"),
        (tune, "--evaluations", 200, "evaluations of each search"),
        (tune, "--seeds", 1, "searches of each random method"),
        (tune, "--num-speculative-tokens", 8, "longest draft to try"),
    ):
        group.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{meaning} (default: {default})"
        )
    tune.add_argument(
        "--threshold",
        type=float,
        metavar="P",
        help="threshold of the exit (default: the best of several; 0.8 if measured; none with "
        "--profile)",
    )


def run(args: argparse.Namespace) -> int:
    """Searches as the arguments say, writes and measures the best set; returns 0."""
    _check_counts(args)
    if args.profile is not None and (args.agreement or args.objective == "measured"):
        flag = "--agreement" if args.agreement else "--objective measured"
        raise ValueError(f"--profile: {flag} does not read times of passes; leave one of them out.")
    if args.profile is not None and args.threshold is not None:
        raise ValueError(
            "--threshold: with --profile, whole steps are searched, whose drafts have a fixed "
            "length; leave it out."
        )
    if args.agreement:
        return _show_agreement(args)
    if args.out is None:
        raise ValueError("--out FOLDER is needed for the result of the search.")
    # A fault of the arguments is reported before a package that is missing.
    _sources(args)
    methods = tuple(dict.fromkeys(args.method or METHODS[:1]))
    if "bayes" in methods:
        with needs_extra("--method bayes", "search"):
            import bayes_opt  # noqa: F401
    profile = None if args.profile is None else load_profile(args.profile)
    model = load_model(args)
    if profile is not None:
        # A profile that does not fit is refused before anything is read or decoded.
        layers, depth = model.config.num_layers, args.num_speculative_tokens
        skip_costs.costs_in(profile, layers, depth)
    note_other_model(profile, model)
    # The second half is for the check at the end.
    rows = _held_out_rows(model, args, 2 * args.rows)
    rows, fresh = rows[::2], [row[: args.prompt_tokens] for row in rows[1::2]]
    prompts = [row[: args.prompt_tokens] for row in rows]
    text = f"{args.rows} rows of {args.prompt_tokens} + {args.new_tokens} tokens, {args.text}"
    announce(
        args,
        model=args.model,
        sub_layers=2 * model.config.num_layers,
        text=text,
        methods=", ".join(methods),
    )
    trace = _open_trace(args, model, rows, profile)
    path = args.out / "trace.jsonl"
    with telling(lambda: f"the same command continues from the evaluations in {path}"):
        costs = skip_costs.costs_from(trace.measured["costs"])
        depth, thresholds = args.num_speculative_tokens, _thresholds(args)
        if args.objective == "measured":
            objective = MeasuredSeconds(model, prompts, args.new_tokens, depth, thresholds[0])
        else:
            window = _window(model, args, rows)
            objective = ExpectedSeconds(model.network, window, costs, depth, thresholds)
        histories = _search_all(args, methods, objective, trace)
        best = skip_search.best_of([each for history in histories.values() for each in history])
        _report(histories, best, costs)
        length, threshold = best.score.num_speculative_tokens, best.score.threshold
        drafter = LayerSkip(best.skip, length, threshold, adaptive=None)
        facts = {
            "plain_seconds_per_token": costs.passes[1],
            "found_by": [name for name, history in histories.items() if best in history],
            "evaluations": {name: len(history) for name, history in histories.items()},
            "best_seconds_per_token": {
                name: skip_search.best_of(history).seconds for name, history in histories.items()
            },
            "model": skip_search.network_fingerprint(model.network),
            "objective": args.objective,
            "machine": profile.name if profile else str(Machine(**trace.measured["machine"])),
            "text": text,
            "search_seconds": {name: trace.seconds(name) for name in histories},
            "measured": _measure(
                model,
                drafter,
                {"these": prompts, "other": fresh},
                args.new_tokens,
                costs if profile else None,
            ),
        }
        skip_search.write_result(args.out, best, facts)
        seconds = {name: [each.seconds for each in found] for name, found in histories.items()}
        with contextlib.suppress(MissingExtra):
            plot(args.out / "search.png", draw_searches, seconds, size=(7, 4))
    print(f"wrote {args.out / 'skips.json'}", file=sys.stderr)
    return 0


def _open_trace(
    args: argparse.Namespace, model: Model, rows: Sequence[Any], profile: LatencyProfile | None
) -> SearchTrace:
    """Opens the trace; a new one begins with measured costs, or with those of a profile."""
    depth = args.num_speculative_tokens

    def measured() -> dict[str, Any]:
        if profile is not None:
            costs = skip_costs.costs_in(profile, model.config.num_layers, depth)
            return {"costs": costs.as_dict()}
        costs = skip_costs.measure_skip_costs(model.network, depth)
        return {"machine": this_machine()._asdict(), "costs": costs.as_dict()}

    about = {
        **({} if profile is None else {"profile": profile.as_dict()}),
        "model": skip_search.network_fingerprint(model.network),
        "objective": f"{args.objective}, step by step",
        "num_speculative_tokens": depth,
        "thresholds": _thresholds(args),
        "text": args.text,
        "new_tokens": args.new_tokens,
        "rows": [row.tolist() for row in rows],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    trace = SearchTrace(args.out / "trace.jsonl", model.config.num_layers, about, measured)
    if profile is not None:
        return trace
    machine = Machine(**trace.measured["machine"])
    if machine.busy:
        print(
            f"NOTE: costs were measured at a load of {machine.load:.1f} on {machine.cores} cores. "
            "Do not trust them: move the trace away and search again on an idle machine.",
            file=sys.stderr,
        )
    return trace


def _search_all(
    args: argparse.Namespace,
    methods: Sequence[str],
    objective: skip_search.SkipObjective,
    trace: SearchTrace,
) -> dict[str, Sequence[Evaluation]]:
    """Searches with each method, random ones once per seed."""
    histories: dict[str, Sequence[Evaluation]] = {}
    for method in methods:
        for seed in range(1 if method == "greedy" else args.seeds):
            name = f"{method} {seed}"
            remaining = max(0, args.evaluations - len(trace.evaluations(name)))
            with progress_bar(remaining) as advance:
                advance(f"{name}: compiling")
                histories[name] = skip_search.search(
                    objective,
                    skip_search.METHODS[method],
                    args.evaluations,
                    trace,
                    name,
                    seed=seed,
                    watch=_watch(name, advance),
                )
    return histories


def _show_agreement(args: argparse.Namespace) -> int:
    """Prints a row for each share of sub-layers and a column for each pattern."""
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
    check_window(model, args.prompt_tokens + args.new_tokens)
    length = args.prompt_tokens + (args.new_tokens if args.text == "given" else 0)
    return held_out_rows(model, _sources(args), length, count)


def _window(model: Model, args: argparse.Namespace, rows: Sequence[Any]):
    if args.text == "given":
        return given_window(model, rows, args.prompt_tokens)
    return generated_window(model, [row[: args.prompt_tokens] for row in rows], args.new_tokens)


def _check_counts(args: argparse.Namespace) -> None:
    for name in ("rows", "prompt_tokens", "new_tokens", "evaluations", "seeds"):
        if getattr(args, name) < 1:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be at least 1, got {getattr(args, name)}.")
    # The drafter itself checks its settings.
    LayerSkip(None, args.num_speculative_tokens, args.threshold or 0.0)


def _thresholds(args: argparse.Namespace) -> tuple[float, ...]:
    if args.threshold is not None:
        return (args.threshold,)
    if args.profile is not None:
        return (0.0,)
    return (0.8,) if args.objective == "measured" else THRESHOLDS


def _sources(args: argparse.Namespace):
    from jaxspec.commands.train import sources_from_arguments

    sources = sources_from_arguments(argparse.Namespace(**vars(args), weight=[]))
    if not sources:
        raise ValueError("No text to search on: give --data-folder FOLDER or --data NAME=PATH.")
    return sources


def _watch(name: str, advance: Callable[[str], None]) -> Callable[[Sequence[Evaluation]], None]:
    def watch(history: Sequence[Evaluation]) -> None:
        seconds = min(evaluation.seconds for evaluation in history)
        advance(f"{name}: best {1e3 * seconds:.3f} ms/token")

    return watch


def _report(
    histories: Mapping[str, Sequence[Evaluation]], best: Evaluation, costs: skip_costs.Costs
) -> None:
    """Prints the result of each method and the arithmetic of the best set."""
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
    score = best.score
    draft = costs.draft_token(*(len(part) - sum(part) for part in best.skip))
    step = score.seconds_per_token * score.tau
    passes = step - score.drafted * draft
    agreement = "" if score.agreement is None else f"; agreement {score.agreement:.1%}"
    print(
        f"best: skips {sum(best.skip.attention)} attention and {sum(best.skip.mlp)} MLP sub-layers "
        f"of {len(best.skip.mlp)} each; up to {score.num_speculative_tokens} tokens, exit below "
        f"{score.threshold:g}{agreement}\n"
        f"a plain pass takes {1e3 * plain:.3f} ms; of that a draft token takes {draft / plain:.2f} "
        f"and the pass that verifies {passes / plain:.2f}\n"
        f"a step drafts {score.drafted:.2f} tokens, {score.acceptance_rate:.0%} of them accepted: "
        f"tau {score.tau:.2f} (bonus token included)\n"
        f"which allows tau / ({score.drafted:.2f} * {draft / plain:.2f} + {passes / plain:.2f}) = "
        f"{plain / score.seconds_per_token:.2f}x plain decoding, "
        f"{1e3 * score.seconds_per_token:.3f} ms/token"
    )


def _measure(
    model: Model,
    drafter: LayerSkip,
    prompts: Mapping[str, Sequence[Any]],
    max_new_tokens: int,
    elsewhere: skip_costs.Costs | None,
) -> dict[str, Any]:
    """Decodes with the set and plainly, on the prompts of the search and on others.

    Args:
        model: the target.
        drafter: drafts with the set.
        prompts: by name.
        max_new_tokens: of each output.
        elsewhere: costs on another device, by which the speed there is predicted from what was
            drafted and accepted here; `None`: the speed is measured.
    """
    config, measured = GenerationConfig(max_new_tokens=max_new_tokens), {}
    for name, some in prompts.items():
        if not some:
            continue
        rows = [np.asarray(prompt).tolist() for prompt in some]
        repeats = 2 if elsewhere is None else 1  # a prediction needs no time of here
        comparison = compare(model, rows, {"this set": drafter}, config, repeats=repeats)
        _, row = comparison.rows
        found = row.overall
        tau, speedup, interval = found.mean_acceptance_length, found.speedup, found.speedup_interval
        if elsewhere is not None:
            speedup, interval = _predicted(elsewhere, drafter, tau), None
        measured[name] = {
            "prompts": len(rows),
            "tau_bonus_included": tau,
            "speedup": speedup,
            "speedup_interval": interval,
            "speedup_is_predicted": elsewhere is not None,
            "identical": row.num_identical,
        }
        between = "" if interval is None else " [{:.2f}, {:.2f}]".format(*interval)
        predicted = "" if elsewhere is None else " (predicted for the profile's device)"
        print(
            f"measured on {name} prompts ({len(rows)}): tau {tau:.2f} "
            f"(bonus token included), {speedup:.2f}{between}x plain decoding{predicted}, "
            f"{row.num_identical} outputs identical"
        )
    if measured and max(each["speedup"] for each in measured.values()) < 1:
        where = "here" if elsewhere is None else "on the profile's device"
        print(f"Do not speculate with it {where}: plain decoding is faster.")
    return measured


def _predicted(costs: skip_costs.Costs, drafter: LayerSkip, tau: float) -> float:
    """Predicts the speed-up of drafts of full length, as whole steps make, from a measured tau."""
    assert drafter.skip is not None, "the search found a set"
    kept = (len(part) - sum(part) for part in drafter.skip)
    longest = drafter.num_speculative_tokens
    step = longest * costs.draft_token(*kept) + costs.passes[longest + 1]
    return costs.passes[1] * tau / step
