"""How many times faster a batch decodes than one row.

`python -m jaxspec.bench.batch [--json]`: tokens per second of 32 rows over those of one, decoded
plainly without an end, in a cache of 256 slots.
"""

import argparse
import json
from typing import Any

import numpy as np
from rich.console import Console

from jaxspec.bench.machine import this_machine
from jaxspec.checkpoint import Model, load
from jaxspec.generation import GenerationConfig, generate, prepare
from jaxspec.progress import progress_bar

SLOTS = 256
NUM_PROMPT_TOKENS = 64
AIM = 6.0


def measure_batch(model: Model, num_rows: int = 32, repeats: int = 5) -> dict[str, Any]:
    """Tokens per second of one row and of `num_rows`, medians of runs in turns, and their ratio.

    Prompts are random ids of one length; all rows run to the end of the cache.
    """
    config = GenerationConfig(max_new_tokens=SLOTS - NUM_PROMPT_TOKENS - 1, stop_token_ids=())
    shape = (num_rows, NUM_PROMPT_TOKENS)
    tokens = np.random.default_rng(0).integers(16, min(4096, model.vocab_size), size=shape)
    batches = {"one": tokens[:1].tolist(), "batch": tokens.tolist()}
    slots = prepare(model, batches["one"], config, None, 0).plan.capacities
    assert slots == (SLOTS,), f"the cache should have {SLOTS} slots throughout, not {slots}"
    speeds = {name: [] for name in batches}
    with progress_bar((1 + repeats) * len(batches)) as advance:
        for turn in range(1 + repeats):
            for name, prompts in batches.items():
                advance(f"decoding {name}" if turn else f"compiling {name}")
                metrics = generate(model, prompts, config).metrics
                if turn:  # the first run compiles
                    speeds[name].append(metrics.tokens_per_second)
    one, batch = (float(np.median(speeds[name])) for name in batches)
    return {
        "num_rows": num_rows,
        "slots": SLOTS,
        "tokens_per_second_of_one": one,
        "tokens_per_second_of_batch": batch,
        "ratio": batch / one,
        "aim": AIM,
    }


def main(argv: list[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser("python -m jaxspec.bench.batch", description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    machine = this_machine()
    found = measure_batch(load(args.model), args.rows, args.repeats)
    if args.json:
        print(json.dumps({"machine": machine._asdict(), **found}, indent=2))
        return
    console = Console(highlight=False)
    console.print(f"{args.model} on {machine}, {SLOTS} slots, plain, no end")
    console.print(
        f"one row {found['tokens_per_second_of_one']:.0f} tokens/s, {found['num_rows']} rows "
        f"{found['tokens_per_second_of_batch']:.0f} tokens/s: {found['ratio']:.2f} times "
        f"(aim: at least {AIM:.0f})"
    )


if __name__ == "__main__":
    main()
