"""The programs of `examples/` run, and print what they promise to show."""

import importlib.util
from pathlib import Path

import pytest

from jaxspec.checkpoint import shipped_models

FOLDER = Path(__file__).resolve().parents[1] / "examples"
# Settings that make a program quick, and lines that it must print.
PROGRAMS = {
    "speculative": ({"max_new_tokens": 12}, "the same text", 3),
    "your_own_drafter": ({"max_new_tokens": 8, "num_samples": 256}, "tokens per pass", 1),
    "search_a_tree": ({"max_nodes": 6}, "the best tree", 2),
    "file_of_prompts": ({"max_new_tokens": 6, "rows": 3}, "3 rows", 1),
    "diffusion": ({"max_new_tokens": 16}, "the same text", 3),
}


def test_every_program_is_here():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(PROGRAMS)
    listed = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"[{name}.py]({name}.py)" in listed for name in PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_runs(name, capsys, monkeypatch, tmp_path):
    if not {"demo", "demo-draft", "demo-block-diffusion"} <= set(shipped_models()):
        pytest.skip("needs the models in checkpoints, which are not here")
    settings, line, times = PROGRAMS[name]
    spec = importlib.util.spec_from_file_location(f"examples_{name}", FOLDER / f"{name}.py")
    program = importlib.util.module_from_spec(spec)
    monkeypatch.chdir(tmp_path)
    spec.loader.exec_module(program)
    program.main(**settings)
    assert capsys.readouterr().out.count(line) == times
