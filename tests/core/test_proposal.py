"""Pass widths: which sizes of the target pass are worth compiling."""

import jax.numpy as jnp
import pytest

from jaxspec.core.proposal import bank, chain_proposal


@pytest.mark.parametrize(
    ("num_tokens", "widths"),
    [(1, (1,)), (2, (1, 2)), (4, (1, 2, 4)), (5, (1, 2, 5)), (8, (1, 2, 4, 8)), (9, (1, 2, 4, 9))],
)
def test_banks_by_eye(num_tokens, widths):
    assert bank(num_tokens) == widths


@pytest.mark.parametrize("num_tokens", range(1, 70))
def test_a_bank_ascends_to_the_whole_and_each_width_saves_a_quarter(num_tokens):
    widths = bank(num_tokens)
    assert widths[-1] == num_tokens
    assert list(widths) == sorted(set(widths))
    assert all(4 * width <= 3 * num_tokens for width in widths[:-1])


def test_a_chain_of_laws_has_one_law_per_drafted_token():
    proposal = chain_proposal(jnp.arange(4), jnp.ones(4, bool), jnp.zeros((3, 7)))
    assert proposal.law_row.tolist() == [0, 0, 1, 2]
    assert proposal.tree.parents.tolist() == [-1, 0, 1, 2]
