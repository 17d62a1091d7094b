"""Files of prompts, decoded in slots that are refilled as rows finish."""

from jaxspec.batch.guard import Guard, GuardSettings
from jaxspec.batch.job import check_job, job_header, run
from jaxspec.batch.report import JobReport
from jaxspec.batch.rows import Row, read_rows, rows_of
from jaxspec.batch.slots import Place
from jaxspec.batch.writer import Collector, Output, OutputError, Writer

__all__ = [
    "Collector",
    "Guard",
    "GuardSettings",
    "JobReport",
    "Output",
    "OutputError",
    "Place",
    "Row",
    "Writer",
    "check_job",
    "job_header",
    "read_rows",
    "rows_of",
    "run",
]
