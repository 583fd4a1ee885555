package mvcc

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

var moveFaultStep = flag.Int("movefaults.step", 40, "TestFaultsWhilePagesMoveCostNothing fails one of so many operations")

// moveFault is one way in which an operation fails.
type moveFault struct {
	name string
	rule vfs.Rule
}

func moveFaults() []moveFault {
	return []moveFault{
		{"EIO", vfs.Rule{Op: vfs.OpAny &^ vfs.OpRead, Err: syscall.EIO}},
		{"EIO of a read", vfs.Rule{Op: vfs.OpRead, Err: syscall.EIO}},
		{"ENOSPC", vfs.Rule{Op: vfs.OpWrite | vfs.OpPreallocate | vfs.OpCreate, Err: syscall.ENOSPC}},
		{"EMFILE", vfs.Rule{Op: vfs.OpOpen | vfs.OpCreate, Err: syscall.EMFILE}},
		{"short write", vfs.Rule{Op: vfs.OpWrite, Fault: vfs.Short, Bytes: 1000, Err: syscall.ENOSPC}},
		{"torn write", vfs.Rule{Op: vfs.OpWrite, Fault: vfs.Torn, Err: syscall.EIO}},
		{"discarded", vfs.Rule{Op: vfs.OpAnySync, Fault: vfs.DiscardDirty}},
	}
}

// moves is a store whose pages move while an operation fails.
type moves struct {
	t      *testing.T
	fs     *vfs.Mem
	faulty *vfs.Faulty
	s      *Store
	want   map[string]string
	maybe  map[string]string // what else may be there: the outcome of a bulk load is unknown
}

func (m *moves) commit(fill func(w *Write)) {
	x := mustSession(m.t, m.s)
	defer x.Close()
	w := Write{Durability: DurabilitySync}
	fill(&w)
	if _, err := commitAndWait(x, &w); err != nil {
		m.t.Fatal(err)
	}
}

func (m *moves) open() error {
	o := tiny(m.faulty)
	o.Storage.DiskReserve = storage.DiskReserveDerived
	s, err := Open(o)
	m.s = s
	return err
}

// prepare fills the store, and deletes the most part of it: the file has holes, and its last pages will move.
func (m *moves) prepare() {
	for part := range 6 {
		m.commit(func(w *Write) {
			for i := range 60 {
				key, value := moveKey(part*100+i), strings.Repeat(fmt.Sprint(part, i, " "), 40+i%7*900)
				w.Set([]byte(key), []byte(value))
				m.want[key] = value
			}
		})
		if err := m.s.Checkpoint(m.t.Context()); err != nil {
			m.t.Fatal(err)
		}
	}
	m.commit(func(w *Write) {
		for i := range 500 {
			if _, ok := m.want[moveKey(i)]; ok && i%10 != 3 {
				w.Delete([]byte(moveKey(i)))
				delete(m.want, moveKey(i))
			}
		}
	})
}

// work lets pages move beside a snapshot and a lease, and loads in bulk. A failure ends it.
func (m *moves) work() error {
	reader := mustSession(m.t, m.s)
	defer reader.Close()
	if _, err := reader.OpenSnapshot(0); err != nil {
		return err
	}
	at := maps.Clone(m.want)
	for round := range 3 {
		if err := m.s.Checkpoint(m.t.Context()); err != nil {
			return err
		}
		entries := map[string]string{}
		for i := range 40 {
			entries[moveKey(i*13+round)] = strings.Repeat(fmt.Sprint("loaded ", round, i), 10+i%3*800)
		}
		out, err := load(m.s, entries)
		if errors.Is(err, ErrFailed) {
			m.maybe = entries
			return err
		}
		if out.Keys != 0 { // published; its temporary files may be left
			maps.Copy(m.want, entries)
		}
		if err != nil {
			return err
		}
		if round == 1 {
			m.check(reader, at)
			reader.CloseSnapshot()
		}
	}
	for range 3 {
		if err := m.s.Checkpoint(m.t.Context()); err != nil {
			return err
		}
	}
	return nil
}

// check reads what x sees: no answer is wrong. Values that cannot be read are damage.
func (m *moves) check(x *Session, want map[string]string) (damaged int) {
	m.t.Helper()
	for _, key := range slices.Sorted(maps.Keys(want)) {
		v, err := x.Read(nil, []byte(key))
		if errors.Is(err, storage.ErrDamaged) {
			damaged++
			continue
		}
		if got := string(v.Data); err != nil || !v.Found || got != want[key] && (m.maybe[key] == "" || got != m.maybe[key]) {
			m.t.Fatalf("%s: %v, %v, %d bytes, want %d", key, err, v.Found, len(got), len(want[key]))
		}
	}
	return damaged
}

// checkNow is check at the newest epoch.
func (m *moves) checkNow(x *Session) (damaged int) {
	m.t.Helper()
	if _, err := x.OpenSnapshot(0); err != nil {
		m.t.Fatal(err)
	}
	defer x.CloseSnapshot()
	return m.check(x, m.want)
}

// crash cuts the power, flips a bit if that is wanted, and starts again.
func (m *moves) crash(seed uint64, flip bool) {
	m.t.Helper()
	old := m.s
	m.fs = m.fs.Crash(seed, []vfs.Survival{vfs.SurviveSome, vfs.SurviveNone, vfs.SurviveAll}[seed%3])
	_ = old.Close()
	if flip {
		m.flip(rand.New(rand.NewPCG(seed, 0)))
	}
	m.faulty = vfs.NewFaulty(m.fs)
	if err := m.open(); err != nil {
		m.t.Fatalf("start after the crash, flipped %v: %v", flip, err)
	}
	x := mustSession(m.t, m.s)
	damaged := m.checkNow(x)
	x.Close()
	if damaged > 0 && !flip {
		m.t.Fatalf("%d values are damaged", damaged)
	}
	if err := m.s.Checkpoint(m.t.Context()); err != nil {
		m.t.Fatal(err)
	}
	if err := m.s.Close(); err != nil {
		m.t.Fatal(err)
	}
}

func (m *moves) flip(rng *rand.Rand) {
	f, err := m.fs.Open("db/data.ekv", vfs.ReadWrite)
	if err != nil {
		m.t.Fatal(err)
	}
	size, err := f.Size()
	var b [1]byte
	at := rng.Int64N(size)
	if rng.IntN(4) == 0 {
		at = rng.Int64N(16384) // a superblock
	}
	_, readErr := f.ReadAt(b[:], at)
	b[0] ^= 1 << rng.IntN(8)
	_, writeErr := f.WriteAt(b[:], at)
	if err := errors.Join(err, readErr, writeErr, f.Sync(), f.Close()); err != nil {
		m.t.Fatal(err)
	}
}

// TestFaultsWhilePagesMoveCostNothing lets one operation fail while checkpoints move pages beside a snapshot, and bulk loads are
// built and published. The store answers right until it stops, and after a power cut it has everything, also if a bit
// flips: that costs the values of one page.
func TestFaultsWhilePagesMoveCostNothing(t *testing.T) {
	testseed.SkipUnderRace(t)
	prepared := vfs.NewMem()
	first := &moves{t: t, fs: prepared, faulty: vfs.NewFaulty(prepared), want: map[string]string{}}
	if err := first.open(); err != nil {
		t.Fatal(err)
	}
	first.prepare()
	if err := first.s.Close(); err != nil {
		t.Fatal(err)
	}
	disk := prepared.Crash(0, vfs.SurviveAll)
	for _, fault := range moveFaults() {
		t.Run(fault.name, func(t *testing.T) {
			t.Parallel()
			offset := 0
			for nth := 1 + offset; ; nth += *moveFaultStep {
				fs := disk.Crash(uint64(nth), vfs.SurviveAll)
				m := &moves{t: t, fs: fs, faulty: vfs.NewFaulty(fs), want: maps.Clone(first.want)}
				if err := m.open(); err != nil {
					t.Fatal(err)
				}
				rule := fault.rule
				rule.Nth = nth
				injected := m.faulty.Inject(rule)
				err := m.work()
				fired := injected.Fired() > 0
				if !fired && err != nil {
					t.Fatalf("without a fault: %v", err)
				}
				injected.Remove()
				x := mustSession(t, m.s)
				m.checkNow(x)
				x.Close()
				if m.s.Err() == nil {
					if err := m.s.Checkpoint(t.Context()); err != nil {
						t.Fatalf("operation %d failed (%v), and the next checkpoint: %v", nth, err, m.s.CheckpointErr())
					}
				}
				m.crash(uint64(nth), nth%2 == 0)
				if !fired {
					t.Logf("one of %d operations failed", nth)
					return
				}
			}
		})
	}
}

// TestBulkLoadWhoseSuperblockFailsIsUnknown: when the superblock of a bulk load was written and its sync failed, a restart may
// find the load. So the error says that the outcome is unknown, whatever the device has answered.
func TestBulkLoadWhoseSuperblockFailsIsUnknown(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.EIO, syscall.ENOSPC} {
		unknown := 0
		for nth := 1; nth <= 6; nth++ {
			fs := vfs.NewMem()
			m := &moves{t: t, fs: fs, faulty: vfs.NewFaulty(fs), want: map[string]string{}}
			if err := m.open(); err != nil {
				t.Fatal(err)
			}
			m.commit(func(w *Write) { w.Set([]byte("k"), []byte("old")) })
			m.faulty.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: "data.ekv", Nth: nth, Err: errno})
			out, err := load(m.s, map[string]string{"k": "new"})
			m.fs = fs.Crash(1, vfs.SurviveAll)
			_ = m.s.Close() // its files are gone
			m.faulty = vfs.NewFaulty(m.fs)
			if err := m.open(); err != nil {
				t.Fatal(err)
			}
			x := mustSession(t, m.s)
			v, getErr := x.Get(nil, []byte("k"), 0)
			x.Close()
			switch got := string(v.Data); {
			case getErr != nil || got != "new" && got != "old":
				t.Fatalf("%q, %v", got, getErr)
			case errors.Is(err, ErrFailed):
				unknown++
			case (got == "new") != (out.Keys == 1):
				t.Fatalf("sync %d: the load of %d keys ended with %v, and after a restart the value is %q", nth, out.Keys, err, got)
			}
			if errors.Is(err, ErrFailed) && errors.Is(err, vfs.ErrNoSpace) {
				t.Fatalf("sync %d: %v matches an error that can pass", nth, err)
			}
			if err := m.s.Close(); err != nil {
				t.Fatal(err)
			}
		}
		if unknown == 0 {
			t.Fatal("no outcome was unknown: the test tests nothing")
		}
	}
}

func moveKey(i int) string { return fmt.Sprintf("k%05d", i) }
