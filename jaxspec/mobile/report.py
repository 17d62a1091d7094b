"""What fewer bits cost: size, agreement with float32 on held-out text, and drafts accepted."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxspec.checkpoint import Model
from jaxspec.core.types import Drafter
from jaxspec.drafters import LoadedDrafter
from jaxspec.mobile.export import MODEL_FILE, ExportConfig, export
from jaxspec.mobile.quantize import QUANTIZATIONS
from jaxspec.mobile.runtime import MobileModel

SCORED_TOKENS, NEW_TOKENS = 128, 64


class Quality(NamedTuple):
    """One quantization of a file, on this machine's CPU.

    size: of the file, in bytes.
    kl: mean divergence of its law from that of float32, in nats, over all scored positions.
    top1: share of these positions at which both name the same likeliest token.
    tau: tokens per round of `step`, bonus INCLUDED; the first token, which comes with the prompt,
        left out. `None` without a drafter.
    refused: why there is no such file; the figures then mean nothing.
    """

    quantization: str
    size: int = 0
    kl: float = float("nan")
    top1: float = float("nan")
    tau: float | None = None
    refused: str | None = None


def quality_table(qualities: Sequence[Quality]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows as text; the first row is that of float32."""
    exact = qualities[0]
    columns = ["weights", "MB", "x float32 file", "KL, nats", "same top-1", "tau"]
    rows = [
        [each.quantization, f"refused: {each.refused}", "", "", "", ""]
        if each.refused is not None
        else [
            each.quantization,
            f"{each.size / 1e6:.1f}",
            f"{each.size / exact.size:.3f}",
            f"{each.kl:.2g}",
            f"{each.top1:.1%}",
            "" if each.tau is None else f"{each.tau:.2f}",
        ]
        for each in qualities
    ]
    return columns, rows


def compare_quantizations(
    model: Model,
    texts: Sequence[Sequence[int]],
    drafter: Drafter | LoadedDrafter | None = None,
    config: ExportConfig | None = None,
    advance: Callable[[str], None] = lambda _: None,
) -> list[Quality]:
    """Exports a model in each quantization and compares them, float32 first.

    Args:
        model: the target.
        texts: ids of held-out texts; up to `SCORED_TOKENS` of each are scored, and each is
            continued by `NEW_TOKENS` for tau.
        drafter: as for `export`.
        config: functions and shapes; its quantization does not count.
        advance: called once per quantization.
    """
    shapes = dataclasses.replace(config or ExportConfig(), check_gpu_ops=False)
    texts = [text[: min(SCORED_TOKENS, shapes.slots // 2)] for text in texts]
    exact: list[np.ndarray] = []
    found = []
    with TemporaryDirectory() as folder:
        for name in QUANTIZATIONS:
            advance(name)
            try:
                export(model, folder, drafter, dataclasses.replace(shapes, quantization=name))
            except ValueError as error:
                found.append(Quality(name, refused=str(error)))
                continue
            path = Path(folder) / MODEL_FILE
            file = MobileModel(path)
            laws = [_laws(file, text) for text in texts]
            exact = exact or laws
            pairs = list(zip(exact, laws, strict=True))
            kl = np.concatenate([np.sum(np.exp(p) * (p - q), axis=1) for p, q in pairs])
            same = np.concatenate([p.argmax(1) == q.argmax(1) for p, q in pairs])
            size, tau = path.stat().st_size, _tau(file, texts)
            found.append(Quality(name, size, float(kl.mean()), float(same.mean()), tau))
    return found


def _laws(file: MobileModel, text: Sequence[int]) -> Float[np.ndarray, "tokens vocab"]:
    """Log-probabilities after each token of a text, read one by one."""
    rows = []
    for place, token in enumerate(text):
        file.call("decode", pending=[token], length=[place])
        logits = file.read("decode", "logits")[0].astype(np.float64)
        shifted = logits - logits.max()
        rows.append(shifted - np.log(np.exp(shifted).sum()))
    return np.stack(rows)


def _tau(file: MobileModel, texts: Sequence[Sequence[int]]) -> float | None:
    if "step" not in file.manifest.signatures and not file.manifest.sizes("step_block"):
        return None
    counts = [n for text in texts for n in file.generate(text, NEW_TOKENS, ()).counts[1:]]
    return float(np.mean(counts)) if counts else None
