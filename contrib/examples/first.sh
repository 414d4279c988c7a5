#!/bin/bash
#SBATCH --job-name=first
#SBATCH --gres=gpu:1
#SBATCH --open-mode=append
#POLLUX min-gpus=1 max-gpus=2
echo "attempt ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST, ticket: $(ls "$POLLUX_TICKET_DIR")"
sleep 600
