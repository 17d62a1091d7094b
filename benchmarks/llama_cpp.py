"""llama.cpp on the shipped weights: its file, and a runner over the package `xllamacpp`."""

import importlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec.checkpoint import Model
from jaxspec.checkpoint.config import config_to_json
from jaxspec.decoding.metrics import Counts
from jaxspec.measure.figures import DecodedText, Sample
from jaxspec.models.storage import widened


class LlamaCppMethod(NamedTuple):
    """A way to decode with llama.cpp.

    Attributes:
        weights: type of the file's matrices: "f32", "bf16" or "q8_0".
        drafts: `None`; "model", with the draft model; or "n-gram", from the text so far.
    """

    weights: str
    drafts: str | None = None


def why_not_here() -> str | None:
    """Returns why llama.cpp cannot be measured here; `None` if it can."""
    missing = [name for name in ("xllamacpp", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} cannot be imported; install the extra `llama-cpp`"
    return None


class LlamaCppRunner:
    """Decodes greedily with llama.cpp's own server, one prompt at a time.

    Prompts are ids, and outputs are the ids that the server emits. Times are the server's own, of
    the prompt and of the tokens after it, without its handling of requests.

    Attributes:
        methods: the methods by name.
        versions: the version that decodes.
    """

    def __init__(
        self,
        model: Model,
        methods: Mapping[str, LlamaCppMethod],
        folder: Path,
        threads: int,
        max_new_tokens: int,
        draft: Model | None = None,
        num_drafted: int = 4,
    ):
        """Writes the files and starts a server for each method.

        Args:
            model: our target, a Llama with a tokenizer.
            methods: what to decode with, by name.
            folder: where files are written.
            threads: of each server.
            max_new_tokens: tokens to emit at most.
            draft: the draft model.
            num_drafted: tokens of a draft at most, which are all verified.
        """
        self.methods, self._limit = dict(methods), max_new_tokens
        self._stops = set(model.stop_token_ids)
        version = importlib.metadata.version("xllamacpp")
        self.versions = f"xllamacpp {version}, {threads} threads"
        self._servers, self._addresses = {}, {}
        for name, method in methods.items():
            asked = {"model": str(_written(model, method.weights, folder / "target"))}
            if method.drafts == "model":
                assert draft is not None, "a draft model was asked for"
                asked["draft"] = str(_written(draft, method.weights, folder / "draft"))
            asked |= {"drafts": method.drafts, "threads": threads, "num_drafted": num_drafted}
            asked["capacity"] = model.config.max_positions
            # A process for each: in one process, the threads of two servers hold each other up.
            self._servers[name] = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.llama_cpp", json.dumps(asked)],
                cwd=Path(__file__).resolve().parents[1],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        for name, server in self._servers.items():
            assert server.stdout is not None, "a pipe"
            self._addresses[name] = next(
                (line.split()[1] for line in server.stdout if line.startswith("listening ")), None
            )
            if self._addresses[name] is None:
                self.close()
                raise ValueError(f"llama.cpp's server for {name} ended before it listened.")

    def close(self) -> None:
        """Ends the servers."""
        for server in self._servers.values():
            server.kill()
            server.wait()

    def __enter__(self) -> "LlamaCppRunner":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def decode(self, method: str, prompt: Sequence[int], seed: int) -> Sample:
        """Decodes ids once; decoding is greedy, so `seed` is not used."""
        del seed
        answer = self._answer(method, prompt, self._limit, cache_prompt=False)
        tokens, end = list(answer["tokens"]), "length"
        for place, token in enumerate(tokens):
            if token in self._stops:
                tokens, end = tokens[: place + 1], "stop_token"
                break
        timings = answer["timings"]
        seconds = (timings["prompt_ms"] + timings["predicted_ms"]) / 1e3
        drafted, kept = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        steps = max(len(tokens) - kept, 1)
        counts = Counts(
            num_tokens=len(tokens),
            num_steps=steps,
            num_nodes=drafted,
            num_from_draft=kept,
            # Only sums are known: how many were drafted and kept in each step is not.
            accepted=(),
            drafted=(),
        )
        return Sample((DecodedText(prompt, tokens, end),), seconds, counts)

    def pass_seconds(self, method: str, context: Sequence[int], tokens: Sequence[int]) -> float:
        """Returns the server's time of one pass that reads `tokens` after a cached `context`.

        Args:
            method: name of a method that does not draft.
            context: ids in the cache.
            tokens: ids that the pass reads. Only the last one has logits.
        """
        self._answer(method, context, 1)
        timings = self._answer(method, [*context, *tokens], 1)["timings"]
        read = timings["prompt_n"]
        assert read == len(tokens), f"a pass over {len(tokens)} tokens was asked for, not {read}"
        return timings["prompt_ms"] / 1e3

    def token_seconds(self, method: str, context: Sequence[int], num_tokens: int) -> float:
        """Returns the server's time per token of `num_tokens` decoded one by one.

        Args:
            method: name of a method that does not draft.
            context: ids in the cache.
            num_tokens: tokens after the first, which the pass over the context decides.
        """
        timings = self._answer(method, context, 1 + num_tokens, ignore_eos=True)["timings"]
        assert timings["predicted_n"] == 1 + num_tokens, "no token ends the text"
        return timings["predicted_ms"] / 1e3 / num_tokens

    def _answer(
        self, method: str, prompt: Sequence[int], num_tokens: int, **settings: Any
    ) -> Mapping[str, Any]:
        asked = {
            "prompt": list(prompt),
            "n_predict": num_tokens,
            "temperature": 0.0,
            "cache_prompt": True,
            "return_tokens": True,
        }
        request = urllib.request.Request(
            f"{self._addresses[method]}/completion",
            json.dumps(asked | settings).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)


def serve(asked: Mapping[str, Any]) -> None:
    """Serves one file until the standard input is closed; prints where."""
    llama: Any = importlib.import_module("xllamacpp")
    params = llama.CommonParams()
    params.model.path = asked["model"]
    params.n_ctx, params.n_parallel, params.verbosity = asked["capacity"], 1, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = asked["threads"]
    kinds = llama.common_speculative_type
    if asked["drafts"] == "model":
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        params.speculative.draft.mparams.path = asked["draft"]
        params.speculative.draft.n_max = asked["num_drafted"]
        params.speculative.draft.p_min = 0.0
    elif asked["drafts"] == "n-gram":
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    server = llama.Server(params)
    print(f"\nlistening {server.listening_address}", flush=True)
    sys.stdin.read()


def _written(model: Model, weights: str, stem: Path) -> Path:
    path = stem.with_name(f"{stem.name}-{weights}.gguf")
    if not path.exists():
        write_gguf(model, path, weights)
    return path


def write_gguf(model: Model, path: Path, weights: str) -> None:
    """Writes a Llama as a file for llama.cpp.

    Args:
        model: a network of the family "llama", with a tokenizer of byte-level pairs.
        path: the file.
        weights: type of its matrices: "f32", "bf16" or "q8_0".

    Raises:
        ValueError: the model is of another family, or has no tokenizer.
    """
    gguf: Any = importlib.import_module("gguf")
    tensors, config = tensors_by_name(model, interleaved=True), model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.embed_dim)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.mlp_dim)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(gguf, writer, model)
    kind = getattr(gguf.GGMLQuantizationType, weights.upper())
    for name, tensor in tensors.items():
        if tensor.ndim > 1 and weights != "f32":
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(gguf: Any, writer: Any, model: Model) -> None:
    """Adds the table of tokens. Prompts come as ids, so only the ends of texts matter."""
    assert model.tokenizer is not None, "checked"
    described = json.loads(model.tokenizer.backend.to_str())
    special = {each["id"] for each in described["added_tokens"] if each["special"]}
    by_id = {number: token for token, number in model.tokenizer.backend.get_vocab().items()}
    ids = range(model.config.vocab_size)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    merges = described["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([by_id.get(number, f"<unused {number}>") for number in ids])
    writer.add_token_types([control if number in special else normal for number in ids])
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_bos_token_id(model.tokenizer.bos_id)
    writer.add_eos_token_id(model.stop_token_ids[0])
    if len(model.stop_token_ids) > 1:
        writer.add_eot_token_id(model.stop_token_ids[1])
    writer.add_add_bos_token(False)


def tensors_by_name(model: Model, interleaved: bool) -> dict[str, np.ndarray]:
    """Returns the tensors of a Llama by llama.cpp's names, [out, in], in float32.

    Args:
        model: a network of the family "llama", with a tokenizer.
        interleaved: order queries and keys for a rotation of neighbours, as llama.cpp's; we rotate
            halves.

    Raises:
        ValueError: the model is of another family, or has no tokenizer.
    """
    network, config = widened(model.network), model.config
    family = config_to_json(config)["model_type"]
    if family != "llama" or model.tokenizer is None:
        raise ValueError(f"model: must be a Llama with a tokenizer, not {family}.")
    params, dim, group = network.params, config.embed_dim, config.num_groups
    order = _neighbours if interleaved else lambda heads: heads
    found = [
        ("token_embd.weight", params["embed"]["embedding"]),
        ("output_norm.weight", params["norm"]["scale"]),
    ]
    if not config.tied_head:
        found.append(("output.weight", params["head"]["kernel"].T))
    for number in range(config.num_layers):
        layer, prefix = params[f"layer_{number}"], f"blk.{number}."
        qkv = np.asarray(layer["attention"]["qkv"]["kernel"])  # [in, kv heads, group + 2, head dim]
        queries, keys, values = np.split(qkv, [group, group + 1], axis=2)
        out = np.asarray(layer["attention"]["out"]["kernel"])
        gate_up = layer["mlp"]["gate_up"]["kernel"]
        found += [
            (f"{prefix}attn_norm.weight", layer["attention_norm"]["scale"]),
            (f"{prefix}attn_q.weight", _rows(order(queries))),
            (f"{prefix}attn_k.weight", _rows(order(keys))),
            (f"{prefix}attn_v.weight", _rows(values)),
            (f"{prefix}attn_output.weight", out.reshape(-1, dim).T),
            (f"{prefix}ffn_norm.weight", layer["mlp_norm"]["scale"]),
            (f"{prefix}ffn_gate.weight", gate_up[:, 0].T),
            (f"{prefix}ffn_up.weight", gate_up[:, 1].T),
            (f"{prefix}ffn_down.weight", layer["mlp"]["down"]["kernel"].T),
        ]
    return {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in found}


def _rows(heads: np.ndarray) -> np.ndarray:
    """[in, ...] -> [out, in]."""
    return heads.reshape(heads.shape[0], -1).T


def _neighbours(heads: np.ndarray) -> np.ndarray:
    """[in, ..., head dim]: puts the two halves of each head's numbers in turns."""
    width, dim = heads.shape[0], heads.shape[-1]
    return heads.reshape(width, -1, 2, dim // 2).swapaxes(2, 3)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
