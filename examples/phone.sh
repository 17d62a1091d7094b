#!/bin/sh
# Finds the fastest tree for the phone that adb reaches, and times whole steps with it there:
# exports a kit, measures it on the phone, searches a tree and prints what its passes predict, exports two
# files, times both and prints that.
#
# Usage: BENCHMARK=path/to/benchmark_model ./phone.sh MODEL HEAD HELD-OUT.jsonl OUT [cpu|gpu] [threads]
# BENCHMARK is LiteRT's tool for Android. QUANTIZE (int4) and CAPACITY (1024) may be set, too.
# HOST and LITERT, if set, name examples/cpp compiled by the NDK and libLiteRt.so of LiteRT's AAR: then the
# phone's CPU also answers a question.
set -eu
if [ $# -lt 4 ]; then
  sed -n 's/^# \{0,1\}//; 2,9p' "$0" >&2
  exit 2
fi
model=$1 head=$2 prompts=$3 out=$4 backend=${5:-cpu} threads=${6:-1}
case $backend in cpu|gpu) ;; *) echo "phone.sh: backend must be cpu or gpu, got $backend." >&2; exit 2 ;; esac
quantize=${QUANTIZE:-int4} capacity=${CAPACITY:-1024}
: "${BENCHMARK:?must name the benchmark_model of LiteRT for Android}"
folder=/data/local/tmp/jaxspec
tool=$folder/$(basename "$BENCHMARK")
whole=
if [ "$backend" = gpu ]; then whole="--use_gpu=true --use_cpu=false --require_full_delegation=true"; fi
for program in adb jaxspec python; do
  command -v "$program" >/dev/null || { echo "phone.sh: $program is not on the PATH." >&2; exit 2; }
done
adb get-state >/dev/null 2>&1 || { echo "phone.sh: adb reaches no phone: plug it in, and allow USB debugging on it." >&2; exit 2; }
mkdir -p "$out"
trap 'adb shell rm -rf "$folder" || true' EXIT

check_room() { # files that are about to be pushed
  needed=$(du -k "$@" | awk '{ sum += $1 } END { print sum }')
  free=$(adb shell df -k /data/local/tmp | awk 'END { print $4 }')
  case $free in ''|*[!0-9]*) echo "phone.sh: the phone does not say how much room it has left." >&2; exit 1 ;; esac
  if [ "$free" -lt "$needed" ]; then
    echo "phone.sh: the phone has $free kB left, and $* need $needed kB." >&2
    exit 1
  fi
}

echo "1. export the kit" >&2
jaxspec export kit "$model" "$out/kit" --drafter "eagle:head=$head" --quantize "$quantize" --capacity "$capacity" >&2
echo "2. push it to the phone and time it" >&2
check_room "$out/kit/model.tflite" "$out/kit/parts" "$BENCHMARK"
BENCHMARK=$BENCHMARK "$out/kit/measure.sh" "$backend" "$threads" >"$out/kit.txt" || { tail -n 20 "$out/kit.txt" >&2; exit 1; }
echo "3. read the times" >&2
jaxspec tune profile --import "$out/kit.txt" --out "$out/phone.json" >&2
echo "4. search the tree" >&2
# A kit's profile is not of JAX, so no chain that ends early is searched: files draft whole trees.
jaxspec tune tree "$model" "$prompts" --drafter "eagle:head=$head" --profile "$out/phone.json" --out "$out/tuned" --table
echo "5. export EAGLE's tree and the one that was found" >&2
for name in eagle searched; do
  tree=eagle-25
  if [ "$name" = searched ]; then tree=$out/tuned/tree.json; fi
  jaxspec export tflite "$model" "$out/$name" --drafter "eagle:head=$head,tree=$tree" --bundle "$backend" --quantize "$quantize" --capacity "$capacity" >&2
done

echo "6. push both and time their functions" >&2
# Integers at random are no places in a text. Both files have inputs of the same names.
ranges=$(python - "$out" <<'PYTHON'
import sys
from pathlib import Path
from jaxspec.mobile.manifest import Manifest
from jaxspec.mobile.profile import valid_integers, write_parts
out, signatures = Path(sys.argv[1]), ("decode", "step")
for name in ("eagle", "searched"):
    write_parts(out / name / "model.tflite", out / name / "parts", signatures)
manifest = Manifest.from_json((out / "eagle" / "manifest.json").read_text())
for signature in signatures:
    integers = valid_integers(manifest, signature)
    print(signature, ":".join(f"{name},{value},{value}" for name, value in integers.items()))
PYTHON
)
for name in eagle searched; do
  check_room "$out/$name/model.tflite" "$out/$name/parts"
  adb push "$out/$name/model.tflite" "$folder/$name.tflite" >&2
  adb push "$out/$name/parts" "$folder" >&2
  if [ "$name" = searched ] && [ -n "${HOST:-}" ]; then
    echo "   answer a question on the phone's CPU" >&2
    adb push "$HOST" "${LITERT:?must name libLiteRt.so for the phone}" "$out/searched/tokenizer.json" "$folder" >&2
    adb shell "chmod +x $folder/$(basename "$HOST") && LD_LIBRARY_PATH=$folder $folder/$(basename "$HOST") $folder/searched.tflite --threads $threads 'Emma reads 20 pages a day. How many pages does she read in 5 days?'" >&2
  fi
  for signature in decode step; do
    # The tool packs weights for every function of a file; now it has this one.
    adb shell dd "if=$folder/parts/$signature" "of=$folder/$name.tflite" conv=notrunc >&2
    adb shell "$tool" "--graph=$folder/$name.tflite" "--signature_to_run_for=$signature" \
      "--input_layer_value_range=$(echo "$ranges" | sed -n "s/^$signature //p")" "--num_threads=$threads" $whole --num_runs=50 --warmup_runs=5 \
      >"$out/$name-$signature.txt" 2>&1 || { cat "$out/$name-$signature.txt" >&2; exit 1; }
  done
done

python - "$out" <<'PYTHON'
import sys
from pathlib import Path
from jaxspec.mobile.manifest import Manifest
from jaxspec.mobile.profile import seconds_in
from jaxspec.tuning import load_acceptance, load_profile

out = Path(sys.argv[1])
acceptance, device = load_acceptance(out / "tuned" / "acceptance.json"), load_profile(out / "phone.json")
rows = []
for name, method in (("searched", "plain"), ("eagle", "EAGLE's tree"), ("searched", "searched tree")):
    signature = "decode" if method == "plain" else "step"
    found = seconds_in((out / f"{name}-{signature}.txt").read_text(errors="replace"))
    if found is None:
        sys.exit(f"phone.sh: {name}-{signature}.txt has no time: the tool failed there.")
    manifest = Manifest.from_json((out / name / "manifest.json").read_text())
    paths = manifest.paths if signature == "step" else ()
    tau = acceptance.tau(paths) if paths else 1.0
    rows.append((method, len(paths), 1000 * found[0], tau, tau / found[0]))
print(f"{device.device}, {device.quantization}; nodes leave the root out; tau includes the bonus token")
print("tau was counted in JAX, with weights that are not quantized; tokens/s is tau / ms of a call.\n")
print("| method | nodes | ms a call | tau | tokens/s | x plain |\n|---|---|---|---|---|---|")
for method, nodes, milliseconds, tau, speed in rows:
    print(f"| {method} | {nodes} | {milliseconds:.2f} | {tau:.2f} | {speed:.2f} | {speed / rows[0][-1]:.2f} |")
PYTHON
