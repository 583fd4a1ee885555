package peers

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/client"
)

// kind is a way to run a server and to speak to it.
type kind struct {
	name        string
	binary      func(*harness.Run) (string, error) // Absent where there is none
	arguments   func(at place) []string
	dial        dialer
	connections int
	feed        feedDialer // nil where there are no watches

	durability durability                           // of a write that is answered
	witness    *witness                             // of its syncs; nil where nothing is stored
	check      func(context.Context, *server) error // that it runs as it was told
}

// place is where a server runs: a directory and two addresses, of which servers use the second as they like.
type place struct{ dir, address, second string }

type dialer func(address string) (store, error)

// hollow says that the server answers from constants: nothing can be read back.
func (k kind) hollow() bool { return k.durability == none }

type durability int

const (
	none     durability = iota // nothing is stored
	deferred                   // synced soon after the answer
	durable                    // synced before the answer
)

// grpcConnections carry all callers of a gRPC client, for each server the same.
const grpcConnections = 2

func epochKVKind() kind { return epochKVOn("epochkv", "direct") }

// epochKVGRPCKind is EpochKV with the transport of the gRPC library.
func epochKVGRPCKind() kind { return epochKVOn("epochkv-grpc-go", "grpc-go") }

func epochKVOn(name, transport string) kind {
	return kind{
		name: name, binary: build("kvserver", "github.com/epochkv/epochkv/cmd/kvserver", ""),
		arguments: func(at place) []string {
			return []string{"--data-dir", filepath.Join(at.dir, "data"), "--listen", at.address, "--http", at.second, "--transport", transport}
		},
		dial: dialEpochKV(client.Sync()), connections: grpcConnections, feed: dialEpochKVFeed, durability: durable,
		witness: syncsByMetric(func(at place) string { return at.second }, "kvserver_log_fsync_duration_seconds_count"),
	}
}

func epochKVAsyncKind() kind {
	k := epochKVKind()
	k.name, k.dial, k.durability = "epochkv-async", dialEpochKV(client.Async()), deferred
	return k
}

func etcdKind() kind {
	return kind{
		name: "etcd", binary: etcdBinary,
		arguments: func(at place) []string {
			self, peer := "http://"+at.address, "http://"+at.second
			return []string{
				"--data-dir", filepath.Join(at.dir, "data"), "--listen-client-urls", self, "--advertise-client-urls", self,
				"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default=" + peer,
				// The default of 2 GiB would end a long run: nothing compacts old revisions unless it is told to.
				"--quota-backend-bytes", fmt.Sprint(8 << 30), "--log-level", "error",
			}
		},
		dial: dialEtcd, connections: grpcConnections, feed: dialEtcdFeed, durability: durable,
		witness: syncsByMetric(func(at place) string { return at.address }, "etcd_disk_wal_fsync_duration_seconds_count"),
	}
}

// redisKind keeps the append-only file by one of Redis' policies.
func redisKind(policy string, d durability, indexed bool) kind {
	return kind{
		name: "redis-" + policy, binary: redisBinary,
		arguments: func(at place) []string {
			host, port, _ := strings.Cut(at.address, ":")
			return []string{
				"--bind", host, "--port", port, "--dir", at.dir, "--appendonly", "yes", "--appendfsync", policy,
				"--save", "", // snapshots beside the file would be a second copy, which no other server writes
			}
		},
		dial: dialRedis(indexed), connections: 1, durability: d, witness: &pagesWritten, check: redisSyncsAs(policy),
	}
}

func echoKind() kind {
	return kind{
		name: "echo", binary: build("echoserver", "github.com/epochkv/epochkv/bench/peers/echoserver", ""),
		arguments: func(at place) []string { return []string{at.address} },
		dial:      dialEpochKV(client.Sync()), connections: grpcConnections, durability: none,
	}
}

// built are the programs that this process has built, so that it builds each once.
var built sync.Map // name -> func() (string, error)

// build compiles a package of this module, or of another in a directory below bench, into the scratch directory.
func build(name, path, module string) func(*harness.Run) (string, error) {
	return func(r *harness.Run) (string, error) {
		once, _ := built.LoadOrStore(name, sync.OnceValues(func() (string, error) {
			return compile(r.Context, filepath.Dir(r.Dir), name, path, module)
		}))
		return once.(func() (string, error))()
	}
}

func compile(ctx context.Context, scratch, name, path, module string) (string, error) {
	binary, err := filepath.Abs(filepath.Join(scratch, "bin", name))
	if err != nil {
		return "", err
	}
	in, err := exec.CommandContext(ctx, "go", "list", "-f", "{{.Dir}}", "github.com/epochkv/epochkv/bench/peers").Output()
	if err != nil {
		return "", fmt.Errorf("where the benchmarks lie: %w", err)
	}
	arguments := []string{"-C", filepath.Join(strings.TrimSpace(string(in)), module), "build", "-o", binary}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "-tags" { // this program's own: make bench-smoke has compiled everything with them, Pebble too, which knows one of them
				arguments = append(arguments, "-tags", s.Value)
			}
		}
	}
	arguments = append(arguments, path)
	out, err := exec.CommandContext(ctx, "go", arguments...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go %s: %w: %s", strings.Join(arguments, " "), err, out)
	}
	return binary, nil
}

// etcdBinary builds etcd from its module. The first build takes minutes on a small machine, so that smoke runs do without.
func etcdBinary(r *harness.Run) (string, error) {
	if r.Smoke && os.Getenv("PEERS_ETCD") == "" {
		return "", fmt.Errorf("%w: its first build takes minutes, which a smoke run does not wait for (PEERS_ETCD=1 makes it)", harness.ErrAbsent)
	}
	return build("etcdserver", ".", "etcdserver")(r)
}

func redisBinary(*harness.Run) (string, error) {
	path, err := exec.LookPath("redis-server")
	if err != nil {
		return "", fmt.Errorf("%w: redis-server is not in PATH (Debian package redis-server)", harness.ErrAbsent)
	}
	return path, nil
}
