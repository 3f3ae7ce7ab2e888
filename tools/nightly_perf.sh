#!/usr/bin/env bash
# Measures speed on a free GPU, keeps the record, and says what changed since the night before.
#
#   tools/nightly_perf.sh FOLDER [PYTEST OPTION]...
#
# FOLDER keeps a folder for each night, named by its time: record.json, versions.txt, pytest.txt,
# junit.xml, report.md, diff.md, summary.md (both), map.svg, map.png. Keep it outside the checkout.
#
# Exit status: 0 all is well; otherwise pytest's (1: a case failed), or 1 if a case changed since
# the last night, or 2 if no GPU is free. Without any GPU every case skips: 0, and nothing is kept
# to compare with.
#
# Variables: PYTHON, the interpreter (python); CUDA_VISIBLE_DEVICES, if the GPU is chosen already;
# GITHUB_STEP_SUMMARY and GITHUB_OUTPUT, if GitHub runs it.
set -euo pipefail

if [ $# -lt 1 ]; then
    sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2
    exit 2
fi
python=${PYTHON:-python}
mkdir -p "$1"
folder=$(cd "$1" && pwd)
shift
cd "$(dirname "$0")/.."

if [ -z "${CUDA_VISIBLE_DEVICES+set}" ]; then
    gpu=$("$python" -m fp8.testing.timing.free_gpu) || exit 2
    if [ -n "$gpu" ]; then
        export CUDA_VISIBLE_DEVICES=$gpu
    fi
fi

# Without a GPU every case skips: that is what --fp8-device cpu asks for.
device=cpu
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    device=cuda
fi

# The last night that measured something.
last=$(find "$folder" -mindepth 2 -maxdepth 2 -name record.json | sort | tail -n 1)
night=$folder/$(date -u +%Y-%m-%dT%H%M%SZ)
mkdir "$night"
if [ -n "${GITHUB_OUTPUT:-}" ]; then
    echo "night=$night" >> "$GITHUB_OUTPUT"
fi
"$python" -m pip list --format=freeze > "$night/versions.txt"

targets=(--fp8-target "reference[torch]")
if grep -q '^torchao==' "$night/versions.txt"; then
    targets+=(--fp8-target torchao)
fi
status=0
# No budget of minutes: what it leaves out would be missing beside the last night.
"$python" -m pytest tests/perf -m perf --fp8-device "$device" "${targets[@]}" \
    "--fp8-record=$night/record.json" "--junitxml=$night/junit.xml" "$@" 2>&1 | tee "$night/pytest.txt" || status=$?

{
    echo "Night of $(basename "$night"), pytest: $(tail -n 1 "$night/pytest.txt" | tr -d '=')"
    echo
} > "$night/summary.md"

# It fails if the record holds no speeds.
if "$python" -m fp8 report "$night/record.json" --markdown "$night/report.md"; then
    cat "$night/report.md" >> "$night/summary.md"
    if [ -n "$last" ]; then
        changed=0
        "$python" -m fp8 diff "$last" "$night/record.json" --markdown "$night/diff.md" || changed=$?
        { echo; cat "$night/diff.md"; } >> "$night/summary.md"
        if [ "$status" -eq 0 ]; then
            status=$changed
        fi
    fi
    "$python" -m fp8 map "$night/record.json" --out "$night/map.svg" --out "$night/map.png" ||
        echo "no map: see above"
else
    echo "Nothing was measured." >> "$night/summary.md"
    rm -f "$night/record.json"
fi

if [ -n "${GITHUB_STEP_SUMMARY:-}" ]; then
    cat "$night/summary.md" >> "$GITHUB_STEP_SUMMARY"
fi
exit "$status"
