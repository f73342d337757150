#!/usr/bin/env bash
# What four or eight GPUs of one host show. In the repository's root, on the GPU machine, with .gpu/
# packed by `python -m tools.gpu kernels`:
#     tools/gpu/more_gpus.sh 4|8 [PART ...]
# alone: throughput and prefix hits of one engine; replicas: the same of one engine on each GPU;
# dense: decode steps and throughput of the 14B and 32B shapes, the layers split over all GPUs; nccl:
# decode steps of 14B with NCCL's sums;
# experts: the same of 30B-A3B, experts sliced and whole, and with eight GPUs of 235B-A22B in FP8;
# lost: a lost rank and a lost replica. They take two to five minutes each. server: replicas through
# tritonserver, for which .gpu/server.tar.xz is brought in a second call, since both archives are too
# much for one.
source tools/gpu/steps.sh
NUMBER=${1:?4 or 8}
shift
SPLIT="--tensor-parallel-size $NUMBER"

dense() {
    local model
    for shape in qwen3-14b qwen3-32b; do
        model=$(dummy $shape)
        measure decode-$shape 75 "$DECODE $SIZES $model $SPLIT"
        measure offline-$shape 75 "$OFFLINE $model $SPLIT"
    done
}

nccl() {
    measure decode-qwen3-14b-nccl 75 "$DECODE $SIZES $(dummy qwen3-14b) $SPLIT --comm nccl"
}

experts() {
    local shape=qwen3-30b-a3b model
    model="$(dummy $shape) $SPLIT"
    for format in bf16 fp8; do
        for cut in sliced whole; do
            local options="$model"
            [ $format = fp8 ] && options+=" --quantization fp8"
            [ $cut = whole ] && options+=" --expert-parallel true"
            measure decode-$shape-$format-$cut 75 "$DECODE $SIZES $options"
            measure offline-$shape-$format-$cut 75 "$OFFLINE $options"
        done
    done
    [ "$NUMBER" -ge 8 ] || return 0
    model="$(dummy qwen3-235b-a22b fp8-blocks) $SPLIT --expert-parallel true"
    measure decode-235b 150 "$DECODE $SIZES $model"
    measure offline-235b 150 "$OFFLINE $model"
}

lost() {
    tests_of tokens 100 "$RANKS -k 'demo_model and $NUMBER'" &
    tests_of lost-replica 100 "tests/gpu/test_replicas.py" &
    wait
    for how in stopped killed; do
        tests_of "lost-$how" 80 "$RANKS -k 'lost and $NUMBER-nccl-$how'"
    done
}

for part in ${*:-alone replicas dense nccl experts lost}; do
    case $part in
        alone | replicas | server) "$part" "$NUMBER" ;;
        *) "$part" ;;
    esac
done
