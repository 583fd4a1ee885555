package mvcc

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// slowReads is a file system in which each read of the data file takes as long as delay says. It counts those that begin while counted
// reports true.
type slowReads struct {
	vfs.FS
	delay   atomic.Int64
	counted func() bool
	reads   atomic.Int64
}

// Open implements vfs.FS.
func (s *slowReads) Open(name string, mode vfs.Mode) (vfs.File, error) {
	f, err := s.FS.Open(name, mode)
	if err != nil || !strings.HasSuffix(name, ".ekv") {
		return f, err
	}
	return slowReadsFile{f, s}, nil
}

func (s *slowReads) wait() {
	if d := s.delay.Load(); d > 0 {
		if s.counted() {
			s.reads.Add(1)
		}
		time.Sleep(time.Duration(d))
	}
}

type slowReadsFile struct {
	vfs.File
	fs *slowReads
}

func (f slowReadsFile) ReadAt(p []byte, off int64) (int, error) {
	f.fs.wait()
	return f.File.ReadAt(p, off)
}

func (f slowReadsFile) ReadBatch(reqs []vfs.Request) error {
	f.fs.wait()
	return f.File.ReadBatch(reqs)
}

// TestCommitPauseOfABulkLoadIsShortOnASlowDevice: writers put random keys beside a bulk load, so that each version that the
// load merges costs a read of a slow device, and they are faster than such a merge. The commit pause waits for few reads:
// no more than lagMax has time for, in each worker, and as many for what is committed before the pause begins.
func TestCommitPauseOfABulkLoadIsShortOnASlowDevice(t *testing.T) {
	testseed.SkipUnderRace(t)
	const (
		count = 50_000
		delay = time.Millisecond
	)
	fs := &slowReads{FS: vfs.NewMem()}
	o := tiny(fs)
	o.Storage.PageSize = 4096 // so that neighbours in the input rarely share an inner node
	s := mustOpen(t, o)
	key := func(i int) []byte { return binary.BigEndian.AppendUint64(nil, uint64(i)*0x9E3779B97F4A7C15) }
	value := []byte(strings.Repeat("v", 300))
	bulk := func(n, step int) BulkLoaded {
		l, err := s.BeginBulkLoad()
		if err != nil {
			t.Fatal(err)
		}
		for i := range n {
			if err := l.Add(key(i*step), value); err != nil {
				t.Fatal(err)
			}
		}
		out, err := l.Commit(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		return out
	}
	bulk(count, 1)

	var stop atomic.Bool
	var writers sync.WaitGroup
	var puts atomic.Int64
	fs.counted = func() bool { return s.latches.table[stripes-1].state.Load()&latchHeld != 0 }
	fs.delay.Store(int64(delay))
	for g := range 4 {
		x, random := mustSession(t, s), rand.New(rand.NewPCG(uint64(g), 7))
		writers.Go(func() {
			defer x.Close()
			for !stop.Load() {
				if _, err := put(x, string(key(random.IntN(count))), fmt.Sprint(g, string(value)), DurabilityAsync); err != nil {
					t.Error(err)
					return
				}
				puts.Add(1)
				time.Sleep(delay / 4)
			}
		})
	}
	// On a busy machine more may be committed between the last look and the pause: one of a few loads must have a short one.
	most, fewest := 2*int64(lagMax/delay)*int64(runtime.GOMAXPROCS(0)), int64(math.MaxInt64)
	for attempt := 0; attempt < 5 && fewest > most; attempt++ {
		fs.reads.Store(0)
		out := bulk(200, 250)
		delayed := s.engine.ThrottleDelayPerKiB()
		t.Logf("%d puts; %d reads in a commit pause of %v; then a delay of %v for each KiB", puts.Load(), fs.reads.Load(), out.CommitPause, delayed)
		if delayed == 0 {
			fewest = min(fewest, fs.reads.Load())
		}
	}
	fs.delay.Store(0)
	stop.Store(true)
	s.StopThrottling()
	writers.Wait()
	if fewest > most {
		t.Errorf("the commit pauses waited for more than %d reads, of %d puts, or writers were delayed after them", most, puts.Load())
	}
}

// countedWrites is a file system that counts the bytes written to the data file while counted reports true.
type countedWrites struct {
	vfs.FS
	counted func() bool
	bytes   atomic.Int64
}

// Open implements vfs.FS.
func (c *countedWrites) Open(name string, mode vfs.Mode) (vfs.File, error) {
	f, err := c.FS.Open(name, mode)
	if err != nil || !strings.HasSuffix(name, ".ekv") {
		return f, err
	}
	return countedWritesFile{f, c}, nil
}

type countedWritesFile struct {
	vfs.File
	fs *countedWrites
}

func (f countedWritesFile) WriteBatch(reqs []vfs.Request) error {
	for i := range reqs {
		if f.fs.counted() {
			f.fs.bytes.Add(int64(len(reqs[i].Buf)))
		}
	}
	return f.File.WriteBatch(reqs)
}

// TestCommitPauseOfABulkLoadDoesNotGrowWithIt replaces every second of many large values by a bulk load. The values that
// leave sparse pages, the leaves of the indirection table and the pages of the load are written before the commit pause,
// which writes the superblocks and the few pages of the allocation map.
func TestCommitPauseOfABulkLoadDoesNotGrowWithIt(t *testing.T) {
	fs := &countedWrites{FS: vfs.NewMem(), counted: func() bool { return false }}
	o := tiny(fs)
	o.Storage.PageSize = 512 // so that a few thousand values have many pages
	s := mustOpen(t, o)
	fs.counted = func() bool { return s.latches.table[stripes-1].state.Load()&latchHeld != 0 }
	inPause := func(n, step int) int64 {
		entries := map[string]string{}
		for i := range n {
			entries[fmt.Sprintf("key-%05d", i*step)] = strings.Repeat(fmt.Sprint(i%10), 100+i%70)
		}
		fs.bytes.Store(0)
		mustLoad(t, s, entries)
		return fs.bytes.Load() / int64(s.Stats().Storage.Pages.PageSize)
	}
	inPause(5000, 1)
	few, many := inPause(3, 1000), inPause(2500, 2)
	t.Logf("pages written in the commit pause: %d and %d", few, many)
	if many > few+10 { // of the allocation map
		t.Errorf("%d pages are written in the commit pause of a large bulk load, %d in that of a small one", many, few)
	}
}
