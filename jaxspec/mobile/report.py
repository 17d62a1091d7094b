"""Cost of fewer bits: size, agreement with float32 on held-out text, and tau."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from jaxspec.checkpoint import CheckpointError, Model
from jaxspec.decoding.metrics import Counts
from jaxspec.drafters import DrafterLike
from jaxspec.measure.agreement import TextLogits, agreement
from jaxspec.mobile.contents import ExportConfig
from jaxspec.mobile.export import MODEL_FILE, export
from jaxspec.mobile.quantize import QUANTIZATIONS
from jaxspec.mobile.runtime import MobileModel

SCORED_TOKENS, NEW_TOKENS = 128, 64


class Quality(NamedTuple):
    """One quantization of a file, on this machine's CPU.

    Attributes:
        quantization: its name.
        size: of the file, in bytes.
        kl: mean divergence of its distribution from that of float32, in nats, over all scored
            positions; `None` if the file is refused.
        top1: share of these positions at which both have the same likeliest token; `None` if the
            file is refused.
        tau: tokens per round of `step`, bonus INCLUDED; the tokens that come with the prompts are
            left out. `None` without a drafter.
        refused: the reason if there is no such file.
    """

    quantization: str
    size: int = 0
    kl: float | None = None
    top1: float | None = None
    tau: float | None = None
    refused: str | None = None


def quality_table(qualities: Sequence[Quality]) -> tuple[list[str], list[list[str]]]:
    """Returns columns and rows as text; the first of `qualities` is that of float32."""
    exact = qualities[0]
    columns = ["weights", "MB", "x float32 file", "KL, nats", "same top-1", "tau", "x float32 tau"]
    rows = []
    for each in qualities:
        row = [each.quantization, f"refused: {each.refused}", "", "", "", "", ""]
        if each.kl is not None and each.top1 is not None:
            row[1:5] = [
                f"{each.size / 1e6:.1f}",
                f"{each.size / exact.size:.3f}",
                f"{each.kl:.2g}",
                f"{each.top1:.1%}",
            ]
        if each.tau is not None and exact.tau is not None:
            row[5:] = [f"{each.tau:.2f}", f"{each.tau / exact.tau:.3f}"]
        rows.append(row)
    return columns, rows


def compare_quantizations(
    model: Model,
    texts: Sequence[Sequence[int]],
    drafter: DrafterLike | None = None,
    config: ExportConfig | None = None,
    advance: Callable[[str], None] = lambda _: None,
    folder: Path | None = None,
) -> list[Quality]:
    """Exports a model in each quantization and compares them, float32 first.

    Args:
        model: the target.
        texts: ids of held-out texts; up to `SCORED_TOKENS` of each are scored, and each is
            continued by `NEW_TOKENS` tokens for tau.
        drafter: as for `export`.
        config: functions and shapes; its quantization is not used.
        advance: called once per quantization.
        folder: existing one for a temporary folder of these files; `None`: the system's.

    Raises:
        ValueError: the model cannot be exported in float32.
        CheckpointError: the disk is too small for a file.
    """
    config = config or ExportConfig()
    shapes = dataclasses.replace(config, check_gpu_ops=False, calibration=None)
    texts = [text[: min(SCORED_TOKENS, shapes.capacity // 2)] for text in texts]
    exact: list[TextLogits] = []
    found = []
    with TemporaryDirectory(dir=folder) as work:
        for name, weights in QUANTIZATIONS.items():
            advance(name)
            prompts = config.calibration if weights is not None and weights.calibrated else None
            settings = {"quantization": name, "calibration": prompts}
            try:
                export(model, work, drafter, dataclasses.replace(shapes, **settings))
            except CheckpointError:
                raise
            except ValueError as error:
                if not exact:
                    raise
                found.append(Quality(name, refused=str(error)))
                continue
            path = Path(work) / MODEL_FILE
            file = MobileModel(path)
            logits = [_logits(file, text) for text in texts]
            exact = exact or logits
            agreed = agreement(zip(exact, logits, strict=True))
            size, tau = path.stat().st_size, _tau(file, texts)
            found.append(Quality(name, size, agreed.kl, agreed.top1, tau))
    return found


def _logits(file: MobileModel, text: Sequence[int]) -> TextLogits:
    """Returns the logits after each token of a text, read one by one."""
    rows = []
    for place, token in enumerate(text):
        file.call("decode", pending=[token], length=[place])
        rows.append(file.read("decode", "logits")[0])
    return np.stack(rows)


def _tau(file: MobileModel, texts: Sequence[Sequence[int]]) -> float | None:
    if "step" not in file.manifest.signatures and not file.manifest.sizes("step_block"):
        return None
    counts = [n for text in texts for n in file.generate(text, NEW_TOKENS, ()).counts[1:]]
    return Counts(num_tokens=sum(counts), num_steps=len(counts)).tau if counts else None
