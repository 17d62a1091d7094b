"""The packages of the extras `mobile` and `mobile-lm`, imported where used; what a GPU needs."""

import ctypes.util
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LIBRARY = "libLiteRtWebGpuAccelerator.so"
_DRIVER_FOLDERS = (Path("/usr/share/vulkan/icd.d"), Path("/etc/vulkan/icd.d"))


@contextmanager
def needs_extra(what: str, extra: str = "mobile") -> Iterator[None]:
    """Says which extra to install where an import inside fails.

    Raises:
        ValueError: a package of the extra is not there.
    """
    try:
        yield
    except ImportError as error:
        raise ValueError(
            f"{what} needs the extra `{extra}` ({error.name} is missing): "
            f"pip install 'jaxspec[{extra}]'."
        ) from None


def missing_for_gpu() -> str | None:
    """What LiteRT's GPU accelerator lacks here, and what to do; `None`: nothing known."""
    package = importlib.util.find_spec("ai_edge_litert")
    if package is None or package.origin is None:
        return "the extra `mobile` is not installed: pip install 'jaxspec[mobile]'"
    if not (Path(package.origin).parent / _LIBRARY).is_file():
        return f"LiteRT's package for this platform has no {_LIBRARY}; on Linux x86-64 it has"
    if ctypes.util.find_library("vulkan") is None and not _on_path("libvulkan.so.1"):
        return "there is no Vulkan loader: install libvulkan1"
    named = any(map(os.environ.get, ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")))
    if not named and not any(any(folder.glob("*.json")) for folder in _DRIVER_FOLDERS):
        return (
            "there is no Vulkan driver: set VK_ICD_FILENAMES to the .json of one, such as "
            "SwiftShader's vk_swiftshader_icd.json from Debian's package chromium-common"
        )
    return None


def _on_path(library: str) -> bool:
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    return any((Path(folder) / library).is_file() for folder in filter(None, folders))
