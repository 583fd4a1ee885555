package config

import (
	"errors"
	"fmt"
	"math/bits"
	"net"
	"time"

	"github.com/epochkv/epochkv/internal/storage"
)

// Bounds of the values that Validate accepts, each with its reason. Tests try each bound, and one
// past it.
const (
	memoryMin   = 32 * MiB // two memtables, the log's buffers and a useful cache
	pageMin     = 4 * KiB  // one device block
	pageMax     = 64 * KiB // offsets inside a page are 16 bits
	segmentMin  = 64 * KiB // below, every few records cause a rotation
	segmentMax  = Size(storage.SegmentBytesMax)
	memtableMin = 256 * KiB        // below, the arena's fixed part is larger than its content
	reserveMin  = 1 * MiB          // below, a checkpoint of a few deletions would not fit
	sizeMax     = 1024 * TiB       // more than any machine has; sums of several cannot overflow
	workersMax  = 64               // more would only wait for each other
	countMax    = 1 << 24          // more would overflow the packed in-flight word
	durationMin = time.Millisecond // below, a timer costs more than the work that it starts

	requestIDSizeMin = MiB
	feedMemoryMin    = 1 * MiB // below, a few commits fill it and every watch lags
)

// Validate reports everything that is wrong with c, each with its option's name and a remedy,
// joined.
func (c *Config) Validate() error {
	v := &validation{}
	v.check(c.DataDir != "", "data-dir", "is empty; name a directory")
	v.address("listen", c.Listen)
	if c.HTTP != "" {
		v.address("http", c.HTTP)
		v.check(c.HTTP != c.Listen || zeroPort(c.HTTP), "http", "is the address of --listen; choose another port")
	}
	v.check(c.Console == ConsoleOff || c.Console == ConsoleRead || c.Console == ConsoleFull, "console",
		fmt.Sprintf("is %q; choose off, read or full", c.Console))
	c.validateTLS(v)
	c.validateMemory(v)
	v.check(c.Durability == DurabilitySync || c.Durability == DurabilityAsync, "durability",
		fmt.Sprintf("is %q; choose sync or async", c.Durability))
	v.check(c.LogFormat == LogText || c.LogFormat == LogJSON, "log-format",
		fmt.Sprintf("is %q; choose text or json", c.LogFormat))
	v.duration("sync-interval", c.SyncInterval, durationMin, time.Minute)
	v.duration("retention", c.Retention, 0, 365*24*time.Hour)
	v.check(c.RetentionSize >= 0, "retention-size", fmt.Sprintf("is %v; give 0 or more", c.RetentionSize))
	v.duration("request-id-window", c.RequestIDWindow, time.Minute, 365*24*time.Hour)
	v.check(c.RequestIDSize >= requestIDSizeMin, "request-id-size", fmt.Sprintf("is %v; give at least %v", c.RequestIDSize, requestIDSizeMin))
	v.duration("checkpoint-interval", c.CheckpointInterval, time.Second, 24*time.Hour)
	v.duration("gc-interval", c.GCInterval, durationMin, time.Minute)
	v.check(c.CheckpointWorkers >= 0 && c.CheckpointWorkers <= workersMax, "checkpoint-workers",
		fmt.Sprintf("is %d; give 0 to %d", c.CheckpointWorkers, workersMax))
	v.check(c.Transport == TransportDirect || c.Transport == TransportGRPC, "transport",
		fmt.Sprintf("is %q; choose direct or grpc-go", c.Transport))
	v.check(c.IO == IOAuto || c.IO == IOUring || c.IO == IOPread, "io", fmt.Sprintf("is %q; choose auto, uring or pread", c.IO))
	if c.ProbeInterval != 0 {
		v.duration("probe-interval", c.ProbeInterval, 10*durationMin, time.Hour)
	}
	v.duration("probe-timeout", c.ProbeTimeout, 10*durationMin, time.Hour)
	v.duration("message-timeout", c.MessageTimeout, 10*durationMin, time.Hour)
	v.duration("drain-timeout", c.DrainTimeout, 0, time.Hour)
	v.duration("close-timeout", c.CloseTimeout, 100*durationMin, time.Hour)
	v.duration("snapshot-lease-ttl", c.SnapshotLeaseTTL, time.Second, 24*time.Hour)
	if c.SnapshotTimeout != 0 {
		v.duration("snapshot-timeout", c.SnapshotTimeout, 10*durationMin, 365*24*time.Hour)
	}
	v.duration("txn-idle-timeout", c.TxnIdleTimeout, durationMin, 24*time.Hour)
	v.duration("txn-timeout", c.TxnTimeout, durationMin, 24*time.Hour)
	c.validateLimits(v)
	c.validateFeed(v)
	c.SlowRequests.validate(v)
	c.Traces.validate(v)
	c.Archive.validate(v)
	v.duration("backup-max-age", c.BackupMaxAge, 0, 10*365*24*time.Hour)
	c.Audit.validate(v)
	return errors.Join(v.errs...)
}

func (c *Config) validateMemory(v *validation) {
	v.size("memory", c.Memory, memoryMin, sizeMax)
	v.size("page-size", c.PageSize, pageMin, pageMax)
	v.check(bits.OnesCount64(uint64(c.PageSize)) == 1, "page-size", fmt.Sprintf("is %v; it must be a power of two", c.PageSize))
	if c.SegmentSize != 0 {
		v.size("segment-size", c.SegmentSize, segmentMin, segmentMax)
	}
	if c.DiskReserve != 0 {
		v.size("disk-reserve", c.DiskReserve, reserveMin, sizeMax)
	}
	if c.MemtableSize != 0 {
		v.size("memtable-size", c.MemtableSize, memtableMin, sizeMax)
	}
	if most := Size(storage.CacheBytesMax(int(min(c.PageSize, pageMax)))); c.CacheSize > most {
		v.check(false, "cache-size", fmt.Sprintf("is %v; with pages of %v it can be up to %d bytes", c.CacheSize, c.PageSize, int64(most)))
		return
	}
	if c.Memory > sizeMax || c.MemtableSize > sizeMax || c.SegmentSize > sizeMax {
		return // their sum may overflow
	}
	// Two memtables at least: one fills while the other is written to the tree.
	v.check(c.CacheSize+2*c.MemtableSize+c.SegmentSize <= c.Memory, "memory", fmt.Sprintf(
		"is %v, but --cache-size, two of --memtable-size and --segment-size need %v; raise --memory or lower them",
		c.Memory, c.CacheSize+2*c.MemtableSize+c.SegmentSize))
}

func (c *Config) validateFeed(v *validation) {
	f := &c.Feed
	v.duration("change-log-retention", f.Retention, 0, 365*24*time.Hour)
	v.size("change-log-size", f.LogSize, MiB, sizeMax)
	v.size("feed-memory", f.Memory, feedMemoryMin, sizeMax)
	v.duration("feed-sync-interval", f.SyncInterval, durationMin, time.Minute)
	v.check(f.CatchUpReaders >= 1 && f.CatchUpReaders <= workersMax, "feed-catchup-readers",
		fmt.Sprintf("is %d; give 1 to %d", f.CatchUpReaders, workersMax))
	v.size("feed-catchup-bandwidth", f.CatchUpBandwidth, MiB, sizeMax)
	v.duration("watch-stall-timeout", f.StallTimeout, 10*durationMin, 365*24*time.Hour)
	v.count("max-watches", f.Watches)
	v.count("max-watches-per-stream", f.WatchesPerStream)
	v.count("max-watch-streams-per-client", f.StreamsPerClient)
}

func (c *Config) validateLimits(v *validation) {
	l := &c.Limits
	v.size("max-value-size", l.ValueSize, 1, batchMax(1))
	v.size("max-batch-size", l.BatchSize, 1, batchMax(1))
	if l.BatchSize <= batchMax(1) && l.BatchOps >= 1 && l.BatchOps <= countMax {
		v.check(l.BatchSize <= batchMax(l.BatchOps), "max-batch-size", fmt.Sprintf(
			"is %v; a commit of --max-batch-ops %d operations fits into a log record up to %d bytes of keys and values; lower one of them",
			l.BatchSize, l.BatchOps, int64(batchMax(l.BatchOps))))
	}
	v.check(l.BatchSize >= l.ValueSize, "max-batch-size",
		fmt.Sprintf("is %v, below --max-value-size %v; a value must fit into a batch", l.BatchSize, l.ValueSize))
	v.check(l.InflightBytes == 0 || l.InflightBytes >= l.BatchSize, "max-inflight-bytes",
		fmt.Sprintf("is %v, below --max-batch-size %v; such a batch could never be admitted", l.InflightBytes, l.BatchSize))
	v.check(l.InflightBytes <= sizeMax, "max-inflight-bytes", fmt.Sprintf("is %v; give up to %v", l.InflightBytes, sizeMax))
	v.count("max-batch-ops", l.BatchOps)
	v.count("max-inflight-requests", l.InflightRequests)
	v.count("max-connections", l.Connections)
	v.check(l.Connections <= c.connectionsMax(), "max-connections", fmt.Sprintf(
		"is %d; the bound of resident memory with --memory %v carries %d connections; raise --memory or lower it", l.Connections, c.Memory, c.connectionsMax()))
	v.count("max-streams", l.Streams)
	v.count("max-transactions", l.Transactions)
	v.count("max-leases", l.Leases)
	v.count("max-lock-waiters", l.LockWaiters)
	v.check(l.TxnSize <= l.BatchSize, "max-txn-size",
		fmt.Sprintf("is %v, above --max-batch-size %v; a transaction commits as one batch", l.TxnSize, l.BatchSize))
}

// batchMax is how many bytes of keys and values a batch of so many operations may have.
func batchMax(operations int) Size { return Size(storage.BatchBytesMax(operations)) }

// validation collects errors.
type validation struct{ errs []error }

func (v *validation) check(ok bool, option, complaint string) {
	if !ok {
		v.errs = append(v.errs, fmt.Errorf("--%s %s", option, complaint))
	}
}

func (v *validation) size(option string, s, low, high Size) {
	v.check(s >= low && s <= high, option, fmt.Sprintf("is %v; choose between %v and %v", s, low, high))
}

func (v *validation) count(option string, n int) {
	v.check(n >= 1 && n <= countMax, option, fmt.Sprintf("is %d; choose between 1 and %d", n, countMax))
}

func (v *validation) duration(option string, d, low, high time.Duration) {
	v.check(d >= low && d <= high, option, fmt.Sprintf("is %v; choose between %v and %v", d, low, high))
}

func (v *validation) address(option, address string) {
	_, _, err := net.SplitHostPort(address)
	v.check(err == nil, option, fmt.Sprintf("is %q; write host:port, such as 127.0.0.1:7400", address))
}

func zeroPort(address string) bool {
	_, port, err := net.SplitHostPort(address)
	return err == nil && port == "0"
}
