"""Decoding with an exported file on this machine, as an app on a phone would.

Caches stay in the runtime's buffers: each state has two, which take turns as input and output, so
that the host copies none. A call still writes each of its caches once, from one buffer into the
other: LiteRT nowhere promises that one buffer may be both. What is called in which order is in
`jaxspec.mobile.loops`.
"""

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxspec.checkpoint import CheckpointError, Tokenizer, load_tokenizer
from jaxspec.core.stopping import StopAutomaton
from jaxspec.core.types import Stop, Warp
from jaxspec.mobile.extra import missing_for_gpu, needs_extra
from jaxspec.mobile.loops import (
    Acceptance,
    BlockDraft,
    BlockSteps,
    Emitted,
    Loop,
    LoopOf,
    Plain,
    Steps,
    TreeDraft,
    Verified,
    common_length,
    setting_beyond_steps,
    verifies_drafts,
)
from jaxspec.mobile.manifest import Manifest, fingerprint, read_manifest
from jaxspec.mobile.quantize import check_quantization
from jaxspec.models.linear import num_cores
from jaxspec.result import FINISH_REASONS

OUT = "o_"
"""What the names of outputs begin with that go in again."""


@dataclasses.dataclass(frozen=True)
class Decoded:
    """A continuation.

    Attributes:
        tokens: ids emitted, the stop id included.
        counts: tokens that each call emitted, the bonus token included.
        finish_reason: as of `jaxspec.result.Generation`.
    """

    tokens: np.ndarray
    counts: tuple[int, ...]
    finish_reason: str


class TextEnd:
    """Cuts what rounds emit where a text ends: a budget, stop ids, stop strings."""

    def __init__(
        self, room: int, stop_token_ids: Sequence[int], automaton: StopAutomaton | None = None
    ):
        """`room` tokens may be emitted; strings are looked for by `automaton`."""
        self._room, self._stops, self._state = room, frozenset(stop_token_ids), 0
        self._table = None if automaton is None else np.asarray(automaton.table)

    def cut(self, tokens: Sequence[int]) -> tuple[list[int], str | None]:
        """What is kept of one round's tokens, and why the text ends there, if it does."""
        kept: list[int] = []
        for token in tokens[: self._room]:
            kept.append(token)
            if self._table is not None:
                self._state = self._table[self._state, token]
                if self._state == len(self._table) - 1:
                    return kept, FINISH_REASONS[Stop.STRING]
            # Second: where one token is both, the string counts, as its text is to be cut.
            if token in self._stops:
                return kept, FINISH_REASONS[Stop.TOKEN]
        self._room -= len(kept)
        return kept, None if self._room > 0 else FINISH_REASONS[Stop.LENGTH]


def _check_known(signature: str, kind: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ValueError(f"{signature}: its {kind}s are {', '.join(known)}, and not {name}.")


def verify_drafts(model: "MobileModel", acceptance: Acceptance) -> Loop:
    """Verifies what the file's own drafter offers, and decides here."""
    of_blocks = model.manifest.sizes("draft_block")
    draft = BlockDraft(model) if of_blocks else TreeDraft(model)
    return Verified(model, draft, acceptance)


def whole_steps(model: "MobileModel", acceptance: Acceptance) -> Loop:
    """Calls the file's own steps, which decide themselves."""
    of_blocks = model.manifest.sizes("step_block")
    return BlockSteps(model, acceptance) if of_blocks else Steps(model, acceptance)


class MobileModel:
    """An exported file, compiled for this machine by LiteRT.

    Attributes:
        manifest: what the file says of itself.
        tokenizer: of the model; `None` if it has none.
        last_prefill: N of the `prefill_N` that read the end of the last prompt.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: Tokenizer | None = None,
        num_threads: int | None = None,
        weight_cache: str | Path | None = None,
        accelerator: Literal["cpu", "gpu"] = "cpu",
    ):
        """Opens a file.

        Args:
            path: the `.tflite`.
            tokenizer: checked to be the one that it was exported with; `None`: the one beside the
                file, if there is one.
            num_threads: `None`: one per core.
            weight_cache: a file to keep the weights in as the CPU reads them: signatures then
                share one copy instead of packing one each. Its name is followed by a part of the
                model's checksum, as the runtime does not look whose weights it finds.
            accelerator: "gpu" runs everything on a GPU, in float32, or raises; see
                `jaxspec.mobile.gpu` for a check that survives what a driver may do.

        Raises:
            ValueError: the extra `mobile` is not installed, the machine lacks an accelerator or
                driver, or the file is quantised in a way that ends the accelerator's process.
            CheckpointError: the file is not ours, is damaged, or is for another tokenizer.
        """
        self.manifest: Manifest = read_manifest(path)
        beside, found = Path(path).parent, "the one that was given"
        if tokenizer is None and (beside / "tokenizer.json").is_file():
            tokenizer, found = load_tokenizer(beside), "the tokenizer.json that lies beside it"
        self.tokenizer = tokenizer
        if tokenizer is not None and fingerprint(tokenizer) != self.manifest.tokenizer:
            raise CheckpointError(
                f"{path} was exported with another tokenizer than {found}, so its tokens mean "
                "something else: take the tokenizer.json of the same export."
            )
        with needs_extra("Running an exported model"):
            from ai_edge_litert import compiled_model as litert
        if accelerator == "gpu":
            check_quantization(self.manifest.quantization, on_gpu=True)
            lacking = missing_for_gpu()
            if lacking is not None:
                raise ValueError(f'accelerator: "gpu" cannot be used here: {lacking}.')
            options = litert.Options(
                hardware_accelerators=litert.HardwareAccelerator.GPU,
                gpu_options=litert.GpuOptions(enforce_f32=True),
            )
        else:
            cache = "" if weight_cache is None else f"{weight_cache}-{self.manifest.checksum[:16]}"
            options = litert.Options(
                hardware_accelerators=litert.HardwareAccelerator.CPU,
                cpu_options=litert.CpuOptions(
                    num_threads=num_threads or num_cores(), xnnpack_weight_cache_path=cache
                ),
            )
        self._model = litert.CompiledModel.from_file(str(path), options=options)
        # By name and shape, so that signatures share what they hand on.
        self._buffers: dict[tuple[str, tuple[int, ...]], list[Any]] = {}
        self._results: dict[tuple[str, str], Any] = {}
        # The last text, and how many of its tokens lie in all caches, a head's included.
        self._text: list[int] = []
        self._known = 0
        self.last_prefill = 0

    @property
    def is_fully_accelerated(self) -> bool:
        """True if no operation falls back from the accelerator to the CPU."""
        return self._model.is_fully_accelerated()

    @property
    def name(self) -> str:
        return self.manifest.model

    @property
    def vocab_size(self) -> int:
        return self.manifest.num_tokens

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self.manifest.stop_token_ids

    @property
    def generation_defaults(self) -> Mapping[str, Any]:
        return self.manifest.generation_defaults

    def inputs(self, signature: str) -> dict[str, dict[str, Any]]:
        """Shape and dtype of each input of a signature."""
        return self._described(signature)["inputs"]

    def call(self, signature: str, **inputs: np.ndarray | Sequence[int]) -> None:
        """Runs a signature on the state, with some of it set to new values first.

        Outputs `o_NAME` become the state NAME; `read` gives the others.

        Args:
            signature: its name.
            **inputs: arrays or lists. `length` must be among them if the signature takes it.

        Raises:
            ValueError: there is no such signature or input, or the caches have no room for what it
                writes, which LiteRT would put over other rows without a word.
        """
        described = self._described(signature)
        for name in inputs:
            _check_known(signature, "input", name, described["inputs"])
        if "length" in described["inputs"]:
            self._check_room(signature, inputs)
        if "block_k_0" in described["inputs"]:
            self._check_block_room(signature, inputs)
            self._known = 0  # only a stream knows what a call leaves in the caches
        for name, value in inputs.items():
            entry = described["inputs"][name]
            array = np.asarray(value, entry["dtype"]).reshape(entry["shape"])
            self._state(signature, name)[0].write(np.ascontiguousarray(array))
        ins = {name: self._state(signature, name)[0] for name in described["inputs"]}
        states = {
            name: self._next_state(signature, name)
            for name in described["outputs"]
            if name.startswith(OUT)
        }
        results = {
            name: self._result(signature, name) for name in described["outputs"].keys() - states
        }
        outs = results | {name: pair[1] for name, pair in states.items()}
        self._model.run_by_name(signature, ins, outs)
        for pair in states.values():
            pair.reverse()

    def read(self, signature: str, output: str) -> np.ndarray:
        """What the last call of a signature gave as this output.

        Raises:
            ValueError: there is no such signature or output.
        """
        outputs = self._described(signature)["outputs"]
        _check_known(signature, "output", output, outputs)
        entry = outputs[output]
        if output.startswith(OUT):
            buffer = self._next_state(signature, output)[0]
        else:
            buffer = self._result(signature, output)
        size = int(np.prod(entry["shape"]))
        return buffer.read(size, np.dtype(entry["dtype"]).type).reshape(entry["shape"])

    def prefill(self, prompt: Sequence[int], start: int = 0) -> int:
        """Reads a prompt from its token `start` on; those before are cached already.

        Returns:
            The model's next token.

        Raises:
            ValueError: the prompt is empty, too long or holds unknown ids, or `start` is not one of
                its tokens.
        """
        self._check_prompt(prompt)
        if not 0 <= start < len(prompt):
            raise ValueError(f"start must be in 0..{len(prompt) - 1}, got {start}.")
        sizes, length = self.manifest.sizes("prefill"), len(prompt)
        at, name, size = start, "", 0
        while at < length:
            size = next((n for n in sizes if n >= length - at), sizes[-1])
            # The last part may overlap what is cached: reading a token again changes nothing.
            at = max(0, min(at, self.manifest.slots - size))
            part = np.zeros(size, np.int32)
            count = min(size, length - at)
            part[:count] = prompt[at : at + count]
            following = prompt[at + count] if at + count < length else 0
            name = f"prefill_{size}"
            inputs = {"prompt": part, "count": [count], "length": [at], "following": [following]}
            accepted = self._described(name)["inputs"]
            self.call(name, **{key: value for key, value in inputs.items() if key in accepted})
            at += count
        self.last_prefill = size
        return int(self.read(name, "o_pending")[0])

    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 128,
        stop_token_ids: Sequence[int] | None = None,
        loop: LoopOf | None = None,
        warp: Warp | None = None,
        seed: int = 0,
    ) -> Decoded:
        """Continues a prompt.

        Args:
            prompt: ids.
            max_new_tokens: at most; fewer where the exported context ends.
            stop_token_ids: end the text; `None`: those of the model.
            loop: see `stream`.
            warp: see `stream`.
            seed: see `stream`.

        Raises:
            ValueError: `max_new_tokens` is below 0, or as `stream`.
        """
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}.")
        stops = self.stop_token_ids if stop_token_ids is None else stop_token_ids
        end = TextEnd(min(max_new_tokens, self.manifest.slots - len(prompt)), stops)
        tokens: list[int] = []
        counts: list[int] = []
        for emitted in self.stream(prompt, loop, warp, seed):
            kept, reason = end.cut(emitted.tokens)
            tokens += kept
            counts.append(len(emitted.tokens))
            if reason is not None:
                return Decoded(np.asarray(tokens, np.int32), tuple(counts), reason)
        raise AssertionError("a stream goes on to the end of the context")

    def stream(
        self,
        prompt: Sequence[int],
        loop: LoopOf | None = None,
        warp: Warp | None = None,
        seed: int = 0,
    ) -> Iterator[Emitted]:
        """Yields what each round emits, until the exported context is full.

        What the caches hold of the last text is kept, as far as the prompt begins with it: the
        next turn of a chat reads only what is new.

        Args:
            prompt: ids.
            loop: `Plain`, `whole_steps`, or a function of a model and an `Acceptance` that makes a
                `Verified`; `None`: steps, if the file has them and they can sample as asked.
            warp: how to sample, see `core.types.Warp`; greedy by default.
            seed: of sampling.

        Raises:
            ValueError: the prompt is empty, too long or holds unknown ids, the file lacks what the
                loop calls, or another text was begun with this file before this one was done.
        """
        self._check_prompt(prompt)
        acceptance = Acceptance(warp or Warp(), seed)
        plain = Plain(self, acceptance)
        rounds = (loop or self._best_loop(acceptance.warp))(self, acceptance)
        text = list(prompt)
        self.prefill(text, self._reusable(text))
        text.append(plain.choose(f"prefill_{self.last_prefill}", text[-1]))
        self._text, self._known, recent = text, len(text) - 2, 1
        yield Emitted(text[-1:], 0)
        while len(text) < self.manifest.slots:
            if self._text is not text:
                raise ValueError(
                    "stream: another text was begun, and a file holds the caches of one: open it "
                    "once for each text that goes on."
                )
            cached, known = len(text) - 1, self._known
            # A round writes a whole padded path. Where it does not fit, one token still does.
            chosen = rounds if cached + rounds.rows <= self.manifest.slots else plain
            emitted = chosen.advance(text, recent)
            text += emitted.tokens
            recent = len(emitted.tokens)
            self._known = known if self._has_head and not chosen.absorbs else cached
            yield emitted

    def _best_loop(self, warp: Warp) -> LoopOf:
        """Steps where they do what is asked, else `draft` with acceptance here, else plain."""
        signatures, sizes = self.manifest.signatures, self.manifest.sizes
        if sizes("step_block") and warp.temperature is None and warp.bias is None:
            return whole_steps
        step = "step" if warp.temperature is None else "step_sampled"
        if step in signatures and setting_beyond_steps(warp, self.manifest) is None:
            return whole_steps
        if verifies_drafts(self.manifest):
            return verify_drafts
        return Plain

    def _reusable(self, prompt: Sequence[int]) -> int:
        """Tokens of a prompt that need not be read again.

        A head's pair joins a state with the token after it, so that token must be the same too.
        """
        same = common_length(self._text, prompt)
        return max(0, min(self._known, same - 1, len(prompt) - 1))

    @property
    def _has_head(self) -> bool:
        prefill = f"prefill_{self.manifest.sizes('prefill')[0]}"
        return "head_k_0" in self.inputs(prefill)

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if self.manifest.diffusion is not None:
            raise ValueError(
                f"model: {self.name} fills in masks; use `jaxspec.mobile.fill_in`, which does."
            )
        slots, known = self.manifest.slots, self.manifest.num_tokens
        if not 1 <= len(prompt) < slots:
            raise ValueError(
                f"prompt: this file takes 1..{slots - 1} tokens, got {len(prompt)}; export with "
                "more slots for longer texts."
            )
        for token in prompt:
            if not 0 <= token < known:
                raise ValueError(f"prompt: ids must be in 0..{known - 1}, got {token}.")

    def _check_block_room(self, signature: str, inputs: dict[str, Any]) -> None:
        """Of a drafter of blocks, which has slots of its own."""
        described = self.inputs(signature)
        slots, size = described["block_k_0"]["shape"][2], described["window"]["shape"][1]
        start = int(np.asarray(inputs.get("start", -1)).reshape(()))
        if not 0 <= start <= slots - size:
            raise ValueError(
                f"start: {signature} writes {size} slots from {start} on, and the drafter of this "
                f"file has {slots}; say where it writes, or end the text."
            )

    def _check_room(self, signature: str, inputs: dict[str, Any]) -> None:
        if "length" not in inputs:
            raise ValueError(f"length: say where {signature} writes; the host owes it the room.")
        kind, _, size = signature.rpartition("_")
        rows, levels = 0, self.manifest.depth + 1
        start = int(np.asarray(inputs["length"]).reshape(()))
        if signature == "decode":
            rows = 1
        elif kind == "step" or signature == "step":
            rows = levels
        elif kind == "step_block":
            rows = self._described(signature)["outputs"]["o_tokens"]["shape"][1]
        elif signature in ("draft", "absorb") and "tokens" in self.inputs(signature):
            start, rows = start - int(np.asarray(inputs.get("count", 1)).reshape(())), levels
        elif kind in ("prefill", "commit"):
            rows = int(size)
        elif kind in ("denoise", "round") and "kv_k_0" in self.inputs(signature):
            # Whole windows; that their second half has a place in the text is asked for as well.
            rows = math.prod(self.inputs(signature)["window"]["shape"])
        if start < 0 or start + rows > self.manifest.slots:
            raise ValueError(
                f"length: {signature} writes {rows} rows from {start} on, and this file has "
                f"{self.manifest.slots} slots; export it with more, or end the text."
            )
        positions = int(np.max(inputs.get("positions", 0)))
        if positions >= self.manifest.slots:
            raise ValueError(
                f"positions: must be below the {self.manifest.slots} slots of this file, got "
                f"{positions}."
            )
        if kind == "draft":
            first = int(np.asarray(inputs.get("drafted", -1)).reshape(()))
            slots = self.inputs(signature)["scratch_k_0"]["shape"][2]
            if not 0 <= first <= slots - int(size):
                raise ValueError(
                    f"drafted: {signature} writes {size} nodes from {first} on, and its scratch "
                    f"has {slots} slots; say how many are drafted, of fewer levels."
                )

    def _described(self, signature: str) -> dict[str, dict[str, Any]]:
        if signature not in self.manifest.signatures:
            raise ValueError(
                f"signature: this file has {', '.join(self.manifest.signatures)}, not {signature}."
            )
        return self.manifest.signatures[signature]

    def _state(self, signature: str, name: str) -> list[Any]:
        """Both buffers of a state, as an input: its value, and a spare one."""
        entry = self._described(signature)["inputs"][name]
        key = name, tuple(entry["shape"])
        if key not in self._buffers:
            pair = [self._model.create_input_buffer_by_name(signature, name) for _ in range(2)]
            for buffer in pair:
                buffer.write(np.zeros(entry["shape"], entry["dtype"]))
            self._buffers[key] = pair
        return self._buffers[key]

    def _next_state(self, signature: str, output: str) -> list[Any]:
        """The same as an output."""
        key = (
            output.removeprefix(OUT),
            tuple(self._described(signature)["outputs"][output]["shape"]),
        )
        if key not in self._buffers:
            self._buffers[key] = [
                self._model.create_output_buffer_by_name(signature, output) for _ in range(2)
            ]
        return self._buffers[key]

    def _result(self, signature: str, output: str) -> Any:
        """The buffer of an output that does not go in again."""
        key = signature, output
        if key not in self._results:
            self._results[key] = self._model.create_output_buffer_by_name(signature, output)
        return self._results[key]
