"""Questions that code written for one row may ask of all rows of its batch."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped


@jax.custom_batching.custom_vmap
def largest_of_rows(number: Shaped[Array, ""]) -> Shaped[Array, ""]:
    """The largest `number` of the rows that are mapped over (`jax.vmap`); unmapped, `number`.

    It is one value for the whole batch, so that a `cond` or `switch` that depends on it runs one
    branch. One that depends on a value of each row runs all of them.
    """
    return number


@largest_of_rows.def_vmap
def _(axis_size: int, in_batched: list[bool], number: Shaped[Array, " rows"]):
    return largest_of_rows(jnp.max(number)), False
