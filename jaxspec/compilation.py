"""Compilation: kept between processes, timed apart from decoding, and known faults of JAX."""

import functools
import os
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import jax
from jax import monitoring
from jaxlib import version as jaxlib_version

_DURATIONS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
# Releases of jaxlib that compute some sums wrong on CPUs (jax-ml/jax#39103): all that failed one of
# the reproducers in tests/test_jax.py, up to the newest at the time of writing.
WRONG_SUMS = ("0.10.2", "0.11.0", "0.11.1", "0.11.2", "0.12.0", "0.12.0.1")
RIGHT_SUMS = "0.10.1"
_CURE = "--xla_cpu_experimental_ynn_fusion_type=-reduce"


def use_persistent_cache() -> None:
    """Keeps compiled programs on disk, so that the next process need not compile them again.

    Changes JAX for the whole process, so `import jaxspec` does not call it. The command line does.
    Call it before the first program is compiled. The programs lie in `$JAXSPEC_CACHE`, or else in
    `jaxspec/xla` in the user's cache folder, next to them the profiles of
    `generate(..., drafting="auto")`. Nothing is changed where JAX already has a cache
    folder (`JAX_COMPILATION_CACHE_DIR`), or where `JAXSPEC_CACHE` is "off".

    On CPUs, XLA logs an error for every program that it reads back, because it takes hints for
    tuning for features that the machine lacks (openxla/xla#44565). The programs are fine. So
    logging by XLA is cut to fatal errors, unless `JAX_LOGGING_LEVEL` or `TF_CPP_MIN_LOG_LEVEL` says
    what to log.

    Example:
        >>> use_persistent_cache()
    """
    chosen = os.environ.get("JAXSPEC_CACHE", "")
    config: Any = jax.config  # options are added to it when jax is imported
    if chosen == "off" or config.jax_compilation_cache_dir is not None:
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    config.update("jax_compilation_cache_dir", str(chosen or home / "jaxspec" / "xla"))
    # A small model's programs compile in less than JAX's default of a second, but there are many.
    config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    # JAX sets the variable to 1 where it is not set.
    if config.jax_logging_level == "NOTSET" and os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "1":
        config.update("jax_logging_level", "CRITICAL")
        # Gives back JAX's own messages in Python. Those of XLA stay as the line above set them.
        config.update("jax_logging_level", "NOTSET")


def cache_folder() -> Path | None:
    """Returns the folder on this machine where programs are kept; `None` if there is none.

    Example:
        >>> folder = cache_folder()
    """
    config: Any = jax.config
    folder = config.jax_compilation_cache_dir
    return None if folder is None or "://" in folder else Path(folder)


@functools.cache
def warn_of_wrong_sums() -> None:
    """Warns, once in a process, where this release of JAX is known to compute sums wrong on CPUs.

    Called when a network first runs: finding the backend would start it, which an import must not.
    """
    release = jaxlib_version.__version__
    if release not in WRONG_SUMS or jax.default_backend() != "cpu":
        return
    if _CURE not in os.environ.get("XLA_FLAGS", ""):
        warnings.warn(
            f"jaxlib {release} computes some sums wrong on CPUs, silently (jax-ml/jax#39103). "
            f"Install a release that is right: pip install 'jax=={RIGHT_SUMS}' "
            f"'jaxlib=={RIGHT_SUMS}'. Or start Python with XLA_FLAGS={_CURE}.",
            stacklevel=2,
        )


class CompileClock:
    """Adds up, as a context manager, the time that this thread spends tracing and compiling.

    Time within a part that is reported by itself, such as tracing within lowering, counts once.

    Attributes:
        seconds: the sum since the block was entered.
    """

    seconds: float

    def __init__(self):
        self.seconds = 0.0

    def __enter__(self) -> "CompileClock":
        self.seconds = 0.0
        self._spans: list[tuple[float, float]] = []
        self._thread = threading.get_ident()
        monitoring.register_event_duration_secs_listener(self._add)
        return self

    def __exit__(self, *_) -> None:
        monitoring.unregister_event_duration_listener(self._add)

    def _add(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event in _DURATIONS and threading.get_ident() == self._thread:
            end = time.perf_counter()
            start = end - duration_secs
            while self._spans and self._spans[-1][0] >= start:
                first, last = self._spans.pop()
                self.seconds -= last - first
            if self._spans:
                start = max(start, self._spans[-1][1])
            self._spans.append((start, end))
            self.seconds += end - start
