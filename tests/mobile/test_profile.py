"""Latency kits: what they time, the script for phones, and reading what it printed."""

import json
import shutil
import subprocess
from dataclasses import replace

import numpy as np
import pytest

from jaxspec.cli import main
from jaxspec.core.types import Warp
from jaxspec.drafters import Eagle, LoadedDrafter, NoDraft, PromptLookup
from jaxspec.tuning import calibrated_table, load_profile, search_tree
from jaxspec.tuning.latency import PartialPasses
from tests.mobile.models import successor_model

pytest.importorskip("litert_converter", reason="needs the extra mobile: '.[mobile]'")
pytest.importorskip("ai_edge_litert", reason="needs the extra mobile: '.[mobile]'")

from jaxspec.mobile import ExportConfig, export, read_manifest
from jaxspec.mobile import profile as profile_module
from jaxspec.mobile.loops import Plain
from jaxspec.mobile.profile import (
    export_kit,
    kit_script,
    measure_here,
    read_kit_log,
    read_web_profile,
    timed_signatures,
    valid_integers,
)
from jaxspec.mobile.runtime import MobileModel
from jaxspec.mobile.weights import single_functions

DEPTH = 2
SHAPES = ExportConfig(capacity=16, prefill=(8,), quantization="float32")
PATHS = ((0,), (1,), (0, 0))
# As LiteRT's tool and TensorFlow Lite's print them.
LITERT = "Warmup (avg):         9.10 ms (5 runs)\nInference (avg):      {} ms (50 runs)"
LITERT_SPREAD = "Inference (std):      {}"
TFLITE = (
    "Inference timings in us: Init: 5, First inference: 9, Warmup (avg): 8, Inference (avg): {}"
)


def timed(*signatures: str) -> str:
    """A log of theirs."""
    return "".join(f"jaxspec signature: {name}\n{LITERT.format(3)}\n" for name in signatures)


@pytest.fixture(scope="module")
def kit(tmp_path_factory):
    """With fewer sizes than a real one."""
    folder = tmp_path_factory.mktemp("kit")
    model, head = successor_model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile_module, "TOKENS", (1, 4, 32))
        patch.setattr(profile_module, "NODES", (1, 2))
        manifest = export_kit(model, folder, Eagle.of(head, PATHS), SHAPES)
    return folder, manifest


def test_an_interrupted_kit_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(profile_module, "kit_script", interrupted)
    monkeypatch.setattr(profile_module, "TOKENS", (1, 4))
    (tmp_path / "measure.sh").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        export_kit(successor_model()[0], tmp_path, LoadedDrafter(NoDraft(), ()), SHAPES)
    assert [path.name for path in tmp_path.iterdir()] == ["measure.sh"]


def test_every_pass_and_its_commit_are_timed(kit):
    assert timed_signatures(kit[1]) == (
        *(
            "decode",
            "verify_1",
            "verify_4",
            "commit_1",
            "commit_4",
        ),  # 32 tokens leave no room in a capacity of 16
        *("absorb", "draft_1", "draft_2"),
    )


def test_a_part_leaves_the_file_one_function_with_its_weights(kit, tmp_path):
    """Its outputs are those of the whole file."""
    from ai_edge_litert.interpreter import Interpreter

    file, manifest = kit
    whole = Interpreter(str(file / "model.tflite"))
    assert sorted(path.name for path in (file / "parts").iterdir()) == sorted(
        timed_signatures(manifest)
    )
    for part in (file / "parts").iterdir():
        data = bytearray((file / "model.tflite").read_bytes())
        begin = part.read_bytes()
        data[: len(begin)] = begin
        (tmp_path / "model.tflite").write_bytes(data)
        alone = Interpreter(str(tmp_path / "model.tflite"))
        assert list(alone.get_signature_list()) == [part.name]
        draws = np.random.default_rng(0)
        inputs = {
            name: np.full(entry["shape"], valid_integers(manifest, part.name)[name], np.int32)
            if entry["dtype"] == "int32"
            else draws.standard_normal(entry["shape"], np.float32).astype(entry["dtype"])
            for name, entry in manifest.signatures[part.name]["inputs"].items()
        }
        found, wanted = (each.get_signature_runner(part.name)(**inputs) for each in (alone, whole))
        assert found.keys() == wanted.keys() == manifest.signatures[part.name]["outputs"].keys()
        for name in found:
            np.testing.assert_array_equal(found[name], wanted[name])


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_part_has_the_scales_of_its_weights(tmp_path, quantization):
    from ai_edge_litert.interpreter import Interpreter

    path = tmp_path / "model.tflite"
    export(successor_model()[0], tmp_path, config=replace(SHAPES, quantization=quantization))
    data = path.read_bytes()
    ((_, flatbuffer),) = single_functions(path, ["decode"])
    (tmp_path / "alone.tflite").write_bytes(bytes(flatbuffer) + data[len(flatbuffer) :])
    logits = []
    for file in (path, tmp_path / "alone.tflite"):
        runner = Interpreter(str(file)).get_signature_runner("decode")
        inputs = {
            name: np.ones(entry["shape"], entry["dtype"])
            for name, entry in read_manifest(path).signatures["decode"]["inputs"].items()
        }
        logits.append(runner(**inputs)["logits"])
    np.testing.assert_array_equal(*logits)
    assert np.ptp(logits[0]) > 0


def test_a_kit_decodes_at_a_temperature(kit):
    """Its `draft_1` is a level of the head, not the draft of a model with layers left out."""
    file = MobileModel(kit[0] / "model.tflite")
    settings = {"temperature": np.float32(1), "top_k": np.int32(1)}  # one outcome
    drawn = file.generate([3, 1, 4], 8, (), warp=Warp(**settings))
    assert drawn.tokens.tolist() == file.generate([3, 1, 4], 8, (), Plain).tokens.tolist()


@pytest.fixture(scope="module")
def kit_of_layers(tmp_path_factory):
    """A kit without a head: two tokens are drafted with layers left out."""
    folder = tmp_path_factory.mktemp("layers")
    model, _ = successor_model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile_module, "TOKENS", (1, 4))
        patch.setattr(profile_module, "DRAFTED", 2)
        manifest = export_kit(model, folder, LoadedDrafter(NoDraft(), ()), SHAPES)
    return folder, manifest


def test_without_a_head_passes_with_layers_left_out_are_timed(kit_of_layers):
    folder, manifest = kit_of_layers
    partial = [f"partial_{name}" for name in ("whole", "no_attention", "no_mlp", "nothing")]
    assert list(timed_signatures(manifest)[-4:]) == partial
    assert len(timed_signatures(manifest)) == 5 + 4
    # They are those of `LayerSkip`: the whole model drafts what plain decoding emits.
    file = MobileModel(folder / "model.tflite")
    prompt = [3, 1, 4]
    decoded = file.generate(prompt, 3, ()).tokens.tolist()
    file.call("prefill_8", prompt=[prompt + [0] * 5], length=[0], count=[3])
    for name in partial:
        file.call(name, pending=[decoded[0]], length=[3])
    drafted = {name: file.read(name, "drafted")[0].tolist() for name in partial}
    assert drafted["partial_whole"] == decoded
    assert all(len(tokens) == 3 for tokens in drafted.values())
    assert drafted["partial_nothing"] != decoded
    profile = measure_here(folder / "model.tflite", repeats=3)
    assert profile.draft == ()
    assert profile.partial is not None
    assert profile.partial.num_layers == 2
    assert 0 < profile.partial.nothing < profile.target_seconds(1) * 2
    with pytest.raises(ValueError, match="has no draft passes, as it is for layer skipping"):
        search_tree(calibrated_table(), profile, max_nodes=3, max_depth=2)


def test_a_log_of_layers_left_out_is_read_and_kept(kit_of_layers, tmp_path, capsys):
    """A draft token takes the time of a function, divided by the tokens that it drafts."""
    times = {"partial_whole": 8, "partial_no_attention": 5, "partial_no_mlp": 3}
    header = kit_script(kit_of_layers[1]).split("jaxspec kit: ")[1].split("'")[2]
    sections = "".join(
        f"jaxspec signature: {name}\n{LITERT.format(times.get(name, 2))}\n"
        for name in timed_signatures(kit_of_layers[1])
    )
    log, out = tmp_path / "kit.txt", tmp_path / "phone.json"
    log.write_text(f"jaxspec kit: {header}\n{sections}")
    profile = read_kit_log(log)
    assert profile.partial == PartialPasses(2, 4e-3, 2.5e-3, 1.5e-3, 1e-3)
    assert main(["tune", "profile", "--import", str(log), "--out", str(out)]) == 0
    assert "no attention 2.500 ms" in capsys.readouterr().out
    assert load_profile(out) == profile
    log.write_text(f"jaxspec kit: {header}\n{timed('decode', 'verify_1', 'commit_1')}")
    with pytest.raises(ValueError, match="partial_whole was not timed"):
        read_kit_log(log)


def test_a_kit_is_timed_on_this_machine(kit):
    profile = measure_here(kit[0] / "model.tflite", repeats=3)
    assert [timing.size for timing in profile.target] == [1, 4]
    assert [timing.size for timing in profile.draft] == [1, 2]
    assert [timing.size for timing in profile.first_draft] == [1, DEPTH]
    assert "1 threads" in profile.runtime


def test_a_graph_that_the_gpu_takes_in_part_is_not_timed(kit, tmp_path):
    """The tool is told to fail then, as the phone's CPU would compute the rest in silence."""
    if shutil.which("sh") is None:
        pytest.skip("needs a POSIX shell")
    adb = tmp_path / "adb"
    adb.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--use_cpu=false*--require_full_delegation=true*) echo refused; exit 1;; '
        f'*signature_to_run_for*) echo "{LITERT.format(1)}";; esac\n'
    )
    adb.chmod(0o755)
    (tmp_path / "benchmark_model").touch()
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "BENCHMARK": "benchmark_model"}
    done = {
        backend: subprocess.run(
            [str(kit[0] / "measure.sh"), backend],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        for backend in ("cpu", "gpu", "GPU")
    }
    assert done["GPU"].returncode == 2
    assert done["GPU"].stderr == "measure.sh: backend must be cpu or gpu, got GPU.\n"
    assert done["cpu"].returncode == 0
    assert done["gpu"].returncode == 1
    assert done["gpu"].stdout.endswith("jaxspec signature: decode\nrefused\n")


def test_the_script_and_its_log_round_trip(kit, tmp_path, capsys):
    """The script runs with an adb of ours, whose tool says what the phone's would.

    The tool is named from where the script is called, as anyone would.
    """
    if shutil.which("sh") is None:
        pytest.skip("needs a POSIX shell")
    adb = tmp_path / "adb"
    adb.write_text(
        "#!/bin/sh -e\n"
        'case "$*" in *getprop*) echo "Pixel 99";; '
        'push*) shift; while [ $# -gt 1 ]; do cp -r "$1" phone; shift; done;; '
        # Paths of the phone are of the folder `phone`.
        '"shell dd "*) shift; exec $(echo "$*" | sed "s#/data/local/tmp/jaxspec#phone#g");; '
        "*signature_to_run_for=verify_4*) cp phone/model.tflite verify_4; "
        f'echo "{LITERT.format(4)}"; echo "{LITERT_SPREAD.format(0.2)}";; '
        f'*signature_to_run_for=draft*) echo "{TFLITE.format(1000)}";; '
        f'*signature_to_run_for*) echo "{LITERT.format("1.00")}";; esac\n'
    )
    adb.chmod(0o755)
    (tmp_path / "tools").mkdir()
    (tmp_path / "phone").mkdir()
    (tmp_path / "tools" / "benchmark_model").touch()
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "BENCHMARK": "tools/benchmark_model"}
    log = subprocess.run(
        [str(kit[0] / "measure.sh"), "gpu", "2"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    part, timed_file = kit[0] / "parts" / "verify_4", (tmp_path / "verify_4").read_bytes()
    assert timed_file[: part.stat().st_size] == part.read_bytes()
    assert len(timed_file) == (kit[0] / "model.tflite").stat().st_size
    (tmp_path / "kit.txt").write_text(log)
    profile = read_kit_log(tmp_path / "kit.txt")
    assert profile.device == "Pixel 99, gpu, 2 threads"
    assert (profile.model, profile.quantization) == ("successors", "float32")
    # A target pass and its commit, in seconds.
    assert [t.seconds for t in profile.target] == pytest.approx([1e-3, 5e-3])
    assert profile.target[1].spread == pytest.approx(2e-4)
    assert [t.seconds for t in profile.draft] == pytest.approx([1e-3, 1e-3])
    assert [t.seconds for t in profile.first_draft] == pytest.approx([1e-3, 1e-3])
    assert profile.max_levels == DEPTH

    out = tmp_path / "profile.json"
    assert main(["tune", "profile", "--import", str(tmp_path / "kit.txt"), "--out", str(out)]) == 0
    assert "Pixel 99" in capsys.readouterr().out
    assert load_profile(out) == profile
    argv = ["tune", "profile", "--import", str(tmp_path / "kit.txt"), "--out", str(out)]
    assert main([*argv, "--name", "mine"]) == 0
    assert load_profile(out) == replace(profile, name="mine")
    assert main([*argv, "--tokens", "1,2", "--drafter", "lookup"]) == 2
    assert "--drafter, --tokens: --import measures nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("Inference (avg): 3", "has no line 'jaxspec kit: '"),
        ("jaxspec kit: {", "first line is damaged"),
        ("HEAD", "nothing was timed"),
        ("jaxspec kit: {}", "damaged .'model'"),
        ("jaxspec kit: [1]", "damaged .the JSON must be a mapping, got .1"),
        pytest.param(
            f"jaxspec kit: {'[' * 100_000}", "more than 100 lists or objects within", id="deep JSON"
        ),
        ('jaxspec kit: {"model": 5}', "damaged .model must be a text, got 5"),
        (
            'jaxspec kit: {"model": "m", "quantization": "q", "levels": 1.5}',
            "damaged .levels must be a whole number, got 1.5",
        ),
        ("HEADjaxspec signature: decode\nInference (avg): 1.2.3 ms", "with its unit for decode"),
        (
            f"HEAD{timed('absorb')}jaxspec signature: decode\nInference (avg): 0 ms\n"
            f"{timed('verify_1', 'commit_1')}",
            "decode: seconds must be above 0, got 0.0",
        ),
        (f"HEAD{timed('decode', 'absorb', 'verify_x')}", "no verify_N was timed"),
        (f"HEAD{timed('decode', 'absorb', 'verify_1', 'commit_1', 'draft_1')}", "target needs"),
        pytest.param(
            f"HEADjaxspec signature: decode\n{'Inference timings in us: ' * 40_000}",
            "with its unit for decode",
            id="a line that begins again and again",
        ),
        pytest.param("x" * (2**24 + 1), "larger than 16 MiB", id="a large file"),
    ],
)
def test_logs_that_do_not_parse_are_refused(tmp_path, log, said):
    facts = json.dumps({"model": "m", "quantization": "int8", "levels": 2})
    path = tmp_path / "log.txt"
    path.write_text(log.replace("HEAD", f"jaxspec kit: {facts}\n"))
    with pytest.raises(ValueError, match=rf"^{path}.*{said}"):
        read_kit_log(path)


@pytest.mark.parametrize("read", [read_kit_log, read_web_profile])
def test_what_holds_no_profile_is_refused(read):
    with pytest.raises(ValueError, match="path must be a text or a path, got None"):
        read(None)
    with pytest.raises(ValueError, match=r"^/dev/zero is (a device or a pipe|not a file)"):
        read("/dev/zero")


def test_a_kit_is_of_a_head_or_of_no_drafter(tmp_path):
    model, _ = successor_model()
    with pytest.raises(ValueError, match="give a head or no drafter, not PromptLookup"):
        export_kit(model, tmp_path, LoadedDrafter(PromptLookup(), ()), SHAPES)
