// Package feed delivers the committed changes of a store to watches, each commit once and in order, from the log.
//
//	stable      the largest epoch that is visible and durable: no crash takes back what is at or before it
//	position    (epoch, operations): everything through the epoch, and the first operations of the commit after it
//	commit      a decoded record of the log, shared by all watches
//	ring        the last decoded commits, in memory
//	dispatched  the epoch up to which commits have been offered to the live watches
//	watch       some ranges of keys and a position; live, lagging, in need of a difference, or ended
//	consumer    the watches of one stream, with one wake signal
//	queue       what a watch has still to deliver: references to operations of commits
//
//	          log files                      ring                 queues           streams
//	  |####################| pread   +---------------------+   +-----------+
//	  |  ..., 41, 42, 43   |-------->| 38 39 40 41 42 43   |-->| 40:0-3 43 |--> Next
//	  |####################|  tailer +---------------------+   +-----------+
//	         |                               | takeover             ^
//	         +-- catch-up readers -----------+----------------------+
//	             (lagging watches)
//
// The tailer reads what is between its position and the stable epoch, decodes it once, and offers it to the live watches, of
// which an index knows the ranges. It never waits for a watch: a watch whose queue is full becomes lagging, and while the tailer is late,
// so do the watches of a client of which very many want the same commit. When its stream
// has taken half of the queue, a reader reads the log for it, and for every other lagging watch near by, which it finds in
// the same index, until its position is in the ring. Then the watch takes the rest from the ring between two commits, and is live
// again. A watch belongs to the tailer while it is live and to one reader while it is read for, so no commit is left out
// and none is offered twice.
//
// A position before the begin of the log, or in a damaged part of it, ends this: the watch needs a difference between two
// snapshots, which its owner takes from the tree, and goes on after it (Watch.Resume).
//
// Invariants:
//   - everything delivered has an epoch at or before the stable epoch;
//   - what a watch delivers ascends strictly in (epoch, operation), without an operation twice, and without leaving out one
//     that its filter wants;
//   - progress at a position promises that everything up to it came out of Next;
//   - nothing here takes a latch, the memory of a memtable, or a lock that a commit takes. The log's list of segments is
//     locked by rotations, for the time of a search in it;
//   - the ring, the queues with the commits that only they refer to, and large records that are being read have
//     Options.MemoryBytes together, but for one commit that is larger than that; ring and queues have half of it each, but for
//     one commit. A watch whose stream takes nothing has no queue in the end: it costs its struct and its places in the index;
//   - a watch that a stream awaits (Consumer.Take) gets its operation in bounded work, whatever the positions of other watches are and
//     however often these lose their queues: it keeps its place in the line of the watches that lag, and at its turn the first record
//     that is read has the operation;
//   - what came out of Next keeps at most twice Limit.Bytes of commits in memory, and its own operations;
//   - without a watch whose client takes something there is no goroutine and no ring.
//
// Locks: Feed.mu guards everything but what belongs to the goroutine of the tailer or of a reader. The source is called
// without it, but for Stable, which takes no lock.
//
// The package knows the log, batches and keys. It knows neither transactions nor the network, and reads no version that is
// not in the log: previous values are for its callers to read.
package feed

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/wal"
)

// Source is the store as the feed sees it; *mvcc.Changes is one.
type Source interface {
	// Stable is the largest epoch that is visible and durable.
	Stable() keys.Epoch
	// Await returns when the stable epoch is after another. It requests a sync for a commit that is visible for so long and is
	// not durable.
	Await(ctx context.Context, after keys.Epoch, syncAfter time.Duration) error
	// ReadLog reads the log from an epoch on; mark is where an earlier reader was, or zero.
	ReadLog(next keys.Epoch, mark wal.TailMark) *wal.TailReader
	// OldestInLog is the first epoch that the log has.
	OldestInLog() keys.Epoch
	// BulkLoads are the bulk loads with epochs after the first and up to the second argument, or false if it does not know
	// all of them.
	BulkLoads(after, through keys.Epoch) ([]keys.LoadedRange, bool)
	// Secure makes the commits of the log segment with an epoch safe in the tree, because the segment is damaged, and
	// returns the first epoch of the next segment, or false if there is none yet.
	Secure(ctx context.Context, at keys.Epoch) (next keys.Epoch, ok bool, err error)
}

// Options are the bounds of a feed. Zero fields take the default named beside them.
type Options struct {
	MemoryBytes           int64         // of ring and queues, half each; 64 MiB
	CatchUpReaders        int           // that read the log for lagging watches; 4
	CatchUpBytesPerSecond int64         // that all of them together read; 64 MiB
	SyncInterval          time.Duration // after which a visible commit is synced for the watches; 10 ms
	QueueOperations       int           // references in the queue of a watch; 10,000
	QueueBytes            int64         // of operations to which a queue refers; 4 MiB
	WatchesMax            int           // 100,000
	ConsumerWatchesMax    int           // of one consumer; 10,000
	RangesMax             int           // of one watch; 64

	roomWait   time.Duration         // 50 ms; see room.go
	wait       func(context.Context) // between two attempts to get room
	indexedMin int                   // 16; size of a group from which on the index is asked which of its watches may want a commit
	lateAfter  time.Duration         // 5 ms; see tailer.isLate
	fanoutMax  int                   // 64; see Feed.tooManyLocked
	manual     bool                  // no goroutine is started: a test calls the steps
}

func (o *Options) setDefaults() {
	orDefault(&o.MemoryBytes, 64<<20)
	orDefault(&o.CatchUpReaders, 4)
	orDefault(&o.CatchUpBytesPerSecond, 64<<20)
	orDefault(&o.SyncInterval, 10*time.Millisecond)
	orDefault(&o.QueueOperations, 10_000)
	orDefault(&o.QueueBytes, 4<<20)
	orDefault(&o.WatchesMax, 100_000)
	orDefault(&o.ConsumerWatchesMax, 10_000)
	orDefault(&o.RangesMax, 64)
	orDefault(&o.roomWait, roomWait)
	orDefault(&o.indexedMin, 16)
	orDefault(&o.lateAfter, lateAfter)
	orDefault(&o.fanoutMax, fanoutMax)
	if o.wait == nil {
		o.wait = func(ctx context.Context) { sleep(ctx, roomEvery) }
	}
}

func orDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// ErrClosed is the end of every watch of a feed that was closed.
var ErrClosed = errors.New("feed: the feed is closed")

// Feed delivers the changes of a store.
type Feed struct {
	// Constant.
	source  Source
	options Options
	ctx     context.Context // ends with Close
	stop    context.CancelFunc
	done    sync.WaitGroup // of the tailer and the readers

	mu       sync.Mutex
	closed   bool
	tailer   *tailer // nil without a watch
	ring     ring
	index    index
	watches  map[uint64]*Watch
	live     int // watches that are
	gapped   int // watches that need a difference
	lastID   uint64
	catchUp  catchUp
	memory   memory
	counters counters

	awakened []*Consumer // to be woken when mu is released
	runs     []run       // of the last match
}

// New returns a feed of a source. It starts nothing.
func New(source Source, o Options) *Feed {
	o.setDefaults()
	f := &Feed{source: source, options: o, watches: map[uint64]*Watch{}}
	f.ctx, f.stop = context.WithCancel(context.Background())
	f.index.init()
	f.catchUp.busy, f.catchUp.owed = map[string]bool{}, map[string]int64{}
	f.memory.ringMax, f.memory.queuesMax = o.MemoryBytes/2, o.MemoryBytes-o.MemoryBytes/2
	return f
}

// Close ends every watch with ErrClosed, and returns when the goroutines have ended.
func (f *Feed) Close() {
	f.lock()
	f.closed = true
	f.endAllLocked(ErrClosed)
	f.stop()
	f.unlock()
	f.done.Wait()
}

// Stable is the epoch up to which changes can be delivered now.
func (f *Feed) Stable() keys.Epoch { return f.source.Stable() }

// Await returns when the stable epoch has reached another.
func (f *Feed) Await(ctx context.Context, e keys.Epoch) error {
	return f.source.Await(ctx, max(e, 1)-1, f.options.SyncInterval)
}

// Oldest is the first epoch that the log has: a watch can begin after any epoch from the one before on.
func (f *Feed) Oldest() keys.Epoch { return f.source.OldestInLog() }

// End ends a watch for a reason, and reports false if there is none with this id.
func (f *Feed) End(id uint64, reason error) bool {
	f.lock()
	defer f.unlock()
	w := f.watches[id]
	if w != nil {
		f.endLocked(w, reason)
	}
	return w != nil
}

func (f *Feed) endAllLocked(reason error) {
	for _, w := range f.watches {
		f.endLocked(w, reason)
	}
}

func (f *Feed) lock() { f.mu.Lock() }

// unlock releases mu, and wakes the consumers that got something meanwhile, each once.
func (f *Feed) unlock() {
	for i, c := range f.awakened {
		c.awakened = false
		select {
		case c.wake <- struct{}{}:
		default:
		}
		f.awakened[i] = nil
	}
	f.awakened = f.awakened[:0]
	f.mu.Unlock()
}

// wakeLocked wakes a consumer when mu is released.
func (f *Feed) wakeLocked(c *Consumer) {
	if !c.awakened {
		c.awakened = true
		f.awakened = append(f.awakened, c)
	}
}

// startLocked starts the tailer when a watch needs it, at the stable epoch of a moment ago.
func (f *Feed) startLocked(from keys.Epoch) {
	if f.tailer != nil {
		return
	}
	t := &tailer{feed: f}
	f.tailer = t
	f.ring.reset(from)
	if f.options.manual {
		return
	}
	var ctx context.Context
	ctx, t.stop = context.WithCancel(f.ctx)
	f.done.Go(func() { t.run(ctx) })
}

// stopLocked stops the tailer when no watch needs it: none is live, waits for a reader, or is read for. The clients of all
// others take nothing.
func (f *Feed) stopLocked() {
	needed := f.live > 0 || len(f.catchUp.line) > 0 || f.catchUp.readers > 0
	if f.tailer == nil || needed && len(f.watches) > 0 {
		return
	}
	if f.tailer.stop != nil {
		f.tailer.stop()
	}
	f.tailer = nil
	f.dropRingLocked()
	f.makeRoomLocked()
}
