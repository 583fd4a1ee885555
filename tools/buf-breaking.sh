#!/usr/bin/env bash
# Fails if the wire contract breaks the one before it: the newest tag's; without a tag, the last commit's if the working
# tree has changes to the contract, and otherwise the commit's before it.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! base=$(git describe --tags --abbrev=0 2>/dev/null); then
	base=HEAD
	if git diff --quiet HEAD -- api; then
		base=HEAD~1
	fi
fi
if ! git ls-tree -r --name-only "$base" api 2>/dev/null | grep -q '\.proto$'; then
	echo "buf-breaking: $base has no contract to break"
	exit 0
fi
# What has not changed breaks nothing, and buf need not be built.
if git diff --quiet "$base" -- 'api/*.proto' buf.yaml && [ -z "$(git ls-files --others --exclude-standard -- 'api/*.proto')" ]; then
	echo "buf-breaking: the same contract as that of $base"
	exit 0
fi
go run -modfile=tools/go.mod github.com/bufbuild/buf/cmd/buf breaking --against ".git#commit=$(git rev-parse "$base")"
echo "buf-breaking: compatible with $base"
