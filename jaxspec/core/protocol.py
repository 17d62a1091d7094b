"""Checks that a network is a `LanguageModel`: its members, its leaves, the shapes that it gives.

Shapes are found by tracing (`jax.eval_shape`): nothing is compiled and nothing is computed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.core.checks import shown
from jaxspec.core.types import Hidden, KVCache, LayerKV, PyTree

_MEMBERS = {
    "vocab_size": "the number of ids that it reads and scores, an int above 0",
    "embed_dim": "the width of its features, an int above 0",
    "forward": (
        "a method forward(tokens, positions, mask, cache, *, scratch=None, taps=()) that returns "
        "a `Hidden`"
    ),
    "unembed": "a method unembed(features) that returns logits, [nodes, vocab_size]",
    "empty_cache": "a method empty_cache(capacity) that returns a `KVCache`",
}
_SIZES = ("vocab_size", "embed_dim")
# Sizes of the passes that are traced; no two are equal, so that swapped axes are noticed.
_NODES, _SCRATCH, _PLACES = 3, 2, 11


def check_members(network: Any) -> None:
    """Refuses what is not a pytree of arrays with the members of `core.types.LanguageModel`.

    Raises:
        ValueError: naming the member, and what it must be.

    Example:
        >>> check_members({"embedding": jnp.zeros((5, 4))})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: network: dict has no `vocab_size`; it must be the number of ids that it ...
    """
    kind = type(network).__name__
    if isinstance(network, type):
        raise ValueError(f"network: got the class {network.__name__}; give an instance.")
    for name, meaning in _MEMBERS.items():
        if not hasattr(network, name):
            raise ValueError(
                f"network: {kind} has no `{name}`; it must be {meaning}, see "
                "jaxspec.core.types.LanguageModel."
            )
        member = getattr(network, name)
        is_size = isinstance(member, int | np.integer) and member > 0
        if not (is_size if name in _SIZES else callable(member)):
            raise ValueError(f"network: `{name}` of {kind} must be {meaning}; got {shown(member)}.")
    leaves = jax.tree.leaves(network)
    if any(leaf is network for leaf in leaves):
        raise ValueError(
            f"network: {kind} is no pytree, so its weights cannot be arguments of a program; "
            "register the class with jax.tree_util.register_dataclass, settings as meta_fields."
        )
    for leaf in leaves:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ValueError(
                f"network: the leaves of {kind} must be arrays, and one is {leaf!r:.40}; make "
                "settings static, such as meta_fields of register_dataclass."
            )


def check_sizes(network: Any) -> None:
    """Refuses a network whose caches, features or logits do not have the shapes of the protocol.

    Args:
        network: has the members, see `check_members`.

    Raises:
        ValueError: a method fails, or gives a shape or dtype that does not fit the others.

    Example:
        >>> import jaxspec
        >>> check_sizes(jaxspec.load("demo-draft").network)
    """
    cache = _shapes("empty_cache", _empty_cache(_PLACES), network)
    _check_cache(cache)
    scratch = _shapes("empty_cache", _empty_cache(_SCRATCH), network).layers
    features = None
    for given, *segments in (
        ("without a cache", None, None),
        ("over a cache", cache, None),
        ("over a cache and scratch", cache, scratch),
    ):
        what = f"forward {given}"
        hidden = _shapes(what, _forward, network, *segments)
        _check_hidden(what, hidden, network.embed_dim)
        _check_layers(f"{what}, in new_kv,", hidden.new_kv, _NODES, cache.layers)
        features = hidden.features
    logits = _shapes("unembed", _unembed, network, features)
    _check_floats("unembed", "logits", logits, (_NODES, network.vocab_size), "[nodes, vocab_size]")


def _empty_cache(places: int) -> Callable[[Any], Any]:
    return lambda network: network.empty_cache(places)


def _unembed(network: Any, features: PyTree) -> Any:
    return network.unembed(features)


def _forward(network: Any, cache: PyTree, scratch: PyTree) -> Any:
    seen = _NODES + (0 if scratch is None else _SCRATCH)
    positions = jnp.arange(_NODES, dtype=jnp.int32)
    mask = jnp.ones((_NODES, seen), bool)
    return network.forward(jnp.zeros_like(positions), positions, mask, cache, scratch=scratch)


def _shapes(what: str, function: Callable[..., Any], *args: PyTree) -> Any:
    try:
        # A new function for each call: JAX remembers shapes, and can take two classes for one.
        return jax.eval_shape(lambda *given: function(*given), *args)
    except Exception as error:
        # Whatever someone else's network raises says which of its methods is wrong.
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"network: {what} fails: {type(error).__name__}: {reason:.300}") from error


def _check_cache(cache: Any) -> None:
    if not isinstance(cache, KVCache):
        raise ValueError(
            f"network: empty_cache must return a `KVCache`, got {type(cache).__name__}."
        )
    length = cache.length
    if length.shape or not jnp.issubdtype(length.dtype, jnp.integer):
        raise ValueError(
            "network: empty_cache must give a scalar of whole numbers as `length`, got "
            f"{_described(length)}."
        )
    _check_layers("empty_cache", cache.layers, _PLACES, None)


def _check_layers(what: str, layers: Any, places: int, of_cache: Any) -> None:
    """Checks keys and values of `places` places; those of a pass have the sizes of the cache."""
    is_layers = isinstance(layers, tuple) and all(isinstance(layer, LayerKV) for layer in layers)
    if not is_layers or not layers:
        raise ValueError(f"network: {what} must give a tuple of one `LayerKV` for each layer.")
    if of_cache is not None and len(layers) != len(of_cache):
        raise ValueError(
            f"network: {what} gives {len(layers)} layers; its cache has {len(of_cache)}."
        )
    for index, layer in enumerate(layers):
        for name, axis, order in (
            ("keys", 2, "kv_heads, head_dim"),
            ("values", 1, "kv_heads"),
        ):
            array = getattr(layer, name)
            shape = list(array.shape)
            if array.ndim != 3 or shape[axis] != places:
                rest = "" if axis == 2 else ", head_dim"
                raise ValueError(
                    f"network: {what} gives {name} of shape {shape} in layer {index}; for "
                    f"{places} places they must be [{order}, {places}{rest}]."
                )
            if of_cache is None:
                continue
            cached = getattr(of_cache[index], name)
            expected = list(cached.shape)
            expected[axis] = places
            if shape != expected or array.dtype != cached.dtype:
                raise ValueError(
                    f"network: {what} gives {name} {_described(array)} in layer {index}, which its "
                    f"cache cannot hold; they must be {expected} {cached.dtype}."
                )


def _check_hidden(what: str, hidden: Any, embed_dim: int) -> None:
    if not isinstance(hidden, Hidden):
        raise ValueError(
            f"network: {what} must return a `Hidden`, got {type(hidden).__name__}; see "
            "jaxspec.core.types."
        )
    _check_floats(what, "features", hidden.features, (_NODES, embed_dim), "[nodes, embed_dim]")
    if tuple(hidden.taps.shape) != (_NODES, 0):
        raise ValueError(
            f"network: {what} must give taps of shape {[_NODES, 0]}, [nodes, 0], where taps=(), "
            f"got {list(hidden.taps.shape)}."
        )


def _check_floats(what: str, name: str, array: Any, shape: tuple[int, ...], axes: str) -> None:
    if tuple(array.shape) != shape or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"network: {what} must give {name} of shape {list(shape)}, {axes}, in floating point, "
            f"got {_described(array)}."
        )


def _described(array: Any) -> str:
    return f"{list(array.shape)} {array.dtype}"
