"""Node, npm and exported pages; what is missing is said and skipped."""

import contextlib
import dataclasses
import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.browser import program
from tests.mobile.web.models import CAPACITY, TREES, page_model, table_of

HERE = Path(__file__).resolve().parent
NODE_TIMEOUT = 300


@dataclasses.dataclass(frozen=True)
class Page:
    """An exported page.

    folder: of it.
    model: the target, loaded.
    """

    folder: Path
    model: Any

    @property
    def profile(self) -> dict[str, Any]:
        return json.loads((self.folder / "profile.json").read_text())


@pytest.fixture(scope="session")
def node() -> Callable[..., Any]:
    """Runs a script of this folder with an object, and returns the object that it prints last."""
    executable = program("node")

    def run(script: str, task: dict[str, Any], arguments: Sequence[str] = ()) -> Any:
        done = subprocess.run(
            [executable, "--expose-gc", str(HERE / script), *arguments],
            input=json.dumps(task),
            capture_output=True,
            text=True,
            timeout=NODE_TIMEOUT,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return json.loads(done.stdout.strip().split("\n")[-1])

    return run


@pytest.fixture(scope="session")
def vendored(tmp_path_factory) -> Path:
    """Packages that npm fetches, once for all tests."""
    pytest.importorskip("litert_converter", reason="needs the extra mobile: '.[mobile]'")
    from jaxspec.mobile.web import vendor

    program("npm")
    folder = tmp_path_factory.mktemp("vendored") / "vendor"
    try:
        vendor(folder)
    except ValueError as error:
        pytest.skip(f"npm cannot fetch LiteRT.js here: {error}")
    return folder


@pytest.fixture(scope="session")
def page_of(vendored, tmp_path_factory) -> Callable[[str], Page]:
    """The tiny model's page, by quantization."""
    pages: dict[str, Page] = {}

    def page(quantization: str) -> Page:
        if quantization not in pages:
            from jaxspec.drafters import Eagle
            from jaxspec.mobile import ExportConfig, web

            model, head = page_model()
            folder = tmp_path_factory.mktemp(f"page-{quantization}")
            config = ExportConfig(capacity=CAPACITY, prefill=(8, 32), quantization=quantization)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(web, "vendor", lambda target: shutil.copytree(vendored, target))
                patch.setattr(web, "_KIT_TOKENS", (2, 4))
                patch.setattr(web, "_KIT_NODES", (1, 2))
                web.export_web(model, folder, Eagle.of(head), TREES, table_of(head), config)
            pages[quantization] = Page(folder, model)
        return pages[quantization]

    return page


@contextlib.contextmanager
def served(folder: Path, server: Callable[..., Any] | None = None) -> Iterator[str]:
    """The address of a folder, by `page_server` or another."""
    from jaxspec.mobile.serve import page_server

    with (server or page_server)(folder, port=0) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}/"
        running.shutdown()
