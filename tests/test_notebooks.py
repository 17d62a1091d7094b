"""Notebooks run from top to bottom, hold the outputs of their code, and assert what they say."""

import hashlib
import json
import os
import re
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from jaxspec.checkpoint import shipped_folders

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SHIPPED = (
    *("demo", "demo-block-diffusion", "demo-deer", "demo-draft", "demo-eagle", "demo-eagle3"),
    "demo-skips",
)
NEEDS = {"04_to_the_phone": ("litert_converter", "mobile")}


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_hold_the_outputs_of_their_code(path):
    """As `python .ci/notebooks.py` stores them: small, whole, of this code, without paths."""
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    assert notebook["metadata"]["code"] == hashlib.sha256(code.encode()).hexdigest(), (
        "the code has changed since its outputs were stored: python .ci/notebooks.py "
        f"notebooks/{path.name}"
    )
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert any("text/html" in output.get("data", ()) for output in outputs)
    assert not any(output["output_type"] == "error" for output in outputs)
    assert not any(output.get("name") == "stderr" for output in outputs)
    assert not re.search(r"/(tmp|home|root|Users|work)/", json.dumps(outputs))
    assert len(text) < 100_000


def test_notebooks_lead_from_one_to_the_next():
    names = [path.name for path in NOTEBOOKS]
    assert [name[:3] for name in names] == [f"{i:02}_" for i in range(1, len(names) + 1)]
    for path, following in zip(NOTEBOOKS, [*names[1:], ""], strict=True):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        first, install, *_, last = ("".join(cell["source"]) for cell in cells)
        assert f"/blob/main/notebooks/{path.name})" in first  # the badge
        assert "%pip install" in install
        assert "## Now try" in last
        assert f"({following})" in last or not following
        for cell in cells:
            if cell["cell_type"] == "markdown":
                for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", "".join(cell["source"])):
                    assert (path.parent / link).exists(), f"{path.name} links to {link}"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path, monkeypatch):
    needs = "needs the notebooks extra: pip install '.[notebooks]'"
    nbformat = pytest.importorskip("nbformat", reason=needs)
    nbclient = pytest.importorskip("nbclient", reason=needs)
    pytest.importorskip("ipykernel", reason=needs)
    pytest.importorskip("matplotlib", reason=needs)
    if path.stem in NEEDS:
        package, extra = NEEDS[path.stem]
        pytest.importorskip(package, reason=f"needs the extra {extra}: pip install '.[{extra}]'")
    text = path.read_text(encoding="utf-8")
    used = {name for name in SHIPPED if f'\\"{name}\\"' in text}
    missing = sorted(used - set(shipped_folders()))
    if missing:
        pytest.skip(f"needs checkpoints/{', checkpoints/'.join(missing)}, which is not here")
    search = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(search))
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=where).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("text/html" in output.get("data", ()) for output in shown)


def test_the_table_of_a_70b_target_is_what_the_notebook_computes():
    notebook = json.loads((ROOT / "notebooks" / "07_batch_decoding.ipynb").read_text("utf-8"))
    found: dict = {"plt": MagicMock()}
    *_, last = (cell for cell in notebook["cells"] if cell["cell_type"] == "code")
    exec("".join(last["source"]), found)
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    table = page.split("| rows on a host |")[1].split("\n\n")[0].splitlines()[2:]
    assert table == [
        f"| {rows} | {1e3 * rows / plain:.1f} | {plain:.0f} | {drafted / plain:.2f} |"
        for rows, plain, drafted in zip(
            found["at_once"], found["plain"], found["drafted"], strict=True
        )
    ]
