"""`check_drafter` passes honest drafters and catches dishonest ones."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxspec import Model, PromptLookup, Tokenizer, check_drafter
from jaxspec.core.proposal import chain_proposal
from jaxspec.models import ModelConfig, Network, init_params


@pytest.fixture(scope="module")
def padded_model() -> Model:
    """Knows 8 ids, of which its tokenizer has 5."""
    import tokenizers

    vocab = {letter: index for index, letter in enumerate("abcde")}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="a"))
    config = ModelConfig(
        vocab_size=8,
        embed_dim=16,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        mlp_dim=16,
        max_positions=64,
    )
    return Model(Network(init_params(config, jax.random.key(0)), config), Tokenizer(backend))


@dataclasses.dataclass(frozen=True)
class AlwaysZero(PromptLookup):
    """Honest: drafts token 0, and says that this was not drawn from any law."""

    num_speculative_tokens: int = 2

    def propose(self, params, key, state, context):
        root = context.tokens[context.length - 1]
        return chain_proposal(jnp.stack([root, 0, 0]), jnp.ones(3, bool)), state


@dataclasses.dataclass(frozen=True)
class SaysUniform(AlwaysZero):
    """Dishonest: claims to have drawn its zeros from a uniform law."""

    def propose(self, params, key, state, context):
        proposal, state = super().propose(params, key, state, context)
        vocab = params.target.vocab_size
        laws = jnp.full((2, vocab), -jnp.log(float(vocab)))
        return proposal._replace(draft_logprobs=laws), state


@dataclasses.dataclass(frozen=True)
class ForgetsTheRoot(AlwaysZero):
    """Malformed: node 0 is not the pending token."""

    def propose(self, params, key, state, context):
        proposal, state = super().propose(params, key, state, context)
        return proposal._replace(tokens=proposal.tokens.at[0].set(6)), state


@dataclasses.dataclass(eq=False, frozen=True)
class ComparesByIdentity(AlwaysZero):
    """Recompiles: equal settings are not equal objects."""

    __hash__ = object.__hash__


def test_an_honest_drafter_passes():
    report = check_drafter(AlwaysZero(), num_samples=1024)
    assert report.holds, str(report)
    report.raise_if_broken()


@pytest.mark.parametrize(
    ("drafter", "law"),
    [
        (SaysUniform(), "sampled output has the target's distribution"),
        (ForgetsTheRoot(), "proposals are well formed"),
        (ComparesByIdentity(), "settings are equal and hash alike"),
    ],
)
def test_a_broken_law_is_named(drafter, law):
    report = check_drafter(drafter)
    assert law in {check.law for check in report.checks if not check.holds}, str(report)
    with pytest.raises(AssertionError, match="BROKEN"):
        report.raise_if_broken()


def test_ids_past_a_tokenizer_are_no_part_of_the_law(padded_model):
    report = check_drafter(AlwaysZero(), padded_model, num_samples=1024)
    assert report.holds, str(report)


def test_a_drafter_that_raises_is_a_finding():
    class Raises(AlwaysZero):
        def propose(self, params, key, state, context):
            raise RuntimeError("no such luck")

    report = check_drafter(Raises(), num_samples=16)
    assert not report.holds
    assert "no such luck" in str(report)


class Half:
    """A drafter without a state, which is no dataclass either."""

    taps, tree_shape, widths = (), (2, 1), (2,)

    def propose(self, params, key, state, context):
        raise NotImplementedError


def test_a_drafter_that_is_no_dataclass_is_told_to_be_one():
    kind = type("Plain", (Half,), {"init": lambda *_: ()})
    report = check_drafter(kind(), num_samples=1)
    assert report.checks[0].seen == "make it a frozen dataclass of hashable settings"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "demo"}, r"model must be a Model, got str; give jaxspec.load\('demo'\)"),
        ({"seed": "a"}, "seed must be a whole number, got 'a'"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"seed": True}, "seed must be a whole number, got True"),
        ({"num_samples": 0}, "num_samples must be at least 1, got 0"),
        ({"num_samples": 5000}, "num_samples must be at most 4096, got 5000"),
        ({"num_samples": 1.5}, "num_samples must be a whole number, got 1.5"),
        ({"progress": "no"}, "progress must be True or False, got 'no'"),
        ({"drafter": "lookup"}, "drafter must be one such as PromptLookup"),
        ({"drafter": Half()}, "drafter: Half has no `init`; see jaxspec.core.types.Drafter"),
    ],
)
def test_what_cannot_be_checked_with_is_refused_before_the_first_law(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_drafter(**{"drafter": AlwaysZero(), **arguments})
