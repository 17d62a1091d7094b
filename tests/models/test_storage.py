"""Forms in which matrices are kept: what is lost, what is not, and who may ask for them."""

import dataclasses
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec.checkpoint import load_eagle, save_orbax
from jaxspec.checkpoint.eagle import save_eagle
from jaxspec.core.masks import causal
from jaxspec.drafters import LoadedDrafter
from jaxspec.models import Network
from jaxspec.models.storage import STORAGES, kept_like, stored_as, unscaled, widened
from tests.laws.drafters import DRAFTERS, marked
from tests.laws.drafters import network as drafting_target
from tests.models.families import tiny

TEXT = np.arange(12) % 7


def logits(network: Network) -> np.ndarray:
    def read(network):
        hidden = network.forward(jnp.asarray(TEXT), jnp.arange(12), causal(12), None)
        return network.unembed(hidden.features)

    return np.asarray(jax.jit(read)(network))


def stored(network: Network, storage: str) -> Network:
    return dataclasses.replace(network, params=stored_as(network.params, storage))


@pytest.fixture(params=["llama", "gemma3", "qwen2_moe"])
def network(request) -> Network:
    """Tied and own heads, experts, a shared one among them; weights that bfloat16 holds."""
    made = tiny(request.param)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), made.params)
    return dataclasses.replace(made, params=rounded)


def test_bfloat16_matrices_are_multiplied_as_the_numbers_that_they_are(network):
    narrow = stored(network, "bfloat16")
    assert narrow.dtype == jnp.float32
    assert narrow.params["embed"]["embedding"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(logits(narrow), logits(network))
    jax.tree.map(np.testing.assert_array_equal, widened(narrow).params, network.params)


def test_int8_is_the_network_of_the_numbers_that_it_stands_for(network):
    whole = stored(network, "int8")
    np.testing.assert_allclose(logits(whole), logits(widened(whole)), rtol=1e-4, atol=1e-4)
    assert not np.array_equal(logits(whole), logits(network))


def test_what_int8_stands_for_becomes_the_same_integers_again(network):
    once = stored_as(network.params, "int8")
    jax.tree.map(np.testing.assert_array_equal, stored_as(unscaled(once), "int8"), once)


def test_each_output_channel_is_off_by_half_a_step_at_most(network):
    whole = stored_as(network.params, "int8")["layer_0"]["attention"]
    for name, axes in (("qkv", (0,)), ("out", (0, 1, 2))):
        kernel = network.params["layer_0"]["attention"][name]["kernel"]
        step = jnp.expand_dims(whole[name]["scale"], axes)
        assert jnp.max(jnp.abs(whole[name]["kernel"] * step - kernel) / step) <= 0.5 + 1e-5
        np.testing.assert_allclose(127 * step, jnp.max(jnp.abs(kernel), axes, keepdims=True), 1e-4)


def test_a_channel_of_zeros_stays_one():
    params = stored_as({"fc": {"kernel": jnp.zeros((3, 2))}}, "int8")
    assert not jnp.any(params["fc"]["kernel"])
    assert jnp.all(jnp.isfinite(params["fc"]["scale"]))


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("save", [jaxspec.save, save_orbax])
def test_a_model_is_the_same_after_saving(model, storage, save, tmp_path):
    kept = dataclasses.replace(model, network=stored(model.network, storage))
    save(kept, tmp_path)
    again = jaxspec.load(tmp_path, weights=storage)
    jax.tree.map(np.testing.assert_array_equal, again.params, kept.params)
    assert jax.tree.map(jnp.dtype, again.params) == jax.tree.map(jnp.dtype, kept.params)


@pytest.mark.parametrize("save", [jaxspec.save, save_orbax])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_int8_in_a_narrow_network_is_the_same_after_saving(model, dtype, save, tmp_path):
    save(model, tmp_path / "exact")
    kept = jaxspec.load(tmp_path / "exact", dtype, weights="int8")
    save(kept, tmp_path / "kept")
    again = jaxspec.load(tmp_path / "kept", dtype, weights="int8")
    jax.tree.map(np.testing.assert_array_equal, again.params, kept.params)
    assert jax.tree.map(jnp.dtype, again.params) == jax.tree.map(jnp.dtype, kept.params)


def test_a_head_follows_its_target(tmp_path):
    target = jaxspec.load("demo", "float32", weights="bfloat16").network
    head = load_eagle("demo-eagle", target)
    assert head.params["fc"]["kernel"].dtype == jnp.bfloat16
    plain = load_eagle("demo-eagle", target, "float32")
    jax.tree.map(np.testing.assert_array_equal, widened(head).params, plain.params)
    whole = dataclasses.replace(head, params=stored_as(head.params, "int8"))
    save_eagle(whole, tmp_path)
    again = load_eagle(tmp_path, stored(target, "int8"))
    jax.tree.map(np.testing.assert_array_equal, again.params, whole.params)


def rounded(holder):
    """A network or head in int8; drafters without weights as they are."""
    params = getattr(holder, "params", None)
    return (
        holder if params is None else dataclasses.replace(holder, params=stored_as(params, "int8"))
    )


@lru_cache
def decoded(name: str | None) -> list[list[int]]:
    """Tokens of a rounded target, whose drafts are rounded too; by the name of the drafter."""
    target, drafter = rounded(drafting_target(24)), None
    if name is not None:
        drafter = LoadedDrafter(DRAFTERS[name].make(), rounded(DRAFTERS[name].draft(target)))
    prompts, config = [[3, 5, 3, 5, 3], [7] * 9], jaxspec.GenerationConfig(max_new_tokens=12)
    rows = jaxspec.generate(jaxspec.Model(target), prompts, config, drafter)
    return [row.tokens.tolist() for row in rows]


@pytest.mark.parametrize("name", marked(DRAFTERS))
def test_drafts_are_exact_of_the_rounded_target(name):
    assert decoded(name) == decoded(None)


def test_a_head_that_bfloat16_would_round_stays_float32():
    params = {"fc": {"kernel": jnp.full((2, 2), 1.0 + 2.0**-20)}}
    target = {"embed": {"embedding": jnp.zeros((2, 2), jnp.bfloat16)}}
    assert kept_like(params, target)["fc"]["kernel"].dtype == jnp.float32


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"weights": "int4"}, "weights must be one of float32, bfloat16, int8, files, got 'int4'"),
        ({"dtype": "bfloat16", "weights": "float32"}, "wider than dtype='bfloat16'"),
    ],
)
def test_forms_that_do_not_exist_are_refused(asked, said):
    with pytest.raises(ValueError, match=said):
        jaxspec.load("demo-draft", **asked)
