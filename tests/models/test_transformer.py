import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core import masks
from jaxspec.core.cache import append
from jaxspec.core.forms import exchanged
from jaxspec.core.types import KVCache
from jaxspec.models import Network, Skips, init_params, lookup_rows, param_shapes
from tests.models.families import FAMILIES, LLAMA, tiny
from tests.models.reference import reference_logits

TEXT = np.array([3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 3])
CLOSE = {"rtol": 5e-5, "atol": 5e-5}

_forward = jax.jit(Network.forward, static_argnames=("taps", "skip"))


def read(network: Network, tokens, start=0, cache=None, **options):
    """A compiled causal pass over consecutive tokens."""
    count = len(tokens)
    return _forward(
        network, np.asarray(tokens), start + np.arange(count), masks.causal(count), cache, **options
    )


@jax.jit
def cached(network: Network, tokens) -> KVCache:
    """A cache of these tokens, with rubbish in the places that mean nothing."""
    cache = network.empty_cache(16)
    cache = KVCache(jax.tree.map(lambda leaf: leaf + 7, cache.layers), cache.length)
    count = len(tokens)
    hidden = network.forward(tokens, jnp.arange(count), masks.causal(count), None)
    return append(cache, hidden.new_kv, count)


@jax.jit
def logits_of_tree(network: Network, prefix, tokens, depths, mask):
    """Logits of a tree's nodes after a cached prefix."""
    hidden = network.forward(tokens, len(prefix) + depths, mask, cached(network, prefix))
    return network.unembed(hidden.features)


def reference(network: Network, tokens) -> np.ndarray:
    return reference_logits(network.params, network.config, tokens)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_a_plain_loop(name):
    network = tiny(name)
    logits = network.unembed(read(network, TEXT).features)
    np.testing.assert_allclose(logits, reference(network, TEXT), **CLOSE)


@pytest.mark.parametrize("name", FAMILIES)
def test_after_a_cached_prefix_each_node_sees_its_own_branch_only(name):
    #   0 -> 1 -> 3
    #     -> 2 -> 4
    branches = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]
    mask = np.array([[node in branch for node in range(5)] for branch in branches])
    depths = np.array([len(branch) - 1 for branch in branches])
    tokens, network = np.array([7, 21, 22, 23, 24]), tiny(name)
    logits = logits_of_tree(network, TEXT[:7], tokens, depths, mask)
    for node, branch in enumerate(branches):
        alone = reference(network, np.concatenate([TEXT[:7], tokens[branch]]))
        np.testing.assert_allclose(logits[node], alone[-1], **CLOSE)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("split", [1, 11])
def test_where_the_prefix_ends_changes_nothing(name, split):
    network = tiny(name)
    rest = len(TEXT) - split
    logits = logits_of_tree(
        network, TEXT[:split], TEXT[split:], np.arange(rest), masks.causal(rest)
    )
    np.testing.assert_allclose(logits, reference(network, TEXT)[split:], **CLOSE)


def test_new_keys_and_values_are_those_of_a_whole_pass():
    network = tiny("gemma3")
    whole = read(network, TEXT).new_kv
    rest = read(network, TEXT[7:], 7, cached(network, TEXT[:7])).new_kv
    for layer, whole_layer in zip(rest, whole, strict=True):
        np.testing.assert_allclose(layer.keys, whole_layer.keys[:, :, 7:], **CLOSE)
        np.testing.assert_allclose(layer.values, whole_layer.values[:, 7:], **CLOSE)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_scratch_segment_equals_committed_places(name):
    network = tiny(name)
    cache = cached(network, TEXT[:5])
    middle = read(network, TEXT[5:9], 5, cache)
    mask = np.concatenate([np.ones((3, 4), bool), masks.causal(3)], axis=1)
    scratch = _forward(network, TEXT[9:], 9 + np.arange(3), mask, cache, scratch=middle.new_kv)
    logits = network.unembed(scratch.features)
    np.testing.assert_allclose(logits, reference(network, TEXT)[9:], **CLOSE)


def test_scratch_places_that_are_masked_are_not_seen():
    network, cache = tiny("llama"), cached(tiny("llama"), TEXT[:5])
    rubbish = jax.tree.map(lambda leaf: leaf + 100, read(network, TEXT[:4]).new_kv)
    mask = jnp.concatenate([jnp.zeros((3, 4), bool), masks.causal(3)], axis=1)
    hidden = network.forward(
        jnp.asarray(TEXT[5:8]), 5 + jnp.arange(3), mask, cache, scratch=rubbish
    )
    np.testing.assert_allclose(
        hidden.features, read(network, TEXT[5:8], 5, cache).features, **CLOSE
    )


def test_a_bidirectional_mask_lets_early_tokens_see_late_ones():
    network = tiny("llama")
    other = np.concatenate([TEXT[:-1], [60]])
    first = [
        _forward(network, text, np.arange(12), masks.bidirectional(12), None).features[0]
        for text in (TEXT, other)
    ]
    assert jnp.max(jnp.abs(first[0] - first[1])) > 1e-3


def test_nodes_that_see_nothing_stay_finite():
    network = tiny("gemma2")
    hidden = _forward(
        network, TEXT[:3], np.arange(3), np.zeros((3, 3), bool), network.empty_cache(4)
    )
    assert jnp.all(jnp.isfinite(hidden.features))


def test_taps_are_the_inputs_of_layers_in_the_order_asked():
    network = tiny("gemma3")
    hidden = read(network, TEXT, taps=(2, 0))
    chex.assert_shape(hidden.taps, (12, 2 * network.embed_dim))
    np.testing.assert_allclose(hidden.taps[:, 24:], network.embed(jnp.asarray(TEXT)), **CLOSE)
    # Nothing after layer 1's output remains when layer 2 is left out: the norm is all there is.
    everything_after = Skips((False, False, True), (False, False, True))
    short = read(network, TEXT, skip=everything_after)
    tapped = hidden.taps[:, :24]
    rms = jnp.sqrt(jnp.mean(tapped**2, axis=-1, keepdims=True) + network.config.norm_eps)
    scale = 1 + network.params["norm"]["scale"]
    np.testing.assert_allclose(tapped / rms * scale[None], short.features, **CLOSE)
    chex.assert_shape(read(network, TEXT).taps, (12, 0))


SKIPS = [
    Skips((True, False, False), (False, False, True)),
    Skips((True, True, True), (False, True, False)),
    Skips((False,) * 3, (True,) * 3),
]


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2_moe", "granite"])
@pytest.mark.parametrize("skip", SKIPS)
def test_static_and_traced_skips_agree(name, skip):
    network = tiny(name)
    static = read(network, TEXT, skip=skip).features
    arrays = Skips(*(jnp.asarray(entries, jnp.float32) for entries in skip))

    @jax.jit
    def traced(skip):
        return network.forward(TEXT, jnp.arange(12), masks.causal(12), None, skip=skip).features

    np.testing.assert_allclose(traced(arrays), static, **CLOSE)
    assert jnp.max(jnp.abs(static - read(network, TEXT).features)) > 1e-3
    bools = Skips(*(jnp.asarray(entries) for entries in skip))
    np.testing.assert_allclose(traced(bools), static, **CLOSE)


def test_skipping_everything_leaves_the_normed_embedding():
    network = tiny("llama")
    features = read(network, TEXT, skip=Skips((True,) * 3, (True,) * 3)).features
    embedded = np.asarray(network.embed(jnp.asarray(TEXT)))
    rms = np.sqrt((embedded**2).mean(-1, keepdims=True) + network.config.norm_eps)
    scale = np.asarray(network.params["norm"]["scale"])
    np.testing.assert_allclose(features, embedded / rms * scale, **CLOSE)


def test_statically_skipped_work_is_absent_from_the_program():
    network = tiny("llama")
    cache = cached(network, TEXT[:5])

    def products(skip):
        with exchanged({}):  # native code has no products to count
            lowered = jax.jit(Network.forward, static_argnames=("skip",)).lower(
                network, TEXT[5:], 5 + np.arange(7), masks.causal(7), cache, skip=skip
            )
        return lowered.as_text().count("stablehlo.dot_general")

    all_kept = products(None)
    in_attention, in_mlp = 6, 2  # qkv, two scores, two values, out; gate_up, down
    assert all_kept == 3 * (in_attention + in_mlp)
    assert products(SKIPS[0]) == all_kept - in_attention - in_mlp
    assert products(SKIPS[1]) == all_kept - 3 * in_attention - in_mlp


def test_a_skipped_attention_yields_zeros_to_commit():
    network = tiny("llama")
    hidden = read(network, TEXT, skip=SKIPS[0])
    kept = read(network, TEXT)
    assert not np.any(hidden.new_kv[0].keys)
    assert not np.any(hidden.new_kv[0].values)
    chex.assert_trees_all_equal_shapes_and_dtypes(hidden.new_kv, kept.new_kv)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("width", [1, 5])
def test_rows_mapped_together_equal_rows_alone(name, width):
    network = tiny(name)
    texts = np.stack([TEXT, TEXT[::-1], TEXT + 1])
    prefixes, rests = texts[:, : 12 - width], texts[:, 12 - width :]
    logits = jax.vmap(logits_of_tree, in_axes=(None, 0, 0, None, None))(
        network, prefixes, rests, np.arange(width), masks.causal(width)
    )
    for row, text in zip(logits, texts, strict=True):
        np.testing.assert_allclose(row, reference(network, text)[-width:], **CLOSE)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe"])
def test_half_precision_keeps_its_dtype_and_stays_close(name):
    wide = tiny(name)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), wide.params)
    network = Network(params, wide.config)
    hidden = read(network, TEXT[5:], 5, cached(network, TEXT[:5]))
    chex.assert_type([hidden.features, *jax.tree.leaves(hidden.new_kv)], jnp.bfloat16)
    logits = network.unembed(hidden.features)
    assert logits.dtype == jnp.float32
    exact = reference(network, TEXT)[5:]
    assert np.abs(logits - exact).mean() < 0.05 * np.abs(exact).mean()


@pytest.mark.parametrize("name", FAMILIES)
def test_param_shapes_describe_init_params(name):
    config = FAMILIES[name]
    params = init_params(config, jax.random.key(3), jnp.bfloat16)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, param_shapes(config, jnp.bfloat16))
    assert ("head" in params) != config.tied_head


def test_the_param_tree_is_the_documented_one():
    shapes = jax.tree.map(lambda leaf: leaf.shape, param_shapes(FAMILIES["llama with biases"]))
    assert shapes["embed"] == {"embedding": (61, 24)}
    assert shapes["head"] == {"kernel": (24, 61)}
    assert shapes["norm"] == {"scale": (24,)}
    assert shapes["layer_2"] == {
        "attention_norm": {"scale": (24,)},
        "attention": {
            "qkv": {"kernel": (24, 2, 4, 8), "bias": (2, 4, 8)},
            "out": {"kernel": (2, 2, 8, 24), "bias": (24,)},
        },
        "mlp_norm": {"scale": (24,)},
        "mlp": {
            "gate_up": {"kernel": (24, 2, 40), "bias": (2, 40)},
            "down": {"kernel": (40, 24), "bias": (24,)},
        },
    }
    sparse = jax.tree.map(lambda leaf: leaf.shape, param_shapes(FAMILIES["qwen3_moe"]))["layer_0"]
    assert sparse["attention"]["q_norm"] == sparse["attention"]["k_norm"] == {"scale": (8,)}
    assert sparse["experts"] == {
        "router": {"kernel": (24, 5)},
        "gate_up": {"kernel": (5, 24, 2, 12)},
        "down": {"kernel": (5, 12, 24)},
    }
    gemma = param_shapes(FAMILIES["gemma2"])["layer_0"]
    assert {"attention_post_norm", "mlp_post_norm"} < set(gemma)
    olmo = jax.tree.map(lambda leaf: leaf.shape, param_shapes(FAMILIES["olmo2"]))["layer_0"]
    assert set(olmo) == {"attention", "attention_post_norm", "mlp", "mlp_post_norm"}
    assert olmo["attention"]["q_norm"] == {"scale": (32,)}
    assert olmo["attention"]["k_norm"] == {"scale": (16,)}
    layers = param_shapes(FAMILIES["qwen2_moe"])
    assert "shared" not in layers["layer_0"]
    assert jax.tree.map(lambda leaf: leaf.shape, layers["layer_1"]["shared"]) == {
        "router": {"kernel": (24, 1)},
        "mlp": {"gate_up": {"kernel": (24, 2, 20)}, "down": {"kernel": (20, 24)}},
    }


def test_a_network_is_a_pytree_whose_equal_settings_never_compile_again():
    @jax.jit
    @chex.assert_max_traces(1)
    def features(network):
        return network.forward(TEXT, jnp.arange(12), masks.causal(12), None).features

    first = tiny("gemma2")
    leaves, treedef = jax.tree.flatten(first)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    rebuilt = jax.tree.unflatten(treedef, leaves)
    assert rebuilt.config is first.config
    fresh = Network(tiny("gemma2", seed=1).params, FAMILIES["gemma2"].replace())
    assert fresh.config is not first.config
    assert hash(fresh.config) == hash(first.config)
    features(first)
    features(rebuilt)
    features(fresh)


def test_gradients_reach_every_weight():
    network = tiny("qwen3_moe")

    def loss(params):
        rebuilt = Network(params, network.config)
        hidden = rebuilt.forward(TEXT, jnp.arange(12), masks.causal(12), None)
        return jnp.mean(rebuilt.unembed(hidden.features) ** 2)

    grads = jax.jit(jax.grad(jax.checkpoint(loss)))(network.params)
    assert all(jnp.any(leaf != 0) for leaf in jax.tree.leaves(grads))


def test_rows_of_a_table_are_looked_up_by_id():
    table = jnp.arange(12.0).reshape(4, 3)
    np.testing.assert_array_equal(lookup_rows(table, jnp.array([2, 0])), [[6, 7, 8], [0, 1, 2]])


def test_taps_and_skips_of_absent_layers_are_refused():
    network = tiny("llama")
    with pytest.raises(ValueError, match=r"taps must be layers in 0\.\.2, got 3"):
        read(network, TEXT, taps=(3,))
    with pytest.raises(ValueError, match=r"skip\.mlp must have 3 entries.*got 2"):
        read(network, TEXT, skip=Skips((False,) * 3, (True,) * 2))


def test_the_tiny_network_of_all_tests_is_a_llama(tiny_config, tiny_network):
    assert tiny_network.config is tiny_config
    assert tiny_config.replace(vocab_size=61, embed_dim=24) != LLAMA
