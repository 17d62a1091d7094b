"""Decoding with and without drafts: generation, denoising, results, metrics, checks of drafters."""
