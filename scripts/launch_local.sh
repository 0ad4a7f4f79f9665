#!/usr/bin/env bash
# Pre-train BERT on one machine, a rank for each GPU. The same command resumes where the last one stopped.
#
#   scripts/launch_local.sh RUN.yaml OUTPUT [DEEPSPEED.json]      RANKS=2: on two GPUs, or two CPU processes
#
# SIGTERM and ^C save the run and end it with status 0, even if only this script gets them.
set -euo pipefail

if (($# < 2 || $# > 3)); then
  echo 'usage: scripts/launch_local.sh RUN.yaml OUTPUT [DEEPSPEED.json]' >&2
  exit 2
fi
if [[ -n ${RANKS:-} ]]; then
  # DeepSpeed counts a CPU's ranks by LOCAL_SIZE.
  export LOCAL_SIZE=$RANKS
fi
scripts=$(dirname "${BASH_SOURCE[0]}")

# shellcheck disable=SC2329 # the trap calls it
stop() {
  # The launcher does not pass a signal on, or kills after 30 s. One rank that has it makes all save. Before there are
  # ranks, all ends.
  pkill -TERM -g "$launcher" -f -- --local_rank=0 || kill -TERM -- "-$launcher" 2>/dev/null || true
}

set -m # a process group for the launcher and its ranks, which ^C does not reach
deepspeed --log_level warning ${RANKS:+--num_gpus "$RANKS"} "$scripts/pretrain_bert.py" \
  --deepspeed_config "${3:-$scripts/../configs/ds_vrgd.json}" --run "$1" --output "$2" --resume auto &
launcher=$!
trap stop TERM INT
# A signal ends the wait, but not the run.
while
  status=0
  wait "$launcher" || status=$?
  ((status > 128)) && kill -0 "$launcher" 2>/dev/null
do :; done
exit "$status"
