"""Block drafts on LiteRT: `draft_block` against the same drafter in JAX, in the same rounds."""

from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import GenerationConfig, generate
from jaxspec.checkpoint import Model
from jaxspec.core import masks
from jaxspec.core.sampling import inverse_cdf, warp_logits
from jaxspec.core.verify import verify
from jaxspec.drafters import AdaptiveBlock, Deer, LoadedDrafter
from jaxspec.drafters.block import Choices
from jaxspec.mobile.checks import every_loop
from jaxspec.mobile.contents import ExportConfig
from jaxspec.mobile.export import MODEL_FILE, export
from jaxspec.models import Network, init_params
from tests.laws.drafters import diffuser
from tests.mobile.models import CONFIG, fill_buffers, successor_model

pytest.importorskip("litert_converter", reason="needs the extra `mobile`")
pytest.importorskip("ai_edge_litert", reason="needs the extra `mobile`")

MOST = 40
PROMPTS = ([3, 7, 1, 19, 4, 9, 11], [5] * 20, list(range(2, 33)))
SHAPES = ExportConfig(capacity=96, prefill=(16,), quantization="float32")
DRAFTERS = {
    "chain": Deer(5),
    "tree": Deer(4, ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))),
    "dynamic tree": Deer(4, num_nodes=6, branch=3),
}


@pytest.fixture(scope="module")
def model() -> Model:
    return successor_model()[0]


def drafter_of(
    model: Model, method: Deer, shift: bool = True, block: int | None = 4, rank: int = 0
):
    return LoadedDrafter(method, diffuser(model.network, block, shift, rank))


@pytest.fixture(scope="module", params=[*DRAFTERS, "chain, not shifted"])
def exported(request, model, tmp_path_factory):
    from jaxspec.mobile.runtime import MobileModel

    name = request.param.removesuffix(", not shifted")
    drafter = drafter_of(model, DRAFTERS[name], shift=name == request.param)
    folder = tmp_path_factory.mktemp("blocks")
    manifest = export(model, folder, drafter, SHAPES)
    sizes = drafter.drafter.window_sizes(4)
    assert manifest.sizes("draft_block") == sizes
    # The host makes dynamic trees, so their rounds are no steps of the file.
    assert manifest.sizes("step_block") == (() if name == "dynamic tree" else sizes)
    file = MobileModel(folder / MODEL_FILE, num_threads=1)
    fill_buffers(file, np.nan)
    return file, drafter


def test_rounds_on_litert_are_those_in_jax(model, exported):
    """The same tokens, and as many accepted in every round."""
    from jaxspec.mobile.loops import verify_drafts, whole_steps

    file, drafter = exported
    config = GenerationConfig(max_new_tokens=MOST - 1)
    loops = [verify_drafts, *([whole_steps] if file.manifest.sizes("step_block") else [])]
    counts = []
    for prompt, loop in product(PROMPTS, loops):
        decoded = file.generate(prompt, MOST, stop_token_ids=(), loop=loop)
        # LiteRT chooses the first token with the prompt, and counts it as a round.
        first, *others = decoded.tokens.tolist()
        (row,) = generate(model, [*prompt, first], config, drafter, return_trace=True)
        assert others == row.tokens.tolist()
        emitted = [1, *(len(step.emitted) for step in row.trace)]
        # The budget cuts the last round, there behind the acceptance and here before it.
        assert list(decoded.counts[:-1]) == emitted[:-1]
        assert len(decoded.counts) == len(emitted)
        counts += decoded.counts
    assert max(counts) > 1  # some drafts were accepted


def test_lengths_that_adapt_are_those_of_jax(model, tmp_path):
    """In every round as many tokens are drafted as in JAX, sometimes none."""
    from jaxspec.core.types import Warp
    from jaxspec.mobile.drafts import WindowDraft
    from jaxspec.mobile.loops import Verified, best_loop, verify_drafts
    from jaxspec.mobile.runtime import MobileModel

    rule = AdaptiveBlock(0.5, 0.6, draft_cost=0.4, token_cost=0.2, explore=1, patience=3)
    drafter = drafter_of(model, Deer(4, adaptive=rule))
    manifest = export(model, tmp_path, drafter, SHAPES)
    assert manifest.sizes("step_block") == ()
    assert manifest.sizes("verify") == drafter.drafter.widths
    assert best_loop(manifest, Warp()) is verify_drafts
    file = MobileModel(tmp_path / MODEL_FILE, num_threads=1)
    lengths = set()
    for prompt in PROMPTS:
        drafted = []

        class Recorded(WindowDraft):
            def __call__(self, text, recent, drafted=drafted):
                proposal = super().__call__(text, recent)
                drafted.append(int(proposal.valid.sum()) - 1)
                return proposal

        decoded = file.generate(
            prompt, MOST, (), lambda *to, draft=Recorded: Verified(to[0], draft(to[0]), to[1])
        )
        first, *others = decoded.tokens.tolist()
        config = GenerationConfig(max_new_tokens=MOST - 1, stop_token_ids=())
        (row,) = generate(model, [*prompt, first], config, drafter, return_trace=True)
        assert others == row.tokens.tolist()
        # The budget cuts the last drafts in JAX.
        theirs = [int(step.valid.sum()) - 1 for step in row.trace]
        whole = len(theirs) - 5
        assert drafted[:whole] == theirs[:whole]
        lengths.update(drafted[:whole])
    assert 0 in lengths
    assert len(lengths) > 2


def test_drafts_do_not_depend_on_what_was_kept(model, exported):
    """A text read from the start gives the draft that it gives round by round."""
    from jaxspec.mobile.drafts import WindowDraft

    file, drafter = exported
    (row,) = generate(
        model, PROMPTS[2], GenerationConfig(max_new_tokens=24), drafter, return_trace=True
    )
    text, going_on = list(PROMPTS[2]), WindowDraft(file)
    for step in row.trace:
        known = going_on(text, 1)
        fresh = WindowDraft(file)(text, 1)
        np.testing.assert_array_equal(known.tokens, fresh.tokens)
        np.testing.assert_array_equal(known.tokens[step.valid], step.tokens[step.valid])
        going_on(text, 1)  # what a fresh one read lies in the same buffers
        text += step.emitted.tolist()


def test_a_greedy_text_takes_whole_steps_where_the_file_has_them(exported):
    from jaxspec.core.types import Warp
    from jaxspec.mobile.loops import HostAcceptance, whole_steps

    file, _ = exported
    if not file.manifest.sizes("step_block"):
        pytest.skip("dynamic trees are made by the host")
    called, call = [], file.call
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            file, "call", lambda name, **inputs: (called.append(name), call(name, **inputs))
        )
        file.generate(PROMPTS[0], 8, stop_token_ids=())
    assert any(name.startswith("step_block_") for name in called)
    assert not any(name.startswith("verify") for name in called)
    with pytest.raises(ValueError, match=r"^top_p: whole steps of this file take a temperature"):
        whole_steps(file, HostAcceptance(Warp(np.float32(0.5), top_p=np.float32(0.5))))


SAMPLED = {
    "drawn": Deer(4),
    "drawn at another temperature": Deer(3, temperature=0.6),
    "likeliest, tree": replace(DRAFTERS["tree"], temperature=0.0),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_rounds_are_those_of_the_rules_in_jax(model, tmp_path, name):
    """The same uniforms, a whole pass over the text: the same tokens in every round."""
    from jaxspec.core.types import Warp
    from jaxspec.mobile.loops import HostAcceptance, whole_steps
    from jaxspec.mobile.runtime import MobileModel

    method = SAMPLED[name]
    drafter = drafter_of(model, method)
    export(model, tmp_path, drafter, SHAPES)
    file = MobileModel(tmp_path / MODEL_FILE, num_threads=1)
    fill_buffers(file, np.nan)
    warp = Warp(temperature=np.float32(0.8), top_k=np.int32(12))
    draws = np.random.default_rng(5)
    nodes, block = method.tree_shape[0], method.block
    acceptance, accepted = HostAcceptance(warp, 5), []
    loop, text = whole_steps(file, acceptance), list(PROMPTS[2])
    file.prefill(text[:-1])
    for _ in range(12):
        uniforms, own = draws.random(nodes, np.float32), None
        if method.is_chain and method.temperature != 0:
            own = draws.random(block, np.float32)
        expected = _round_in_jax(model, drafter, text, warp, uniforms, own)
        ours = loop.advance(text, 1)
        assert ours.tokens == expected
        accepted.append(ours.num_drafted)
        text += ours.tokens
    assert min(accepted) < max(accepted)


@jax.jit
def _forward(network, tokens, positions, seen):
    return network.forward(tokens, positions, seen, None)


def _round_in_jax(model, drafter, text, warp, uniforms, own) -> list[int]:
    """One round by the rules that decode in JAX; `own` draws the drafts.

    Passes have one size, so that they are compiled once: nothing sees what is behind the text.
    """
    method, network = drafter.drafter, drafter.params
    warp = jax.tree.map(jnp.asarray, warp)
    size, mask, behind = SHAPES.capacity, network.config.diffusion.mask_token_id, len(text) - 1
    canvas = jnp.asarray([*text, *[mask] * (size - len(text))])
    hidden = _forward(network, canvas, np.arange(size), np.asarray(masks.block_causal(size, 4)))
    logits = network.unembed(hidden.features[behind + np.arange(method.block)])
    logits = logits.at[:, mask].set(-jnp.inf)
    if own is None:
        tokens = jax.lax.top_k(logits, method.max_branch)[1]
        choices = Choices(tokens.astype(jnp.int32), logits)
    else:
        laws = jax.nn.log_softmax(warp_logits(logits, method._warp(warp)))
        tokens = jax.vmap(inverse_cdf)(jnp.exp(laws), jnp.asarray(own))[:, None]
        choices = Choices(tokens, laws)
    proposal = method.offer(choices, jnp.int32(text[-1]), drawn=own is not None)
    tree = jax.tree.map(np.asarray, proposal.tree)
    every = jnp.asarray([*text[:-1], *[0] * (size - behind), *proposal.tokens.tolist()])
    positions = np.concatenate([np.arange(size), behind + tree.depths])
    seen = np.tri(len(every), dtype=bool)
    seen[size:, behind:size], seen[size:, size:] = False, tree.ancestors
    states = _forward(model.network, every, positions, seen)
    target = warp_logits(model.network.unembed(states.features[size:]), warp)
    verdict = verify(jnp.asarray(uniforms), proposal, target)
    path = np.asarray(verdict.path)[1 : int(verdict.num_emitted)]
    return [*np.asarray(proposal.tokens)[path].tolist(), int(verdict.next_token)]


def test_a_file_that_verifies_too_few_decodes_plainly_at_a_temperature(model, tmp_path):
    """A GPU's file with steps over a chain of 5 and a `verify_4` for hosts of their own."""
    from jaxspec.core.types import Warp
    from jaxspec.mobile.runtime import MobileModel

    shapes = replace(SHAPES, bundle="gpu", verify=(4,))
    manifest = export(model, tmp_path, drafter_of(model, DRAFTERS["chain"]), shapes)
    assert manifest.sizes("verify") == (4,)
    file = MobileModel(tmp_path / MODEL_FILE, num_threads=1)
    warp = Warp(np.float32(0.5))
    decoded = file.generate(PROMPTS[0], 8, stop_token_ids=(), warp=warp, seed=3)
    assert decoded.counts == (1,) * 8
    greedy = file.generate(PROMPTS[0], 8, stop_token_ids=())
    (row,) = generate(model, PROMPTS[0], GenerationConfig(max_new_tokens=8))
    assert greedy.tokens.tolist() == row.tokens.tolist()
    assert len(greedy.counts) < 8
    assert "draft_block, verify, commit" not in every_loop(manifest, 8, ())


def test_what_would_be_written_past_the_end_is_refused(exported):
    file, _ = exported
    size = file.manifest.sizes("draft_block")[0]
    capacity = file.inputs(f"draft_block_{size}")["block_k_0"]["shape"][2]
    with pytest.raises(ValueError, match=f"start: draft_block_{size} writes {size} tokens from"):
        file.call(f"draft_block_{size}", start=[capacity - size + 1])
    if file.manifest.sizes("step_block"):
        with pytest.raises(ValueError, match=f"length: step_block_{size} writes . rows from 95 on"):
            file.call(f"step_block_{size}", start=[0], length=[SHAPES.capacity - 1])


def test_sampling_accepts_block_drafts(exported):
    from jaxspec.core.types import Warp

    (file, _), counts, warp = exported, set(), Warp(np.float32(0.5))
    for seed in range(6):
        decoded = file.generate(PROMPTS[0], 16, stop_token_ids=(), warp=warp, seed=seed)
        assert len(decoded.tokens) == 16
        counts.update(decoded.counts)
    assert max(counts) > 1


@pytest.mark.parametrize(
    ("method", "block", "bundle"),
    [
        (Deer(5), 4, "cpu"),
        (Deer(16), 8, "cpu"),
        (Deer(6, ((0,), (1,), (0, 0))), 4, "cpu"),
        (Deer(5, num_nodes=4, branch=2), 8, "gpu"),
    ],
    ids=["chain", "long chain", "shallow tree", "largest window"],
)
def test_a_text_may_fill_the_capacity(model, tmp_path, method, block, bundle):
    """At the end of the text, windows hold masks whose positions lie behind the capacity."""
    from jaxspec.mobile.runtime import MobileModel

    shapes = replace(SHAPES, capacity=50, bundle=bundle)
    export(model, tmp_path, drafter_of(model, method, block=block), shapes)
    file, count = MobileModel(tmp_path / MODEL_FILE, num_threads=1), 50 - len(PROMPTS[0])
    decoded = file.generate(PROMPTS[0], count, stop_token_ids=())
    (row,) = generate(model, PROMPTS[0], GenerationConfig(max_new_tokens=count, stop_token_ids=()))
    assert decoded.tokens.tolist() == row.tokens.tolist()
    assert len(decoded.counts) < count


def test_what_no_file_drafts_is_refused(model, tmp_path):
    def refused(method, named, **changes):
        with pytest.raises(ValueError, match=named):
            export(model, tmp_path, drafter_of(model, method, **changes), SHAPES)

    refused(Deer(3), "sees both sides", block=None)
    refused(Deer(3), "a Markov head, which files cannot hold", rank=2)
    refused(Deer(3, steps=2), "without steps")
    refused(Deer(3, sep_token_id=1), 'without sep_token_id.*sep=""')
    refused(Deer(3, ((0,), (1,)), temperature=0.5), "without temperature")
    refused(Deer(3, adaptive=AdaptiveBlock(0.5), temperature=0.5), "without temperature")
    short = drafter_of(model, Deer(3))
    config = short.params.config.replace(max_positions=64)
    short = short._replace(params=Network(short.params.params, config))
    with pytest.raises(ValueError, match="at most the drafter's 64 positions, got 96"):
        export(model, tmp_path, short, SHAPES)
    causal = Network(init_params(CONFIG, jax.random.key(0)), CONFIG)
    with pytest.raises(ValueError, match="needs a diffusion model"):
        export(model, tmp_path, LoadedDrafter(Deer(3), causal), SHAPES)


def test_a_check_on_the_gpu_calls_draft_block(exported):
    file, _ = exported
    assert file.manifest.sizes("draft") == ()
    loops = every_loop(file.manifest, 8, ())
    assert "draft_block, verify, commit" in loops
    has_steps = bool(file.manifest.sizes("step_block"))
    assert ("draft_block, step_block" in loops) == has_steps
    assert ("draft_block, step_block_sampled" in loops) == has_steps
