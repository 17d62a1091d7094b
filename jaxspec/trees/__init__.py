"""What chooses a draft tree: latency of a device, acceptance of a drafter, and the search."""

from jaxspec.trees.acceptance import (
    AcceptanceTable,
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
from jaxspec.trees.exact import Limits
from jaxspec.trees.latency import (
    CachePressure,
    LatencyProfile,
    Timing,
    load_profile,
    roofline_profile,
    save_profile,
    shipped_profiles,
)
from jaxspec.trees.search import (
    Candidate,
    TreeSearch,
    calibration_sensitivity,
    cost,
    draft_batches,
    save_tree,
    search_tree,
)

__all__ = [
    "AcceptanceTable",
    "CachePressure",
    "Candidate",
    "LatencyProfile",
    "Limits",
    "RankCounts",
    "Timing",
    "TreeSearch",
    "calibrated_table",
    "calibration_sensitivity",
    "cost",
    "count_acceptance",
    "draft_batches",
    "identity_of",
    "load_acceptance",
    "load_profile",
    "probe_paths",
    "rank_paths",
    "roofline_profile",
    "save_acceptance",
    "save_profile",
    "save_tree",
    "search_tree",
    "shipped_profiles",
    "shipped_tables",
]
