"""Weights of 4 bits that keep a model's answers: rounded for the inputs that products really have.

Each weight of an output is rounded in turn, and the weights that are not rounded yet are moved so
that the output changes least over the inputs of some texts (GPTQ, arXiv 2210.17323). The model
writes these texts itself. Where rounding a product still changes the distribution most, it keeps 8
bits, as long as all of them add at most `MOST_EXTRA` to the bytes of the weights. An output head
that is the table of tokens keeps 8 bits too and adds none: it shares the bytes of the table.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.checkpoint import Model
from jaxspec.core.forms import exchanged
from jaxspec.core.masks import causal
from jaxspec.core.types import Params
from jaxspec.decoding.generate import generate
from jaxspec.decoding.request import GenerationConfig, encode_prompt
from jaxspec.measure.agreement import TextLogits, agreement
from jaxspec.measure.prompts import read_prompts
from jaxspec.mobile.quantize import (
    MOST_EXTRA,
    WeightFormat,
    pack,
    round_to,
    row_scales,
    stored_scales,
)
from jaxspec.models import Network
from jaxspec.models.linear import multiply

NUM_TEXTS, LENGTH = 48, 128
"""Texts that are written, and the most tokens of each."""
_HELD = 6  # one of so many texts is not read, but measures what rounding a product changes
_PROMPT = 48  # the most tokens of a given prompt
_DAMPING = 0.01  # share of the mean square of inputs that is added to all
_MOST_MOMENTS = 1 << 30  # bytes of the moments that are counted together; a product's may be more
_COLUMNS = 64  # that are rounded before the rest of a matrix is moved
EMBEDDINGS = "/embed/"  # in the name of the table of tokens
_SHRUNK = np.linspace(0.5, 1.0, 26)  # shares of the scale that holds the largest weight


class Rounded(NamedTuple):
    """Weights of a product that were rounded for texts.

    Attributes:
        shape: of the matrix: outputs, inputs.
        numbers: as `quantize_rows` returns them for that matrix.
        scales: the same.
    """

    shape: tuple[int, ...]
    numbers: np.ndarray
    scales: np.ndarray


class Calibration(NamedTuple):
    """All products of a model, rounded for texts.

    Attributes:
        rounded: weights of products, by the name of the weight.
        kept: names of the weights of products that keep 8 bits.
    """

    rounded: Mapping[str, Rounded]
    kept: frozenset[str]


class _Product(NamedTuple):
    """One product of a pass.

    Attributes:
        name: of its weight; `None`: it is no weight as it is stored.
        inputs: number of inputs.
        turned: True if the weight lies as [outputs, inputs].
    """

    name: str | None
    inputs: int
    turned: bool


def calibrate(model: Model, form: WeightFormat, prompts: str | None = None) -> Calibration:
    """Rounds the weights of a causal model's products.

    Args:
        model: the model, whose matrices are of its dtype.
        form: format of the weights.
        prompts: a file of prompts, which the model continues; `None`: it writes from the first
            token on.

    Raises:
        ValueError: the file holds no prompts, the model fills in masks, or its weights were left in
            their files.
    """
    if model.config.diffusion is not None:
        raise ValueError(
            f"quantization: only causal models are calibrated, and {model.name} fills in masks; "
            "take int8 or int4."
        )
    if model.is_in_files:
        raise ValueError(
            f"quantization: the weights of {model.name} were left in their files, and a "
            "calibration decodes with it; take int8 or int4, or load it without weights='files'."
        )
    network = model.network
    tokens, counts = _written_texts(model, prompts)
    held = max(1, len(tokens) // _HELD)
    measured, read = (tokens[:held], counts[:held]), (tokens[held:], counts[held:])
    products = _products_of(network, tokens[0])
    leaves = {_name(path): leaf for path, leaf in _leaves(network)}
    exact, table = _logits(network, *measured), _name_of_table(network)
    rounded, changed = {}, {}
    for product, moments in _moments(network, products, *read):
        name, turned = product.name, product.turned
        if name is None or name == table:
            continue
        leaf = np.asarray(leaves[name]).astype(np.float32)
        matrix = leaf.reshape(-1, product.inputs) if turned else leaf.reshape(product.inputs, -1).T
        if product.inputs % (form.block or 1):
            continue  # it is refused by name where it is stored
        numbers, scales = round_for(matrix, moments, form.bits, form.block)
        rounded[name] = Rounded(matrix.shape, pack(numbers, form.bits), scales)
        parts = numbers.reshape(len(matrix), -1, form.block or product.inputs)
        near = (parts * scales.reshape(len(matrix), -1, 1)).reshape(matrix.shape)
        other = _with_weight(network, name, near if turned else near.T)
        texts = zip(exact, _logits(other, *measured), strict=True)
        changed[name] = agreement(texts).kl
    kept = _kept({name: leaves[name].size for name in changed}, changed, leaves, table)
    return Calibration({n: each for n, each in rounded.items() if n not in kept}, kept)


def _kept(
    sizes: Mapping[str, int],
    changed: Mapping[str, float],
    leaves: Mapping[str, Array],
    table: str | None,
) -> frozenset[str]:
    """Chooses the products that keep 8 bits.

    An output head that is the table of tokens always does: it shares the bytes of the table, which
    has 8 bits, so it adds none. Then come those that change most for their size.

    Args:
        sizes: number of weights of each rounded product.
        changed: divergence of the model from itself when only this product is rounded.
        leaves: all weights, by name.
        table: the output head, if it is the table of tokens.
    """
    products = sum(sizes.values()) + (leaves[table].size if table is not None else 0)
    tables = sum(leaf.size for name, leaf in leaves.items() if EMBEDDINGS in name)
    room = MOST_EXTRA * (products / 2 + tables)
    kept = set() if table is None else {table}
    for name in sorted(changed, key=lambda name: changed[name] / sizes[name], reverse=True):
        extra = leaves[name].size / 2
        if extra <= room:
            kept.add(name)
            room -= extra
    return frozenset(kept)


def round_for(
    matrix: Float[np.ndarray, "outputs inputs"],
    moments: Float[np.ndarray, "inputs inputs"],
    bits: int,
    block: int = 0,
) -> tuple[Int[np.ndarray, "outputs inputs"], np.ndarray]:
    """Rounds the weights of a product so that its outputs change little (GPTQ).

    Columns are rounded in the order of the mean square of their inputs, largest first. What
    rounding a column changes is taken up by those that follow.

    Args:
        matrix: one row per output.
        moments: means of the products of each pair of inputs.
        bits: of the numbers.
        block: number of weights that share a scale; 0: the whole row.

    Returns:
        Whole numbers, and their scales as `quantize_rows` returns them.

    Example:
        >>> moments = np.array([[1.0, 0.9], [0.9, 1.0]])
        >>> numbers, scales = round_for(np.array([[1.0, 0.6]], np.float32), moments, 2)
        >>> numbers.tolist()  # 0.6 became 1, so nothing is left that 1.0 should take up
        [[1, 1]]
    """
    inputs = matrix.shape[1]
    squares = np.diag(moments)
    scales = _best_scales(matrix, squares, bits, block)
    steps = np.repeat(scales.astype(np.float64).reshape(len(matrix), -1), block or inputs, axis=1)
    damped = moments.astype(np.float64)  # a copy
    damped[np.diag_indices(inputs)] += max(_DAMPING * squares.mean(), 1e-12)
    order = np.argsort(-squares, kind="stable")
    upper = np.linalg.cholesky(np.linalg.inv(damped[np.ix_(order, order)])).T
    left, steps = matrix[:, order].astype(np.float64), steps[:, order]
    numbers = np.zeros(left.shape, np.int8)
    for first in range(0, inputs, _COLUMNS):
        last = min(first + _COLUMNS, inputs)
        errors = np.zeros((len(left), last - first))
        for column in range(first, last):
            numbers[:, column] = round_to(left[:, column], steps[:, column], bits)
            error = left[:, column] - numbers[:, column] * steps[:, column]
            errors[:, column - first] = error / upper[column, column]
            left[:, column + 1 : last] -= np.outer(
                errors[:, column - first], upper[column, column + 1 : last]
            )
        left[:, last:] -= errors @ upper[first:last, last:]
    ordered = np.empty_like(numbers)
    ordered[:, order] = numbers
    return ordered, scales


def _best_scales(
    matrix: Float[np.ndarray, "outputs inputs"],
    squares: Float[np.ndarray, " inputs"],
    bits: int,
    block: int,
) -> np.ndarray:
    """Chooses scales by which the least is lost, as the inputs weigh it; some cut large weights."""
    largest = row_scales(matrix, bits, block)
    best, least = largest, np.full(largest.shape, np.inf)
    parts = matrix.reshape(len(matrix), -1, block or matrix.shape[1])
    weigh = squares.reshape(1, -1, parts.shape[2])
    for share in _SHRUNK:
        scales = stored_scales(largest * share, block)
        steps = scales[..., None].astype(np.float32)
        lost = parts - round_to(parts, steps, bits) * steps
        loss = np.sum(lost * lost * weigh, axis=2)
        best = np.where(loss < least, scales, best).astype(scales.dtype)
        least = np.minimum(loss, least)
    return best if block else best[:, 0]


def _written_texts(
    model: Model, prompts: str | None
) -> tuple[Int[np.ndarray, "texts length"], Int[np.ndarray, " texts"]]:
    """Returns texts of the model, padded, and their lengths."""
    length = min(LENGTH, model.max_positions - 1)
    tokenizer = model.tokenizer
    draws = np.random.default_rng(0)
    if prompts is not None:
        given = [row.prompt for row in read_prompts(prompts, limit=NUM_TEXTS)]
        longest = min(_PROMPT, length // 2)
        begun = [encode_prompt(model, prompt)[:longest] for prompt in given]
        # Texts of the same prompt are drawn anew.
        begun = list(itertools.islice(itertools.cycle(begun), NUM_TEXTS))
    elif tokenizer is not None and tokenizer.bos_id is not None:
        begun = [[tokenizer.bos_id]] * NUM_TEXTS
    else:
        begun = [[int(token)] for token in draws.integers(0, model.vocab_size, NUM_TEXTS)]
    new_tokens = length - max(map(len, begun))
    written = generate(model, begun, GenerationConfig(new_tokens, temperature=1.0))
    rows = [[*prompt, *row.tokens] for prompt, row in zip(begun, written, strict=True)]
    tokens = np.zeros((len(rows), length), np.int32)
    for place, row in zip(tokens, rows, strict=True):
        place[: len(row)] = row
    return tokens, np.array([len(row) for row in rows])


def _leaves(network: Network) -> list[tuple[Any, Array]]:
    """Lists the weights by their paths, as a file names them."""
    return jax.tree_util.tree_leaves_with_path(Params(network, ()))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _name_of_table(network: Network) -> str | None:
    """Returns the name of the output head if it is the table of tokens."""
    names = [_name(path) for path, _ in _leaves(network)]
    return next((n for n in names if EMBEDDINGS in n), None) if network.config.tied_head else None


def _with_weight(network: Network, name: str, values: np.ndarray) -> Network:
    """Returns a network in which one weight is another; the shape stays."""

    def changed(path: Any, leaf: Array) -> Array:
        is_meant = _name(path) == name
        return jnp.asarray(values.reshape(leaf.shape), leaf.dtype) if is_meant else leaf

    return jax.tree_util.tree_map_with_path(changed, Params(network, ())).target


def _visit_products(
    network: Network, tokens: Int[Array, " length"], visit: Callable[[Array, Array, bool], None]
) -> None:
    """Reads a text; hands rows and weight of each product, and whether it is turned, to `visit`."""

    def product(rows, kernel, dtype=None, *, turned=False):
        visit(rows, kernel, turned)
        kernel = kernel.T if turned else kernel
        return jnp.matmul(rows, kernel, preferred_element_type=dtype)

    length = len(tokens)
    with exchanged({multiply: product}):
        hidden = network.forward(tokens, jnp.arange(length), causal(length), None)
        network.unembed(hidden.features)


def _products_of(network: Network, tokens: Int[np.ndarray, " length"]) -> list[_Product]:
    """Lists the products of a pass, in order, with the names of their weights.

    A pass reshapes weights, so they are found again by what they hold.
    """
    shapes: list[tuple[int, bool]] = []

    @jax.jit
    def marks_of(network, tokens):
        marks = []

        def visit(rows, kernel, turned):
            shapes.append((rows.shape[1], turned))
            marks.append(_mark(kernel))

        _visit_products(network, tokens, visit)
        return marks

    mark = jax.jit(_mark)
    names = {tuple(np.asarray(mark(leaf)).tolist()): _name(p) for p, leaf in _leaves(network)}
    marks = [tuple(np.asarray(each).tolist()) for each in marks_of(network, jnp.asarray(tokens))]
    return [_Product(names.get(each), *shape) for each, shape in zip(marks, shapes, strict=True)]


def _mark(weight: Array) -> Int[Array, " 2"]:
    """Sums the bits of a weight in two ways, which tells weights apart."""
    bits = jax.lax.bitcast_convert_type(weight.astype(jnp.float32).reshape(-1), jnp.uint32)
    places = jnp.arange(bits.size, dtype=jnp.uint32) * jnp.uint32(2654435761)
    return jnp.stack([jnp.sum(bits), jnp.sum(bits * (places | jnp.uint32(1)))])


@partial(jax.jit, static_argnames="wanted")
def _moments_of(
    network: Network, tokens: Int[Array, " length"], count: Int[Array, ""], wanted: tuple[int, ...]
) -> list[Float[Array, "inputs inputs"]]:
    """Sums the products of each pair of inputs over a text, for some products of a pass."""
    counted = (jnp.arange(len(tokens)) < count)[:, None]
    found, places = [], itertools.count()

    def visit(rows, kernel, turned):
        del kernel, turned
        if next(places) in wanted:
            rows = jnp.where(counted, rows.astype(jnp.float32), 0.0)
            found.append(rows.T @ rows)

    _visit_products(network, tokens, visit)
    return found


def _moments(
    network: Network,
    products: Sequence[_Product],
    tokens: Int[np.ndarray, "texts length"],
    counts: Int[np.ndarray, " texts"],
) -> Iterator[tuple[_Product, Float[np.ndarray, "inputs inputs"]]]:
    """Yields each product with the moments of its inputs, which are counted in groups."""
    groups: list[list[int]] = [[]]
    size = 0
    for place, product in enumerate(products):
        size += 4 * product.inputs**2
        if size > _MOST_MOMENTS and groups[-1]:
            groups.append([])
            size = 4 * product.inputs**2
        groups[-1].append(place)
    for group in groups:
        total = None
        for text, count in zip(tokens, counts, strict=True):
            found = _moments_of(network, jnp.asarray(text), jnp.int32(count), tuple(group))
            total = found if total is None else jax.tree.map(jnp.add, total, found)
        assert total is not None, "there is a text"
        for place, moments in zip(group, total, strict=True):
            yield products[place], np.asarray(moments) / counts.sum()


@jax.jit
def _text_logits(network: Network, tokens: Int[Array, " length"]) -> Float[Array, "length vocab"]:
    length = len(tokens)
    hidden = network.forward(tokens, jnp.arange(length), causal(length), None)
    return network.unembed(hidden.features)


def _logits(
    network: Network,
    tokens: Int[np.ndarray, "texts length"],
    counts: Int[np.ndarray, " texts"],
) -> list[TextLogits]:
    """Returns the logits behind each token of some texts."""
    return [
        np.asarray(_text_logits(network, jnp.asarray(text)), np.float32)[:count]
        for text, count in zip(tokens, counts, strict=True)
    ]
