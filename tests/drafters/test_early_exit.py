"""Chains that end when the draft model is unsure: what they save, and what is refused."""

import jax
import numpy as np
import pytest

from jaxspec import DraftModel, Eagle, GenerationConfig, generate
from jaxspec.checkpoint import Model
from jaxspec.drafters import LoadedDrafter
from jaxspec.models import Network
from tests.laws.drafters import blurred, network

PROMPT, CONFIG = [5, 17, 20, 8], GenerationConfig(max_new_tokens=24)
FORKED = ((0,), (1,))


def test_an_exit_saves_draft_passes_and_narrows_the_target_pass():
    """A pass for each law but the first, and the narrowest target pass for the tokens.

    The last law of a step may have been too flat to draw from.
    """
    target, passes = network(24), []

    class Counted(Network):
        def forward(self, tokens, *args, scratch=None, **kwargs):
            if scratch is not None:
                jax.debug.callback(lambda: passes.append(1))
            return super().forward(tokens, *args, scratch=scratch, **kwargs)

    jax.tree_util.register_dataclass(Counted, data_fields=["params"], meta_fields=["config"])
    draft = blurred(target)
    drafter = DraftModel(6, threshold=0.01)
    loaded = LoadedDrafter(drafter, Counted(draft.params, draft.config))
    (row,) = generate(Model(target), PROMPT, CONFIG, loaded, return_trace=True)
    jax.effects_barrier()
    drafted = [int(np.sum(step.valid)) - 1 for step in row.trace]
    assert len(set(drafted)) > 1
    fewest, most = sum(max(count - 1, 0) for count in drafted), sum(drafted)
    assert fewest <= len(passes) <= most < len(drafted) * (drafter.num_speculative_tokens - 1)
    for step, count in zip(row.trace, drafted, strict=True):
        assert step.width == min(width for width in drafter.widths if width > count)
    assert min(step.width for step in row.trace) < max(drafter.widths)
    (whole,) = generate(
        Model(target), PROMPT, CONFIG, LoadedDrafter(DraftModel(6), draft), return_trace=True
    )
    assert row.tokens.tolist() == whole.tokens.tolist()
    assert sum(drafted) < sum(int(np.sum(step.valid)) - 1 for step in whole.trace)


@pytest.mark.parametrize("make", [DraftModel, Eagle])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": 1.2}, r"threshold must be in \[0, 1\], got 1.2"),
        ({"threshold": 0.2, "paths": FORKED}, "threshold: only a chain ends early.* 2 children"),
    ],
)
def test_thresholds_that_mean_nothing_are_refused(make, settings, message):
    with pytest.raises(ValueError, match=message):
        make(**{"paths": ((0,), (0, 0)), **settings})
    make(paths=FORKED)
