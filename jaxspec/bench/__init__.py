"""Measurements: methods against plain decoding, steps against passes, passes against memory."""

from jaxspec.bench.compare import compare
from jaxspec.bench.comparison import Comparison

__all__ = ["Comparison", "compare"]
