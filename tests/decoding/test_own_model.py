"""`Model.of`: a network of someone else's decodes like ours, and is refused where it cannot be."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxspec
from jaxspec import Deer, DraftModel, LayerSkip, Model, NoDraft, PromptLookup, check_model
from jaxspec.batch import Collector, rows_of
from jaxspec.batch import run as run_job
from jaxspec.checkpoint import save_orbax
from jaxspec.core.types import Hidden, KVCache, LayerKV, Params
from jaxspec.mobile import export
from jaxspec.models import Skips
from jaxspec.sharding import make_mesh, shard
from tests.decoding.own_network import OwnNetwork, greedy_by_full_passes, own_network
from tests.measure.models import filling_model

PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [7, 30], [4, 4, 9, 0, 4, 4]]
NEW_TOKENS = 20


@pytest.fixture(scope="module")
def own() -> Model:
    return Model.of(own_network(), max_positions=128)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [greedy_by_full_passes(own_network(), prompt, NEW_TOKENS) for prompt in PROMPTS]


def test_a_class_defined_again_is_another_program():
    """As a notebook's cell does; JAX 0.10.1 takes such classes for one."""

    def network_of(answer: int):
        @dataclasses.dataclass(frozen=True)
        class Constant(OwnNetwork):
            def unembed(self, features):
                return super().unembed(features) * 0 + jax.nn.one_hot(answer, self.vocab_size)

        settings = ["vocab_size", "embed_dim", "fault"]
        jax.tree_util.register_dataclass(Constant, ["weights"], settings)
        return Constant(own_network().weights, 31, 12)

    first, second = network_of(1), network_of(2)
    structures = [jax.tree.structure(Params(each, ())) for each in (first, second, first)]
    assert structures[0] != structures[1]
    assert structures[0] == structures[2]


def test_a_class_defined_again_is_checked_again():
    """Forty times, since JAX takes such classes for one only now and then."""
    settings = ["vocab_size", "embed_dim", "fault"]
    for time in range(40):

        class Mended(OwnNetwork):
            pass

        class Raises(OwnNetwork):
            def unembed(self, features):
                raise NotImplementedError(f"edited {time} times")  # noqa: B023

        for kind in (Mended, Raises):
            jax.tree_util.register_dataclass(kind, ["weights"], settings)
        Model.of(Mended(own_network().weights, 31, 12), max_positions=8)
        with pytest.raises(ValueError, match=f"NotImplementedError: edited {time} times"):
            Model.of(Raises(own_network().weights, 31, 12), max_positions=8)


@dataclasses.dataclass(frozen=True)
class ReadsALayer(NoDraft):
    """Asks for the inputs of the target's first layer."""

    taps = (0,)


@pytest.mark.parametrize(
    "drafter",
    [
        None,
        PromptLookup(),
        DraftModel.of(Model.of(own_network(1), max_positions=128), 3),
        DraftModel.of(Model.of(own_network(0), max_positions=128), paths=[(0,), (1,), (0, 0)]),
    ],
    ids=["plain", "lookup", "draft-model", "draft-tree"],
)
def test_greedy_output_is_that_of_full_passes(own, expected, drafter):
    result = jaxspec.generate(own, PROMPTS, drafter=drafter, max_new_tokens=NEW_TOKENS)
    assert [row.tokens.tolist() for row in result] == expected
    assert result.texts == [None] * len(PROMPTS)


def test_a_draft_model_of_the_same_weights_is_always_right(own):
    drafter = DraftModel.of(own, 3)
    result = jaxspec.generate(own, PROMPTS[0], drafter=drafter, max_new_tokens=NEW_TOKENS)
    assert result.metrics.tau == 4  # bonus token included


class NnxNetwork(nnx.Module):
    """One layer of attention as a Flax NNX module, which is a pytree as it is."""

    def __init__(self, vocab_size: int, width: int):
        self.vocab_size, self.embed_dim = vocab_size, width
        rngs = nnx.Rngs(0)
        self.tokens = nnx.Embed(vocab_size, width, rngs=rngs)
        self.places = nnx.Embed(64, width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)

    def forward(self, tokens, positions, mask, cache, *, scratch=None, taps=()):
        inputs = self.tokens(tokens) + self.places(positions)
        queries, keys, values = jnp.split(self.qkv(inputs), 3, axis=1)
        parts, visible = [LayerKV(keys.T[None], values[None])], [mask]
        if scratch is not None:
            parts.insert(0, scratch[0])
        if cache is not None:
            parts.insert(0, cache.layers[0])
            filled = jnp.arange(cache.layers[0].values.shape[1]) < cache.length
            visible.insert(0, jnp.broadcast_to(filled[None], (len(tokens), len(filled))))
        keys = jnp.concatenate([part.keys[0] for part in parts], axis=1)
        values = jnp.concatenate([part.values[0] for part in parts], axis=0)
        scores = jnp.where(jnp.concatenate(visible, axis=1), queries @ keys, -1e9)
        features = inputs + jax.nn.softmax(scores, axis=-1) @ values
        return Hidden(features, jnp.zeros((len(tokens), 0)), (parts[-1],))

    def unembed(self, features):
        return self.tokens.attend(features)

    def empty_cache(self, capacity):
        width = self.embed_dim
        layer = LayerKV(jnp.zeros((1, width, capacity)), jnp.zeros((1, capacity, width)))
        return KVCache((layer,), jnp.int32(0))


def test_a_module_of_nnx_decodes():
    network = NnxNetwork(19, 8)
    report = check_model(network, progress=False)
    assert report.holds, str(report)
    model = Model.of(network, max_positions=64)
    result = jaxspec.generate(model, [1, 2, 3], drafter=DraftModel.of(model, 2), max_new_tokens=8)
    assert result[0].tokens.tolist() == greedy_by_full_passes(network, [1, 2, 3], 8)


def test_a_diffusion_model_drafts_for_it():
    target = Model.of(own_network(vocab_size=256), max_positions=128)
    drafter = Deer.of(filling_model("masked", None), block=3)
    result = jaxspec.generate(target, PROMPTS[0], drafter=drafter, max_new_tokens=8)
    assert result[0].tokens.tolist() == greedy_by_full_passes(target.network, PROMPTS[0], 8)


def test_stream_gives_the_same_tokens(own, expected):
    steps = jaxspec.stream(own, PROMPTS[0], drafter=PromptLookup(), max_new_tokens=NEW_TOKENS)
    assert np.concatenate([step.tokens for step in steps]).tolist() == expected[0]


def test_stop_ids_end_a_text(expected):
    stop = expected[0][5]
    model = Model.of(own_network(), max_positions=128, stop_token_ids=[stop], name="mine")
    (row,) = jaxspec.generate(model, PROMPTS[0], max_new_tokens=NEW_TOKENS)
    assert row.tokens.tolist() == expected[0][: expected[0].index(stop) + 1]
    assert row.finish_reason == "stop_token"
    assert "mine" in repr(model)
    assert "OwnNetwork" in repr(model)


def test_texts_end_at_max_positions():
    model = Model.of(own_network(), max_positions=12)
    (row,) = jaxspec.generate(model, PROMPTS[0], max_new_tokens=NEW_TOKENS)
    assert len(row.tokens) == 4
    with pytest.raises(ValueError, match="context of OwnNetwork holds 12"):
        jaxspec.generate(model, list(range(12)))


def test_score_is_that_of_a_full_pass(own):
    logits = jaxspec.score(own, PROMPTS[0]).logits
    network = own_network()
    size = len(PROMPTS[0])
    mask = jnp.tril(jnp.ones((size, size), bool))
    hidden = network.forward(jnp.asarray(PROMPTS[0]), jnp.arange(size), mask, None)
    np.testing.assert_allclose(logits, network.unembed(hidden.features), rtol=1e-4, atol=1e-4)


def test_compare_measures_it(own):
    drafters = {"lookup": PromptLookup()}
    found = jaxspec.compare(own, PROMPTS[:1], drafters, max_new_tokens=8, repeats=1, progress=False)
    assert [row.num_identical for row in found.rows] == [1, 1]
    assert (found.model, found.dtype) == ("OwnNetwork", "float32")


def test_the_laws_of_drafters_hold_over_it(own):
    report = jaxspec.check_drafter(PromptLookup(2), own, num_samples=256, progress=False)
    assert report.holds, str(report)


def test_one_of_ours_is_a_model_again(tiny_network, tiny_config):
    assert Model.of(tiny_network).max_positions == tiny_config.max_positions
    assert not Model.of(tiny_network).is_own
    with pytest.raises(ValueError, match="max_positions must be at most the network's 256"):
        Model.of(tiny_network, max_positions=257)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda model, folder: jaxspec.save(model, folder), "network of your own"),
        (lambda model, folder: save_orbax(model, folder), "network of your own"),
        (lambda model, folder: export(model, folder), "network of your own"),
        (lambda model, folder: jaxspec.denoise(model, [1, 2]), "network of your own"),
        (
            lambda model, folder: run_job(model, rows_of(["a"]), Collector()),
            "network of your own",
        ),
        (lambda model, folder: Deer.of(model), "network of your own"),
        (lambda model, folder: jaxspec.load_eagle("demo-eagle", model), "network of your own"),
        (
            lambda model, folder: jaxspec.generate(model, [1], drafter=ReadsALayer()),
            "ReadsALayer reads the inputs of layers",
        ),
        (
            lambda model, folder: jaxspec.generate(
                model, [1], drafter=LayerSkip(Skips((True,), (True,)))
            ),
            "LayerSkip leaves out layers",
        ),
        (lambda model, folder: jaxspec.generate(model, "text"), "has no tokenizer"),
    ],
)
def test_what_it_cannot_do_is_refused(own, tmp_path, call, said):
    with pytest.raises(ValueError, match=said):
        call(own, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("member", ["vocab_size", "embed_dim", "forward", "unembed", "empty_cache"])
def test_a_missing_member_is_named(member):
    network = own_network()
    names = ("vocab_size", "embed_dim", "forward", "unembed", "empty_cache")
    rest = {name: getattr(network, name) for name in names if name != member}
    with pytest.raises(ValueError, match=f"has no `{member}`; it must be"):
        Model.of(SimpleNamespace(**rest), max_positions=8)


class Unregistered(OwnNetwork):
    """A subclass, which JAX does not know."""


@dataclasses.dataclass(frozen=True)
class Renamed(OwnNetwork):
    """One of whose settings is a leaf."""


jax.tree_util.register_dataclass(Renamed, ["weights", "fault"], ["vocab_size", "embed_dim"])


class WrongCache(OwnNetwork):
    """Keys and values of the cache lie the other way round."""

    def empty_cache(self, capacity):
        cache = super().empty_cache(capacity)
        return cache._replace(
            layers=tuple(
                layer._replace(keys=jnp.moveaxis(layer.keys, 1, 2)) for layer in cache.layers
            )
        )


class HalfCache(OwnNetwork):
    """The cache has another dtype than keys and values of a pass."""

    def empty_cache(self, capacity):
        return jax.tree.map(
            lambda leaf: leaf.astype(jnp.bfloat16) if leaf.ndim else leaf,
            super().empty_cache(capacity),
        )


class Raises(OwnNetwork):
    """Knows no scratch."""

    def forward(self, tokens, positions, mask, cache, *, scratch=None, taps=()):
        if scratch is not None:
            raise NotImplementedError("no scratch here")
        return super().forward(tokens, positions, mask, cache)


for kind in (WrongCache, HalfCache, Raises):
    jax.tree_util.register_dataclass(kind, ["weights"], ["vocab_size", "embed_dim", "fault"])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Unregistered, "no pytree"),
        (Renamed, "leaves of Renamed must be arrays, and one is ''"),
        (WrongCache, r"gives keys of shape \[1, 11, 4\] in layer 0; for 11 places"),
        (HalfCache, r"which its cache cannot hold; they must be \[1, 4, 3\] bfloat16"),
        (Raises, "over a cache and scratch fails: NotImplementedError: no scratch here"),
    ],
)
def test_what_does_not_fit_the_protocol_is_said(kind, said):
    network = own_network()
    with pytest.raises(ValueError, match=said):
        Model.of(kind(network.weights, 31, 12), max_positions=8)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "max_positions: OwnNetwork does not say"),
        ({"max_positions": 0}, "max_positions must be at least 1, got 0"),
        ({"max_positions": "8"}, "max_positions must be a whole number, got '8'"),
        ({"max_positions": 8, "stop_token_ids": ["a"]}, "must be a whole number, got 'a'"),
        ({"max_positions": 8, "name": 5}, "name must be a text, got 5"),
        ({"max_positions": 8, "stop_token_ids": [31]}, r"ids\[0\] must be in \[0, 31\), got 31"),
        ({"max_positions": 8, "stop_token_ids": 3}, "stop_token_ids must be a sequence, got 3"),
        ({"max_positions": 8, "tokenizer": "demo"}, r"tokenizer must be .* got str; give jaxspec"),
    ],
)
def test_settings_are_checked(settings, said):
    with pytest.raises(ValueError, match=said):
        Model.of(own_network(), **settings)


def test_a_wrong_width_is_said():
    with pytest.raises(ValueError, match=r"features of shape \[3, 12\]"):
        Model.of(own_network(fault="width"), max_positions=8)


def test_a_mesh_is_refused():
    with pytest.raises(ValueError, match="lie on a mesh"):
        Model.of(shard(own_network(), make_mesh(1)), max_positions=8)


def test_a_tokenizer_must_fit(model):
    with pytest.raises(ValueError, match="tokenizer: it knows 256 ids, and the network only 31"):
        Model.of(own_network(), model.tokenizer, max_positions=8)
    read = Model.of(own_network(vocab_size=256), model.tokenizer, max_positions=64)
    (row,) = jaxspec.generate(read, "text", max_new_tokens=3)
    assert isinstance(row.text, str)
