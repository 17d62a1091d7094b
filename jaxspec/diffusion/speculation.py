"""Settings of self-speculation, the state of a row, and how many decisions a batch drafts."""

import dataclasses
import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxspec.core.checks import MOST_NODES, Checked, Count, Natural, Positive, at_least, at_most
from jaxspec.core.tree import tree_from_paths
from jaxspec.core.types import PyTree, Stop, Tree
from jaxspec.diffusion.passes import CanvasSettings, DenoisePlan
from jaxspec.diffusion.unmask import Canvas, Prediction


@dataclasses.dataclass(frozen=True)
class SelfSpeculation(Checked):
    """Settings of drafting ahead. Without `lossy_top_k` the text is that of stepwise decoding.

    Attributes:
        num_drafts: most decisions drafted ahead.
        branch: drafted successors of each canvas. 1 is a chain. With more, a pass reads
            1 + branch + branch^2 + ... canvases, which helps if the order of positions is unsure.
        lookup: draft the token that followed the same two tokens earlier in the text, if there is
            one, in place of the token that the last pass predicts.
        costs: cost of a pass with 0, 1, ..., `num_drafts` drafts, in any unit, as
            `jaxspec.decoding.denoise.measure_costs` measures it. A batch then drafts the number of
            decisions, of `draft_counts`, that pays best, given how often drafts of its rows were
            kept before; that may be 0. `None` drafts as many as possible.
        deterministic: every pass of a kind (those that open a block are one) has one shape,
            whatever is drafted, so that the choice of kernels does not depend on drafts.
            `stepwise` then gives the stepwise decoding of that shape.
        limit: most decisions to draft, up to `num_drafts`; `None` for all. Without `costs`, passes
            stay as wide as for `num_drafts`.
        lossy_top_k: LOSSY: keep a draft if its tokens are among the k likeliest at its positions,
            whatever positions stepwise decoding would fill in (the paper's relaxed verification).
            The text differs. `None` is the lossless rule.

    Raises:
        ValueError: an argument is out of range; the message names it.

    Example:
        >>> import jaxspec
        >>> model = jaxspec.load("demo-block-diffusion")
        >>> config = jaxspec.DenoiseConfig(max_new_tokens=16)
        >>> result = jaxspec.denoise(model, "Name a colour.", config, jaxspec.SelfSpeculation(4))
        >>> result[0].num_calls < 16
        True
    """

    num_drafts: Annotated[int, at_least(0), at_most(MOST_NODES)] = 4
    costs: Sequence[Positive] | None = None
    branch: Count = 1
    lookup: bool = False
    deterministic: bool = False
    limit: Natural | None = None
    lossy_top_k: Count | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.branch > 1 and self.branch**self.num_drafts > _MOST_LEAVES:
            raise ValueError(
                f"branch: {self.branch} successors of each of {self.num_drafts} drafts give "
                f"{self.branch}**{self.num_drafts} ends, at most {_MOST_LEAVES} are possible; take "
                "fewer drafts."
            )
        if self.limit is not None and self.limit > self.num_drafts:
            raise ValueError(
                f"limit must be in 0..{self.num_drafts} (num_drafts), got {self.limit}."
            )
        if self.costs is not None:
            self._check_costs(len(self.costs))

    def _check_costs(self, given: int) -> None:
        if self.deterministic:
            raise ValueError("costs: deterministic passes all cost the same; leave costs out.")
        if given != self.num_drafts + 1:
            raise ValueError(
                f"costs must have {self.num_drafts + 1} entries, one for each number of drafts "
                f"from 0 to {self.num_drafts}, got {given}."
            )

    @property
    def stepwise(self) -> "SelfSpeculation":
        """The same passes without drafts."""
        return dataclasses.replace(self, limit=0, costs=None)

    @property
    def tree(self) -> Tree:
        """The canvases of a pass: node 0 is the decided one, each other has one decision more.

        They are sorted by the number of decisions drafted in them.
        """
        return _complete_tree(self.branch, self.num_drafts)

    @property
    def draft_counts(self) -> tuple[int, ...]:
        """Numbers of drafts to choose from: the most; with `costs` 0, 1, 3, 7, ... and the most."""
        most = self.num_drafts if self.limit is None else self.limit
        if self.costs is None:
            return (most,)
        fewer = itertools.takewhile(lambda n: n < most, (2**i - 1 for i in itertools.count()))
        return (*fewer, most)


_MOST_LEAVES = 256


@lru_cache
def _complete_tree(branch: int, depth: int) -> Tree:
    levels = (itertools.product(range(branch), repeat=length) for length in range(1, depth + 1))
    return tree_from_paths(list(itertools.chain.from_iterable(levels)))


STEPWISE = SelfSpeculation(0)


class DenoiseStats(NamedTuple):
    """Counters of one row. The pass that reads the whole blocks of the prompt is not counted.

    Attributes:
        num_calls: passes it took part in.
        num_canvases: canvases that those passes read.
        drafted: entry i: passes that checked i drafts, one after the other.
        accepted: entry i: passes that kept i of them.
    """

    num_calls: Int[Array, ""]
    num_canvases: Int[Array, ""]
    drafted: Int[Array, " levels"]
    accepted: Int[Array, " levels"]


class DenoiseState(NamedTuple):
    """State of one row between steps.

    Attributes:
        row: what stays the same.
        canvas: the text so far.
        prediction: of the last pass.
        kept: keys and values, as `DenoisePlan.cache` asks for.
        hits: drafts confirmed, older ones with less weight (`FORGETTING`).
        trials: drafts checked, weighted alike.
        stats: counters.
    """

    row: CanvasSettings
    canvas: Canvas
    prediction: Prediction
    kept: PyTree
    hits: Float[Array, ""]
    trials: Float[Array, ""]
    stats: DenoiseStats


class CanvasDrafts(NamedTuple):
    """Canvases of one row for one pass, in the order of `SelfSpeculation.tree`.

    Attributes:
        canvases: one per node.
        possible: False for nodes that could not be drafted.
        valid: True for nodes that are read.
        limit: most decisions that are drafted.
    """

    canvases: Canvas
    possible: Bool[Array, " nodes"]
    valid: Bool[Array, " nodes"]
    limit: Int[Array, ""]


def adapts(speculation: SelfSpeculation) -> bool:
    """Returns whether the number of drafts follows costs."""
    return speculation.costs is not None and speculation.num_drafts > 0


def worth_drafting(
    plan: DenoisePlan, speculation: SelfSpeculation, states: DenoiseState
) -> Int[Array, ""]:
    """Returns the index of the entry of `draft_counts` that costs least until the end of a batch.

    It assumes that drafts are kept as often as before. There is one number for a batch: a pass is
    as wide as its widest row, and the end is that of the slowest row: the end of the text, or of
    the block if rows open blocks together.
    """
    assert speculation.costs is not None, "without costs there is no choice"
    counts = np.asarray(speculation.draft_counts)
    canvas, positions = states.canvas, jnp.arange(plan.canvas_size)
    ends = canvas.start + plan.block if plan.reopens else states.row.end
    masks = (canvas.tokens == plan.rules.mask_token_id) & (positions[None] < ends[:, None])
    left = jnp.where(canvas.stop == Stop.RUNNING, jnp.sum(masks, axis=1), 0)
    # A decision fills in one position at least, so no draft goes past the last mask.
    reaches = jnp.arange(1, speculation.num_drafts + 1)[None] < left[:, None]
    rate = (states.hits / states.trials)[:, None]
    kept = jnp.cumprod(jnp.where(reaches, rate, 0.0), axis=1)
    decided = 1.0 + jnp.pad(jnp.cumsum(kept, axis=1), ((0, 0), (1, 0)))
    passes = jnp.max(left[:, None] / decided, axis=0)
    costs = jnp.asarray(speculation.costs, jnp.float32)
    # `argmin` takes the first: no drafts, where it makes no difference.
    return jnp.argmin((passes * costs)[counts]).astype(jnp.int32)


FORGETTING = 0.95
"""Factor on the weight of past drafts in the estimate, per round."""
