#!/usr/bin/env bash
# Writes the libraries of the console from the npm registry. Change the versions here and in assets/vendor/README.md.
set -euo pipefail
cd "$(dirname "$0")/../.."

preact=11.2.0 htm=3.1.1
to=$PWD/internal/console/assets/vendor
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fetch() { (cd "$work" && npm pack --silent "$1" | xargs -I{} tar -xzf {} && mv package "$2"); }
embed() { sed -e '/^\/\/# sourceMappingURL/d' -e 's/"preact"/".\/preact.js"/g' "$work/$1" >"$to/$2"; }

fetch "preact@$preact" preact
fetch "htm@$htm" htm
embed preact/dist/preact.mjs preact.js
embed preact/hooks/dist/hooks.mjs hooks.js
embed htm/dist/htm.mjs htm.js
