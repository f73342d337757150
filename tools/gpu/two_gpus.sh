#!/usr/bin/env bash
# What two GPUs of one host show. In the repository's root, on the GPU machine, with .gpu/ packed by
# `python -m tools.gpu kernels`:
#     tools/gpu/two_gpus.sh [PART ...]
# tests: of groups, tokens, nodes and replicas; speed: decode steps and throughput on one and two
# GPUs; lost: what becomes of an engine that loses a rank; alone, then replicas: throughput and prefix
# hits of one engine and of two. They take two to five minutes each. server: the same through tritonserver, for which
# .gpu/server.tar.xz is brought in a second call, since both archives are too much for one.
source tools/gpu/steps.sh

tests() {
    tests_of tests-nccl 150 "$RANKS -k 'nccl and not pynccl and not lost'" &
    tests_of tests-engines 150 "$RANKS -k 'one_by_one or demo_model or experts_of_a_rank'" &
    tests_of tests-nodes 150 "$RANKS tests/gpu/test_replicas.py -k 'two_nodes or replica'" &
    wait
}

libraries() {
    tests_of tests-pynccl 100 "$RANKS -k 'pynccl and not lost'"
    tests_of tests-cuda 100 "$RANKS -k 'cuda and not lost'"
}

speed() {
    local dense experts
    dense=$(dummy qwen3-14b) experts=$(dummy qwen3-30b-a3b)
    for comm in nccl pynccl cuda; do
        measure decode-2-$comm 75 "$DECODE $SIZES $dense --tensor-parallel-size 2 --comm $comm"
    done
    CUDA_VISIBLE_DEVICES=0 measure decode-1 75 "$DECODE $SIZES $dense" &
    CUDA_VISIBLE_DEVICES=1 measure experts-1-fused 75 "$DECODE $ONE_SIZE $experts" &
    wait
    CUDA_VISIBLE_DEVICES=0 measure offline-1 100 "$OFFLINE $dense" &
    CUDA_VISIBLE_DEVICES=1 measure experts-1-torch 100 "$DECODE --batch-size 64 --steps 10 $experts \
        --moe-backend torch --cuda-graph-max-batch-size 0" &
    wait
    measure experts-2-fused 75 "$DECODE $ONE_SIZE $experts --tensor-parallel-size 2"
    measure offline-2-nccl 75 "$OFFLINE $dense --tensor-parallel-size 2"
    measure offline-2-cuda 75 "$OFFLINE $dense --tensor-parallel-size 2 --comm cuda"
}

lost() {
    for how in stopped killed; do
        for comm in nccl pynccl cuda; do
            tests_of "lost-$comm-$how" 80 "$RANKS -k 'lost and 2-$comm-$how'"
        done
    done
}

for part in ${*:-tests libraries speed lost alone replicas}; do
    case $part in
        alone | replicas | server) "$part" 2 ;;
        *) "$part" ;;
    esac
done
