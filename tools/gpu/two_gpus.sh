#!/usr/bin/env bash
# What two GPUs of one host show. In the repository's root, on the GPU machine, with .gpu/ packed by
# `python -m tools.gpu kernels`:
#     tools/gpu/two_gpus.sh [tests] [speed] [lost]
# tests: of groups and of tokens, two minutes; speed: decode steps and throughput on one and two
# GPUs, five minutes; lost: what becomes of an engine that loses a rank, one minute.
source tools/gpu/ranks.sh

tests() {
    step tests 170 "$PYTEST --durations 5 tests/gpu/test_ranks.py -k 'not lost'"
}

speed() {
    for comm in nccl pynccl flashinfer; do
        step decode-2-$comm 75 "$DECODE $SIZES $DENSE --tensor-parallel-size 2 --comm $comm"
    done
    CUDA_VISIBLE_DEVICES=0 step decode-1 75 "$DECODE $SIZES $DENSE" &
    CUDA_VISIBLE_DEVICES=1 step experts-1-fused 75 "$DECODE $ONE_SIZE $EXPERTS" &
    wait
    CUDA_VISIBLE_DEVICES=0 step offline-1 100 "$OFFLINE $DENSE" &
    CUDA_VISIBLE_DEVICES=1 step experts-1-torch 100 "$DECODE --batch-size 64 --steps 10 $EXPERTS \
        --moe-backend torch --cuda-graph-max-batch-size 0" &
    wait
    step experts-2-fused 75 "$DECODE $ONE_SIZE $EXPERTS --tensor-parallel-size 2"
    step offline-2-nccl 75 "$OFFLINE $DENSE --tensor-parallel-size 2"
    step offline-2-flashinfer 75 "$OFFLINE $DENSE --tensor-parallel-size 2 --comm flashinfer"
}

lost() {
    step lost 150 "$PYTEST --durations 6 tests/gpu/test_ranks.py -k lost"
}

for part in ${*:-tests speed lost}; do $part; done
