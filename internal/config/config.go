// Package config is the configuration of the server: one struct, its defaults and its validation.
//
// Every option has one name, the flag's. The same name is the key in the configuration file
// (`sync-interval: 20ms`) and, in capitals with underscores after KVSERVER_, the environment
// variable (KVSERVER_SYNC_INTERVAL). A later source overrides an earlier one:
//
//	default  <  file (--config)  <  environment (KVSERVER_*)  <  flag
//
// Invariants: a name that is not an option is an error in every source, because a misspelt limit
// that silently keeps its default would be found in an incident; Validate accepts exactly the
// configurations that the server can start with, and each of its errors names the option and says
// what to write.
//
// The package opens no socket and no data file, and does not know gRPC. It takes the engine's
// limits from the engine.
package config

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/spf13/pflag"

	"github.com/epochkv/epochkv/internal/audit"
	"github.com/epochkv/epochkv/internal/storage"
)

// Config is the whole configuration of a server. A zero sub-limit (CacheSize, MemtableSize,
// SegmentSize, DiskReserve) is derived from Memory by the engine.
//
// It has more than 20 fields because each option is one field. The limits of requests are the only group.
type Config struct {
	DataDir string // directory of the log and the data file
	Listen  string // address of the gRPC listener
	HTTP    string // address of metrics, health, profiles and the console; empty turns it off
	Console Console

	Memory       Size // bounds cache, memtables and log buffers together
	CacheSize    Size // of it, the page cache
	MemtableSize Size // of it, one memtable
	SegmentSize  Size // one log segment
	DiskReserve  Size // disk space kept for deletions and checkpoints; 0: derived
	PageSize     Size // of the data file; fixed when the store is created

	Durability    Durability    // of a write that does not choose
	Transport     Transport     // what serves gRPC
	SyncInterval  time.Duration // how long an async commit may stay unsynced
	Retention     time.Duration // how long a past epoch stays readable without a snapshot or a lease
	RetentionSize Size          // most that is logged since the oldest epoch that Retention keeps; 0: any amount

	RequestIDWindow time.Duration // how long the ids of requests are known
	RequestIDSize   Size          // of log and tree, that records of request ids may take

	CheckpointInterval time.Duration // longest time between merges of memtables into the data file
	CheckpointWorkers  int           // goroutines that merge; 0: half the processors, all while writers wait
	GCInterval         time.Duration // how often the oldest readable epoch is recomputed
	IO                 IOMethod      // how batches of reads reach the device
	DirectIO           bool          // the data file bypasses the kernel's page cache

	LogLevel  slog.Level
	LogFormat LogFormat

	SlowRequests SlowRequests

	Traces Traces

	Audit Audit

	TLS TLS

	Limits Limits

	Feed Feed

	Archive Archive

	BackupMaxAge time.Duration // of the last backup, before that is a condition; 0: any age

	TxnIdleTimeout time.Duration // how long an interactive transaction may wait for its next request
	TxnTimeout     time.Duration // how long an interactive transaction may be open

	ProbeInterval time.Duration // how often the server checks that a write of its own becomes durable; 0: never
	ProbeTimeout  time.Duration // how long such a write may take before health checks fail

	MessageTimeout time.Duration // how long a client may leave a message incomplete, or its answers unread

	DrainTimeout     time.Duration // how long running requests may continue after SIGTERM
	CloseTimeout     time.Duration // how long the store may take to close after that
	SnapshotLeaseTTL time.Duration // how long a scan's resume token keeps its epoch readable

	SnapshotTimeout time.Duration // how long a scan or a bulk load may wait for its client before it is ended; 0: no limit

	origins *origins // of Load; nil: all options have their defaults
	sources *sources // of Load; nil: it was made in another way
}

// Limits bound single requests, and all requests together.
type Limits struct {
	ValueSize        Size // one value
	BatchSize        Size // one request's keys and values
	BatchOps         int  // operations in one batch
	InflightRequests int  // requests that are being executed or await durability
	InflightBytes    Size // bytes of requests and answers in flight; 0: a quarter of Memory, BatchSize at least
	Connections      int
	Streams          int  // requests and streams open at once on one connection
	Transactions     int  // interactive transactions that are open
	TxnSize          Size // memory of one transaction's writes and reads; 0: BatchSize, as it commits as one batch
	Leases           int  // that exist at once
	LockWaiters      int  // requests that wait for locks or observe them
}

// Feed is the change stream and what it keeps.
type Feed struct {
	Retention        time.Duration // how long the log is kept for watches that come back
	LogSize          Size          // of it, at most
	Memory           Size          // decoded commits and the queues of watches
	SyncInterval     time.Duration // how long an async commit may stay unsynced while there is a watch
	CatchUpReaders   int           // that read the log for lagging watches
	CatchUpBandwidth Size          // of log that they read in a second, together
	StallTimeout     time.Duration // how long a watch's client may take nothing
	Watches          int           // open at once
	WatchesPerStream int
	StreamsPerClient int // streams of watches from one address
}

// Default is the configuration of a server without options.
func Default() Config {
	return Config{
		DataDir:      "./data",
		Listen:       "127.0.0.1:7400",
		HTTP:         "127.0.0.1:7401",
		Console:      ConsoleRead,
		Memory:       1 * GiB,
		PageSize:     8 * KiB,
		Durability:   DurabilitySync,
		Transport:    TransportDirect,
		SyncInterval: 50 * time.Millisecond,

		CheckpointInterval: 5 * time.Minute,
		GCInterval:         100 * time.Millisecond,
		IO:                 IOAuto,

		LogLevel:     slog.LevelInfo,
		LogFormat:    LogText,
		Audit:        Audit{Keys: audit.KeysHash, Full: audit.FullDrop, FileSize: 64 * MiB, Files: 8, QueueSize: 4 * MiB},
		SlowRequests: SlowRequests{Threshold: 100 * time.Millisecond, Entries: 128, Size: 64 * KiB},
		Traces:       Traces{Ratio: 0.01},

		TLS: TLS{ClientAuth: ClientAuthNone, ClientUser: ClientUserNone, Min: TLS13},
		Limits: Limits{
			ValueSize:        16 * MiB,
			BatchSize:        64 * MiB,
			BatchOps:         200_000,
			InflightRequests: 8192,
			Connections:      1024,
			Streams:          1024,
			Transactions:     1024,
			Leases:           1_000_000,
			LockWaiters:      10_000,
		},
		Feed: Feed{
			Retention:        10 * time.Minute,
			LogSize:          1 * GiB,
			Memory:           64 * MiB,
			SyncInterval:     10 * time.Millisecond,
			CatchUpReaders:   4,
			CatchUpBandwidth: 64 * MiB,
			StallTimeout:     10 * time.Minute,
			Watches:          100_000,
			WatchesPerStream: 10_000,
			StreamsPerClient: 1000,
		},
		Archive:          Archive{Interval: 4 * time.Second, FileSize: 16 * MiB, Merge: true, OnLowDisk: ArchiveGap},
		TxnIdleTimeout:   30 * time.Second,
		TxnTimeout:       5 * time.Minute,
		ProbeInterval:    5 * time.Second,
		ProbeTimeout:     10 * time.Second,
		MessageTimeout:   30 * time.Second,
		DrainTimeout:     10 * time.Second,
		CloseTimeout:     15 * time.Second,
		SnapshotLeaseTTL: time.Minute,
		RequestIDWindow:  15 * time.Minute,
		RequestIDSize:    GiB,

		SnapshotTimeout: 10 * time.Minute,
	}
}

// Transport is what serves gRPC on the listening address. It is a flag value.
type Transport string

// The transports.
const (
	TransportDirect Transport = "direct"  // one goroutine a connection executes its unary requests
	TransportGRPC   Transport = "grpc-go" // the one of the gRPC library, with a goroutine a request
)

// Console is what the console on the HTTP listener can do. It is a flag value.
type Console string

// Consoles.
const (
	ConsoleOff  Console = "off"
	ConsoleRead Console = "read" // shows
	ConsoleFull Console = "full" // also ends transactions, snapshots, watches and holds
)

// Durability is when a write is acknowledged. It is a flag value.
type Durability string

// Durabilities.
const (
	DurabilitySync  Durability = "sync"  // when it is on stable storage
	DurabilityAsync Durability = "async" // when it is visible
)

// LogFormat is the shape of log lines. It is a flag value.
type LogFormat string

// Log formats.
const (
	LogText LogFormat = "text"
	LogJSON LogFormat = "json"
)

// IOMethod is how batches of reads reach the device. It is a flag value.
type IOMethod string

// Methods of I/O.
const (
	IOAuto  IOMethod = "auto"  // io_uring where the kernel has it
	IOUring IOMethod = "uring" // io_uring, or an error at start
	IOPread IOMethod = "pread" // a pool of preads
)

// newOptions binds each option to its field. With the struct and its defaults above, this file has
// all that an option is, except its check (validate.go).
func newOptions() *options {
	o := &options{config: Default(), origins: origins{}, flags: pflag.NewFlagSet("kvserver", pflag.ContinueOnError)}
	c, f := &o.config, o.flags
	derived := storage.DefaultSizes(int64(c.Memory)) // the texts name the engine's own values
	f.SortFlags = false
	f.Usage = func() {}
	f.StringVar(&c.DataDir, "data-dir", c.DataDir, "directory of the log and the data file; created if missing")
	f.StringVar(&c.Listen, "listen", c.Listen, "address of the gRPC service")
	f.StringVar(&c.HTTP, "http", c.HTTP, "address of /console/, /metrics, /healthz, /readyz and /debug/pprof/; empty for none")
	f.Var((*choice)(&c.Console), "console", "pages for browsers at /console/: off; read, which change nothing; or full, which can also end transactions, snapshots, watches, holds, leases, locks and tokens, and disable users")
	f.StringVar(&c.TLS.Cert, "tls-cert", "", "PEM file with the certificate of both listeners and its intermediates; empty for no TLS. It is read again when it changes, and on SIGHUP")
	f.StringVar(&c.TLS.Key, "tls-key", "", "PEM file with the key of --tls-cert")
	f.StringVar(&c.TLS.ClientCA, "tls-client-ca", "", "PEM file with the authorities that sign client certificates, one or several")
	f.Var((*choice)(&c.TLS.ClientAuth), "tls-client-auth", "client certificates: none; request, valid if the client has one; or require")
	f.Var((*choice)(&c.TLS.ClientUser), "tls-client-user", "which name of a client certificate is that of its user: none; san-uri or san-dns, the only one of the kind; or cn, the common name")
	f.StringVar(&c.TLS.ClientCRL, "tls-client-crl", c.TLS.ClientCRL, "PEM file of revocation lists, signed by authorities of --tls-client-ca; clients whose certificates are in them are refused")
	f.DurationVar(&c.TLS.MaxConnectionAge, "tls-max-connection-age", c.TLS.MaxConnectionAge, "age from which on a connection over TLS is ended gracefully, so that its client's certificate is checked again; 0: never")
	f.Var((*choice)(&c.TLS.Min), "tls-min", "lowest version of TLS: 1.2 or 1.3")
	f.BoolVar(&c.TLS.Insecure, "insecure", false, "let other machines reach a listener that has no TLS, or neither requires client certificates nor checks users, with a warning at each start")
	f.Var(&c.Memory, "memory", fmt.Sprintf("bound of page cache, memtables and log buffers together, at least %v; see docs/operations.md for resident memory", memoryMin))
	f.Var(&c.CacheSize, "cache-size", derivedText("page cache", derived.Cache))
	f.Var(&c.MemtableSize, "memtable-size", derivedText("one memtable, a 32nd part of --memory without the cache", derived.Memtable))
	f.Var(&c.SegmentSize, "segment-size", derivedText(fmt.Sprintf("one log segment, %v to %v", segmentMin, segmentMax), derived.Segment))
	f.Var(&c.DiskReserve, "disk-reserve", derivedText(fmt.Sprintf("disk space kept for deletions and checkpoints when the disk is full, at least %v", reserveMin), derived.DiskReserve))
	f.Var(&c.PageSize, "page-size", fmt.Sprintf("page of the data file, a power of two, %v to %v; fixed when the store is created", pageMin, pageMax))
	f.Var((*choice)(&c.Durability), "durability", "when a write that does not choose is acknowledged: sync, on stable storage; async, when visible")
	f.DurationVar(&c.SyncInterval, "sync-interval", c.SyncInterval, "longest time that an async write stays unsynced")
	f.DurationVar(&c.Retention, "retention", c.Retention, "how long past epochs stay readable without a snapshot or a resume token")
	f.Var(&c.RetentionSize, "retention-size", "most that may be written since the oldest epoch that --retention keeps readable, in bytes of the log; 0 is any amount")
	f.DurationVar(&c.RequestIDWindow, "request-id-window", c.RequestIDWindow, "how long the server knows which requests with a request_id it has executed; older ids are refused")
	f.Var(&c.RequestIDSize, "request-id-size", "most disk space for what it knows of them, about; more shortens the window")
	f.DurationVar(&c.CheckpointInterval, "checkpoint-interval", c.CheckpointInterval, "longest time between checkpoints while there are writes; full memtables start them sooner")
	f.IntVar(&c.CheckpointWorkers, "checkpoint-workers", c.CheckpointWorkers, "goroutines that merge a checkpoint; 0 is half the processors, and all while writers wait for it")
	f.DurationVar(&c.GCInterval, "gc-interval", c.GCInterval, "how often the min-visible epoch is recomputed")
	f.Var((*choice)(&c.IO), "io", "reads of several pages: auto, uring (io_uring) or pread")
	f.Var((*choice)(&c.Transport), "transport", "what serves gRPC: direct, where the goroutine that reads a connection executes its requests; or grpc-go, the transport of the gRPC library, which is slower")
	f.BoolVar(&c.DirectIO, "direct-io", c.DirectIO, "read and write the data file without the kernel's page cache")
	f.Var(&c.Limits.ValueSize, "max-value-size", "longest value, at most --max-batch-size; a quarter of --page-size bounds keys")
	f.Var(&c.Limits.BatchSize, "max-batch-size", "most bytes of keys and values in one request and in the answer to BatchGet")
	f.IntVar(&c.Limits.BatchOps, "max-batch-ops", c.Limits.BatchOps, "most operations in one batch")
	f.IntVar(&c.Limits.InflightRequests, "max-inflight-requests", c.Limits.InflightRequests, "most requests executed at once, and of scans a quarter of it; further ones are refused with advice to retry")
	f.Var(&c.Limits.InflightBytes, "max-inflight-bytes", fmt.Sprintf("most bytes of requests and answers in flight; further ones are refused with advice to retry; "+
		"0 is a quarter of --memory or --max-batch-size, whichever is more (%v by default)", c.Inflight()))
	f.IntVar(&c.Limits.Connections, "max-connections", c.Limits.Connections, "most client connections")
	f.IntVar(&c.Limits.Streams, "max-streams", c.Limits.Streams, "most requests and streams open on one connection")
	f.IntVar(&c.Limits.Transactions, "max-transactions", c.Limits.Transactions, "most interactive transactions that are open; further ones are refused with advice to retry")
	f.IntVar(&c.Limits.Leases, "max-leases", c.Limits.Leases, "most leases that exist at once; each takes 300 to 640 bytes of memory")
	f.IntVar(&c.Limits.LockWaiters, "max-lock-waiters", c.Limits.LockWaiters, "most requests that wait for locks or observe them at once, of which those from one client's address leave as many free as they are; further ones are refused with advice to retry")
	f.Var(&c.Limits.TxnSize, "max-txn-size", "most memory that one transaction may hold for its writes, savepoints and reads; 0 is --max-batch-size")
	f.DurationVar(&c.TxnIdleTimeout, "txn-idle-timeout", c.TxnIdleTimeout, "how long an interactive transaction may wait for its next request before it is rolled back")
	f.DurationVar(&c.TxnTimeout, "txn-timeout", c.TxnTimeout, "how long an interactive transaction may be open before it is rolled back")
	f.DurationVar(&c.SnapshotLeaseTTL, "snapshot-lease-ttl", c.SnapshotLeaseTTL, "how long a resume token keeps its snapshot readable after its scan has ended")
	f.DurationVar(&c.SnapshotTimeout, "snapshot-timeout", c.SnapshotTimeout, "how long a scan or a verification may wait for its client to receive a page, and a bulk load for its client's next entries, before it ends; 0 is never")
	f.DurationVar(&c.Feed.Retention, "change-log-retention", c.Feed.Retention, "how long the log is kept for watches that come back, if --change-log-size is not reached; 0 keeps nothing for them")
	f.Var(&c.Feed.LogSize, "change-log-size", "most of the log that is kept for watches that come back; less when the disk is full")
	f.Var(&c.Feed.Memory, "feed-memory", "memory for decoded commits and for the queues of watches, beside --memory")
	f.DurationVar(&c.Feed.SyncInterval, "feed-sync-interval", c.Feed.SyncInterval, "longest time that an async write stays unsynced while there is a watch")
	f.IntVar(&c.Feed.CatchUpReaders, "feed-catchup-readers", c.Feed.CatchUpReaders, "readers of the log for watches that lag")
	f.Var(&c.Feed.CatchUpBandwidth, "feed-catchup-bandwidth", "most bytes of log that they read in a second, together; clients take turns")
	f.DurationVar(&c.Feed.StallTimeout, "watch-stall-timeout", c.Feed.StallTimeout, "how long the client of a watch may take nothing before its stream is ended")
	f.IntVar(&c.Feed.Watches, "max-watches", c.Feed.Watches, "most watches that are open; further ones are refused, and of one client's address those that leave less free than it has")
	f.IntVar(&c.Feed.WatchesPerStream, "max-watches-per-stream", c.Feed.WatchesPerStream, "most watches that are open on one stream")
	f.IntVar(&c.Feed.StreamsPerClient, "max-watch-streams-per-client", c.Feed.StreamsPerClient, "most streams of watches from one client's address; further ones are refused")
	f.DurationVar(&c.ProbeInterval, "probe-interval", c.ProbeInterval, "how often the server checks that a write of its own becomes durable, every twelfth time while idle; 0 is never")
	f.DurationVar(&c.ProbeTimeout, "probe-timeout", c.ProbeTimeout, "how long such a write may take before health checks fail")
	f.DurationVar(&c.MessageTimeout, "message-timeout", c.MessageTimeout, "how long a client may leave a message incomplete before its request is ended, or take nothing of its answers before its connection is closed")
	f.DurationVar(&c.DrainTimeout, "drain-timeout", c.DrainTimeout, "how long running requests may finish after SIGTERM")
	f.DurationVar(&c.CloseTimeout, "close-timeout", c.CloseTimeout, "how long the store may take to close after that; then the server ends without it")
	f.TextVar(&levelText{&c.LogLevel}, "log-level", &levelText{&c.LogLevel}, "debug, info, warn or error")
	f.Var((*choice)(&c.LogFormat), "log-format", "text or json")
	f.StringVar(&o.file, "config", "", "YAML file with these names as keys")
	c.SlowRequests.flags(f)
	c.Traces.flags(f)
	c.Archive.flags(f)
	f.DurationVar(&c.BackupMaxAge, "backup-max-age", c.BackupMaxAge, "age of the last backup from which on the condition backup-old says so; 0 is any age")
	c.Audit.flags(f)
	f.BoolVar(&o.version, "version", false, "print the version and exit")
	f.BoolVarP(&o.help, "help", "h", false, "print this help and exit")
	return o
}

// derivedText describes an option that is derived from --memory if it is 0.
func derivedText(text string, bytes int64) string {
	return fmt.Sprintf("%s; 0 derives it from --memory (%v by default)", text, Size(bytes))
}
