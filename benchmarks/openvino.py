"""OpenVINO on the shipped weights: its graph, and a runner over the package `openvino-genai`."""

import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import ml_dtypes
import numpy as np

from benchmarks.llama_cpp import tensors_by_name
from jaxspec.checkpoint import Model
from jaxspec.decoding.metrics import Counts
from jaxspec.measure.figures import DecodedText, Sample


class OpenVinoMethod(NamedTuple):
    """A way to decode with OpenVINO.

    Attributes:
        dtype: type of the matrices, of the sums' operands and of the cache: "f32" or "bf16".
            Processors without products of bfloat16 compute in float32.
        drafts: draft with the draft model.
    """

    dtype: str
    drafts: bool = False


def why_not_here() -> str | None:
    """Returns why OpenVINO cannot be measured here; `None` if it can."""
    if importlib.util.find_spec("openvino_genai") is None:
        return "openvino_genai cannot be imported; install the extra `openvino`"
    return None


def _module(name: str) -> Any:
    # On import OpenVINO reports to its makers over the network, from a forked process. It does not
    # where its package for that cannot be imported.
    cast(dict[str, Any], sys.modules).setdefault("openvino_telemetry", None)
    return importlib.import_module(name)


class OpenVinoRunner:
    """Decodes greedily with the pipelines of `openvino-genai`, one prompt at a time.

    Prompts and outputs are ids. Times are the pipeline's own, of the prompt and of the tokens after
    it.

    Attributes:
        methods: the methods by name.
        versions: the version that decodes.
    """

    def __init__(
        self,
        model: Model,
        methods: Mapping[str, OpenVinoMethod],
        folder: Path,
        threads: int,
        max_new_tokens: int,
        draft: Model | None = None,
        num_drafted: int = 4,
    ):
        """Writes the graphs and makes a pipeline for each method.

        Args:
            model: our target, a Llama with a tokenizer.
            methods: what to decode with, by name.
            folder: where graphs are written.
            threads: of each pipeline.
            max_new_tokens: tokens to emit at most.
            draft: the draft model.
            num_drafted: tokens of a draft, which are all verified.
        """
        genai = _module("openvino_genai")
        self.methods, self._limit, self._num_drafted = dict(methods), max_new_tokens, num_drafted
        self._genai, self._stops = genai, set(model.stop_token_ids)
        version = importlib.metadata.version("openvino-genai")
        self.versions = f"openvino-genai {version}, {threads} threads"
        scheduler = genai.SchedulerConfig()
        # Every run reads its prompt anew.
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = model.config.max_positions
        self._pipelines = {}
        for name, method in methods.items():
            settings = {
                "INFERENCE_PRECISION_HINT": method.dtype,
                "KV_CACHE_PRECISION": method.dtype,
                "INFERENCE_NUM_THREADS": threads,
                # Pinned threads would hold up those of the other runtimes.
                "ENABLE_CPU_PINNING": False,
                "scheduler_config": scheduler,
            }
            further = {}
            if method.drafts:
                assert draft is not None, "a draft model was asked for"
                path = _written(draft, method.dtype, folder / "draft")
                further["draft_model"] = genai.draft_model(path, "CPU", **settings)
            path = _written(model, method.dtype, folder / "target")
            self._pipelines[name] = genai.LLMPipeline(path, "CPU", **settings, **further)

    def decode(self, method: str, prompt: Sequence[int], seed: int) -> Sample:
        """Decodes ids once; decoding is greedy, so `seed` is not used."""
        del seed
        openvino = _module("openvino")
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.do_sample = self._limit, False
        config.eos_token_id, config.stop_token_ids = min(self._stops), self._stops
        if self.methods[method].drafts:
            config.num_assistant_tokens = self._num_drafted
        ids = openvino.Tensor(np.asarray([prompt], np.int64))
        answer = self._pipelines[method].generate(ids, config)
        tokens = list(answer.tokens[0])
        end = "stop_token" if tokens[-1] in self._stops else "length"
        steps, kept, drafted = len(tokens), 0, 0
        if self.methods[method].drafts:
            both = answer.extended_perf_metrics
            steps = len(both.main_model_metrics.raw_metrics.m_durations)
            kept, drafted = both.get_num_accepted_tokens(), both.get_num_draft_tokens()
        counts = Counts(
            num_tokens=len(tokens),
            num_steps=steps,
            num_nodes=drafted,
            num_from_draft=kept,
            # Only sums are known: how many were drafted and kept in each step is not.
            accepted=(),
            drafted=(),
        )
        seconds = answer.perf_metrics.get_generate_duration().mean / 1e3
        return Sample((DecodedText(prompt, tokens, end),), seconds, counts)


def _written(model: Model, dtype: str, stem: Path) -> str:
    folder = stem.with_name(f"{stem.name}-{dtype}")
    if not folder.exists():
        write_openvino(model, folder, dtype)
    return str(folder)


def write_openvino(model: Model, folder: Path, dtype: str) -> None:
    """Writes a Llama as graphs for `openvino-genai`.

    Args:
        model: a network of the family "llama", with a tokenizer.
        folder: the folder, which is made.
        dtype: type of its matrices: "f32" or "bf16".

    Raises:
        ValueError: the model is of another family, or has no tokenizer.
    """
    openvino = _module("openvino")
    network = _Graph(model, dtype).network()
    folder.mkdir(parents=True)
    openvino.save_model(network, folder / "openvino_model.xml", compress_to_fp16=False)
    openvino.save_model(_no_tokenizer(), folder / "openvino_tokenizer.xml")


def _no_tokenizer() -> Any:
    """Returns what stands for a tokenizer, without which no pipeline is made; prompts are ids."""
    openvino = _module("openvino")
    op = _module("openvino.opset13")
    text = op.parameter([-1], openvino.Type.string, name="text")
    shape = op.concat([op.shape_of(text), np.asarray([1])], 0)
    results = []
    for name, value in (("input_ids", 0), ("attention_mask", 1)):
        results.append(op.result(op.broadcast(np.int64(value), shape)))
        results[-1].output(0).set_names({name})
    return openvino.Model(results, [text], "no tokenizer")


class _Graph:
    """Builds a Llama with its cache as state, in the forms that OpenVINO's rewrites look for.

    They find the cache by the gather over `beam_idx`, and the groups of queries by the broadcast.
    """

    def __init__(self, model: Model, dtype: str):
        self._openvino = _module("openvino")
        self._op = _module("openvino.opset13")
        self._tensors, self._config = tensors_by_name(model, interleaved=False), model.config
        self._dtype, self._sinks = dtype, []

    def network(self) -> Any:
        op, config = self._op, self._config
        names = ("input_ids", "attention_mask", "position_ids")
        ids, mask, positions = inputs = [
            op.parameter([-1, -1], np.int64, name=name) for name in names
        ]
        self._beams = op.parameter([-1], np.int32, name="beam_idx")
        inputs.append(self._beams)
        for each in inputs:
            each.output(0).set_names({each.friendly_name})
        self._num_rows = op.gather(op.shape_of(ids), [0], np.int64(0))
        embedding = self._weights("token_embd.weight")
        x = op.gather(embedding, op.convert(ids, "i32"), np.int64(0))
        self._rotation = self._cos_and_sin(positions)
        total = op.gather(op.shape_of(mask), np.int64(1), np.int64(0))
        places = op.range(np.int64(0), total, np.int64(1), "i64")
        self._allowed = op.less_equal(
            op.unsqueeze(places, [0, 1, 2]), op.unsqueeze(positions, [1, 3])
        )
        for number in range(config.num_layers):
            x = self._layer(x, f"blk.{number}.")
        head = embedding if config.tied_head else self._weights("output.weight")
        logits = op.result(op.matmul(self._norm(x, "output_norm.weight"), head, False, True))
        logits.output(0).set_names({"logits"})
        return self._openvino.Model([logits], self._sinks, inputs, "llama")

    def _layer(self, x: Any, prefix: str) -> Any:
        op, config = self._op, self._config
        normed = self._norm(x, f"{prefix}attn_norm.weight")
        queries = self._rotated(self._heads(normed, f"{prefix}attn_q.weight", config.num_heads))
        keys = self._rotated(self._heads(normed, f"{prefix}attn_k.weight", config.num_kv_heads))
        values = self._heads(normed, f"{prefix}attn_v.weight", config.num_kv_heads)
        found = op.scaled_dot_product_attention(
            queries,
            self._cached(keys, f"{prefix}keys"),
            self._cached(values, f"{prefix}values"),
            self._allowed,
        )
        width = config.num_heads * config.head_dim
        found = op.reshape(op.transpose(found, [0, 2, 1, 3]), [0, 0, width], True)
        x = op.add(x, self._product(found, f"{prefix}attn_output.weight"))
        normed = self._norm(x, f"{prefix}ffn_norm.weight")
        gate = op.swish(self._product(normed, f"{prefix}ffn_gate.weight"))
        inner = op.multiply(gate, self._product(normed, f"{prefix}ffn_up.weight"))
        return op.add(x, self._product(inner, f"{prefix}ffn_down.weight"))

    def _weights(self, name: str) -> Any:
        tensor = self._tensors[name]
        if tensor.ndim == 1 or self._dtype == "f32":
            return self._op.constant(tensor)
        rounded = tensor.astype(ml_dtypes.bfloat16).view(np.uint16)
        kind = self._openvino.Type.bf16
        # A tensor over an array of NumPy's does not keep it alive.
        kept = self._openvino.Tensor(kind, tensor.shape)
        self._openvino.Tensor(rounded, tensor.shape, kind).copy_to(kept)
        return self._op.convert(self._op.constant(kept), "f32")

    def _product(self, x: Any, name: str) -> Any:
        return self._op.matmul(x, self._weights(name), False, True)

    def _norm(self, x: Any, name: str) -> Any:
        op = self._op
        mean = op.reduce_mean(op.power(x, np.float32(2)), [-1], True)
        scale = op.divide(np.float32(1), op.sqrt(op.add(mean, np.float32(self._config.norm_eps))))
        return op.multiply(self._weights(name), op.multiply(x, scale))

    def _heads(self, x: Any, name: str, count: int) -> Any:
        split = self._op.reshape(self._product(x, name), [0, 0, count, self._config.head_dim], True)
        return self._op.transpose(split, [0, 2, 1, 3])

    def _cos_and_sin(self, positions: Any) -> tuple[Any, Any]:
        op, dim = self._op, self._config.head_dim
        rates = self._config.rope.theta ** (-np.arange(0, dim, 2) / dim)
        shape = op.concat([self._num_rows, np.asarray([dim // 2, 1])], 0)
        rates = op.broadcast(rates.astype(np.float32)[None, :, None], shape)
        whole = op.convert(op.unsqueeze(positions, [1]), "f32")
        angles = op.transpose(op.matmul(rates, whole, False, False), [0, 2, 1])
        both = op.concat([angles, angles], -1)
        return op.unsqueeze(op.cos(both), [1]), op.unsqueeze(op.sin(both), [1])

    def _rotated(self, heads: Any) -> Any:
        op, half = self._op, self._config.head_dim // 2
        first = op.slice(heads, [0], [half], [1], [3])
        second = op.slice(heads, [half], [2 * half], [1], [3])
        turned = op.concat([op.multiply(second, np.float32(-1)), first], -1)
        cos, sin = self._rotation
        return op.add(op.multiply(heads, cos), op.multiply(turned, sin))

    def _cached(self, new: Any, name: str) -> Any:
        """Adds to the cache, and repeats each of its heads for the queries of its group."""
        op, config, ov = self._op, self._config, self._openvino
        heads, dim = config.num_kv_heads, config.head_dim
        util = _module("openvino.op.util")
        info = util.VariableInfo()
        info.data_shape, info.data_type = ov.PartialShape([-1, heads, -1, dim]), ov.Type.f32
        info.variable_id = name
        state = util.Variable(info)
        shape = op.concat([self._num_rows, np.asarray([heads, 0, dim])], 0)
        before = op.read_value(op.broadcast(np.float32(0), shape), state)
        whole = op.concat([op.gather(before, self._beams, np.int64(0)), new], -2)
        self._sinks.append(op.assign(whole, state))
        if config.num_groups == 1:
            return whole
        shape = op.shape_of(whole)
        rows, length = (op.gather(shape, [axis], np.int64(0)) for axis in (0, 2))
        shape = op.concat(
            [rows, np.asarray([heads, config.num_groups]), length, np.asarray([dim])], 0
        )
        repeated = op.broadcast(op.unsqueeze(whole, [2]), shape, "BIDIRECTIONAL")
        return op.reshape(repeated, [0, config.num_heads, -1, dim], True)
