// Package config is what an operator may say to the server: one struct, its defaults, and whether it makes sense.
//
// Every option has one name, the flag's. The same name is the key in the configuration file (`sync-interval: 20ms`)
// and, in capitals with underscores behind KVSERVER_, the environment variable (KVSERVER_SYNC_INTERVAL). A later source
// wins over an earlier one:
//
//	default  <  file (--config)  <  environment (KVSERVER_*)  <  flag
//
// Invariants: a name that is not an option is an error in every source, because a misspelt limit that silently keeps its
// default is found in the incident; Validate accepts exactly what the server can start with, and each of its errors names
// the option and says what to write instead.
//
// The package opens no socket and no data file, and knows nothing of gRPC. Of the engine it knows the limits, which stand there.
package config

import (
	"log/slog"
	"time"
)

// Config is the whole configuration of a server. A zero sub-limit (CacheSize, MemtableSize, SegmentSize, DiskReserve) is derived from
// Memory by the engine.
type Config struct {
	DataDir string // where the log and the data file live
	Listen  string // address of the gRPC listener
	HTTP    string // address of metrics, health and profiles; empty turns it off

	Memory       Size // bounds cache, memtables and log buffers together
	CacheSize    Size // of it, the page cache
	MemtableSize Size // of it, one memtable
	SegmentSize  Size // one log segment
	DiskReserve  Size // disk space kept for deletions and checkpoints; 0: derived
	PageSize     Size // of the data file; fixed when the store is created

	Durability   Durability    // what a write that names none gets
	SyncInterval time.Duration // how long an async commit may stay unsynced
	Retention    time.Duration // how long a past epoch stays readable with nobody holding it

	CheckpointInterval time.Duration // how often what is in memory is merged into the data file at the latest
	CheckpointWorkers  int           // goroutines that merge; 0: half the processors, all while writers wait
	GCInterval         time.Duration // how often the oldest readable epoch is recomputed
	IO                 IOWay         // how several reads at once are done
	DirectIO           bool          // the data file goes past the kernel's page cache

	LogLevel  slog.Level
	LogFormat LogFormat

	Limits Limits

	TxnIdleTimeout time.Duration // how long an interactive transaction may wait for its next request
	TxnTimeout     time.Duration // how long an interactive transaction may live

	ProbeInterval time.Duration // how often the server checks that a write of its own becomes durable; 0: never
	ProbeTimeout  time.Duration // how long such a write may take before health checks fail

	MessageTimeout time.Duration // how long a client may leave a message half-sent

	DrainTimeout     time.Duration // how long running requests may go on after SIGTERM
	CloseTimeout     time.Duration // how long the store may take to close after that
	SnapshotLeaseTTL time.Duration // how long a scan's resume token keeps its epoch readable

	SnapshotTimeout time.Duration // how long a scan may wait for its client before it loses its snapshot; 0: for ever
}

// Limits bound what clients may ask for, one request and all together.
type Limits struct {
	ValueSize        Size // one value
	BatchSize        Size // one request's keys and values
	BatchOps         int  // operations in one batch
	InflightRequests int  // requests that are being executed or await durability
	InflightBytes    Size // bytes of requests and answers in flight; 0: a quarter of Memory, BatchSize at least
	Connections      int
	Streams          int  // requests and streams open at once on one connection
	Transactions     int  // interactive transactions that are open
	TxnSize          Size // what one transaction's writes and reads hold; 0: BatchSize, as it commits as one batch
}

// Default is the configuration of a server that was told nothing.
func Default() Config {
	return Config{
		DataDir:      "./data",
		Listen:       "127.0.0.1:7400",
		HTTP:         "127.0.0.1:7401",
		Memory:       1 * GiB,
		PageSize:     8 * KiB,
		Durability:   DurabilitySync,
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

// Durability is when a write is acknowledged. It is a flag value.
type Durability string

// Durabilities.
const (
	DurabilitySync  Durability = "sync"  // once it is on stable storage
	DurabilityAsync Durability = "async" // once it is visible
)

// LogFormat is the shape of log lines. It is a flag value.
type LogFormat string

// Log formats.
const (
	LogText LogFormat = "text"
	LogJSON LogFormat = "json"
)

// IOWay is how batches of reads reach the device. It is a flag value.
type IOWay string

// Ways of I/O.
const (
	IOAuto  IOWay = "auto"  // io_uring where the kernel has it
	IOUring IOWay = "uring" // io_uring, or an error at start
	IOPread IOWay = "pread" // a pool of preads
)
