"""Times of passes on the device where a file will run, read into a `LatencyProfile`.

A kit is an exported file with target and draft passes of several sizes, each a separate signature,
and a script that times them on a phone with LiteRT's benchmark tool. The same file can be timed on
this machine. `jaxspec tune tree` reads the profile, `jaxspec export tflite --tree` the tree.
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
from jaxspec.checkpoint.files import read_json, replacing_files
from jaxspec.drafters import Eagle, LoadedDrafter
from jaxspec.measure.machine import this_machine
from jaxspec.measure.timing import time_in_turns
from jaxspec.mobile.contents import ExportConfig
from jaxspec.mobile.export import MODEL_FILE, export
from jaxspec.mobile.manifest import Manifest, read_manifest
from jaxspec.mobile.quantize import QUANTIZATIONS
from jaxspec.mobile.runtime import MobileModel
from jaxspec.tuning import LatencyProfile, Timing

TOKENS = (1, 2, 4, 6, 8, 16, 26, 32)
"""Sizes of target passes, the root included."""
NODES = (1, 2, 4)
"""Sizes of draft passes."""
SCRIPT_FILE = "measure.sh"
WEB_KEY = "jaxspec_web"
"""First entry of a file that a page measured."""
_HEADER, _SECTION = "jaxspec kit: ", "jaxspec signature: "
# Output of the tools of LiteRT and of TensorFlow Lite: mean, spread, and their unit in seconds.
_LOGS = (
    (r"Inference \(avg\): +([0-9.]+) ms", r"Inference \(std\): +([0-9.]+)", 1e-3),
    (r"Inference timings in us: .*Inference \(avg\): ([0-9.e+]+)", r"\bstd=([0-9.e+]+)", 1e-6),
)


def export_kit(
    model: Model, folder: str | Path, drafter: LoadedDrafter, config: ExportConfig
) -> Manifest:
    """Writes a file of passes to be timed, and the script that times it on a phone.

    Args:
        model: the target.
        folder: as for `export`.
        drafter: with an EAGLE head; the depth of its tree is the number of tokens that a step's
            first draft pass absorbs, less one.
        config: capacity, prefill and quantization of the file that will be used.

    Raises:
        ValueError: the drafter has no head, or as `export`.
    """
    if not isinstance(drafter.drafter, Eagle):
        raise ValueError("drafter: a kit times draft passes of an EAGLE head; give one.")
    fitting = tuple(size for size in TOKENS if size <= config.capacity // 2)
    weights = QUANTIZATIONS[config.quantization]
    fewest = "gpu" if weights is None or weights.on_gpu else "cpu"
    sizes = dataclasses.replace(config, bundle=fewest, verify=fitting, levels=NODES)
    manifest = export(model, folder, drafter, sizes)
    with replacing_files(Path(folder)) as staging:
        script = staging / SCRIPT_FILE
        script.write_text(kit_script(manifest), encoding="utf-8")
        script.chmod(0o755)
    return manifest


def timed_signatures(manifest: Manifest) -> tuple[str, ...]:
    """Returns the signatures that a kit's script times: `decode`, every pass, and its commit."""
    tokens, nodes = manifest.sizes("verify"), manifest.sizes("draft")
    return (
        "decode",
        *(f"verify_{size}" for size in tokens),
        *(f"commit_{size}" for size in tokens),
        "absorb",
        *(f"draft_{size}" for size in nodes),
    )


def kit_script(manifest: Manifest) -> str:
    """Writes the script for `adb`; called as `./measure.sh cpu 1 > kit.txt`."""
    facts = {
        "model": manifest.model,
        "quantization": manifest.quantization,
        "levels": manifest.depth,
    }
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
        'folder=/data/local/tmp/jaxspec tool="${BENCHMARK:-$here/benchmark_model}"',
        'adb shell mkdir -p "$folder"',
        f'adb push "$here/{MODEL_FILE}" "$tool" "$folder" >&2',
        'adb shell chmod +x "$folder/$(basename "$tool")"',
        "use_gpu=false",
        'if [ "$backend" = gpu ]; then use_gpu=true; fi',
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
            'adb shell "$folder/$(basename "$tool")" "--graph=$folder/model.tflite" \\',
            f"  --signature_to_run_for={name} --input_layer_value_range={ranges} \\",
            '  "--num_threads=$threads" "--use_gpu=$use_gpu" --num_runs=50 --warmup_runs=5 2>&1',
        ]
    return "\n".join([*lines, ""])


def valid_integers(manifest: Manifest, signature: str) -> dict[str, int]:
    """Returns a valid number for every integer input of a signature."""
    inputs = manifest.signatures[signature]["inputs"]
    integers = [name for name, entry in inputs.items() if entry["dtype"] == "int32"]
    middle = {"length": manifest.capacity // 2, "count": 1}
    return {name: middle.get(name, 0) for name in integers}


def read_kit_log(path: str | Path) -> LatencyProfile:
    """Reads the output of a kit's script.

    Raises:
        ValueError: it is something else, or a signature's times are missing.
    """
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    header = next((line for line in lines if line.startswith(_HEADER)), None)
    if header is None:
        raise ValueError(
            f"{path} has no line {_HEADER!r}: give the whole output of a kit's {SCRIPT_FILE}."
        )
    try:
        facts = json.loads(header.removeprefix(_HEADER))
        model, quantization, levels = (facts[name] for name in ("model", "quantization", "levels"))
    except (json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"{path}: its first line is damaged ({error}); measure again.") from None
    device = next((line for line in lines if line.startswith("jaxspec device: ")), "unknown")
    sections = re.split(rf"^{_SECTION}", text, flags=re.MULTILINE)[1:]
    seconds: dict[str, tuple[float, float | None]] = {}
    for section in sections:
        name, _, log = section.partition("\n")
        timed = _seconds_in(log)
        if timed is None:
            raise ValueError(
                f"{path}: no 'Inference (avg)' with its unit for {name.strip()}: the tool failed "
                f"there, saying {log.strip()[-300:]!r}"
            )
        seconds[name.strip()] = timed
    if not seconds:
        raise ValueError(f"{path} has no line {_SECTION!r}: nothing was timed.")
    return _profile(
        seconds,
        str(path),
        int(levels),
        name=f"{model} on {device.removeprefix('jaxspec device: ')}",
        device=device.removeprefix("jaxspec device: "),
        runtime="LiteRT",
        quantization=str(quantization),
        source="LiteRT's benchmark_model on the device: means of 50 runs of each signature",
    )


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
        seconds = {
            str(name): (float(median), float(spread))
            for name, (median, spread) in entry["seconds"].items()
        }
        model, device, levels = str(entry["model"]), str(entry["device"]), int(entry["levels"])
        runtime, quantization = str(entry["runtime"]), str(entry["quantization"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged ({error!r}): download it from the page again."
        ) from None
    return _profile(
        seconds,
        str(path),
        levels,
        name=f"{model} on {runtime}",
        device=device,
        runtime=runtime,
        quantization=quantization,
        source="a page of `jaxspec export web` on the device: medians of each function, in turns",
    )


def _seconds_in(log: str) -> tuple[float, float | None] | None:
    """Finds mean and spread of the runs in a tool's output; `None` if there are none."""
    for mean, spread, unit in _LOGS:
        if found := re.search(mean, log):
            spreads = re.findall(spread, log)
            return float(found.group(1)) * unit, float(spreads[-1]) * unit if spreads else None
    return None


def measure_here(
    path: str | Path,
    num_threads: int = 1,
    repeats: int = 15,
    advance: Callable[[str], None] = lambda _: None,
) -> LatencyProfile:
    """Times a kit's file on this machine's CPU, its signatures in turns.

    Args:
        path: the kit's `.tflite`.
        num_threads: of the CPU.
        repeats: runs of each signature.
        advance: called once before.

    Raises:
        ValueError: the file is not a kit.
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
        manifest.depth,
        name=f"{manifest.model} ({manifest.quantization}) on {machine.device}",
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
    seconds: Mapping[str, tuple[float, float | None]], where: str, levels: int, **facts: Any
) -> LatencyProfile:
    """Makes a profile from mean and spread of each signature.

    A target time is that of a pass and its commit; acceptance on the host is left out. The time of
    one token is that of `decode`, which takes less than a pass over one token and a commit. Shapes
    in files are fixed: a kit's first draft pass reads one token more than its tree has levels, and
    its time also stands for trees with fewer levels.
    """

    def timings(kind: str, also: str | None = None) -> tuple[Timing, ...]:
        found = []
        for name, (mean, spread) in seconds.items():
            base, _, size = name.rpartition("_")
            if base != kind:
                continue
            if also is not None:
                if f"{also}_{size}" not in seconds:
                    raise ValueError(f"{where}: {name} was timed, but not {also}_{size}.")
                mean += seconds[f"{also}_{size}"][0]
            found.append(Timing(int(size), mean, spread))
        if not found:
            raise ValueError(f"{where}: no {kind}_N was timed; make it by `jaxspec export kit`.")
        return tuple(found)

    for name in ("decode", "absorb"):
        if name not in seconds:
            raise ValueError(f"{where}: {name} was not timed; make it by `jaxspec export kit`.")
    wider = [timing for timing in timings("verify", "commit") if timing.size > 1]
    return LatencyProfile(
        target=(Timing(1, *seconds["decode"]), *wider),
        draft=timings("draft"),
        first_draft=tuple(Timing(size, *seconds["absorb"]) for size in sorted({1, levels})),
        dtype="float32",
        **facts,
    )
