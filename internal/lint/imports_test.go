package lint

import (
	"fmt"
	"go/ast"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"testing"
)

// mayImport is the import direction: per package (a row covers the packages below it that have no row) the packages of
// this module that its production code may import. A package without a row fails the test, so that a new one is placed on purpose.
//
//	cmd ─► server ─► mvcc ─► storage ─► wal, btree, pager, memtable ─► page, batch, keys, cache, vfs, pin
var mayImport = map[string][]string{
	// Leaves.
	"internal/ablation":   {},
	"internal/clock":      {},
	"internal/fairqueue":  {},
	"internal/invariants": {},
	"internal/keys":       {},
	"internal/lint":       {},
	"internal/offheap":    {},
	"internal/metadata":   {"internal/keys"},

	// What one layer of the engine knows, and nothing of its neighbours.
	"internal/pin":           {"internal/keys", "internal/invariants"},
	"internal/storage/batch": {"internal/keys", "internal/metadata"},
	"internal/vfs":           {"internal/invariants"},
	"internal/cache":         {"internal/pin", "internal/invariants"},
	"internal/storage/page":  {"internal/keys", "internal/metadata", "internal/invariants"},

	"internal/wal": {"internal/keys", "internal/vfs", "internal/offheap", "internal/invariants"},
	"internal/storage/memtable": {
		"internal/keys", "internal/storage/batch", "internal/pin", "internal/offheap", "internal/invariants",
	},
	"internal/storage/btree":    {"internal/keys", "internal/metadata", "internal/storage/page", "internal/invariants"},
	"internal/storage/bitset":   {},
	"internal/storage/extsort":  {"internal/keys", "internal/vfs"},
	"internal/storage/throttle": {},
	"internal/storage/pager": {
		"internal/keys", "internal/storage/bitset", "internal/storage/page", "internal/vfs", "internal/invariants",
	},
	"internal/storage/quarantine": {"internal/keys", "internal/metadata", "internal/vfs"},
	"internal/storage/pagesource": {
		"internal/keys", "internal/storage/page", "internal/storage/btree", "internal/storage/blob", "internal/storage/pager", "internal/cache", "internal/vfs", "internal/pin",
	},
	"internal/storage/repairtree": {
		"internal/keys", "internal/storage/page", "internal/storage/btree", "internal/storage/blob", "internal/storage/pager", "internal/storage/pagesource",
	},
	"internal/storage/blob": {
		"internal/storage/bitset", "internal/storage/page", "internal/storage/pager", "internal/vfs", "internal/invariants",
	},

	"internal/storage/orphans": {
		"internal/keys", "internal/storage/bitset", "internal/storage/page", "internal/storage/btree", "internal/storage/pager", "internal/storage/pagesource", "internal/vfs",
	},

	"internal/storage": {
		"internal/keys", "internal/metadata", "internal/storage/batch", "internal/storage/memtable", "internal/storage/page",
		"internal/storage/blob", "internal/storage/btree", "internal/storage/extsort", "internal/storage/orphans", "internal/storage/pager", "internal/storage/pagesource", "internal/storage/quarantine", "internal/storage/repairtree", "internal/storage/throttle", "internal/wal", "internal/cache", "internal/vfs",
		"internal/pin", "internal/invariants", "internal/ablation",
	},
	"internal/storage/inspect": {
		"internal/storage", "internal/keys", "internal/metadata", "internal/storage/batch", "internal/storage/bitset", "internal/storage/blob",
		"internal/storage/btree", "internal/storage/page", "internal/storage/pager", "internal/storage/quarantine", "internal/vfs", "internal/wal",
	},
	"internal/mvcc": {
		"internal/clock", "internal/fairqueue", "internal/storage", "internal/storage/inspect", "internal/keys", "internal/metadata", "internal/storage/batch", "internal/storage/memtable", "internal/vfs", "internal/pin",
		"internal/wal", "internal/invariants", "internal/ablation",
	},

	// What reads the log besides recovery: it knows neither transactions nor the network.
	"internal/feed": {"internal/keys", "internal/storage/batch", "internal/wal", "internal/vfs"},

	// What keeps the log outside of the store: records, not segment files.
	"internal/archive": {"internal/keys", "internal/objectstore", "internal/storage/batch", "internal/wal"},
	// Where copies of the store are kept, and how they are made and read.
	"internal/objectstore": {"internal/vfs"},
	"internal/backup":      {"internal/invariants", "internal/keys", "internal/objectstore", "internal/storage", "internal/storage/bitset", "internal/storage/page", "internal/vfs"},

	// What makes a store of a backup and the log archive, from the command line.
	"internal/restore": {
		"internal/archive", "internal/backup", "internal/keys", "internal/mvcc", "internal/objectstore", "internal/storage", "internal/storage/batch", "internal/storage/inspect", "internal/vfs", "internal/wal",
	},

	// The RPC layer, the client, the commands, and what they need.
	"api":                 {},
	"client":              {"api/proto/epochkv/v1"},
	"client/tracing":      {"client"},
	"internal/testseed":   {},
	"internal/doctable":   {},
	"internal/audit":      {"internal/fairqueue"},
	"internal/config":     {"internal/audit", "internal/storage"}, // for its limits
	"internal/health":     {},
	"internal/console":    {},
	"internal/certs":      {},
	"internal/transport":  {"internal/fairqueue"},
	"internal/tracing":    {},
	"internal/lease":      {"internal/mvcc", "internal/keys", "internal/metadata", "internal/storage/batch"},
	"internal/auth":       {"internal/keys"},
	"internal/auth/users": {"internal/auth", "internal/fairqueue", "internal/keys", "internal/mvcc", "internal/storage", "internal/vfs"},
	"internal/telemetry":  {"internal/archive", "internal/config", "internal/feed", "internal/health", "internal/mvcc", "internal/storage", "internal/tracing", "internal/wal", "internal/vfs"},
	"internal/server": {
		"api/proto/epochkv/v1", "internal/archive", "internal/audit", "internal/objectstore", "internal/auth", "internal/auth/users", "internal/backup", "internal/certs", "internal/clock", "internal/config", "internal/console", "internal/feed", "internal/health", "internal/lease", "internal/mvcc", "internal/restore", "internal/storage", "internal/storage/inspect",
		"internal/fairqueue", "internal/invariants", "internal/keys", "internal/metadata", "internal/storage/batch", "internal/telemetry", "internal/tracing", "internal/transport", "internal/vfs", "internal/wal",
	},
	"cmd/kvserver": {"internal/config", "internal/server", "internal/telemetry"},
	"cmd/kvctl":    {"api/proto/epochkv/v1", "client", "internal/audit", "internal/auth/users", "internal/archive", "internal/backup", "internal/certs", "internal/objectstore", "internal/restore", "internal/storage", "internal/storage/inspect", "internal/keys", "internal/vfs"}, // verify, salvage and restore of files
	"tools":        {},
	"examples":     {"api/proto/epochkv/v1", "client"},

	// Tests that need the whole, and measurements, may look anywhere.
	"internal/e2e":        nil,
	"internal/enginetest": nil,
	"internal/sim":        nil,
	"bench":               nil,
}

// wireAware lists the packages that know the protocol: gRPC and protobuf stay out of all others.
var wireAware = []string{"api", "client", "cmd", "examples", "internal/server", "internal/transport", "internal/telemetry", "internal/tracing", "internal/e2e", "bench"}

// metered lists the packages that know the metrics library; the engine counts in plain atomics.
var metered = []string{"internal/telemetry", "cmd", "bench"}

// traced lists the packages that know OpenTelemetry. The client does not: programs that do not trace must not link it.
var traced = []string{"internal/tracing", "client/tracing"}

// migration lists what kvctl reads the data of peers with, to import it.
var migration = []string{"go.etcd.io/bbolt", "github.com/gomodule/redigo/redis"}

// engine lists the packages that reach files through vfs alone.
var engine = []string{"internal/storage", "internal/wal", "internal/mvcc", "internal/cache", "internal/pin"}

// below reports whether dir is one of roots or lies under one.
func below(dir string, roots []string) bool {
	return slices.ContainsFunc(roots, func(root string) bool { return dir == root || strings.HasPrefix(dir, root+"/") })
}

// row finds the row of the table that covers dir: its own or that of its nearest ancestor.
func row(dir string) (name string, allowed []string, ok bool) {
	for name = dir; ; {
		if allowed, ok = mayImport[name]; ok {
			return name, allowed, true
		}
		cut := strings.LastIndexByte(name, '/')
		if cut < 0 {
			return "", nil, false
		}
		name = name[:cut]
	}
}

func checkDirection(t *testing.T, tree fs.FS) (complaints []string) {
	for _, s := range sources(t, tree) {
		name, allowed, ok := row(s.dir())
		if !ok {
			complaints = append(complaints, fmt.Sprintf("%s: package has no row in the import table", s.path))
			continue
		}
		if allowed == nil || s.isTest() {
			continue
		}
		s.imports(func(spec *ast.ImportSpec, imported string) {
			target, ours := strings.CutPrefix(imported, module+"/")
			if ours && !below(target, []string{name}) && !slices.Contains(allowed, target) && !coveredBySubtree(target, allowed) {
				complaints = append(complaints, fmt.Sprintf("%s: %s may not import %s", s.line(spec), s.dir(), target))
			}
		})
	}
	return complaints
}

// checkRows complains about rows of the table, and names of the lists, that no package has.
func checkRows(t *testing.T, tree fs.FS, names []string) (complaints []string) {
	dirs := map[string]bool{}
	for _, s := range sources(t, tree) {
		for dir := s.dir(); dir != "."; dir = path.Dir(dir) {
			dirs[dir] = true
		}
	}
	for _, name := range names {
		if !dirs[name] {
			complaints = append(complaints, "the import table names "+name+", which has no package")
		}
	}
	return complaints
}

func TestImportTableNamesOnlyPackages(t *testing.T) {
	names := slices.Concat(slices.Collect(maps.Keys(mayImport)), wireAware, metered, traced, engine)
	for _, allowed := range mayImport {
		names = append(names, allowed...)
	}
	slices.Sort(names)
	report(t, checkRows(t, repository(), slices.Compact(names)))
	wantOne(t, checkRows(t, tree("a/b/c.go", "package b\n"), []string{"a", "a/b", "a/c"}), "names a/c")
}

// coveredBySubtree reports whether target has no row of its own and belongs to an allowed package.
func coveredBySubtree(target string, allowed []string) bool {
	name, _, ok := row(target)
	return ok && name != target && slices.Contains(allowed, name)
}

func checkForeign(t *testing.T, tree fs.FS) (complaints []string) {
	for _, s := range sources(t, tree) {
		s.imports(func(spec *ast.ImportSpec, imported string) {
			wire := strings.HasPrefix(imported, "google.golang.org/") || strings.HasPrefix(imported, module+"/api/")
			metrics := strings.HasPrefix(imported, "github.com/prometheus/")
			traces := strings.HasPrefix(imported, "go.opentelemetry.io/")
			peer := strings.HasPrefix(imported, "github.com/cockroachdb/pebble") || strings.HasPrefix(imported, "github.com/dgraph-io/") ||
				strings.HasPrefix(imported, "go.etcd.io/") || strings.HasPrefix(imported, "github.com/redis/")
			switch {
			case wire && !below(s.dir(), wireAware):
				complaints = append(complaints, fmt.Sprintf("%s: only the RPC layer, the client and the commands know the protocol, not %s", s.line(spec), s.dir()))
			case metrics && !s.isTest() && !below(s.dir(), metered):
				complaints = append(complaints, fmt.Sprintf("%s: only telemetry knows the metrics library, not %s", s.line(spec), s.dir()))
			case traces && !s.isTest() && !below(s.dir(), traced):
				complaints = append(complaints, fmt.Sprintf("%s: only tracing knows OpenTelemetry, not %s", s.line(spec), s.dir()))
			case peer && !below(s.dir(), []string{"bench"}) && !(below(s.dir(), []string{"cmd/kvctl"}) && slices.Contains(migration, imported)):
				complaints = append(complaints, fmt.Sprintf("%s: peers belong in bench, not in %s", s.line(spec), s.dir()))
			}
		})
	}
	return complaints
}

// fenceCall reports whether a name of golang.org/x/sys/unix is what the registry of readers fences with, for which there is no function.
func fenceCall(dir, name string) bool {
	return dir == "internal/pin" && (name == "Syscall" || name == "SYS_MEMBARRIER")
}

// memoryCall reports whether a name of golang.org/x/sys/unix is about memory, which arenas need, and not about files.
func memoryCall(name string) bool {
	for _, prefix := range []string{"Mmap", "Munmap", "Mremap", "Madvise", "Mlock", "Mprotect", "Sysinfo", "PROT_", "MAP_", "MADV_", "Errno", "ENOMEM"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

func checkFiles(t *testing.T, tree fs.FS) (complaints []string) {
	for _, s := range sources(t, tree) {
		if s.isTest() || !below(s.dir(), engine) {
			continue
		}
		s.imports(func(spec *ast.ImportSpec, imported string) {
			if imported == "os" || imported == "syscall" || imported == "io/ioutil" {
				complaints = append(complaints, fmt.Sprintf("%s: the engine reaches files through vfs, not through %q", s.line(spec), imported))
			}
		})
		ast.Inspect(s.syntax, func(n ast.Node) bool {
			selector, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			if base, ok := selector.X.(*ast.Ident); ok && base.Name == "unix" && !memoryCall(selector.Sel.Name) && !fenceCall(s.dir(), selector.Sel.Name) {
				complaints = append(complaints, fmt.Sprintf("%s: the engine takes memory from unix, not %s", s.line(n), selector.Sel.Name))
			}
			return true
		})
	}
	return complaints
}

func TestImportsPointDownward(t *testing.T) {
	report(t, checkDirection(t, repository()))
	wantOne(t, checkDirection(t, tree("internal/wal/a.go", "package wal\nimport _ \"github.com/epochkv/epochkv/internal/storage/memtable\"\n")),
		"internal/wal may not import internal/storage/memtable")
	wantOne(t, checkDirection(t, tree("internal/cache/a.go", "package cache\nimport _ \"github.com/epochkv/epochkv/internal/storage/blob\"\n")),
		"internal/cache may not import")
	wantOne(t, checkDirection(t, tree("internal/newcomer/a.go", "package newcomer\n")), "no row")
}

func TestWireMetricsAndPeersStayInTheirPackages(t *testing.T) {
	report(t, checkForeign(t, repository()))
	wantOne(t, checkForeign(t, tree("internal/mvcc/a.go", "package mvcc\nimport _ \"google.golang.org/grpc\"\n")), "only the RPC layer")
	wantOne(t, checkForeign(t, tree("internal/wal/a.go", "package wal\nimport _ \"github.com/prometheus/client_golang/prometheus\"\n")), "only telemetry")
	wantOne(t, checkForeign(t, tree("client/a.go", "package client\nimport _ \"go.opentelemetry.io/otel/trace\"\n")), "only tracing")
	wantOne(t, checkForeign(t, tree("internal/storage/a_test.go", "package storage\nimport _ \"github.com/cockroachdb/pebble/v2\"\n")), "peers belong in bench")
	wantOne(t, checkForeign(t, tree("client/a.go", "package client\nimport _ \"go.etcd.io/bbolt\"\n")), "peers belong in bench")
	wantOne(t, checkForeign(t, tree("cmd/kvctl/a.go", "package main\nimport _ \"go.etcd.io/etcd/client/v3\"\n")), "peers belong in bench")
}

func TestOnlyVFSTouchesFiles(t *testing.T) {
	report(t, checkFiles(t, repository()))
	wantOne(t, checkFiles(t, tree("internal/wal/a.go", "package wal\nimport _ \"os\"\n")), `"os"`)
	wantOne(t, checkFiles(t, tree("internal/wal/a.go", "package wal\nvar _ = unix.Pwrite\n")), "Pwrite")
	wantOne(t, checkFiles(t, tree("internal/wal/a.go", "package wal\nvar _ = unix.Syscall\n")), "Syscall")
}
