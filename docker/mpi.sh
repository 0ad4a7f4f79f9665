#!/usr/bin/env bash
# Entry of the MPI operator's launcher: check the nodes, then start a rank on every slot of its hostfile.
#
#   mpi.sh PROGRAM.py ARGUMENTS ... --output=FOLDER
#
# Exit status: 0, the run is finished; 75, it is not, and the same command resumes; otherwise the status of the failure.
set -euo pipefail

hostfile=${OMPI_MCA_orte_default_hostfile:-/etc/mpi/hostfile}
output=
for argument in "$@"; do
  case $argument in --output=*) output=${argument#--output=} ;; esac
done
if [[ -z $output ]]; then
  echo 'mpi.sh: --output=FOLDER is missing: it tells whether the run is finished' >&2
  exit 2
fi

# mpirun does not give the ranks the address of rank 0. Called by its full name, it finds its own files on the other nodes,
# which lack this container's variables. It then puts its own folder in front of PATH, so programs need full names, too.
read -r first _ < "$hostfile"
run=("$(command -v mpirun)" --hostfile "$hostfile" --bind-to none --wdir "$PWD"
  -x PATH -x LD_LIBRARY_PATH -x "MASTER_ADDR=$first" -x MASTER_PORT=29500)
"${run[@]}" "$(command -v ds-vrgd)" doctor --cluster --output "$output" --free "${DS_VRGD_FREE_GB:-1}"
"${run[@]}" "$(command -v python)" "$@"
[[ -e $output/result.json ]] || exit 75
