"""Models as LiteRT files for phones: export, the gate, the manifest, a runtime for the host."""

from jaxspec.mobile.contents import ExportConfig
from jaxspec.mobile.export import export
from jaxspec.mobile.filling import Filled, fill_in, fill_in_stream
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
    "Filled",
    "Manifest",
    "MobileModel",
    "OpsetError",
    "PhoneMemory",
    "Violation",
    "estimate_phone_memory",
    "export",
    "fill_in",
    "fill_in_stream",
    "read_manifest",
    "stream_text",
    "violations",
]
