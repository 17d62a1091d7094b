"""Weights behind the flatbuffer: files beyond 2 GiB, from folders of shards read piece by piece.

The largest is a 7B-shaped Llama. It takes 12 GB of memory, 20 GB of disk and half an hour:

    pytest -m slow tests/mobile/test_large.py -k 7b -s
"""

import gc
import json
import shutil
import subprocess
import sys
import time
import weakref
import zlib
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from benchmarks.litert_parity import QUANTIZED_TIE_GAP
from jaxspec import extras as extras_module
from jaxspec.checkpoint import files as files_module
from jaxspec.checkpoint import load, load_eagle, save_eagle
from jaxspec.checkpoint import params as params_module
from jaxspec.checkpoint.config import config_to_json
from jaxspec.checkpoint.memory import available_memory
from jaxspec.checkpoint.safetensors import (
    INDEX,
    TensorToWrite,
    find_tensors,
    write_safetensors,
)
from jaxspec.decoding.generate import generate
from jaxspec.drafters import Eagle
from jaxspec.models import EagleHead, ModelConfig, init_eagle_params

pytest.importorskip("litert_converter", reason="needs the extra mobile: '.[mobile]'")
pytest.importorskip("ai_edge_litert", reason="needs the extra mobile: '.[mobile]'")

from jaxspec.mobile import QUANTIZATIONS, ExportConfig, MobileModel, export, read_manifest
from jaxspec.mobile import weights as weights_module
from jaxspec.mobile.calibration import calibrate
from jaxspec.mobile.export import MODEL_FILE
from jaxspec.mobile.extra import OLDEST_LITERT, OLDEST_LM, missing_for_gpu
from jaxspec.mobile.gpu import check_gpu
from jaxspec.mobile.loops import Plain, Steps
from jaxspec.mobile.weights import TfliteFile, single_functions
from tests.mobile.models import LLAMA_7B

TINY = ModelConfig(
    vocab_size=500,
    embed_dim=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    mlp_dim=320,
    max_positions=256,
)
CHAIN = ((0,), (0, 0), (0, 0, 0))
PROMPT = [3, 14, 15, 92, 65, 35]
GIB = 1 << 30


def write_folder(folder: Path, config: ModelConfig) -> None:
    """A Llama of random weights in bfloat16, a shard for each layer and one for both ends.

    Tensors of a layer that have one shape hold the same numbers, turned by as many places as their
    names say. A token has two likely successors, and the layers choose: rows of the output head are
    sums of the embeddings of the tokens that they follow.
    """
    folder.mkdir()
    width, mlp, heads = config.embed_dim, config.mlp_dim, config.num_heads * config.head_dim
    table = "model.embed_tokens"
    ends = {table: (config.vocab_size, width), "lm_head": (config.vocab_size, width)}
    shards = [{**ends, "model.norm": (width,)}]
    for layer in range(config.num_layers):
        shapes = {f"self_attn.{name}_proj": (heads, width) for name in "qkv"}
        shapes |= {"self_attn.o_proj": (width, heads), "mlp.down_proj": (width, mlp)}
        shapes |= {f"mlp.{name}_proj": (mlp, width) for name in ("gate", "up")}
        shapes |= {f"{name}_layernorm": (width,) for name in ("input", "post_attention")}
        shards.append({f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()})
    draws, drawn = np.random.default_rng(0), {}

    def make(name, shape):
        if len(shape) == 1:
            return np.ones(shape, ml_dtypes.bfloat16)
        if shape not in drawn:
            scale = np.float32(1.0 if name == table else shape[1] ** -0.5)
            numbers = scale * draws.standard_normal(shape, np.float32)
            drawn[shape] = numbers.astype(ml_dtypes.bfloat16)
        if name == table:
            return drawn[shape]
        if name == "lm_head":
            first, second = (drawn[shape][draws.permutation(shape[0])] for _ in range(2))
            return (first + ml_dtypes.bfloat16(0.9) * second) * ml_dtypes.bfloat16(width**-0.5)
        return np.roll(drawn[shape].reshape(-1), zlib.crc32(name.encode())).reshape(shape)

    weight_map = {}
    for number, shapes in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        tensors = [
            TensorToWrite(f"{name}.weight", shape, lambda name=name, shape=shape: make(name, shape))
            for name, shape in shapes.items()
        ]
        write_safetensors(folder / file, tensors, np.dtype(ml_dtypes.bfloat16))
        weight_map |= {tensor.name: file for tensor in tensors}
    (folder / "config.json").write_text(json.dumps(config_to_json(config)))
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def write_eagle_head(folder: Path, config: ModelConfig) -> None:
    layer = config.replace(num_layers=1, layer_types=())
    params = init_eagle_params(layer, False, jax.random.key(1))
    save_eagle(EagleHead(params, layer, False), folder, "bfloat16")


def layer_by_layer(folder: Path, config: ModelConfig, text, bits: int) -> np.ndarray:
    """Logits after each token of a text, by the weights of a file, one layer in memory at a time.

    Each output of a product has a scale. Before a product, LiteRT's CPU rounds each row of its
    input to 256 numbers from its lowest to its highest.
    """
    stored = find_tensors(folder)

    def weight(name, bits):
        # NumPy's quotients are exact halves where XLA's are not: bfloat16 has many.
        matrix = stored[f"{name}.weight"].read().astype(np.float32)
        scales = np.max(np.abs(matrix), axis=1, keepdims=True) / np.float32(2 ** (bits - 1) - 1)
        return jnp.asarray(np.rint(matrix / scales) * scales)

    def product(rows, name):
        low = jnp.minimum(jnp.min(rows, axis=1, keepdims=True), 0)
        high = jnp.maximum(jnp.max(rows, axis=1, keepdims=True), 0)
        step = (high - low) / 255
        zero = jnp.round(jnp.clip(-128 - low / step, -128, 127))
        whole = jnp.clip(jnp.round(rows / step) + zero, -128, 127)
        return (whole - zero) * step @ weight(name, bits).T

    def normed(rows, name):
        mean = jnp.mean(rows**2, axis=1, keepdims=True)
        scale = stored[f"{name}.weight"].read().astype(np.float32)
        return rows / jnp.sqrt(mean + config.norm_eps) * scale[None]

    def rotated(heads):
        half = config.head_dim // 2
        angles = np.arange(len(text))[:, None] * 10000.0 ** (-np.arange(half) / half)[None]
        cos, sin = (jnp.asarray(f(angles), jnp.float32)[:, None] for f in (np.cos, np.sin))
        one, other = heads[..., :half], heads[..., half:]
        return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)

    residual = weight("model.embed_tokens", 8)[np.asarray(text)]
    seen = np.tri(len(text), dtype=bool)[None]
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}"
        rows = normed(residual, f"{name}.input_layernorm")
        heads = (len(text), config.num_heads, config.head_dim)
        queries, keys, values = (
            product(rows, f"{name}.self_attn.{part}_proj").reshape(heads) for part in "qkv"
        )
        scores = jnp.einsum("qhd,khd->hqk", rotated(queries), rotated(keys))
        scores = jnp.where(seen, scores / config.head_dim**0.5, -jnp.inf)
        mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), values)
        residual += product(mixed.reshape(len(text), -1), f"{name}.self_attn.o_proj")
        rows = normed(residual, f"{name}.post_attention_layernorm")
        gated = jax.nn.silu(product(rows, f"{name}.mlp.gate_proj"))
        residual += product(gated * product(rows, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
    return np.asarray(product(normed(residual, "model.norm"), "lm_head"))


def decoded(path, count):
    """Tokens of `decode`, and of `step`."""
    file = MobileModel(path)
    return [file.generate(PROMPT, count, (), loop).tokens.tolist() for loop in (Plain, Steps)]


def gaps_in_jax(folder, config, tokens, bits):
    """Returns how far each token's logit lies below the best, in a pass in JAX over its text."""
    logits = layer_by_layer(folder, config, PROMPT + tokens[:-1], bits)[len(PROMPT) - 1 :]
    return logits.max(axis=1) - logits[np.arange(len(tokens)), tokens]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("shards") / "tiny"
    write_folder(path, TINY)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return load(folder, weights="files")


@pytest.fixture(scope="module")
def drafter(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("head")
    write_eagle_head(path, TINY)
    return Eagle.of(load_eagle(path, model), CHAIN)


SHAPES = ExportConfig(capacity=64, prefill=(8,), bundle="gpu", quantization="int4")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_tokens_are_those_of_jax_layer_by_layer(model, folder, drafter, tmp_path, quantization):
    export(model, tmp_path, drafter, replace(SHAPES, quantization=quantization))
    bits = int(quantization.removeprefix("int"))
    plain, steps = decoded(tmp_path / MODEL_FILE, 12)
    assert plain == steps
    assert not gaps_in_jax(folder, TINY, plain, bits).any()
    assert len(set(plain)) > 6


def test_shards_read_piece_by_piece_give_the_same_file(model, folder, drafter, tmp_path):
    export(model, tmp_path / "files", drafter, SHAPES)
    export(load(folder, weights="float32"), tmp_path / "memory", drafter, SHAPES)
    files = [(tmp_path / name / MODEL_FILE).read_bytes() for name in ("files", "memory")]
    assert files[0] == files[1]


def test_no_two_weights_are_in_memory_together(model, tmp_path, monkeypatch):
    """Each is read when its turn comes, and dropped before the next one is read."""
    leaves, alive, read = [], [], params_module._read_leaf

    def counted(*arguments):
        leaf = read(*arguments)
        leaves.append(weakref.ref(leaf))
        gc.collect()
        alive.append(sum(each() is not None for each in leaves))
        return leaf

    monkeypatch.setattr(params_module, "_read_leaf", counted)
    export(model, tmp_path, config=SHAPES)
    assert alive == [1] * len(jax.tree.leaves(model.params))


def test_a_model_in_files_only_exports(model, folder):
    with pytest.raises(ValueError, match=r"^model: the weights of .* were left in their files"):
        generate(model, PROMPT)
    with pytest.raises(ValueError, match=r"^check: weights='files' reads no weights"):
        load(folder, weights="files", check=True)
    with pytest.raises(ValueError, match=r"^quantization: the weights of .* take int8 or int4"):
        calibrate(model, QUANTIZATIONS["int4-calibrated"])


class TestWhatFails:
    """Whatever happens, the folder holds a whole file: the old one or the new one."""

    @pytest.fixture
    def out(self, model, tmp_path):
        export(model, tmp_path, config=replace(SHAPES, quantization="int8"))
        return tmp_path

    @staticmethod
    def unchanged(out, before):
        assert read_manifest(out / MODEL_FILE).quantization == "int8"
        assert sorted(out.iterdir()) == before

    def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
        self, model, out, monkeypatch
    ):
        before = sorted(out.iterdir())
        usage = shutil.disk_usage(out)._replace(free=10_000)
        monkeypatch.setattr(files_module.shutil, "disk_usage", lambda folder: usage)
        monkeypatch.setattr(TfliteFile, "write", lambda *_: pytest.fail("it was written"))
        with pytest.raises(ValueError, match=r"^folder: 0\.00 GB are to be written into"):
            export(model, out, config=SHAPES)
        self.unchanged(out, before)

    def test_the_disk_is_looked_at_before_a_calibration(self, folder, tmp_path, monkeypatch):
        usage = shutil.disk_usage(tmp_path)._replace(free=10_000)
        monkeypatch.setattr(files_module.shutil, "disk_usage", lambda folder: usage)
        module = sys.modules["jaxspec.mobile.export"]  # the package has a function of this name
        monkeypatch.setattr(module, "calibrate", lambda *_: pytest.fail("it was calibrated"))
        shapes = replace(SHAPES, quantization="int4-calibrated")
        with pytest.raises(ValueError, match=r"^folder: 0\.00 GB are to be written into"):
            export(load(folder, weights="float32"), tmp_path / "out", config=shapes)

    @pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
    def test_an_interrupted_export_leaves_the_old_file(self, model, out, monkeypatch, error):
        before, read, calls = sorted(out.iterdir()), params_module._read_leaf, []

        def interrupted(*arguments):
            calls.append(arguments)
            if len(calls) == 5:
                raise error
            return read(*arguments)

        monkeypatch.setattr(params_module, "_read_leaf", interrupted)
        with pytest.raises((KeyboardInterrupt, OSError)):
            export(model, out, config=SHAPES)
        assert len(calls) == 5
        self.unchanged(out, before)

    def test_a_killed_export_leaves_the_old_file_and_the_next_clears_up(self, model, folder, out):
        """The process ends while weights are written, as by a signal or for want of memory."""
        before = sorted(out.iterdir())
        program = (
            "import os, sys\n"
            "from jaxspec.checkpoint import load, params\n"
            "from jaxspec.mobile import ExportConfig, export\n"
            "read, calls = params._read_leaf, []\n"
            "def killed(*arguments):\n"
            "    calls.append(0)\n"
            "    return os._exit(9) if len(calls) == 5 else read(*arguments)\n"
            "params._read_leaf = killed\n"
            "model, shapes = load(sys.argv[1], weights='files'), ExportConfig(capacity=64)\n"
            "export(model, sys.argv[2], config=shapes)\n"
        )
        done = subprocess.run([sys.executable, "-c", program, folder, out], check=False)
        assert done.returncode == 9
        assert read_manifest(out / MODEL_FILE).quantization == "int8"
        export(model, out, config=replace(SHAPES, quantization="int8"))
        self.unchanged(out, before)

    def test_a_runtime_that_is_too_old_is_named(self, out, monkeypatch):
        monkeypatch.setattr(extras_module, "version", lambda package: "2.2.1")
        with pytest.raises(ValueError, match=r"needs ai-edge-litert 2\.3 or newer, and 2\.2\.1"):
            MobileModel(out / MODEL_FILE)

    def test_versions_that_are_asked_for_are_those_of_the_extras(self):
        text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
        assert f"ai-edge-litert=={OLDEST_LITERT}.*" in text
        assert f"litert-lm-api=={OLDEST_LM}" in text


def with_holes(monkeypatch, folder, at_least):
    """Places weights 1 GiB apart; the file takes no room for what lies between them."""
    if shutil.disk_usage(folder).free < at_least:
        pytest.skip(f"needs {at_least / GIB:.0f} GiB of disk")
    monkeypatch.setattr(weights_module, "_BEHIND", GIB)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_behind_gibibytes_give_the_same_tokens(tmp_path, monkeypatch, quantization):
    """On CPUs, and on the GPU accelerator where there is one. One layer, so a dozen gibibytes."""
    config = TINY.replace(num_layers=1, layer_types=())
    write_folder(tmp_path / "model", config)
    model = load(tmp_path / "model", weights="files")
    shapes = replace(SHAPES, quantization=quantization)
    export(model, tmp_path / "near", config=shapes)
    with_holes(monkeypatch, tmp_path, 16 * GIB)
    export(model, tmp_path / "far", config=shapes)
    near, far = (tmp_path / name / MODEL_FILE for name in ("near", "far"))
    assert far.stat().st_size > 5 * GIB
    texts = [MobileModel(path).generate(PROMPT, 12, ()).tokens.tolist() for path in (near, far)]
    assert texts[0] == texts[1]
    if missing_for_gpu() is None:
        assert check_gpu(far, [PROMPT], timeout=600).problems == ()


OPENED = (
    "import sys\n"
    "from ai_edge_litert import compiled_model as litert\n"
    "cpu = litert.HardwareAccelerator.CPU\n"
    "options = litert.Options(hardware_accelerators=cpu)\n"
    "model = litert.CompiledModel.from_file(sys.argv[1], options=options)\n"
    "lines = open('/proc/self/status').read().splitlines()\n"
    "print(next(line.split()[1] for line in lines if line.startswith('RssAnon')))\n"
)
"""Opens a file and prints the kilobytes that the process holds, those of mapped files left out."""


@pytest.mark.slow
def test_a_7b_model_is_written_and_decodes_as_in_jax(tmp_path):
    """The command runs in a process whose memory is measured: at most 12 GB, and 20 minutes."""
    available = available_memory()
    if available is not None and available < 12e9:
        pytest.skip(f"needs 12 GB of memory, {available / 1e9:.0f} are available")
    if shutil.disk_usage(tmp_path).free < 22e9:
        pytest.skip("needs 22 GB of disk")
    folder, head, out = (tmp_path / name for name in ("model", "head", "out"))
    write_folder(folder, LLAMA_7B)
    write_eagle_head(head, LLAMA_7B)
    (head / "tree.json").write_text(json.dumps({"paths": CHAIN}))
    program = (
        "import resource, sys\n"
        "from jaxspec.cli import main\n"
        "code = main(sys.argv[1:])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
        "sys.exit(code)\n"
    )
    flags = ["--quantize", "int4", "--bundle", "gpu", "--capacity", "128", "--prefill", "8"]
    command = ["export", "tflite", folder, out, "--drafter", f"eagle:head={head}", *flags]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, command)], stdout=subprocess.PIPE, check=True
    )
    seconds, peak = time.perf_counter() - start, 1024 * int(done.stdout.split()[-1])
    print(f"\n{done.stdout.decode()}{seconds:.0f} s, {peak / 1e9:.2f} GB at most")
    assert peak <= 12e9
    assert seconds <= 20 * 60
    assert (out / MODEL_FILE).stat().st_size > 3 * GIB
    # In 32 layers the rounding of activations adds up: two logits that are this close may turn.
    for tokens in decoded(out / MODEL_FILE, 8):
        gaps = gaps_in_jax(folder, LLAMA_7B, tokens, 4)
        print(tokens, gaps, sep="\n")
        assert gaps.max() < QUANTIZED_TIE_GAP / 2
        assert np.count_nonzero(gaps) <= 1
        assert len(set(tokens)) > 4
    # A kit's script leaves the file one function: then its weights are packed once.
    size = (out / MODEL_FILE).stat().st_size
    ((_, flatbuffer),) = single_functions(out / MODEL_FILE, ["decode"])
    with (out / MODEL_FILE).open("r+b") as file:
        file.write(flatbuffer)
    opened = subprocess.run(
        [sys.executable, "-c", OPENED, out / MODEL_FILE], stdout=subprocess.PIPE, check=True
    )
    held = 1024 * int(opened.stdout.split()[-1])
    print(f"{held / 1e9:.2f} GB for one function, beside a file of {size / 1e9:.2f} GB")
    assert held < 1.5 * size
