"""Manifest of an exported file: in its folder as JSON, and inside the file as metadata.

An app reads shapes and settings from it. Whoever opens the file checks by it that the file was made
by jaxspec, is whole, and belongs to the tokenizer.
"""

import dataclasses
import hashlib
import json
import mmap
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Self

from jaxspec.checkpoint import CheckpointError, Tokenizer
from jaxspec.checkpoint.files import parse_json
from jaxspec.core.checks import Checked, Count, Natural, Requirement
from jaxspec.mobile.convert import Lowered

MODEL_FILE = "model.tflite"
"""Name of the file in the folder of an export."""
KEY = "jaxspec_manifest"
"""Name among a flatbuffer's metadata, and first entry of the JSON."""
FORMAT = 2
_NO_CHECKSUM = "0" * 64
_LONGEST = 1 << 24  # bytes of a manifest
_PIECE = 1 << 20  # bytes of a file that are read at a time
_DAMAGED = "is damaged or incomplete: copy it or export it again."
_Checksum = Annotated[
    str,
    Requirement("64 hexadecimal digits", lambda text: bool(re.fullmatch("[0-9a-f]{64}", text))),
]
_Paths = tuple[tuple[Natural, ...], ...]


@dataclasses.dataclass(frozen=True)
class Manifest(Checked):
    """The settings of an exported file.

    Attributes:
        version: jaxspec's, when it wrote the file.
        model: name of the target.
        quantization: of the weights.
        capacity: of the caches, in tokens; also the longest text.
        num_tokens: number of ids that it may emit.
        stop_token_ids: end a text.
        tokenizer: fingerprint of the vocabulary; `None`: there was no tokenizer.
        drafter: settings of the drafter by name; `None`: plain decoding only.
        paths: rank paths of the tree of `step`, the root left out.
        trees: the same by signature, in files with a `step_N` for each of several trees.
        signatures: shape and dtype of every input and output, by signature and name.
        generation_defaults: `generation_config.json` of the model; no function of the file applies
            it.
        diffusion: of a diffusion language model: `mask_token_id`, `shift`, `block` and `causal`
            (True: over blocks); `None`: the model continues texts.
        checksum: SHA-256 of the file with this entry as zeros.
    """

    version: str
    model: str
    quantization: str
    capacity: Count
    num_tokens: Count
    stop_token_ids: tuple[Natural, ...]
    tokenizer: str | None
    drafter: Mapping[str, Any] | None
    paths: _Paths
    signatures: Mapping[str, Mapping[str, Mapping[str, Any]]]
    generation_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    diffusion: Mapping[str, Any] | None = None
    trees: Mapping[str, _Paths] = dataclasses.field(default_factory=dict)
    checksum: _Checksum = _NO_CHECKSUM

    @property
    def depth(self) -> int:
        """Depth of the deepest tree of `step` or `step_N`; 0 without one."""
        every = (self.paths, *self.trees.values())
        return max((len(path) for paths in every for path in paths), default=0)

    def sizes(self, kind: str) -> tuple[int, ...]:
        """Returns N of all signatures KIND_N, ascending."""
        names = (name.rpartition("_") for name in self.signatures)
        sizes = (size for base, _, size in names if base == kind and size.isdecimal())
        return tuple(sorted(map(int, sizes)))

    def to_json(self) -> str:
        """Writes one line, which can be found in a file's bytes."""
        return json.dumps({KEY: FORMAT, **dataclasses.asdict(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads `to_json`.

        Raises:
            CheckpointError: it has another format, is incomplete, or has an entry of another type.
        """
        try:
            entries = parse_json(text)
        except ValueError as error:
            raise CheckpointError(f"The manifest is damaged ({error}): export again.") from None
        if not isinstance(entries, dict) or entries.pop(KEY, None) != FORMAT:
            raise CheckpointError(
                "The file was exported by another version of jaxspec: export it again."
            )
        try:
            return cls(**entries)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"The manifest is damaged ({error}): export again.") from None


def describe_signatures(signatures: dict[str, Lowered]) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns shapes and dtypes as a manifest lists them."""

    def listed(record) -> dict[str, Any]:
        return {
            name: {"shape": list(array.shape), "dtype": array.dtype.name}
            for name, array in record.items()
        }

    return {
        name: {"inputs": listed(lowered.inputs), "outputs": listed(lowered.outputs)}
        for name, lowered in signatures.items()
    }


def tokenizer_fingerprint(tokenizer: Tokenizer | None) -> str | None:
    """Returns a hash, equal for tokenizers that give the same ids to the same pieces."""
    if tokenizer is None:
        return None
    pieces = sorted(tokenizer.backend.get_vocab(with_added_tokens=True).items())
    return hashlib.sha256(json.dumps(pieces).encode()).hexdigest()


def seal(path: Path, manifest: Manifest) -> Manifest:
    """Puts the checksum into a file that already holds its manifest."""
    empty = manifest.to_json().encode()
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            at = view.find(empty)
        assert at >= 0, "the converter dropped or changed the metadata"
        at += empty.rindex(_NO_CHECKSUM.encode())
        sealed = dataclasses.replace(manifest, checksum=_checksum(file, at))
        file.seek(at)
        file.write(sealed.checksum.encode())
    return sealed


def _checksum(file: BinaryIO, at: int) -> str:
    """Returns the SHA-256 of a file with zeros for its checksum, which lies at byte `at`."""
    digest = hashlib.sha256()
    file.seek(0)
    for start in range(0, at, _PIECE):
        digest.update(file.read(min(_PIECE, at - start)))
    digest.update(_NO_CHECKSUM.encode())
    file.seek(at + len(_NO_CHECKSUM))
    while piece := file.read(_PIECE):
        digest.update(piece)
    return digest.hexdigest()


def model_file(path: str | Path) -> Path:
    """Returns the exported file: the one in a folder of `export`, or the path itself."""
    inside = Path(path) / MODEL_FILE
    return inside if inside.is_file() else Path(path)


def read_manifest(path: str | Path) -> Manifest:
    """Reads the manifest inside a file, and checks that the file is whole.

    Raises:
        CheckpointError: the file is missing, was not exported by jaxspec, or is damaged.

    Example:
        >>> import tempfile
        >>> from jaxspec import load
        >>> from jaxspec.mobile import ExportConfig, export, read_manifest
        >>> config = ExportConfig(capacity=64, prefill=(8,))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manifest = export(load("demo-draft"), folder, config=config)
        ...     read_manifest(f"{folder}/model.tflite") == manifest
        True
    """
    path = model_file(path)
    if not path.is_file():
        raise CheckpointError(
            f"{path} does not exist, or is no file: give the .tflite, or the folder of its export."
        )
    start_of = b'{"' + KEY.encode()
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            raise CheckpointError(f"{path} is empty: export it again.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            start = view.find(start_of)
            if start < 0:
                raise CheckpointError(
                    f"{path} has no jaxspec manifest: it was not made by `jaxspec export`, or it "
                    "is incomplete."
                )
            try:
                manifest = Manifest.from_json(_first_object(view[start : start + _LONGEST]))
            except CheckpointError as error:
                raise CheckpointError(f"{path}: {error}") from None
            except (ValueError, RecursionError):
                raise CheckpointError(f"{path} {_DAMAGED}") from None
            at = view.find(manifest.checksum.encode(), start)
        digest = _checksum(file, at)
    if digest != manifest.checksum:
        raise CheckpointError(f"{path} {_DAMAGED}")
    return manifest


def _first_object(data: bytes) -> str:
    """Returns the JSON object that some bytes begin with."""
    text = data.decode("utf-8", errors="replace")
    _, end = json.JSONDecoder().raw_decode(text)
    return text[:end]
