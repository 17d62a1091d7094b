"""Drafters that were trained for another target: seen by a digest of its weights, and refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from jaxspec import GenerationConfig, load
from jaxspec.checkpoint import (
    Model,
    load_dflash,
    load_eagle,
    save,
    save_dflash,
    save_eagle,
    shipped_folders,
)
from jaxspec.cli import main
from jaxspec.decoding.request import check_request
from jaxspec.drafters import Deer, DFlash, DraftModel, Eagle, Eagle2, Union
from jaxspec.drafters.loaded import OtherTargetError
from jaxspec.mobile import ExportConfig, export
from jaxspec.models import Network
from jaxspec.models.digest import weights_digest
from jaxspec.models.storage import stored_as
from tests.checkpoint.networks import random_network
from tests.laws.drafters import blurred, dflash_head, eagle3_head, eagle_head
from tests.measure.models import filling_model, tiny_model


@pytest.fixture(scope="module")
def target() -> Model:
    model = tiny_model()
    config = model.config.replace(num_layers=2, layer_types=())
    return dataclasses.replace(model, network=random_network(config))


@pytest.fixture(scope="module")
def tuned(target) -> Model:
    """The same with other numbers in one matrix of one layer."""
    params = dict(target.params)
    layer = params["layer_1"]
    down = {"kernel": layer["mlp"]["down"]["kernel"] * 1.01}
    params["layer_1"] = layer | {"mlp": layer["mlp"] | {"down": down}}
    return dataclasses.replace(target, network=Network(params, target.config), name="tuned")


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    """Drafters for the target, as training writes them."""
    folder = tmp_path_factory.mktemp("drafters")
    made_for = {"made_for": target.digest}
    save_eagle(dataclasses.replace(eagle_head(target.network), **made_for), folder / "eagle")
    save_eagle(dataclasses.replace(eagle3_head(target.network), **made_for), folder / "eagle3")
    save_dflash(dataclasses.replace(dflash_head(target.network), **made_for), folder / "dflash")
    filling = filling_model("deer", 4)
    diffusion = dataclasses.replace(filling.config.masking, **made_for)
    network = Network(filling.params, filling.config.replace(diffusion=diffusion))
    save(dataclasses.replace(filling, network=network), folder / "deer")
    return folder


MAKERS = {
    "eagle": lambda folder, model, **how: Eagle.of(load_eagle(folder / "eagle", model), **how),
    "eagle3": lambda folder, model, **how: Eagle.of(load_eagle(folder / "eagle3", model), **how),
    "eagle2": lambda folder, model, **how: Eagle2.of(
        load_eagle(folder / "eagle", model), depth=1, beam=2, num_nodes=4, **how
    ),
    "union": lambda folder, model, **how: Union.of(MAKERS["eagle"](folder, model, **how)),
    "dflash": lambda folder, model, **how: DFlash.of(load_dflash(folder / "dflash", model), **how),
    "deer": lambda folder, model, **how: Deer.of(load(folder / "deer"), block=2, **how),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_drafter_of_another_target_is_refused_unless_it_is_asked_for(name, folder, target, tuned):
    check_request(target, GenerationConfig(), MAKERS[name](folder, target), 0)
    with pytest.raises(
        OtherTargetError, match=r"weights than tuned.*any_target=True.*any_target=1"
    ):
        check_request(tuned, GenerationConfig(), MAKERS[name](folder, tuned), 0)
    check_request(tuned, GenerationConfig(), MAKERS[name](folder, tuned, any_target=True), 0)


def test_drafters_that_do_not_say_their_target_draft_for_any(tuned, target):
    for drafter in (
        Eagle.of(eagle_head(target.network)),
        DFlash.of(dflash_head(target.network)),
        Deer.of(filling_model("deer", 4), 2),
        DraftModel.of(target),
    ):
        check_request(tuned, GenerationConfig(), drafter, 0)


@pytest.mark.parametrize("form", ["bfloat16", "matrices", "saved"])
def test_the_digest_is_that_of_the_weights_in_any_form(form, target, tmp_path):
    if form == "bfloat16":
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), target.params)
    elif form == "matrices":
        params = stored_as(target.params, "bfloat16")
    else:
        save(target, tmp_path, "bfloat16")
        params = load(tmp_path).params
    assert weights_digest(params) == target.digest


def test_every_matrix_counts(target):
    assert weights_digest(blurred(target.network, 0.01).params) != target.digest
    paths = jax.tree_util.tree_leaves_with_path(target.params)
    digests = set()
    for changed, _ in paths:
        params = jax.tree_util.tree_map_with_path(
            lambda path, leaf, changed=changed: leaf + 1 if path == changed else leaf,
            target.params,
        )
        digests.add(weights_digest(params))
    assert len(digests - {target.digest}) == len(paths)


def test_weights_that_tell_too_little_are_not_checked(folder, target, tmp_path):
    save(target, tmp_path)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), target.params)
    whole = Model(Network(stored_as(target.params, "int8"), target.config), name="int8")
    for model in (whole, Model(Network(rounded, target.config)), load(tmp_path, weights="files")):
        assert model.digest is None
    assert Model.of(target.network).digest == target.digest
    check_request(whole, GenerationConfig(), MAKERS["eagle"](folder, whole), 0)


def test_the_shipped_drafters_know_the_shipped_target():
    """It fails where arrays are named or arranged in another way: then rename the entry."""
    folders = shipped_folders()
    if "demo" not in folders:
        pytest.skip("needs checkpoints/demo, which is not here")
    digest = load("demo").digest
    for name in {"demo-eagle", "demo-eagle3", "demo-deer"} & set(folders):
        assert json.loads((folders[name] / "config.json").read_text())["target_digest"] == digest


def test_it_is_not_exported_either(folder, target, tuned, tmp_path):
    whole = dataclasses.replace(
        target, network=Network(stored_as(tuned.params, "int8"), tuned.config)
    )
    with pytest.raises(OtherTargetError, match="any_target=True"):
        export(tuned, tmp_path, MAKERS["eagle"](folder, tuned))
    with pytest.raises(ValueError, match="capacity"):  # what is not seen is not refused
        export(whole, tmp_path, MAKERS["eagle"](folder, whole), ExportConfig(capacity=1))


def test_the_command_line_refuses_it_unless_it_is_asked_for(folder, tuned, tmp_path, capsys):
    save(tuned, tmp_path)
    argv = ["generate", str(tmp_path), "abc", "--max-new-tokens", "2", "--drafter"]
    argv += [f"eagle:head={folder / 'eagle'}"]
    assert main(argv) == 2
    assert "any_target=1 to --drafter" in capsys.readouterr().err
    argv[-1] += ",any_target=1"
    assert main(argv) == 0
