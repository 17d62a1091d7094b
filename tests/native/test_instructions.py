"""The products of each instruction set as programs of their own: sanitized, or emulated."""

import importlib.util
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "jaxspec" / "native"
_SPEC = importlib.util.spec_from_file_location("hatch_build", HERE.parents[1] / "hatch_build.py")
assert _SPEC is not None
assert _SPEC.loader is not None
build = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(build)


def compile_products(
    command: list[str], instructions: str, flags: list[str], to: Path
) -> subprocess.CompletedProcess[str]:
    named = [f"-DKERNELS=kernels_{instructions}", f"-I{SOURCES}"]
    objects = []
    for source, own in ((SOURCES / "kernels.c", flags), (HERE / "products.c", [*flags, *named])):
        objects.append(str(to.with_name(f"{source.stem}.o")))
        step = [*command, *build.FLAGS, *own, "-c", str(source), "-o", objects[-1]]
        subprocess.run(step, check=True, capture_output=True, text=True)
    step = [*command, *flags, *objects, "-o", str(to), "-lm"]
    return subprocess.run(step, capture_output=True, text=True)


def runs_here(instructions: str) -> bool:
    names = {"avx512": "avx512dq", "avx2": "avx2"}
    try:
        return names[instructions] in Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False


@pytest.mark.skipif(platform.machine() != "x86_64", reason="its instructions are of x86-64")
@pytest.mark.parametrize("instructions", build.X86)
def test_products_read_and_write_only_what_is_theirs(instructions, tmp_path):
    """Under the address and undefined-behaviour sanitizers."""
    cc = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if cc is None:
        pytest.skip("needs a C compiler")
    if not runs_here(instructions):
        pytest.skip(f"needs a processor with {instructions}")
    flags = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    program = tmp_path / "products"
    linked = compile_products([cc], instructions, [*flags, *build.X86[instructions]], program)
    if linked.returncode:
        pytest.skip(f"needs a compiler with sanitizers: {linked.stderr[-200:]}")
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_products_of_neon(tmp_path):
    """Compiled for another machine, and run as that machine would."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("needs the package ziglang")
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None and platform.machine() != "aarch64":
        pytest.skip("needs qemu-aarch64")
    command = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl"]
    program = tmp_path / "products"
    linked = compile_products(command, "neon", ["-static"], program)
    assert linked.returncode == 0, linked.stderr
    run = [str(program)] if emulator is None else [emulator, str(program)]
    done = subprocess.run(run, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_whole_library_compiles_for_another_machine(tmp_path, monkeypatch):
    """Its calls too, which no emulator runs."""
    if importlib.util.find_spec("ziglang") is None:
        pytest.skip("needs the package ziglang")
    monkeypatch.setattr(build, "compiler", lambda: [sys.executable, "-m", "ziglang", "cc"])
    library, target = tmp_path / build.LIBRARY, ("-target", "aarch64-linux-gnu")
    assert build.compile_library(library, "aarch64", target) is None
    assert library.read_bytes()[18:20] == (183).to_bytes(2, "little")  # ELF's number of AArch64
