"""Masked-diffusion language models: orders of unmasking, passes, self-speculative decoding."""

from jaxspec.diffusion.speculation import SelfSpeculation

__all__ = ["SelfSpeculation"]
