package vfs

import (
	"bytes"
	"io"
	"math/rand/v2"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epochkv/epochkv/internal/vfs/uring"
)

// TestCoalescedReadsGetTheirOwnBytes: each of many single reads gets its own bytes, or its own error, however they are
// coalesced, and after the last read no read waits or leads.
func TestCoalescedReadsGetTheirOwnBytes(t *testing.T) {
	const goroutines, rounds, pages = 16, 400, 64
	o, f := mustRingFile(t, pages)
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(uint64(g), 1))
			buf := AlignedBuffer(DirectAlignment)
			for range rounds {
				i := random.IntN(pages + 2)
				n, err := f.ReadAt(buf, int64(i)*DirectAlignment)
				if i >= pages {
					if n != 0 || err != io.EOF {
						t.Errorf("after the end: %d, %v", n, err)
					}
				} else if err != nil || n != len(buf) || !bytes.Equal(buf, bytes.Repeat([]byte{byte(i)}, DirectAlignment)) {
					t.Errorf("page %d: %d bytes, %v, begins with %d", i, n, err, buf[0])
				}
			}
		})
	}
	wg.Wait()
	g := &f.(*osFile).coalescer
	if g.reading.Load() != 0 || g.leaders != 0 || len(g.waiting) != 0 {
		t.Errorf("%d read, %d lead, %d wait", g.reading.Load(), g.leaders, len(g.waiting))
	}
	if s := o.Stats(); s.RingReads == 0 || s.RingReads+s.VectorReads+s.PoolReads+s.SingleReads < goroutines*rounds {
		t.Errorf("%+v", s)
	}
}

// TestCoalescedReadsSurviveInterruptedCompletions: plain calls finish interrupted completions, for each coalesced read.
func TestCoalescedReadsSurviveInterruptedCompletions(t *testing.T) {
	const count = 30
	o, f := mustRingFile(t, count)
	o.batches.rings.all[0].tap = func(c uring.Completion) uring.Completion {
		return uring.Completion{Tag: c.Tag, Err: [...]error{unix.EINTR, unix.EAGAIN, uring.ErrLost}[c.Tag%3]}
	}
	var wg sync.WaitGroup
	for i := range count {
		wg.Go(func() {
			buf := AlignedBuffer(DirectAlignment)
			for range 20 {
				if n, err := f.ReadAt(buf, int64(i)*DirectAlignment); err != nil || n != len(buf) || buf[len(buf)-1] != byte(i) {
					t.Errorf("page %d: %d, %v, %d", i, n, err, buf[0])
				}
			}
		})
	}
	wg.Wait()
}

// TestLoneReadIsAPlainCall: a read without other reads does not use a ring, which would be slower.
func TestLoneReadIsAPlainCall(t *testing.T) {
	o, f := mustRingFile(t, 8)
	for range 10 {
		if _, err := f.ReadAt(AlignedBuffer(DirectAlignment), 0); err != nil {
			t.Fatal(err)
		}
	}
	if s := o.Stats(); s.SingleReads != 10 || s.RingReads != 0 {
		t.Errorf("%+v", s)
	}
}

// TestReadersContinueWithoutRings: when the rings are closed, files stay usable and running reads return.
func TestReadersContinueWithoutRings(t *testing.T) {
	o := mustOpenOS(t, IOUring)
	f := mustCreate(t, o, filepath.Join(t.TempDir(), "f"), "aaaabbbb")
	defer mustClose(t, f)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			buf := make([]byte, 4)
			for range 300 {
				if _, err := f.ReadAt(buf, 4); err != nil || string(buf) != "bbbb" {
					t.Errorf("%q, %v", buf, err)
				}
			}
		})
	}
	time.Sleep(time.Millisecond)
	if err := o.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
}
