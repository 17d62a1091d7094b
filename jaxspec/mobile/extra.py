"""Needs of LiteRT on a machine: its version, and those of its GPU accelerator."""

import ctypes.util
import importlib.util
import os
from pathlib import Path

from jaxspec.extras import install_hint

OLDEST_LITERT, OLDEST_LM = "2.3", "0.18.1"
"""Versions of ai-edge-litert and litert-lm-api whose Python interface is called here."""
_LIBRARY = "libLiteRtWebGpuAccelerator.so"
_DRIVER_FOLDERS = (Path("/usr/share/vulkan/icd.d"), Path("/etc/vulkan/icd.d"))


def missing_for_gpu() -> str | None:
    """Names what LiteRT's GPU accelerator lacks on this machine, and the cure; `None`: nothing."""
    package = importlib.util.find_spec("ai_edge_litert")
    if package is None or package.origin is None:
        return f"the extra `mobile` is not installed: {install_hint('mobile')}"
    if not (Path(package.origin).parent / _LIBRARY).is_file():
        return f"LiteRT's package for this platform has no {_LIBRARY}; take Linux on x86-64"
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
