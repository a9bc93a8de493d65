#!/usr/bin/env bash
# Trains a small transformer on 4 local processes, two halves of the weights times two halves of the sequence, on Python's own
# standard-library source; then its first steps again on one process, to show that the numbers are the same. Makes .venv and
# installs what is missing first; setup_env.sh says which variables choose what.
#
#   ./scripts/quickstart.sh                                   from any folder
#   ./scripts/quickstart.sh train.steps=200 data.path=my.txt  any key of configs/ may follow; paths are those of your folder
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env ""

run="runs/quickstart-$(date +%Y%m%d-%H%M%S)-$$"
for word in "$@"; do
    case "$word" in
        run.dir=*) run="${word#run.dir=}" ;;
        -*) launch_local 4 "$REPO/scripts/train.py" experiment=quickstart "$@" && exit ;;      # --help, --cfg: nothing is run
    esac
done
launch_local 4 "$REPO/scripts/train.py" experiment=quickstart run.dir="$run" "$@"

printf '\nthe same seed on one process:\n'
OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" "$VENV/bin/python" -P "$REPO/scripts/compare.py" "$run"
