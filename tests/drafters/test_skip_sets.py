"""Sets of sub-layers by index, the published ones, and those in files."""

import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import GenerationConfig, generate
from jaxspec.checkpoint import Model, hub
from jaxspec.core.forms import exchanged
from jaxspec.core.masks import causal
from jaxspec.drafters import LayerSkip, published_skips
from jaxspec.drafters.skip_sets import (
    PUBLISHED_SKIPS,
    skip_settings,
    skipped_layers,
    skips_of,
    skips_of_bits,
)
from jaxspec.models import ModelConfig, Network, Skips, init_params

DEPTHS = {"llama-2-13b": 40, "llama-2-13b-chat": 40, "codellama-13b": 40, "llama-2-70b": 80}
# Numbers of attention and MLP sub-layers that are skipped, from the paper's tables.
SIZES = {
    "llama-2-13b": (24, 10),
    "llama-2-13b-chat": (24, 10),
    "codellama-13b": (22, 12),
    "llama-2-70b": (47, 37),
}


def deep_model(num_layers: int) -> Model:
    """As deep as the real ones, and next to nothing wide."""
    config = ModelConfig(
        vocab_size=16,
        embed_dim=4,
        num_layers=num_layers,
        num_heads=1,
        num_kv_heads=1,
        head_dim=4,
        mlp_dim=4,
        max_positions=64,
    )
    return Model(Network(init_params(config, jax.random.key(0)), config))


@pytest.mark.slow
@pytest.mark.parametrize("depth", [40, 80])
def test_published_sets_skip_what_they_name(depth):
    """In a model of their depth: as a set says, that many products are absent."""
    target = deep_model(depth).network

    def num_products(skip: Skips | None) -> int:
        def run(network):
            return network.forward(jnp.arange(2), jnp.arange(2), causal(2), None, skip=skip)

        with exchanged({}):  # native code has no products to count
            lowered = jax.jit(run).lower(target)
        return lowered.as_text().count("stablehlo.dot_general")

    names = [name for name in PUBLISHED_SKIPS if DEPTHS[name] == depth]
    assert names
    whole = num_products(None)
    for name in names:
        skip = published_skips(name, depth)
        assert (sum(skip.attention), sum(skip.mlp)) == SIZES[name]
        assert num_products(skip) == whole - 4 * SIZES[name][0] - 2 * SIZES[name][1]


@pytest.mark.slow
@pytest.mark.parametrize("name", DEPTHS)
def test_published_sets_draft_losslessly(name):
    model, config = deep_model(DEPTHS[name]), GenerationConfig(max_new_tokens=6)
    drafter = LayerSkip(published_skips(name), num_speculative_tokens=2, threshold=0.0)
    (plain,), (drafted,) = (generate(model, [1, 2, 3], config, d) for d in (None, drafter))
    assert drafted.tokens.tolist() == plain.tokens.tolist()


def test_all_published_sets_are_here():
    assert set(PUBLISHED_SKIPS) == set(DEPTHS)


@pytest.mark.parametrize("name", PUBLISHED_SKIPS)
def test_a_published_set_is_refused_at_another_depth(name):
    with pytest.raises(ValueError, match=f"{name!r} is for a model of {DEPTHS[name]} layers.*12"):
        published_skips(name, 12)
    with pytest.raises(ValueError, match=f"must have 2 entries.* got {DEPTHS[name]}"):
        generate(deep_model(2), [1], GenerationConfig(4), LayerSkip(published_skips(name)))


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="no published set 'llama-2-7b'; there are llama-2-13b,"):
        published_skips("llama-2-7b")
    with pytest.raises(ValueError, match=r"no published set 'a{76}\.\.\.; there are"):
        published_skips("a" * 10**7)


@pytest.mark.parametrize(
    ("attention", "mlp", "message"),
    [
        ([4], [], r"attention must name layers in 0..3 to skip, got 4"),
        ([], [-1], r"mlp must name layers in 0..3 to skip, got -1"),
        ([2, 2], [], "attention names layer 2 twice"),
        (range(10**9), [], "attention must name layers in 0..3 to skip, got 4"),
    ],
)
def test_indices_out_of_place_are_refused(attention, mlp, message):
    with pytest.raises(ValueError, match=message):
        skips_of(4, attention, mlp)


@pytest.mark.parametrize("num_layers", [10**7, 0])
def test_a_depth_that_no_model_has_is_refused(num_layers):
    with pytest.raises(ValueError, match="num_layers must be"):
        skips_of(num_layers, [], [])


def test_a_search_that_is_no_path_is_refused():
    with pytest.raises(ValueError, match="source must be a path: not empty, without NUL"):
        LayerSkip.read("a\0")


def test_indices_and_sets_are_two_ways_to_say_the_same():
    skip = skips_of(4, [3, 0], [])  # all attention may be skipped as well
    assert skip == Skips((True, False, False, True), (False,) * 4)
    assert skips_of(4, **skipped_layers(skip)) == skip


def test_a_drafter_is_read_from_a_file(tmp_path):
    path = tmp_path / "skips.json"
    written = {"num_layers": 3, "attention": [0, 1, 2], "mlp": [1], "other": "ignored"}
    path.write_text(json.dumps({**written, "num_speculative_tokens": 5, "threshold": 0.4}))
    skip = skips_of(3, [0, 1, 2], [1])
    assert LayerSkip.read(path) == LayerSkip(skip, 5, threshold=0.4, adaptive=None)
    assert LayerSkip.read(path, threshold=0.1).threshold == 0.1
    assert LayerSkip.read(tmp_path) == LayerSkip.read(path)

    path.write_text(json.dumps(written))
    with pytest.raises(ValueError, match="no result of `jaxspec tune skips`: it has no 'num_spec"):
        skip_settings(path)
    path.write_text(
        json.dumps({**written, "num_speculative_tokens": 5, "threshold": 0.4, "mlp": [3]})
    )
    with pytest.raises(ValueError, match=r"skips.json: mlp must name layers in 0..2"):
        skip_settings(path)
    with pytest.raises(ValueError, match="does not exist"):
        skip_settings(tmp_path / "other.json")


def test_a_set_that_comes_with_the_package_is_read_by_name(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints" / "tiny-skips"
    folder.mkdir(parents=True)
    found = {"num_layers": 2, "attention": [0], "mlp": [], "threshold": 0.4}
    (folder / "skips.json").write_text(json.dumps({**found, "num_speculative_tokens": 3}))
    monkeypatch.setattr("jaxspec.checkpoint.folder._PACKAGE", tmp_path / "jaxspec")
    assert LayerSkip.read("tiny-skips").skip == skips_of(2, [0], [])
    assert "tiny-skips" not in hub.shipped_models()


def test_a_vector_names_sub_layers_or_layers():
    assert skips_of_bits([1, 0, 0, 1], 2) == Skips((True, False), (False, True))
    assert skips_of_bits(np.array([1, 0]), 2) == skips_of_bits([1, 0, 1, 0], 2)
    with pytest.raises(ValueError, match=r"must have 4 entries .* or 2 for the layers, got 3"):
        skips_of_bits([1, 0, 0], 2)
    with pytest.raises(ValueError, match=r"0 or 1 for each, got \[2, 0\]"):
        skips_of_bits([2, 0], 2)
    with pytest.raises(ValueError, match="bits must be of at most 8192 entries, got 1000000000"):
        skips_of_bits(np.broadcast_to(0, 10**9), 2)
    with pytest.raises(ValueError, match="bits must be a sequence, got None"):
        inspect.unwrap(skips_of_bits)(None, 2)
    with pytest.raises(ValueError, match="num_layers must be a whole number, got None"):
        inspect.unwrap(skips_of_bits)([0], None)
