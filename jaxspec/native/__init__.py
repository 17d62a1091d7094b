"""Native code for passes of a few tokens on CPUs: products, a gated MLP, attention, filters.

It is plain C (`kernels.c`, `calls.c`), compiled when the package is installed and called by XLA
through `jax.ffi`. Without it everything runs on XLA's own products. `status` says which it is, and
why. The environment variable `JAXSPEC_NATIVE` is read once: `off` leaves native code out, `avx2`
keeps to the older of two instruction sets.
"""

import ctypes
import os
import platform
import re
import warnings
import zlib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax

LIBRARY = Path(__file__).with_name("libjaxspec.so.2")
_CALLS = ("product", "mlp", "attention", "threshold")


class NativeStatus(NamedTuple):
    """The state of the native code on this machine.

    Attributes:
        instructions: the instruction set that is used; `None`: native code does not run.
        reason: for people: what is used, or why nothing is.
    """

    instructions: str | None
    reason: str


@cache
def status() -> NativeStatus:
    """Loads the native code, once in a process, and says whether it runs.

    Example:
        >>> status().instructions in ("avx512", "avx2", "neon", None)
        True
    """
    if os.environ.get("JAXSPEC_NATIVE") == "off":
        return NativeStatus(None, "products by XLA: switched off by JAXSPEC_NATIVE=off")
    if not LIBRARY.exists():
        return NativeStatus(None, "products by XLA: no native code was compiled")
    return load(LIBRARY)


def processor() -> str:
    """Returns the name of this machine's processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def checksum() -> str:
    """Returns a checksum of the compiled library: another one may take other times."""
    return f"{zlib.crc32(LIBRARY.read_bytes()):08x}" if LIBRARY.exists() else "none"


def num_cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def ffi_version() -> int:
    """Returns the version of the interface of the installed jaxlib, as its header gives it."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    major, minor = re.findall(r"#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", header)
    return 1000 * int(major) + int(minor)


def load(library: Path) -> NativeStatus:
    """Loads a compiled library and tells XLA of its calls; warns if it cannot be used."""
    try:
        loaded = ctypes.CDLL(str(library))
        # A call of another version would stop JAX's CPU backend, if that starts later.
        if (compiled := loaded.jaxspec_ffi_version()) != (installed := ffi_version()):
            raise RuntimeError(
                f"it was compiled for version {compiled} of XLA's interface, jaxlib has {installed}"
            )
        loaded.jaxspec_instruction_set.restype = ctypes.c_char_p
        instructions = loaded.jaxspec_instruction_set()
        if instructions is None:
            return NativeStatus(None, "products by XLA: this processor has neither AVX2 nor NEON")
        for name in _CALLS:
            handler = jax.ffi.pycapsule(getattr(loaded, f"jaxspec_{name}"))
            jax.ffi.register_ffi_target(f"jaxspec_{name}", handler, platform="cpu")
    # Whatever a foreign file or another release of jaxlib raises: the package runs without.
    except Exception as error:
        reason = f"products by XLA: {library.name} cannot be used: {error}"
        warnings.warn(
            f"{reason}. Passes are slower. Install the package again to compile it for this "
            "machine and jaxlib.",
            stacklevel=2,
        )
        return NativeStatus(None, reason)
    return NativeStatus(instructions.decode(), f"native products ({instructions.decode()})")


def call(name: str, results: Any, *operands: Any, **attributes: Any) -> Any:
    """Calls a native function within a program for CPUs.

    Args:
        name: `product`, `mlp`, `attention` or `threshold`.
        results: shapes and dtypes of the results, as `jax.ffi.ffi_call` takes them.
        *operands: arrays, in the order that `calls.c` gives.
        **attributes: numbers, by the names that `calls.c` reads.
    """
    return jax.ffi.ffi_call(f"jaxspec_{name}", results)(*operands, **attributes)
