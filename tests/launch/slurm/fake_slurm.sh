#!/bin/bash
# A fake of the commands of Slurm, by the name it is called by. $FAKE_SLURM is its folder: `queue` has a line a task
# as squeue prints them, `calls` every call. A node has 8 cores; the partition `gone`, the account `nobody` and the
# script whose name is in `refused` are refused in the words of Slurm 22.05; scancel fails where there is a file `deaf`.
set -u
cd "$FAKE_SLURM" || exit
command=${0##*/}
echo "$command $*" >>calls
touch queue
if [ -f no-conf ]; then # as in Slurm 22.05 without a slurm.conf
  echo "$command: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
$command: error: fetch_config: DNS SRV lookup failed
$command: error: _establish_config_source: failed to fetch config
$command: fatal: Could not establish a configuration source" >&2
  exit 1
fi

option() { # NAME: of sbatch, on its command line or in its script
  { printf '%s\n' "${args[@]}"; [ -z "$script" ] || sed -n 's/^#SBATCH //p' "$script"; } | sed -n "s/^--$1=//p" | head -1
}

case $command in
sbatch)
  args=("$@")
  script=${args[-1]}
  [ -f "$script" ] || script=
  case "$(option partition) $(option account)" in
  gone*) echo "sbatch: error: invalid partition specified: gone
sbatch: error: Batch job submission failed: Invalid partition name specified" >&2; exit 1 ;;
  *nobody) echo "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified" >&2
    exit 1 ;;
  esac
  cores=$(option cpus-per-task)
  tasks=$(option ntasks-per-node)
  if [ $((${cores:-1} * ${tasks:-1})) -gt 8 ]; then
    echo "allocation failure: Requested node configuration is not available" >&2
    exit 1
  fi
  [[ " $* " == *" --test-only "* ]] && exit 0
  if [ -f refused ] && [ "$(basename "$script")" = "$(cat refused)" ]; then
    echo "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit)" >&2
    exit 1
  fi
  number=$(($(cat number 2>/dev/null || echo 100) + 1))
  echo $number >number
  last=$(option array)
  last=${last%%%*}
  if [ -z "$last" ]; then
    echo "$number|N/A|PENDING|Priority||N/A|$script" >>queue
  else
    for index in $(seq 0 "${last#0-}"); do echo "$number|$index|PENDING|Priority||N/A|$script" >>queue; done
  fi
  [ "$(basename "$script")" != "$(cat deadly 2>/dev/null)" ] || kill -9 "$PPID"
  echo $number
  ;;
squeue) cat queue ;;
scancel)
  if [ -f deaf ]; then
    echo "scancel: error: Kill job error on job id ${*: -1}: Unable to contact slurm controller" >&2
    exit 1
  fi
  for job in "$@"; do
    case $job in -*) continue ;; esac
    [[ " $* " == *" --state=RUNNING "* ]] || sed -i "s/^$job|\([^|]*\)|PENDING|.*/$job|\1|CANCELLED|None||N\/A|/" queue
  done
  ;;
srun)
  echo "srun: unrecognized option '$1'
Try \"srun --help\" for more information" >&2
  exit 255
  ;;
esac
