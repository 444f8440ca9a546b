#!/bin/bash
#SBATCH --job-name=small-runs
#SBATCH --account=rl
#SBATCH --partition=low
#SBATCH --qos=normal
#SBATCH --constraint="h200&ib"
#SBATCH --time=4:00:00
#SBATCH --exclusive
#SBATCH --mem=64G
#SBATCH --array=0-0
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --output=/runs/small/_slurm/runs-%a.log

cd /home/me || exit
module load cuda
# The runs of each task of the array: side by side, on the same nodes
tasks=(
  baseline/seed-0-aa1  # 0
)
read -ra runs <<< "${tasks[$SLURM_ARRAY_TASK_ID]}"
exec /venv/bin/python -P -m abrun.launch.slurm.allocation /runs/small "${runs[@]}"
