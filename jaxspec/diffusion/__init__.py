"""Masked-diffusion language models: orders of unmasking, passes, self-speculative decoding."""

from jaxspec.diffusion.self_speculative import SelfSpeculation

__all__ = ["SelfSpeculation"]
