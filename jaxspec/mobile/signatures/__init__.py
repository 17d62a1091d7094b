"""The functions that an exported file may hold, one subject per file.

Each computes passes or whole steps of one row at fixed shapes; `jaxspec.mobile.records` says how
they take and return tensors. In contrast to `jaxspec.core`, `length` counts the cached tokens: the
pending token is not among them.

- `target`: `prefill_N`, `decode`, `verify_N`, `commit_N`: passes of the target.
- `steps`: the half of a step that all drafters share: target pass, acceptance, commit; alone it
  is `accept_N`.
- `eagle`, `dflash`, `draft_model`, `layer_skip`, `recycling`, `lookup`, `blocks`: steps of one
  drafter each, and their parts.
- `diffusion`: passes and rounds of diffusion language models.
"""
