"""Compilation: kept between processes, and timed apart from decoding."""

import os
import threading
from pathlib import Path
from typing import Any

import jax
from jax import monitoring

_DURATIONS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


def use_persistent_cache() -> None:
    """Keeps compiled programs on disk, unless JAX has been told where (or not) to keep them.

    In `$JAXSPEC_CACHE`, or else `jaxspec/xla` in the user's cache folder; `off` keeps none.
    """
    chosen = os.environ.get("JAXSPEC_CACHE", "")
    config: Any = jax.config  # options are added to it when jax is imported
    if chosen == "off" or config.jax_compilation_cache_dir is not None:
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(chosen or home / "jaxspec" / "xla"))
    # A small model's programs compile in less than JAX's default of a second, but there are many.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


class CompileClock:
    """Adds up, as a context manager, the time this thread spends tracing and compiling."""

    seconds: float

    def __init__(self):
        self.seconds = 0.0

    def __enter__(self) -> "CompileClock":
        self.seconds = 0.0
        self._thread = threading.get_ident()
        monitoring.register_event_duration_secs_listener(self._add)
        return self

    def __exit__(self, *_) -> None:
        monitoring.unregister_event_duration_listener(self._add)

    def _add(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event in _DURATIONS and threading.get_ident() == self._thread:
            self.seconds += duration_secs
