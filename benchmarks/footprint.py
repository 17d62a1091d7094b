"""Seconds and memory of exporting a file and of opening it, each measured in a child process.

A process seldom returns memory, so every measurement has its own process. A GPU driver that ends
its process then ends a child.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec.checkpoint import Model, load, load_eagle
from jaxspec.drafters import Eagle, LoadedDrafter
from jaxspec.mobile.child import ChildError, ask_child
from jaxspec.mobile.contents import ExportConfig
from jaxspec.mobile.drafts import pending_inputs
from jaxspec.mobile.export import MODEL_FILE, export
from jaxspec.mobile.runtime import MobileModel
from jaxspec.models import EagleHead, ModelConfig, Network
from jaxspec.models.eagle import init_eagle_params
from jaxspec.models.transformer import param_shapes

_MESSAGES = 300  # characters kept of what a failed child wrote
_PROMPT_TOKENS = 32
_TIMEOUT = 7200.0  # seconds: a driver may hang


class Exported(NamedTuple):
    """Seconds and memory of an export.

    Attributes:
        seconds: time of `export`, with the model loaded before.
        loaded_bytes: memory of the process before: the loaded model and all libraries.
        peak_bytes: largest memory of the process, all of that included.
        size: bytes of the file.
        weight_bytes: bytes of all weights as float32, the drafter's included.
    """

    seconds: float
    loaded_bytes: int
    peak_bytes: int
    size: int
    weight_bytes: int


class Opened(NamedTuple):
    """Seconds and memory of a file in use.

    Attributes:
        first_token_seconds: from opening the file to the first token after a short prompt.
        next_first_token_seconds: the same for a further prompt of that length.
        resident_bytes: growth of the process after calls of `prefill_N`, `decode` and, if there is
            one, `step`.
        anonymous_bytes: those of them that no file backs, which a phone cannot take back.
    """

    first_token_seconds: float
    next_first_token_seconds: float
    resident_bytes: int
    anonymous_bytes: int


@dataclasses.dataclass(frozen=True)
class RandomModel:
    """A Llama of random weights with an EAGLE-1 head: for figures that weights do not change.

    Attributes:
        num_layers: layers of the target.
        embed_dim: its embedding width.
        mlp_dim: width of its MLPs.
        num_heads: its attention heads.
        vocab_size: its tokens.
    """

    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    vocab_size: int = 4096

    @property
    def config(self) -> ModelConfig:
        """Shapes of the target."""
        return ModelConfig(
            vocab_size=self.vocab_size,
            embed_dim=self.embed_dim,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.embed_dim // self.num_heads,
            mlp_dim=self.mlp_dim,
            max_positions=1024,
        )

    def make(self) -> tuple[Model, EagleHead]:
        """Draws target and head with NumPy: a large model should not pass through a device."""
        import jax

        draws = np.random.default_rng(0)

        def drawn(shape: Any) -> np.ndarray:
            if len(shape.shape) < 2:
                return np.ones(shape.shape, np.float32)
            values = draws.standard_normal(shape.shape, np.float32)
            values *= shape.shape[0] ** -0.5
            return values

        layer = self.config.replace(num_layers=1, layer_types=())
        shapes = jax.eval_shape(lambda: init_eagle_params(layer, False, jax.random.key(0)))
        target, head = (jax.tree.map(drawn, each) for each in (param_shapes(self.config), shapes))
        name = f"random, {self.num_layers} layers of {self.embed_dim}"
        return Model(Network(target, self.config), name=name), EagleHead(head, layer, False)


def measure_export(
    folder: Path, model: str | RandomModel, head: str | None, config: ExportConfig
) -> Exported:
    """Exports a model with an EAGLE head in a child process.

    Args:
        folder: folder to write into.
        model: a name that `load` knows, or random weights, which bring their own head.
        head: a name that `load_eagle` knows, used with its searched tree; `None` for plain
            decoding.
        config: functions, shapes and quantization.

    Raises:
        ValueError: the export failed; the error has its message.
    """
    random = isinstance(model, RandomModel)
    task = {
        "model": dataclasses.asdict(model) if random else model,
        "head": head,
        "config": dataclasses.asdict(config),
        "folder": str(folder),
    }
    return Exported(**_measured("export", task))


def measure_opening(
    path: Path,
    accelerator: str = "cpu",
    weight_cache: Path | None = None,
) -> Opened:
    """Opens a file and calls its functions in a child process.

    Args:
        path: the `.tflite`.
        accelerator: "cpu" or "gpu".
        weight_cache: file of the CPU's packed weights. They are packed before measuring, as they
            are from an app's second start on.

    Raises:
        ValueError: the runtime refused the file, ended the process or hung, or there is no GPU.
    """
    task = {
        "path": str(path),
        "accelerator": accelerator,
        "weight_cache": None if weight_cache is None else str(weight_cache),
    }
    if weight_cache is not None:
        _measured("open", task)
    return Opened(**_measured("open", task))


def _measured(kind: str, task: Mapping[str, Any]) -> dict[str, Any]:
    try:
        child = "benchmarks.footprint", {"kind": kind, **task}, _TIMEOUT
        return ask_child(*child, work="measuring")[0]
    except ChildError as error:
        said = " ".join(error.log.split())[-_MESSAGES:] or "it said nothing"
        raise ValueError(f"measuring failed (exit code {error.exit_code}): {said}") from None


def _export(task: dict[str, Any]) -> Exported:
    if isinstance(task["model"], dict):
        model, head = RandomModel(**task["model"]).make()
        drafter = Eagle.of(head)
    else:
        model, drafter = load(task["model"]), None
        if task["head"] is not None:
            drafter = Eagle.of(load_eagle(task["head"], model.network))
    loaded, start = _memory()["VmRSS"], time.perf_counter()
    export(model, task["folder"], drafter, ExportConfig(**task["config"]))
    seconds = time.perf_counter() - start
    return Exported(
        seconds=seconds,
        loaded_bytes=loaded,
        peak_bytes=_memory()["VmHWM"],
        size=(Path(task["folder"]) / MODEL_FILE).stat().st_size,
        weight_bytes=4 * _num_weights(model, drafter),
    )


def _num_weights(model: Model, drafter: LoadedDrafter | None) -> int:
    import jax

    leaves = jax.tree.leaves((model.params, () if drafter is None else drafter.params))
    return sum(leaf.size for leaf in leaves)


def _open(task: dict[str, Any]) -> Opened:
    before, start = _memory(), time.perf_counter()
    model = MobileModel(
        task["path"],
        num_threads=1,
        weight_cache=task["weight_cache"],
        accelerator=task["accelerator"],
    )
    count = min(_PROMPT_TOKENS, model.manifest.capacity // 2)
    prompt = [token % model.manifest.num_tokens for token in range(1, count + 1)]
    prompt.append(model.prefill(prompt))
    first = time.perf_counter() - start
    start = time.perf_counter()
    model.prefill(prompt[-2::-1])
    following = time.perf_counter() - start
    model.call("decode", pending=prompt[-1:], length=[count])
    signature = "step" if "step" in model.manifest.signatures else "decode"
    inputs = pending_inputs(model, signature, prompt, 1)
    model.call(signature, length=[count], **inputs)
    after = _memory()
    return Opened(
        first_token_seconds=first,
        next_first_token_seconds=following,
        resident_bytes=after["VmRSS"] - before["VmRSS"],
        anonymous_bytes=after["RssAnon"] - before["RssAnon"],
    )


def _memory() -> dict[str, int]:
    """Returns this process's bytes, those that no file backs, and the largest number so far.

    The largest number of `getrusage` also counts the process that started this one.
    """
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: 1024 * int(fields[name].split()[0]) for name in ("VmRSS", "RssAnon", "VmHWM")}


def _child() -> None:
    task = json.load(sys.stdin)
    measured = {"export": _export, "open": _open}[task["kind"]](task)
    Path(sys.argv[1]).write_text(json.dumps(measured._asdict()))


if __name__ == "__main__":
    _child()
