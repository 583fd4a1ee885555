package enginetest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// patterned is a value whose bytes tell their place and their key.
func patterned(size int, key string) string {
	b := make([]byte, size)
	for i := range b {
		b[i] = byte(i*31) ^ byte(i>>9) ^ key[i%len(key)]
	}
	return string(b)
}

// TestValuesOfEverySizeSurvive puts values around each boundary: what a leaf keeps, what fills a
// page, and two pages, with the smallest pages and with the default ones, and values up to the
// limit. They are read from the memtable, from the tree and after a restart.
func TestValuesOfEverySizeSurvive(t *testing.T) {
	testseed.SkipUnderRace(t)
	for _, pageSize := range []int{512, 8192} {
		t.Run(fmt.Sprint(pageSize), func(t *testing.T) {
			o := tiny(vfs.NewMem())
			o.Storage.PageSize = pageSize
			o.Storage.MemtableBytes, o.Storage.SegmentBytes = 1<<20, 1<<20
			o.Limits.KeyBytes = pageSize / 4
			s := mustOpen(t, o)
			sizes := []int{0, 1}
			for _, around := range []int{pageSize / 4, pageSize - 96, pageSize - 40, pageSize, 2 * pageSize, 9 * pageSize} {
				for d := -16; d <= 16; d++ {
					sizes = append(sizes, around+d)
				}
			}
			sizes = append(sizes, 1<<20, 1<<20+1)
			if pageSize == 8192 {
				sizes = append(sizes, 16<<20-1, 16<<20)
			}
			want := map[string]string{}
			for i, size := range sizes {
				key := fmt.Sprintf("k%04d", i)
				if i%50 == 7 {
					key += strings.Repeat("x", pageSize/4-len(key)) // the longest key there may be
				}
				want[key] = patterned(size, key)
				mustPut(t, s, key, want[key])
			}
			mustHold(t, s, want)
			if err := s.Checkpoint(context.Background()); err != nil {
				t.Fatal(err)
			}
			mustHold(t, s, want)
			for k := range want {
				if k[4]%2 == 0 { // replace and delete some of each size
					delete(want, k)
					w := mvcc.Write{}
					w.Delete([]byte(k))
					x := mustSession(t, s)
					if _, err := commitAndWait(x, &w); err != nil {
						t.Fatal(err)
					}
					x.Close()
				}
			}
			mustClose(t, s)
			s = mustOpen(t, o)
			mustHold(t, s, want)
			if tooLong := string(make([]byte, 16<<20+1)); pageSize == 8192 {
				x := mustSession(t, s)
				defer x.Close()
				var limit *mvcc.LimitError
				if _, err := put(x, "k", tooLong, mvcc.DurabilitySync); !errors.As(err, &limit) {
					t.Fatalf("one byte past the limit: %v", err)
				}
			}
		})
	}
}

// TestSnapshotsSeeTheirStateAcrossManyCheckpoints keeps a snapshot of every fifth state while keys
// are overwritten and deleted, with a checkpoint after each round, bulk loads among them.
func TestSnapshotsSeeTheirStateAcrossManyCheckpoints(t *testing.T) {
	const seed = 21
	rng := rand.New(rand.NewPCG(seed, 0))
	o := modelOptions(vfs.NewMem())
	s := mustOpen(t, o)
	now := map[string]string{}
	type kept struct {
		x     *session
		state map[string]string
	}
	var snapshots []kept
	for round := range 40 {
		if round%7 == 3 {
			chunk := map[string]string{}
			for range 30 {
				chunk[fmt.Sprintf("k%03d", rng.IntN(150))] = fmt.Sprintf("loaded %d %s", round, strings.Repeat("b", rng.IntN(300)))
			}
			mustLoad(t, s, chunk)
			for k, v := range chunk {
				now[k] = v
			}
		}
		for range 30 {
			k := fmt.Sprintf("k%03d", rng.IntN(150))
			w := mvcc.Write{Durability: mvcc.DurabilityAsync}
			if rng.IntN(3) == 0 {
				w.Delete([]byte(k))
				delete(now, k)
			} else {
				now[k] = fmt.Sprintf("round %d %s", round, strings.Repeat("v", rng.IntN(300)))
				w.Set([]byte(k), []byte(now[k]))
			}
			x := mustSession(t, s)
			if _, err := commitAndWait(x, &w); err != nil {
				t.Fatal(err)
			}
			x.Close()
		}
		if round%5 == 0 {
			x := mustSession(t, s)
			if _, err := x.OpenSnapshot(0); err != nil {
				t.Fatal(err)
			}
			state := map[string]string{}
			for k, v := range now {
				state[k] = v
			}
			snapshots = append(snapshots, kept{x, state})
		}
		if err := s.Checkpoint(context.Background()); err != nil {
			t.Fatal(err)
		}
		if len(snapshots) == 5 {
			snapshots[2].x.Close() // from the middle, so that interior versions go
			snapshots = append(snapshots[:2], snapshots[3:]...)
		}
		for _, k := range snapshots {
			if err := equalMaps(k.state, dumpAt(t, k.x)); err != nil {
				t.Fatalf("seed %d, round %d, snapshot at %d: %v", seed, round, k.x.at, err)
			}
		}
	}
	for _, k := range snapshots {
		k.x.Close()
	}
	mustHold(t, s, now)
}

// dumpAt is the content at a session's view.
func dumpAt(t testing.TB, x *session) map[string]string {
	t.Helper()
	c, err := x.Scan(mvcc.ScanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	all := map[string]string{}
	for c.Next() {
		all[string(c.Key())] = string(c.Value())
	}
	if c.Err() != nil {
		t.Fatal(c.Err())
	}
	return all
}

// shrinkScript fills a store, deletes most of it, and lets checkpoints shrink the file. acked
// counts the rounds that were acknowledged.
func shrinkScript(fs vfs.FS, acked *int) (keys.Epoch, error) {
	o := modelOptions(fs)
	s, err := mvcc.Open(o)
	if err != nil {
		return 0, err
	}
	err = func() error {
		x, err := openSession(s)
		if err != nil {
			return err
		}
		defer x.Close()
		for round := range shrinkRounds {
			w := mvcc.Write{Durability: mvcc.DurabilitySync}
			shrinkRound(round, w.Set, w.Delete)
			if _, err := commitAndWait(x, &w); err != nil {
				return err
			}
			*acked = round + 1
			if err := s.Checkpoint(context.Background()); err != nil {
				return err
			}
		}
		return nil
	}()
	at := s.Visible()
	return at, errors.Join(err, s.Close())
}

const shrinkRounds = 12

// shrinkRound is what round n writes: three rounds of puts, then deletions, then a single key a
// round.
func shrinkRound(n int, set func(k, v []byte), del func(k []byte)) {
	for i := range 60 {
		k := fmt.Appendf(nil, "k%d-%03d", n%3, i)
		switch {
		case n < 3:
			set(k, []byte(strings.Repeat("v", 40+i*20)))
		case n < 6 && i%8 > 0:
			del(k)
		}
	}
	set([]byte("round"), fmt.Appendf(nil, "%d", n))
}

func shrinkState(rounds int) map[string]string {
	m := map[string]string{}
	for n := range rounds {
		shrinkRound(n, func(k, v []byte) { m[string(k)] = string(v) }, func(k []byte) { delete(m, string(k)) })
	}
	return m
}

// TestShrinkingSurvivesACrashAtEveryOperation cuts the power at each file operation while pages
// move down and the file is cut.
func TestShrinkingSurvivesACrashAtEveryOperation(t *testing.T) {
	whole := vfs.NewMem()
	acked := 0
	if _, err := shrinkScript(whole, &acked); err != nil {
		t.Fatal(err)
	}
	full, err := whole.Size(dataFile)
	if err != nil {
		t.Fatal(err)
	}
	if full > 160<<10 {
		t.Errorf("the file did not shrink: it still has %d bytes", full)
	}
	ops := whole.Mutations()
	step := int64(3 * exhaustiveStep)
	if testing.Short() {
		step = 17
	}
	for k := int64(1); k <= ops; k += step {
		keep := []vfs.Survival{vfs.SurviveNone, vfs.SurviveSome, vfs.SurviveAll}[k/step%3]
		fs := vfs.NewMem()
		fs.CrashAt(k)
		acked = 0
		_, _ = shrinkScript(fs, &acked) // it ends where the power was cut
		left := fs.Crash(uint64(k), keep)
		verifyUnlessNew(t, left)
		s, err := mvcc.Open(modelOptions(left))
		if err != nil {
			t.Fatalf("crash at %d of %d: %v", k, ops, err)
		}
		got, found := dump(t, s), -1
		for n := acked; n <= shrinkRounds && found < 0; n++ {
			if equalMaps(shrinkState(n), got) == nil {
				found = n
			}
		}
		if found < 0 {
			t.Fatalf("crash at %d of %d, keep %v: %d rounds were acknowledged: %v", k, ops, keep, acked, equalMaps(shrinkState(acked), got))
		}
		mustClose(t, s)
	}
}

// verifyUnlessNew verifies what a crash left, if that is a store already.
func verifyUnlessNew(t *testing.T, fs *vfs.Mem) {
	t.Helper()
	if _, err := fs.Size(dataFile); err == nil {
		verifyFiles(t, modelOptions(fs))
	}
}

// TestFileShrinksAfterDeletions: most keys go, light writes follow, and the space comes back
// without anybody asking.
func TestFileShrinksAfterDeletions(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Storage.PageSize = 4096
	s := mustOpen(t, o)
	want := entriesFor("x", 20_000, 1, rand.New(rand.NewPCG(4, 4)))
	mustLoad(t, s, want)
	before := s.Stats().Storage.Pages.FileBytes
	x := mustSession(t, s)
	defer x.Close()
	for i := 0; i < 20_000; i += 1000 {
		if _, err := x.DeleteRange(context.Background(), mvcc.RangeDelete{
			Lower: fmt.Appendf(nil, "key-%05d", i), Upper: fmt.Appendf(nil, "key-%05d", i+900),
		}); err != nil {
			t.Fatal(err)
		}
	}
	deadline := time.Now().Add(20 * time.Second)
	for i := 0; ; i++ {
		if _, err := put(x, "light", fmt.Sprint(i), mvcc.DurabilitySync); err != nil {
			t.Fatal(err)
		}
		if err := s.Checkpoint(context.Background()); err != nil {
			t.Fatal(err)
		}
		p := s.Stats().Storage.Pages
		live := int64(p.Live) * int64(p.PageSize)
		if p.FileBytes <= 2*live+int64(64*p.PageSize) {
			t.Logf("%d bytes after %d checkpoints, %d before, %d live", p.FileBytes, i+1, before, live)
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the file has %d bytes, %d are live, %d before", p.FileBytes, live, before)
		}
	}
	mustVerify(t, s)
}
