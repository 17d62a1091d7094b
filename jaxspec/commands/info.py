"""`jaxspec info`: describes what this installation runs on, what it holds and what it lacks."""

import argparse
import importlib.metadata
import os
import re
from collections.abc import Iterable, Iterator

import jax

import jaxspec
from jaxspec.checkpoint import shipped_folders
from jaxspec.extras import DISTRIBUTION
from jaxspec.measure.machine import this_machine

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of `jaxspec info`: it has none."""
    parser.description = "Describes this installation, for a look and for a bug report."


def run(args: argparse.Namespace) -> int:
    """Prints one line for each fact."""
    del args
    machine = this_machine()
    installed = {name: _version(name) for name in _PACKAGES}
    there, missing = _extras()
    facts = {
        "jaxspec": f"{jaxspec.__version__}, Python {machine.python}",
        "device": f"{machine.device} ({machine.platform}, {machine.cores} cores)",
        "products": machine.products,
        "packages": ", ".join(f"{name} {version}" for name, version in installed.items()),
        "extras": there,
        "not installed": missing,
        "shipped": _listed(shipped_folders()),
        "cache": _cache(),
    }
    width = max(map(len, facts))
    for name, fact in facts.items():
        print(f"{name:<{width}}  {fact}")
    return 0


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _extras() -> tuple[str, str]:
    """Lists the extras that are installed, and those that are not."""
    try:
        names = importlib.metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        unknown = "unknown, as this copy of jaxspec is not installed (pip install .)"
        return unknown, unknown
    complete = [name for name in names if not _missing(name)]
    return _listed(complete), _listed(set(names) - set(complete))


def _missing(extra: str) -> list[str]:
    return [name for name in _packages_of(DISTRIBUTION, extra) if _version(name) is None]


def _packages_of(distribution: str, extra: str) -> Iterator[str]:
    """Lists the packages of an extra, those of extras that it names included."""
    try:
        requirements = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for needed in requirements:
        requirement, _, marker = needed.partition(";")
        if not re.search(rf"""extra == ['"]{re.escape(extra)}['"]""", marker):
            continue
        found = re.match(r"([\w.-]+)(?:\[(.*?)\])?", requirement)
        assert found is not None, "a requirement begins with a name"
        yield found[1]
        for inner in filter(None, (found[2] or "").split(",")):
            yield from _packages_of(found[1], inner.strip())


def _cache() -> str:
    folder = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    if folder is None:
        return "off: nothing compiled is kept (JAXSPEC_CACHE)"
    size = sum(entry.stat().st_size for entry in os.scandir(folder)) if os.path.isdir(folder) else 0
    return f"{folder} ({size / 1e6:.0f} MB of compiled programs)"
