"""Decoding with an exported file on this machine, as an app on a phone does it.

Caches stay in the runtime's buffers. Each state has two buffers, which take turns as input and
output, so the host copies none. A call still writes each of its caches once, from one buffer into
the other, as LiteRT does not promise that one buffer may be both. `jaxspec.mobile.loops` decides
which signatures are called in which order.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxspec.checkpoint import CheckpointError, Tokenizer, load_tokenizer
from jaxspec.core.stopping import StopAutomaton
from jaxspec.core.types import Stop, Warp
from jaxspec.decoding.result import FINISH_REASONS
from jaxspec.extras import check_version, needs_extra
from jaxspec.mobile.drafts import common_length
from jaxspec.mobile.extra import OLDEST_LITERT, missing_for_gpu
from jaxspec.mobile.loops import HostAcceptance, LoopOf, Plain, Round, best_loop
from jaxspec.mobile.manifest import Manifest, model_file, read_manifest, tokenizer_fingerprint
from jaxspec.mobile.quantize import check_quantization
from jaxspec.mobile.room import check_room, check_token_ids, prompt_parts
from jaxspec.native import num_cores

OUT = "o_"
"""Prefix of the names of outputs that are inputs of the next call."""


@dataclasses.dataclass(frozen=True)
class Decoded:
    """A continuation.

    Attributes:
        tokens: ids emitted, the stop id included.
        counts: tokens that each call emitted, the bonus token INCLUDED; the first entry is the
            token that comes with the prompt.
        finish_reason: see `jaxspec.decoding.result.Generation`.
    """

    tokens: np.ndarray
    counts: tuple[int, ...]
    finish_reason: str


class TextEnd:
    """The end of a text: cuts rounds at a budget, stop ids or stop strings.

    Example:
        >>> end = TextEnd(room=3, stop_token_ids=[0])
        >>> end.cut([5, 6])
        ([5, 6], None)
        >>> end.cut([7, 8])
        ([7], 'length')
    """

    def __init__(
        self, room: int, stop_token_ids: Sequence[int], automaton: StopAutomaton | None = None
    ):
        """Starts a text that may emit `room` tokens; `automaton` finds its stop strings."""
        self._room, self._stops, self._state = room, frozenset(stop_token_ids), 0
        self._automaton = None if automaton is None else tuple(map(np.asarray, automaton))

    def cut(self, tokens: Sequence[int]) -> tuple[list[int], str | None]:
        """Returns the tokens of one round that are kept, and why the text ends there, or `None`."""
        kept: list[int] = []
        for token in tokens[: self._room]:
            kept.append(token)
            if self._automaton is not None:
                table, kinds = self._automaton
                self._state = table[self._state, kinds[token]]
                if self._state == len(table) - 1:
                    return kept, FINISH_REASONS[Stop.STRING]
            # After the string: where one token ends both, the string counts and its text is cut.
            if token in self._stops:
                return kept, FINISH_REASONS[Stop.TOKEN]
        self._room -= len(kept)
        return kept, None if self._room > 0 else FINISH_REASONS[Stop.LENGTH]


class MobileModel:
    """An exported file, compiled for this machine by LiteRT.

    Attributes:
        manifest: settings of the file.
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
            path: the `.tflite`, or the folder of its export.
            tokenizer: must be the one that it was exported with; `None`: the one in the file's
                folder, if there is one.
            num_threads: `None`: one per core.
            weight_cache: a file that keeps the weights as the CPU reads them: signatures then share
                one copy instead of packing one each. A part of the model's checksum is added to
                its name, as the runtime does not check whose weights it finds.
            accelerator: "gpu" runs everything on a GPU, in float32, or raises; see
                `jaxspec.mobile.gpu` for a check that survives what a driver may do.

        Raises:
            ValueError: the extra `mobile` is not installed or too old, the machine lacks an
                accelerator or driver, or the file's quantization ends the accelerator's process.
            CheckpointError: the file is not ours, is damaged, or is for another tokenizer.
        """
        path = model_file(path)
        self.manifest: Manifest = read_manifest(path)
        folder, found = path.parent, "the one that was given"
        if tokenizer is None and (folder / "tokenizer.json").is_file():
            tokenizer, found = load_tokenizer(folder), "the tokenizer.json in its folder"
        self.tokenizer = tokenizer
        if tokenizer is not None and tokenizer_fingerprint(tokenizer) != self.manifest.tokenizer:
            raise CheckpointError(
                f"{path} was exported with another tokenizer than {found}, so its tokens mean "
                "something else: take the tokenizer.json of the same export."
            )
        what = "Running an exported model"
        check_version("ai-edge-litert", OLDEST_LITERT, what, "mobile")
        with needs_extra(what, "mobile"):
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
        # By name and shape, so that signatures share the state that they pass on.
        self._buffers: dict[tuple[str, tuple[int, ...]], list[Any]] = {}
        self._results: dict[tuple[str, str], Any] = {}
        # The last text, and the number of its tokens in all caches, a head's included.
        self._text: list[int] = []
        self._known = 0
        self.last_prefill = 0

    @property
    def is_fully_accelerated(self) -> bool:
        """True if no operation falls back from the accelerator to the CPU."""
        return self._model.is_fully_accelerated()

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.manifest.model

    @property
    def vocab_size(self) -> int:
        """Number of ids that it may emit."""
        return self.manifest.num_tokens

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        return self.manifest.stop_token_ids

    @property
    def max_positions(self) -> int:
        """Longest text, in tokens."""
        return self.manifest.capacity

    @property
    def generation_defaults(self) -> Mapping[str, Any]:
        """Entries of the model's `generation_config.json`."""
        return self.manifest.generation_defaults

    def inputs(self, signature: str) -> Mapping[str, Any]:
        """Returns shape and dtype of each input of a signature."""
        return self._described(signature)["inputs"]

    def call(self, signature: str, **inputs: np.ndarray | Sequence[int]) -> None:
        """Runs a signature on the state, after some of it is set to new values.

        Outputs `o_NAME` become the state NAME; `read` returns the others.

        Args:
            signature: its name.
            **inputs: arrays or lists. `length` must be among them if the signature takes it.

        Raises:
            ValueError: there is no such signature or input, or the caches have no room for the rows
                that it writes.
        """
        described = self._described(signature)
        for name in inputs:
            _check_known(signature, "input", name, described["inputs"])
        check_room(self.manifest, signature, inputs)
        self._known = 0  # only a stream knows the state of the caches after a call
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
        """Returns an output of the last call of a signature.

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
        """Reads a prompt from its token `start` on; those before it are cached already.

        Returns:
            The model's next token.

        Raises:
            ValueError: the prompt is empty, too long or holds unknown ids, or `start` is not one of
                its tokens.
        """
        self._check_prompt(prompt)
        if not 0 <= start < len(prompt):
            raise ValueError(f"start must be in 0..{len(prompt) - 1}, got {start}.")
        length, name, size = len(prompt), "", 0
        sizes = self.manifest.sizes("prefill")
        for first, size in prompt_parts(sizes, start, length, self.manifest.capacity):
            part = np.zeros(size, np.int32)
            end = min(first + size, length)
            part[: end - first] = prompt[first:end]
            following = prompt[end] if end < length else 0
            name = f"prefill_{size}"
            inputs = {"prompt": part, "count": [end - first], "length": [first]}
            if "following" in self.inputs(name):
                inputs["following"] = [following]
            self.call(name, **inputs)
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
        end = TextEnd(min(max_new_tokens, self.manifest.capacity - len(prompt)), stops)
        tokens: list[int] = []
        counts: list[int] = []
        for emitted in self.stream(prompt, loop, warp, seed):
            kept, reason = end.cut(emitted.tokens)
            tokens += kept
            counts.append(len(emitted.tokens))
            if reason is not None:
                return Decoded(np.asarray(tokens, np.int32), tuple(counts), reason)
        raise AssertionError("a stream continues to the end of the context")

    def stream(
        self,
        prompt: Sequence[int],
        loop: LoopOf | None = None,
        warp: Warp | None = None,
        seed: int = 0,
    ) -> Iterator[Round]:
        """Yields the tokens of each round, until the exported context is full.

        The caches of the last text are used again as far as the prompt begins with it: the next
        turn of a chat reads only its new tokens.

        Args:
            prompt: ids.
            loop: `Plain`, `whole_steps`, `verify_drafts`, or another function that makes a loop;
                `None`: the `best_loop` of the file for this `warp`.
            warp: settings of sampling, see `core.types.Warp`; greedy by default.
            seed: of sampling.

        Raises:
            ValueError: the prompt is empty, too long or holds unknown ids, the file lacks what the
                loop calls, or another text was begun with this file before this one was done.
        """
        self._check_prompt(prompt)
        acceptance = HostAcceptance(warp or Warp(), seed)
        plain = Plain(self, acceptance)
        rounds = (loop or best_loop(self.manifest, acceptance.warp))(self, acceptance)
        text = list(prompt)
        has_head = "head_k_0" in self.inputs(f"prefill_{self.manifest.sizes('prefill')[0]}")
        self.prefill(text, self._reusable(text))
        text.append(plain.choose(f"prefill_{self.last_prefill}", text[-1]))
        self._text, self._known, recent = text, len(text) - 2, 1
        yield Round(text[-1:], 0)
        while len(text) < self.manifest.capacity:
            if self._text is not text:
                raise ValueError(
                    "stream: another text was begun, and a file holds the caches of one text: open "
                    "it once for each text that you continue."
                )
            cached, known = len(text) - 1, self._known
            # A round writes a whole padded path. Where it does not fit, one token still does.
            chosen = rounds if cached + rounds.rows <= self.manifest.capacity else plain
            emitted = chosen.advance(text, recent)
            text += emitted.tokens
            recent = len(emitted.tokens)
            self._known = known if has_head and not chosen.absorbs else cached
            yield emitted

    def _reusable(self, prompt: Sequence[int]) -> int:
        """Returns the number of a prompt's tokens that need not be read again.

        A head's pair joins a state with the token after it, so that token must be the same too.
        A table of successors knows the whole last text, so the prompt must go on with all of it.
        """
        same = common_length(self._text, prompt)
        has_table = "table" in self.inputs(f"prefill_{self.manifest.sizes('prefill')[0]}")
        if has_table and same < len(self._text):
            return 0
        return max(0, min(self._known, same - 1, len(prompt) - 1))

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if self.manifest.diffusion is not None:
            raise ValueError(
                f"model: {self.name} fills in masks; use `jaxspec.mobile.fill_in`, which does."
            )
        capacity = self.manifest.capacity
        if not 1 <= len(prompt) < capacity:
            raise ValueError(
                f"prompt: this file takes 1..{capacity - 1} tokens, got {len(prompt)}; export with "
                "more capacity for longer texts."
            )
        check_token_ids(self.manifest, prompt)

    def _described(self, signature: str) -> Mapping[str, Mapping[str, Any]]:
        if signature not in self.manifest.signatures:
            raise ValueError(
                f"signature: this file has {', '.join(self.manifest.signatures)}, not {signature}."
            )
        return self.manifest.signatures[signature]

    def _state(self, signature: str, name: str) -> list[Any]:
        """Returns both buffers of a state, as an input: its value, and the spare one."""
        entry = self._described(signature)["inputs"][name]
        key = name, tuple(entry["shape"])
        if key not in self._buffers:
            pair = [self._model.create_input_buffer_by_name(signature, name) for _ in range(2)]
            for buffer in pair:
                buffer.write(np.zeros(entry["shape"], entry["dtype"]))
            self._buffers[key] = pair
        return self._buffers[key]

    def _next_state(self, signature: str, output: str) -> list[Any]:
        """Returns both buffers of a state, as an output."""
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
        """Returns the buffer of an output that is no input of the next call."""
        key = signature, output
        if key not in self._results:
            self._results[key] = self._model.create_output_buffer_by_name(signature, output)
        return self._results[key]


def _check_known(signature: str, kind: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ValueError(f"{signature}: its {kind}s are {', '.join(known)}, and not {name}.")
