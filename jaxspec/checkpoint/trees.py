"""Files of draft trees: rank paths as JSON. One may lie beside the head it was searched for.

That of a chain that ends early also has its threshold.
"""

import json
import operator
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from jaxspec.core.tree import EAGLE_PATHS, Path, normalize_paths

TREE_FILE = "tree.json"
PUBLISHED_TREES: Mapping[str, tuple[Path, ...]] = {"eagle-25": EAGLE_PATHS}
"""Trees that `load_tree` knows by name; the number is of nodes without the root."""


def load_tree(source: str | FilePath) -> tuple[Path, ...]:
    """Reads the nodes of a tree, for `Eagle.of(head, paths)`.

    Args:
        source: a file of `save_tree`; a file with a JSON list of rank paths; or a name in
            `PUBLISHED_TREES`.

    Raises:
        ValueError: there is no such file, it holds no tree, or its tree has no node, which means
            that plain decoding was found to be faster.

    Example:
        >>> from jaxspec.tuning import load_tree
        >>> len(load_tree("eagle-25"))
        25
    """
    if str(source) in PUBLISHED_TREES:
        return PUBLISHED_TREES[str(source)]
    paths = read_paths(FilePath(source))
    if not paths:
        raise ValueError(
            f"tree {source}: has no node, because its search found that plain decoding is faster; "
            "decode without a drafter, or give another tree."
        )
    return paths


def load_threshold(source: str | FilePath) -> float:
    """Reads the threshold of a tree, for `Eagle.of(head, paths, threshold)`; 0 if it has none.

    Args:
        source: as for `load_tree`.

    Raises:
        ValueError: there is no such file, it holds no tree, or the threshold is no number.

    Example:
        >>> from jaxspec.tuning import load_threshold
        >>> load_threshold("eagle-25")
        0.0
    """
    if str(source) in PUBLISHED_TREES:
        return 0.0
    value = _read(FilePath(source))
    threshold = value.get("threshold", 0.0) if isinstance(value, dict) else 0.0
    if not isinstance(threshold, int | float):
        raise ValueError(f"tree {source}: threshold must be a number, got {threshold!r}.")
    return float(threshold)


def read_paths(file: FilePath) -> tuple[Path, ...]:
    """Reads the rank paths of a file; none where a search found that plain decoding is faster.

    Raises:
        ValueError: there is no such file, or it holds no tree.
    """
    value = _read(file)
    try:
        entries = value["paths"] if isinstance(value, dict) else value
        paths = [tuple(map(operator.index, path)) for path in entries]
    except (KeyError, TypeError):
        raise ValueError(f"tree {file}: {_HOLDS}") from None
    try:
        return normalize_paths(paths)
    except ValueError as error:
        raise ValueError(f"tree {file}: {error}") from None


_HOLDS = (
    "must hold a JSON list of rank paths, such as [[0], [1], [0, 0]], or an object with one as "
    "'paths'."
)


def _read(file: FilePath) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"tree {file}: {error.strerror or error}; give a file of `jaxspec tune tree`, or "
            f"{', '.join(PUBLISHED_TREES)}."
        ) from None
    except ValueError:
        raise ValueError(f"tree {file}: {_HOLDS}") from None
