package enginetest

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/vfs"
)

var modelSteps = flag.Int("model.steps", 60, "operations of one run of the model test")

// model is the store as a map per open snapshot, beside the real one with the smallest pages,
// segments and memtables.
type model struct {
	t     *rapid.T
	fs    *vfs.Mem
	store *mvcc.Store
	x     *session

	now     map[string]string       // newest state
	history []map[string]string     // state after each commit that survived, from none
	offset  keys.Epoch              // of an epoch of this run less its index in history: a crash skips epochs
	durable int                     // epochs below are acknowledged as durable
	views   map[*session]keys.Epoch // open snapshots
	crashes uint64
}

func modelOptions(fs vfs.FS) mvcc.Options {
	return mvcc.Options{
		Storage: storage.Options{
			Dir: "db", FS: fs, PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 32 << 10, SegmentBytes: 32 << 10,
			CheckpointBytes: 64 << 10, CheckpointWorkers: 2, StartPatience: time.Millisecond,
		},
		SyncInterval: time.Hour, GCInterval: time.Millisecond,
	}
}

func (m *model) open() {
	s, err := mvcc.Open(modelOptions(m.fs))
	if err != nil {
		m.t.Fatalf("open: %v", err)
	}
	m.store = s
	if m.x, err = openSession(s); err != nil {
		m.t.Fatal(err)
	}
}

// TestModel compares random operations, snapshots, checkpoints, crashes and restarts with a map.
// More: go test ./internal/enginetest -run TestModel -rapid.checks=10000 -model.steps=300
func TestModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		m := &model{
			t: rt, fs: vfs.NewMem(), now: map[string]string{}, history: []map[string]string{{}}, views: map[*session]keys.Epoch{},
		}
		m.open()
		defer func() {
			m.closeViews()
			m.x.Close()
			if err := m.store.Close(); err != nil {
				rt.Errorf("close: %v", err)
			}
			verifyFiles(rt, modelOptions(m.fs))
		}()
		for range *modelSteps / thinned {
			m.step(rapid.IntRange(0, 99).Draw(rt, "op"))
		}
		m.compareAll()
		m.vacuumAll()
		m.compareAll()
	})
}

// vacuumAll ends all snapshots and lets checkpoints find what they held: in the end the tree has
// one version of each key. After a start the store itself reads its records in the background, and holds
// versions meanwhile: twenty checkpoints without a pause may take less time than that.
func (m *model) vacuumAll() {
	m.closeViews()
	m.x.CloseSnapshot()
	began := time.Now()
	for n := 0; ; n++ {
		if err := m.store.Checkpoint(context.Background()); err != nil {
			m.t.Fatalf("checkpoint: %v", err)
		}
		tree := m.store.Stats().Storage.Tree
		if tree.DeadVersionRatio == 0 {
			break
		}
		if n >= 20 {
			if time.Since(began) > 5*time.Second {
				m.t.Fatalf("not vacuumed after %d checkpoints: %+v", n, tree)
			}
			time.Sleep(time.Millisecond)
		}
	}
	report, err := m.store.Verify(context.Background(), inspect.VerifyOptions{})
	if err != nil {
		m.t.Fatalf("verify: %v", err)
	}
	mustBeSound(m.t, report)
	if live := uint64(len(m.now)) + m.lostRecords(); report.Versions != live || report.Keys != live {
		m.t.Fatalf("%d versions of %d keys, %d are live", report.Versions, report.Keys, live)
	}
}

// lostRecords counts the records of what crashes have lost, at most one for each.
func (m *model) lostRecords() (n uint64) {
	err := m.x.ScanSystem(context.Background(), []byte{keys.SystemRemoved}, []byte{keys.SystemRemoved + 1}, func([]byte, []byte, keys.Epoch) bool {
		n++
		return true
	})
	if err != nil {
		m.t.Fatal(err)
	}
	if n > m.crashes {
		m.t.Fatalf("%d records of what %d crashes have lost", n, m.crashes)
	}
	return n
}

func (m *model) step(op int) {
	switch {
	case op < 40:
		m.write()
	case op < 45:
		m.deleteRange()
	case op < 60:
		m.compareGets()
	case op < 72:
		m.compareScan()
	case op < 80:
		m.openView()
	case op < 86:
		m.closeOneView()
	case op < 93:
		if err := m.store.Checkpoint(context.Background()); err != nil {
			m.t.Fatalf("checkpoint: %v", err)
		}
		mustVerify(m.t, m.store)
	case op < 96:
		m.restart()
	default:
		m.crash()
	}
}

var modelKey = rapid.Custom(func(t *rapid.T) string {
	k := fmt.Sprintf("k%02d", rapid.IntRange(0, 60).Draw(t, "n"))
	if rapid.IntRange(0, 9).Draw(t, "long") == 0 {
		k += strings.Repeat("x", rapid.IntRange(0, 124).Draw(t, "more")) // up to the longest key of a 512-byte page
	}
	return k
})

var modelValue = rapid.Custom(func(t *rapid.T) string {
	n := rapid.IntRange(0, 60).Draw(t, "size")
	switch rapid.IntRange(0, 7).Draw(t, "class") {
	case 0:
		n = rapid.IntRange(112, 144).Draw(t, "around a quarter page")
	case 1:
		n = rapid.IntRange(400, 1100).Draw(t, "around one and two pages")
	}
	return strings.Repeat(string(rune('a'+rapid.IntRange(0, 25).Draw(t, "letter"))), n)
})

func (m *model) write() {
	w := mvcc.Write{Durability: mvcc.DurabilityAsync}
	if rapid.Bool().Draw(m.t, "sync") {
		w.Durability = mvcc.DurabilitySync
	}
	next := maps.Clone(m.now)
	seen := map[string]bool{}
	for range rapid.IntRange(1, 20).Draw(m.t, "ops") {
		k := modelKey.Draw(m.t, "key")
		if seen[k] {
			continue
		}
		seen[k] = true
		if rapid.IntRange(0, 3).Draw(m.t, "delete") == 0 {
			w.Delete([]byte(k))
			delete(next, k)
		} else {
			v := modelValue.Draw(m.t, "value")
			w.Set([]byte(k), []byte(v))
			next[k] = v
		}
	}
	e, err := m.x.Commit(context.Background(), &w)
	m.committed(e, err, next, w.Durability)
}

func (m *model) committed(e keys.Epoch, err error, next map[string]string, d mvcc.Durability) {
	if err == nil {
		err = m.store.Wait(context.Background(), e, d)
	}
	if err != nil || int(e-m.offset) != len(m.history) {
		m.t.Fatalf("commit: epoch %d, expected %d, %v", e, len(m.history), err)
	}
	m.now = next
	m.history = append(m.history, next)
	if d == mvcc.DurabilitySync {
		m.durable = len(m.history)
	}
}

func (m *model) deleteRange() {
	lower, upper := modelKey.Draw(m.t, "lower"), modelKey.Draw(m.t, "upper")
	limit := rapid.IntRange(0, 5).Draw(m.t, "limit")
	next, n := maps.Clone(m.now), 0
	for _, k := range slices.Sorted(maps.Keys(m.now)) {
		if k >= lower && k < upper && (limit == 0 || n < limit) {
			delete(next, k)
			n++
		}
	}
	out, err := m.x.DeleteRange(context.Background(), mvcc.RangeDelete{Lower: []byte(lower), Upper: []byte(upper), Limit: limit, Durability: mvcc.DurabilityAsync})
	if err != nil || out.Count != n {
		m.t.Fatalf("delete range: %+v, want %d, %v", out, n, err)
	}
	if n > 0 {
		m.committed(out.Epoch, nil, next, mvcc.DurabilityAsync)
	}
}

// views returns a session with a view, and what it must see: the newest state or an open
// snapshot's.
func (m *model) view() (*session, map[string]string) {
	sessions := m.sortedViews()
	i := rapid.IntRange(-1, len(sessions)-1).Draw(m.t, "view")
	if i >= 0 {
		return sessions[i], m.history[m.views[sessions[i]]-m.offset]
	}
	if _, err := m.x.OpenSnapshot(0); err != nil {
		m.t.Fatal(err)
	}
	return m.x, m.now
}

func (m *model) sortedViews() []*session {
	sessions := slices.Collect(maps.Keys(m.views))
	slices.SortFunc(sessions, func(a, b *session) int { return int(m.views[a]) - int(m.views[b]) })
	return sessions
}

func (m *model) compareGets() {
	x, want := m.view()
	list := make([][]byte, rapid.IntRange(0, 100).Draw(m.t, "batch"))
	for i := range list {
		list[i] = []byte(modelKey.Draw(m.t, "key"))
	}
	visits := 0
	err := x.ReadAll(context.Background(), list, func(i int, v mvcc.Value) error {
		visits++
		if w, ok := want[string(list[i])]; v.Found != ok || string(v.Data) != w {
			m.t.Fatalf("batch get %q at %d: found %v %q, want %v %q", list[i], x.at, v.Found, clip(string(v.Data)), ok, clip(w))
		}
		return nil
	})
	if err != nil || visits != len(list) {
		m.t.Fatalf("batch get: %d of %d keys, %v", visits, len(list), err)
	}
	for range 5 {
		k := modelKey.Draw(m.t, "key")
		v, err := x.Read(nil, []byte(k))
		w, ok := want[k]
		if err != nil || v.Found != ok || string(v.Data) != w {
			m.t.Fatalf("get %q at %d: found %v %q, want %v %q, %v", k, x.at, v.Found, clip(string(v.Data)), ok, clip(w), err)
		}
	}
}

func (m *model) compareScan() {
	x, want := m.view()
	o := mvcc.ScanOptions{Reverse: rapid.Bool().Draw(m.t, "reverse")}
	lower, upper := modelKey.Draw(m.t, "lower"), modelKey.Draw(m.t, "upper")
	if rapid.Bool().Draw(m.t, "bounded") {
		o.Lower, o.Upper = []byte(lower), []byte(upper)
	}
	pause := rapid.IntRange(1, 30).Draw(m.t, "pause")
	m.checkScan(x, o, want, pause)
}

func (m *model) checkScan(x *session, o mvcc.ScanOptions, want map[string]string, pause int) {
	var order []string
	for _, k := range slices.Sorted(maps.Keys(want)) {
		if bytes.Compare([]byte(k), o.Lower) >= 0 && (o.Upper == nil || bytes.Compare([]byte(k), o.Upper) < 0) {
			order = append(order, k)
		}
	}
	if o.Reverse {
		slices.Reverse(order)
	}
	c, err := x.Scan(o)
	if err != nil {
		m.t.Fatal(err)
	}
	defer c.Close()
	n := 0
	for ; c.Next(); n++ {
		if n == len(order) || string(c.Key()) != order[n] || string(c.Value()) != want[order[n]] {
			m.t.Fatalf("scan %+v at %d: entry %d is %q = %q, want %q", o, x.at, n, c.Key(), clip(string(c.Value())), order[min(n, len(order)):])
		}
		if n%pause == pause-1 {
			c.Pause()
		}
	}
	if c.Err() != nil || n != len(order) {
		m.t.Fatalf("scan %+v at %d: %d entries, then %q missing, %v", o, x.at, n, order[n:], c.Err())
	}
}

func (m *model) openView() {
	if len(m.views) == 4 {
		return
	}
	x, err := openSession(m.store)
	if err != nil {
		m.t.Fatal(err)
	}
	at, err := x.OpenSnapshot(0)
	if err != nil || int(at-m.offset) != len(m.history)-1 {
		m.t.Fatalf("snapshot at %d, newest %d, %v", at, len(m.history)-1, err)
	}
	m.views[x] = at
}

func (m *model) closeOneView() {
	if sessions := m.sortedViews(); len(sessions) > 0 {
		x := sessions[rapid.IntRange(0, len(sessions)-1).Draw(m.t, "close")]
		delete(m.views, x)
		x.Close()
	}
}

func (m *model) closeViews() {
	for x := range m.views {
		x.Close()
	}
	clear(m.views)
}

func (m *model) restart() {
	m.closeViews()
	m.x.Close()
	if err := m.store.Close(); err != nil {
		m.t.Fatalf("close: %v", err)
	}
	verifyFiles(m.t, modelOptions(m.fs))
	m.durable = len(m.history)
	m.open()
	m.survived()
}

// crash cuts the power: what was acknowledged as durable is there, what was not is there up to some
// epoch.
func (m *model) crash() {
	keep := rapid.SampledFrom([]vfs.Survival{vfs.SurviveNone, vfs.SurviveSome, vfs.SurviveAll}).Draw(m.t, "keep")
	m.crashes++
	left := m.fs.Crash(rapid.Uint64().Draw(m.t, "crash seed"), keep)
	m.closeViews()
	m.x.Close()
	if err := m.store.Close(); err != nil && !errors.Is(err, vfs.ErrCrashed) {
		m.t.Fatalf("close after the crash: %v", err)
	}
	m.fs = left
	verifyFiles(m.t, modelOptions(m.fs)) // what the power cut left is sound before recovery has touched it
	m.open()
	m.survived()
}

func (m *model) survived() {
	recovery := m.store.Recovery()
	n := int(recovery.Epoch-m.offset) + 1
	if n < m.durable || n > len(m.history) {
		m.t.Fatalf("epochs through %d survived; through %d were durable, through %d tried", n-1, m.durable-1, len(m.history)-1)
	}
	m.history = m.history[:n]
	m.offset = recovery.Next - keys.Epoch(n)
	m.now = m.history[n-1]
	m.durable = n
	m.compareAll()
}

func (m *model) compareAll() {
	if _, err := m.x.OpenSnapshot(0); err != nil {
		m.t.Fatal(err)
	}
	for _, reverse := range []bool{false, true} {
		m.checkScan(m.x, mvcc.ScanOptions{Reverse: reverse}, m.now, 1000)
	}
	for x, at := range m.views {
		m.checkScan(x, mvcc.ScanOptions{}, m.history[at-m.offset], 7)
	}
}
