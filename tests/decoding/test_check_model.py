"""`check_model` passes sound networks and says which law another breaks."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxspec import Model, check_model
from tests.core.table_model import TableModel
from tests.decoding.own_network import OwnNetwork, own_network

SIZES = "members and sizes are those of the protocol"
CACHE = "a cached text equals one read at once"
TREE = "a pass over a tree equals passes one by one"
POSITIONS = "positions are those given"
MASK = "what is not seen changes nothing"
SCRATCH = "scratch counts as the cache"
ROWS = "rows do not influence each other"


def broken(report) -> set[str]:
    return {check.law for check in report.checks if not check.holds}


def test_a_network_of_someone_else_passes():
    report = check_model(Model.of(own_network(), max_positions=64), progress=False)
    assert report.holds, str(report)
    report.raise_if_broken()
    assert len(report.checks) == 8


def test_one_of_ours_passes(tiny_network):
    report = check_model(tiny_network, progress=False)
    assert report.holds, str(report)


def test_sixteen_bits_are_no_fault(tiny_network):
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny_network)
    report = check_model(halves, progress=False)
    assert report.holds, str(report)


def test_a_table_passes():
    table = jax.random.normal(jax.random.key(0), (5, 5))
    report = check_model(TableModel(table), progress=False)
    assert report.holds, str(report)


@pytest.mark.parametrize(
    ("fault", "laws"),
    [
        ("mask", {CACHE, TREE, MASK, SCRATCH}),
        ("positions", {CACHE, TREE, POSITIONS}),
        ("length", {CACHE, TREE, MASK}),
        ("scratch", {SCRATCH}),
        ("writes", {"a pass writes nothing"}),
    ],
)
def test_a_planted_fault_is_found(fault, laws):
    report = check_model(own_network(fault=fault), progress=False)
    assert laws <= broken(report), str(report)
    with pytest.raises(AssertionError, match="the model breaks a law"):
        report.raise_if_broken()


def test_a_wrong_width_is_found_before_anything_runs():
    report = check_model(own_network(fault="width"), progress=False)
    assert broken(report) == {SIZES}
    assert len(report.checks) == 1
    assert "features of shape [3, 12]" in str(report)


class MixesRows(OwnNetwork):
    """Under `jax.vmap`, every row gets the sum over all rows."""

    def unembed(self, features):
        return _sum_of_rows(super().unembed(features))


jax.tree_util.register_dataclass(MixesRows, ["weights"], ["vocab_size", "embed_dim", "fault"])


@jax.custom_batching.custom_vmap
def _sum_of_rows(logits):
    return logits


@_sum_of_rows.def_vmap
def _(axis_size, in_batched, logits):
    return jnp.broadcast_to(jnp.sum(logits, axis=0, keepdims=True), logits.shape), True


def test_rows_that_mix_are_found():
    network = own_network()
    report = check_model(MixesRows(network.weights, 31, 12), progress=False)
    assert broken(report) == {ROWS}, str(report)


class RaisesInTrees(OwnNetwork):
    """Reads one token at a time, or what is traced for its shapes."""

    def forward(self, tokens, positions, mask, cache, *, scratch=None, taps=()):
        if len(tokens) == 6:
            raise RuntimeError("too wide for me")
        return super().forward(tokens, positions, mask, cache, scratch=scratch)


jax.tree_util.register_dataclass(RaisesInTrees, ["weights"], ["vocab_size", "embed_dim", "fault"])


def test_what_a_network_raises_is_a_finding():
    network = own_network()
    report = check_model(RaisesInTrees(network.weights, 31, 12), progress=False)
    assert TREE in broken(report)
    assert "too wide for me" in str(report)


def test_a_missing_member_is_named():
    @dataclasses.dataclass
    class HasNoCache:
        vocab_size: int = 5
        embed_dim: int = 4

        def forward(self):
            raise NotImplementedError

        def unembed(self, features):
            raise NotImplementedError

    with pytest.raises(ValueError, match="HasNoCache has no `empty_cache`; it must be a method"):
        check_model(HasNoCache())


def test_short_texts_are_refused():
    with pytest.raises(ValueError, match="texts of 8 tokens, and the laws read 12"):
        check_model(Model.of(own_network(), max_positions=8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": "a"}, "seed must be a whole number, got 'a'"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"progress": 1}, "progress must be True or False, got 1"),
        ({"model": "demo"}, "network: str has no `vocab_size`"),
    ],
)
def test_other_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_model(**{"model": None, **arguments})
