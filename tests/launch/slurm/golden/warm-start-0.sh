#!/bin/bash
#SBATCH --job-name=small-warm-start-0
#SBATCH --account=rl
#SBATCH --partition=low
#SBATCH --qos=normal
#SBATCH --constraint="h200&ib"
#SBATCH --time=4:00:00
#SBATCH --exclusive
#SBATCH --mem=64G
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --output=/runs/small/_slurm/warm-start-0.log

cd /home/me || exit
module load cuda
exec /venv/bin/python -P -m abrun.launch.slurm.allocation /runs/small warm-start/KEY
