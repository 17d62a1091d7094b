"""The suites, by the names that `python -m benchmarks` knows."""

from collections.abc import Mapping

from benchmarks.harness import Suite
from benchmarks.suites.acceptance import ACCEPTANCE_SUITES
from benchmarks.suites.costs import COST_SUITES
from benchmarks.suites.diffusion import DIFFUSION_SUITES
from benchmarks.suites.forms import FORM_SUITES
from benchmarks.suites.guard import GUARD_SUITES
from benchmarks.suites.jobs import JOB_SUITES
from benchmarks.suites.litert import LITERT_DECODING
from benchmarks.suites.litert_files import LITERT_FILES
from benchmarks.suites.shipped import SHIPPED_SUITES
from benchmarks.suites.side_by_side import SIDE_BY_SIDE

SUITES: Mapping[str, Suite] = {
    **SHIPPED_SUITES,
    **DIFFUSION_SUITES,
    **LITERT_DECODING,
    **LITERT_FILES,
    **JOB_SUITES,
    **GUARD_SUITES,
    **ACCEPTANCE_SUITES,
    **FORM_SUITES,
    **COST_SUITES,
    **SIDE_BY_SIDE,
}
