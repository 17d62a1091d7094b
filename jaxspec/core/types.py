"""The records and protocols that everything else is written in.

Every array here belongs to ONE row (one sequence). The step maps rows; nothing below knows of a
batch. Axis names: `nodes` of a tree, root included; `levels` = its depth + 1; `places` of a text or
cache; `distributions`, one for each parent whose children were sampled.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

PyTree = Any


class Stop(IntEnum):
    """Reason why a row ended; `RUNNING` while it has not."""

    RUNNING = 0
    TOKEN = 1  # a stop id was emitted
    STRING = 2  # a stop string was completed
    LENGTH = 3  # `max_new_tokens` or the context was used up
    NOT_FINITE = 4  # the target gave NaN, or no token with finite logits
    GRAMMAR = 5  # the text is one of the grammar, and no longer one begins with it
    NO_TOKEN = 6  # bans, penalties and the grammar together forbid every token


class LayerKV(NamedTuple):
    """Keys and values of one layer. Keys keep places last, as the score product reads them.

    Attributes:
        keys: `[kv_heads, head_dim, places]`, rotated by position, in the cache's dtype.
        values: `[kv_heads, places, head_dim]`, in the same dtype.
    """

    keys: Float[Array, "kv_heads head_dim places"]
    values: Float[Array, "kv_heads places head_dim"]


class KVCache(NamedTuple):
    """One row's cache. Places at or past `length` mean nothing: masked, later overwritten.

    Attributes:
        layers: one entry per layer, in the model's order; all have the same capacity in places.
        length: scalar, number of tokens in the cache.
    """

    layers: tuple[LayerKV, ...]
    length: Int[Array, ""]


class Tree(NamedTuple):
    """A draft tree as arrays. Node 0 is the root, the pending token; parents precede children.

    Attributes:
        parents: index of each node's parent, -1 at the root.
        depths: number of edges between the root and each node.
        ranks: 0 for a parent's first choice, 1 for its second, ...; 0 at the root.
        ancestors: `ancestors[i, j]` is True when j is on the path root..i, i included; used as it
            stands for the attention mask between draft nodes.
        paths: `paths[i, d]` is the node at depth d on the path root..i; -1 past i. Its width is the
            static bound on depth that commits and loops over levels rely on.
        children: `children[i, r]` is the child of rank r of node i, or -1.

    Example:
        >>> from jaxspec import tree_from_parents
        >>> tree = tree_from_parents([-1, 0, 0, 1])
        >>> tree.depths.tolist(), tree.ranks.tolist()
        ([0, 1, 1, 2], [0, 0, 1, 0])
    """

    parents: Int[Array, " nodes"]
    depths: Int[Array, " nodes"]
    ranks: Int[Array, " nodes"]
    ancestors: Bool[Array, "nodes nodes"]
    paths: Int[Array, "nodes levels"]
    children: Int[Array, "nodes branch"]


class Proposal(NamedTuple):
    """Tokens that a drafter offers for verification.

    Attributes:
        tokens: one per node; node 0 repeats the pending token.
        valid: False where the budget was not used. It may depend on the tokens of a node's
            ancestors and of earlier siblings and their subtrees, never on its own token: dropping a
            node for the token it drew is a bias.
        draft_logprobs: row by row, log-probabilities of the distributions that tokens were really
            drawn from; `None`: every token was chosen deterministically, given the text.
        law_row: the row of `draft_logprobs` a node was drawn from (0 and unused at the root).
            Siblings share a row and were drawn from it in order, without replacement. Parents share
            a row only where all of one depth share one draw: then there is one row for each depth.
            Any other tree with branches has more rows than depths; `tree_proposal` adds an unused
            one where it must.
    """

    tokens: Int[Array, " nodes"]
    tree: Tree
    valid: Bool[Array, " nodes"]
    draft_logprobs: Float[Array, "distributions vocab"] | None
    law_row: Int[Array, " nodes"]


class Verdict(NamedTuple):
    """Decision of a verification.

    Attributes:
        path: accepted nodes, root first; -1 past the last one.
        num_emitted: accepted draft tokens plus one: the bonus (or corrected) token is counted.
        next_token: that last token, sampled from the target's distribution or its residual; the
            next root.
    """

    path: Int[Array, " levels"]
    num_emitted: Int[Array, ""]
    next_token: Int[Array, ""]


class Hidden(NamedTuple):
    """Results of a forward pass over n tokens. Unembedding is a separate call.

    Attributes:
        features: the last hidden state AFTER the final norm: what the output head multiplies.
        taps: inputs (pre-norm residual stream) of the layers asked for, side by side.
        new_kv: keys and values of these n tokens, to be committed: places are nodes.
    """

    features: Float[Array, "nodes embed"]
    taps: Float[Array, "nodes tapped"]
    new_kv: tuple[LayerKV, ...]


class Recent(NamedTuple):
    """The last committed path: what drafters learn from. Rows at or past `count` mean nothing.

    Attributes:
        tokens: `tokens[i]` is the token emitted AFTER the position that `features[i]` describes, so
            that `(features[i], tokens[i])` are EAGLE's shifted pairs and `tokens[count - 1]` is the
            pending token.
        likeliest: for drafters that ask (`AsksLikeliest`), the target's likeliest tokens after each
            node of the last pass, rejected ones too, best first; -1 after nodes that were not
            valid. It means nothing if `count` is 0.
    """

    tokens: Int[Array, " levels"]
    features: Float[Array, "levels embed"]
    taps: Float[Array, "levels tapped"]
    count: Int[Array, ""]
    likeliest: Int[Array, "nodes branch"] | None = None


class Penalties(NamedTuple):
    """A row's rules about what its text already holds. One that is `None` is absent.

    Attributes:
        repetition: divides positive logits of tokens that occur in the text, prompt included, and
            multiplies negative ones (Keskar et al. 2019).
        presence: subtracted from the logits of tokens that were emitted before.
        frequency: subtracted once for each time that a token was emitted before.
        ngram_size: size of n-grams that may not occur twice in the text; 0 allows all.
        min_new_tokens: no stop id is emitted before so many tokens.
    """

    repetition: Float[Array, ""] | None = None
    presence: Float[Array, ""] | None = None
    frequency: Float[Array, ""] | None = None
    ngram_size: Int[Array, ""] | None = None
    min_new_tokens: Int[Array, ""] | None = None


class Warp(NamedTuple):
    """A row's sampling parameters. A filter that is `None` is absent from the program.

    The same record warps the target's logits and a drafter's.

    Attributes:
        temperature: `None` decodes greedily (the filters after it are then `None` too); 0 makes
            this row greedy among rows that sample.
        bias: added to the logits first: logit bias, -inf for banned ids.
        penalties: of the target's logits alone. Drafters draw from laws of their own, so they may
            go without.
    """

    temperature: Float[Array, ""] | None = None
    top_k: Int[Array, ""] | None = None
    top_p: Float[Array, ""] | None = None
    min_p: Float[Array, ""] | None = None
    bias: Float[Array, " vocab"] | None = None
    penalties: Penalties | None = None


class Context(NamedTuple):
    """Read-only view of a row for drafters.

    Attributes:
        tokens: the text so far, prompt included; places at or past `length` mean nothing.
        length: tokens in the text. The last of them is pending: `cache.length == length - 1`.
        room: tokens that may still be emitted.
        stop_ids: ids that end the row; -1 where unused.
        grammar: for drafters, the `core.grammar.RowGrammar` that the text obeys; `None` without
            one, and in states.
    """

    tokens: Int[Array, " places"]
    length: Int[Array, ""]
    room: Int[Array, ""]
    stop_ids: Int[Array, " stop_ids"]
    warp: Warp
    cache: KVCache
    recent: Recent
    grammar: Any = None


class Emitted(NamedTuple):
    """Facts about each place of the text.

    Attributes:
        from_draft: True where a draft token was accepted, False for the target's own tokens.
        logprobs: the target's log-probability of the token before any warping; `None` if not asked
            for.
        warped_logprobs: the same after bias, penalties, temperature and filters; `None` if not
            asked for.
    """

    from_draft: Bool[Array, " places"]
    logprobs: Float[Array, " places"] | None
    warped_logprobs: Float[Array, " places"] | None


class Stats(NamedTuple):
    """Counters of one row.

    Attributes:
        num_steps: target passes this row took part in while running.
        accepted: `accepted[i]` counts steps that accepted exactly i draft tokens (bonus excluded).
        drafted: `drafted[i]` counts steps whose deepest valid node had depth i.
        num_nodes: draft nodes verified, roots excluded.
    """

    num_steps: Int[Array, ""]
    accepted: Int[Array, " levels"]
    drafted: Int[Array, " levels"]
    num_nodes: Int[Array, ""]


class DecodeState(NamedTuple):
    """Everything one row carries from step to step.

    Attributes:
        draft: the drafter's own state, `()` if it has none.
        automaton: where the row stands in the stop-string automaton; 0 without one.
        grammar: where it stands in the grammar; `None` without one.
    """

    context: Context
    draft: PyTree
    key: PRNGKeyArray
    stop: Int[Array, ""]
    automaton: Int[Array, ""]
    emitted: Emitted
    stats: Stats
    grammar: Int[Array, ""] | None = None


class Info(NamedTuple):
    """Information about one step of one row, which later steps do not need.

    Attributes:
        emitted: the tokens this step added, in order; entries at or past `count` mean nothing.
        width: tokens in the target pass, root included; the same for every row of a batch.
        logprobs: the target's log-probability of each node's token after its parent, before any
            warping. It means nothing at the root and at nodes that were not offered. `None` if
            `Emitted.logprobs` was not asked for.
        warped_logprobs: the same after warping, if `Emitted.warped_logprobs` was asked for.
    """

    proposal: Proposal
    verdict: Verdict
    emitted: Int[Array, " levels"]
    count: Int[Array, ""]
    width: Int[Array, ""]
    logprobs: Float[Array, " nodes"] | None
    warped_logprobs: Float[Array, " nodes"] | None


class Params(NamedTuple):
    """Both models of a step.

    Attributes:
        target: the model whose output is wanted, a `LanguageModel`.
        draft: weights of the drafter, any pytree; `()` for drafters without own weights.
    """

    target: Any
    draft: Any


# JAX takes classes of `register_dataclass` with equal settings for one, and now and then runs the
# program of another class, such as that of a notebook's cell before it was edited. So the classes
# are settings of this node.
jax.tree_util.register_pytree_with_keys(
    Params,
    lambda params: (
        tuple((jax.tree_util.GetAttrKey(name), getattr(params, name)) for name in Params._fields),
        tuple(None if jax.tree_util.all_leaves((each,)) else type(each) for each in params),
    ),
    lambda _, parts: Params(*parts),
)


class LanguageModel(Protocol):
    """Weights and the functions that read them, as one pytree whose settings are static.

    A causal or a masked-diffusion model alike: the attention mask is an argument.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def embed_dim(self) -> int: ...

    def forward(
        self,
        tokens: Int[Array, " nodes"],
        positions: Int[Array, " nodes"],
        mask: Bool[Array, "nodes scratch+nodes"],
        cache: KVCache | None,
        *,
        scratch: tuple[LayerKV, ...] | None = None,
        taps: tuple[int, ...] = (),
    ) -> Hidden:
        """One pass. `mask` says which scratch places and which of the n tokens each token sees.

        The cached prefix is always seen up to `cache.length`. Nothing is written.
        """
        ...

    def unembed(self, features: Float[Array, "nodes embed"]) -> Float[Array, "nodes vocab"]: ...

    def empty_cache(self, capacity: int) -> KVCache: ...


class Drafter(Protocol):
    """A drafting method: settings in, two pure functions out. Implemented by frozen dataclasses.

    Equal settings must be equal and hash alike: they are static under `jit`, and a fresh but equal
    drafter must not compile again.
    """

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose inputs it reads; `()` for none."""
        ...

    @property
    def tree_shape(self) -> tuple[int, int]:
        """Nodes (root included) and depth of every proposal."""
        ...

    @property
    def widths(self) -> tuple[int, ...]:
        """Pass widths worth compiling, in tokens, ascending; the last one holds every node."""
        ...

    def init(self, params: Params, prompt: Hidden, context: Context) -> PyTree:
        """State before the first step. `prompt` describes every prompt token but the last."""
        ...

    def propose(
        self, params: Params, key: PRNGKeyArray, state: PyTree, context: Context
    ) -> tuple[Proposal, PyTree]:
        """Drafts from the text in `context`. Begins by absorbing `context.recent`."""
        ...


@runtime_checkable
class ChecksFit(Protocol):
    """An optional part of a drafter: a check made before anything is compiled."""

    def check_fit(self, params: Params) -> None:
        """Raises ValueError, naming `drafter`, where its weights are not for this target."""
        ...


@runtime_checkable
class AsksLikeliest(Protocol):
    """An optional part of a drafter: it is told what the target found likely at every node."""

    @property
    def num_likeliest(self) -> int:
        """Tokens for each node in `Recent.likeliest`."""
        ...


@runtime_checkable
class CarriesOn(Protocol):
    """A further part of drafters that learn from prompt to prompt."""

    def carried(self, params: PyTree, draft: PyTree, context: Context) -> PyTree:
        """Its own params for a next prompt, `params.draft`, from a row's final state.

        Args:
            params: its own, of the prompt that was decoded.
            draft: the row's `DecodeState.draft`.
            context: the row's, without its cache.
        """
        ...


@runtime_checkable
class ReadsFinished(Protocol):
    """A further part of drafters that read texts: a job gives them those of its finished rows.

    It does so where drafts change no output: for greedy decoding in float32.
    """

    def with_texts(self, params: PyTree, texts: Sequence[np.ndarray]) -> PyTree | None:
        """Its own params with further texts, or `None`: these are too few to be worth the work.

        A job calls it first without texts. Arrays that come later must have the shapes of those
        that come from this call, or of the given ones if it returns `None`.
        """
        ...


StateT = TypeVar("StateT")
InfoT = TypeVar("InfoT", covariant=True)


class StepFn(Protocol[StateT, InfoT]):
    """One step of any decoder, over a batch of rows."""

    def __call__(self, params: Params, state: StateT, /) -> tuple[StateT, InfoT]: ...
