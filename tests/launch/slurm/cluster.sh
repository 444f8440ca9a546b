#!/usr/bin/env bash
# cluster.sh up|down|boot NODE|cut NODE|unplug NODE|plug NODE|behead|head    A real Slurm on this machine, for tests: a
# controller and the nodes n1 and n2, each with network, host name and processes of its own, on a private bridge.
# Needs root, and: apt-get install -y --no-install-recommends slurm-wlm iproute2.  State: $D, which the caller sets.
# up writes commands of Slurm into $D/bin that reach the controller from outside.
set -euo pipefail
export SLURM_CONF=$D/slurm.conf
MAX=${MAX:-8}  # tasks that Slurm believes a node has cores for

in_ns() { # NODE COMMAND..: with that node's network, name and hosts
  nsenter --net="/run/netns/ab$1" unshare -mu bash -c \
    'hostname "$1"; mount --bind "$D/hosts" /etc/hosts; shift; exec "$@"' _ "$@"
}

case $1 in
boot) # the node's first process: when it is killed, all of the node is gone, as without power
  nsenter --net="/run/netns/ab$2" setsid unshare -mupf --kill-child --mount-proc bash -c \
    'hostname "$1"; mount --bind "$D/hosts" /etc/hosts
    [ -z "${HIDE:-}" ] || mount -t tmpfs none "$HIDE"
    slurmd -D -N "$1" -f "$SLURM_CONF"; exit' _ "$2" </dev/null >>"$D/log/$2.out" 2>&1 &
  echo $! >"$D/$2.host"
  exit
  ;;
cut) # the power of a node
  kill -9 "$(cat "$D/$2.host")"
  exit
  ;;
unplug) ip -n abctl link set "v${2#n}" down; exit ;;
plug) ip -n abctl link set "v${2#n}" up; exit ;;
behead) kill -9 "$(cat "$D/ctl.pid")"; exit ;;
head) in_ns ctl slurmctld -f "$SLURM_CONF"; exit ;; # goes on with the jobs that it knew
down)
  for node in n1 n2; do [ -f "$D/$node.host" ] && kill -9 "$(cat "$D/$node.host")" 2>/dev/null || true; done
  [ -f "$D/ctl.pid" ] && kill "$(cat "$D/ctl.pid")" 2>/dev/null || true
  sleep 1
  for name in n1 n2 ctl; do
    ip netns pids "ab$name" 2>/dev/null | xargs -r kill -9 || true
    ip netns del "ab$name" 2>/dev/null || true
  done
  exit
  ;;
esac

"$0" down  # what a killed one has left
mkdir -p "$D"/{state,spool.n1,spool.n2,log,dev,bin}
printf '127.0.0.1 localhost\n10.77.0.10 ctl\n10.77.0.11 n1\n10.77.0.12 n2\n' >"$D/hosts"
ip netns add abctl
ip -n abctl link set lo up
ip -n abctl link add br0 type bridge
ip -n abctl addr add 10.77.0.10/24 dev br0
ip -n abctl link set br0 up
for i in 1 2; do
  ip netns add "abn$i"
  ip -n "abn$i" link set lo up
  ip -n abctl link add "v$i" type veth peer name eth0 netns "abn$i"
  ip -n abctl link set "v$i" master br0 up
  ip -n "abn$i" addr add "10.77.0.1$i/24" dev eth0
  ip -n "abn$i" link set eth0 up
done
cat >"$SLURM_CONF" <<C
ClusterName=ab
SlurmctldHost=ctl(10.77.0.10)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool.%n
SlurmctldPidFile=$D/ctl.pid
SlurmdPidFile=$D/%n.pid
SlurmctldLogFile=$D/log/ctl.log
SlurmdLogFile=$D/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
SlurmdParameters=config_overrides
SlurmdTimeout=20
KillWait=5
ReturnToService=2
MinJobAge=60
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MaxArraySize=2001
MaxJobCount=10000
NodeName=n[1-2] NodeAddr=10.77.0.1[1-2] CPUs=$MAX RealMemory=4000
PartitionName=low  Nodes=n[1-2] Default=YES PriorityTier=1  PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=n[1-2] PriorityTier=10 PreemptMode=OFF
C
for command in sbatch squeue scontrol scancel srun sinfo; do
  real=$(command -v $command)
  cat >"$D/bin/$command" <<C
#!/bin/bash
export SLURM_CONF=$SLURM_CONF
[ -n "\${SLURM_JOB_ID:-}" ] && exec $real "\$@"  # within a job: this is a node
exec nsenter --net=/run/netns/abctl $real "\$@"
C
  chmod +x "$D/bin/$command"
done
in_ns ctl slurmctld -c -f "$SLURM_CONF"
for node in n1 n2; do "$0" boot $node; done
for _ in $(seq 60); do
  [ "$("$D/bin/sinfo" -h -p low -t idle -o %D)" = 2 ] && exit
  sleep .5
done
echo "nodes did not come up: see $D/log" >&2
exit 1
