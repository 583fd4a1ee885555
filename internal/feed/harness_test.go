package feed

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// store is a log with a stable epoch that a test moves: the source of a feed.
type store struct {
	t       testing.TB
	fs      *vfs.Mem
	log     *wal.Log
	segment *wal.Segment

	segmentBytes int

	mu      sync.Mutex
	visible keys.Epoch
	moved   chan struct{} // closed when visible has moved
	loaded  []keys.LoadedRange
	from    keys.Epoch // bulk loads after it are in loaded
	secured int
	commits []change // what the model has, by epoch
}

// change is a commit of the model.
type change struct {
	epoch  keys.Epoch
	header batch.Header
	ops    []op
	loaded *keys.LoadedRange
}

type op struct {
	kind       keys.Kind
	key, value string // an internal key
}

func newStore(t testing.TB, segmentBytes int) *store {
	t.Helper()
	s := &store{t: t, fs: vfs.NewMem(), segmentBytes: segmentBytes, moved: make(chan struct{})}
	s.reopen(0, func(wal.Commit) {})
	return s
}

// reopen opens the store as its file system has it; the tree has everything up to an epoch.
func (s *store) reopen(after keys.Epoch, replayed func(wal.Commit)) {
	s.t.Helper()
	if err := s.fs.MkdirAll("data"); err != nil {
		s.t.Fatal(err)
	}
	rec, err := wal.Recover(s.fs, "data", after, wal.Proof{}, func(c wal.Commit) error {
		if c.Skipped == 0 {
			replayed(c)
		}
		return nil
	})
	if err != nil {
		s.t.Fatal(err)
	}
	s.log, err = wal.Open(wal.Options{FS: s.fs, Dir: "data", SegmentBytes: s.segmentBytes, Lineage: keys.Lineage{1}}, rec)
	if err != nil {
		s.t.Fatal(err)
	}
	opened := s.log
	s.t.Cleanup(func() { _ = opened.Close() })
	if s.segment, err = s.log.NewSegment(context.Background(), rec.Next(), 0); err != nil {
		s.t.Fatal(err)
	}
	s.visible, s.from = rec.Next()-1, rec.Last
}

// commit appends a batch, makes it durable and visible, and adds it to the model.
func (s *store) commit(h batch.Header, ops ...op) keys.Epoch {
	s.t.Helper()
	e := s.append(h, ops...)
	s.flush(e)
	s.show(e)
	return e
}

// append appends a batch that is neither durable nor visible.
func (s *store) append(h batch.Header, ops ...op) keys.Epoch {
	s.t.Helper()
	var b batch.Builder
	b.SetHeader(h)
	for _, o := range ops {
		if o.kind == keys.KindDelete {
			b.Delete(keys.Space(o.key[0]), []byte(o.key[1:]))
		} else {
			b.Set(keys.Space(o.key[0]), []byte(o.key[1:]), []byte(o.value))
		}
	}
	body, err := b.Finish()
	if err != nil {
		s.t.Fatal(err)
	}
	e := s.record(body.Bytes())
	s.commits = append(s.commits, change{epoch: e, header: h, ops: ops})
	return e
}

func (s *store) record(body []byte) keys.Epoch {
	s.t.Helper()
	for {
		c, outcome := s.segment.Reserve(len(body))
		if outcome == wal.Reserved {
			if len(body) == 0 {
				s.segment.PublishNoOp(c)
			} else {
				copy(s.segment.Body(c), body)
				s.segment.Publish(c)
			}
			return c.Epoch
		}
		s.rotate(c.Epoch, len(body))
	}
}

func (s *store) rotate(first keys.Epoch, bodyBytes int) {
	s.t.Helper()
	next, err := s.log.NewSegment(context.Background(), first, bodyBytes)
	if err != nil {
		s.t.Fatal(err)
	}
	s.segment = next
}

func (s *store) flush(e keys.Epoch) {
	s.t.Helper()
	if err := s.log.Flush(e); err != nil {
		s.t.Fatal(err)
	}
}

// noOp appends a no-op record.
func (s *store) noOp() keys.Epoch {
	s.t.Helper()
	e := s.record(nil)
	s.flush(e)
	s.show(e)
	return e
}

// load is a bulk load, which has no record: the next segment begins after its epoch.
func (s *store) load(lower, upper string) keys.Epoch {
	s.t.Helper()
	sealed, outcome := s.segment.Seal()
	if outcome != wal.Crossed {
		s.t.Fatalf("seal: %v", outcome)
	}
	s.flush(sealed.Epoch - 1)
	one := keys.LoadedRange{Epoch: sealed.Epoch + 1000, Lower: user(lower), Upper: user(upper), Keys: 1}
	s.mu.Lock()
	s.loaded = append(s.loaded, one)
	s.mu.Unlock()
	s.commits = append(s.commits, change{epoch: one.Epoch, loaded: &one})
	s.log.Skip(one.Epoch + 1)
	s.show(one.Epoch)
	s.rotate(one.Epoch+1, 0)
	return one.Epoch
}

// show makes an epoch visible.
func (s *store) show(e keys.Epoch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.visible = max(s.visible, e)
	close(s.moved)
	s.moved = make(chan struct{})
}

func (s *store) Stable() keys.Epoch {
	s.mu.Lock()
	defer s.mu.Unlock()
	return min(s.visible, s.log.Durable())
}

func (s *store) Await(ctx context.Context, after keys.Epoch, _ time.Duration) error {
	for {
		s.mu.Lock()
		visible, moved := s.visible, s.moved
		s.mu.Unlock()
		if visible <= after {
			select {
			case <-moved:
				continue
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return s.log.ObserveDurable(ctx, after+1)
	}
}

func (s *store) ReadLog(next keys.Epoch, mark wal.TailMark) *wal.TailReader {
	return s.log.ReadFrom(next, mark)
}

func (s *store) OldestInLog() keys.Epoch { return s.log.OldestEpoch() }

func (s *store) BulkLoads(after, through keys.Epoch) (list []keys.LoadedRange, complete bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, one := range s.loaded {
		if one.Epoch > after && one.Epoch <= through {
			list = append(list, one)
		}
	}
	return list, after >= s.from
}

func (s *store) Secure(_ context.Context, at keys.Epoch) (keys.Epoch, bool, error) {
	s.mu.Lock()
	s.secured++
	s.mu.Unlock()
	next, ok := s.log.SegmentAfter(at)
	return next, ok, nil
}

func user(key string) []byte { return keys.Append(nil, keys.SpaceUser, []byte(key)) }

func set(key, value string) op { return op{keys.KindSet, string(user(key)), value} }
func del(key string) op        { return op{keys.KindDelete, string(user(key)), ""} }

func mustWatch(t testing.TB, c *Consumer, o WatchOptions) *Watch {
	t.Helper()
	w, err := c.Watch(o)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// event is an operation as a watch delivered it.
type event struct {
	epoch keys.Epoch
	index int // -1 for a bulk load
	op
}

func (e event) String() string {
	return fmt.Sprintf("%d.%d %d %q=%q", e.epoch, e.index, e.kind, e.key, e.value)
}

// eventsOf are the events of a delivery.
func eventsOf(d *Delivery) (list []event) {
	for i := range d.Parts {
		p := &d.Parts[i]
		if p.Commit.Loaded != nil {
			list = append(list, event{epoch: p.Commit.Epoch, index: -1})
		}
		for i, o := range p.Operations {
			list = append(list, event{p.Commit.Epoch, i, op{o.Kind, string(o.Key), string(o.Value)}})
		}
	}
	return list
}

// wanted is the model's filter.
func (s *store) wanted(f *filter, after Position) (list []event) {
	for _, c := range s.commits {
		if c.epoch <= after.Epoch || f.origins != 0 && f.origins&(1<<c.header.Origin) == 0 {
			continue
		}
		if c.loaded != nil {
			for _, r := range f.ranges {
				if f.kinds&KindLoads != 0 && string(r.Lower) < string(c.loaded.Upper) && string(c.loaded.Lower) < string(r.Upper) {
					list = append(list, event{epoch: c.epoch, index: -1})
					break
				}
			}
		}
		for i, o := range c.ops {
			if c.epoch == after.Epoch+1 && uint32(i) < after.Operations || kindsOf(o.kind)&f.kinds == 0 {
				continue
			}
			for _, r := range f.ranges {
				if string(r.Lower) <= o.key && o.key < string(r.Upper) {
					list = append(list, event{c.epoch, i, o})
				}
			}
		}
	}
	return list
}

// take waits for a delivery.
func take(t testing.TB, c *Consumer) Delivery {
	t.Helper()
	deadline := time.After(30 * time.Second)
	for {
		if d, ok := c.Next(Limit{}); ok {
			return d
		}
		select {
		case <-c.Wake():
		case <-deadline:
			t.Fatal("nothing is delivered")
		}
	}
}

func rngOf(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 15)) }

// pointRange is the range of one key.
func pointRange(key []byte) Range {
	return Range{key, append(slices.Clone(key), 0)}
}
