"""Exported files on the command line: `generate` and `export` itself."""

import json
import shutil
import sys
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest

import jaxspec
from jaxspec import GenerationConfig, generate
from jaxspec.checkpoint import CheckpointError, save_eagle
from jaxspec.cli import main
from jaxspec.commands import export_options, export_report, export_tuned
from jaxspec.commands.options import drafter_spec
from jaxspec.core.stopping import stop_automaton
from jaxspec.core.tree import EAGLE_PATHS
from jaxspec.drafters import DraftModel, Eagle, LoadedDrafter
from jaxspec.models import EagleHead, init_eagle_params
from jaxspec.models.transformer import param_shapes
from jaxspec.tuning import AcceptanceTable, load_profile, save_acceptance
from tests.mobile.models import LLAMA_7B, successor_model

pytest.importorskip("litert_converter", reason="needs the extra mobile: '.[mobile]'")
pytest.importorskip("ai_edge_litert", reason="needs the extra mobile: '.[mobile]'")

import jax

from jaxspec.mobile import QUANTIZATIONS, ExportConfig, MobileModel, calibration, export, report
from jaxspec.mobile import gpu as gpu_module
from jaxspec.mobile import memory as memory_module
from jaxspec.mobile.calibration import calibrate
from jaxspec.mobile.runtime import TextEnd
from jaxspec.mobile.text import stream_text

SHAPES = ExportConfig(capacity=48, prefill=(8,), verify=(4,), quantization="float32")
PROMPT = "one, two, one"


@pytest.fixture(scope="module")
def path(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    export(model, folder, config=SHAPES)
    return str(folder / "model.tflite")


@pytest.fixture(scope="module")
def expected(model):
    return generate(model, PROMPT, GenerationConfig(max_new_tokens=16))[0]


def fails(capsys, *argv) -> str:
    assert main(argv) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "jaxspec: error:" in line]
    return line


def test_the_text_is_that_of_jax(capsys, path, expected):
    """The tokenizer is the one next to the file; lookup drafts without being in it."""
    argv = ["generate", "--runtime", "litert", path, PROMPT, "--max-new-tokens", "16"]
    assert main(argv) == 0
    assert capsys.readouterr().out == f"{expected.text}\n"
    assert main([*argv, "--drafter", "lookup:num_speculative_tokens=3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["tokens"] == expected.tokens.tolist()
    assert answer["text"] == expected.text
    assert answer["finish_reason"] == "length"
    assert answer["metrics"]["num_tokens"] == 16


def test_stops_and_settings_are_those_of_generate(model, path, expected):
    """Stop strings cut the text, biases change it, and the budget may be nothing."""
    mobile = MobileModel(path, num_threads=1)
    stop = expected.text[4:6]
    for config in (
        GenerationConfig(max_new_tokens=16, stop=stop),
        GenerationConfig(max_new_tokens=16, banned_token_ids=[int(expected.tokens[0])]),
        GenerationConfig(max_new_tokens=0),
    ):
        theirs = generate(model, PROMPT, config)[0]
        steps = list(stream_text(mobile, PROMPT, config))
        tokens = [token for step in steps for token in step.tokens.tolist()]
        assert tokens == theirs.tokens.tolist()
        assert "".join(step.text for step in steps) == theirs.text
        assert not steps or steps[-1].finish_reason == theirs.finish_reason


def test_rules_that_no_function_applies_are_refused(model, tmp_path):
    """As `generate` does, though the file alone is there to tell."""
    asks = replace(model, generation_defaults={"repetition_penalty": 1.1})
    export(asks, tmp_path, config=SHAPES)
    file = MobileModel(tmp_path / "model.tflite", num_threads=1)
    config = GenerationConfig(max_new_tokens=4)
    with pytest.raises(ValueError, match=r"repetition_penalty: files .* got 1.1"):
        next(stream_text(file, PROMPT, config))
    steps = stream_text(file, PROMPT, replace(config, repetition_penalty=1))
    theirs = generate(model, PROMPT, config)[0]
    assert "".join(step.text for step in steps) == theirs.text


def test_a_token_that_stops_twice_stops_as_a_string():
    """As in `core.stopping`: the string is to be cut from the text."""
    end = TextEnd(5, [1, 2], stop_automaton([b"ab"], [b"a", b"b", b"c"]))
    assert end.cut([0, 1, 2]) == ([0, 1], "stop_string")
    end = TextEnd(5, [1, 2], stop_automaton([b"ab"], [b"a", b"b", b"c"]))
    assert end.cut([0, 2, 1]) == ([0, 2], "stop_token")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--num-samples", "2"], "num_samples: only 1 is possible on LiteRT"),
        (["--loop", "step"], "not step"),
        (["--loop", "step", "--temperature", "1.5", "--top-p", "0.3"], "top_p: whole steps"),
        (["--loop", "step", "--banned-token-ids", "3"], "bias: whole steps"),
        (["--drafter", "lookup:num_speculative_tokens=9"], "export it with --verify 10"),
        (["--drafter", "lookup", "--loop", "plain"], "--loop must be verify"),
        (["--drafter", "draft-model"], "draft-model:model=FILE"),
        (["--drafter", "draft-model:model=m,threshold=0.1"], "leave threshold out"),
        (["--threads", "0"], "--threads must be at least 1"),
        (["--drafter", "lookup:num_speculative_tokens=0"], "must be at least 1, got 0"),
        (["--dtype", "float32", "--max-positions", "9"], "--dtype, --max-positions: fixed when"),
        (["--steps", "3"], "--steps: for diffusion language models"),
        (["--top-k", "999"], "top_k must be at most the vocabulary"),
    ],
)
def test_mistakes_are_one_line(capsys, path, argv, said):
    assert said in fails(capsys, "generate", "--runtime", "litert", path, PROMPT, *argv)


def test_flags_of_litert_need_litert(capsys, path):
    assert "needs --runtime litert" in fails(capsys, "generate", path, PROMPT, "--loop", "plain")
    assert "more capacity" in fails(capsys, "generate", "--runtime", "litert", path, "x" * 60)


@pytest.fixture(scope="module")
def folders(model, tmp_path_factory):
    """The model and a head for it, with prompts and a tree."""
    folder = tmp_path_factory.mktemp("all")
    jaxspec.save(model, folder / "model")
    config = model.network.config.replace(num_layers=1, layer_types=())
    head = EagleHead(init_eagle_params(config, False, jax.random.key(0)), config, False)
    save_eagle(head, folder / "head")
    rows = [{"prompt": PROMPT}, {"prompt": "abc"}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tree.json").write_text(json.dumps({"paths": [[0], [1], [0, 0]]}))
    return folder


@pytest.mark.slow
def test_the_report_compares_every_quantization(capsys, folders, tmp_path):
    argv = ["export", "report", str(folders / "model"), str(tmp_path)]
    argv += ["--drafter", f"eagle:head={folders / 'head'},tree={folders / 'tree.json'}"]
    argv += ["--capacity", "32", "--prefill", "8"]
    assert main([*argv, "--prompts", str(folders / "prompts.jsonl")]) == 0
    found = json.loads((tmp_path / "quantization.json").read_text())["quantizations"]
    by_name = {row["quantization"]: row for row in found}
    assert list(by_name) == list(QUANTIZATIONS)
    assert by_name["float32"]["kl"] == 0
    assert by_name["float32"]["top1"] == 1
    assert 0 < by_name["int8"]["kl"] < by_name["int4"]["kl"]
    # Graphs are most of so small a file; what bits do to the size of weights, test_quantize tells.
    assert all(by_name[name]["size"] > 200_000 for name in ("float32", "int8", "int4"))
    for name in ("int4-block32", "int4-block32-calibrated"):
        assert "widths that 32 divides" in by_name[name]["refused"]
    assert by_name["int4-calibrated"]["kl"] < by_name["int4"]["kl"]
    assert by_name["int8"]["tau"] >= 1
    assert "refused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "named"), [([], ("int8", None)), (["--calibration", "P"], ("int4-calibrated", "P"))]
)
def test_a_report_names_calibration_where_it_is_asked_for(
    capsys, monkeypatch, folders, tmp_path, flags, named
):
    def compared(model, texts, drafter, config, advance, folder):
        raise ValueError(f"{config.quantization}, {config.calibration}")

    monkeypatch.setattr(export_report, "compare_quantizations", compared)
    argv = ["export", "report", str(folders / "model"), str(tmp_path), *flags]
    argv += ["--capacity", "32", "--prefill", "8", "--prompts", str(folders / "prompts.jsonl")]
    said = fails(capsys, *argv)
    assert f"{named[0]}, {named[1]}" in said


@pytest.mark.parametrize(
    ("broken", "error"),
    [("float32", ValueError("no such model")), ("int8", CheckpointError("the disk is full"))],
)
def test_a_report_ends_where_a_quantization_is_not_the_reason(monkeypatch, model, broken, error):
    """Without float32 there is nothing to compare with, and a full disk is refused as such."""

    def exported(model, folder, drafter, config):
        if config.quantization == broken:
            raise error
        return export(model, folder, drafter, config)

    monkeypatch.setattr(report, "export", exported)
    shapes = ExportConfig(capacity=32, prefill=(8,), bundle="cpu", check_gpu_ops=False)
    with pytest.raises(type(error), match=str(error)):
        report.compare_quantizations(model, [[1, 2, 3]], None, shapes)


@pytest.mark.parametrize(("otherwise", "nodes"), [(None, 1), (EAGLE_PATHS, 25)])
def test_a_search_is_not_bound_to_the_depth_of_the_last(folders, model, otherwise, nodes, tmp_path):
    """That tree is in the head's folder, and an export without a search takes it."""
    shutil.copytree(folders / "head", tmp_path / "head")
    (tmp_path / "head" / "tree.json").write_text(json.dumps({"paths": [[0]]}))
    args = Namespace(drafter=drafter_spec(f"eagle:head={tmp_path / 'head'}"))
    drafter = export_options.head_asked(args, model, otherwise)
    assert isinstance(drafter.drafter, Eagle)
    assert len(drafter.drafter.paths) == nodes


def test_acceptance_of_another_head_is_refused_before_anything_is_timed(capsys, folders, tmp_path):
    save_acceptance(AcceptanceTable(((0.5, 0.2),), head="x"), tmp_path / "table.json")
    argv = ["export", "tuned", str(folders / "model"), str(tmp_path / "out"), "--capacity", "128"]
    argv += ["--drafter", f"eagle:head={folders / 'head'}"]
    argv += ["--acceptance", str(tmp_path / "table.json")]
    assert "belongs to the head x, not to" in fails(capsys, *argv)
    assert not (tmp_path / "out").exists()


def test_an_export_that_fails_leaves_the_folder_as_it_was(capsys, folders, tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("no room")

    phone = load_profile("galaxy-s25-adreno830-vicuna7b-q4")
    monkeypatch.setattr(export_tuned, "export_kit", lambda *_: None)
    monkeypatch.setattr(export_tuned, "measure_here", lambda *_, **__: phone)
    monkeypatch.setattr(export_tuned, "export", fail)
    save_acceptance(AcceptanceTable(((0.8, 0.1),)), tmp_path / "tree.json")
    argv = ["export", "tuned", str(folders / "model"), str(tmp_path), "--capacity", "128"]
    argv += ["--drafter", f"eagle:head={folders / 'head'}"]
    before = (tmp_path / "tree.json").read_text()
    assert "no room" in fails(capsys, *argv, "--acceptance", str(tmp_path / "tree.json"))
    assert [path.read_text() for path in tmp_path.iterdir()] == [before]


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int4", "int4-calibrated"])
def test_one_command_times_searches_and_exports(folders, tmp_path, monkeypatch, quantization):
    """A calibration is done once, for the kit and for the file."""
    done = []

    def counted(*arguments):
        done.append(arguments)
        return calibrate(*arguments)

    monkeypatch.setattr(sys.modules["jaxspec.mobile.export"], "calibrate", counted)
    monkeypatch.setattr(calibration, "NUM_TEXTS", 6)
    argv = ["export", "tuned", str(folders / "model"), str(tmp_path)]
    argv += ["--drafter", f"eagle:head={folders / 'head'}", "--capacity", "128"]
    argv += ["--quantize", quantization]
    assert main([*argv, "--prompts", str(folders / "prompts.jsonl")]) == 0
    assert len(done) == (quantization == "int4-calibrated")
    assert {"profile.json", "tree.json", "model.tflite"} <= {p.name for p in tmp_path.iterdir()}
    tree = json.loads((tmp_path / "tree.json").read_text())["paths"]
    manifest = MobileModel(tmp_path / "model.tflite", num_threads=1).manifest
    assert [list(path) for path in manifest.paths] == tree
    assert ("step" in manifest.signatures) == bool(tree)
    assert manifest.quantization == quantization


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--gpu-timeout", "9"], "--gpu-timeout: needs --check-gpu"),
        (["--gpu-timeout", "0", "--check-gpu"], "--gpu-timeout must be above 0 seconds"),
        (["--levels", "4"], "only an EAGLE head"),
        (["--phone-memory", "0.00001"], "would need"),
        (["--bundle", "gpu", "--quantize", "int4-block32"], "for a GPU take int4"),
    ],
)
def test_mistakes_of_exports_are_one_line(capsys, folders, tmp_path, argv, said):
    model = str(folders / "model")
    shapes = ["--capacity", "32", "--prefill", "8"]
    argv = ["export", "tflite", model, str(tmp_path / "out"), *shapes, *argv]
    assert said in fails(capsys, *argv)
    assert not (tmp_path / "out").exists()


EAGLE = ("--drafter", "eagle:head=H")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["tflite", "--prompts", "P"], "unknown flag --prompts"),
        (["tuned", "--acceptance", "A"], "arguments are required: --drafter"),
        (["tuned", *EAGLE], "one of the arguments --acceptance --prompts is required"),
        (["tuned", "--prompts", "P", "--acceptance", "A"], "not allowed with"),
        (["tuned", "--prompts", "P", *EAGLE, "--tree", "T"], "unknown flag --tree"),
        (["report"], "arguments are required: --prompts"),
        (["report", "--prompts", "P", "--check-gpu"], "unknown flag --check-gpu"),
        (["report", "--prompts", "P", "--quantize", "int4"], "unknown flag --quantize"),
        (["web", "--acceptance", "A", "--prompts", "P"], "not allowed with"),
        (["web"], "arguments are required: --drafter"),
    ],
)
def test_flags_that_exclude_each_other_cannot_be_typed(capsys, argv, said):
    command, *flags = argv
    with pytest.raises(SystemExit) as exit_:
        main(["export", command, "M", "out", *flags])
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--acceptance", "A", "--limit", "0"], "--limit: needs --prompts"),
        (["--acceptance", "A", "--threads", "0"], "at least 1, got 0"),
        (["--acceptance", "A", "--drafter", "eagle:head=H,tree=T"], "leave out tree"),
    ],
)
def test_mistakes_of_searches_are_one_line(capsys, flags, said):
    assert said in fails(capsys, "export", "tuned", "M", "out", *EAGLE, *flags)


@pytest.mark.parametrize(
    ("command", "drafter"),
    [
        *(("tuned", drafter) for drafter in ("lookup", "none", "eagle2:head=H")),
        *(("web", drafter) for drafter in ("lookup", "none", "eagle2:head=H")),
        *(("kit", drafter) for drafter in ("lookup", "eagle2:head=H")),
    ],
)
def test_trees_are_those_of_eagle_heads(capsys, folders, tmp_path, command, drafter):
    argv = ["export", command, str(folders / "model"), str(tmp_path / "out"), "--drafter", drafter]
    argv += ["--acceptance", "A"] if command == "tuned" else []
    assert "must be an EAGLE head over a static tree" in fails(capsys, *argv)


def test_a_check_takes_as_long_as_it_may(capsys, monkeypatch, folders, tmp_path):
    """Said in an error that names the flag; nothing hangs here, as no time at all is given."""
    for module in (export_options, gpu_module):
        monkeypatch.setattr(module, "missing_for_gpu", lambda: None)
    argv = [
        "export",
        "tflite",
        str(folders / "model"),
        str(tmp_path),
        "--capacity",
        "32",
        "--prefill",
        "8",
    ]
    said = fails(capsys, *argv, "--bundle", "gpu", "--check-gpu", "--gpu-timeout", "0.01")
    assert "took longer than 0 s: give it more time (--gpu-timeout SECONDS)" in said


def test_memory_is_added_up():
    """Checked by hand: 2 layers of width 16, a vocabulary of 48, a head that is not tied."""
    from jaxspec.mobile.memory import estimate_phone_memory
    from tests.mobile.models import CONFIG

    shape = jax.ShapeDtypeStruct((16, 48), np.float32)
    needed = estimate_phone_memory(CONFIG, "float32", 10, (), shape, draft_passes=3)
    attention = 16 * (16 + 2 * 8) + 16 * 16
    assert needed.products == 4 * (2 * (attention + 3 * 16 * 24) + 16 * 48)
    assert needed.table == 4 * 48 * 16
    assert needed.repeated == 0
    assert needed.caches == 2 * 10 * 2 * 2 * 2 * 4 * 4
    assert needed.total == sum(needed)
    # On a GPU four functions hold all of it, and one of them drafts three times.
    apart = estimate_phone_memory(CONFIG, "float32", 10, (), shape, 3, separate_signatures=4)
    assert apart.repeated == 3 * needed.products + 3 * 4 * 16 * 48
    fewer = estimate_phone_memory(CONFIG, "int4", capacity=10)
    assert fewer.products < needed.products / 2
    assert np.isclose(fewer.table, 48 * 16 + 12 * 48)


def test_a_draft_model_adds_its_own_products_table_and_caches():
    """On a GPU also a copy of its products for each pass; extra bits are the target's alone."""
    from jaxspec.mobile.memory import estimate_phone_memory, phone_memory, stored_bytes
    from tests.mobile.models import CONFIG, half_of

    model, _ = successor_model()
    drafter, capacity = DraftModel.of(half_of(model), 2), 32
    shapes = ExportConfig(capacity=capacity, prefill=(8,), quantization="int4-calibrated")
    alone, both = phone_memory(model, None, shapes), phone_memory(model, drafter, shapes)
    small = estimate_phone_memory(CONFIG.replace(num_layers=1, layer_types=()), "int4", capacity)
    assert both.products - alone.products == small.products
    assert both.table - alone.table == stored_bytes((48, 16), "int8")
    assert both.caches - alone.caches == small.caches
    on_gpu = replace(shapes, bundle="gpu")
    alone, both = phone_memory(model, None, on_gpu), phone_memory(model, drafter, on_gpu)
    # One more function, `step`; two passes of the draft model there, and one in `prefill_8`.
    assert both.repeated == 2 * alone.repeated + 3 * small.products


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "0 draft passes, 2 functions"),
        (["--prefill", "4,8", "--verify", "4,8"], "0 draft passes, 5 functions"),
        (["--drafter", "lookup"], "0 draft passes, 3 functions"),
        (["--drafter", "eagle:head=HEAD"], "5 draft passes, 3 functions"),
        (["--drafter", "eagle:head=HEAD", "--levels", "2,4"], "8 draft passes, 3 functions"),
    ],
)
def test_every_function_of_a_file_for_gpus_counts(capsys, monkeypatch, folders, argv, said):
    """`verify_N` reads what `decode` does; `absorb` and `draft_N` read what a draft pass does."""

    def estimated(*settings, separate_signatures, head_config):
        del head_config
        raise ValueError(f"{settings[5]} draft passes, {separate_signatures} functions")

    monkeypatch.setattr(memory_module, "estimate_phone_memory", estimated)
    argv = [arg.replace("HEAD", str(folders / "head")) for arg in argv]
    shapes = ["--capacity", "32", "--prefill", "8", "--bundle", "gpu", "--phone-memory", "9"]
    assert said in fails(
        capsys, "export", "tflite", str(folders / "model"), "nowhere", *shapes, *argv
    )


def test_the_7b_case_of_the_documentation():
    """Llama-7B in int4 with an EAGLE head, as docs/mobile.md has it; nothing is allocated."""
    from jaxspec.mobile.memory import check_phone_memory, estimate_phone_memory

    config = LLAMA_7B
    layer = config.replace(num_layers=1, layer_types=())
    head = jax.eval_shape(lambda: init_eagle_params(layer, True, jax.random.key(0)))
    draft_pass = (head, param_shapes(config)["head"])
    totals = []
    for capacity in (1024, 2048):
        needed = estimate_phone_memory(config, "int4", capacity, head, draft_pass, 5)
        check_phone_memory(needed, 12_000_000_000)
        totals.append(round(needed.total / 1e9, 2))
    assert totals == [5.78, 7.99]
    on_gpu = estimate_phone_memory(config, "int4", 1024, head, draft_pass, 5, 3)
    assert round(on_gpu.total / 1e9, 2) == 13.57
    with pytest.raises(ValueError, match="take less capacity"):
        check_phone_memory(on_gpu, 12_000_000_000)


def test_a_draft_pass_reads_the_layers_that_are_kept():
    from jaxspec.drafters import LayerSkip
    from jaxspec.drafters.skip_sets import Skips
    from jaxspec.mobile.memory import draft_pass_weights

    model, head = successor_model()
    skip = LayerSkip(Skips((True, False), (True, True)))
    read = draft_pass_weights(model.params, LoadedDrafter(skip, ()))
    output = model.params["head"]["kernel"].size
    kept = sum(leaf.size for leaf in jax.tree.leaves(model.params["layer_1"]["attention"]))
    assert sum(leaf.size for leaf in jax.tree.leaves(read)) == kept + output
    eagle = draft_pass_weights(model.params, Eagle.of(head))
    own = sum(leaf.size for leaf in jax.tree.leaves(head.params))
    assert sum(leaf.size for leaf in jax.tree.leaves(eagle)) == own + output
