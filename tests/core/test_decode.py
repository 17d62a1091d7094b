"""The driver on models whose output is known by heart: budgets, stops, logits that are broken."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.core.decode import Prompt, prefill
from jaxspec.core.loop import decode, plan_decoding
from jaxspec.core.types import DecodeState, Params, Stop, Warp
from jaxspec.drafters import DraftModel, NoDraft
from jaxspec.models import Network, init_params
from tests.core.table_model import TableModel

VOCAB = 16
BUCKET, BUDGET = 4, 10


def counting(broken: dict[int, np.ndarray] | None = None) -> TableModel:
    """Counts: after token t comes t + 1, at any temperature in use here.

    broken: rows of logits to put after some tokens instead.
    """
    table = 60.0 * np.eye(VOCAB, k=1) + np.linspace(0, 1, VOCAB)
    for token, row in (broken or {}).items():
        table[token] = row
    return TableModel(jnp.asarray(table, jnp.float32))


DRAFTERS = {
    "plain": (NoDraft(), ()),
    "chain": (DraftModel(3), counting()),
    "tree": (DraftModel(paths=((0,), (1,), (0, 0), (1, 0), (0, 0, 0))), counting()),
}


def count_on(
    model: TableModel,
    drafter: str,
    starts: Sequence[int],
    room: int | Sequence[int] = BUDGET,
    warp: Warp | None = None,
    stop_id: int = -1,
    num_samples: int = 1,
) -> DecodeState:
    """Decodes rows from each start."""
    method, draft = DRAFTERS[drafter]
    rows = len(starts)
    prompts = Prompt(
        tokens=jnp.zeros((rows, BUCKET), jnp.int32).at[:, 0].set(jnp.array(starts)),
        length=jnp.ones(rows, jnp.int32),
        room=jnp.broadcast_to(jnp.asarray(room, jnp.int32), rows),
        seed=jnp.stack([jnp.zeros(rows, jnp.int32), jnp.arange(rows)], axis=1),
        stop_ids=jnp.full((rows, 1), stop_id, jnp.int32),
        warp=warp or Warp(),
    )
    plan = plan_decoding(BUCKET, BUDGET, method, num_samples=num_samples)
    return decode(Params(model, draft), prompts, drafter=method, plan=plan)


def emitted(states: DecodeState) -> list[list[int]]:
    lengths = states.context.length.tolist()
    tokens = states.context.tokens.tolist()
    return [row[1:length] for row, length in zip(tokens, lengths, strict=True)]


def stops(states: DecodeState) -> list[Stop]:
    return [Stop(stop) for stop in states.stop.tolist()]


def one_nan(sign: float) -> np.ndarray:
    """A single NaN of either sign; what a processor makes of 0 / 0 is negative."""
    row = np.zeros(VOCAB)
    row[3] = np.copysign(np.nan, sign)
    return row


# Token by token, what is wrong with the logits after it.
BROKEN = {
    3: np.full(VOCAB, np.nan),
    6: np.full(VOCAB, -np.inf),
    9: one_nan(+1.0),
    12: one_nan(-1.0),
}
# Rows that sample: temperature, top-k, top-p.
SAMPLERS = [(0.0, 0, 1.0), (1.0, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.9), (0.0, 3, 0.9)]


@pytest.mark.parametrize("drafter", ["plain", "chain", "tree"])
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_a_row_ends_where_its_logits_are_not_finite(mode, drafter):
    """The tokens before are kept, drafted or not; nothing made of broken logits is."""
    samplers = SAMPLERS if mode == "sampled" else [()]
    starts = [token - 2 for token in BROKEN for _ in samplers]
    warp = Warp()
    if mode == "sampled":
        temperature, top_k, top_p = map(jnp.array, zip(*samplers * len(BROKEN), strict=True))
        warp = Warp(temperature, top_k, top_p)
    # Row 0 is already where nothing can follow.
    states = count_on(counting(BROKEN), drafter, [3, *starts[1:]], warp=warp)
    assert stops(states) == [Stop.NOT_FINITE] * len(starts)
    assert emitted(states) == [[], *([start + 1, start + 2] for start in starts[1:])]


def test_a_row_that_may_emit_nothing_ends_at_once():
    """Every token is banned in the first row; the second is not concerned."""
    bias = jnp.stack([jnp.full(VOCAB, -jnp.inf), jnp.zeros(VOCAB)])
    warp = Warp(temperature=jnp.zeros(2), bias=bias)
    states = count_on(counting(), "plain", [0, 0], warp=warp)
    assert stops(states) == [Stop.NO_TOKEN, Stop.LENGTH]
    assert emitted(states) == [[], list(range(1, BUDGET + 1))]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_budgets_and_stop_ids_end_a_row_wherever_a_block_holds_its_end(drafter):
    """Budgets from 0 up to one where the stop id comes first, from every place in a block."""
    budgets = [*range(BUDGET), BUDGET, BUDGET]
    starts = [*[0] * BUDGET, 1, 4]
    states = count_on(counting(), drafter, starts, budgets, stop_id=9)
    ends = [min(start + budget, 9) for start, budget in zip(starts, budgets, strict=True)]
    assert emitted(states) == [
        list(range(start + 1, end + 1)) for start, end in zip(starts, ends, strict=True)
    ]
    assert stops(states) == [Stop.TOKEN if end == 9 else Stop.LENGTH for end in ends]
    assert not states.context.room.any()  # nobody drafts for rows that have stopped


def test_a_perfect_draft_takes_as_few_passes_as_there_are_blocks():
    """Ten tokens, four at a time, the last step offering no more than there is room for."""
    states = count_on(counting(), "chain", [0])
    assert states.stats.num_steps.tolist() == [3]
    assert states.stats.accepted.tolist() == [[0, 1, 0, 2]]
    assert states.stats.drafted.tolist() == [[0, 1, 0, 2]]
    assert states.stats.num_nodes.tolist() == [3 + 3 + 1]
    from_draft = states.emitted.from_draft[0, 1 : BUDGET + 1].tolist()
    assert from_draft == [True, True, True, False, True, True, True, False, True, False]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WatchedModel(TableModel):
    """Tells `watch` of the tokens of every pass, row by row."""

    watch: Callable[[jax.Array], None] = dataclasses.field(metadata={"static": True})

    def forward(self, tokens, *args, **kwargs):
        jax.debug.callback(self.watch, tokens)
        return super().forward(tokens, *args, **kwargs)


def test_samples_of_a_prompt_share_its_prefill():
    passes = []
    model = WatchedModel(counting().table, lambda tokens: passes.append(tokens.tolist()))
    states = count_on(model, "plain", [2, 5], room=3, num_samples=4)
    jax.block_until_ready(states)
    jax.effects_barrier()
    assert emitted(states) == [[3, 4, 5]] * 4 + [[6, 7, 8]] * 4
    prefills = [tokens for tokens in passes if len(tokens) == BUCKET]
    assert sorted(prefills) == [[2, 0, 0, 0], [5, 0, 0, 0]]
    assert len(passes) - len(prefills) == 8 * 3  # every row decodes by itself


@dataclasses.dataclass(frozen=True)
class MisjudgesItself(NoDraft):
    """Proposes one node, whatever shape it says."""

    tree_shape: tuple[int, int] = (1, 0)


@pytest.mark.parametrize(("shape", "named"), [((2, 0), "tokens"), ((1, 1), r"tree\.paths")])
def test_a_drafter_that_misjudges_its_tree_is_told_so(shape, named, monkeypatch):
    monkeypatch.setitem(DRAFTERS, "wrong", (MisjudgesItself(shape), ()))
    with pytest.raises(ValueError, match=rf"tree_shape is \(.*\); its proposal's {named} must"):
        count_on(counting(), "wrong", [0])


def test_a_prompt_is_read_until_the_end_of_the_longest_row(tiny_config):
    model = Network(init_params(tiny_config, jax.random.key(0)), tiny_config)
    tokens = jax.random.randint(jax.random.key(1), (3, 16), 0, tiny_config.vocab_size)

    def read(chunk: int, *lengths: int):
        rows = jax.jit(jax.vmap(partial(prefill, model, chunk=chunk)))
        return rows(tokens[: len(lengths)], jnp.array(lengths))

    lengths = (1, 6, 9)
    (hidden, cache), (whole, wholes_cache) = read(4, *lengths), read(16, *lengths)
    for row, length in enumerate(lengths):
        # The last token stays pending.
        found, expected = (
            (each.features[row, : length - 1], layers.layers[0].values[row, :, : length - 1])
            for each, layers in ((hidden, cache), (whole, wholes_cache))
        )
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, expected)
    assert hidden.features[:, :8].any(axis=-1).all()
    assert not hidden.features[:, 8:].any()
    assert not read(4, 1)[0].features.any()
