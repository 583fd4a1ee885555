#!/usr/bin/env bash
# Drives the real server from Python: stubs made from the .proto files with grpcio-tools, in a virtual environment of its own.
# Needs python3 with venv, and a package index for the first run. Expects bin/kvserver (make build), or KVSERVER to name one.
set -euo pipefail
cd "$(dirname "$0")/.."

env=.cache/python
stamp=$env/requirements.txt
if ! cmp -s test/python/requirements.txt "$stamp"; then
	python3 -m venv "$env"
	"$env/bin/pip" install --quiet --disable-pip-version-check -r test/python/requirements.txt
	cp test/python/requirements.txt "$stamp"
fi

stubs=$(mktemp -d)
trap 'rm -rf "$stubs"' EXIT
# The vendored google/rpc/status.proto is only compiled against: its stubs come with googleapis-common-protos.
"$env/bin/python" -m grpc_tools.protoc -I api/proto -I api/third_party \
	--python_out="$stubs" --grpc_python_out="$stubs" api/proto/epochkv/v1/*.proto

KVSERVER=${KVSERVER:-bin/kvserver} PYTHONPATH=$stubs "$env/bin/python" -m unittest discover -v -s test/python
