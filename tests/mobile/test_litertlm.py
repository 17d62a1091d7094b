"""`.litertlm` files: LiteRT-LM decodes them as JAX does, and the same with drafts as without."""

import shutil
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jaxspec import GenerationConfig, LayerSkip, generate
from jaxspec.checkpoint import Model, Tokenizer
from jaxspec.cli import main
from jaxspec.core.types import Params
from jaxspec.drafters import Eagle
from jaxspec.drafters.skip_sets import skips_of
from jaxspec.models import Diffusion, Network
from tests.mobile.models import CONFIG, successor_model

pytest.importorskip("litert_converter", reason="needs the extra mobile-lm: '.[mobile-lm]'")
pytest.importorskip("litert_lm_builder", reason="needs the extra mobile-lm: '.[mobile-lm]'")
pytest.importorskip("litert_lm", reason="needs the extra mobile-lm: '.[mobile-lm]'")

from litert_lm_builder.runtime.proto import llm_metadata_pb2

from jaxspec.mobile import ExportConfig
from jaxspec.mobile import child as child_module
from jaxspec.mobile import weights as weights_module
from jaxspec.mobile.litertlm import (
    Carried,
    describe_text,
    draft_signature,
    export_litertlm,
    prefill_signature,
)
from jaxspec.mobile.litertlm_check import check_litertlm
from jaxspec.mobile.records import Target

CAPACITY, NUM_NEW, DRAFTS = 64, 40, 3
SHAPES = ExportConfig(capacity=CAPACITY, prefill=(8,), quantization="float32")
DRAFTER = LayerSkip(skips_of(2, attention=[1], mlp=[0]), DRAFTS, 0.0, None)
PROMPTS = ["DBEBFJGFDJHBA", "H", "iCCCRU"]


def lettered(model: Model) -> Model:
    """Each of the 48 tokens is one letter, so that texts show tokens; A ends a text."""
    letters = [chr(ord("A") + i) for i in range(CONFIG.vocab_size)]
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return replace(model, tokenizer=Tokenizer(backend), stop_token_ids=(0,))


@pytest.fixture(scope="module")
def model():
    return lettered(successor_model()[0])


@pytest.fixture(scope="module")
def path(model, tmp_path_factory):
    return export_litertlm(model, tmp_path_factory.mktemp("lm"), DRAFTER, SHAPES)


@pytest.fixture(scope="module")
def checked(path):
    return check_litertlm(path, PROMPTS, NUM_NEW)


def test_texts_are_those_of_jax_with_and_without_drafts(model, checked):
    config = GenerationConfig(max_new_tokens=NUM_NEW)
    expected = [row.text for row in generate(model, PROMPTS, config)]
    assert checked.problems == ()
    for ours, theirs in zip(checked.plain.texts, expected, strict=True):
        assert ours == theirs


def test_some_drafts_are_accepted(checked):
    assert checked.plain.success_rate is None
    assert 0.1 < checked.speculative.success_rate < 1
    assert "texts equal" in str(checked)


@pytest.mark.parametrize("drafts", [DRAFTS, 1])
def test_drafts_are_those_of_jax(model, drafts):
    """Functions of the file, called as the runtime calls them, give the drafts of a generation."""
    drafter = replace(DRAFTER, num_speculative_tokens=drafts)
    config = GenerationConfig(max_new_tokens=20)
    (row,) = generate(model, PROMPTS[:1], config, drafter, return_trace=True)
    target, carried = (
        Target(CONFIG, 2 * CAPACITY, CONFIG.vocab_size, 2 * CAPACITY),
        Carried.of(CONFIG, drafter),
    )
    params, signatures = Params(model.network, ()), {}
    for name, signature in (
        ("prefill", prefill_signature(target, carried, CAPACITY)),
        ("draft", draft_signature(target, carried)),
    ):
        # A runtime's new caches may hold anything.
        new = {
            name: np.full(x.shape, np.nan if name.startswith("kv_cache") else 0, x.dtype)
            for name, x in signature.inputs.items()
        }
        signatures[name] = jax.jit(signature.function), new
    prefill, caches = signatures["prefill"]
    draft, inputs = signatures["draft"]
    table = np.asarray(model.params["embed"]["embedding"])
    text = model.tokenizer.encode(PROMPTS[0])
    for step in row.trace:
        embedded = np.zeros((1, CAPACITY, carried.width), np.float32)
        embedded[0, : len(text) - 1, : CONFIG.embed_dim] = table[text[:-1]]
        positions = np.arange(CAPACITY, dtype=np.int32)
        known = prefill(params, {**caches, "embeddings": embedded, "input_pos": positions})
        last = {**inputs, **known, "input_pos": np.array([len(text) - 2], np.int32)}
        token, handed, drafted = text[-1], np.zeros(carried.width, np.float32), []
        for _ in range(drafts):
            row_of_token = np.zeros(carried.width, np.float32)
            row_of_token[: CONFIG.embed_dim] = table[token]
            activations = np.concatenate([row_of_token, handed])[None, None]
            outputs = draft(params, {**last, "activations": activations})
            token = int(np.argmax(outputs["logits"]))
            handed = np.asarray(outputs["projected_activations"])[0, 0]
            drafted.append(token)
        offered = step.tokens[1:][step.valid[1:]].tolist()
        assert drafted[: len(offered)] == offered
        text += step.emitted.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_fewer_bits_give_the_same_texts_with_drafts(model, tmp_path, quantization):
    shapes = replace(SHAPES, quantization=quantization)
    checked = check_litertlm(export_litertlm(model, tmp_path, DRAFTER, shapes), PROMPTS, NUM_NEW)
    assert checked.problems == ()
    assert all(checked.plain.texts)


@pytest.mark.slow
def test_sections_beyond_2_gib_give_the_same_texts(model, tmp_path, monkeypatch):
    """Weights lie 256 MiB apart. The file is not sparse, as its writer copies whole sections."""
    if shutil.disk_usage(tmp_path).free < 2 * 4 << 30:
        pytest.skip("needs 8 GiB of disk")
    texts = []
    for name, apart in (("near", 64), ("far", 1 << 28)):
        monkeypatch.setattr(weights_module, "_BEHIND", apart)
        path = export_litertlm(model, tmp_path / name, None, SHAPES)
        texts.append(check_litertlm(path, PROMPTS, NUM_NEW).plain.texts)
    assert path.stat().st_size > 3 << 30
    assert texts[0] == texts[1]


def test_chats_are_written_as_the_model_knows_them(model):
    """The runtime gives contents as lists of parts; the template in the file takes them, too."""
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}\n{% endfor %}"
    )
    ours = replace(model.tokenizer, templates={"default": template})
    told = llm_metadata_pb2.LlmMetadata()
    told.ParseFromString(describe_text(replace(model, tokenizer=ours), ours, CAPACITY))
    assert [list(stop.token_ids.ids) for stop in told.stop_tokens] == [[0]]
    assert told.max_num_tokens == CAPACITY
    theirs = replace(model.tokenizer, templates={"default": told.jinja_prompt_template})
    chat = [{"role": "user", "content": "BC"}, {"role": "assistant", "content": "D"}]
    parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in chat]
    assert theirs.render_chat(parts) == theirs.render_chat(chat) == ours.render_chat(chat)


def test_mistakes_are_named(model, path, tmp_path):
    def refused(said, model=model, drafter=DRAFTER, **shapes):
        with pytest.raises(ValueError, match=said):
            export_litertlm(model, tmp_path, drafter, replace(SHAPES, **shapes))

    refused("has no tokenizer", replace(model, tokenizer=None))
    config = CONFIG.replace(diffusion=Diffusion(mask_token_id=3))
    refused("fills in masks", replace(model, network=Network(model.params, config)))
    refused("cannot run Eagle", drafter=Eagle.of(successor_model()[1], ((0,),)))
    refused("needs a fixed set", drafter=LayerSkip())
    refused("capacity must be at most", capacity=1000)
    refused("needs more than 4 tokens", capacity=4, prefill=(2,))
    refused("bundle: has no meaning", bundle="gpu")
    refused("int4-block32 needs widths", quantization="int4-block32")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="does not exist"):
        check_litertlm(tmp_path / "model.litertlm")


def test_a_missing_extra_is_named(model, path, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "litert_lm_builder.litertlm_builder", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxspec-decoding\[mobile-lm\]'"):
        export_litertlm(model, tmp_path, None, SHAPES)


class TestWhatFails:
    """A runtime that refuses, crashes or hangs ends in one clear error."""

    def test_a_damaged_file(self, path, tmp_path):
        damaged = tmp_path / "model.litertlm"
        damaged.write_bytes(path.read_bytes()[:20000])
        with pytest.raises(ValueError, match=r"refused .*exit code"):
            check_litertlm(damaged, PROMPTS[:1], 4)

    def test_crashes_and_silence(self, path, monkeypatch):
        run = child_module.subprocess.run

        def instead(code):
            def started(_, **settings):
                return run([sys.executable, "-S", "-c", code], **settings)

            monkeypatch.setattr(child_module.subprocess, "run", started)

        instead("import os; os.write(2, b'no buffer'); os.abort()")
        with pytest.raises(ValueError, match=r"exit code -6\): no buffer"):
            check_litertlm(path)
        instead("import time; time.sleep(60)")
        with pytest.raises(ValueError, match="took longer than 0 s"):
            check_litertlm(path, timeout=0.2)


@pytest.mark.parametrize("flag", ["--check-gpu", "--acceptance", "--bundle"])
def test_flags_of_other_files_are_unknown(flag, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["export", "litertlm", "nowhere", "out", flag])
    assert exit_.value.code == 2
    assert f"unknown flag {flag}" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--prompts", "P"], ["--threads", "2"]])
def test_flags_of_the_check_need_it(flags, capsys):
    assert main(["export", "litertlm", "nowhere", "out", *flags]) == 2
    assert f"{flags[0]}: needs --check-lm" in capsys.readouterr().err
