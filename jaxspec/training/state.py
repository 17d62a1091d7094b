"""State of a training run, and its copies on disk that outlive a killed process."""

import errno
import os
import shutil
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

    Batches and random keys follow from the seed and the step, so nothing else is needed to resume.

    Attributes:
        step: number of updates.
        params: weights.
        opt_state: state of the optimizer.
    """

    step: Int[Array, ""]
    params: PyTree
    opt_state: optax.OptState


def initial_state(params: PyTree, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the state before the first update."""
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
        """Step of the newest state; `None` where nothing was saved."""
        return self._manager.latest_step()

    def save(self, state: TrainState) -> None:
        """Saves a state, unless one of its step is there.

        Raises:
            OSError: there is no room for it, or it cannot be written; the older states are kept.
        """
        step = int(state.step)
        if step == self.latest_step:
            return
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        if shutil.disk_usage(self.folder).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))
        try:
            self._manager.save(step, args=ocp.args.StandardSave(state))
        except ValueError as error:  # Orbax's, of a write that failed
            raise OSError(
                f"{self.folder}: the state of step {step} was not saved: {error}"
            ) from error

    def restore(self, like: TrainState) -> TrainState | None:
        """Returns the newest state, or `None` where nothing was saved.

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
        """Ends the use of the folder."""
        self._manager.close()
