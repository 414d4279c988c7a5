#!/bin/bash
#SBATCH --job-name=first
#SBATCH --gres=gpu:1
#SBATCH --open-mode=append
#POLLUX min-gpus=1 max-gpus=2
echo "attempt ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST, gateway: ${POLLUX_GATEWAY:-none}"
sleep 600
