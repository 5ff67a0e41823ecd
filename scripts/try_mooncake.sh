#!/usr/bin/env bash
# Fetch Mooncake Store from PyPI into a folder of its own and run the remote tests against its real
# master, storage node and client on loopback. Changes nothing else on the machine.
#
#   scripts/try_mooncake.sh [FOLDER]      default: .mooncake in the repository; delete it afterwards
#
# The build without CUDA is taken, so that it runs without a GPU driver. It needs libibverbs.so.1
# even for TCP; where that is missing, the script says so.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(realpath -m "${1:-.mooncake}")
package=mooncake-transfer-engine-non-cuda
python=${PYTHON:-.venv/bin/python}

if [ ! -d "$folder/mooncake" ]; then
    if [ -x .venv/bin/uv ]; then
        .venv/bin/uv pip install --quiet --python "$python" --no-deps --target "$folder" "$package"
    else
        "$python" -m pip install --quiet --no-deps --target "$folder" "$package"
    fi
fi
missing=$(ldd "$folder/mooncake/mooncake_master" | awk '/not found/ {print $1}' | sort -u | xargs)
if [ -n "$missing" ]; then
    echo "try_mooncake: missing on this machine: $missing" >&2
    echo "On Debian and Ubuntu: apt-get install libibverbs1 (or put the library on LD_LIBRARY_PATH)" >&2
    exit 1
fi
export PYTHONPATH="python:$folder${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m pytest -q -p no:cacheprovider test/e2e/test_core_mooncake.py
