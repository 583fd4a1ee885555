#!/usr/bin/env bash
# Compares the functions that no command and no example reaches with tools/deadcode.txt, the reviewed list of those that are kept all the
# same. Fails if a function is missing there, and if a line there names nothing any more. Tests do not count as callers. Generated code is its
# generator's business; client/ is a library, so what it exports is alive by definition.
set -euo pipefail
cd "$(dirname "$0")/.."

go run -modfile=tools/go.mod golang.org/x/tools/cmd/deadcode ./... |
	sed -E 's/:[0-9]+:[0-9]+: unreachable func: / /' |
	awk '
		NR == FNR {
			if ($0 ~ /^(#|$)/) next
			if (NF < 3) { print "tools/deadcode.txt: no reason: " $0; failed = 1 }
			listed[$1 " " $2] = 1
			next
		}
		$1 ~ /^(client|api)\// { next }
		($1 " " $2) in listed { used[$1 " " $2] = 1; next }
		($1 " *") in listed { used[$1 " *"] = 1; next }
		{ print "unreachable, and not in tools/deadcode.txt: " $0; failed = 1 }
		END {
			for (entry in listed) if (!(entry in used)) { print "in tools/deadcode.txt, and reachable or gone: " entry; failed = 1 }
			exit failed
		}' tools/deadcode.txt -
