#!/usr/bin/env bash
# What two GPUs of one host show. In the repository's root, on the GPU machine, with .gpu/ packed by
# `python -m tools.gpu kernels`:
#     tools/gpu/two_gpus.sh [tests] [speed] [lost]
# tests: of groups and of tokens, five minutes; speed: decode steps and throughput on one and two
# GPUs, five minutes; lost: what becomes of an engine that loses a rank, four minutes.
source tools/gpu/ranks.sh

tests() {
    step tests-experts 60 "$RANKS -k experts_of_a_rank"
    step tests-nccl 200 "$RANKS -k '(nccl or one_by_one or demo_model) and not pynccl and not lost'"
    step tests-pynccl 100 "$RANKS -k 'pynccl and not lost'"
    step tests-flashinfer 100 "$RANKS -k 'flashinfer and not lost'"
}

speed() {
    for comm in nccl pynccl flashinfer; do
        measure decode-2-$comm 75 "$DECODE $SIZES $DENSE --tensor-parallel-size 2 --comm $comm"
    done
    CUDA_VISIBLE_DEVICES=0 measure decode-1 75 "$DECODE $SIZES $DENSE" &
    CUDA_VISIBLE_DEVICES=1 measure experts-1-fused 75 "$DECODE $ONE_SIZE $EXPERTS" &
    wait
    CUDA_VISIBLE_DEVICES=0 measure offline-1 100 "$OFFLINE $DENSE" &
    CUDA_VISIBLE_DEVICES=1 measure experts-1-torch 100 "$DECODE --batch-size 64 --steps 10 $EXPERTS \
        --moe-backend torch --cuda-graph-max-batch-size 0" &
    wait
    measure experts-2-fused 75 "$DECODE $ONE_SIZE $EXPERTS --tensor-parallel-size 2"
    measure offline-2-nccl 75 "$OFFLINE $DENSE --tensor-parallel-size 2"
    measure offline-2-flashinfer 75 "$OFFLINE $DENSE --tensor-parallel-size 2 --comm flashinfer"
}

lost() {
    for how in stopped killed; do
        for comm in nccl pynccl flashinfer; do
            step "lost-$comm-$how" 80 "$RANKS -k 'lost and [$comm-$how]'"
        done
    done
}

for part in ${*:-tests speed lost}; do $part; done
