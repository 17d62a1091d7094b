"""Files of prompts, decoded in slots that are refilled as rows finish."""

from jaxspec.batch.guard import Guard, GuardSettings
from jaxspec.batch.header import job_header
from jaxspec.batch.job import check_job, decode, run
from jaxspec.batch.report import JobReport
from jaxspec.batch.rows import Row, read_rows, rows_of
from jaxspec.batch.settings import AnyConfig, AnyDrafter, JobSettings, Shard, parse_shard
from jaxspec.batch.shards import merge
from jaxspec.batch.writer import Collector, Output, OutputError, Writer
from jaxspec.decoding.profile import DraftingMode

__all__ = [
    "AnyConfig",
    "AnyDrafter",
    "Collector",
    "DraftingMode",
    "Guard",
    "GuardSettings",
    "JobReport",
    "JobSettings",
    "Output",
    "OutputError",
    "Row",
    "Shard",
    "Writer",
    "check_job",
    "decode",
    "job_header",
    "merge",
    "parse_shard",
    "read_rows",
    "rows_of",
    "run",
]
