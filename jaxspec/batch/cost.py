"""What decoding costs on accelerators nobody has at hand: a roofline, collectives, and arithmetic.

A pass reads all weights once and every row's cache, multiplies, and adds up activations between
chips. Peaks are taken to be reached, so times are lower bounds; what matters are ratios.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Chip(NamedTuple):
    """One accelerator, by its maker's figures.

    flops: a second, dense, bfloat16.
    bandwidth: bytes a second of its memory.
    memory: bytes.
    link: bytes a second, one way, to the other chips of its host together.
    latency: seconds that a collective takes however little it carries.
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    link: float
    latency: float


class Weights(NamedTuple):
    """A model, as far as its cost goes.

    params: that a pass reads and multiplies with.
    cache_params: numbers that a token adds to the cache, keys and values of all layers.
    reductions: sums over chips in a pass, two for each layer.
    """

    name: str
    params: float
    embed_dim: int
    cache_params: float
    reductions: int
    bytes_per_number: int = 2


class PassCost(NamedTuple):
    """Seconds of one pass.

    reading: weights and caches. multiplying: the products; the longer of the two counts.
    reducing: sums over chips.
    """

    reading: float
    multiplying: float
    reducing: float

    @property
    def seconds(self) -> float:
        return max(self.reading, self.multiplying) + self.reducing


class Drafting(NamedTuple):
    """A way to draft.

    head: its weights; each pass reads them all.
    passes: of the head in a step.
    nodes: tokens of a row in the target's pass, the root included.
    tau: tokens per target pass, the bonus token INCLUDED.
    """

    head: Weights
    passes: int
    nodes: int
    tau: float


A100 = Chip("A100 80 GB SXM", 312e12, 2.039e12, 80e9, 300e9, 10e-6)
H100 = Chip("H100 80 GB SXM", 989e12, 3.35e12, 80e9, 450e9, 10e-6)
LLAMA2_70B = Weights("LLaMA-2-70B", 69.0e9, 8192, 2 * 80 * 8 * 128, 2 * 80)
EAGLE_70B = Weights("EAGLE-1 head and output head", 1.25e9, 8192, 2 * 8 * 128, 3)


def pass_cost(
    weights: Weights, chip: Chip, num_chips: int, rows: int, nodes: int, context: int
) -> PassCost:
    """One pass over `nodes` tokens of each of `rows` texts of `context` tokens, T(rows x nodes).

    Weights and caches are spread over the chips evenly, so each reads its share. A ring sums
    activations: each chip sends and receives 2 (n - 1) / n of them. Attention's products are left
    out: at these lengths they are a few percent.
    """
    size, tokens = weights.bytes_per_number, rows * nodes
    cache = rows * context * weights.cache_params * size
    reading = (weights.params * size + cache) / (num_chips * chip.bandwidth)
    multiplying = 2 * weights.params * tokens / (num_chips * chip.flops)
    reducing = 0.0
    if num_chips > 1:
        carried = 2 * (num_chips - 1) / num_chips * tokens * weights.embed_dim * size
        reducing = weights.reductions * (carried / chip.link + chip.latency)
    return PassCost(reading, multiplying, reducing)


def step_seconds(
    target: Weights,
    chip: Chip,
    num_chips: int,
    rows: int,
    context: int,
    drafting: Drafting | None = None,
) -> float:
    """A step of all rows: the target's pass, and the drafter's, each over one token of a row."""
    if drafting is None:
        return pass_cost(target, chip, num_chips, rows, 1, context).seconds
    draft = pass_cost(drafting.head, chip, num_chips, rows, 1, context).seconds
    verify = pass_cost(target, chip, num_chips, rows, drafting.nodes, context).seconds
    return drafting.passes * draft + verify


def tokens_per_second(
    target: Weights,
    chip: Chip,
    num_chips: int,
    rows: int,
    context: int,
    drafting: Drafting | None = None,
) -> float:
    """Of all rows together.

    Example:
        >>> round(tokens_per_second(LLAMA2_70B, A100, 8, rows=1, context=0))
        99
    """
    tau = 1.0 if drafting is None else drafting.tau
    return rows * tau / step_seconds(target, chip, num_chips, rows, context, drafting)


def most_rows_that_fit(target: Weights, chip: Chip, num_chips: int, context: int) -> int:
    """Rows whose caches fit beside the weights; a tenth of the memory is left alone."""
    size = target.bytes_per_number
    room = 0.9 * num_chips * chip.memory - target.params * size
    return max(0, int(room // (context * target.cache_params * size)))


def last_that_pays(
    target: Weights,
    chip: Chip,
    num_chips: int,
    context: int,
    drafting: Drafting,
    rows: Sequence[int],
) -> int | None:
    """The most of some numbers of rows at which drafting is faster; `None` if it never is."""
    settings = (target, chip, num_chips)
    paying = [
        count
        for count in rows
        if tokens_per_second(*settings, count, context, drafting)
        > tokens_per_second(*settings, count, context)
    ]
    return max(paying, default=None)
