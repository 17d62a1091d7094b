"""The shipped block drafters on the shipped target: the same text as plain decoding, at any length.

Slow, and skipped without the checkpoints and the prompts.
"""

import pytest

from benchmarks.prompts import PROMPT_SETS, first_that_fit, read_prompt_set
from jaxspec import GenerationConfig, generate, load
from jaxspec.checkpoint import shipped_models
from jaxspec.commands.methods import DEER, MADE_FOR
from jaxspec.drafters import Deer
from jaxspec.measure.compare import find_divergence, prepare

pytestmark = pytest.mark.slow
CONFIG = GenerationConfig(max_new_tokens=64)


@pytest.fixture(scope="module")
def target():
    if MADE_FOR not in shipped_models():
        pytest.skip(f"needs checkpoints/{MADE_FOR}, which is not here")
    return load(MADE_FOR)


@pytest.fixture(scope="module")
def prompts(target, data_folder) -> list[str]:
    """Sixty, of three kinds."""
    folder = data_folder("eval")
    found = [
        prompt.text
        for group in PROMPT_SETS
        for prompt in first_that_fit(read_prompt_set(group, folder), target, 128, 20)
    ]
    assert len(found) == 60
    return found


@pytest.fixture(scope="module")
def plain(target, prompts):
    return [generate(target, prompt, CONFIG)[0] for prompt in prompts]


def deer(block: int, **settings):
    if DEER not in shipped_models():
        pytest.skip(f"needs checkpoints/{DEER}, which is not here")
    return Deer.of(load(DEER), block, **settings)


def assert_same(target, prompts, plain, drafter):
    """Every output is plain decoding's; near ties of its two best logits aside."""
    for index, (prompt, expected) in enumerate(zip(prompts, plain, strict=True)):
        (row,) = generate(target, prompt, CONFIG, drafter)
        request = prepare(target, prompt, CONFIG, None, 0)
        divergence = find_divergence(target, request, index, expected, row)
        assert divergence is None or divergence.is_tie


@pytest.mark.parametrize("num_nodes", [None, 8])
@pytest.mark.parametrize("block", [4, 8, 16, 32])
def test_every_block_size_gives_the_text_of_plain_decoding(
    target, prompts, plain, block, num_nodes
):
    drafter = deer(block, num_nodes=num_nodes)
    assert_same(target, prompts, plain, drafter)


def test_a_batch_of_eight_decodes_as_each_alone(target, prompts):
    drafter = deer(8)
    together = generate(target, prompts[:8], CONFIG, drafter)
    for prompt, row in zip(prompts[:8], together, strict=True):
        (alone,) = generate(target, prompt, CONFIG, drafter)
        request = prepare(target, prompt, CONFIG, None, 0)
        divergence = find_divergence(target, request, 0, alone, row)
        assert divergence is None or divergence.is_tie
