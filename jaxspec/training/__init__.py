"""Training: text to packed batches, one loop, objectives, states that survive a kill."""
