"""Shardings on a mesh, meshes that are refused, and loading onto a mesh."""

import json

import jax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from jaxspec.checkpoint import Model, save, save_eagle, save_orbax
from jaxspec.cli import main
from jaxspec.models import (
    EagleHead,
    Experts,
    ModelConfig,
    Network,
    init_eagle_params,
    init_params,
    param_shapes,
)
from jaxspec.sharding import (
    CACHE_AXES,
    PARAM_AXES,
    check_divides,
    make_mesh,
    mesh_of,
    parse_mesh,
    partition,
    shard,
)
from tests.models.families import FAMILIES
from tests.sharding.test_mesh_decoding import on_eight_devices

MESH = AbstractMesh((2, 4), ("data", "model"))
CONFIG = ModelConfig(
    vocab_size=2048,
    embed_dim=256,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    mlp_dim=1024,
    max_positions=64,
)


@pytest.mark.parametrize(
    ("axes", "shape", "expected"),
    [
        ((None, "heads", None, None), (64, 8, 6, 16), PartitionSpec(None, "model", None, None)),
        ((None, "heads", None, None), (64, 2, 6, 16), PartitionSpec(None, None, None, None)),
        # An axis of the mesh divides one dimension: the first that it can.
        (("experts", None, None, "hidden"), (8, 3, 2, 4), PartitionSpec("model", None, None, None)),
        (("experts", None, None, "hidden"), (5, 3, 2, 4), PartitionSpec(None, None, None, "model")),
        (CACHE_AXES, (6, 4, 16, 64), PartitionSpec("data", "model", None, None)),
        (CACHE_AXES, (1, 4, 16, 64), PartitionSpec(None, "model", None, None)),
        (("rows",), (), PartitionSpec()),
    ],
)
def test_where_an_array_lies(axes, shape, expected):
    assert partition(axes, shape, MESH) == expected


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_all_large_weights_of_every_family_are_in_the_table(name):
    """All others are norms, routers or biases of the width of the model."""
    flat, _ = jax.tree_util.tree_flatten_with_path(param_shapes(FAMILIES[name]))
    for path, leaf in flat:
        names = [entry.key for entry in path]
        known = ("/".join(names[-2:]), leaf.ndim) in PARAM_AXES
        small = leaf.ndim == 1 or "router" in names
        assert known != small, names


@pytest.mark.parametrize(
    "text",
    [
        "",
        "data",
        "data=two",
        "rows=2",
        "data=2;model=4",
        "data=-1",
        "data=1,data=2",
        "data=" + "9" * 5000,
    ],
)
def test_a_mesh_that_cannot_be_read_is_refused(text):
    with pytest.raises(ValueError, match="mesh must be like data=2,model=4, got"):
        parse_mesh(text)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0)])
def test_sizes_count_from_one(sizes):
    with pytest.raises(ValueError, match="sizes count from 1"):
        make_mesh(*sizes)


def test_a_mesh_larger_than_the_devices_is_refused():
    many = 2 * jax.local_device_count()
    with pytest.raises(ValueError, match=f"takes {many} devices, which must divide"):
        parse_mesh(f"data={many}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 2}, "model=4 does not divide the 2 key heads; choose model from"),
        ({"mlp_dim": 250}, "model=4 does not divide the 250 hidden units of its MLPs"),
        (
            {"experts": Experts(6, 2, 10, True, (True,) * 4)},
            "model=4 does not divide the 10 hidden units of its experts",
        ),
    ],
)
def test_a_target_that_cannot_be_divided_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        check_divides(CONFIG.replace(**change), MESH)
    check_divides(CONFIG, MESH)


def test_weights_say_which_mesh_they_lie_on(tiny_network):
    mesh = make_mesh(1, 1)
    assert mesh_of(tiny_network) is None
    assert mesh_of(()) is None
    assert mesh_of(shard(tiny_network, mesh)) == mesh


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Figures of loading with eight devices."""
    folder = tmp_path_factory.mktemp("loading")
    network = Network(init_params(CONFIG, jax.random.key(0)), CONFIG)
    config = CONFIG.replace(num_layers=1, layer_types=("full",))
    head = EagleHead(init_eagle_params(config, True, jax.random.key(1)), config)
    save(Model(network), folder / "target")
    save_orbax(Model(network), folder / "orbax")
    save_eagle(head, folder / "head")
    on_eight_devices("tests.sharding.loading", str(folder), str(folder / "out.json"))
    return json.loads((folder / "out.json").read_text())


def test_each_tensor_goes_straight_to_its_shards(loaded):
    assert all(loaded["equal"])
    assert all(loaded["same_places"])
    assert loaded["same_digest"]
    # One tensor as it is read, and as it is laid out.
    assert loaded["held"] < 2.2 * loaded["largest"] < loaded["total"] / 3
    # Norms are whole everywhere.
    assert loaded["on_one_device"] < 1.02 * loaded["total"] / 4


def test_a_head_goes_where_its_target_lies(loaded):
    assert loaded["head_mesh"] == {"data": 2, "model": 4}


def test_meshes_that_do_not_divide_are_refused_when_loading(loaded):
    odd, heads, large = loaded["errors"]
    assert "mesh: data=3,model=1 takes 3 devices, which must divide the 8 cpu devices here" in odd
    assert "mesh: model=8 does not divide the 4 key heads; choose model from [1, 2, 4]" in heads
    assert "takes 10 devices" in large


def test_the_command_line_takes_a_mesh(tiny_network, tmp_path, capsys):
    save(Model(tiny_network), tmp_path / "model")
    many = 2 * jax.local_device_count()
    argv = ["generate", str(tmp_path / "model"), "x", "--mesh"]
    assert main([*argv, f"data={many}"]) == 2
    assert f"takes {many} devices" in capsys.readouterr().err
    assert main([*argv, "rows=2"]) == 2
    assert "mesh must be like data=2,model=4, got 'rows=2'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no tokenizer"):
        main([*argv, "data=1,model=1", "--debug"])
