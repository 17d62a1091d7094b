"""A chunk copies no cache: not in its loops, not between them, not on its way in or out."""

import jax
import numpy as np
import pytest

from jaxspec.batch.texts import RowSettings, run_chunk, state_shapes
from jaxspec.core.decode import Prompt
from jaxspec.core.types import Params, Warp
from jaxspec.models import Network, param_shapes
from tests.laws.drafters import DRAFTERS, PLAIN
from tests.laws.test_hlo import BUCKET, CAPACITY, CONFIG, MOVES, moved_buffers, read_hlo

ROWS = 4


def compiled_chunk(name: str) -> str:
    case = {"plain": PLAIN, **DRAFTERS}[name]
    drafter = case.make()
    network = Network(param_shapes(CONFIG), CONFIG)
    params = Params(network, jax.eval_shape(case.draft, network))
    one = np.asarray(1, np.int32)
    prompt = Prompt(
        tokens=np.zeros(BUCKET, np.int32),
        length=one,
        room=one,
        seed=np.zeros(2, np.int32),
        stop_ids=np.full(1, -1, np.int32),
        warp=Warp(),
    )
    shapes = state_shapes(params, prompt, ROWS, drafter=drafter, settings=RowSettings(CAPACITY))
    lowered = run_chunk.lower(
        params, shapes, None, None, np.asarray(True), one, one, drafter=drafter
    )
    return lowered.compile().as_text()


@pytest.mark.parametrize("name", ["plain", "lookup", "draft model, chain"])
def test_no_cache_is_moved_anywhere(name):
    text = compiled_chunk(name)
    size = ROWS * CONFIG.num_kv_heads * CONFIG.head_dim * CAPACITY
    assert moved_buffers(text, size) == []
    moved = [
        f"{each.name}: {each.opcode}"
        for computation in read_hlo(text).values()
        for each in computation
        if each.opcode in MOVES and max(each.sizes, default=0) >= size
    ]
    assert moved == []
