# Sourced by two_gpus.sh and four_gpus.sh in the repository's root: what their steps share.
# NVLink multicast stays off; a step that hangs costs its own time limit, and the next one runs.
set -u
source tools/gpu/activate.sh || exit 1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 PYTHONUNBUFFERED=1
SCRATCH=$(mktemp -d)
RESULTS=${OUT:-$SCRATCH}  # the log, and the JSON of each benchmark
LOG=$RESULTS/ranks.log
SHOWN=${SHOWN:-25}  # lines of each step; LOG holds all of them

# step NAME SECONDS COMMAND: run the command line, and show how it ended
step() {
    local name=$1 limit=$2 started=$SECONDS code=0
    shift 2
    timeout -k 5 "$limit" bash -c "$*" > "$SCRATCH/$name.out" 2>&1 < /dev/null || code=$?
    {
        echo "===== $name: exit $code after $((SECONDS - started)) s of at most $limit"
        cat "$SCRATCH/$name.out"
    } >> "$LOG"
    echo "===== $name: exit $code after $((SECONDS - started)) s of at most $limit"
    tail -n "$SHOWN" "$SCRATCH/$name.out"
}

# measure NAME SECONDS COMMAND: a step that leaves NAME.json
measure() {
    step "$1" "$2" "$3 --json $RESULTS/$1.json"
}

# A kernel that was built elsewhere saves a minute of compiling: .gpu/trtllm_comm.so.xz
BUILT=$MINISGL_GPU_SITE/kernels/flashinfer/data/aot/trtllm_comm
if [ -e .gpu/trtllm_comm.so.xz ] && [ ! -e "$BUILT/trtllm_comm.so" ]; then
    mkdir -p "$BUILT" && xz -dc .gpu/trtllm_comm.so.xz > "$BUILT/trtllm_comm.so"
fi

python3 -m minisgl_bench.dummy_model qwen3-14b "$SCRATCH/14b"
python3 -m minisgl_bench.dummy_model qwen3-30b-a3b "$SCRATCH/30b"
DENSE="--model $SCRATCH/14b --load-format dummy --max-sequence-length 4096"
EXPERTS="--model $SCRATCH/30b --load-format dummy --max-sequence-length 4096"
SIZES="--batch-size 1 --batch-size 64 --batch-size 256 --cuda-graph-batch-sizes 1,64,256"
ONE_SIZE="--batch-size 64 --cuda-graph-batch-sizes 64"
MINISGL="python3 -m minisgl_backend.cli"
DECODE="$MINISGL bench decode"
OFFLINE="$MINISGL bench offline --requests 256 --input-length 100 1024 --output-length 100 1024 \
    --temperature 0.6"
RANKS="python3 -m pytest -c tools/gpu/pytest.ini --rootdir . -m gpu -q tests/gpu/test_ranks.py"
