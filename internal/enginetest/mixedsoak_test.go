package enginetest

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// The long form, a database of 20 times the budget for five minutes:
//
//	go test ./internal/enginetest -run TestMixedLoadStaysInItsBudget -v -timeout 15m -soak.mixed 5m -soak.memory 134217728 -soak.times 20
var (
	soakMixed  = flag.Duration("soak.mixed", 2*time.Second, "duration of the mixed soak test")
	soakTimes  = flag.Int("soak.times", 3-testseed.RaceDetector, "data of the mixed soak test, in memory budgets")
	soakDirect = flag.Bool("soak.direct", false, "the mixed soak test's data file past the kernel's page cache")
)

const (
	soakValueBytes = 400
	// stallMax is what no operation may take in the long form, on a machine that does nothing else.
	// Beside other tests on a busy machine the short form is held to less than the ten seconds for
	// which a writer waits for memory.
	stallMax      = 200 * time.Millisecond
	stallMaxShort = 8 * time.Second
	longForm      = time.Minute
)

// mixed is a store under every kind of load at once.
type mixed struct {
	*testing.T
	store *mvcc.Store
	count int // keys
	stop  atomic.Bool
	loads int // beside the other work; of reload, until the workers have ended
	kinds [mixedKinds]waits
}

const (
	mixedGet = iota
	mixedBatch
	mixedScan
	mixedPut
	mixedSync
	mixedKinds
)

var mixedNames = [mixedKinds]string{"get", "batch get", "scan", "put", "sync put"}

// waits is how long one kind of operation took.
type waits struct {
	mu    sync.Mutex
	count int
	long  int // over stallMax
	worst time.Duration
}

func (w *waits) since(began time.Time) {
	d := time.Since(began)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.count++
	w.worst = max(w.worst, d)
	if d > stallMax {
		w.long++
	}
}

// soakKey spreads the numbers, so that neighbours in time are none in the tree.
func soakKey(dst []byte, i int) []byte {
	dst = binary.BigEndian.AppendUint64(dst[:0], uint64(i)*0x9E3779B97F4A7C15)
	return binary.BigEndian.AppendUint64(dst, uint64(i))
}

func soakValue(dst []byte, i int) []byte {
	dst = binary.BigEndian.AppendUint64(dst[:0], uint64(i))
	for len(dst) < soakValueBytes {
		dst = append(dst, byte(i+len(dst)))
	}
	return dst
}

// TestMixedLoadStaysInItsBudget: gets, batches, scans, asynchronous and synchronous puts, a
// verification and bulk loads, all at once, on data that is larger than memory. What the engine
// says it has, and what the kernel says the process has, stay in the budget, and no request waits
// long.
func TestMixedLoadStaysInItsBudget(t *testing.T) {
	testseed.SkipUnderRace(t)
	files, err := vfs.OpenOS(vfs.IOAuto)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = files.Close() }()
	o := mvcc.Options{Storage: storage.Options{Dir: t.TempDir(), FS: files, MemoryBytes: *soakMemory}}
	if *soakDirect {
		o.Storage.DataFS = files.Direct()
	}
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(*soakMemory / 16)) // of the Go heap: what a quarter over the budget leaves for it, and for the process
	m := &mixed{T: t, store: mustOpen(t, o), count: int(*soakMemory) * *soakTimes / (soakValueBytes + 16)}
	before := residentBytes()
	m.load()
	laid := slowReads(files.Stats())
	peak := m.run()
	var stalls int
	for i := range m.kinds {
		k := &m.kinds[i]
		t.Logf("%-10s %8d, longest %v, %d longer than %v", mixedNames[i], k.count, k.worst, k.long, stallMax)
		stalls += k.long
		if k.count == 0 {
			t.Errorf("not a single %s", mixedNames[i])
		}
	}
	bound := *soakMemory * 5 / 4
	if *soakMixed < longForm {
		bound += before + shortOverhead // what earlier tests of the process have left, and what the race detector shadows
	}
	all := m.store.Stats()
	s := all.Storage
	t.Logf("%d keys, file %d MiB; resident before %d, peak %d MiB of %d, bound %d; %d bulk loads; %d operations longer than %v; stalls in the engine %d (%v), refused %d", m.count, s.Pages.FileBytes>>20,
		before>>20, peak>>20, *soakMemory>>20, bound>>20, m.loads, stalls, stallMax, s.Backpressure.Stalls, s.Backpressure.StallTime, s.Backpressure.Refused)
	slow := slowReads(files.Stats()) - laid
	t.Logf("single reads of the device longer than %v: %d; syncs of the log: %d; longest commit pause %v", stallMax/2, slow, slowSyncs(&s.Log), all.CommitPauseMax)
	if *soakMixed >= longForm && stalls > 0 {
		t.Errorf("%d operations took longer than %v", stalls, stallMax)
	}
	for i := range m.kinds {
		if worst := m.kinds[i].worst; worst > stallMaxShort {
			t.Errorf("a %s took %v", mixedNames[i], worst)
		}
	}
	if peak > bound {
		t.Errorf("%d MiB were resident, with a budget of %d; the bound is %d", peak>>20, *soakMemory>>20, bound>>20)
	}
	if m.loads == 0 {
		t.Error("no bulk load ran with the other operations")
	}
}

// slowReads counts single reads that by themselves took about half of what an operation may. They
// tell a stall of the device from one of ours.
func slowReads(s vfs.Stats) (n uint64) {
	for i, count := range s.Latencies[vfs.PathSingleRead].Buckets {
		if i > 0 && vfs.LatencyBound(i-1) >= stallMax/2 {
			n += count
		}
	}
	return n
}

// slowSyncs counts syncs of the log that by themselves took about half of what an operation may.
func slowSyncs(s *wal.Stats) (n uint64) {
	for i, count := range s.SyncDurations {
		if i > 0 && wal.SyncBound(i-1) >= stallMax/2 {
			n += count
		}
	}
	return n
}

// load fills the store through a bulk load.
func (m *mixed) load() {
	began := time.Now()
	m.bulk(0, m.count)
	m.Logf("loaded %d keys in %v, %d MiB resident", m.count, time.Since(began), residentBytes()>>20)
}

// bulk gives the keys [from, to) the values that they have in any case.
func (m *mixed) bulk(from, to int) {
	l, err := m.store.BeginBulkLoad()
	if err != nil {
		m.Error(err)
		return
	}
	var key, value []byte
	for i := from; i < to; i++ {
		key, value = soakKey(key, i), soakValue(value, i)
		if err := l.Add(key, value); err != nil {
			m.Error(err)
			break
		}
	}
	if _, err := l.Commit(context.Background()); err != nil {
		m.Error(err)
	}
	if err := l.Close(); err != nil {
		m.Error(err)
	}
}

// run works for the test's time, and says how much memory was resident at most.
func (m *mixed) run() (peak int64) {
	var wg sync.WaitGroup
	for i := range 2 {
		wg.Go(func() { m.each(mixedGet, i, m.get) })
		wg.Go(func() { m.each(mixedPut, i, m.put) })
	}
	wg.Go(func() { m.each(mixedBatch, 0, m.batch) })
	wg.Go(func() { m.each(mixedScan, 0, m.scan) })
	wg.Go(func() { m.each(mixedSync, 0, m.put) })
	wg.Go(m.verify)
	wg.Go(m.reload)
	for end := time.Now().Add(*soakMixed); time.Now().Before(end) && !m.Failed(); time.Sleep(20 * time.Millisecond) {
		peak = max(peak, residentBytes())
		all := m.store.Stats()
		s := all.Storage
		if used := s.Memory.CacheUsed + s.Memory.Memtables + s.Log.BufferBytes; used > *soakMemory {
			m.Errorf("the engine holds %d bytes (cache %d, memtables %d, log %d) of %d", used, s.Memory.CacheUsed, s.Memory.Memtables, s.Log.BufferBytes, *soakMemory)
		}
	}
	m.stop.Store(true)
	wg.Wait()
	return peak
}

// operation is one step of a worker: it times what a client would wait for, and nothing else.
type operation func(x *session, random *rand.Rand, kind *waits) error

func (m *mixed) each(kind, worker int, do operation) {
	x, err := openSession(m.store)
	if err != nil {
		m.Error(err)
		return
	}
	defer x.Close()
	random := rand.New(rand.NewPCG(uint64(kind), uint64(worker)))
	for !m.stop.Load() {
		if err := do(x, random, &m.kinds[kind]); err != nil {
			m.Errorf("%s: %v", mixedNames[kind], err)
			return
		}
	}
}

// pick chooses a key: half of them out of a twentieth, so that there is something to keep in
// memory.
func (m *mixed) pick(random *rand.Rand) int {
	if random.IntN(2) == 0 {
		return random.IntN(m.count/20 + 1)
	}
	return random.IntN(m.count)
}

func (m *mixed) get(x *session, random *rand.Rand, kind *waits) error {
	i := m.pick(random)
	began := time.Now()
	v, err := x.Get(nil, soakKey(nil, i), 0)
	kind.since(began)
	if err == nil && (!v.Found || string(v.Data) != string(soakValue(nil, i))) {
		err = fmt.Errorf("key %d: found %v, %x", i, v.Found, v.Data)
	}
	return err
}

func (m *mixed) put(x *session, random *rand.Rand, kind *waits) error {
	i := m.pick(random)
	durability := mvcc.DurabilityAsync
	if kind == &m.kinds[mixedSync] {
		durability = mvcc.DurabilitySync
	}
	w := mvcc.Write{Durability: durability}
	w.Set(soakKey(nil, i), soakValue(nil, i))
	began := time.Now()
	epoch, err := x.Commit(context.Background(), &w)
	if err == nil {
		err = m.store.Wait(context.Background(), epoch, durability)
	}
	kind.since(began)
	return err
}

func (m *mixed) batch(x *session, random *rand.Rand, kind *waits) error {
	var list [][]byte
	for range 64 {
		list = append(list, soakKey(nil, m.pick(random)))
	}
	began := time.Now()
	defer kind.since(began)
	if _, err := x.OpenSnapshot(0); err != nil {
		return err
	}
	defer x.CloseSnapshot()
	return x.ReadAll(context.Background(), list, func(_ int, v mvcc.Value) error {
		if !v.Found {
			return errors.New("a key is not found")
		}
		return nil
	})
}

// scan reads a hundred entries, and once in a while thousands.
func (m *mixed) scan(x *session, random *rand.Rand, kind *waits) error {
	limit := 100
	if random.IntN(50) == 0 {
		limit = 20_000
	}
	if _, err := x.OpenSnapshot(0); err != nil {
		return err
	}
	defer x.CloseSnapshot()
	c, err := x.Scan(mvcc.ScanOptions{Lower: soakKey(nil, random.IntN(m.count)), Reverse: random.IntN(4) == 0, Limit: limit})
	if err != nil {
		return err
	}
	for range limit {
		began := time.Now()
		more := c.Next()
		kind.since(began)
		if !more {
			break
		}
	}
	return c.Err()
}

func (m *mixed) verify() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		for !m.stop.Load() {
			time.Sleep(10 * time.Millisecond)
		}
		cancel()
	}()
	for !m.stop.Load() {
		report, err := m.store.Verify(ctx, inspect.VerifyOptions{PagesPerSecond: 5000})
		switch {
		case errors.Is(err, context.Canceled):
		case err != nil:
			m.Error(err)
			return
		default:
			mustBeSound(m, report)
		}
	}
}

// reload loads a fiftieth of the keys again, and again.
func (m *mixed) reload() {
	for part := 0; !m.stop.Load() && !m.Failed(); part = (part + 1) % 50 {
		m.bulk(m.count/50*part, m.count/50*(part+1))
		m.loads++
		time.Sleep(*soakMixed / 20)
	}
}
