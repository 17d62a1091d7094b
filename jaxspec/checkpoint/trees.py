"""Files of draft trees: rank paths as JSON. One may lie beside the head it was searched for.

That of a chain that ends early also has its threshold.
"""

from collections.abc import Mapping
from pathlib import Path as FilePath

from jaxspec.checkpoint.files import MOST_JSON, CheckpointError, as_path, parse_json, read_bytes
from jaxspec.core.checks import Share, checked, checks_arguments
from jaxspec.core.tree import EAGLE_PATHS, Path, normalize_paths

TREE_FILE = "tree.json"
_MOST_BYTES = 1 << 24
PUBLISHED_TREES: Mapping[str, tuple[Path, ...]] = {"eagle-25": EAGLE_PATHS}
"""Trees that `load_tree` knows by name; the number is of nodes without the root."""


@checks_arguments
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
    paths = read_paths(as_path("source", source))
    if not paths:
        raise ValueError(
            f"tree {source}: has no node, because its search found that plain decoding is faster; "
            "decode without a drafter, or give another tree."
        )
    return paths


@checks_arguments
def load_threshold(source: str | FilePath) -> float:
    """Reads the threshold of a tree, for `Eagle.of(head, paths, threshold)`; 0 if it has none.

    Args:
        source: as for `load_tree`.

    Raises:
        ValueError: there is no such file, it holds no tree, or the threshold is none.

    Example:
        >>> from jaxspec.tuning import load_threshold
        >>> load_threshold("eagle-25")
        0.0
    """
    if str(source) in PUBLISHED_TREES:
        return 0.0
    return _read(as_path("source", source))[1]


def read_paths(file: FilePath) -> tuple[Path, ...]:
    """Reads the rank paths of a file; none where a search found that plain decoding is faster.

    Raises:
        ValueError: there is no such file, or it holds no tree.
    """
    return _read(file)[0]


def _read(file: FilePath) -> tuple[tuple[Path, ...], float]:
    """Returns rank paths and the threshold."""
    holds = (
        "must hold a JSON list of rank paths, such as [[0], [1], [0, 0]], or an object with one as "
        "'paths'"
    )
    try:
        value = parse_json(read_bytes(file, MOST_JSON))
    except OSError as error:
        raise ValueError(
            f"tree {file}: {error.strerror or error}; give a file of `jaxspec tune tree`, or "
            f"{', '.join(PUBLISHED_TREES)}."
        ) from None
    except CheckpointError as error:
        raise ValueError(f"tree {error}") from None
    except ValueError as error:
        raise ValueError(f"tree {file}: {holds}; it is no JSON ({error}).") from None
    entry = value if isinstance(value, dict) else {"paths": value}
    if "paths" not in entry:
        raise ValueError(f"tree {file}: {holds}; got an object without.")
    try:
        threshold = checked("threshold", entry.get("threshold", 0.0), Share)
        return normalize_paths(entry["paths"]), threshold
    except ValueError as error:
        raise ValueError(f"tree {file}: {error}") from None
