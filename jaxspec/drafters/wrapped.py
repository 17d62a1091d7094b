"""A drafter around another one."""

import dataclasses

from jaxtyping import PRNGKeyArray

from jaxspec.core.decode import num_likeliest
from jaxspec.core.types import Context, Drafter, Hidden, Params, Proposal, PyTree


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """Drafts as another drafter does; a subclass changes a part of that.

    Attributes:
        drafter: the other drafter.
    """

    drafter: Drafter

    @property
    def taps(self) -> tuple[int, ...]:
        """See `core.types.Drafter`."""
        return self.drafter.taps

    @property
    def tree_shape(self) -> tuple[int, int]:
        """See `core.types.Drafter`."""
        return self.drafter.tree_shape

    @property
    def widths(self) -> tuple[int, ...]:
        """See `core.types.Drafter`."""
        return self.drafter.widths

    @property
    def num_likeliest(self) -> int:
        """See `core.types.AsksLikeliest`; 0 if the other drafter asks for none."""
        return num_likeliest(self.drafter)

    def init(self, params: Params, prompt: Hidden, context: Context) -> PyTree:
        """See `core.types.Drafter`."""
        return self.drafter.init(params, prompt, context)

    def propose(
        self, params: Params, key: PRNGKeyArray, state: PyTree, context: Context
    ) -> tuple[Proposal, PyTree]:
        """See `core.types.Drafter`."""
        return self.drafter.propose(params, key, state, context)
