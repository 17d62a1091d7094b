"""Runtimes other than `generate` and `denoise`: `transformers`, files for LiteRT.

`jaxspec.measure.compare.JaxRunner` is the runner of `generate`,
`jaxspec.measure.denoising.DenoiseRunner` that of `denoise`, `benchmarks.suites.jobs.JobRunner` that
of jobs. All follow `jaxspec.measure.timing.Runner`.
"""

import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec.checkpoint import Model
from jaxspec.core.types import Proposal
from jaxspec.decoding.metrics import Counts
from jaxspec.measure.figures import DecodedText, Sample
from jaxspec.mobile.drafts import Caller, Draft
from jaxspec.mobile.filling import fill_in
from jaxspec.mobile.loops import (
    ChainsAccepted,
    HostAcceptance,
    Loop,
    LoopOf,
    Plain,
    Round,
    Steps,
    Verified,
    whole_steps,
)
from jaxspec.mobile.runtime import MobileModel

TRANSFORMERS = "transformers, plain"
ASSISTED = "transformers, assisted"


def why_not_here() -> str | None:
    """Returns why `transformers` cannot be measured here; `None` if it can."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be imported; install the extra `parity`"
    if jax.default_backend() != "cpu":
        return f"JAX computes on {jax.default_backend()} and this module's torch on the CPU"
    return None


class Pass(NamedTuple):
    """One call of the target's forward.

    Attributes:
        num_cached: tokens that it found cached.
        num_read: tokens that it read.
    """

    num_cached: int
    num_read: int


class TransformersRunner:
    """Decodes greedily in float32 with `transformers`, plainly and with an assistant.

    The assistant has the settings that `transformers` gives it by default:
    https://huggingface.co/docs/transformers/assisted_decoding. Both models are loaded from the same
    folders as ours, read the same ids and end at the same ids.

    Attributes:
        methods: `TRANSFORMERS` and `ASSISTED`.
        versions: the versions that decode.
    """

    methods = (TRANSFORMERS, ASSISTED)

    def __init__(self, model: Model, folder: Path, assistant: Path, max_new_tokens: int):
        """Loads both models.

        Args:
            model: our target, for its stop ids.
            folder: folder of the target, in the Hugging Face layout.
            assistant: folder of the draft model.
            max_new_tokens: tokens to emit at most.
        """
        torch: Any = importlib.import_module("torch")
        transformers: Any = importlib.import_module("transformers")
        self._torch = torch

        def network_of(folder: Path) -> Any:
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            return loaded.eval()

        self._target = network_of(folder)
        self._stop_ids = model.stop_token_ids
        settings: dict[str, Any] = {
            "do_sample": False,
            "max_new_tokens": max_new_tokens,
            "eos_token_id": list(model.stop_token_ids) or None,
            "pad_token_id": 0,  # nothing is padded; without one, each call warns
        }
        assisting = {**settings, "assistant_model": network_of(assistant)}
        self._settings = {TRANSFORMERS: settings, ASSISTED: assisting}
        self.versions = (
            f"transformers {transformers.__version__}, torch {torch.__version__} on the CPU with "
            f"{torch.get_num_threads()} threads, float32"
        )

    def decode(self, method: str, prompt: Sequence[int], seed: int) -> Sample:
        """Decodes ids once; decoding is greedy, so `seed` is not used."""
        del seed
        ids = self._torch.tensor([list(prompt)])
        mask = self._torch.ones_like(ids)
        with _recorded_passes(self._target) as passes:
            start = time.perf_counter()
            output = self._target.generate(ids, attention_mask=mask, **self._settings[method])
            seconds = time.perf_counter() - start
        tokens = output[0, len(prompt) :].tolist()
        end = "stop_token" if tokens[-1] in self._stop_ids else "length"
        counts = counts_of_passes(len(prompt), len(tokens), passes)
        return Sample((DecodedText(prompt, tokens, end),), seconds, counts)


@contextmanager
def _recorded_passes(network: Any) -> Iterator[list[Pass]]:
    """Collects the passes that a network of `transformers` makes."""
    passes = []

    def record(_, __, arguments):
        # Releases of `transformers` before 5.24 call it `past_key_values`.
        cache = arguments.get("cache", arguments.get("past_key_values"))
        passes.append(Pass(cache.get_seq_length(), arguments["input_ids"].shape[1]))

    handle = network.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield passes
    finally:
        handle.remove()


def counts_of_passes(num_prompt: int, num_tokens: int, passes: Sequence[Pass]) -> Counts:
    """Returns how much each pass drafted and how much of it was kept.

    Every pass counts as a step. The first reads the prompt and scores a draft at once; ours takes
    the prompt up to its last token in a pass that is not counted, and begins with a step as well.
    A pass begins after the cached tokens, which are all of the text except its last token. So the
    distance to the beginning of the next pass is the number of tokens that it emitted.

    Args:
        num_prompt: tokens of the prompt.
        num_tokens: tokens emitted after it.
        passes: the target's passes.
    """
    begins = np.asarray([num_prompt - 1, *(entry.num_cached for entry in passes[1:])])
    ends = np.append(begins[1:], num_prompt - 1 + num_tokens)
    reads = [passes[0].num_read - num_prompt, *(entry.num_read - 1 for entry in passes[1:])]
    accepted, depth = ends - begins - 1, max(reads) + 1
    return Counts(
        num_tokens=num_tokens,
        num_steps=len(passes),
        num_nodes=sum(reads),
        num_from_draft=num_tokens - len(passes),
        accepted=tuple(np.bincount(accepted, minlength=depth).tolist()),
        drafted=tuple(np.bincount(reads, minlength=depth).tolist()),
    )


class FillRunner:
    """Fills in texts with a diffusion model's file for LiteRT; methods are numbers of drafts."""

    def __init__(self, file: MobileModel, max_new_tokens: int):
        self._file, self._max_new_tokens = file, max_new_tokens

    def decode(self, method: str, prompt: Sequence[int], seed: int) -> Sample:
        """Decodes ids once; decoding is greedy, so `seed` is not used."""
        del seed
        start = time.perf_counter()
        text = fill_in(self._file, prompt, self._max_new_tokens, (), int(method))
        seconds = time.perf_counter() - start
        counts = Counts(num_tokens=len(text.tokens), num_steps=text.num_calls)
        return Sample((DecodedText(prompt, text.tokens, text.finish_reason),), seconds, counts)


class FileMethod(NamedTuple):
    """A way to decode with a file for LiteRT.

    Attributes:
        file: name of the target's file.
        nodes: draft tokens of a round, the root EXCLUDED.
        draft: makes what drafts for the file; `None` if the file decides by itself.
        accepts: with `draft`: chains are accepted by the file's `accept_N`, not by the host.
        steps: rounds are whole steps of the file; otherwise, without `draft`, token by token.
        signature: of these steps; `None`: `step`, or `step_block_N`.
    """

    file: str
    nodes: int = 0
    draft: Callable[[Caller], Draft] | None = None
    accepts: bool = False
    steps: bool = False
    signature: str | None = None


class LitertRunner:
    """Decodes with files for LiteRT, greedily; stop ids end no text.

    A sample's seconds are those of all rounds; reading the prompt, with which the first token
    comes, is left out of its seconds and counts. Its parts are `round` and, where the host calls a
    draft by itself, `draft`.
    """

    def __init__(
        self,
        files: Mapping[str, MobileModel],
        methods: Mapping[str, FileMethod],
        max_new_tokens: int,
    ):
        self._files, self.methods, self._max_new_tokens = files, methods, max_new_tokens

    def decode(self, method: str, prompt: Sequence[int], seed: int) -> Sample:
        """Decodes ids once; decoding is greedy, so `seed` is not used."""
        del seed
        chosen, watch = self.methods[method], _Watch()
        loop = watch.loop_of(chosen)
        text = self._files[chosen.file].generate(prompt, self._max_new_tokens, (), loop)
        steps = len(watch.rounds)
        counts = Counts(
            num_tokens=watch.num_tokens,
            num_steps=steps,
            num_nodes=steps * chosen.nodes,
            num_from_draft=watch.num_tokens - steps,
        )
        row = DecodedText(prompt, text.tokens, text.finish_reason)
        parts = {"round": watch.rounds, "draft": watch.drafts}
        return Sample((row,), sum(watch.rounds), counts, parts=parts)


class _Watch:
    """Seconds of a loop's rounds and drafts."""

    def __init__(self):
        self.rounds: list[float] = []
        self.drafts: list[float] = []
        self.num_tokens = 0

    def loop_of(self, method: FileMethod) -> LoopOf:
        def loop(model: Caller, acceptance: HostAcceptance) -> Loop:
            if method.draft is not None:
                draft = _TimedDraft(method.draft(model), self)
                if method.accepts:
                    return _TimedLoop(ChainsAccepted(model, draft), self)
                return _TimedLoop(Verified(model, draft, acceptance), self)
            inner = whole_steps if method.steps else Plain
            if method.signature is not None:
                inner = partial(Steps, signature=method.signature)
            return _TimedLoop(inner(model, acceptance), self)

        return loop


class _TimedLoop:
    def __init__(self, inner: Loop, watch: _Watch):
        self._inner, self._watch = inner, watch
        self.rows, self.absorbs = inner.rows, inner.absorbs

    def advance(self, text: Sequence[int], recent: int) -> Round:
        start = time.perf_counter()
        emitted = self._inner.advance(text, recent)
        self._watch.rounds.append(time.perf_counter() - start)
        self._watch.num_tokens += len(emitted.tokens)
        return emitted


class _TimedDraft:
    def __init__(self, inner: Draft, watch: _Watch):
        self._inner, self._watch = inner, watch
        self.nodes, self.absorbs = inner.nodes, inner.absorbs

    def __call__(self, text: Sequence[int], recent: int) -> Proposal:
        start = time.perf_counter()
        proposal = self._inner(text, recent)
        self._watch.drafts.append(time.perf_counter() - start)
        return proposal
