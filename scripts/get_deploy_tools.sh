#!/usr/bin/env bash
# Unpack Debian's Prometheus (with promtool) and docker-compose into a folder of their own: nothing of
# the system changes. `make nightly` puts FOLDER/bin on the path of the tests of deploy/.
#
#   scripts/get_deploy_tools.sh FOLDER
#
# Without apt-get it does nothing: tests then take the programs that are installed.
set -euo pipefail
folder=$(realpath -m "$1")
mkdir -p "$folder/bin"
if command -v apt-get >/dev/null; then
    packages=(
        prometheus docker-compose
        python3-{docker,dockerpty,docopt,dotenv,jsonschema,attr,pyrsistent,texttable,websocket,yaml}
        python3-{distro,requests,urllib3,six,chardet,charset-normalizer,idna,certifi,pkg-resources}
    )
    here=$(mktemp -d)
    (
        cd "$here"
        apt-get download -qq "${packages[@]}" || { apt-get update -qq; apt-get download -qq "${packages[@]}"; }
        for package in ./*.deb; do dpkg-deb -x "$package" "$folder"; done
    )
    rm -r "$here"
    ln -sf ../usr/bin/{prometheus,promtool} "$folder/bin"
    cat >"$folder/bin/docker-compose" <<END
#!/bin/sh
PYTHONPATH='$folder/usr/lib/python3/dist-packages' exec /usr/bin/python3 '$folder/usr/bin/docker-compose' "\$@"
END
    chmod +x "$folder/bin/docker-compose"
fi
touch "$folder/.installed"
