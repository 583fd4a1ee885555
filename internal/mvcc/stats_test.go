package mvcc

import (
	"context"
	"errors"
	"strconv"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestCountersOfTransactionsAndCollectionMove drives each of them once: what operators are shown
// must not stand still.
func TestCountersOfTransactionsAndCollectionMove(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Storage.MemtableBytes, o.Storage.SegmentBytes = 8<<20, 8<<20
	o.GCInterval = time.Hour // the test collects
	s := mustOpen(t, o)
	x, reader, other := mustSession(t, s), mustSession(t, s), mustSession(t, s)
	for _, session := range []*Session{x, reader, other} {
		defer session.Close()
	}
	const overwrites = 1000
	for i := range overwrites {
		if i == overwrites/2 {
			if _, err := reader.OpenSnapshot(0); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := put(x, "hot", strconv.Itoa(i), DurabilityAsync); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // what the first takes out of the middle, the second uses again
		s.collector.collect(nil, true)
		time.Sleep(time.Millisecond)
	}

	tx, err := other.Begin(TxnOptions{Isolation: IsolationSnapshot, Durability: DurabilityAsync})
	if err != nil {
		t.Fatal(err)
	}
	if err := tx.Set([]byte("hot"), nil); err != nil {
		t.Fatal(err)
	}
	mustPut(t, s, "hot", "first committer")
	if _, err := tx.Commit(context.Background()); !errors.As(err, new(*ConflictError)) {
		t.Fatal(err)
	}
	w := Write{Durability: DurabilityAsync, Conditions: []Condition{{Kind: KeyAbsent, Key: []byte("hot")}}}
	w.Set([]byte("hot"), nil)
	if _, err := x.Commit(context.Background(), &w); !errors.As(err, new(*PreconditionError)) {
		t.Fatal(err)
	}

	got := s.Stats()
	p, chains := got.Storage.Pruning, uint64(0)
	for _, n := range p.ChainLengths {
		chains += n
	}
	for what, holds := range map[string]bool{
		"commits are counted":                       got.Commits == overwrites+1,
		"conflicts are counted":                     got.Conflicts == 1,
		"refused preconditions are counted":         got.Preconditions == 1,
		"collections are counted and timed":         got.Collections > 1 && got.CollectTime > 0,
		"long chains are queued":                    p.Queued > 0,
		"versions are pruned":                       p.Pruned > overwrites/2,
		"interior versions are used again":          p.Reclaimed > 0,
		"chains are measured before they are cut":   chains > 0 && p.ChainVersions >= chains*64,
		"a long snapshot has an age":                got.Snapshots.OldestAge > 0 && got.Snapshots.Oldest == reader.at,
		"the session that holds it can be told":     len(got.Snapshots.Longest) == 1 && got.Snapshots.Longest[0].Epoch == reader.at,
		"visible is ahead of min-visible meanwhile": got.MinVisible == reader.at && got.Visible > reader.at,
	} {
		if !holds {
			t.Errorf("must hold: %s\n%+v\n%+v", what, got.Snapshots, p)
		}
	}
	reader.CloseSnapshot()
	s.collector.collect(nil, true)
	if age := s.Stats().Snapshots.OldestAge; age != 0 {
		t.Errorf("a snapshot that has ended is %v old", age)
	}
}
