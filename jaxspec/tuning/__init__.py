"""Tuning for one machine: the draft tree that fits a device, and the sub-layers to skip.

Latency profiles and acceptance tables are measured (`profiling`, `measuring`) or read from files;
`search_tree` finds the fastest tree from them. `skip_search` finds sets for `LayerSkip`.
"""

from jaxspec.checkpoint.trees import load_threshold, load_tree
from jaxspec.tuning.acceptance import (
    AcceptanceTable,
    ExitCounts,
    RankCounts,
    calibrated_table,
    count_acceptance,
    identity_of,
    load_acceptance,
    probe_paths,
    rank_paths,
    save_acceptance,
    shipped_tables,
)
from jaxspec.tuning.latency import (
    LatencyProfile,
    Timing,
    load_profile,
    save_profile,
    shipped_profiles,
)
from jaxspec.tuning.tree_exact import Limits
from jaxspec.tuning.tree_search import (
    Candidate,
    TreeSearch,
    cost,
    draft_batches,
    likeliest_paths,
    predict,
    save_tree,
    search_tree,
)

__all__ = [
    "AcceptanceTable",
    "Candidate",
    "ExitCounts",
    "LatencyProfile",
    "Limits",
    "RankCounts",
    "Timing",
    "TreeSearch",
    "calibrated_table",
    "cost",
    "count_acceptance",
    "draft_batches",
    "identity_of",
    "likeliest_paths",
    "load_acceptance",
    "load_profile",
    "load_threshold",
    "load_tree",
    "predict",
    "probe_paths",
    "rank_paths",
    "save_acceptance",
    "save_profile",
    "save_tree",
    "search_tree",
    "shipped_profiles",
    "shipped_tables",
]
