#!/usr/bin/env bash
# What four GPUs of one host show: decode steps and throughput of four ranks. See two_gpus.sh.
source tools/gpu/ranks.sh

for comm in nccl pynccl flashinfer; do
    measure decode-4-$comm 75 "$DECODE $SIZES $DENSE --tensor-parallel-size 4 --comm $comm"
done
measure offline-4-nccl 75 "$OFFLINE $DENSE --tensor-parallel-size 4"
measure offline-4-flashinfer 75 "$OFFLINE $DENSE --tensor-parallel-size 4 --comm flashinfer"
