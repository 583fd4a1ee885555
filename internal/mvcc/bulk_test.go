package mvcc

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// load makes a bulk load of entries in random order.
func load(s *Store, entries map[string]string) (BulkLoaded, error) {
	l, err := s.BeginBulkLoad()
	if err != nil {
		return BulkLoaded{}, err
	}
	for k, v := range entries {
		if err := l.Add([]byte(k), []byte(v)); err != nil {
			return BulkLoaded{}, errors.Join(err, l.Close())
		}
	}
	out, err := l.Commit(context.Background())
	return out, errors.Join(err, l.Close())
}

func mustLoad(t testing.TB, s *Store, entries map[string]string) BulkLoaded {
	t.Helper()
	out, err := load(s, entries)
	if err != nil || out.Keys != uint64(len(entries)) {
		t.Fatalf("bulk load: %+v, %v", out, err)
	}
	mustVerify(t, s)
	return out
}

// entriesFor makes n entries; some values do not fit into a leaf, some not into a page.
func entriesFor(tag string, n, step int, rng *rand.Rand) map[string]string {
	all := make(map[string]string, n)
	for i := range n {
		size := rng.IntN(100)
		switch rng.IntN(40) {
		case 0:
			size = 2000 + rng.IntN(200)
		case 1:
			size = 8000 + rng.IntN(20000)
		}
		all[fmt.Sprintf("key-%05d", i*step)] = tag + strings.Repeat("v", size)
	}
	return all
}

func mustHold(t testing.TB, s *Store, want map[string]string) {
	t.Helper()
	if err := equalMaps(want, dump(t, s)); err != nil {
		t.Fatal(err)
	}
}

// TestBulkLoadMergesIntoWhatIsThere makes bulk loads into an empty store, into the same keys again,
// and while other keys are only in memory. After a restart every key has its newest value.
func TestBulkLoadMergesIntoWhatIsThere(t *testing.T) {
	const seed = 3
	rng := rand.New(rand.NewPCG(seed, 0))
	fs := vfs.NewMem()
	s := mustOpen(t, tiny(fs))
	want := entriesFor("a", 3000, 2, rng)
	first := mustLoad(t, s, want)
	mustHold(t, s, want)

	mustPut(t, s, "key-00001", "put before")
	mustPut(t, s, "key-00004", "will be loaded over")
	second := entriesFor("b", 500, 4, rng)
	out := mustLoad(t, s, second)
	if out.Epoch <= first.Epoch+2 {
		t.Fatalf("second bulk load at %d, after the first at %d and two puts", out.Epoch, first.Epoch)
	}
	want["key-00001"] = "put before"
	maps.Copy(want, second)
	mustHold(t, s, want)
	if e := mustPut(t, s, "key-00000", "put after"); e != out.Epoch+1 {
		t.Fatalf("a put after the bulk load at %d has epoch %d", out.Epoch, e)
	}
	want["key-00000"] = "put after"
	mustHold(t, s, want)

	mustClose(t, s)
	s = mustOpen(t, tiny(fs))
	mustHold(t, s, want)
	noSpoolsLeft(t, fs)
}

func noSpoolsLeft(t testing.TB, fs vfs.FS) {
	t.Helper()
	names, err := fs.List("db")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if strings.HasSuffix(name, ".tmp") {
			t.Fatalf("%s was not removed", name)
		}
	}
}

// fileBytes is the size of all files of a store.
func fileBytes(t testing.TB, fs vfs.FS) (sum int64) {
	t.Helper()
	for _, dir := range []string{"db", "db/wal"} {
		names, err := fs.List(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			if size, err := fs.Size(dir + "/" + name); err == nil { // a directory has none
				sum += size
			}
		}
	}
	return sum
}

// retaining keeps every epoch readable.
func retaining() Options {
	o := tiny(vfs.NewMem())
	o.Retention = time.Hour
	return o
}

// TestSnapshotFromBeforeABulkLoadDoesNotSeeIt: it does not see it after a later checkpoint either.
func TestSnapshotFromBeforeABulkLoadDoesNotSeeIt(t *testing.T) {
	s := mustOpen(t, retaining())
	mustPut(t, s, "a", "old")
	x := mustSession(t, s)
	defer x.Close()
	at, err := x.OpenSnapshot(0)
	if err != nil {
		t.Fatal(err)
	}
	out := mustLoad(t, s, map[string]string{"a": "loaded", "b": "loaded"})
	for range 2 {
		if got := get(t, s, "a", at) + get(t, s, "b", at); got != "old-" {
			t.Fatalf("snapshot at %d, before the bulk load: %q", at, got)
		}
		if got := get(t, s, "a", out.Epoch) + get(t, s, "b", 0); got != "loadedloaded" {
			t.Fatalf("at %d: %q", out.Epoch, got)
		}
		mustPut(t, s, "c", "later")
		if err := s.Checkpoint(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
}

// TestOneBulkLoadAtATime: a second bulk load is refused while one is open, and a cancelled one
// leaves nothing.
func TestOneBulkLoadAtATime(t *testing.T) {
	fs := vfs.NewMem()
	s := mustOpen(t, tiny(fs))
	mustPut(t, s, "a", "there")
	l, err := s.BeginBulkLoad()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.BeginBulkLoad(); !errors.Is(err, ErrBulkLoadBusy) {
		t.Fatalf("second bulk load: %v", err)
	}
	if err := l.Add([]byte("a"), []byte("never")); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := l.Commit(ctx); !errors.Is(err, context.Canceled) {
		t.Fatalf("canceled: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	noSpoolsLeft(t, fs)
	mustHold(t, s, map[string]string{"a": "there"})
	mustLoad(t, s, map[string]string{"a": "now"})
	mustHold(t, s, map[string]string{"a": "now"})
}

// TestLimitsHoldForBulkLoads: entries at the limit are accepted, and entries one byte larger are
// refused.
func TestLimitsHoldForBulkLoads(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Limits.ValueBytes, o.Limits.KeyBytes = 5000, 100
	s := mustOpen(t, o)
	l, err := s.BeginBulkLoad()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	var limit *LimitError
	if err := l.Add(make([]byte, 100), make([]byte, 5000)); err != nil {
		t.Fatal(err)
	}
	if err := l.Add(make([]byte, 101), nil); !errors.As(err, &limit) {
		t.Fatalf("long key: %v", err)
	}
	if err := l.Add([]byte("k"), make([]byte, 5001)); !errors.As(err, &limit) {
		t.Fatalf("long value: %v", err)
	}
	if err := l.Add(nil, nil); !errors.Is(err, ErrEmptyKey) {
		t.Fatalf("no key: %v", err)
	}
}

// TestCommitsThatReadSeeEveryBulkLoad increments counters, by invocations and by transactions at
// both levels, while bulk loads set them: a commit that read a counter before a bulk load and wrote
// it after would lose the value of the bulk load.
func TestCommitsThatReadSeeEveryBulkLoad(t *testing.T) {
	const counters, base = 8, 1_000_000
	s := mustOpen(t, tiny(vfs.NewMem()))
	set := func(generation int) map[string]string {
		all := map[string]string{}
		for i := range counters {
			all[fmt.Sprintf("n%d", i)] = strconv.Itoa(generation * base)
		}
		for i := range 200 {
			all[fmt.Sprintf("other-%d-%d", generation, i)] = strings.Repeat("x", 50)
		}
		return all
	}
	mustLoad(t, s, set(1))
	var stop atomic.Bool
	var done sync.WaitGroup
	defer done.Wait()
	defer stop.Store(true)
	for g := range 6 {
		done.Go(func() {
			x := mustSession(t, s)
			defer x.Close()
			for n := 0; !stop.Load(); n++ {
				if err := incrementSomehow(x, []byte(fmt.Sprintf("n%d", n%counters)), g%3); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for generation := 2; generation < 12-6*testseed.RaceDetector; generation++ {
		time.Sleep(5 * time.Millisecond)
		mustLoad(t, s, set(generation))
		for i := range counters {
			key := fmt.Sprintf("n%d", i)
			if n, err := strconv.Atoi(get(t, s, key, 0)); err != nil || n/base != generation {
				t.Fatalf("after bulk load %d %s is %d: an increment was committed after the bulk load and did not see it", generation, key, n)
			}
		}
	}
}

// incrementSomehow adds one to a counter.
func incrementSomehow(x *Session, key []byte, how int) error {
	if how == 0 {
		out := make([]Invoked, 1)
		_, err := x.InvokeAll(context.Background(), []Invoke{{Kind: InvokeAdd, Key: key, Delta: 1}}, nil, DurabilityAsync, out)
		return err
	}
	level := IsolationSnapshot
	if how == 2 {
		level = IsolationSerializable
	}
	txn, err := x.Begin(TxnOptions{Isolation: level})
	if err != nil {
		return err
	}
	_, err = txn.Invoke(&Invoke{Kind: InvokeAdd, Key: key, Delta: 1})
	if err != nil {
		txn.Rollback()
		return err
	}
	_, err = txn.Commit(context.Background())
	var conflict *ConflictError
	if errors.As(err, &conflict) {
		return nil
	}
	return err
}

// loadScript writes, makes a bulk load and writes again. It reports the acknowledged steps and
// returns when fs crashes.
func loadScript(fs vfs.FS, told *[]string) error {
	o := tiny(fs)
	o.SyncInterval = time.Hour
	s, err := Open(o)
	if err != nil {
		return err
	}
	step := func(name string, err error) error {
		if err == nil {
			*told = append(*told, name)
		}
		return err
	}
	err = func() error {
		x, err := s.Session()
		if err != nil {
			return err
		}
		defer x.Close()
		if _, err := put(x, "key-00000", "before", DurabilitySync); step("put", err) != nil {
			return err
		}
		if _, err := load(s, scriptLoad("one", 40)); step("one", err) != nil {
			return err
		}
		if _, err := put(x, "key-00001", "between", DurabilitySync); step("between", err) != nil {
			return err
		}
		_, err = load(s, scriptLoad("two", 30))
		return step("two", err)
	}()
	return errors.Join(err, s.Close())
}

func scriptLoad(tag string, n int) map[string]string {
	return entriesFor(tag, n, 1, rand.New(rand.NewPCG(9, uint64(n))))
}

// scriptStates are the states between the steps of loadScript.
func scriptStates() []map[string]string {
	states := []map[string]string{{}}
	next := func(change map[string]string) {
		m := maps.Clone(states[len(states)-1])
		maps.Copy(m, change)
		states = append(states, m)
	}
	next(map[string]string{"key-00000": "before"})
	next(scriptLoad("one", 40))
	next(map[string]string{"key-00001": "between"})
	next(scriptLoad("two", 30))
	return states
}

// TestBulkLoadSurvivesACrashAtEveryOperationWholeOrNotAtAll cuts the power at each file operation
// of two bulk loads.
func TestBulkLoadSurvivesACrashAtEveryOperationWholeOrNotAtAll(t *testing.T) {
	whole := vfs.NewMem()
	var told []string
	if err := loadScript(whole, &told); err != nil || len(told) != 4 {
		t.Fatal(told, err)
	}
	states, ops := scriptStates(), whole.Mutations()
	for k := int64(1); k <= ops; k += exhaustiveStep {
		for i, keep := range []vfs.Survival{vfs.SurviveNone, vfs.SurviveSome, vfs.SurviveAll} {
			fs := vfs.NewMem()
			fs.CrashAt(k)
			told = told[:0]
			_ = loadScript(fs, &told) // it ends where the power was cut
			left := fs.Crash(uint64(k)*3+uint64(i), keep)
			checkLoaded(t, left, states, len(told), fmt.Sprintf("crash at %d of %d, keep %v", k, ops, keep))
		}
	}
}

// checkLoaded checks that the store has one of the states, the acknowledged one or a later one.
func checkLoaded(t *testing.T, fs vfs.FS, states []map[string]string, told int, what string) {
	t.Helper()
	s, err := Open(tiny(fs))
	if err != nil {
		t.Fatalf("%s: reopen: %v", what, err)
	}
	got := dump(t, s)
	mustClose(t, s)
	noSpoolsLeft(t, fs)
	for _, state := range states[told:] {
		if equalMaps(state, got) == nil {
			return
		}
	}
	t.Fatalf("%s: %d keys are none of the states from state %d on: %v", what, len(got), told, equalMaps(states[told], got))
}

// TestVisibleDoesNotPassARunningBulkLoad: commits after the epoch of a bulk load are acknowledged
// after it, and no reader sees them without it.
func TestVisibleDoesNotPassARunningBulkLoad(t *testing.T) {
	s := mustOpen(t, retaining())
	var loaded atomic.Bool
	var done sync.WaitGroup
	var epochs [3][]keys.Epoch
	for g := range epochs {
		done.Go(func() {
			for i := 0; !loaded.Load() || i < 10; i++ {
				epochs[g] = append(epochs[g], mustPut(t, s, fmt.Sprintf("w%d", g), strconv.Itoa(i)))
			}
		})
	}
	done.Go(func() { // readers: a reader that sees an epoch after the load's sees the load
		x := mustSession(t, s)
		defer x.Close()
		for !loaded.Load() {
			v, err := x.Get(nil, []byte("key-00000"), 0)
			if err != nil {
				t.Error(err)
				return
			}
			if v.Found && v.Epoch > v.At {
				t.Errorf("read at %d a value of %d", v.At, v.Epoch)
			}
		}
	})
	time.Sleep(10 * time.Millisecond)
	out, err := load(s, entriesFor("x", 4000/(1+3*testseed.RaceDetector), 1, rand.New(rand.NewPCG(1, 2))))
	if err != nil {
		t.Fatal(err)
	}
	loaded.Store(true)
	done.Wait()
	for e := max(out.Epoch, 3) - 2; e < out.Epoch+3; e++ {
		x := mustSession(t, s)
		v, err := x.Get(nil, []byte("key-00000"), e)
		x.Close()
		var gone *SnapshotGoneError
		if errors.As(err, &gone) {
			continue
		}
		if err != nil || v.Found != (e >= out.Epoch) {
			t.Fatalf("at %d, bulk load at %d: found %v, %v", e, out.Epoch, v.Found, err)
		}
	}
	mustVerify(t, s)
}

// TestFullDiskEndsABulkLoadAndNothingElse fills the disk at many points of a bulk load. The error
// says that the disk is full, no entry is visible and the temporary files are removed. With free
// space again the store works as before.
func TestFullDiskEndsABulkLoadAndNothingElse(t *testing.T) {
	testseed.SkipUnderRace(t)
	entries := entriesFor("x", 2000, 1, rand.New(rand.NewPCG(6, 6)))
	refused, loaded := 0, 0
	for room := int64(10 << 10); loaded == 0; room += 211 << 10 {
		fs := vfs.NewMem()
		s := mustOpen(t, tiny(fs))
		mustPut(t, s, "before", "1")
		fs.SetCapacity(fileBytes(t, fs) + room)
		_, err := load(s, entries)
		switch {
		case err == nil:
			loaded++
		case errors.Is(err, vfs.ErrNoSpace):
			refused++
			mustHold(t, s, map[string]string{"before": "1"})
		default:
			t.Fatalf("with %d bytes of room: %v", room, err)
		}
		noSpoolsLeft(t, fs)
		fs.SetCapacity(1 << 40)
		mustPut(t, s, "after", "1")
		if err == nil {
			entries["before"], entries["after"] = "1", "1"
			mustHold(t, s, entries)
		} else {
			mustHold(t, s, map[string]string{"before": "1", "after": "1"})
		}
		mustClose(t, s)
	}
	if refused < 5 {
		t.Errorf("the disk was full %d times only", refused)
	}
}

// TestCanceledBulkLoadIsWholeOrNotAtAll cancels at many points of the commit. A bulk load that
// fails leaves an epoch without a commit, and later commits succeed.
func TestCanceledBulkLoadIsWholeOrNotAtAll(t *testing.T) {
	entries := entriesFor("x", 300, 1, rand.New(rand.NewPCG(8, 8)))
	canceled := 0
	for k := int64(1); ; k += 1 + 3*testseed.RaceDetector {
		fs := vfs.NewMem()
		s := mustOpen(t, tiny(fs))
		mustPut(t, s, "before", "1")
		l, err := s.BeginBulkLoad()
		if err != nil {
			t.Fatal(err)
		}
		for key, value := range entries {
			if err := l.Add([]byte(key), []byte(value)); err != nil {
				t.Fatal(err)
			}
		}
		ctx, cancel := context.WithCancel(context.Background())
		var ops atomic.Int64
		fs.SetHook(func(vfs.Op, string) {
			if ops.Add(1) == k {
				cancel()
			}
		})
		out, err := l.Commit(ctx)
		fs.SetHook(nil)
		ended := ctx.Err() == nil
		cancel()
		if closed := l.Close(); closed != nil {
			t.Fatal(closed)
		}
		want := map[string]string{"before": "1", "after": "1"}
		after := mustPut(t, s, "after", "1")
		switch {
		case err == nil:
			maps.Copy(want, entries)
			if after != out.Epoch+1 {
				t.Errorf("a put at %d after a bulk load at %d", after, out.Epoch)
			}
		case errors.Is(err, context.Canceled):
			canceled++
		default:
			t.Fatalf("canceled at %d: %v", k, err)
		}
		got := dump(t, s)
		if err := equalMaps(want, got); err != nil {
			t.Fatalf("canceled at operation %d: %v", k, err)
		}
		noSpoolsLeft(t, fs)
		mustClose(t, s)
		if ended {
			break
		}
	}
	if canceled < 10 {
		t.Errorf("canceled %d times only", canceled)
	}
}

// TestBulkLoadOfTheLongestKeys: the index of a run with the longest keys has several levels. The load is sorted from several runs,
// merged in parts, and is on the device afterwards.
func TestBulkLoadOfTheLongestKeys(t *testing.T) {
	testseed.SkipUnderRace(t)
	o := tiny(vfs.NewMem())
	o.Storage.PageSize, o.Storage.MemoryBytes, o.Storage.CacheBytes = 64<<10, 32<<20, 8<<20
	s := mustOpen(t, o)
	pad, entries := strings.Repeat("k", page.UserKeyMax(64<<10)-4), map[string]string{}
	for i := range 600 {
		entries[fmt.Sprintf("%04d", i)+pad] = strconv.Itoa(i)
	}
	mustLoad(t, s, entries)
	mustClose(t, s)
	s = mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	for k, want := range entries {
		if v, err := x.Get(nil, []byte(k), 0); err != nil || string(v.Data) != want {
			t.Fatalf("%.4s is %q, %v; expected %s", k, v.Data, err, want)
		}
	}
}
