"""Runs notebooks and stores their outputs, made small: `python .ci/notebooks.py [NOTEBOOK ...]`.

Pictures are stored small and with few colours. Progress, warnings and the plain form of HTML are
left out. The notebook keeps a digest of the code that made its outputs.
"""

import base64
import hashlib
import io
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import nbclient
import nbformat
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
_COLOURS, _PIXELS = 32, 900
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
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    notebook.metadata = metadata  # without what the kernel says of itself
    notebook.metadata["code"] = hashlib.sha256("\n".join(code).encode()).hexdigest()
    nbformat.write(notebook, path)


def small(output: Any) -> Any:
    """Returns an output in one form: a picture of few colours, HTML, or text."""
    data = output.get("data", {})
    if "image/png" in data or "text/html" in data:
        data.pop("text/plain", None)
    if "image/png" in data:
        picture = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).convert("RGB")
        picture.thumbnail((_PIXELS, _PIXELS))
        written = io.BytesIO()
        # This method keeps the colours of thin lines, the default one does not.
        few = picture.quantize(_COLOURS, Image.Quantize.FASTOCTREE)
        few.save(written, "png", optimize=True)
        data["image/png"] = base64.b64encode(written.getvalue()).decode()
    return output


if __name__ == "__main__":
    given = [Path(name) for name in sys.argv[1:]]
    for notebook in given or sorted((ROOT / "notebooks").glob("*.ipynb")):
        print(notebook.name, flush=True)
        store_outputs(notebook.resolve())
