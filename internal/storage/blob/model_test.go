package blob

import (
	"errors"
	"testing"

	"pgregory.net/rapid"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

// machine is a store and a model of it: what is durable, and what readers hold.
type machine struct {
	mem     *vfs.Mem
	b       *bag
	durable map[int]string
	readers []reader
	round   int
	seed    uint64
}

// reader holds the root of a checkpoint.
type reader struct {
	checkpoint uint64
	refs       map[int]page.Ref
	want       map[int]string
}

// TestStoreAgreesWithModel does random operations in a random order: changes, aborted checkpoints, readers that
// come and go, reuse, truncation, reopening, crashes. After each the store holds what the model holds, readers
// see what they saw, and the audit is clean.
func TestStoreAgreesWithModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		mem := vfs.NewMem()
		b, err := createBag(mem, 512)
		check(t, err)
		m := &machine{mem: mem, b: b, durable: map[int]string{}}
		t.Repeat(map[string]func(*rapid.T){
			"change":  m.change,
			"change2": m.change,
			"empty":   m.empty,
			"abort":   m.abort,
			"read":    m.read,
			"leave":   m.leave,
			"release": m.release,
			"shrink":  func(t *rapid.T) { check(t, m.b.p.Shrink(nothing)) },
			"reopen":  m.reopen,
			"crash":   m.crash,
			"":        m.verify,
		})
		check(t, m.b.p.Close())
	})
}

func (m *machine) draw(t *rapid.T) change {
	m.round++
	c := change{}
	for range rapid.IntRange(0, 12).Draw(t, "changes") {
		name := rapid.IntRange(0, 30).Draw(t, "name")
		if rapid.IntRange(0, 3).Draw(t, "what") == 0 {
			c[name] = nil
			continue
		}
		n := rapid.OneOf(rapid.IntRange(0, 500), rapid.IntRange(400, 520), rapid.IntRange(0, 20000)).Draw(t, "length")
		c[name] = value(name, m.round, n)
	}
	return c
}

func (m *machine) change(t *rapid.T) {
	c := m.draw(t)
	check(t, m.b.checkpoint(c))
	m.durable = c.apply(m.durable)
}

// empty removes nearly everything, so that there is something to shrink.
func (m *machine) empty(t *rapid.T) {
	c := change{}
	for name := range m.durable {
		if name > 2 {
			c[name] = nil
		}
	}
	check(t, m.b.checkpoint(c))
	m.durable = c.apply(m.durable)
}

func (m *machine) abort(t *rapid.T) {
	ck, err := m.b.p.Begin()
	check(t, err)
	_, _, err = m.b.build(ck, m.b.s.Begin(ck), m.draw(t))
	check(t, err)
	ck.Abort()
}

func (m *machine) read(*rapid.T) {
	m.readers = append(m.readers, reader{m.b.p.Checkpoint(), m.b.refs, m.durable})
}

func (m *machine) leave(t *rapid.T) {
	if len(m.readers) > 0 {
		i := rapid.IntRange(0, len(m.readers)-1).Draw(t, "reader")
		m.readers = append(m.readers[:i:i], m.readers[i+1:]...)
	}
}

func (m *machine) release(*rapid.T) {
	oldest := m.b.p.Checkpoint()
	for _, r := range m.readers {
		oldest = min(oldest, r.checkpoint)
	}
	m.b.p.ReuseAllFreed(oldest)
}

func (m *machine) reopen(t *rapid.T) {
	check(t, m.b.p.Close())
	m.open(t)
}

// crash cuts the power during a checkpoint, or between two.
func (m *machine) crash(t *rapid.T) {
	before, c := m.durable, m.draw(t)
	m.mem.CrashAt(m.mem.Mutations() + int64(rapid.IntRange(1, 12).Draw(t, "operations")))
	err := m.b.checkpoint(c)
	if err != nil && !errors.Is(err, vfs.ErrCrashed) {
		t.Fatal(err)
	}
	m.mem = m.mem.Crash(m.seed, rapid.SampledFrom([]vfs.Survival{vfs.SurviveNone, vfs.SurviveSome, vfs.SurviveAll}).Draw(t, "keep"))
	m.seed++
	m.open(t)
	m.durable = c.apply(before)
	if err != nil && checkContents(m.b, m.durable) != nil {
		m.durable = before
	}
}

func (m *machine) open(t *rapid.T) {
	m.readers = nil
	var err error
	m.b, err = openBag(m.mem)
	check(t, err)
	if s := m.b.p.Stats(); s.Pending != 0 {
		t.Fatalf("%d pages pending after open", s.Pending)
	}
}

func (m *machine) verify(t *rapid.T) {
	check(t, m.b.audit())
	check(t, checkContents(m.b, m.durable))
	for _, r := range m.readers {
		check(t, checkContents(&bag{p: m.b.p, s: m.b.s, refs: r.refs}, r.want))
	}
	checkSpace(t, m.b.p.Stats())
}

// checkSpace compares the sets' sizes with the file's.
func checkSpace(t *rapid.T, s pager.Stats) {
	pages := uint64(s.FileBytes) / uint64(s.PageSize)
	if s.Live+s.Pending+s.Free != pages {
		t.Fatalf("%d live, %d pending and %d free pages in a file of %d", s.Live, s.Pending, s.Free, pages)
	}
}

func check(t *rapid.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
