package sim

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

	"pgregory.net/rapid"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

var modelSteps = flag.Int("model.steps", 150, "operations of one run of the model test")

// model is the store as maps: the newest state, the state at every epoch, and the open transactions
// with what they wrote and read.
type model struct {
	t     *rapid.T
	disk  *vfs.Mem
	store *mvcc.Store

	states  []map[string]string  // after each commit that survived; see index
	offset  keys.Epoch           // of an epoch of this run minus its index: a crash skips epochs
	changed map[string]int       // epoch of each key's newest version, a deletion too
	synced  int                  // epochs up to here are acknowledged as durable
	open    map[string]*modelTxn // by name
	views   map[*mvcc.Session]int
}

// modelTxn is an open transaction.
type modelTxn struct {
	session  *mvcc.Session
	txn      *mvcc.Txn
	strict   bool
	at       int
	own      map[string]*string // nil: deleted
	reads    map[string]bool
	ranges   [][2]string // [lower, upper)
	saved    []map[string]*string
	readOnly bool
}

const modelTxnsMax = 4

// TestTransactionsBehaveLikeMaps interleaves transactions of both levels, plain writes, snapshots,
// checkpoints, crashes and restarts. It knows of each read what it must see and of each commit
// whether it must conflict: neither a conflict too few nor one too many. More: go test
// ./internal/sim -run TestTransactionsBehave -rapid.checks=10000 -model.steps=300
func TestTransactionsBehaveLikeMaps(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		m := &model{
			t: rt, disk: vfs.NewMem(), states: []map[string]string{{}}, changed: map[string]int{},
			open: map[string]*modelTxn{}, views: map[*mvcc.Session]int{},
		}
		m.reopen()
		defer func() {
			m.endAll()
			if err := m.store.Close(); err != nil {
				rt.Errorf("close: %v", err)
			}
		}()
		for range max(*modelSteps/exhaustiveStep, 40) {
			m.step(rapid.IntRange(0, 99).Draw(rt, "step"))
		}
		m.compareAll()
	})
}

func (m *model) reopen() {
	s, err := mvcc.Open(tiny(m.disk))
	if err != nil {
		m.t.Fatalf("open: %v", err)
	}
	m.store = s
}

func (m *model) session() *mvcc.Session {
	x, err := m.store.Session()
	if err != nil {
		m.t.Fatal(err)
	}
	return x
}

func (m *model) step(n int) {
	switch {
	case n < 12:
		m.plainWrite()
	case n < 24:
		m.begin()
	case n < 70:
		if x := m.anyTxn(); x != nil {
			m.stepIn(x, rapid.IntRange(0, 99).Draw(m.t, "in"))
		}
	case n < 82:
		m.end()
	case n < 86:
		m.view()
	case n < 90:
		m.compareView()
	case n < 96:
		if err := m.store.Checkpoint(context.Background()); err != nil {
			m.t.Fatalf("checkpoint: %v", err)
		}
	case n < 98:
		m.restart()
	default:
		m.crash()
	}
}

var (
	modelKey   = rapid.Custom(func(t *rapid.T) string { return fmt.Sprintf("k%02d", rapid.IntRange(0, 9).Draw(t, "key")) })
	modelValue = rapid.Custom(func(t *rapid.T) string {
		n := rapid.SampledFrom([]int{0, 3, 20, 130, 700}).Draw(t, "size")
		return strings.Repeat(string(rune('a'+rapid.IntRange(0, 25).Draw(t, "letter"))), n)
	})
)

func (m *model) newest() map[string]string { return m.states[len(m.states)-1] }

// index is the index in states of an epoch of this run.
func (m *model) index(epoch keys.Epoch) int { return int(epoch - m.offset) }

// committed records a commit's writes.
func (m *model) committed(epoch keys.Epoch, writes map[string]*string, d mvcc.Durability) {
	index := m.index(epoch)
	if index != len(m.states) {
		m.t.Fatalf("the commit has epoch %d, want %d", epoch, len(m.states))
	}
	if err := m.store.Wait(context.Background(), epoch, d); err != nil {
		m.t.Fatal(err)
	}
	next := maps.Clone(m.newest())
	for k, v := range writes {
		m.changed[k] = index
		if v == nil {
			delete(next, k)
		} else {
			next[k] = *v
		}
	}
	m.states = append(m.states, next)
	if d == mvcc.DurabilitySync {
		m.synced = index
	}
}

func (m *model) durability() mvcc.Durability {
	if rapid.Bool().Draw(m.t, "sync") {
		return mvcc.DurabilitySync
	}
	return mvcc.DurabilityAsync
}

func (m *model) plainWrite() {
	x := m.session()
	defer x.Close()
	w, writes := mvcc.Write{Durability: m.durability()}, map[string]*string{}
	k := modelKey.Draw(m.t, "key")
	if rapid.IntRange(0, 3).Draw(m.t, "delete") == 0 {
		w.Delete([]byte(k))
		writes[k] = nil
	} else {
		v := modelValue.Draw(m.t, "value")
		w.Set([]byte(k), []byte(v))
		writes[k] = &v
	}
	epoch, err := x.Commit(context.Background(), &w)
	if err != nil {
		m.t.Fatal(err)
	}
	m.committed(epoch, writes, w.Durability)
}

func (m *model) begin() {
	if len(m.open) == modelTxnsMax {
		return
	}
	x := &modelTxn{
		session: m.session(), strict: rapid.Bool().Draw(m.t, "strict"), own: map[string]*string{}, reads: map[string]bool{},
		readOnly: rapid.IntRange(0, 9).Draw(m.t, "read-only") == 0,
	}
	o := mvcc.TxnOptions{Isolation: mvcc.IsolationSnapshot, ReadOnly: x.readOnly, Durability: m.durability()}
	if x.strict {
		o.Isolation = mvcc.IsolationSerializable
	}
	var err error
	if x.txn, err = x.session.Begin(o); err != nil {
		m.t.Fatal(err)
	}
	if x.at = m.index(x.txn.At()); x.at != len(m.states)-1 {
		m.t.Fatalf("begun at %d, the newest epoch is %d", x.at, len(m.states)-1)
	}
	m.open[fmt.Sprintf("%06d-%d", x.at, rapid.Uint32().Draw(m.t, "name"))] = x
}

func (m *model) anyTxn() *modelTxn {
	if len(m.open) == 0 {
		return nil
	}
	return m.open[rapid.SampledFrom(slices.Sorted(maps.Keys(m.open))).Draw(m.t, "txn")]
}

// sees is what a transaction must see.
func (m *model) sees(x *modelTxn) map[string]string {
	all := maps.Clone(m.states[x.at])
	for k, v := range x.own {
		if v == nil {
			delete(all, k)
		} else {
			all[k] = *v
		}
	}
	return all
}

func (m *model) stepIn(x *modelTxn, n int) {
	switch {
	case n < 30:
		m.getIn(x)
	case n < 55:
		m.scanIn(x)
	case n < 85:
		m.writeIn(x)
	case n < 90:
		m.deleteRangeIn(x)
	case n < 95:
		if _, err := x.txn.Savepoint(); err != nil {
			m.t.Fatal(err)
		}
		x.saved = append(x.saved, maps.Clone(x.own))
	case len(x.saved) > 0:
		to := rapid.IntRange(1, len(x.saved)).Draw(m.t, "savepoint")
		if err := x.txn.RollbackTo(to); err != nil {
			m.t.Fatal(err)
		}
		x.own, x.saved = maps.Clone(x.saved[to-1]), x.saved[:to]
	}
}

func (m *model) getIn(x *modelTxn) {
	k := modelKey.Draw(m.t, "key")
	v, err := x.txn.Get(nil, []byte(k))
	if err != nil {
		m.t.Fatal(err)
	}
	if _, own := x.own[k]; !own {
		x.reads[k] = true
	}
	if want, found := m.sees(x)[k]; found != v.Found || want != string(v.Data) {
		m.t.Fatalf("get %s at %d: %v %.20q, want %v %.20q", k, x.at, v.Found, v.Data, found, want)
	}
}

func (m *model) bounds() (lower, upper string) {
	lower, upper = modelKey.Draw(m.t, "lower"), modelKey.Draw(m.t, "upper")
	if lower > upper {
		lower, upper = upper, lower
	}
	return lower, upper
}

// within are the keys of [lower, upper) in the direction of a scan.
func within(all map[string]string, lower, upper string, reverse bool) []string {
	var found []string
	for _, k := range slices.Sorted(maps.Keys(all)) {
		if k >= lower && k < upper {
			found = append(found, k)
		}
	}
	if reverse {
		slices.Reverse(found)
	}
	return found
}

func (m *model) scanIn(x *modelTxn) {
	lower, upper := m.bounds()
	reverse, limit := rapid.Bool().Draw(m.t, "reverse"), rapid.IntRange(1, 12).Draw(m.t, "limit")
	c, err := x.txn.Scan(mvcc.ScanOptions{Lower: []byte(lower), Upper: []byte(upper), Reverse: reverse})
	if err != nil {
		m.t.Fatal(err)
	}
	all := m.sees(x)
	want := within(all, lower, upper, reverse)
	last, ended := "", false
	for n := 0; n < limit; n++ {
		if ended = !c.Next(); ended {
			if n != len(want) {
				m.t.Fatalf("scan [%s, %s) ended after %d, want %v", lower, upper, n, want)
			}
			break
		}
		if last = string(c.Key()); n >= len(want) || last != want[n] || string(c.Value()) != all[last] {
			m.t.Fatalf("scan [%s, %s): entry %d is %s, want %v", lower, upper, n, last, want)
		}
	}
	if c.Err() != nil {
		m.t.Fatal(c.Err())
	}
	c.Close()
	switch { // what was not reached was not read
	case !ended && reverse:
		lower = last
	case !ended:
		upper = last + "\x00"
	}
	x.ranges = append(x.ranges, [2]string{lower, upper})
}

func (m *model) writeIn(x *modelTxn) {
	k, v := modelKey.Draw(m.t, "key"), modelValue.Draw(m.t, "value")
	var err error
	var own *string
	switch rapid.IntRange(0, 3).Draw(m.t, "how") {
	case 0:
		err = x.txn.Delete([]byte(k))
	case 1: // reads, too
		old := m.sees(x)[k]
		if _, mine := x.own[k]; !mine && !x.readOnly {
			x.reads[k] = true
		}
		var out mvcc.Invoked
		out, err = x.txn.Invoke(&mvcc.Invoke{Kind: mvcc.InvokeAppend, Key: []byte(k), Operand: []byte("+")})
		if err == nil && string(out.Old) != old {
			m.t.Fatalf("append to %s met %.20q, want %.20q", k, out.Old, old)
		}
		v = old + "+"
		own = &v
	default:
		err = x.txn.Set([]byte(k), []byte(v))
		own = &v
	}
	if x.readOnly {
		if !errors.Is(err, mvcc.ErrReadOnly) {
			m.t.Fatalf("a read-only transaction took a write: %v", err)
		}
		return
	}
	if err != nil {
		m.t.Fatal(err)
	}
	x.own[k] = own
}

func (m *model) deleteRangeIn(x *modelTxn) {
	if x.readOnly {
		return
	}
	lower, upper := m.bounds()
	want := within(m.sees(x), lower, upper, false)
	n, err := x.txn.DeleteRange(context.Background(), []byte(lower), []byte(upper))
	if err != nil || n != len(want) {
		m.t.Fatalf("delete [%s, %s): %d, want %v, %v", lower, upper, n, want, err)
	}
	for _, k := range want {
		x.own[k] = nil
	}
	x.ranges = append(x.ranges, [2]string{lower, upper})
}

// mustConflict says whether something that the transaction depends on has changed since its
// snapshot.
func (m *model) mustConflict(x *modelTxn) bool {
	if len(x.own) == 0 {
		return false
	}
	for k, epoch := range m.changed {
		if epoch <= x.at {
			continue
		}
		_, wrote := x.own[k]
		if wrote || x.strict && x.reads[k] {
			return true
		}
		for _, r := range x.ranges {
			if x.strict && k >= r[0] && k < r[1] {
				return true
			}
		}
	}
	return false
}

// end commits a transaction, or sometimes rolls it back.
func (m *model) end() {
	x := m.anyTxn()
	if x == nil {
		return
	}
	for name, other := range m.open {
		if other == x {
			delete(m.open, name)
		}
	}
	defer x.session.Close()
	if rapid.IntRange(0, 4).Draw(m.t, "rollback") == 0 {
		x.txn.Rollback()
		return
	}
	d := mvcc.DurabilitySync // a caller may always wait for more than the commit asked for
	must := m.mustConflict(x)
	epoch, err := x.txn.Commit(context.Background())
	var conflict *mvcc.ConflictError
	switch {
	case errors.As(err, &conflict) != must:
		m.t.Fatalf("begun at %d, commit: %v; must conflict: %v (wrote %v, read %v and %q)",
			x.at, err, must, slices.Sorted(maps.Keys(x.own)), slices.Sorted(maps.Keys(x.reads)), x.ranges)
	case conflict != nil: // the conflict was found before an epoch was reserved: there is no other writer
	case err != nil:
		m.t.Fatal(err)
	case len(x.own) > 0:
		m.committed(epoch, x.own, d)
	case m.index(epoch) != x.at:
		m.t.Fatalf("a commit without writes has epoch %d, begun at %d", epoch, x.at)
	}
}

func (m *model) view() {
	if len(m.views) > 3 {
		for x := range m.views {
			delete(m.views, x)
			x.Close()
			break
		}
	}
	x := m.session()
	at, err := x.OpenSnapshot(0)
	if err != nil || m.index(at) != len(m.states)-1 {
		m.t.Fatalf("view at %d, %v", at, err)
	}
	m.views[x] = m.index(at)
}

func (m *model) compareView() {
	for x, at := range m.views {
		m.compare(x, m.states[at])
	}
}

// compare walks everything that a session's snapshot has.
func (m *model) compare(x *mvcc.Session, want map[string]string) {
	c, err := x.Scan(mvcc.ScanOptions{})
	if err != nil {
		m.t.Fatal(err)
	}
	defer c.Close()
	n := 0
	for c.Next() {
		if v, ok := want[string(c.Key())]; !ok || !bytes.Equal(c.Value(), []byte(v)) {
			m.t.Fatalf("%s is %.20q, want %v %.20q", c.Key(), c.Value(), ok, v)
		}
		n++
	}
	if c.Err() != nil || n != len(want) {
		m.t.Fatalf("%d keys, want %d, %v", n, len(want), c.Err())
	}
}

func (m *model) compareAll() {
	x := m.session()
	defer x.Close()
	if _, err := x.OpenSnapshot(0); err != nil {
		m.t.Fatal(err)
	}
	m.compare(x, m.newest())
	m.compareView()
}

// endAll closes every session.
func (m *model) endAll() {
	for _, x := range m.open {
		x.session.Close()
	}
	for x := range m.views {
		x.Close()
	}
	clear(m.open)
	clear(m.views)
}

func (m *model) restart() {
	m.endAll()
	if err := m.store.Close(); err != nil {
		m.t.Fatal(err)
	}
	m.synced = len(m.states) - 1
	m.reopen()
	m.compareAll()
}

// crash cuts the power. What comes back is the state at an epoch, with everything that was
// acknowledged as durable.
func (m *model) crash() {
	left := m.disk.Crash(rapid.Uint64().Draw(m.t, "crash"), vfs.Survival(rapid.IntRange(0, 2).Draw(m.t, "keep")))
	m.endAll()
	_ = m.store.Close() // it cannot close well without a disk
	m.disk = left
	m.reopen()
	recovery := m.store.Recovery()
	n := m.index(recovery.Epoch)
	if n < m.synced || n >= len(m.states) {
		m.t.Fatalf("epoch %d came back; %d was durable, %d the newest", n, m.synced, len(m.states)-1)
	}
	m.states = m.states[:n+1]
	m.offset = recovery.Next - keys.Epoch(n+1)
	m.synced = n
	maps.DeleteFunc(m.changed, func(_ string, epoch int) bool { return epoch > n }) // there is no older snapshot
	m.compareAll()
}
