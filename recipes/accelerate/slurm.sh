#!/bin/bash
# Two hosts with eight GPUs each:  sbatch slurm.sh CHECKPOINT -o OUT --data … (whatever `headfold uptrain` takes)
# Three minutes before its time is up, or when it is preempted, this script gets SIGTERM and passes it on; the run
# saves, and the job is queued again: the same command goes on. A run that fails by itself is not queued again.
#SBATCH --job-name=headfold
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail

config="${HEADFOLD_LAUNCH:-$(python -c 'import headfold.uptrain.processes.launch as l; print(l.find_launch("fsdp2-2x8"))')}"
head_node="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export OUT_ARGUMENTS="$(printf '%q ' "$@")"
# a save of a large model takes longer than the half minute that the launcher waits before it kills
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"

srun --kill-on-bad-exit=1 bash -c "exec accelerate launch --config_file '$config' \
    --machine_rank \$SLURM_NODEID --num_machines \$SLURM_NNODES \
    --num_processes \$((SLURM_NNODES * 8)) --main_process_ip '$head_node' --main_process_port 29500 \
    -m headfold uptrain $OUT_ARGUMENTS" &
step=$!
stopped=no
# the launcher's exit code tells nothing: it is 1 after a signal and after an error alike
trap 'stopped=yes; cut=yes; kill -TERM "$step" 2>/dev/null' TERM
cut=yes
while [ "$cut" = yes ]; do # the signal cuts the waiting short, not the run
    cut=no
    wait "$step"
    code=$?
done
if [ "$code" -ne 0 ] && [ "$stopped" = yes ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 50 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
