"""Measurements: methods against plain decoding, steps against passes, passes against memory."""

from jaxspec.measure.compare import compare
from jaxspec.measure.comparison import Comparison

__all__ = ["Comparison", "compare"]
