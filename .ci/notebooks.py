"""Runs notebooks and stores their outputs, made small: `python .ci/notebooks.py [NOTEBOOK ...]`.

Pictures are stored with few colours. Progress and warnings are left out.
"""

import base64
import io
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbclient
import nbformat
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
_COLOURS = 16
_SECONDS = 1200


def store_outputs(path: Path) -> None:
    """Runs a notebook and writes its outputs into it."""
    notebook = nbformat.read(path, as_version=4)
    metadata = deepcopy(notebook.metadata)
    where = {"metadata": {"path": str(path.parent)}}
    client = nbclient.NotebookClient(
        notebook, timeout=_SECONDS, resources=where, record_timing=False
    )
    client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [small(each) for each in cell.outputs if each.get("name") != "stderr"]
    notebook.metadata = metadata  # without what the kernel says of itself
    nbformat.write(notebook, path)


def small(output: Any) -> Any:
    """Returns an output with a picture of few colours, in place of the text that describes it."""
    data = output.get("data", {})
    if "image/png" in data:
        picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).convert("RGB")
        written = io.BytesIO()
        picture.quantize(_COLOURS).save(written, "png", optimize=True)
        data["image/png"] = base64.b64encode(written.getvalue()).decode()
        data.pop("text/plain", None)
    return output


if __name__ == "__main__":
    given = [Path(name) for name in sys.argv[1:]]
    for notebook in given or sorted((ROOT / "notebooks").glob("*.ipynb")):
        print(notebook.name, flush=True)
        store_outputs(notebook.resolve())
