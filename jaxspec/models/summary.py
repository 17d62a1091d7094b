"""The way in which models, networks, heads and drafters show themselves: a line, or a small table.

Their weights are never written out: of a small model they are millions of characters.
"""

import html
from collections.abc import Mapping, Sequence

import jax

from jaxspec.core.types import PyTree

Facts = Mapping[str, str]


def weight_facts(params: PyTree) -> dict[str, str]:
    """Returns the number of weights, their dtypes and what they take, for people.

    Example:
        >>> import jax.numpy as jnp
        >>> weight_facts({"kernel": jnp.zeros((1000, 1200))})
        {'weights': '1.2 M', 'dtype': 'float32', 'memory': '4.8 MB'}
    """
    arrays = [leaf for leaf in jax.tree.leaves(params) if hasattr(leaf, "dtype")]
    if not arrays:
        return {"weights": "none"}
    count = sum(array.size for array in arrays)
    size = sum(array.size * array.dtype.itemsize for array in arrays)
    return {
        "weights": f"{count / 1e6:,.1f} M" if count >= 1e5 else f"{count:,}",
        "dtype": " and ".join(sorted({str(array.dtype) for array in arrays})),
        "memory": f"{size / 1e6:,.1f} MB",
    }


def summary_line(thing: object, facts: Facts) -> str:
    """Returns a line for `__repr__`.

    Example:
        >>> summary_line({}, {"layers": "12", "weights": "1.2 M"})
        'dict(layers: 12, weights: 1.2 M)'
    """
    return f"{type(thing).__name__}({', '.join(map(': '.join, facts.items()))})"


def summary_html(thing: object, facts: Facts) -> str:
    """Returns a table for `_repr_html_`."""
    return table_html((type(thing).__name__, ""), list(facts.items()))


def table_html(heads: Sequence[str], rows: Sequence[Sequence[str]], escaped: bool = False) -> str:
    """Returns a table as HTML.

    Args:
        heads: names of the columns; no line of them if all are empty.
        rows: texts of the cells.
        escaped: the texts are HTML.
    """

    def cells(tag: str, values: Sequence[str]) -> str:
        style = "text-align:left;padding:.15em .7em;vertical-align:top"
        shown = values if escaped else map(html.escape, values)
        return "".join(f'<{tag} style="{style}">{value}</{tag}>' for value in shown)

    head = f"<thead><tr>{cells('th', heads)}</tr></thead>" if any(heads) else ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<table style="font-size:90%">{head}<tbody>{body}</tbody></table>'
