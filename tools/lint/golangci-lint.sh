#!/usr/bin/env bash
# Runs golangci-lint, built with the linters that .golangci.yml names and without the hundred others, whose packages and dependencies take two
# fifths of a cold build. The pinned module is copied to .cache, and of its list of linters only those lines are kept.
set -euo pipefail
lint=$(cd "$(dirname "$0")" && pwd)
root=${lint%/tools/lint}
module=github.com/golangci/golangci-lint/v2
list=pkg/lint/lintersdb/builder_linter.go

copy=$root/.cache/golangci-lint/$(cat "$0" "$root/.golangci.yml" "$lint/go.sum" | sha256sum | cut -c1-16)
if [ ! -d "$copy" ]; then
	fresh=$(mktemp -d -p "$(mkdir -p "$root/.cache" && echo "$root/.cache")")
	trap 'rm -rf "$fresh"' EXIT
	source=$(go mod download -modfile="$lint/go.mod" -json "$module" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
	cp -r --no-preserve=mode "$source" "$fresh/source"
	# A linter's package has its name. Names are items of lists in the configuration, or have settings (make lint-advice).
	awk '
		NR == FNR { if ($0 ~ /^ +(- [a-z]+|[a-z]+:)$/) { gsub(/[^a-z]/, ""); named[$0] = 1 } next }
		/^\t".*\/golinters\/.*"$/ { name = $1; gsub(/.*\/|"/, "", name); if (name in named) print; next }
		/\/golinters"$/ || /placeholderReplacer :=/ { next }
		/^\t\tlinter\.NewConfig\(/ { name = $1; sub(/.*NewConfig\(/, "", name); sub(/\..*/, "", name); out = !(name in named) }
		/^\t}, nil/ { out = 0 }
		!out' "$root/.golangci.yml" "$source/$list" >"$fresh/source/$list"
	cp "$lint/go.sum" "$fresh/source/pinned.sum"
	(cat "$lint/go.mod" && echo "replace $module => $copy") >"$fresh/source/pinned.mod"
	rm -rf "$root/.cache/golangci-lint"
	mkdir -p "$root/.cache/golangci-lint"
	mv "$fresh/source" "$copy"
fi
go run -modfile="$copy/pinned.mod" "$module/cmd/golangci-lint" "$@"
