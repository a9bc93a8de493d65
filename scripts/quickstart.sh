#!/usr/bin/env bash
# Trains a small transformer on 4 local processes, two halves of the weights times two halves of the sequence, on Python's own
# standard-library source. Makes .venv and installs what is missing first; setup_env.sh says which variables choose what.
#
#   ./scripts/quickstart.sh                                   from any folder
#   ./scripts/quickstart.sh train.steps=200 data.path=my.txt  any key of configs/ may follow; paths are those of your folder
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env ""

launch_local 4 "$REPO/scripts/train.py" experiment=quickstart "$@"
