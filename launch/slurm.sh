#!/bin/bash
# Pre-training on SLURM. Copy, set the four lines marked <-, then: sbatch launch/slurm.sh
#
# Before its time is over, or when it is preempted, the job asks the run to stop: a checkpoint is committed, the ranks leave
# with exit code 75 ("resume me"), and the job queues itself again. scancel, a stop file of yours and any failure end it.
#SBATCH --job-name=vit
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.txt
set -u
cd "$HOME/vit" || exit                                    # <- this repository, on storage that all nodes share
CONFIG=configs/pretrain/vit_l16_imagenet21k.yaml          # <-
RUN=/shared/runs/vit_l16                                  # <- folder and name of the run
DATA=/shared/imagenet21k                                  # <-

export MASTER_ADDR MASTER_PORT
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))  # Below those that Linux gives to connections, from 32,768.

mkdir -p "$RUN"
rm -f "$RUN/status.json" "$RUN/stop"  # What the last job said, or was told when its run had ended, is not to be taken for this one's.
# The batch script alone is signalled (B:), and tells the run by its stop file; ranks hear of it within a step or two.
again=
trap 'again=yes; touch "$RUN/stop"' USR1
trap 'again=${again:-no}; touch "$RUN/stop"' TERM  # By scancel; after a preemption SLURM queues the job itself.

# The CPUs again, because srun has not taken them from the job since Slurm 22.05.
srun --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" bash -c '
  exec .venv/bin/torchrun --nnodes "$SLURM_NNODES" --nproc_per_node "$SLURM_GPUS_ON_NODE" --node_rank "$SLURM_NODEID" \
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" "$@"' train \
  launch/pretrain.py --config "$CONFIG" out="$(dirname "$RUN")" name="$(basename "$RUN")" data.path="$DATA" &
step=$!
while kill -0 "$step" 2>/dev/null; do wait "$step"; done  # A trapped signal ends wait, not the run.

# torchrun has exit codes of its own: how the run ended stands in its folder. A preemption may have signalled the ranks alone.
grep -q '"reason": "the stop file' "$RUN/status.json" || again=${again:-yes}
if [ "$again" = yes ] && grep -q '"code": 75' "$RUN/status.json"; then
  scontrol requeue "$SLURM_JOB_ID"
fi
