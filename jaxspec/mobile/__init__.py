"""Models as LiteRT files for phones: export, the gate, the manifest, a runtime for the host."""

from jaxspec.mobile.export import ExportConfig, export
from jaxspec.mobile.manifest import Manifest, read_manifest
from jaxspec.mobile.memory import PhoneMemory, estimate_phone_memory
from jaxspec.mobile.opset import OpsetError, Violation, violations
from jaxspec.mobile.quantize import QUANTIZATIONS
from jaxspec.mobile.runtime import Decoded, MobileModel
from jaxspec.mobile.text import stream_text

__all__ = [
    "QUANTIZATIONS",
    "Decoded",
    "ExportConfig",
    "Manifest",
    "MobileModel",
    "OpsetError",
    "PhoneMemory",
    "Violation",
    "estimate_phone_memory",
    "export",
    "read_manifest",
    "stream_text",
    "violations",
]
