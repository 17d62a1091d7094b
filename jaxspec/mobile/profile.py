"""Times of passes on the device where a file will run, read into a `LatencyProfile`.

A kit is an exported file with target and draft passes of several sizes, each a separate signature,
and a script that times them on a phone with LiteRT's benchmark tool. The same file can be timed on
this machine. `jaxspec tune tree` reads the profile, `jaxspec export tflite` the tree. A kit
without a head has passes with layers left out in place of draft passes, for `jaxspec tune skips`.
"""

import dataclasses
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from jaxspec.checkpoint import Model
from jaxspec.checkpoint.files import parse_json, read_bytes, read_json, replacing_files
from jaxspec.core.checks import Count, Nodes, NotNegative, checked, checks_arguments
from jaxspec.drafters import Eagle, LoadedDrafter, NoDraft
from jaxspec.measure.machine import this_machine
from jaxspec.measure.timing import time_in_turns
from jaxspec.mobile.calibration import Calibration
from jaxspec.mobile.contents import ExportConfig
from jaxspec.mobile.export import MODEL_FILE, export
from jaxspec.mobile.manifest import Manifest, read_manifest
from jaxspec.mobile.quantize import QUANTIZATIONS
from jaxspec.mobile.runtime import MobileModel
from jaxspec.mobile.weights import single_functions
from jaxspec.tuning import LatencyProfile, Timing
from jaxspec.tuning.latency import PartialPasses
from jaxspec.tuning.skip_costs import partial_sets

TOKENS = (1, 2, 4, 6, 8, 16, 26, 32)
"""Sizes of target passes, the root included."""
NODES = (1, 2, 4)
"""Sizes of draft passes."""
DRAFTED = 4
"""Tokens of each draft with layers left out: in a graph of one, its call would count most."""
SCRIPT_FILE = "measure.sh"
PARTS = "parts"
"""Folder of a kit with the beginning of its file for each function alone."""
WEB_KEY = "jaxspec_web"
"""First entry of a file that a page measured."""
_HEADER, _SECTION = "jaxspec kit: ", "jaxspec signature: "
_PARTIAL = "partial_"  # begins the names of functions with layers left out
_MOST_LOG = 1 << 24
"""Bytes of the output of a kit's script; it has some lines for each signature."""
_NUMBER = r"([0-9]+\.?[0-9]*(?:e\+?[0-9]+)?)"
# Output of the tools of LiteRT and of TensorFlow Lite: mean, spread, and their unit in seconds.
_LOGS = (
    (rf"Inference \(avg\): +{_NUMBER} ms", rf"Inference \(std\): +{_NUMBER}", 1e-3),
    (
        rf"Inference timings in us: .{{0,200}}Inference \(avg\): {_NUMBER}",
        rf"\bstd={_NUMBER}",
        1e-6,
    ),
)


@checks_arguments
def export_kit(
    model: Model,
    folder: str | Path,
    drafter: LoadedDrafter,
    config: ExportConfig,
    calibration: Calibration | None = None,
) -> Manifest:
    """Writes a file of passes to be timed, and the script that times it on a phone.

    Args:
        model: the target.
        folder: as for `export`.
        drafter: with an EAGLE head; the depth of its tree is the number of tokens that a step's
            first draft pass absorbs, less one. `NoDraft()`: passes of the model with layers left
            out are timed in place of draft passes.
        config: capacity, prefill and quantization of the file that will be used.
        calibration: as for `export`.

    Raises:
        ValueError: the drafter is another one, an argument is of another type, or as `export`.
    """
    if not isinstance(drafter.drafter, Eagle | NoDraft):
        raise ValueError(
            "drafter: a kit times draft passes of an EAGLE head, or passes of the model with "
            f"layers left out; give a head or no drafter, not {type(drafter.drafter).__name__}."
        )
    fitting = tuple(size for size in TOKENS if size <= config.capacity // 2)
    weights = QUANTIZATIONS[config.quantization]
    fewest = "gpu" if weights is None or weights.on_gpu else "cpu"
    sizes = dataclasses.replace(config, bundle=fewest, verify=fitting)
    if isinstance(drafter.drafter, Eagle):
        sizes = dataclasses.replace(sizes, levels=NODES)
    else:
        sizes = dataclasses.replace(sizes, partial=min(DRAFTED, config.capacity // 2))
    with replacing_files(Path(folder)) as staging:
        manifest = export(model, staging, drafter, sizes, calibration)
        write_parts(staging / MODEL_FILE, staging / PARTS, timed_signatures(manifest))
        script = staging / SCRIPT_FILE
        script.write_text(kit_script(manifest), encoding="utf-8")
        script.chmod(0o755)
    return manifest


def write_parts(path: Path, folder: Path, names: Sequence[str]) -> None:
    """Writes the beginnings of a file for single functions; see `weights.single_functions`."""
    folder.mkdir(exist_ok=True)
    for name, flatbuffer in single_functions(path, names):
        (folder / name).write_bytes(flatbuffer)


def timed_signatures(manifest: Manifest) -> tuple[str, ...]:
    """Returns the signatures that a kit's script times: `decode`, every pass, and its commit."""
    tokens, nodes = manifest.sizes("verify"), manifest.sizes("draft")
    partial = tuple(name for name in manifest.signatures if name.startswith(_PARTIAL))
    return (
        "decode",
        *(f"verify_{size}" for size in tokens),
        *(f"commit_{size}" for size in tokens),
        *(partial or ("absorb", *(f"draft_{size}" for size in nodes))),
    )


def kit_script(manifest: Manifest) -> str:
    """Writes the script for `adb`; called as `./measure.sh cpu 1 > kit.txt`."""
    facts = {"model": manifest.model, "quantization": manifest.quantization, **_shapes(manifest)}
    lines = [
        "#!/bin/sh",
        "# Times each signature of model.tflite on the phone that adb reaches.",
        "# Usage: ./measure.sh cpu|gpu [threads] > kit.txt",
        "#        jaxspec tune profile --import kit.txt --out profile.json",
        "# BENCHMARK names LiteRT's own benchmark_model for Android (litert/tools there),",
        "# a version that knows --input_layer_value_range, as integers at random are no places.",
        "set -eu",
        'here=$(cd "$(dirname "$0")" && pwd)',
        "backend=${1:-cpu} threads=${2:-1}",
        "case $backend in cpu|gpu) ;; *)",
        '  echo "measure.sh: backend must be cpu or gpu, got $backend." >&2; exit 2;; esac',
        'folder=/data/local/tmp/jaxspec tool="${BENCHMARK:-$here/benchmark_model}"',
        'adb shell mkdir -p "$folder"',
        f'adb push "$here/{MODEL_FILE}" "$here/{PARTS}" "$tool" "$folder" >&2',
        'adb shell chmod +x "$folder/$(basename "$tool")"',
        "use_gpu=false whole=",
        "# Without the CPU the tool fails where the GPU does not take the whole graph.",
        'if [ "$backend" = gpu ]; then',
        '  use_gpu=true whole="--use_cpu=false --require_full_delegation=true"',
        "fi",
        "device=$(adb shell getprop ro.product.model)",
        f"printf '{_HEADER}%s\\n' {shlex.quote(json.dumps(facts))}",
        'printf "jaxspec device: %s, %s, %s threads\\n" "$device" "$backend" "$threads"',
    ]
    for name in timed_signatures(manifest):
        ranges = ":".join(
            f"{entry},{value},{value}" for entry, value in valid_integers(manifest, name).items()
        )
        lines += [
            f"echo '{_SECTION}{name}'",
            "# The tool packs weights for every function of a file; now it has this one.",
            f'adb shell dd "if=$folder/{PARTS}/{name}" "of=$folder/{MODEL_FILE}" conv=notrunc >&2',
            'adb shell "$folder/$(basename "$tool")" "--graph=$folder/model.tflite" \\',
            f"  --signature_to_run_for={name} --input_layer_value_range={ranges} \\",
            '  "--num_threads=$threads" "--use_gpu=$use_gpu" $whole \\',
            "  --num_runs=50 --warmup_runs=5 2>&1",
        ]
    lines.append(f'adb shell rm -r "$folder/{MODEL_FILE}" "$folder/{PARTS}"')
    return "\n".join([*lines, ""])


def _shapes(manifest: Manifest) -> dict[str, int]:
    """Returns what a profile must know of a kit's functions: `levels`, or `layers` and `drafted`.

    `levels` are those of the tree of a head; `layers` are those of the model, and `drafted` is the
    number of tokens that each function with layers left out drafts.
    """
    partial = manifest.signatures.get(f"{_PARTIAL}whole")
    if partial is None:
        return {"levels": manifest.depth}
    layers = sum(name.startswith("kv_k_") for name in partial["inputs"])
    return {"layers": layers, "drafted": partial["outputs"]["drafted"]["shape"][1] - 1}


def valid_integers(manifest: Manifest, signature: str) -> dict[str, int]:
    """Returns a valid number for every integer input of a signature."""
    inputs = manifest.signatures[signature]["inputs"]
    integers = [name for name, entry in inputs.items() if entry["dtype"] == "int32"]
    middle = {"length": manifest.capacity // 2, "count": 1}
    return {name: middle.get(name, 0) for name in integers}


@checks_arguments
def read_kit_log(path: str | Path) -> LatencyProfile:
    """Reads the output of a kit's script.

    Raises:
        ValueError: it is something else or too large, or a signature's times are missing.
        OSError: it cannot be opened.
    """
    text = read_bytes(Path(path), _MOST_LOG).decode(errors="replace")
    lines = text.splitlines()
    header = next((line for line in lines if line.startswith(_HEADER)), None)
    if header is None:
        raise ValueError(
            f"{path} has no line {_HEADER!r}: give the whole output of a kit's {SCRIPT_FILE}."
        )
    try:
        facts = checked("the JSON", parse_json(header.removeprefix(_HEADER)), Mapping[str, Any])
        model, quantization = (checked(n, facts[n], str) for n in ("model", "quantization"))
        named = ("layers", "drafted") if "layers" in facts else ("levels",)
        shapes = {name: checked(name, facts[name], Nodes) for name in named}
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path}: its first line is damaged ({error}); measure again.") from None
    device = next((line for line in lines if line.startswith("jaxspec device: ")), "unknown")
    sections = re.split(rf"^{_SECTION}", text, flags=re.MULTILINE)[1:]
    seconds: dict[str, tuple[float, float | None]] = {}
    for section in sections:
        name, _, log = section.partition("\n")
        timed = seconds_in(log)
        if timed is None:
            raise ValueError(
                f"{path}: no 'Inference (avg)' with its unit for {name.strip()!s:.80}: the tool "
                f"failed there, saying {log.strip()[-300:]!r}"
            )
        seconds[name.strip()] = timed
    if not seconds:
        raise ValueError(f"{path} has no line {_SECTION!r}: nothing was timed.")
    return _profile(
        seconds,
        str(path),
        shapes,
        name=f"{model} on {device.removeprefix('jaxspec device: ')}",
        model=model,
        device=device.removeprefix("jaxspec device: "),
        runtime="LiteRT",
        quantization=quantization,
        source="LiteRT's benchmark_model on the device: means of 50 runs of each signature",
    )


@checks_arguments
def read_web_profile(path: str | Path) -> LatencyProfile:
    """Reads the file that a page of `jaxspec export web` measured with its kit.

    Raises:
        ValueError: it is something else, or a function's times are missing.
    """
    entry = read_json(Path(path))
    if entry.get(WEB_KEY) != 1:
        raise ValueError(
            f"{path} is of another version of jaxspec: export the page anew, and measure again."
        )
    try:
        seconds = checked(
            "seconds", entry["seconds"], Mapping[str, tuple[NotNegative, NotNegative]]
        )
        texts = ("model", "device", "runtime", "quantization")
        model, device, runtime, quantization = (checked(n, entry[n], str) for n in texts)
        levels = checked("levels", entry["levels"], Nodes)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}): download it from the page again.") from None
    return _profile(
        seconds,
        str(path),
        {"levels": levels},
        name=f"{model} on {runtime}",
        model=model,
        device=device,
        runtime=runtime,
        quantization=quantization,
        source="a page of `jaxspec export web` on the device: medians of each function, in turns",
    )


def seconds_in(log: str) -> tuple[float, float | None] | None:
    """Finds mean and spread of the runs in a tool's output; `None` if there are none."""
    for mean, spread, unit in _LOGS:
        if found := re.search(mean, log):
            spreads = re.findall(spread, log)
            return float(found.group(1)) * unit, float(spreads[-1]) * unit if spreads else None
    return None


@checks_arguments
def measure_here(
    path: str | Path,
    num_threads: Count = 1,
    repeats: Count = 15,
    advance: Callable[[str], None] = lambda _: None,
) -> LatencyProfile:
    """Times a kit's file on this machine's CPU, its signatures in turns.

    Args:
        path: the kit's `.tflite`.
        num_threads: of the CPU.
        repeats: runs of each signature.
        advance: called once before.

    Raises:
        ValueError: the file is not a kit, or a number is below 1.
    """
    manifest = read_manifest(path)
    model = MobileModel(path, num_threads=num_threads)
    advance("timing signatures")
    runs = time_signatures(model, timed_signatures(manifest), repeats)
    seconds = {name: (float(np.median(times)), _spread(times)) for name, times in runs.items()}
    machine = this_machine()
    return _profile(
        seconds,
        str(path),
        _shapes(manifest),
        name=f"{manifest.model} ({manifest.quantization}) on {machine.device}",
        model=manifest.model,
        device=str(machine),
        runtime=f"LiteRT, CPU, {num_threads} threads",
        quantization=manifest.quantization,
        source=f"medians of {repeats} runs of each signature, in turns"
        + ("; THE MACHINE WAS BUSY" if machine.busy else ""),
    )


def time_signatures(
    model: MobileModel, signatures: Sequence[str], repeats: int
) -> dict[str, Float[np.ndarray, " repeats"]]:
    """Times runs of signatures, in turns, behind half a context of zeros; in seconds."""
    return time_in_turns({name: signature_program(model, name) for name in signatures}, repeats)


def signature_program(model: MobileModel, signature: str) -> Callable[[], None]:
    """Returns a function that calls a signature once, behind half a context of zeros."""
    inputs: dict[str, Any] = {}
    for name, value in valid_integers(model.manifest, signature).items():
        inputs[name] = np.full(model.inputs(signature)[name]["shape"], value, np.int32)
    return partial(model.call, signature, **inputs)


def _spread(runs: Float[np.ndarray, " repeats"]) -> float:
    low, high = np.quantile(runs, [0.25, 0.75])
    return float(high - low) / 2


def _profile(
    seconds: Mapping[str, tuple[float, float | None]],
    where: str,
    shapes: Mapping[str, int],
    **facts: Any,
) -> LatencyProfile:
    """Makes a profile from mean and spread of each signature, and from `_shapes` of the kit.

    A target time is that of a pass and its commit; acceptance on the host is left out. The time of
    one token is that of `decode`, which takes less than a pass over one token and a commit. Shapes
    in files are fixed: a kit's first draft pass reads one token more than its tree has levels, and
    its time also stands for trees with fewer levels.
    """

    def timing(size: int, name: str, and_also: float = 0.0) -> Timing:
        mean, spread = seconds[name]
        try:
            return Timing(size, mean + and_also, spread)
        except ValueError as error:
            raise ValueError(f"{where}: {name}: {error}") from None

    def timings(kind: str, also: str | None = None) -> tuple[Timing, ...]:
        found = []
        for name in seconds:
            size = name.removeprefix(f"{kind}_")
            if size == name or not re.fullmatch("[0-9]{1,9}", size):
                continue
            if also is not None and f"{also}_{size}" not in seconds:
                raise ValueError(f"{where}: {name} was timed, but not {also}_{size}.")
            found.append(timing(int(size), name, seconds[f"{also}_{size}"][0] if also else 0.0))
        if not found:
            raise ValueError(f"{where}: no {kind}_N was timed; make it by `jaxspec export kit`.")
        return tuple(found)

    partial_names = {field: f"{_PARTIAL}{field}" for field in partial_sets(1)}
    for name in ("decode", *(partial_names.values() if "layers" in shapes else ("absorb",))):
        if name not in seconds:
            raise ValueError(f"{where}: {name} was not timed; make it by `jaxspec export kit`.")
    wider = [timing for timing in timings("verify", "commit") if timing.size > 1]
    passes: dict[str, Any] = {"target": (timing(1, "decode"), *wider)}
    if "layers" not in shapes:
        firsts = sorted({1, shapes["levels"]})
        passes["draft"] = timings("draft")
        passes["first_draft"] = tuple(timing(size, "absorb") for size in firsts)
    try:
        if "layers" in shapes:
            each = {f: seconds[name][0] / shapes["drafted"] for f, name in partial_names.items()}
            passes |= {"draft": (), "partial": PartialPasses(shapes["layers"], **each)}
        return LatencyProfile(**passes, dtype="float32", **facts)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
