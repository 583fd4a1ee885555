package config

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/epochkv/epochkv/internal/storage"
)

// envPrefix is the prefix of every environment variable of the server.
const envPrefix = "KVSERVER_"

// Invocation is the request of a command line: run with Config, or print something and exit.
type Invocation struct {
	Config  Config
	Help    string   // not empty: print it and exit
	Version bool     // print the version and exit
	Ignored []string // environment variables with the server's prefix that Kubernetes injects
}

// Load reads the sources in order and validates the result. args are without the program's name;
// environ is as from os.Environ.
func Load(args, environ []string) (Invocation, error) {
	// The command line is parsed twice: first to find --config and --help, and last so that it
	// wins.
	probe := newOptions()
	if err := probe.flags.Parse(args); err != nil {
		return Invocation{}, fmt.Errorf("%w; see --help", err)
	}
	switch {
	case probe.help:
		return Invocation{Help: probe.usage()}, nil
	case probe.version:
		return Invocation{Version: true}, nil
	case probe.flags.NArg() > 0:
		return Invocation{}, fmt.Errorf("unexpected argument %q; options begin with --, see --help", probe.flags.Arg(0))
	}
	o := newOptions()
	if err := o.fromEnviron(environ, "config"); err != nil {
		return Invocation{}, err
	}
	if file := cmp.Or(probe.file, o.file); file != "" {
		if err := o.fromFile(file); err != nil {
			return Invocation{}, err
		}
	}
	if err := o.fromEnviron(environ, ""); err != nil {
		return Invocation{}, err
	}
	if err := o.flags.Parse(args); err != nil {
		return Invocation{}, err
	}
	return Invocation{Config: o.config, Ignored: o.ignored}, o.config.Validate()
}

// options binds every option's name to its field. The flag set is the one table of names for all
// three sources.
type options struct {
	config  Config
	file    string
	help    bool
	version bool
	ignored []string
	flags   *pflag.FlagSet
}

func newOptions() *options {
	o := &options{config: Default(), flags: pflag.NewFlagSet("kvserver", pflag.ContinueOnError)}
	c, f := &o.config, o.flags
	derived := storage.DefaultSizes(int64(c.Memory)) // the texts name the engine's own values
	f.SortFlags = false
	f.Usage = func() {}
	f.StringVar(&c.DataDir, "data-dir", c.DataDir, "directory of the log and the data file; created if missing")
	f.StringVar(&c.Listen, "listen", c.Listen, "address of the gRPC service")
	f.StringVar(&c.HTTP, "http", c.HTTP, "address of /metrics, /healthz, /readyz and /debug/pprof/; empty for none")
	f.Var(&c.Memory, "memory", fmt.Sprintf("bound of page cache, memtables and log buffers together, at least %v; see docs/operations.md for resident memory", memoryMin))
	f.Var(&c.CacheSize, "cache-size", derivedText("page cache", derived.Cache))
	f.Var(&c.MemtableSize, "memtable-size", derivedText("one memtable", derived.Memtable))
	f.Var(&c.SegmentSize, "segment-size", derivedText(fmt.Sprintf("one log segment, %v to %v", segmentMin, segmentMax), derived.Segment))
	f.Var(&c.DiskReserve, "disk-reserve", derivedText(fmt.Sprintf("disk space kept for deletions and checkpoints when the disk is full, at least %v", reserveMin), derived.DiskReserve))
	f.Var(&c.PageSize, "page-size", fmt.Sprintf("page of the data file, a power of two, %v to %v; fixed when the store is created", pageMin, pageMax))
	f.Var((*choice)(&c.Durability), "durability", "when a write that does not choose is acknowledged: sync, on stable storage; async, when visible")
	f.DurationVar(&c.SyncInterval, "sync-interval", c.SyncInterval, "longest time that an async write stays unsynced")
	f.DurationVar(&c.Retention, "retention", c.Retention, "how long past epochs stay readable without a snapshot or a resume token")
	f.DurationVar(&c.CheckpointInterval, "checkpoint-interval", c.CheckpointInterval, "longest time between checkpoints while there are writes; full memtables start them sooner")
	f.IntVar(&c.CheckpointWorkers, "checkpoint-workers", c.CheckpointWorkers, "goroutines that merge a checkpoint; 0 is half the processors, and all while writers wait for it")
	f.DurationVar(&c.GCInterval, "gc-interval", c.GCInterval, "how often the min-visible epoch is recomputed")
	f.Var((*choice)(&c.IO), "io", "reads of several pages: auto, uring (io_uring) or pread")
	f.Var((*choice)(&c.Transport), "transport", "what serves gRPC: direct, where the goroutine that reads a connection executes its requests; or grpc-go, the transport of the gRPC library")
	f.BoolVar(&c.DirectIO, "direct-io", c.DirectIO, "read and write the data file without the kernel's page cache")
	f.Var(&c.Limits.ValueSize, "max-value-size", "longest value, at most --max-batch-size; a quarter of --page-size bounds keys")
	f.Var(&c.Limits.BatchSize, "max-batch-size", "most bytes of keys and values in one request and in the answer to BatchGet")
	f.IntVar(&c.Limits.BatchOps, "max-batch-ops", c.Limits.BatchOps, "most operations in one batch")
	f.IntVar(&c.Limits.InflightRequests, "max-inflight-requests", c.Limits.InflightRequests, "most requests executed at once, and engine sessions; further ones are refused with advice to retry")
	f.Var(&c.Limits.InflightBytes, "max-inflight-bytes", fmt.Sprintf("most bytes of requests and answers in flight; further ones are refused with advice to retry; "+
		"0 is a quarter of --memory or --max-batch-size, whichever is more (%v by default)", c.Inflight()))
	f.IntVar(&c.Limits.Connections, "max-connections", c.Limits.Connections, "most client connections")
	f.IntVar(&c.Limits.Streams, "max-streams", c.Limits.Streams, "most requests and streams open on one connection")
	f.IntVar(&c.Limits.Transactions, "max-transactions", c.Limits.Transactions, "most interactive transactions that are open; further ones are refused with advice to retry")
	f.Var(&c.Limits.TxnSize, "max-txn-size", "most memory that one transaction may hold for its writes, savepoints and reads; 0 is --max-batch-size")
	f.DurationVar(&c.TxnIdleTimeout, "txn-idle-timeout", c.TxnIdleTimeout, "how long an interactive transaction may wait for its next request before it is rolled back")
	f.DurationVar(&c.TxnTimeout, "txn-timeout", c.TxnTimeout, "how long an interactive transaction may be open before it is rolled back")
	f.DurationVar(&c.SnapshotLeaseTTL, "snapshot-lease-ttl", c.SnapshotLeaseTTL, "how long a resume token keeps its snapshot readable after its scan has ended")
	f.DurationVar(&c.SnapshotTimeout, "snapshot-timeout", c.SnapshotTimeout, "how long a scan or a verification may wait for its client to receive a page before its snapshot is closed; 0 is never")
	f.DurationVar(&c.ProbeInterval, "probe-interval", c.ProbeInterval, "how often the server checks that a write of its own becomes durable, every twelfth time while idle; 0 is never")
	f.DurationVar(&c.ProbeTimeout, "probe-timeout", c.ProbeTimeout, "how long such a write may take before health checks fail")
	f.DurationVar(&c.MessageTimeout, "message-timeout", c.MessageTimeout, "how long a client may leave a message incomplete before its request is ended, or take nothing of its answers before its connection is closed")
	f.DurationVar(&c.DrainTimeout, "drain-timeout", c.DrainTimeout, "how long running requests may finish after SIGTERM")
	f.DurationVar(&c.CloseTimeout, "close-timeout", c.CloseTimeout, "how long the store may take to close after that; then the server ends without it")
	f.TextVar(&levelText{&c.LogLevel}, "log-level", &levelText{&c.LogLevel}, "debug, info, warn or error")
	f.Var((*choice)(&c.LogFormat), "log-format", "text or json")
	f.StringVar(&o.file, "config", "", "YAML file with these names as keys")
	f.BoolVar(&o.version, "version", false, "print the version and exit")
	f.BoolVarP(&o.help, "help", "h", false, "print this help and exit")
	return o
}

// derivedText describes an option that is derived from --memory if it is 0.
func derivedText(text string, bytes int64) string {
	return fmt.Sprintf("%s; 0 derives it from --memory (%v by default)", text, Size(bytes))
}

// choice makes a string type a flag value; Validate knows its allowed words.
type choice string

func (c *choice) String() string { return string(*c) }

func (c *choice) Set(s string) error {
	*c = choice(strings.ToLower(s))
	return nil
}

func (c *choice) Type() string { return "word" }

// levelText reads a log level in any case and writes it in lower case.
type levelText struct{ level *slog.Level }

func (l *levelText) UnmarshalText(text []byte) error {
	if err := l.level.UnmarshalText(text); err != nil {
		return fmt.Errorf("%q is not a level; choose debug, info, warn or error", text)
	}
	return nil
}

func (l *levelText) MarshalText() ([]byte, error) {
	return bytes.ToLower([]byte(l.level.String())), nil
}

// fromEnviron reads the variables that begin with the prefix; if only is not empty, just that one.
func (o *options) fromEnviron(environ []string, only string) error {
	for _, entry := range environ {
		variable, value, _ := strings.Cut(entry, "=")
		name, ours := strings.CutPrefix(variable, envPrefix)
		if !ours {
			continue
		}
		name = strings.ReplaceAll(strings.ToLower(name), "_", "-")
		if only != "" && name != only {
			continue
		}
		if o.flags.Lookup(name) == nil && injected(variable, value) {
			o.ignored = append(o.ignored, variable)
			continue
		}
		if err := o.set(name, value); err != nil {
			return fmt.Errorf("environment variable %s: %w", variable, err)
		}
	}
	return nil
}

// fromFile reads a YAML mapping of option names to scalars. An empty file changes nothing.
func (o *options) fromFile(name string) error {
	text, err := os.ReadFile(name)
	if err != nil {
		return fmt.Errorf("configuration file: %w", err)
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(text, &doc); err != nil {
		return fmt.Errorf("configuration file %s: %w", name, err)
	}
	if len(doc.Content) == 0 {
		return nil
	}
	root := doc.Content[0]
	if root.Kind != yaml.MappingNode {
		return fmt.Errorf("configuration file %s:%d: want lines of the form `memory: 256MiB`", name, root.Line)
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(root.Content); i += 2 {
		key, value := root.Content[i], root.Content[i+1]
		err := o.set(key.Value, value.Value)
		switch {
		case value.Kind != yaml.ScalarNode:
			err = errors.New("want a single value")
		case key.Value == "config":
			err = errors.New("a configuration file cannot name another")
		case seen[key.Value]:
			err = errors.New("is given twice")
		}
		if err != nil {
			return fmt.Errorf("configuration file %s:%d: %s: %w", name, key.Line, key.Value, err)
		}
		seen[key.Value] = true
	}
	return nil
}

// errUnknownOption marks a name that is not an option.
var errUnknownOption = errors.New("unknown option")

func (o *options) set(name, value string) error {
	flag := o.flags.Lookup(name)
	if flag == nil || name == "help" || name == "version" {
		return fmt.Errorf("%w; the options are %s", errUnknownOption, strings.Join(o.names(), ", "))
	}
	return flag.Value.Set(value)
}

// names lists the options that a file may hold.
func (o *options) names() []string {
	var names []string
	o.flags.VisitAll(func(f *pflag.Flag) {
		if !slices.Contains([]string{"config", "help", "version"}, f.Name) {
			names = append(names, f.Name)
		}
	})
	return names
}

func (o *options) usage() string {
	return `kvserver runs EpochKV, a transactional multi-version key-value server.

Usage:
  kvserver [options]

Examples:
  kvserver
        serve ./data on 127.0.0.1:7400, metrics on 127.0.0.1:7401
  kvserver --data-dir /var/lib/epochkv --listen 0.0.0.0:7400 --memory 4GiB
        a larger server that other machines can reach
  kvserver --durability async --sync-interval 20ms
        acknowledge writes when visible; a crash may cost the last 20 ms
  KVSERVER_LOG_FORMAT=json kvserver --config /etc/epochkv.yaml
        options from a file, the environment and flags; the later source wins

Options (in a file: "memory: 4GiB"; in the environment: KVSERVER_MEMORY=4GiB):
` + o.flags.FlagUsagesWrapped(110)
}

// LogValue is the effective configuration, under the options' names.
func (c Config) LogValue() slog.Value {
	o := newOptions()
	o.config = c
	var attrs []slog.Attr
	for _, name := range o.names() {
		attrs = append(attrs, slog.String(name, o.flags.Lookup(name).Value.String()))
	}
	return slog.GroupValue(attrs...)
}
