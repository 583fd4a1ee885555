#!/usr/bin/env bash
# make wire-check: building buf and the generators takes three minutes of processor time, to find what depends on nothing but the files below.
# `make generate` writes their sums after buf has linted the contract and generated the code (--update). While all of them are what they
# were then, the result is, too. Otherwise everything is checked again, and what is current then must have its sums committed.
set -euo pipefail
cd "$(dirname "$0")/.."

sums() { # of the contract, what configures and pins buf and the generators, and what they generated
	git ls-files --cached --others --exclude-standard -- 'api/*.proto' 'api/*.pb.go' 'buf*.yaml' tools/go.mod tools/go.sum | LC_ALL=C sort -u | xargs sha256sum
}

if [ "${1:-}" = --update ]; then
	sums >tools/wire.sum
elif sums | diff tools/wire.sum -; then
	echo 'wire-check: the contract and the generated code are those that make generate left'
else
	echo 'wire-check: not as make generate left them'
	make buf-lint generate-check
	echo 'wire-check: linted and current, but without its sums: run make generate and commit tools/wire.sum'
	exit 1
fi
