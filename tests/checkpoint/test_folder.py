"""The record of a folder: its kind, and that each small file is read once."""

import json
from collections import Counter

import pytest

from jaxspec.checkpoint import files, folder, hub, huggingface
from jaxspec.checkpoint.folder import read_folder

LAYER = {"num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"model_type": "llama", **LAYER}, "model"),
        ({"bias": True, **LAYER}, "eagle"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 6], **LAYER}, "eagle"),
        ({"draft_vocab_size": 32, **LAYER}, "eagle"),
        ({"transformer_layer_config": LAYER, "draft_vocab_size": 32}, "eagle"),
        ({"bias": True, "num_hidden_layers": 2}, "model"),
        ({"dflash_config": {}}, "dflash"),
    ],
)
def test_the_kind_of_a_folder(config, kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_folder(tmp_path).kind == kind


def test_a_folder_without_settings_is_of_no_kind(tmp_path):
    assert read_folder(tmp_path).kind is None
    assert read_folder(tmp_path / "not_there").kind is None


def test_loading_reads_each_small_file_once(saved_folder, monkeypatch):
    read = Counter()

    def counted(path):
        read[path] += 1
        return files.read_json(path)

    for module in (folder, huggingface):
        monkeypatch.setattr(module, "read_json", counted)
    hub.load(saved_folder)
    assert read[saved_folder / "config.json"] == 1
    assert set(read.values()) == {1}
