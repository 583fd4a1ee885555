// Package engines gives EpochKV's engine and the embedded stores that are its alternatives one small interface, so
// that a workload is written once.
//
// What is compared is what a user of each gets: a put returns once it may be acknowledged under the durability asked
// for (for EpochKV: visible, and durable if Sync), values are copied out once, and memory is the same: a cache of CacheBytes, and WriteBuffers
// buffers of BufferBytes each for what has been written and not yet merged. EpochKV pays its log's buffers out of the latter, and
// divides the rest into memtables as it does in a server.
// Each adapter's file says which settings of its engine differ from the default and why.
package engines

// Options are the settings that all engines share.
type Options struct {
	Dir         string
	Sync        bool  // puts are on stable storage when they return
	BufferBytes int64 // of one write buffer (memtable); 64 MiB
	Buffers     int64 // write buffers before writers are stopped; WriteBuffers
	CacheBytes  int64 // of the page or block cache; 512 MiB
	Memtable    int64 // EpochKV only: bytes of a memtable and of a log segment; zero: what EpochKV makes of the memory
	OneMutex    bool  // EpochKV only: the commit path under one mutex; needs a build with the tag `ablation`
	Direct      bool  // EpochKV only: the data file past the OS page cache
}

// WriteBuffers is how many write buffers an engine may fill before it stops writers.
const WriteBuffers = 8

const (
	defaultBufferBytes = 64 << 20
	defaultCacheBytes  = 512 << 20
)

func (o *Options) setDefaults() {
	if o.BufferBytes == 0 {
		o.BufferBytes = defaultBufferBytes
	}
	if o.Buffers == 0 {
		o.Buffers = WriteBuffers
	}
	if o.CacheBytes == 0 {
		o.CacheBytes = defaultCacheBytes
	}
}

// Engine is an open store.
type Engine interface {
	// Session is one goroutine's way in.
	Session() (Session, error)
	// The engine moves everything that was written out of its write buffers and into its tables or trees.
	Settle() error
	// Counters tell which path the work took.
	Counters() map[string]float64
	Close() error
}

// Session does one goroutine's work.
type Session interface {
	Put(key, value []byte) error
	// PutAll writes all pairs atomically.
	PutAll(keys, values [][]byte) error
	// Get appends the value of key to dst.
	Get(dst, key []byte) (value []byte, found bool, err error)
	// Scan visits up to limit entries from start on, copying each pair into dst, and returns their number.
	Scan(dst, start []byte, limit int) (count int, err error)
	Close() error
}

// Snapshots is an engine that has snapshots, in the way of its own library.
type Snapshots interface {
	// Snapshot opens one of the present state.
	Snapshot() Snapshot
}

// Snapshot is a state that does not change.
type Snapshot interface {
	// Get appends the value of key to dst.
	Get(dst, key []byte) (value []byte, found bool, err error)
	Close() error
}

// Open opens an engine of one kind in an empty directory or one that it wrote.
type Open func(Options) (Engine, error)
