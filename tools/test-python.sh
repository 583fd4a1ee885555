#!/usr/bin/env bash
# Drives bin/kvserver from Python. Packages go into a virtual environment under .cache, stubs are generated from the .proto files.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.cache/python
stubs=.cache/python-stubs
if [[ ! -x $venv/bin/python ]]; then
	python3 -m venv "$venv"
fi
if ! cmp -s test/python/requirements.txt "$venv/requirements.txt"; then
	"$venv/bin/pip" install --quiet --requirement test/python/requirements.txt
	cp test/python/requirements.txt "$venv/"
fi
rm -rf "$stubs"
mkdir -p "$stubs"
"$venv/bin/python" -m grpc_tools.protoc -I api/proto -I api/third_party --python_out="$stubs" --grpc_python_out="$stubs" \
	api/proto/epochkv/v1/*.proto

KVSERVER=$PWD/bin/kvserver PYTHONPATH=$PWD/$stubs:$PWD/test/python \
	"$venv/bin/python" -m unittest discover --start-directory test/python --pattern 'test_*.py' "$@"
