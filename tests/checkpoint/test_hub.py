import dataclasses
import json
import os
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxspec.checkpoint import (
    CheckpointError,
    Model,
    Tokenizer,
    hub,
    load,
    load_dflash,
    load_eagle,
    load_tokenizer,
    recover_files,
    save,
    save_dflash,
    save_eagle,
    save_orbax,
    shipped_heads,
    shipped_models,
)
from jaxspec.checkpoint.hub import find_head, find_model
from jaxspec.checkpoint.safetensors import find_tensors
from jaxspec.models import (
    Diffusion,
    DynamicScaling,
    EagleHead,
    ModelConfig,
    Network,
    Rope,
    init_eagle_params,
)
from tests.checkpoint.networks import assert_same_network, random_network


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


SAVERS = {"huggingface": save, "orbax": save_orbax}


@pytest.mark.parametrize("layout", sorted(SAVERS))
def test_a_saved_model_is_loaded_as_it_was(layout, tiny_network, byte_level_tokenizer, tmp_path):
    tokenizer = Tokenizer(
        byte_level_tokenizer.backend, byte_level_tokenizer.settings, {"default": "chat"}
    )
    defaults = {"temperature": 0.6, "repetition_penalty": 1.1}
    model = Model(tiny_network, tokenizer, stop_token_ids=(7, 5), generation_defaults=defaults)
    SAVERS[layout](model, tmp_path / "model")
    again = load(tmp_path / "model")
    assert_same_network(again.network, tiny_network)
    assert again.stop_token_ids == (7, 5)
    assert again.generation_defaults["temperature"] == 0.6
    assert again.generation_defaults["repetition_penalty"] == 1.1
    assert again.tokenizer.render_chat([]) == "chat"
    assert again.tokenizer.encode("the cat") == tokenizer.encode("the cat")
    assert again.vocab_size == again.config.vocab_size == 48
    assert again.params is again.network.params


@pytest.mark.parametrize("layout", sorted(SAVERS))
@pytest.mark.parametrize("family", [{}, {"qkv_bias": True}, {"qk_norm": True}])
def test_a_markov_head_is_saved_with_its_drafter(layout, family, tiny_network, tmp_path):
    diffusion = Diffusion(3, True, 4, rank=2)
    plain = tiny_network.config.replace(qkv_bias=False, out_bias=False, mlp_bias=False)
    width = plain.embed_dim // plain.num_heads
    network = random_network(plain.replace(diffusion=diffusion, head_dim=width, **family))
    SAVERS[layout](Model(network), tmp_path / "drafter")
    assert_same_network(load(tmp_path / "drafter").network, network)


def test_a_saved_model_has_a_card_whose_program_runs(tiny_network, tmp_path, capsys):
    model = Model(tiny_network, name="/secret/folder/tiny")
    save(model, tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: jaxspec\n")
    assert "# tiny\n" in card
    assert "secret" not in card
    for left_open in ("Base model", "Licence"):
        assert re.search(f"- {left_open}: .*for the author to say", card)
    (program,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    exec(program.replace("PATH", str(tmp_path)), {})
    assert capsys.readouterr().out.startswith("[")
    (tmp_path / "README.md").write_text("mine")
    save(model, tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


@pytest.mark.parametrize("layout", sorted(SAVERS))
def test_a_folder_at_home_is_written_and_read_there(layout, tiny_network, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    SAVERS[layout](Model(tiny_network), "~/mine")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert_same_network(load("~/mine").network, tiny_network)


@pytest.mark.parametrize("layout", sorted(SAVERS))
def test_a_dynamic_scaling_past_its_length_is_told_apart(layout, tiny_network, tmp_path):
    config = tiny_network.config.replace(max_positions=32, rope=Rope(scaling=DynamicScaling(2, 32)))
    SAVERS[layout](Model(dataclasses.replace(tiny_network, config=config)), tmp_path)
    with warnings.catch_warnings(action="error"):
        load(tmp_path)
    with pytest.warns(UserWarning, match="more than 32 tokens outputs differ"):
        assert load(tmp_path, max_positions=64).max_positions == 64


@pytest.mark.parametrize("layout", sorted(SAVERS))
def test_a_dtype_is_applied_when_loading(layout, tiny_network, tmp_path):
    SAVERS[layout](Model(tiny_network), tmp_path / "model")
    network = load(tmp_path / "model", dtype="bfloat16").network
    expected = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny_network.params)
    assert {leaf.dtype for leaf in jax.tree.leaves(network.params)} == {jnp.dtype("bfloat16")}
    chex.assert_trees_all_equal(network.params, expected)


@pytest.mark.parametrize(
    ("dtype", "stored"), [("bfloat16", "BF16"), (jnp.float16, "F16"), (None, "F32")]
)
def test_a_dtype_is_applied_when_saving(dtype, stored, tiny_network, tmp_path):
    save(Model(tiny_network), tmp_path, dtype)
    assert {tensor.dtype for tensor in find_tensors(tmp_path).values()} == {stored}
    # 16 bits only store on CPUs: they are widened again, and hold what the cast left of them.
    network = load(tmp_path).network
    assert network.dtype == jnp.float32
    cast = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype or np.float32
    kept = jax.tree.map(
        lambda leaf: np.asarray(leaf).astype(cast).astype(np.float32), tiny_network.params
    )
    chex.assert_trees_all_equal(network.params, kept)


def test_weights_that_are_not_finite_are_refused_where_asked(tiny_network, tmp_path):
    table = tiny_network.params["embed"]["embedding"]
    params = {**tiny_network.params, "embed": {"embedding": table.at[1, 2].set(np.nan)}}
    for network, folder in ((tiny_network, "sound"), (Network(params, tiny_network.config), "bad")):
        save(Model(network), tmp_path / folder)
        load(tmp_path / folder)
    load(tmp_path / "sound", check=True)
    with pytest.raises(CheckpointError, match="bad: a first pass gives logits that are not finite"):
        load(tmp_path / "bad", check=True)


@pytest.mark.parametrize("layout", sorted(SAVERS))
def test_accelerators_keep_the_stored_dtype(layout, tiny_network, tmp_path, monkeypatch):
    half = random_network(tiny_network.config, "bfloat16")
    SAVERS[layout](Model(half), tmp_path)
    assert load(tmp_path).network.dtype == jnp.float32
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert_same_network(load(tmp_path).network, half)


@pytest.mark.parametrize("dtype", ["float8", "int32", float, "nonsense"])
def test_a_dtype_that_weights_cannot_have_is_refused(dtype, saved_folder):
    with pytest.raises(ValueError, match="dtype must be one of float32, float16, bfloat16"):
        load(saved_folder, dtype)


def test_weights_are_read_into_the_arrays_that_are_used(saved_folder, monkeypatch):
    """On CPUs the buffer that a leaf was read into is the array's own: nothing is held twice."""
    if jax.default_backend() != "cpu":
        pytest.skip("elsewhere weights leave the host")
    from jaxspec.checkpoint import params

    buffers, aligned_empty = [], params._aligned_empty

    def recorded(*args):
        buffers.append(aligned_empty(*args))
        return buffers[-1]

    monkeypatch.setattr(params, "_aligned_empty", recorded)
    leaves = jax.tree.leaves(load(saved_folder).params)
    assert [leaf.unsafe_buffer_pointer() for leaf in leaves] == [
        buffer.ctypes.data for buffer in buffers
    ]


def test_no_tokenizer_is_none(saved_folder):
    assert load(saved_folder).tokenizer is None


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 6, 5]}, {"eos_token_id": 4}, (5, 6)),
        ({"eos_token_id": 0}, {"eos_token_id": 4}, (0,)),
        ({}, {"eos_token_id": [4, 3]}, (4, 3)),
        (None, {"eos_token_id": 4}, (4,)),
        ({}, {}, ()),
    ],
)
def test_stops_come_from_the_generation_config_first(saved_folder, generation, config, expected):
    raw = json.loads((saved_folder / "config.json").read_text())
    raw.pop("eos_token_id")
    (saved_folder / "config.json").write_text(json.dumps(raw | config))
    (saved_folder / "generation_config.json").unlink()
    if generation is not None:
        (saved_folder / "generation_config.json").write_text(json.dumps(generation))
    assert load(saved_folder).stop_token_ids == expected


def test_without_configured_stops_the_tokenizer_names_one(saved_folder, byte_level_tokenizer):
    save(Model(load(saved_folder).network, byte_level_tokenizer), saved_folder)
    assert load(saved_folder).stop_token_ids == (byte_level_tokenizer.eos_id,)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("</s>", "must be a sequence or a whole number, got '</s>'"),
        (True, "got True"),
        (2**40, r"must be in \[0, 48\), got 1099511627776"),
        (48, r"must be in \[0, 48\), got 48"),
        ([2, -1], "got -1"),
    ],
)
def test_a_stop_that_is_no_id_is_an_error(name, stop, message, saved_folder):
    (saved_folder / "generation_config.json").unlink()
    raw = json.loads((saved_folder / "config.json").read_text())
    (saved_folder / name).write_text(json.dumps({**raw, "eos_token_id": stop}))
    with pytest.raises(CheckpointError, match=rf"{name}: eos_token_id.*{message}"):
        load(saved_folder)


PLACES = [
    (None, "must be a text or a path, got None"),
    (5, "must be a text or a path, got 5"),
    (b"demo", "must be a text or a path, got b'demo'"),
    ("", "must be a path: not empty, .* got ''"),
    ("a\0b", "must be a path: .* without NUL, .* got 'a"),
    ("x" * 10_000, r"must be a path: .* at most 255 bytes, got 'x{76}\.\.\.\.$"),
]
TAKE_PLACES = {
    "path_or_hub_id": [lambda place, network: load(place)],
    "source": [
        lambda place, network: find_head(place),
        lambda place, network: find_model(place),
        load_eagle,
        load_dflash,
    ],
    "folder": [
        lambda place, network: load_tokenizer(place),
        lambda place, network: recover_files(place),
        lambda place, network: save(Model(network), place),
        lambda place, network: save_orbax(Model(network), place),
    ],
}


@pytest.mark.parametrize("argument", TAKE_PLACES)
@pytest.mark.parametrize(("place", "message"), PLACES)
def test_what_can_be_no_path_is_refused_by_name(argument, place, message, tiny_network):
    for function in TAKE_PLACES[argument]:
        with pytest.raises(CheckpointError, match=f"^{argument} {message}"):
            function(place, tiny_network)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_positions": "100"}, "max_positions must be a whole number, got '100'"),
        ({"max_positions": True}, "max_positions must be a whole number, got True"),
        ({"mesh": "data=1"}, "mesh must be of type Mesh, got 'data=1'"),
        ({"check": "no"}, "check must be True or False, got 'no'"),
        ({"revision": 5}, "revision must be a text, got 5"),
        ({"dtype": {"a": 1}}, "dtype must be one of float32, .* got {'a': 1}"),
        ({"weights": ["int8"]}, "weights must be one of float32, bfloat16, int8, files, got"),
    ],
)
def test_arguments_of_another_type_are_refused_by_name(settings, message, saved_folder):
    with pytest.raises(ValueError, match=message):
        load(saved_folder, **settings)


def test_heads_are_checked_where_they_are_loaded_and_saved(tmp_path, tiny_network):
    with pytest.raises(CheckpointError, match=r"head must be of type EagleHead or .* got None"):
        save_eagle(None, tmp_path)
    with pytest.raises(CheckpointError, match="head must be of type DFlashHead, got None"):
        save_dflash(None, tmp_path)
    with pytest.raises(CheckpointError, match="repo_id must be a text, got None"):
        Model(tiny_network).push_to_hub(None)
    for name in ("../x", "x/..", "x", "a/b/c", "é/x", "-a/x", "a--b/x", "a/x.git"):
        with pytest.raises(CheckpointError, match=f"^repo_id must be owner/name, got '{name}'"):
            Model(tiny_network).push_to_hub(name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layers", [200, 10_000])
def test_layers_that_the_files_do_not_hold_are_refused_at_once(layers, tiny_network, tmp_path):
    for layout, name, key in (
        ("huggingface", "config.json", "num_hidden_layers"),
        ("orbax", "network.json", "num_layers"),
    ):
        folder = tmp_path / layout
        SAVERS[layout](Model(tiny_network), folder)
        raw = json.loads((folder / name).read_text()) | {key: layers}
        raw.pop("layer_types", None)
        (folder / name).write_text(json.dumps(raw))
        message = r"are 200 layers|at most 4096, got 10000"
        began = time.perf_counter()
        with pytest.raises(CheckpointError, match=message) as caught:
            load(folder)
        assert time.perf_counter() - began < 5  # it took minutes
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("layout", sorted(SAVERS))
@pytest.mark.parametrize("before", sorted(SAVERS))
def test_an_interrupted_save_leaves_the_old_checkpoint_whole(
    layout, before, tiny_network, tmp_path, monkeypatch
):
    SAVERS[before](Model(tiny_network), tmp_path)
    (tmp_path / "recipe.md").write_text("how it was made")
    old = contents(tmp_path)

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    other = jax.tree.map(lambda leaf: leaf + 1, tiny_network)
    monkeypatch.setattr(hub, "_write_companions", interrupted)
    with pytest.raises(KeyboardInterrupt):
        SAVERS[layout](Model(other), tmp_path)
    assert contents(tmp_path) == old
    assert_same_network(load(tmp_path).network, tiny_network)
    monkeypatch.undo()

    SAVERS[layout](Model(other), tmp_path)
    assert_same_network(load(tmp_path).network, other)
    assert (tmp_path / "recipe.md").exists()
    assert not list(tmp_path.glob(".saving-*"))


def test_a_writer_that_fails_between_two_tensors_leaves_the_old_checkpoint(
    tiny_network, tmp_path, monkeypatch
):
    from jaxspec.checkpoint import huggingface

    save(Model(tiny_network), tmp_path)
    old, copy_out, calls = contents(tmp_path), huggingface.copy_out, []

    def failing(*args):
        calls.append(args)
        if len(calls) == 5:
            raise OSError("disk full")
        return copy_out(*args)

    monkeypatch.setattr(huggingface, "copy_out", failing)
    with pytest.raises(OSError, match="disk full"):
        save(Model(tiny_network), tmp_path)
    assert contents(tmp_path) == old
    calls.clear()
    with pytest.raises(OSError, match="disk full"):
        save(Model(tiny_network), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_a_killed_save_left_is_cleared(saved_folder):
    (saved_folder / ".saving-abc").mkdir()
    (saved_folder / ".saving-abc" / "model.safetensors").write_bytes(b"half")
    save(load(saved_folder), saved_folder)
    assert not list(saved_folder.glob(".saving-*"))


def test_shards_are_replaced_by_the_one_file(saved_folder):
    model = load(saved_folder)
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json"):
        (saved_folder / name).write_text("old")
    save(model, saved_folder)
    assert not list(saved_folder.glob("model-*"))
    assert not list(saved_folder.glob("*.index.json"))


def test_saving_into_a_file_is_an_error(tiny_network, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="must be a folder"):
        save(Model(tiny_network), tmp_path / "file")


def test_what_no_family_describes_goes_to_orbax_only(tmp_path):
    config = ModelConfig(
        vocab_size=8,
        embed_dim=8,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        mlp_dim=8,
        max_positions=16,
        embed_scale=3.0,
        layer_types=("full", "sliding"),
        sliding_window=4,
        sliding_rope=Rope(5.0, fraction=0.5),
    )
    network = random_network(config, "bfloat16")
    with pytest.raises(CheckpointError, match="Orbax"):
        save(Model(network), tmp_path / "a")
    assert not (tmp_path / "a").exists()
    save_orbax(Model(network), tmp_path / "b")
    assert_same_network(load(tmp_path / "b", dtype="bfloat16").network, network)
    assert load(tmp_path / "b", max_positions=9).config.max_positions == 9


def test_orbax_weights_of_another_shape_are_listed(tiny_network, tmp_path):
    save_orbax(Model(tiny_network), tmp_path)
    raw = json.loads((tmp_path / "network.json").read_text())
    (tmp_path / "network.json").write_text(json.dumps(raw | {"vocab_size": 50}))
    with pytest.raises(CheckpointError, match=r"(?s)embed.*\(48, 16\), not \(50, 16\).*head"):
        load(tmp_path)


@pytest.mark.parametrize("change", [{"vocab_size": "x"}, {"type": "Other"}, {"unheard_of": 1}])
def test_an_orbax_config_that_makes_no_sense_is_an_error(change, tiny_network, tmp_path):
    save_orbax(Model(tiny_network), tmp_path)
    raw = json.loads((tmp_path / "network.json").read_text())
    (tmp_path / "network.json").write_text(json.dumps(raw | change))
    with pytest.raises(CheckpointError, match=r"network\.json does not describe a network"):
        load(tmp_path)


def test_an_orbax_config_of_something_else_is_an_error(tiny_network, tmp_path):
    save_orbax(Model(tiny_network), tmp_path)
    (tmp_path / "network.json").write_text('{"type": "Rope"}')
    with pytest.raises(CheckpointError, match=r"network\.json must describe a ModelConfig.* Rope"):
        load(tmp_path)


def test_a_damaged_orbax_folder_is_an_error(tiny_network, tmp_path):
    save_orbax(Model(tiny_network), tmp_path)
    for path in (tmp_path / "params").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:7])
    with pytest.raises(CheckpointError, match="cannot be read as an Orbax folder"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["{", "[]", "\ufeff", ""])
def test_damaged_settings_are_an_error_that_names_the_file(name, text, saved_folder):
    (saved_folder / name).write_text(text)
    with pytest.raises(CheckpointError, match=name):
        load(saved_folder)


def test_weights_that_do_not_fit_the_config_are_an_error(saved_folder):
    raw = json.loads((saved_folder / "config.json").read_text())
    (saved_folder / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 1}))
    with pytest.raises(CheckpointError, match=r"unknown: model\.layers\.1\.mlp"):
        load(saved_folder)


def test_a_folder_without_a_model_says_what_it_has(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"holds no model.*found notes\.txt"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match=r"is a file; give the folder"):
        load(tmp_path / "notes.txt")


@pytest.mark.parametrize("place", ["", "model.tflite"])
def test_a_file_of_litert_says_what_decodes_it(tmp_path, place):
    (tmp_path / "model.tflite").write_bytes(b"")
    said = f"jaxspec generate --runtime litert {tmp_path / 'model.tflite'}"
    with pytest.raises(CheckpointError, match=re.escape(said)):
        load(tmp_path / place)


@pytest.mark.parametrize("place", ["checkpoints", "jaxspec/checkpoints"])
def test_shipped_models_are_found_by_name(place, tmp_path, monkeypatch, tiny_network):
    """In the repository they lie next to the package, in an installed one inside it."""
    monkeypatch.setattr("jaxspec.checkpoint.folder._PACKAGE", tmp_path / "jaxspec")
    save(Model(tiny_network), tmp_path / place / "tiny")
    (tmp_path / place / "notes").mkdir()
    config = tiny_network.config.replace(
        num_layers=1,
        layer_types=("full",),
        sliding_window=None,
        qk_norm=False,
        out_bias=False,
        mlp_bias=False,
    )
    head = EagleHead(init_eagle_params(config, False, jax.random.key(0)), config, bias=False)
    save_eagle(head, tmp_path / place / "tiny-head")
    assert shipped_models().keys() == {"tiny"}
    assert load("tiny").name == "tiny"
    assert shipped_heads().keys() == {"tiny-head"}
    again = load_eagle("tiny-head", tiny_network)
    jax.tree.map(np.testing.assert_array_equal, again.params, head.params)
    with pytest.raises(CheckpointError, match=r"load_eagle\('tiny-head', model\)"):
        load("tiny-head")
    with pytest.raises(CheckpointError, match=r"nor a shipped head .* \(shipped: tiny-head\)"):
        load_eagle("other-head", tiny_network)
    with pytest.raises(CheckpointError, match=r"nor a shipped model.*shipped: tiny"):
        load("tinny")


def hub_that_holds(folder, monkeypatch):
    """Puts a folder in place of every repository; returns the hub's module and what was asked."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    calls = []

    def snapshot_download(hub_id, revision, allow_patterns):
        calls.append((hub_id, allow_patterns) if revision is None else (hub_id, revision))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return huggingface_hub, calls


def test_a_kind_of_head_that_there_is_not_is_refused():
    with pytest.raises(CheckpointError, match=r"kind must be one of .*'dflash'.*got 'medusa'"):
        find_head("demo-eagle", "medusa")


def test_a_head_is_fetched_by_its_hub_id(monkeypatch, tmp_path):
    huggingface_hub, calls = hub_that_holds(tmp_path, monkeypatch)
    assert find_head("someone/a-head") == tmp_path
    ((hub_id, patterns),) = calls
    assert hub_id == "someone/a-head"
    shards = ["model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    expected = ["config.json", "model.safetensors", *shards, "pytorch_model.bin", "tree.json"]
    unneeded = ["optimizer.bin", "train.py"]
    filtered = huggingface_hub.utils.filter_repo_objects
    assert list(filtered([*expected, *unneeded], allow_patterns=patterns)) == expected


def test_a_hub_id_is_fetched_without_what_is_not_needed(saved_folder, monkeypatch):
    huggingface_hub, calls = hub_that_holds(saved_folder, monkeypatch)
    assert load("someone/something").name == "someone/something"
    ((hub_id, patterns),) = calls
    assert hub_id == "someone/something"
    wanted = huggingface_hub.utils.filter_repo_objects(
        [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "chat_template.jinja",
            "consolidated.safetensors",
            "original/model.safetensors",
            "pytorch_model.bin",
            "run_me.py",
        ],
        allow_patterns=patterns,
    )
    assert list(wanted) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "chat_template.jinja",
    ]


def test_a_revision_is_asked_of_the_hub_alone(saved_folder, tiny_network, monkeypatch):
    _, calls = hub_that_holds(saved_folder, monkeypatch)
    assert load("someone/something", revision="v1").name == "someone/something"
    for loader in (load_eagle, load_dflash):
        with pytest.raises(CheckpointError):  # it holds a model, no head
            loader("someone/a-head", tiny_network, revision="v2")
    assert calls == [("someone/something", "v1"), *[("someone/a-head", "v2")] * 2]
    for here in (saved_folder, "demo", "demo-eagle"):
        for loader in (load, lambda *given, **named: load_eagle(given[0], tiny_network, **named)):
            with pytest.raises(CheckpointError, match=f"revision: got 'v1', but {here} lies on"):
                loader(here, revision="v1")
    assert len(calls) == 3


def test_a_revision_that_is_not_there_is_named(monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    from huggingface_hub.errors import RevisionNotFoundError

    def snapshot_download(hub_id, **_):
        raise RevisionNotFoundError("404", response=SimpleNamespace(headers={}, request=None))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointError, match="revision: a/b has no branch, tag or commit 'v9'"):
        load("a/b", revision="v9")


@pytest.mark.parametrize("has_card", [False, True])
def test_a_model_is_pushed_to_the_hub(has_card, tiny_network, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    made, pushed = [], {}

    def create_repo(repo_id, private, exist_ok):
        made.append((repo_id, private, exist_ok))
        return f"https://hub/{repo_id}"

    # What another model left: a reader would take its weights, or find the index in the way.
    before = ["model.safetensors.index.json", "model-00001-of-00002.safetensors", "notes.txt"]
    before += ["additional_chat_templates/rag.jinja", "pytorch_model.bin"]

    def upload_folder(repo_id, folder_path, ignore_patterns, delete_patterns):
        filtered = huggingface_hub.utils.filter_repo_objects
        names = filtered(contents(Path(folder_path)), ignore_patterns=ignore_patterns)
        gone = set(filtered(before, allow_patterns=delete_patterns))
        pushed[repo_id] = set(names), gone, load(folder_path).network

    monkeypatch.setattr(huggingface_hub, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub, "file_exists", lambda repo_id, name: has_card)
    monkeypatch.setattr(huggingface_hub, "upload_folder", upload_folder)
    assert Model(tiny_network).push_to_hub("me/tiny", private=True) == "https://hub/me/tiny"
    assert made == [("me/tiny", True, True)]
    names, gone, network = pushed["me/tiny"]
    assert gone == {*before} - {"notes.txt", "pytorch_model.bin"}
    expected = {"config.json", "generation_config.json", "model.safetensors"}
    assert names == (expected if has_card else expected | {"README.md"})
    assert_same_network(network, tiny_network)
    with pytest.raises(CheckpointError, match="repo_id must be owner/name, got 'tiny'"):
        Model(tiny_network).push_to_hub("tiny")


def test_a_hub_that_refuses_says_so(tiny_network, monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    from huggingface_hub.errors import HfHubHTTPError

    def create_repo(*_, **__):
        raise HfHubHTTPError("403", response=SimpleNamespace(headers={}, request=None))

    monkeypatch.setattr(huggingface_hub, "create_repo", create_repo)
    with pytest.raises(CheckpointError, match=r"me/tiny cannot be written to .*hf auth login"):
        Model(tiny_network).push_to_hub("me/tiny")


def test_the_hub_out_of_reach_is_an_error_that_says_so(saved_folder, tmp_path):
    pytest.importorskip("huggingface_hub")
    program = (
        "from jaxspec.checkpoint import CheckpointError, load\n"
        f"model = load({str(saved_folder)!r})\n"
        "for call in (load, model.push_to_hub):\n"
        "    try:\n"
        "        call('someone/something')\n"
        "    except CheckpointError as error:\n"
        "        print(error)\n"
    )
    # A port that nothing listens on: what a machine without a network sees, but at once.
    away = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **away, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.stdout.count("Hub cannot be reached") == 2, finished.stderr
