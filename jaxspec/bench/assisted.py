"""What `transformers` makes of the same weights: greedy decoding, plain and with an assistant.

Assisted generation: https://huggingface.co/docs/transformers/assisted_decoding.
"""

import importlib
import importlib.util
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.bench.compare import trial_of
from jaxspec.bench.figures import Trial
from jaxspec.checkpoint import Model
from jaxspec.metrics import metrics_of
from jaxspec.progress import progress_bar
from jaxspec.result import Generation

PLAIN = "transformers, plain"
ASSISTED = "transformers, assisted"


def why_not_here() -> str | None:
    """Why nothing can be measured here; `None` if it can."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be imported; pip install 'jaxspec[parity]'"
    if jax.default_backend() != "cpu":
        return f"JAX computes on {jax.default_backend()} and this module's torch on the CPU"
    return None


class AssistedTrials(NamedTuple):
    """What was measured.

    trials: every prompt, by method: `PLAIN` and `ASSISTED`.
    versions: what it was measured with.
    """

    trials: dict[str, list[Trial]]
    versions: str


class Pass(NamedTuple):
    """One call of the target's forward: tokens it found cached, and tokens it read."""

    num_cached: int
    num_read: int


def decode_with_transformers(
    model: Model,
    folder: Path,
    assistant_folder: Path,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    repeats: int,
    progress: bool = True,
) -> AssistedTrials:
    """Decodes prompts greedily in float32, both methods in turns on each prompt.

    The assistant has the settings that `transformers` gives it by default. Both models are loaded
    from the same folders as ours, read the same ids and end at the same ids.

    Args:
        model: the target, to score outputs with and for its stop ids.
        folder: of the target, in the Hugging Face layout.
        assistant_folder: of the draft model.
        prompts: token ids.
        max_new_tokens: tokens to emit at most.
        repeats: timed runs of each prompt and method; one run before them is not timed.
        progress: show a bar where standard error is a terminal.
    """
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")

    def network_of(folder: Path) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    target, assistant = network_of(folder), network_of(assistant_folder)
    settings: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": max_new_tokens,
        "eos_token_id": list(model.stop_token_ids) or None,
        "pad_token_id": 0,  # nothing is padded; without one, each call warns
    }
    methods = {PLAIN: settings, ASSISTED: {**settings, "assistant_model": assistant}}

    def run(name: str, prompt: Sequence[int]) -> list[int]:
        ids = torch.tensor([list(prompt)])
        output = target.generate(ids, attention_mask=torch.ones_like(ids), **methods[name])
        return output[0, len(prompt) :].tolist()

    outputs = {name: [] for name in methods}
    passes: dict[str, list[list[Pass]]] = {name: [] for name in methods}
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in prompts] for name in methods}
    with progress_bar(len(prompts), progress) as advance:
        for turn, prompt in enumerate(prompts):
            advance("decoding with transformers")
            for name in methods:
                with _recorded_passes(target) as recorded:
                    outputs[name].append(run(name, prompt))
                passes[name].append(recorded)
            for repeat in range(repeats):
                for place in range(len(methods)):
                    name = list(methods)[(turn + repeat + place) % len(methods)]
                    start = time.perf_counter()
                    run(name, prompt)
                    seconds[name][turn].append(time.perf_counter() - start)
    # One depth for all histograms, so that they can be added up.
    depth = max(
        int(_draft_lengths(prompt, row).max())
        for rows in passes.values()
        for prompt, row in zip(prompts, rows, strict=True)
    )

    def trials_of(name: str) -> list[Trial]:
        rows = zip(prompts, outputs[name], passes[name], seconds[name], strict=True)
        return [
            trial_of(model, generation_of(prompt, tokens, row, model.stop_token_ids, depth), times)
            for prompt, tokens, row, times in rows
        ]

    trials = {name: trials_of(name) for name in methods}
    return AssistedTrials(
        trials,
        f"transformers {transformers.__version__}, torch {torch.__version__} on the CPU with "
        f"{torch.get_num_threads()} threads, float32",
    )


@contextmanager
def _recorded_passes(network: Any) -> Iterator[list[Pass]]:
    """Collects the passes that a network of `transformers` makes."""
    passes = []

    def record(_, __, arguments):
        cache = arguments["past_key_values"]
        passes.append(Pass(cache.get_seq_length(), arguments["input_ids"].shape[1]))

    handle = network.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield passes
    finally:
        handle.remove()


def generation_of(
    prompt: Sequence[int],
    tokens: Sequence[int],
    passes: Sequence[Pass],
    stop_token_ids: Sequence[int],
    depth: int,
) -> Generation:
    """An output with what its passes tell: how much each drafted, and how much of it was kept.

    Every pass counts as a step. The first reads the prompt and scores a draft at once; ours takes
    the prompt up to its last token in a pass that is not counted, and begins with a step as well.

    A pass begins after what is cached, which is all of the text but its last token. So what each
    emitted is how far the next one's beginning lies ahead.

    Args:
        prompt: its ids.
        tokens: ids emitted after it.
        passes: what the target read for them.
        stop_token_ids: ids that end an output.
        depth: of the histograms, at least the longest draft.
    """
    begins = np.asarray([len(prompt) - 1, *(entry.num_cached for entry in passes[1:])])
    ends = np.append(begins[1:], len(prompt) - 1 + len(tokens))
    drafted, accepted = _draft_lengths(prompt, passes), ends - begins - 1
    from_draft = np.ones(len(tokens), bool)
    from_draft[ends - len(prompt)] = False
    metrics = metrics_of(
        rows=[list(tokens)],
        num_steps=[len(passes)],
        num_nodes=[int(drafted.sum())],
        accepted=np.bincount(accepted, minlength=depth + 1)[None],
        drafted=np.bincount(drafted, minlength=depth + 1)[None],
        num_from_draft=int(from_draft.sum()),
    )
    return Generation(
        prompt_tokens=np.asarray(prompt),
        tokens=np.asarray(tokens),
        text=None,
        finish_reason="stop_token" if tokens[-1] in stop_token_ids else "length",
        from_draft=from_draft,
        logprobs=None,
        warped_logprobs=None,
        metrics=metrics,
    )


def _draft_lengths(prompt: Sequence[int], passes: Sequence[Pass]) -> np.ndarray:
    """What each pass read after the pending token, the last of the text so far."""
    first, *others = passes
    return np.asarray([first.num_read - len(prompt), *(entry.num_read - 1 for entry in others)])
