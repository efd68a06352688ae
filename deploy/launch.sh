#!/usr/bin/env bash
# Starts `onward` as one process, or as the ranks of torchrun:
#   launch.sh finetune --train_file text.txt --output_dir runs/a
#
#   NPROC_PER_NODE   processes on this machine; one for each GPU unless given, one without a GPU
#   NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT
#                    the machines, which of them this is, and where the first one listens
#   OMP_NUM_THREADS  threads of each process; cores, or the container's quota, shared out unless given
#
# Where a scheduler has started one process for each rank already, and where the words are no
# training, `onward` runs as it is.
set -euo pipefail

case "${1:-}" in
finetune) ;;
*) exec onward "$@" ;;
esac
# processes.py looks at the machine as PyTorch sees it: no number of threads may be set yet.
share() {
    env -u OMP_NUM_THREADS python "$(dirname "$0")/processes.py" ${NPROC_PER_NODE:+"${NPROC_PER_NODE}"}
}
if [[ -n "${LOCAL_RANK:-}" ]]; then
    if [[ -z "${OMP_NUM_THREADS:-}" && "${NPROC_PER_NODE:-1}" != 1 ]]; then
        found="$(share)"
        export OMP_NUM_THREADS="${found#* }"
    fi
    exec onward "$@"
fi

nodes="${NNODES:-${PET_NNODES:-1}}"
processes="${NPROC_PER_NODE:-}"
if [[ "${nodes}" == 1 && "${processes}" == 1 ]]; then
    exec onward "$@" # which follows the quota by itself
fi
found="$(share)"
processes="${found% *}"
if [[ "${nodes}" == 1 && "${processes}" == 1 ]]; then
    exec onward "$@"
fi
# torchrun would give each process one thread
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${found#* }}"
if [[ "${nodes}" == 1 ]]; then
    exec torchrun --standalone "--nproc-per-node=${processes}" -m onward "$@"
fi
exec torchrun "--nnodes=${nodes}" "--nproc-per-node=${processes}" \
    "--node-rank=${NODE_RANK:-${PET_NODE_RANK:-0}}" \
    "--master-addr=${MASTER_ADDR:-${PET_MASTER_ADDR:?is needed with several machines}}" \
    "--master-port=${MASTER_PORT:-${PET_MASTER_PORT:-29500}}" -m onward "$@"
