package btree

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"sync"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// Errors of an input. After one of them no tree has any entry of the input.
var (
	// ErrKeySize means a key that is empty or longer than page.KeySizeMax.
	ErrKeySize = errors.New("btree: key size out of bounds")
	// ErrInputOrder means entries that do not ascend by key and descend by epoch.
	ErrInputOrder = errors.New("btree: input out of order")
)

// MergeInput says what to merge into what, and how.
type MergeInput struct {
	Base        Root
	Checkpoint  uint64 // number that new pages get
	PageSize    int
	Policy      Policy
	DropExpired bool // rewrite the leaves that have keys in Policy.Expired, also without input for them

	// Input returns a stream of all new versions. It is called once for each worker, and once for
	// the planner.
	Input func() Input
	// Lookahead, if set, returns one more stream like Input for each worker whose source is a
	// Prefetcher. The worker finds out with it which leaves of a partition it is going to read.
	// Seeks on it, about one for each leaf, should be cheap.
	Lookahead func() Input
	// Source returns a source of base pages. It is called once for each worker, once for the
	// planner, and once for the upper levels. A page that it returns must not change until the next
	// call of the same source.
	Source func() Source
	Sink   Sink
	// Written, if set, is called after the sink has taken a page, with the leaf of the base in whose
	// place the page is; old is zero for an inner node, and for a leaf that is in no other's place.
	// The caller may reuse p after it returns. Workers call it concurrently, in no order.
	Written func(id, old page.ID, p []byte)
	Values  Values // may be nil if no value is longer than page.InlineMax

	// Workers, if set, is how many goroutines should merge now; less than one, or nil, means one. Each asks before
	// each of its partitions, so that their number can follow how many processors are idle. The result does
	// not depend on it.
	Workers func() int
	// Cuts are keys at which the work is divided in addition to the tree's own separators: a sample
	// of the input's keys lets many workers share a merge into a small tree, or into a few leaves of
	// a large one. The pages of the result depend on them.
	Cuts Cuts
	Damage
	// Avoid names pages of the base that the merge leaves where they are, unread, with all pages
	// below them. The input should have nothing for them.
	Avoid Avoided
	// Rebuilt are inner nodes of the base that cannot be read, with their children. The merge writes
	// them anew.
	Rebuilt []RebuiltNode
	// Relocate moves pages towards the start of the file.
	Relocate Relocation
	// Vacuum names leaves to be rewritten although there is no input for them, because dead
	// versions can be dropped from them. It may be nil.
	Vacuum *DeadVersions
	// Progress, if set, is called after each partition with the number of input entries that were
	// consumed. Workers call it concurrently.
	Progress func(entries int)

	invoker // of a baseline; empty without the tag ablation
}

// Damage says what is damage of one page.
type Damage struct {
	// Unreadable reports whether an error of a Source concerns one page alone, so that the merge
	// can skip the page; see UnreadableError. Nil means that no error does.
	Unreadable func(error) bool
	// IsLive, if set, reports whether a page is live. A node of the base with a child that is not is damage.
	IsLive func(page.ID) bool
}

// Cuts are keys at which a merge may be divided.
type Cuts struct {
	Keys [][]byte // sorted, each once
	// Least is the least number of keys at which a run of neighbouring leaves is divided: fewer are not
	// worth the leaves that are rewritten for them. Zero means one.
	Least int
}

// Relocation asks a merge to rewrite up to Max pages (and their parents) whose id is From or
// larger. The sink then gives them smaller ids, so that the end of the file becomes free. The zero
// Relocation relocates nothing.
type Relocation struct {
	From   page.ID
	Max    int
	Enough func() bool // ends it when it reports true: something waits for the merge; nil for never
}

// Sink takes the new pages of a merge.
type Sink interface {
	// AllocExtent reserves neighbouring pages, at least one and at most n, of which the merge may
	// leave some unwritten. Calls come one at a time, in an order that depends on the merge's input
	// only.
	AllocExtent(n int) (first page.ID, count int, err error)
	// WritePage takes the finished page. The caller may reuse p after it returns. Workers call it
	// concurrently, in no order, also during AllocExtent.
	WritePage(id page.ID, p []byte) error
}

// Values stores values that are too long for a leaf. Calls come one at a time, in an order that
// depends on the merge's input only.
type Values interface {
	// Store stores value and returns a reference to it.
	Store(value []byte) (page.Ref, error)
	// Drop drops a value to which no rewritten leaf refers any more.
	Drop(ref page.Ref) error
	// ReadAhead announces which values Drop is called for next, at most dropsAhead.
	ReadAhead(refs []page.Ref)
}

// fillPercent leaves room in the leaves of a long run, so that the next random inserts need not
// split them.
const fillPercent = 90

// Result is what a merge made.
type Result struct {
	Root  Root
	Freed []page.ID // pages of the base that the new tree does not use
	Stats Stats
}

// Stats counts what a merge did. Versions, Keys and Bytes are differences to the base.
type Stats struct {
	LeafPages, InnerPages int   // written
	Keys                  int64 // keys whose newest version is a value
	SystemKeys            int64 // of them, those outside the keyspace of clients
	Versions              int64
	Bytes                 int64 // keys and inline values of all versions
	VersionsDropped       int64 // dead versions, of the tree and of the input
	TombstonesDropped     int64 // tombstones among them
	LeavesVacuumed        int   // leaves without input from which vacuum dropped versions
	VersionsVacuumed      int64 // versions that vacuum dropped from them
	Stored, Dropped       int64 // large values
}

// CountKey adds n keys like this one.
func (s *Stats) CountKey(key []byte, n int64) {
	s.Keys += n
	if keys.SpaceOf(key) != keys.SpaceUser {
		s.SystemKeys += n
	}
}

// Add adds up two merges.
func (s *Stats) Add(o *Stats) {
	s.LeafPages += o.LeafPages
	s.InnerPages += o.InnerPages
	s.Keys += o.Keys
	s.SystemKeys += o.SystemKeys
	s.Versions += o.Versions
	s.Bytes += o.Bytes
	s.VersionsDropped += o.VersionsDropped
	s.TombstonesDropped += o.TombstonesDropped
	s.LeavesVacuumed += o.LeavesVacuumed
	s.VersionsVacuumed += o.VersionsVacuumed
	s.Stored += o.Stored
	s.Dropped += o.Dropped
}

// merge is the state of a running Merge.
type merge struct {
	*MergeInput
	ctx     context.Context // of the whole merge
	soft    int             // bytes at which a long run cuts a page
	runMin  int             // entries of an old leaf that are copied as a run; see runMin
	cuts    [][]byte
	avoided []page.Separator // where the ranges of avoided pages end; sorted
	ordered ordered

	unreadablePages unreadablePages
	refused         refused

	planMu  sync.Mutex // guards what follows; no lock is taken while it is held
	plan    planner
	next    func() (*partition, bool)
	running int       // workers that have or ask for a partition
	idle    []*worker // of those that ended, to be used again
	wg      sync.WaitGroup
}

// Always is a number of workers that does not change.
func Always(n int) func() int { return func() int { return n } }

// Merge writes a new tree that has the base and the input without the versions that the policy
// drops. It shares with the base the pages that nothing changed. After an error the sink has to
// take back the pages allocated so far; the base is unchanged.
func Merge(ctx context.Context, in *MergeInput) (*Result, error) {
	return mergeFilling(ctx, in, fillPercent, runMin)
}

// mergeFilling is Merge with pages of a long run that are full by the given share, and with another runMin.
func mergeFilling(ctx context.Context, in *MergeInput, percent, runMin int) (*Result, error) {
	m := &merge{MergeInput: in, ctx: ctx, cuts: in.Cuts.Keys, runMin: runMin}
	if len(in.Avoid) > 0 {
		m.cuts = nil // both partitions would read a leaf that they share
		m.avoided = in.Avoid.ends()
	}
	m.soft = page.Payload(in.PageSize) * percent / 100
	m.ordered.init(m)
	m.plan = planner{m: m, src: in.Source(), in: peeker{in: in.Input()}, budget: in.Relocate.Max}
	next, stop := iter.Pull(m.plan.partitions)
	defer stop()
	m.next = next
	err := m.work(ctx)
	if err == nil {
		err = errors.Join(m.unreadablePages.err(), m.refused.err())
	}
	if err != nil {
		return nil, fmt.Errorf("merge into the tree: %w", err)
	}
	return m.ordered.finish(m.plan.events)
}

// work runs workers until the plan has no more partitions. The first one starts the others.
func (m *merge) work(ctx context.Context) error {
	m.running = 1
	m.ordered.fail(m.workPartitions(ctx))
	m.wg.Wait()
	return m.ordered.err()
}

// workPartitions merges one partition after the other, until there is none or others suffice for the rest.
func (m *merge) workPartitions(ctx context.Context) error {
	var w *worker
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		p, err := m.nextPartition(ctx, &w)
		if p == nil || err != nil {
			return err
		}
		if w == nil {
			w = m.newWorker()
		}
		if err := w.run(p); err != nil {
			return err
		}
		if err := m.ordered.commit(p, w); err != nil {
			return err
		}
		if m.Progress != nil {
			m.Progress(w.consumed)
			w.consumed = 0
		}
	}
}

// nextPartition returns the next partition, and the worker for it if one is idle. It returns nil at the end of the plan, and
// if more workers run than should. If more should run, it starts one.
func (m *merge) nextPartition(ctx context.Context, w **worker) (*partition, error) {
	wanted := 1
	if m.Workers != nil {
		wanted = max(m.Workers(), 1)
	}
	m.planMu.Lock()
	defer m.planMu.Unlock()
	if m.running > wanted {
		m.running--
		if *w != nil {
			m.idle = append(m.idle, *w)
		}
		return nil, nil
	}
	p, _ := m.next()
	if p == nil || m.plan.err != nil {
		return nil, m.plan.err
	}
	if last := len(m.idle) - 1; *w == nil && last >= 0 {
		*w, m.idle = m.idle[last], m.idle[:last]
	}
	if m.running < wanted {
		m.running++
		m.wg.Go(func() { m.ordered.fail(m.workPartitions(ctx)) })
	}
	return p, nil
}

func (m *merge) writePage(id, old page.ID, p []byte) error {
	if err := m.Sink.WritePage(id, p); err != nil {
		return err
	}
	if m.Written != nil {
		m.Written(id, old, p)
	}
	return nil
}

func (m *merge) newWorker() *worker {
	w := &worker{m: m, src: m.Source(), scratch: keys.Scratch(), intake: intake{in: peeker{in: m.Input()}}}
	if f, ok := w.src.(Prefetcher); ok && m.Lookahead != nil {
		w.prefetcher, w.lookahead = f, peeker{in: m.Lookahead()}
	}
	w.pages.size = m.PageSize
	w.pack = leafPacker{pageSize: m.PageSize, soft: m.soft, checkpoint: m.Checkpoint, pages: &w.pages}
	return w
}
