#!/usr/bin/env bash
# Fails if the committed generated code differs from what the pinned generators make of the .proto files.
set -euo pipefail
cd "$(dirname "$0")/.."

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/fresh" "$work/committed"
go run -modfile=tools/go.mod github.com/bufbuild/buf/cmd/buf generate --output "$work/fresh"
go run -modfile=tools/go.mod github.com/bufbuild/buf/cmd/buf generate --template buf.gen.hot.yaml --output "$work/fresh"
# Hand-written Go stands beside the generated; only generated files are compared, missing and left-over ones included.
find api -name '*.pb.go' -exec cp --parents {} "$work/committed" \;
diff -r "$work/committed" "$work/fresh"
echo 'generate-check: generated code is current'
