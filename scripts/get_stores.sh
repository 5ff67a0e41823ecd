#!/usr/bin/env bash
# Fetch the stores of others that tests run, and OpenTelemetry, into a folder of their own: nothing
# of the environment changes. `make stores` puts it on the path and runs their tests.
#
#   scripts/get_stores.sh FOLDER
#
# Mooncake is the build without CUDA. It needs libibverbs1 even for TCP: where that is not installed,
# Debian's packages are unpacked into FOLDER/lib.
set -euo pipefail
folder=$(realpath -m "$1")
otel=1.45.2 beta=0.66b2

"${UV:-uv}" pip install --quiet --python "${PYTHON:-.venv/bin/python}" --no-deps --target "$folder" \
    mooncake-transfer-engine-non-cuda==0.3.13.post1 nixl==1.5.1 nixl-cu13==1.5.1 \
    opentelemetry-{sdk,proto,exporter-otlp-proto-{common,grpc,http}}==$otel \
    opentelemetry-{semantic-conventions,exporter-otlp-common,exporter-http-transport}==$beta \
    googleapis-common-protos

missing() {
    LD_LIBRARY_PATH="$folder/lib" ldd "$folder/mooncake/mooncake_master" | awk '/not found/ {print $1}'
}
if [ -n "$(missing)" ] && command -v apt-get >/dev/null; then
    mkdir -p "$folder/lib"
    here=$(mktemp -d)
    (
        cd "$here"
        packages=(libibverbs1 libnl-3-200 libnl-route-3-200)
        apt-get download -qq "${packages[@]}" || { apt-get update -qq; apt-get download -qq "${packages[@]}"; }
        for package in ./*.deb; do dpkg-deb -x "$package" unpacked; done
        find unpacked -name '*.so.*' -exec cp -a {} "$folder/lib" \;
    )
    rm -r "$here"
fi
if [ -n "$(missing)" ]; then
    echo "get_stores: Mooncake needs" $(missing)"; on Debian and Ubuntu: apt-get install libibverbs1" >&2
    exit 1
fi
touch "$folder/.installed"
