#!/usr/bin/env bash
# cluster.sh up|down|boot NODE|cut NODE|unplug NODE|plug NODE    A real Ray cluster on this machine, for tests: the
# head, which takes no runs, and the nodes n1 and n2, each with network, host name, processes, home and temporary
# files of its own, on a private bridge; this machine is 10.78.0.1 on it. A node whose Ray ends starts it again.
# Needs root and iproute2.  State: $D, which the caller sets; $RAY is the command ray.
# boot with HIDE=FOLDER: the node does not see that folder.
set -euo pipefail
export RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0 PYTHONPATH=
MAX=${MAX:-2}  # CPUs that Ray believes a node has
declare -A IP=([head]=10.78.0.10 [n1]=10.78.0.11 [n2]=10.78.0.12)

case $1 in
boot) # the node's first process: when it is killed, all of the node is gone, as without power
  start="$RAY start --node-ip-address=${IP[$2]} --object-store-memory=80000000 --disable-usage-stats --block"
  if [ "$2" = head ]; then
    start="$start --head --port=6379 --dashboard-host=0.0.0.0 --num-cpus=0"
  else
    start="while :; do $start --address=${IP[head]}:6379 --num-cpus=$MAX; sleep 1; done"
  fi
  rm -rf "$D/$2" && mkdir -p "$D/$2/ray" "$D/$2/home" /tmp/ray
  nsenter --net="/run/netns/abray$2" setsid unshare -mupf --kill-child --mount-proc bash -c \
    'hostname "$1"; mount --bind "$D/hosts" /etc/hosts; mount --bind "$D/$1/ray" /tmp/ray
    [ -z "${HIDE:-}" ] || mount -t tmpfs none "$HIDE"
    export HOME="$D/$1/home"; cd "$HOME"; eval "$2"; exit' _ "$2" "$start" </dev/null >>"$D/$2.log" 2>&1 &
  echo $! >"$D/$2.host"
  exit
  ;;
cut) # the power of a node
  kill -9 "$(cat "$D/$2.host")"
  exit
  ;;
unplug) ip -n abrayhead link set "v${2#n}" down; exit ;;
plug) ip -n abrayhead link set "v${2#n}" up; exit ;;
down)
  for node in head n1 n2; do
    [ -f "$D/$node.host" ] && kill -9 "$(cat "$D/$node.host")" 2>/dev/null || true
    ip netns pids "abray$node" 2>/dev/null | xargs -r kill -9 || true
    ip netns del "abray$node" 2>/dev/null || true
  done
  ip link del abray 2>/dev/null || true
  exit
  ;;
esac

"$0" down  # what a killed one has left
mkdir -p "$D"
printf '127.0.0.1 localhost\n10.78.0.10 head\n10.78.0.11 n1\n10.78.0.12 n2\n' >"$D/hosts"
ip netns add abrayhead
ip -n abrayhead link set lo up
ip -n abrayhead link add br0 type bridge
ip -n abrayhead addr add 10.78.0.10/24 dev br0
ip -n abrayhead link set br0 up
ip link add abray type veth peer name v0 netns abrayhead
ip -n abrayhead link set v0 master br0 up
ip addr add 10.78.0.1/24 dev abray
ip link set abray up
for i in 1 2; do
  ip netns add "abrayn$i"
  ip -n "abrayn$i" link set lo up
  ip -n abrayhead link add "v$i" type veth peer name eth0 netns "abrayn$i"
  ip -n abrayhead link set "v$i" master br0 up
  ip -n "abrayn$i" addr add "10.78.0.1$i/24" dev eth0
  ip -n "abrayn$i" link set eth0 up
done
for node in head n1 n2; do "$0" boot $node; done
for _ in $(seq 240); do
  alive=$(curl -sf --max-time 2 'http://10.78.0.10:8265/nodes?view=summary' | grep -o '"state": *"ALIVE"' | wc -l || true)
  [ "$alive" = 3 ] && exit
  sleep .5
done
echo "nodes did not come up: see $D" >&2
exit 1
