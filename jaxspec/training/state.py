"""What a training run is at one moment, and how it survives being killed."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from jaxtyping import Array, Int

from jaxspec.core.types import PyTree


class TrainState(NamedTuple):
    """A run after `step` updates.

    Batches and random keys follow from the seed and the step, so this is all there is to resume.
    """

    step: Int[Array, ""]
    params: PyTree
    opt_state: optax.OptState


def initial_state(params: PyTree, optimizer: optax.GradientTransformation) -> TrainState:
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


class StateKeeper:
    """Keeps the last two states of a run in a folder.

    A state appears under its name only when all of it is on disk, so a run that is killed while
    saving finds the state before.
    """

    def __init__(self, folder: Path, keep: int = 2):
        self.folder = folder.absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=True, enable_async_checkpointing=False
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    @property
    def latest_step(self) -> int | None:
        """The newest state's step; None where nothing was saved."""
        return self._manager.latest_step()

    def save(self, state: TrainState) -> None:
        step = int(state.step)
        if step != self.latest_step:
            self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, like: TrainState) -> TrainState | None:
        """The newest state, or None where nothing was saved.

        Args:
            like: a state of the same shapes, such as the initial one.
        """
        if self.latest_step is None:
            return None
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        restored: Any = self._manager.restore(
            self.latest_step, args=ocp.args.StandardRestore(abstract)
        )
        return restored

    def close(self) -> None:
        self._manager.close()
