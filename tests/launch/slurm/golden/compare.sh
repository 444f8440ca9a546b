#!/bin/bash
#SBATCH --job-name=small-compare
#SBATCH --account=rl
#SBATCH --partition=low
#SBATCH --qos=normal
#SBATCH --constraint="h200&ib"
#SBATCH --time=4:00:00
#SBATCH --exclusive
#SBATCH --mem=64G
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --open-mode=append
#SBATCH --output=/runs/small/_slurm/compare.log

cd /home/me || exit
module load cuda
exec /venv/bin/python -P -m abrun compare /runs/small --output /runs/small/report
