"""Decoding with an exported file on this machine, as an app on a phone would.

The host keeps no arithmetic: it calls a signature in a loop and reads a few integers. Caches stay
in the runtime's buffers; each state has two, which take turns as input and output.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint import CheckpointError, Tokenizer
from jaxspec.mobile.extra import needs_extra
from jaxspec.mobile.manifest import Manifest, fingerprint, read_manifest
from jaxspec.models.linear import num_cores

OUT = "o_"
"""What the names of outputs begin with that go in again."""


@dataclasses.dataclass(frozen=True)
class Decoded:
    """A continuation.

    Attributes:
        tokens: ids emitted, the stop id included.
        counts: tokens that each call emitted, the bonus token included.
        finish_reason: "stop_token" or "length".
    """

    tokens: np.ndarray
    counts: tuple[int, ...]
    finish_reason: str


class MobileModel:
    """An exported file, compiled for this machine's CPU by LiteRT.

    Attributes:
        manifest: what the file says of itself.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: Tokenizer | None = None,
        num_threads: int | None = None,
        weight_cache: str | Path | None = None,
    ):
        """Opens a file.

        Args:
            path: the `.tflite`.
            tokenizer: checked to be the one that it was exported with.
            num_threads: `None`: one per core.
            weight_cache: a file to keep the weights in as the CPU reads them: signatures then
                share one copy instead of packing one each.

        Raises:
            ValueError: the extra `mobile` is not installed.
            CheckpointError: the file is not ours, is damaged, or is for another tokenizer.
        """
        self.manifest: Manifest = read_manifest(path)
        if tokenizer is not None and fingerprint(tokenizer) != self.manifest.tokenizer:
            raise CheckpointError(
                f"{path} was exported with another tokenizer, so its tokens mean something else: "
                "use the one that lies beside it."
            )
        with needs_extra("Running an exported model"):
            from ai_edge_litert import compiled_model as litert
        cpu = litert.CpuOptions(
            num_threads=num_threads or num_cores(),
            xnnpack_weight_cache_path="" if weight_cache is None else str(weight_cache),
        )
        options = litert.Options(
            hardware_accelerators=litert.HardwareAccelerator.CPU, cpu_options=cpu
        )
        self._model = litert.CompiledModel.from_file(str(path), options=options)
        # By name and shape, so that signatures share what they hand on.
        self._buffers: dict[tuple[str, tuple[int, ...]], list[Any]] = {}
        self._results: dict[tuple[str, str], Any] = {}

    def call(self, signature: str, **inputs: np.ndarray | Sequence[int]) -> None:
        """Runs a signature on the state, with some of it set to new values first.

        Outputs `o_NAME` become the state NAME; `read` gives the others.
        """
        described = self._described(signature)
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
        """What the last call of a signature gave as this output."""
        entry = self._described(signature)["outputs"][output]
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
            ValueError: the prompt is empty, too long or holds unknown ids.
        """
        self._check_prompt(prompt)
        sizes, length = self.manifest.sizes("prefill"), len(prompt)
        at, name = start, ""
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
        return int(self.read(name, "o_pending")[0])

    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 128,
        stop_token_ids: Sequence[int] | None = None,
        speculate: bool | None = None,
    ) -> Decoded:
        """Continues a prompt greedily.

        Args:
            prompt: ids.
            max_new_tokens: at most; fewer where the exported context ends.
            stop_token_ids: end the text; `None`: those of the model.
            speculate: call `step`; `None`: if there is one. Without it `decode` is called.

        Raises:
            ValueError: as `prefill`, or there is no `step`.
        """
        stops = self.manifest.stop_token_ids if stop_token_ids is None else stop_token_ids
        budget = min(max_new_tokens, self.manifest.slots - len(prompt))
        tokens: list[int] = []
        counts: list[int] = []
        for emitted in self.stream(prompt, speculate):
            kept = emitted[: budget - len(tokens)]
            ending = next((i for i, token in enumerate(kept) if token in stops), None)
            kept = kept if ending is None else kept[: ending + 1]
            tokens += kept
            counts.append(len(emitted))
            if ending is not None or len(tokens) >= budget:
                reason = "length" if ending is None else "stop_token"
                return Decoded(np.asarray(tokens, np.int32), tuple(counts), reason)
        raise AssertionError("a stream goes on to the end of the context")

    def stream(self, prompt: Sequence[int], speculate: bool | None = None) -> Iterator[list[int]]:
        """Yields what each call emits, greedily, until the exported context is full.

        Raises:
            ValueError: as `generate`.
        """
        has_step = "step" in self.manifest.signatures
        if speculate and not has_step:
            raise ValueError("speculate: this file has no `step`; export it with a drafter.")
        speculating = has_step if speculate is None else speculate
        length, levels = len(prompt), self.manifest.depth + 1
        pending = self.prefill(prompt)
        yield [pending]
        state = {"pending": [pending], "length": [length]}
        if speculating:
            state["count"] = [1]
        while length + 1 < self.manifest.slots:
            # A step writes a whole padded path. Where it does not fit, one token still does.
            if speculating and length + levels <= self.manifest.slots:
                accepted = self._described("step")["inputs"]
                self.call("step", **{k: v for k, v in state.items() if k in accepted})
                count = int(self.read("step", "o_count")[0])
                emitted = self.read("step", "o_tokens")[0, :count].tolist()
            else:
                self.call("decode", **{k: v for k, v in state.items() if k != "count"})
                emitted = self.read("decode", "o_pending").tolist()
            length, state = length + len(emitted), {}
            yield emitted

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        slots, known = self.manifest.slots, self.manifest.num_tokens
        if not 1 <= len(prompt) < slots:
            raise ValueError(
                f"prompt: this file takes 1..{slots - 1} tokens, got {len(prompt)}; export with "
                "more slots for longer texts."
            )
        for token in prompt:
            if not 0 <= token < known:
                raise ValueError(f"prompt: ids must be in 0..{known - 1}, got {token}.")

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
