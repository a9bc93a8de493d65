#!/usr/bin/env bash
# Runs the tests on the CPU, in 15 to 20 minutes on 2 cores. Makes .venv and installs what is missing first; setup_env.sh says which
# variables choose what.
#
#   ./scripts/test.sh                       the tests, without those marked long, seeded samples of the large families
#   ./scripts/test.sh --all                 everything
#   ./scripts/test.sh tests/test_pool.py -k raises    any arguments of pytest; paths are those of the repository
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup_env.sh"
setup_env test,hf,tb

cd "$REPO"
exec "$VENV/bin/python" -m pytest "$@"
