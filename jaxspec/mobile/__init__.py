"""Models as LiteRT files for phones: export, the gate, the manifest, a runtime for the host."""

from jaxspec.mobile.export import ExportConfig, export
from jaxspec.mobile.manifest import Manifest, read_manifest
from jaxspec.mobile.opset import OpsetError, Violation, violations
from jaxspec.mobile.runtime import Decoded, MobileModel

__all__ = [
    "Decoded",
    "ExportConfig",
    "Manifest",
    "MobileModel",
    "OpsetError",
    "Violation",
    "export",
    "read_manifest",
    "violations",
]
