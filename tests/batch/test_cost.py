"""The cost model: numbers a person can check, and the tables of docs/scaling.md made from it."""

from pathlib import Path

import pytest

from jaxspec.batch.cost import (
    A100,
    EAGLE_70B,
    H100,
    LLAMA2_70B,
    Chip,
    Drafting,
    Weights,
    last_that_pays,
    most_rows_that_fit,
    pass_cost,
    step_seconds,
    tokens_per_second,
)

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
CHIP = Chip("round", flops=100.0, bandwidth=10.0, memory=1000.0, link=4.0, latency=0.5)
MODEL = Weights("round", params=50.0, embed_dim=6, cache_params=2.0, reductions=2)
TREE = Drafting(EAGLE_70B, passes=5, nodes=26, tau=3.8)
CHAIN = Drafting(EAGLE_70B, passes=4, nodes=5, tau=2.6)
ROWS, CONTEXT, HOSTS, TOKENS = (1, 4, 16, 32, 64, 128, 256, 512), 1024, 64, 1e10


def test_one_chip_reads_multiplies_and_sums_nothing():
    cost = pass_cost(MODEL, CHIP, num_chips=1, rows=3, nodes=2, context=5)
    # 100 bytes of weights and 3 x 5 x 4 of cache at 10 a second; 2 x 50 x 6 products at 100.
    assert cost == (16.0, 6.0, 0.0)
    assert cost.seconds == 16.0


def test_chips_share_what_is_read_and_add_up_what_is_not():
    cost = pass_cost(MODEL, CHIP, num_chips=2, rows=3, nodes=2, context=5)
    # Each sends 2 x 1/2 of 6 tokens x 6 numbers x 2 bytes over a link of 4, twice, 0.5 s each.
    assert cost == (8.0, 3.0, 2 * (72 / 4 + 0.5))


def test_a_step_is_its_passes_and_tau_counts_tokens():
    drafting = Drafting(MODEL._replace(params=5.0), passes=3, nodes=4, tau=2.0)
    plain = step_seconds(MODEL, CHIP, 1, rows=1, context=0)
    step = step_seconds(MODEL, CHIP, 1, 1, 0, drafting)
    assert (plain, step) == (10.0, 10.0 + 3 * 1.0)
    assert tokens_per_second(MODEL, CHIP, 1, 1, 0, drafting) == 2 / 13


def test_rows_fit_beside_the_weights():
    # 900 of 1000 bytes, less 100 of weights, at 5 x 4 a row.
    assert most_rows_that_fit(MODEL, CHIP, 1, context=5) == 40
    assert most_rows_that_fit(MODEL._replace(params=500.0), CHIP, 1, context=5) == 0


def test_speculation_stops_paying_as_rows_grow():
    settings = (LLAMA2_70B, A100, 8, CONTEXT)
    tree = last_that_pays(*settings, TREE, range(1, 1000))
    chain = last_that_pays(*settings, CHAIN, range(1, 1000))
    assert tree is not None
    assert chain is not None
    assert 1 < tree < chain < 1000
    worthless = TREE._replace(tau=1.0)
    assert last_that_pays(*settings, worthless, range(1, 1000)) is None


def line_of(chip: Chip, rows: int) -> str:
    settings = (LLAMA2_70B, chip, 8, rows, CONTEXT)
    plain = tokens_per_second(*settings)
    milliseconds = 1e3 * step_seconds(*settings)
    tree, chain = (tokens_per_second(*settings, drafting) for drafting in (TREE, CHAIN))
    hours = [TOKENS / (HOSTS * speed) / 3600 for speed in (plain, max(plain, tree, chain))]
    return (
        f"| {rows} | {milliseconds:.1f} | {plain:.0f} | {tree / plain:.2f} | {chain / plain:.2f} "
        f"| {hours[0]:.1f} | {hours[1]:.1f} |"
    )


@pytest.mark.parametrize("chip", [A100, H100], ids=["A100", "H100"])
def test_the_tables_of_the_document_are_the_models(chip):
    text = DOCUMENT.read_text(encoding="utf-8")
    part = text.split(f"### {chip.name}", 1)[1].split("###", 1)[0]
    for rows in ROWS:
        assert line_of(chip, rows) in part
    settings = (LLAMA2_70B, chip, 8, CONTEXT)
    for drafting in (TREE, CHAIN):
        assert f" {last_that_pays(*settings, drafting, range(1, 2000))} rows" in part
    assert f"{most_rows_that_fit(*settings)} rows" in text
    # Prompts are read in passes so large that products count, not reading; alone and with sums.
    passes = [pass_cost(LLAMA2_70B, each, 8, 1, 1 << 20, 0) for each in (A100, H100)]
    spent = [TOKENS / HOSTS / (1 << 20) / 3600 * one.multiplying for one in passes]
    assert f"{spent[0]:.1f} hours on those A100s and {spent[1]:.1f} on those H100s" in text
    assert all(one.multiplying > one.reading for one in passes)
    spent = [TOKENS / HOSTS / (1 << 20) / 3600 * one.seconds for one in passes]
    assert f"{spent[0]:.1f} hours more on A100s, {spent[1]:.1f} on H100s" in text
    reducing = [1e6 * one.reducing / (1 << 20) for one in passes]
    assert f"{reducing[0]:.1f} and {reducing[1]:.1f} us a token and host" in text
