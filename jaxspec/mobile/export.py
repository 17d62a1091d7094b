"""Export of a model to a `.tflite`: one file of all functions and shared weights, a manifest."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import jax

from jaxspec.checkpoint import Model
from jaxspec.checkpoint.files import check_space, replacing_files
from jaxspec.core.types import ChecksFit, Params
from jaxspec.decoding.request import check_target, check_vocabulary
from jaxspec.drafters import Deer, DrafterLike, DraftModel, Eagle, LoadedDrafter, NoDraft
from jaxspec.drafters.loaded import loaded_drafter
from jaxspec.extras import installed_version
from jaxspec.mobile.calibration import Calibration, calibrate
from jaxspec.mobile.contents import ExportConfig, contents_of, drafters_over_trees, in_one_dtype
from jaxspec.mobile.convert import lower_all, to_tflite
from jaxspec.mobile.manifest import (
    KEY,
    MODEL_FILE,
    Manifest,
    describe_signatures,
    seal,
    tokenizer_fingerprint,
)
from jaxspec.mobile.memory import stored_bytes
from jaxspec.mobile.opset import require_opset
from jaxspec.mobile.quantize import QUANTIZATIONS

MANIFEST_FILE = "manifest.json"


def export(
    model: Model,
    folder: str | Path,
    drafter: DrafterLike | None = None,
    config: ExportConfig | None = None,
    calibration: Calibration | None = None,
) -> Manifest:
    """Writes `model.tflite`, `manifest.json` and the tokenizer into a folder.

    The converter sees shapes only; weights are read and quantized one at a time while the file is
    written. Those of `jaxspec.load(..., weights="files")` are never in memory together.
    Ids past the tokenizer's are left out: no function of the file emits one.

    Args:
        model: the target.
        folder: made if it does not exist; other files in it stay.
        drafter: the drafter of `step`: an `Eagle` head over its static tree, or a `LayerSkip` with
            a fixed set. A `Deer` that is causal over blocks gets `draft_block_N`, which the host
            calls before `verify_N`, and over a chain or a static tree whole steps. A `DFlash` head
            gets whole steps over either. A `DraftModel` lies next to the target. `TokenRecycling`
            and `PromptLookup` get whole steps, whose state is the table or the text. `None`: plain
            decoding only. The `threshold` of an `Eagle` or a `DraftModel` is left out, with a
            warning: the file drafts whole chains.
        config: functions, shapes and quantization; 1024 tokens of text and int8 by default.
        calibration: weights that `calibrated` rounded for this quantization, where several files
            are written; `None`: they are rounded here if the quantization asks for it.

    Returns:
        The manifest.

    Raises:
        ValueError: the extra `mobile` is not installed, a setting does not fit the model, the
            drafter cannot be exported, or the disk has too little room for the file.
        OpsetError: the model needs operations that a phone's GPU lacks.

    Example:
        >>> import tempfile
        >>> from jaxspec import load
        >>> from jaxspec.mobile import ExportConfig, export
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manifest = export(
        ...         load("demo-draft"), folder, config=ExportConfig(capacity=64, prefill=(8,))
        ...     )
        >>> sorted(manifest.signatures)
        ['decode', 'prefill_8']
    """
    config = config or ExportConfig()
    check_target(model, loaded_drafter(drafter))
    model, loaded = in_one_dtype(model, drafter)
    loaded, network = _over_whole_chain(loaded, config), model.network
    contents = contents_of(model, loaded, config)
    check_vocabulary(model, loaded)
    params = Params(network, loaded.params)
    for drafting in drafters_over_trees(loaded.drafter, config):
        if isinstance(drafting, ChecksFit):
            drafting.check_fit(params)
    lowered = lower_all(contents.signatures, params)
    manifest = Manifest(
        version=installed_version(),
        model=model.name,
        quantization=config.quantization,
        capacity=config.capacity,
        num_tokens=contents.num_tokens,
        stop_token_ids=tuple(model.stop_token_ids),
        tokenizer=tokenizer_fingerprint(model.tokenizer),
        drafter=_described(loaded),
        paths=contents.paths,
        signatures=describe_signatures(lowered),
        generation_defaults=dict(model.generation_defaults),
        diffusion=None if contents.canvases is None else contents.canvases.as_dict(),
        trees={f"step_{number}": tree for number, tree in enumerate(config.trees, start=1)},
    )
    texts = {KEY: manifest.to_json()}
    file = to_tflite(lowered, params, config.quantization, texts)
    if config.check_gpu_ops:
        require_opset(file.head)
    with replacing_files(Path(folder)) as staging:
        check_space(staging, file.size)  # before a calibration, which takes long
        rounded = calibrated(model, config) if calibration is None else calibration
        if rounded is not None:
            file = file.with_calibration(rounded)
            check_space(staging, file.size)
        file.write(staging / MODEL_FILE)
        manifest = seal(staging / MODEL_FILE, manifest)
        (staging / MANIFEST_FILE).write_text(manifest.to_json() + "\n", encoding="utf-8")
        if model.tokenizer is not None:
            model.tokenizer.write(staging)
    return manifest


def calibrated(
    model: Model, config: ExportConfig, folder: Path | None = None
) -> Calibration | None:
    """Rounds the weights of a model for texts of its own, if the quantization is calibrated.

    Args:
        model: the target.
        config: quantization, and texts to continue.
        folder: where files of it will be written; its disk is looked at first, as this takes long.
            `None`: that was done.

    Raises:
        CheckpointError: the disk has no room for the weights.
        ValueError: as `calibration.calibrate`.
    """
    form = QUANTIZATIONS[config.quantization]
    if form is None or not form.calibrated:
        return None
    if folder is not None:
        matrices = [leaf for leaf in jax.tree.leaves(model.params) if leaf.ndim > 1]
        check_space(folder, sum(stored_bytes(each.shape, config.quantization) for each in matrices))
    return calibrate(model, form, config.calibration)


def _over_whole_chain(loaded: LoadedDrafter, config: ExportConfig) -> LoadedDrafter:
    """Returns the drafter as a file has it, without a threshold, and warns where it had one."""
    drafter: Any = loaded.drafter
    if not isinstance(drafter, Eagle | DraftModel) or not drafter.threshold:
        return loaded
    if not config.trees or drafter.paths in config.trees:
        warnings.warn(
            f"drafter: an exported file ends no chain early, so threshold={drafter.threshold:g} is "
            f"left out, and each step drafts all {drafter.tree_shape[1]} tokens. `jaxspec tune "
            "tree` with a profile of `jaxspec export kit` finds the fastest tree without it.",
            stacklevel=3,
        )
    return loaded._replace(drafter=dataclasses.replace(drafter, threshold=0.0))


def _described(loaded: LoadedDrafter) -> dict[str, Any] | None:
    drafter: Any = loaded.drafter
    if isinstance(drafter, NoDraft):
        return None
    described = {"name": type(drafter).__name__, **dataclasses.asdict(drafter)}
    if isinstance(drafter, Deer):
        described["diffusion"] = dataclasses.asdict(loaded.params.config.diffusion)
    return described
