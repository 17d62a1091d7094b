"""What exporting a file takes, and what opening it takes: seconds and memory, each in a child.

Memory that a process was given once is seldom given back, so every measurement has a process of its
own; and a file that ends the process of a GPU's driver ends a child.
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
from jaxspec.mobile.export import MODEL_FILE, ExportConfig, export
from jaxspec.mobile.loops import pending_inputs
from jaxspec.mobile.runtime import MobileModel
from jaxspec.models import EagleHead, ModelConfig, Network
from jaxspec.models.eagle import init_eagle_params
from jaxspec.models.transformer import param_shapes
from jaxspec.trees import tree_of_head

_MESSAGES = 300  # characters of a failed child's to keep
_TIMEOUT = 7200.0  # seconds: a driver may hang


class Exported(NamedTuple):
    """An export.

    seconds: of `export`, the model being loaded.
    loaded_bytes: of the process before it: the model, as it was loaded, and all libraries.
    peak_bytes: of the process at most, all of that included.
    size: of the file.
    weight_bytes: of all weights as float32, the drafter's included.
    """

    seconds: float
    loaded_bytes: int
    peak_bytes: int
    size: int
    weight_bytes: int


class Opened(NamedTuple):
    """A file in use.

    first_token_seconds: from opening the file to the first token behind a short prompt.
    next_first_token_seconds: of a further prompt of the same length.
    resident_bytes: by which the process had grown when it had called `prefill_N`, `decode` and, if
        there is one, `step`.
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
        num_layers, embed_dim, mlp_dim, num_heads, vocab_size: of the target.
    """

    num_layers: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    vocab_size: int = 4096

    @property
    def config(self) -> ModelConfig:
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
        """Draws the weights, by NumPy: a large model is not to pass through a device first."""
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
    """Exports a model with an EAGLE head in a process of its own.

    Args:
        folder: to write into.
        model: a name that `load` knows, or random weights, which bring their own head.
        head: a name that `load_eagle` knows, over the tree beside it; `None`: plain decoding.
        config: functions, shapes and quantization.

    Raises:
        ValueError: the export failed: with its message.
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
    prompt_tokens: int = 32,
    num_threads: int = 1,
) -> Opened:
    """Opens a file and calls its functions in a process of its own.

    Args:
        path: the `.tflite`.
        accelerator: "cpu" or "gpu".
        weight_cache: where the CPU's packed weights go; they are packed before measuring, as they
            are from an app's second start on.
        prompt_tokens: read before the first token.
        num_threads: of the CPU.

    Raises:
        ValueError: the runtime refused the file, ended the process or hung, or there is no GPU.
    """
    task = {
        "path": str(path),
        "accelerator": accelerator,
        "weight_cache": None if weight_cache is None else str(weight_cache),
        "prompt_tokens": prompt_tokens,
        "num_threads": num_threads,
    }
    if weight_cache is not None:
        _measured("open", task)
    return Opened(**_measured("open", task))


def _measured(kind: str, task: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return ask_child("jaxspec.mobile.footprint", {"kind": kind, **task}, _TIMEOUT)[0]
    except TimeoutError:
        raise ValueError(f"measuring took longer than {_TIMEOUT:.0f} s") from None
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
            head = load_eagle(task["head"], model.network)
            drafter = Eagle.of(head, tree_of_head(task["head"]))
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
        num_threads=task["num_threads"],
        weight_cache=task["weight_cache"],
        accelerator=task["accelerator"],
    )
    count = min(task["prompt_tokens"], model.manifest.slots // 2)
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
    """Bytes of this process, those that no file backs, and the most there were.

    What `getrusage` calls the most counts that of the process which started this one, too.
    """
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: 1024 * int(fields[name].split()[0]) for name in ("VmRSS", "RssAnon", "VmHWM")}


def _child() -> None:
    task = json.load(sys.stdin)
    measured = {"export": _export, "open": _open}[task["kind"]](task)
    Path(sys.argv[1]).write_text(json.dumps(measured._asdict()))


if __name__ == "__main__":
    _child()
