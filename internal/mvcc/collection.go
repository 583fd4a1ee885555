package mvcc

import (
	"time"

	"github.com/epochkv/epochkv/internal/storage"
)

// Collection says who takes versions that nobody can see out of the memtables. What is not the default is there to be compared
// with it: all of them keep what a snapshot can see, and differ in speed and memory.
type Collection uint8

const (
	// CollectBackground leaves it to the collector's goroutine, which writers tell of crowded keys. A writer helps at twice the
	// threshold.
	CollectBackground Collection = iota
	// CollectByWriter has the writer that makes a chain's length a multiple of the threshold refresh the horizon and cut the
	// chain's tail, behind its own commit.
	CollectByWriter
	// CollectEveryWrite has every writer cut the tails of the chains that it wrote to, whatever their length. Without
	// HorizonScanned it finds nothing to cut until the collector's next tick.
	CollectEveryWrite
)

// HorizonRule says how a writer knows min-visible.
type HorizonRule uint8

const (
	// HorizonCached takes what the collector published last.
	HorizonCached HorizonRule = iota
	// HorizonScanned scans the registry of snapshots on every write: the baseline that a cached horizon is compared with.
	HorizonScanned
)

// crowdedAt is the chain length at whose multiples a writer hears of a chain; zero is the engine's own.
func (c Collection) crowdedAt() int {
	if c == CollectEveryWrite {
		return 1
	}
	return 0
}

// prune has the chains that the last commit made crowded pruned, by whoever Options.Collection names, and returns the longest
// one's length if that is the collector. It runs behind the commit's mark, inside the slot's protection.
func (x *Session) prune() (longest int) {
	s := x.store
	if s.collection == CollectBackground {
		if longest = s.engine.QueueLongChains(&x.writer); longest >= storage.AssistLength {
			s.engine.PruneLongChains(&x.writer, storage.AssistLength)
		}
		return longest
	}
	if s.collection == CollectByWriter {
		x.rescan()
	}
	s.engine.PruneLongChains(&x.writer, 1)
	return 0
}

// rescan publishes min-visible as of now. With a retention rule the frontier stays where the collector's timer put it.
func (x *Session) rescan() {
	s := x.store
	frontier := s.Visible()
	if s.retention > 0 {
		frontier = s.registry.Frontier()
	}
	x.live = s.registry.Refresh(x.live, frontier, time.Now())
}
