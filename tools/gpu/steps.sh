# Sourced by two_gpus.sh and more_gpus.sh in the repository's root: what their steps share.
# NVLink multicast stays off; a step that hangs costs its own time limit, and the next one runs.
# BUDGET, in seconds, is for all steps of a call together: those that have no time left are skipped.
set -u
source tools/gpu/activate.sh || exit 1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 PYTHONUNBUFFERED=1
SCRATCH=$(mktemp -d)
FIGURES=$MINISGL_GPU_SITE/figures  # the JSON of each benchmark, also those of calls before
RESULTS=${OUT:-$SCRATCH}  # the log, and figures.tar.gz
LOG=$RESULTS/steps.log
SHOWN=${SHOWN:-25}  # lines of each step; LOG holds all of them
BUDGET=${BUDGET:-600}
mkdir -p "$FIGURES"

# step NAME SECONDS COMMAND: run the command line, and show how it ended
step() {
    local name=$1 limit=$2 started=$SECONDS code=0 left=$((BUDGET - SECONDS))
    shift 2
    if [ "$left" -lt 10 ]; then
        echo "===== $name: no time is left" | tee -a "$LOG"
        return
    fi
    [ "$left" -lt "$limit" ] && limit=$left
    timeout -k 5 "$limit" bash -c "$*" > "$SCRATCH/$name.out" 2>&1 < /dev/null || code=$?
    local ended="===== $name: exit $code after $((SECONDS - started)) s of at most $limit"
    { echo "$ended"; cat "$SCRATCH/$name.out"; } >> "$LOG"
    echo "$ended"
    tail -n "$SHOWN" "$SCRATCH/$name.out" | cut -c1-240
}

# measure NAME SECONDS COMMAND: a step that leaves NAME.json
measure() {
    rm -f "$FIGURES/$1.json"
    step "$1" "$2" "$3 --json $FIGURES/$1.json"
    tar -C "$FIGURES" -czf "$RESULTS/figures.tar.gz" . 2>/dev/null
}

# tests NAME SECONDS ARGUMENTS: a step of tests, which another one may run beside
tests_of() {
    step "$1" "$2" "python3 -m pytest -c tools/gpu/pytest.ini --rootdir . -p no:cacheprovider -m gpu \
        -v --tb=short --durations=5 $3 | grep -v 'DESELECTED\|^tests.*PASSED'; exit \${PIPESTATUS[0]}"
}

# dummy SHAPE [FORMAT]: the options of a model of random weights
dummy() {
    local folder=$SCRATCH/$1${2:+-$2}
    [ -e "$folder" ] || python3 -m minisgl_bench.dummy_model ${2:+--weights "$2"} "$1" "$folder" > "$SCRATCH/dummy.out"
    echo "--model $folder --load-format dummy --max-sequence-length 4096"
}

# beside ONE MANY...: figures of several GPUs over those of one, by the names of their files
beside() {
    python3 - "$FIGURES" "$@" <<'PYTHON' | tee -a "$LOG"
import json
import pathlib
import sys

folder, *names = sys.argv[1:]
first = None
for name in names:
    path = pathlib.Path(folder, f"{name}.json")
    if not path.exists():
        print(f"{name:28} no figures")
        continue
    row = json.loads(path.read_text())["rows"][0]
    first = first or row
    told = f"{row['tokens_per_s']:9.0f} tok/s  {row['tokens_per_s'] / first['tokens_per_s']:6.3f} of the first"
    if "cached_share" in row:
        told += f"  cached {row['cached_share']:.4f}"
    print(f"{name:28} {told}  first token p50 {row['ttft_p50_ms']:.0f} ms")
PYTHON
}

SIZES="--batch-size 1 --batch-size 64 --batch-size 256 --cuda-graph-batch-sizes 1,64,256"
ONE_SIZE="--batch-size 64 --cuda-graph-batch-sizes 64"
MINISGL="python3 -m minisgl_backend.cli"
DECODE="$MINISGL bench decode"
LENGTHS="--input-length 100 1024 --output-length 100 1024 --temperature 0.6"
OFFLINE="$MINISGL bench offline --requests 256 $LENGTHS"
RANKS=tests/gpu/test_ranks.py

# alone: figures of one engine, with as many requests as each replica gets, but for `strong`, which
# has those of all. With four GPUs all run at once.
alone() {
    local number=$1 small large offline="$MINISGL bench offline $LENGTHS"
    small=$(dummy qwen3-0.6b) large=$(dummy qwen3-14b)
    {
        CUDA_VISIBLE_DEVICES=0 measure one-0.6b 80 "$offline $small --requests 256"
        CUDA_VISIBLE_DEVICES=0 measure prefixes-one 50 "$MINISGL bench prefixes $small"
    } &
    CUDA_VISIBLE_DEVICES=1 measure one-14b 100 "$offline $large --requests 128" &
    [ "$number" -ge 4 ] || wait
    {
        CUDA_VISIBLE_DEVICES=$((number - 1)) measure strong-0.6b 70 \
            "$offline $small --requests $((256 * number))"
    } &
    if [ "$number" -ge 4 ]; then
        CUDA_VISIBLE_DEVICES=2 measure offline-one-14b 100 "$OFFLINE $large" &
    fi
    wait
}

# replicas NUMBER: throughput and prefix hits of so many replicas beside those of one engine, after
# `alone` on the same machine
replicas() {
    local number=$1 small large
    local all="--data-parallel-size $number" offline="$MINISGL bench offline $LENGTHS"
    small=$(dummy qwen3-0.6b) large=$(dummy qwen3-14b)
    measure replicas-0.6b 60 "$offline $small --requests $((256 * number)) $all"
    measure replicas-prefixes 60 "$MINISGL bench prefixes $small $all"
    measure replicas-14b 90 "$offline $large --requests $((128 * number)) $all"
    beside one-0.6b replicas-0.6b
    beside strong-0.6b replicas-0.6b
    beside one-14b replicas-14b
    beside prefixes-one replicas-prefixes
}

# server NUMBER: the same through tritonserver, after `alone` and `replicas` on the same machine
server() {
    local number=$1 small large
    local python=${MINISGL_SERVER_PYTHON:?needs .gpu/server.tar.xz}
    local share="$python -m minisgl_backend.cli bench server-share $LENGTHS"
    local all="--data-parallel-size $number --clients 16"
    small=$(dummy qwen3-0.6b) large=$(dummy qwen3-14b)
    of() { [ ! -e "$FIGURES/$1.json" ] || echo "--alone $FIGURES/$1.json"; }
    CUDA_VISIBLE_DEVICES=0 measure server-one-0.6b 90 "$share $small --requests 256 $(of one-0.6b)" &
    CUDA_VISIBLE_DEVICES=1 measure server-one-14b 120 \
        "$share $large --requests 128 $(of one-14b)" &
    wait
    measure server-replicas-0.6b 80 \
        "$share $small --requests $((256 * number)) $all $(of replicas-0.6b)"
    beside server-one-0.6b server-replicas-0.6b
    measure server-replicas-14b 90 \
        "$share $large --requests $((128 * number)) $all $(of replicas-14b)"
    beside server-one-14b server-replicas-14b
    step check-replicas 100 "$python -m minisgl_backend.cli check --fault F28 --requests 600"
}
