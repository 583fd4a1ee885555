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
	"log/slog"
	"time"
)

// Config is the whole configuration of a server. A zero sub-limit (CacheSize, MemtableSize,
// SegmentSize, DiskReserve) is derived from Memory by the engine.
//
// It has more than 20 fields because each option is one field. The limits of requests are the only group.
type Config struct {
	DataDir string // directory of the log and the data file
	Listen  string // address of the gRPC listener
	HTTP    string // address of metrics, health and profiles; empty turns it off

	Memory       Size // bounds cache, memtables and log buffers together
	CacheSize    Size // of it, the page cache
	MemtableSize Size // of it, one memtable
	SegmentSize  Size // one log segment
	DiskReserve  Size // disk space kept for deletions and checkpoints; 0: derived
	PageSize     Size // of the data file; fixed when the store is created

	Durability   Durability    // of a write that does not choose
	Transport    Transport     // what serves gRPC
	SyncInterval time.Duration // how long an async commit may stay unsynced
	Retention    time.Duration // how long a past epoch stays readable without a snapshot or a lease

	CheckpointInterval time.Duration // longest time between merges of memtables into the data file
	CheckpointWorkers  int           // goroutines that merge; 0: half the processors, all while writers wait
	GCInterval         time.Duration // how often the oldest readable epoch is recomputed
	IO                 IOMethod      // how batches of reads reach the device
	DirectIO           bool          // the data file bypasses the kernel's page cache

	LogLevel  slog.Level
	LogFormat LogFormat

	Limits Limits

	TxnIdleTimeout time.Duration // how long an interactive transaction may wait for its next request
	TxnTimeout     time.Duration // how long an interactive transaction may be open

	ProbeInterval time.Duration // how often the server checks that a write of its own becomes durable; 0: never
	ProbeTimeout  time.Duration // how long such a write may take before health checks fail

	MessageTimeout time.Duration // how long a client may leave a message incomplete, or its answers unread

	DrainTimeout     time.Duration // how long running requests may continue after SIGTERM
	CloseTimeout     time.Duration // how long the store may take to close after that
	SnapshotLeaseTTL time.Duration // how long a scan's resume token keeps its epoch readable

	SnapshotTimeout time.Duration // how long a scan may wait for its client before its snapshot is closed; 0: no limit
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
}

// Default is the configuration of a server without options.
func Default() Config {
	return Config{
		DataDir:      "./data",
		Listen:       "127.0.0.1:7400",
		HTTP:         "127.0.0.1:7401",
		Memory:       1 * GiB,
		PageSize:     8 * KiB,
		Durability:   DurabilitySync,
		Transport:    TransportGRPC,
		SyncInterval: 50 * time.Millisecond,

		CheckpointInterval: 5 * time.Minute,
		GCInterval:         100 * time.Millisecond,
		IO:                 IOAuto,

		LogLevel:  slog.LevelInfo,
		LogFormat: LogText,
		Limits: Limits{
			ValueSize:        16 * MiB,
			BatchSize:        64 * MiB,
			BatchOps:         1_000_000,
			InflightRequests: 8192,
			Connections:      1024,
			Streams:          1024,
			Transactions:     1024,
		},
		TxnIdleTimeout:   30 * time.Second,
		TxnTimeout:       5 * time.Minute,
		ProbeInterval:    5 * time.Second,
		ProbeTimeout:     10 * time.Second,
		MessageTimeout:   30 * time.Second,
		DrainTimeout:     10 * time.Second,
		CloseTimeout:     15 * time.Second,
		SnapshotLeaseTTL: time.Minute,

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
