#!/bin/sh
# Health of a container, for HEALTHCHECK and the probes of Kubernetes. It starts no Python.
#
#   health.sh
#
# Exit status 1, with the reason, if the output folder is not writable, if /dev/shm is almost full, or if an unfinished
# run has neither started nor logged an update for DS_VRGD_STALL_MINUTES (60). start.sh notes the folder of its run;
# without a run it is /out.
set -eu

note=${TMPDIR:-/tmp}/ds_vrgd-output-$(id -u)
output=/out
if [ -e "$note" ]; then
  output=$(cat "$note")
fi
stall=${DS_VRGD_STALL_MINUTES:-60}

fail() {
  echo "unhealthy: $1" >&2
  exit 1
}

if [ -e "$output" ] && [ ! -w "$output" ]; then
  fail "user $(id -u) cannot write to $output: give the folder to that user"
fi
free=$(df -Pk /dev/shm | awk 'NR == 2 { print int($4 / 1024) }')
if [ "$free" -lt 16 ]; then
  fail "/dev/shm has $free MiB left: start the container with a larger one"
fi
if [ -e "$note" ] && [ ! -e "$output/result.json" ]; then
  recent=$(find "$note" "$output/log.jsonl" -mmin "-$stall" 2>/dev/null || true)
  if [ -z "$recent" ]; then
    fail "no update was logged in $output/log.jsonl for $stall minutes (DS_VRGD_STALL_MINUTES)"
  fi
fi
