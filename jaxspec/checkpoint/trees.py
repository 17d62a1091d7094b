"""Files of draft trees: rank paths as JSON. One may lie beside the head it was searched for."""

import json
import operator
from collections.abc import Mapping
from pathlib import Path as FilePath

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


def read_paths(file: FilePath) -> tuple[Path, ...]:
    """Reads the rank paths of a file; none where a search found that plain decoding is faster.

    Raises:
        ValueError: there is no such file, or it holds no tree.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        entries = value["paths"] if isinstance(value, dict) else value
        paths = [tuple(map(operator.index, path)) for path in entries]
    except OSError as error:
        raise ValueError(
            f"tree {file}: {error.strerror or error}; give a file of `jaxspec tune tree`, or "
            f"{', '.join(PUBLISHED_TREES)}."
        ) from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(
            f"tree {file}: must hold a JSON list of rank paths, such as [[0], [1], [0, 0]], or "
            "an object with one as 'paths'."
        ) from None
    try:
        return normalize_paths(paths)
    except ValueError as error:
        raise ValueError(f"tree {file}: {error}") from None
