"""Compiles the native code of `jaxspec/native` when the package is built.

A build does not fail where there is no compiler: the wheel is then a pure one, whose products are
those of XLA. The compiler is the machine's own, or Zig's, which is asked for as a build dependency
only where there is none. `JAXSPEC_NATIVE=off` builds a pure wheel on purpose.

For a checkout that is not installed: `python hatch_build.py` compiles in place.
"""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "jaxspec" / "native"
LIBRARY = "libjaxspec.so.2"
FLAGS = ["-std=gnu11", "-O3", "-fPIC", "-fno-math-errno", "-ffp-contract=fast"]
X86 = {
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma"],
    "avx2": ["-mavx2", "-mfma"],
}
LEVELS = {"x86_64": X86, "amd64": X86, "aarch64": {"neon": []}, "arm64": {"neon": []}}


def has_native_code(machine: str = platform.machine()) -> bool:
    """Returns True where there is something to compile."""
    return sys.platform != "win32" and machine.lower() in LEVELS


def compiler() -> list[str] | None:
    """Returns the command of a C compiler, or `None`."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    return None


def include_folder() -> str | None:
    """Returns the folder of jaxlib's headers, or `None`; jaxlib itself is not imported."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations))) / "include"
    return str(folder) if (folder / "xla" / "ffi" / "api" / "c_api.h").is_file() else None


def compile_library(
    to: Path, machine: str | None = None, flags: tuple[str, ...] = ()
) -> str | None:
    """Compiles the library. Returns why not, or `None` when it is there.

    Args:
        to: the file to write.
        machine: `x86_64` or `aarch64`; `None`: this one.
        flags: more flags for every step.
    """
    if os.environ.get("JAXSPEC_NATIVE") == "off":
        return "switched off by JAXSPEC_NATIVE=off"
    machine = machine or platform.machine()
    command, headers = compiler(), include_folder()
    if not has_native_code(machine):
        return f"no native code for {sys.platform} on {machine}"
    levels = LEVELS[machine.lower()]
    if command is None:
        return "no C compiler (cc, gcc, clang or the package ziglang)"
    if headers is None:
        return "jaxlib's headers are not there"
    with tempfile.TemporaryDirectory() as scratch:
        objects = []
        units = [("kernels.c", name, more) for name, more in levels.items()]
        for source, name, more in [*units, ("calls.c", "calls", ["-isystem", headers])]:
            objects.append(str(Path(scratch, f"{name}.o")))
            step = [*command, *FLAGS, *flags, *more, "-c", str(FOLDER / source), "-o", objects[-1]]
            done = subprocess.run(step, capture_output=True, text=True)
            if done.returncode:
                return f"{' '.join(step)} failed: {done.stderr[-2000:]}"
        built = Path(scratch, LIBRARY)
        step = [*command, *flags, "-shared", "-o", str(built), *objects, "-lm"]
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode:
            return f"{' '.join(step)} failed: {done.stderr[-2000:]}"
        staged = to.with_name(f"{to.name}.{os.getpid()}")
        shutil.copyfile(built, staged)
        staged.replace(to)
    return None


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # compiling in place needs no hatchling
    BuildHookInterface = object


class NativeBuildHook(BuildHookInterface):
    """Compiles before a wheel is made, an editable one too."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Returns what the build needs: jaxlib's headers, and Zig where there is no compiler."""
        if os.environ.get("JAXSPEC_NATIVE") == "off" or not has_native_code():
            return []
        # Versions of hatchling print the bounds of a requirement in different orders.
        jax = next(
            name for name in self.metadata.core.dependencies if re.match(r"jax\b(?!-)", name)
        )
        return [jax.replace("jax", "jaxlib", 1), *([] if compiler() else ["ziglang"])]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the library to the wheel and tags that for the platform."""
        if self.target_name != "wheel":
            return
        reason = compile_library(FOLDER / LIBRARY)
        if reason is not None:
            self.app.display_warning(f"jaxspec is built without native code: {reason}")
            (FOLDER / LIBRARY).unlink(missing_ok=True)
            return
        build_data["artifacts"].append(f"/jaxspec/native/{LIBRARY}")
        build_data["pure_python"] = False
        system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{system}"


if __name__ == "__main__":
    sys.exit(compile_library(FOLDER / LIBRARY))
