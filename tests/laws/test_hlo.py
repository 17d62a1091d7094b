"""Operations that the compiled loop may not have: sorts; copies, selects, transposes of a cache.

The optimised HLO of `decode` is read as text. Counted is every instruction that runs inside a
`while` loop (its body and condition and whatever these call, fusions and branches included), whose
opcode is one of `MOVES` and whose result holds at least as many numbers as one buffer of the cache,
the keys or the values of one layer for the whole batch. In-place updates are
`dynamic-update-slice` or `scatter`, which are not moves; the copies that XLA adds where it cannot
update in place are.

What it must do: multiply float32 in float32, on devices that would round operands if left alone.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from jaxspec.core.cache import empty_layer
from jaxspec.core.decode import Prompt
from jaxspec.core.loop import DecodePlan, decode
from jaxspec.core.masks import causal
from jaxspec.core.tree import tree_from_paths
from jaxspec.core.types import Hidden, LayerKV, Params, Proposal, Warp
from jaxspec.core.verify import verify_traversal
from jaxspec.drafters.growth import DraftLaw, grow_chain
from jaxspec.models import NARROW, ModelConfig, Network, param_shapes
from tests.laws.drafters import DRAFTERS, PLAIN, marked

MOVES = {"copy", "copy-start", "select", "transpose", "pad", "concatenate", "reverse"}

CAPACITY, BUCKET = 512, 64
# Heads are wide, so that nothing else of a pass is as large as one buffer of the cache.
CONFIG = ModelConfig(
    vocab_size=96,
    embed_dim=128,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    mlp_dim=192,
    max_positions=CAPACITY,
)


class Instruction(NamedTuple):
    """One line of HLO. `calls` are the computations it runs; `sizes` the numbers in each result."""

    name: str
    opcode: str
    sizes: tuple[int, ...]
    calls: tuple[str, ...]


HEADER = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*)$")
SHAPE = re.compile(r"\b(?:pred|[suf]\d+|bf16)\[([\d,]*)\]")
OPCODE = re.compile(r"(?:^|[\s)}])([a-z][\w-]*)\(")
CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)"
)
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


def read_hlo(text: str) -> dict[str, list[Instruction]]:
    """The computations of a module."""
    computations: dict[str, list[Instruction]] = {}
    for line in text.splitlines():
        if header := HEADER.match(line):
            current = computations.setdefault(header[1], [])
        elif instruction := LINE.match(line):
            name, rest = instruction.groups()
            opcode = OPCODE.search(rest)
            result = rest[: opcode.start(1)]
            sizes = [
                math.prod(int(size) for size in shape.split(",") if size)
                for shape in SHAPE.findall(result)
            ]
            calls = CALLED.findall(rest)
            for group in BRANCHES.findall(rest):
                calls += [branch.strip().lstrip("%") for branch in group.split(",")]
            current.append(Instruction(name, opcode[1], tuple(sizes), tuple(calls)))
    return computations


def inside_loops(computations: dict[str, list[Instruction]]) -> Iterator[Instruction]:
    """Every instruction that some `while` loop runs, once."""
    found: set[str] = set()
    waiting = [
        call
        for instructions in computations.values()
        for instruction in instructions
        if instruction.opcode == "while"
        for call in instruction.calls
    ]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            yield from computations[name]
            waiting += [call for one in computations[name] for call in one.calls]


def moved_buffers(text: str, buffer_size: int) -> list[str]:
    """Moves of at least `buffer_size` numbers inside the loops of a module, in words."""
    return [
        f"{one.name}: {one.opcode} of {max(one.sizes)} numbers"
        for one in inside_loops(read_hlo(text))
        if one.opcode in MOVES and max(one.sizes, default=0) >= buffer_size
    ]


def opcodes_in_loops(text: str) -> set[str]:
    return {one.opcode for one in inside_loops(read_hlo(text))}


def traced_decode(name: str, mode: str, rows: int) -> jax.stages.Traced:
    """The program before any backend sees it. Weights are never made: shapes suffice."""
    case = {"plain": PLAIN, **DRAFTERS}[name]
    drafter = case.make()
    network = Network(param_shapes(CONFIG), CONFIG)
    draft = jax.eval_shape(case.draft, network)

    def row(dtype, *shape):
        return jax.ShapeDtypeStruct((rows, *shape), dtype)

    warp = Warp()
    if mode == "sampled":
        warp = Warp(row(jnp.float32), row(jnp.int32), row(jnp.float32))
    prompts = Prompt(
        tokens=row(jnp.int32, BUCKET),
        length=row(jnp.int32),
        room=row(jnp.int32),
        seed=row(jnp.int32, 2),
        stop_ids=row(jnp.int32, 1),
        warp=warp,
    )
    plan = DecodePlan(capacities=(CAPACITY,), chunk=BUCKET)
    return decode.trace(Params(network, draft), prompts, drafter=drafter, plan=plan)


# With nothing kept every pass reads the whole text: what it works on is as large as a cache.
READS_EVERYTHING = "deer, own places, nothing kept"


@pytest.mark.parametrize(("mode", "rows"), [("greedy", 1), ("sampled", 4)])
@pytest.mark.parametrize(
    "name",
    ["plain", *marked({n: c for n, c in DRAFTERS.items() if n != READS_EVERYTHING})],
)
def test_the_loop_moves_no_cache_and_sorts_nothing(name, mode, rows):
    text = traced_decode(name, mode, rows).lower().compile().as_text()
    buffer_size = rows * CONFIG.num_kv_heads * CONFIG.head_dim * CAPACITY
    assert "dynamic-update-slice" in opcodes_in_loops(text) or "scatter" in opcodes_in_loops(text)
    assert moved_buffers(text, buffer_size) == []
    assert "sort" not in opcodes_in_loops(text)


@pytest.mark.parametrize("begun", [True, False])
def test_a_pass_of_a_chain_that_ends_early_moves_one_law(begun):
    """A pass writes the law of one token per row, and moves none of those before it."""
    rows, length, width, vocab = 4, 8, 16, 4096

    def draft(table, key, threshold):
        def forward(depth, token, feature, mask, scratch):
            own = LayerKV(jnp.ones((1, width, 1)), jnp.ones((1, 1, width)))
            return Hidden(feature + (depth + token[0]), jnp.zeros((1, 0)), (own,))

        return grow_chain(
            length,
            jnp.int32(length),
            threshold,
            key,
            jnp.int32(0),
            DraftLaw(lambda features: features @ table, Warp(jnp.float32(1)), vocab),
            jnp.ones((1, width)),
            forward,
            (empty_layer(1, width, length, jnp.dtype("float32")),),
            begun=begun,
        )

    keys = jax.random.split(jax.random.key(0), rows)
    compiled = jax.jit(jax.vmap(draft, (None, 0, 0))).lower(
        jnp.ones((width, vocab)), keys, jnp.linspace(0.1, 0.4, rows)
    )
    text = compiled.compile().as_text()
    assert "dynamic-update-slice" in opcodes_in_loops(text)
    assert moved_buffers(text, rows * length * vocab) == []


@pytest.mark.parametrize(
    ("change", "opcode"),
    [
        (lambda cache, step: jnp.where(step % 2 == 0, cache, 0.0), "select"),
        (lambda cache, step: cache.T + 1.0, "transpose"),
        (lambda cache, step: jnp.sort(cache, axis=0), "sort"),
    ],
)
def test_the_reader_sees_what_is_planted(change, opcode):
    """Loops that do what the decoder may not."""
    size = 64

    def loop(cache):
        def body(carry):
            step, cache = carry
            cache = change(cache, step)
            return step + 1, cache.at[0, step % size].add(jnp.sum(cache @ cache))

        return jax.lax.while_loop(lambda carry: carry[0] < 9, body, (0, cache))

    text = jax.jit(loop).lower(jnp.zeros((size, size))).compile().as_text()
    assert opcode in opcodes_in_loops(text)
    if opcode != "sort":
        assert any(
            f": {opcode} of {size * size}" in found for found in moved_buffers(text, size * size)
        )
    assert moved_buffers(text, size * size + 1) == []


PRODUCT = re.compile(r"dot_general .*?precision = \[(\w+), (\w+)\].*: \(tensor<[^>]*x(\w+)>")


def precisions(traced: jax.stages.Traced, platform: str) -> set[tuple[str, str, str]]:
    """Finds the precision of both operands, and the dtype, of all products, for any platform."""
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    found = PRODUCT.findall(text)
    assert len(found) == text.count("stablehlo.dot_general")
    if "@jaxspec_" in text:  # native code, which multiplies and sums in float32
        found.append(("HIGHEST", "HIGHEST", "f32"))
    assert found
    return set(found)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("name", ["plain", "draft model, tree"])
def test_float32_networks_multiply_in_float32(name, platform):
    assert precisions(traced_decode(name, "sampled", 1), platform) == {
        ("HIGHEST", "HIGHEST", "f32")
    }


@pytest.mark.parametrize(
    ("asked", "dtype", "expected"),
    [
        (None, jnp.bfloat16, {("DEFAULT", "DEFAULT", "bf16")}),
        ("tensorfloat32", jnp.float32, {("HIGH", "HIGH", "f32")}),
        ("default", jnp.float32, {("DEFAULT", "DEFAULT", "f32")}),
        (NARROW, jnp.float32, {("DEFAULT", "DEFAULT", "bf16")}),
    ],
)
def test_a_precision_that_was_asked_for_stays(asked, dtype, expected):
    @jax.jit
    def logits(network, tokens):
        positions = jnp.arange(tokens.shape[0])
        hidden = network.forward(tokens, positions, causal(tokens.shape[0]), None)
        return network.unembed(hidden.features)

    network = Network(param_shapes(CONFIG, dtype), CONFIG)
    with jax.default_matmul_precision(asked):
        traced = logits.trace(network, jax.ShapeDtypeStruct((5,), jnp.int32))
    assert precisions(traced, "cuda") == expected


@pytest.mark.parametrize("rows", [1, 3])
def test_verification_moves_no_array_of_all_laws(rows):
    """Batches over large vocabularies: a copy of every node's law costs more than the rule."""
    tree = jax.tree.map(jnp.asarray, tree_from_paths([(0,), (1,), (0, 0), (1, 0), (0, 0, 0)]))
    nodes, laws, vocab = 6, 4, 999
    law_row = jnp.array([0, 0, 0, 1, 2, 3])

    def judge(uniforms, tokens, valid, draft_logprobs, logits):
        proposal = Proposal(tokens, tree, valid, draft_logprobs, law_row)
        return verify_traversal(uniforms, proposal, logits)

    shapes = [
        jax.ShapeDtypeStruct((rows, *shape), dtype)
        for shape, dtype in (
            ((nodes,), jnp.float32),
            ((nodes,), jnp.int32),
            ((nodes,), jnp.bool_),
            ((laws, vocab), jnp.float32),
            ((nodes, vocab), jnp.float32),
        )
    ]
    compiled = jax.jit(jax.vmap(judge)).lower(*shapes).compile()
    made = [
        each
        for instructions in read_hlo(compiled.as_text()).values()
        for each in instructions
        if each.opcode not in ("parameter", "get-tuple-element", "tuple", "bitcast", "while")
    ]
    assert max(size for each in made for size in each.sizes) <= rows * vocab + vocab
