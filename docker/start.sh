#!/usr/bin/env bash
# Entry of the images.
#
#   start.sh PROGRAM.py ARGUMENTS ... --output FOLDER   check the nodes, then start this node's ranks with torchrun
#   start.sh COMMAND ...                                run anything else unchanged
#
# torchrun reads its options from PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT, which
# Kubeflow Trainer sets. DS_VRGD_FREE_GB is the free space that FOLDER must have.
#
# Exit status: 0, the run is finished; 75 (EX_TEMPFAIL), SIGTERM has stopped it and all is saved: start the same command
# again; otherwise the status of the failure. A scheduler restarts nothing after 0, and the ranks also stop on nodes that
# got no signal, so the run's own file result.json decides, and not the signal.
set -euo pipefail

if [[ ${1:-} != *.py ]]; then
  exec "$@"
fi

output=
previous=
for argument in "$@"; do
  case $argument in
    --output=*) output=${argument#--output=} ;;
    *) if [[ $previous == --output ]]; then output=$argument; fi ;;
  esac
  previous=$argument
done
if [[ -z $output ]]; then
  echo 'start.sh: --output FOLDER is missing: it tells whether the run is finished' >&2
  exit 2
fi

printf '%s\n' "$output" > "${TMPDIR:-/tmp}/ds_vrgd-output-$(id -u)" # for health.sh
stopped=
trap 'exit 75' TERM # bash waits for the check to end first

# A port of its own: the other nodes may have finished one rendezvous before this one has closed it.
torchrun --master-port "$((${PET_MASTER_PORT:-29500} + 1))" -m ds_vrgd.cli \
  doctor --cluster --output "$output" --free "${DS_VRGD_FREE_GB:-1}"

# SIGTERM goes only to the ranks. torchrun kills them 30 seconds after a SIGTERM to itself; a checkpoint may take longer.
# shellcheck disable=SC2317,SC2329  # the trap calls it
pass_on() {
  local status pid
  stopped=1
  for status in $(grep -l "^PPid:[[:space:]]*$launcher\$" /proc/[0-9]*/status 2>/dev/null || true); do
    pid=${status#/proc/}
    kill -TERM "${pid%/status}" 2>/dev/null || true
  done
}

# After -- the program's options are its own: torchrun would read --run as an abbreviated --run-path.
torchrun -- "$@" &
launcher=$!
trap pass_on TERM
status=0
wait "$launcher" || status=$?
while kill -0 "$launcher" 2>/dev/null; do # the signal ended the wait, not the ranks
  status=0
  wait "$launcher" || status=$?
done

# Ranks that get the signal before their first update die of it, and have nothing to save.
if [[ ! -e $output/result.json && ($status == 0 || -n $stopped) ]]; then
  exit 75
fi
exit "$status"
