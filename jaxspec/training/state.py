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

from jaxspec.checkpoint.files import CheckpointError
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

    Raises:
        CheckpointError: `folder` is a file, or a state in it is damaged.
    """

    def __init__(self, folder: Path, keep: int = 2):
        self.folder = folder.absolute()
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder} must be a folder of states, and is a file: delete it, or choose "
                "another folder for the state."
            )
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=True, enable_async_checkpointing=False
        )
        try:
            self._manager = ocp.CheckpointManager(self.folder, options=options)
        except ValueError as error:  # Orbax's, of what it says of each state
            if _is_of_the_machine(error):
                raise
            raise _unreadable(self.folder, error) from error

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

        Raises:
            CheckpointError: the newest state is damaged.
            MemoryError: there is too little memory for it.
            OSError: it may not be read, or the disk fails.
        """
        step = self.latest_step
        if step is None:
            return None
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        try:
            restored: Any = self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
        except Exception as error:  # Orbax and its storage raise many kinds for damaged files
            if _is_of_the_machine(error):
                raise
            raise _unreadable(self.folder / str(step), error) from error
        return restored

    def close(self) -> None:
        """Ends the use of the folder."""
        self._manager.close()


def _is_of_the_machine(error: Exception) -> bool:
    """Says whether memory, permissions or a disk are at fault, and the files may be whole."""
    if isinstance(error, OSError):
        return not isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    # The storage says it in words.
    said = any(word in str(error) for word in ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED"))
    return said or isinstance(error, MemoryError | jax.errors.JaxRuntimeError)


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read as states of a run ({error!r:.300}). If a state is damaged, delete "
        "its folder: the run goes on from the one before, or begins anew where there is none."
    )
