#!/bin/bash
#SBATCH --job-name=small-pairs
#SBATCH --account=rl
#SBATCH --partition=low
#SBATCH --qos=normal
#SBATCH --constraint="h200&ib"
#SBATCH --time=4:00:00
#SBATCH --exclusive
#SBATCH --mem=64G
#SBATCH --array=0-1
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=2
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --output=/runs/small/_slurm/pairs-%a.log

cd /home/me || exit
module load cuda
# The runs of each task of the array: side by side, on the same nodes
tasks=(
  'baseline/seed-0 treatment/seed-0'  # 0
  'baseline/seed-1 treatment/seed-1'  # 1
)
read -ra runs <<< "${tasks[$SLURM_ARRAY_TASK_ID]}"
exec /venv/bin/python -P -m abrun.launch.slurm.allocation /runs/small "${runs[@]}"
