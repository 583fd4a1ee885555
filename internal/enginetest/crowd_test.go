package enginetest

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

var (
	crowdSeeds = flag.Int("crowd.seeds", crowdRuns, "runs of TestCrowd")
	crowdFiles = flag.Bool("crowd.files", false, "TestCrowd on a real file system, with io_uring and direct I/O, without crashes")
	crowdTime  = flag.Duration("crowd.time", 150*time.Millisecond, "how long TestCrowd works between two restarts")
)

// TestCrowd does at the same time what TestTurmoil does one after the other: several goroutines commit batches, transactions, range deletions
// and bulk loads, each to its own keys, others read snapshots, follow the log, copy the store, verify it, make checkpoints, change the
// cache, fill the disk, damage pages and let operations fail, until the store is closed or the machine crashes. Then
// it starts again. Every snapshot, and what every crash leaves, must have each member's keys as one of its commits left them, no older than
// what was acknowledged, and of the commits of all members those up to one epoch.
func TestCrowd(t *testing.T) {
	base := testseed.Base(t)
	total := map[string]int{}
	for run := range uint64(max(1, *crowdSeeds)) {
		if !t.Run(fmt.Sprint("seed ", base+run), func(t *testing.T) { inCrowd(t, base+run, total) }) {
			t.FailNow()
		}
	}
	t.Log(total)
}

// crowd is one run.
type crowd struct {
	*testing.T
	rng     *rand.Rand
	mem     *vfs.Mem
	files   *vfs.OS // instead of mem, which has nothing then, if the test runs on a real file system
	faulty  []*vfs.Faulty
	o       mvcc.Options
	s       *mvcc.Store
	members []*member
	faults  bool // pages are damaged, or were
	failing bool // operations that change something fail
	full    bool // the disk becomes full
	rounds  int

	stop    atomic.Bool
	serials atomic.Uint64 // of random sources
	mu      sync.Mutex
	total   map[string]int
}

const crowdCapacity = 512 << 20

func inCrowd(t *testing.T, seed uint64, total map[string]int) {
	c := &crowd{T: t, rng: rand.New(rand.NewPCG(seed, 78)), mem: vfs.NewMem(), total: total}
	c.serials.Store(seed << 20)
	c.o = modelOptions(nil)
	o := &c.o.Storage
	o.PageSize = []int{512, 1024, 8192, 65536}[c.rng.IntN(4)]
	o.CacheBytes = int64(16*o.PageSize + c.rng.IntN(1<<20))
	o.MemtableBytes, o.SegmentBytes = 32<<10<<c.rng.IntN(4), 32<<10<<c.rng.IntN(4)
	o.MemoryBytes, o.StallMax = o.CacheBytes+32<<20, 30*time.Second
	o.DiskReserve = storage.DiskReserveDerived
	o.FeatureLevel = keys.FeatureLevel(1 + c.rng.IntN(2))
	c.o.SyncInterval = time.Millisecond
	if c.rng.IntN(2) == 0 {
		o.ChangeLog = storage.ChangeLog{Age: time.Hour, Bytes: 1 << 20}
	}
	c.failing, c.full = c.rng.IntN(3) == 0, c.rng.IntN(3) == 0
	longest := []int{0, 100, storage.KeyBytesMax(o.PageSize)}[c.rng.IntN(3)]
	big := []int{600, 9000, 70000}[c.rng.IntN(3)]
	for i := range 3 + c.rng.IntN(4) {
		c.members = append(c.members, newMember(i, memberWrites, 3+c.rng.IntN(40), longest, big))
	}
	c.members = append(c.members, newMember(len(c.members), memberClears, 10+c.rng.IntN(60), 0, min(big, 9000)))
	c.members = append(c.members, newMember(len(c.members), memberLoads, 3+c.rng.IntN(200), longest, min(big, 9000)))
	c.mem.SetCapacity(crowdCapacity)
	damages := c.rng.IntN(4) == 0
	if *crowdFiles {
		c.openFiles()
		defer func() { _ = c.files.Close() }()
	}
	if c.failing || c.full { // writers wait for what comes late or never
		o.StallMax = 300 * time.Millisecond
	}
	for c.rounds = range 3 + c.rng.IntN(4) {
		if c.start(); c.s == nil {
			return
		}
		c.faults = c.faults || damages && c.rounds > 0
		c.work()
		if t.Failed() {
			return
		}
	}
}

// base is the file system without the faults.
func (c *crowd) base() vfs.FS {
	if c.files != nil {
		return c.files
	}
	return c.mem
}

// openFiles lets the test run on a real file system.
func (c *crowd) openFiles() {
	c.Chdir(c.TempDir())
	files, err := vfs.OpenOS(vfs.IOAuto)
	if err != nil {
		c.Fatal(err)
	}
	c.files, c.full = files, false
}

// random is a source for one goroutine.
func (c *crowd) random() *rand.Rand { return rand.New(rand.NewPCG(c.serials.Add(1), 3)) }

func (c *crowd) count(what string) {
	c.mu.Lock()
	c.total[what]++
	c.mu.Unlock()
}

// start opens the store, and checks what it has.
func (c *crowd) start() {
	c.Helper()
	c.mem.SetCapacity(crowdCapacity)
	if c.rounds > 0 && c.files == nil && c.rng.IntN(2) == 0 {
		c.ruin()
	}
	salvaged := c.offline()
	c.faulty = []*vfs.Faulty{vfs.NewFaulty(c.base())}
	c.o.Storage.FS = c.faulty[0]
	if c.files != nil && c.rng.IntN(2) == 0 {
		c.faulty = append(c.faulty, vfs.NewFaulty(c.files.Direct()))
		c.o.Storage.DataFS = c.faulty[1]
	} else {
		c.o.Storage.DataFS = nil
	}
	s, err := mvcc.Open(c.o)
	if err != nil && c.faults && asDamage(err) {
		c.count("refused to start")
		c.s = nil
		return
	}
	if err != nil {
		c.Fatalf("round %d: open: %v", c.rounds, err)
	}
	c.s = s
	x := mustSession(c, s)
	defer x.Close()
	serials := c.snapshot(x, false, false)
	if salvaged != nil && serials != nil {
		c.compareSalvaged(salvaged, serials)
	}
	if serials == nil { // damage
		for _, m := range c.members {
			m.restart(0)
		}
		return
	}
	c.checkOrder(serials)
	for i, m := range c.members {
		if serials[i] < m.durable.Load() || serials[i] > m.begun.Load() {
			c.Fatalf("round %d: member %d is after commit %d of %d, of which %d were acknowledged", c.rounds, m.id, serials[i], m.begun.Load(), m.durable.Load())
		}
		m.restart(serials[i])
	}
	if !c.faults {
		mustVerify(c, s)
	}
}

// restart goes on after a commit.
func (m *member) restart(serial int64) {
	m.visible.Store(0)
	if m.begun.Load() >= serial {
		m.visible.Store(serial)
	}
	m.durable.Store(m.visible.Load())
	clear(m.epochs)
}

// offline tries the tools for a store that is not open.
func (c *crowd) offline() map[string]string {
	c.Helper()
	if c.rounds == 0 || c.rng.IntN(3) > 0 {
		return nil
	}
	c.count("salvage")
	got, report := mustSalvage(c, c.base())
	if !c.faults && (report.LostTotal > 0 || len(report.Notes) > 0) {
		c.Errorf("salvage of an intact store: %d lost, %v", report.LostTotal, report.Notes)
	}
	return got
}

func (c *crowd) compareSalvaged(got map[string]string, serials []int64) {
	c.Helper()
	for i, m := range c.members {
		want := m.at(serials[i])
		for _, k := range m.keys {
			v, is := got[k]
			if (v != want[k] || is != (want[k] != "")) && (!c.faults || is && v != want[k]) {
				c.Errorf("round %d: salvage: member %d after commit %d: %.20q has %.40q (%v), want %.40q", c.rounds, m.id, serials[i], k, v, is, want[k])
			}
		}
	}
}

// checkOrder checks that what is there is the commits up to one epoch.
func (c *crowd) checkOrder(serials []int64) {
	c.Helper()
	var newest, lost keys.Epoch
	for i, m := range c.members {
		for serial, e := range m.epochs {
			if serial <= serials[i] {
				newest = max(newest, e)
			} else if lost == 0 || e < lost {
				lost = e
			}
		}
	}
	if lost != 0 && lost < newest {
		c.Fatalf("round %d: epoch %d is lost, and epoch %d is there", c.rounds, lost, newest)
	}
}

// bearable reports whether an error may come from what the test has done.
func (c *crowd) bearable(err error) bool {
	return c.faults && asDamage(err) || c.mem.Crashed() || c.s.Err() != nil
}

// refusal reports whether an error means that a commit did not happen, and is expected.
func (c *crowd) refusal(err error) bool {
	var conflict *mvcc.ConflictError
	for _, is := range []error{vfs.ErrNoSpace, storage.ErrMemoryFull, storage.ErrNoSegment, storage.ErrReserveUnchecked, context.Canceled, context.DeadlineExceeded} {
		if errors.Is(err, is) {
			return true
		}
	}
	return errors.As(err, &conflict) || c.faults && asDamage(err) || c.failing
}

// work lets everything run for a while, and ends it.
func (c *crowd) work() {
	c.Helper()
	c.stop.Store(false)
	crashes := c.rng.IntN(3) > 0 && c.files == nil
	if crashes && c.rng.IntN(2) == 0 {
		c.mem.CrashAt(c.mem.Mutations() + 1 + c.rng.Int64N(4000))
	}
	var all sync.WaitGroup
	run := func(do func(*rand.Rand), pause time.Duration) {
		rng := c.random()
		all.Go(func() {
			for !c.stop.Load() && !c.mem.Crashed() && !c.Failed() {
				do(rng)
				if pause > 0 {
					time.Sleep(time.Duration(rng.Int64N(int64(pause))))
				}
			}
		})
	}
	for _, m := range c.members {
		all.Go(func() { c.write(m, c.random()) })
	}
	for range 2 {
		run(c.read, time.Millisecond)
	}
	for _, chore := range []func(*rand.Rand){c.checkpoint, c.resize, c.resize, c.verify, c.space, c.follow, c.pinCopy, c.disturb} {
		run(chore, 10*time.Millisecond)
	}
	for end := time.Now().Add(*crowdTime/2 + time.Duration(c.rng.Int64N(int64(*crowdTime)))); time.Now().Before(end) && !c.mem.Crashed() && !c.Failed(); {
		time.Sleep(time.Millisecond)
	}
	if c.Failed() {
		crashes = false
	}
	if !crashes && !c.mem.Crashed() {
		c.stop.Store(true)
		all.Wait()
		c.end()
		return
	}
	c.count("crash")
	for _, m := range c.members { // what was acknowledged before the crash
		m.mu.Lock()
	}
	survival := []vfs.Survival{vfs.SurviveSome, vfs.SurviveSome, vfs.SurviveNone, vfs.SurviveAll, vfs.SurviveProcess}[c.rng.IntN(5)]
	left := c.mem.Crash(c.rng.Uint64(), survival)
	for _, m := range c.members {
		m.mu.Unlock()
	}
	c.stop.Store(true)
	all.Wait()
	_ = c.s.Close() // it has crashed
	c.mem = left
}

// end closes the store, and checks the files.
func (c *crowd) end() {
	c.Helper()
	c.mem.SetCapacity(crowdCapacity)
	failed := c.s.Err()
	err := c.s.Close()
	slow := c.full && errors.Is(err, storage.ErrNoSegment) // within StallMax
	if failed != nil || err != nil && (slow || c.failing || c.faults && asDamage(err)) {
		c.count("failed")
		if c.files == nil {
			c.mem = c.mem.Crash(c.rng.Uint64(), vfs.SurviveProcess)
		}
		return
	}
	if err != nil {
		c.Errorf("close: %v", err)
		return
	}
	for _, m := range c.members {
		m.durable.Store(m.visible.Load())
	}
	if !c.faults {
		verifyFiles(c, c.o)
	}
	if c.files == nil && c.rng.IntN(2) == 0 {
		c.mem = c.mem.Crash(c.rng.Uint64(), vfs.SurviveNone)
	}
}

// write makes commits of a member.
func (c *crowd) write(m *member, rng *rand.Rand) {
	x, err := openSession(c.s)
	if err != nil {
		return
	}
	defer x.Close()
	certain := false
	for !c.stop.Load() && !c.mem.Crashed() && !c.Failed() {
		serial := m.next(certain)
		certain = true
		var e keys.Epoch
		d := []mvcc.Durability{mvcc.DurabilityAsync, mvcc.DurabilitySync}[rng.IntN(2)]
		if m.kind == memberLoads {
			d = mvcc.DurabilitySync
			e, err = c.load(m, serial, rng)
		} else {
			e, err = m.commit(x, serial, d, m.kind == memberWrites && rng.IntN(4) == 0)
		}
		switch {
		case err == nil:
			m.committed(serial, e)
			c.count([]string{"commit", "bulk load", "range deletion"}[m.kind])
		case c.mem.Crashed() || c.s.Err() != nil:
			return
		case c.refusal(err):
			m.refuse(serial)
			certain = false
			c.count(fmt.Sprintf("refused (full %v failing %v faults %v kind %d): %.60s", c.full, c.failing, c.faults, m.kind, err.Error()))
			time.Sleep(time.Millisecond)
			continue
		default:
			c.Errorf("round %d: commit %d of member %d: %v", c.rounds, serial, m.id, err)
			return
		}
		if err := c.s.Wait(context.Background(), e, d); err != nil {
			if !c.mem.Crashed() && c.s.Err() == nil {
				c.Errorf("wait for %d: %v", e, err)
			}
			return
		}
		m.visible.Store(serial)
		if d == mvcc.DurabilitySync {
			m.mu.Lock()
			if !c.mem.Crashed() {
				m.durable.Store(serial)
			}
			m.mu.Unlock()
		}
		if v, err := x.Get(nil, []byte(m.keys[0]), 0); err != nil && !c.bearable(err) || err == nil && m.kind != memberClears && !strings.HasPrefix(string(v.Data), fmt.Sprint(serial, ":")) {
			c.Errorf("round %d: member %d does not see its commit %d: %.20q, %v", c.rounds, m.id, serial, v.Data, err)
		}
		if rng.IntN(3) == 0 {
			time.Sleep(time.Duration(rng.IntN(2000)) * time.Microsecond)
		}
	}
}

func (c *crowd) load(m *member, serial int64, rng *rand.Rand) (keys.Epoch, error) {
	ctx := context.Background()
	if rng.IntN(4) == 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(rng.IntN(20_000))*time.Microsecond)
		defer cancel()
	}
	l, err := c.s.BeginBulkLoad()
	if err != nil {
		return 0, err
	}
	for _, i := range rng.Perm(len(m.keys)) {
		v, _ := m.wrote(serial, i)
		if err == nil {
			err = l.Add([]byte(m.keys[i]), []byte(v))
		}
	}
	var out mvcc.BulkLoaded
	if err == nil {
		out, err = l.Commit(ctx)
	}
	if failed := l.Close(); failed != nil && !c.mem.Crashed() && !c.failing {
		c.Errorf("the bulk load does not close: %v", failed)
	}
	return out.Epoch, err
}
