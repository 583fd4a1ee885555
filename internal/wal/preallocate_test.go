package wal

import (
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestMoreSegmentsArePreallocatedAfterAStall: a log without writes has a segment and one preallocated segment. More are
// preallocated after a writer has found none.
func TestMoreSegmentsArePreallocatedAfterAStall(t *testing.T) {
	const segment = 64 << 10
	gate := make(chan struct{}, 10_000)
	open := func() {
		for len(gate) < cap(gate) {
			gate <- struct{}{}
		}
	}
	open()
	options := testOptions(gatedFS{vfs.NewMem(), gate}, segment)
	options.Buffers = 8
	l := mustStart(t, options).log
	defer open()
	waitForPreallocated(t, l)
	time.Sleep(20 * time.Millisecond) // for whatever a background goroutine might do
	if n := l.buffers.mappedBytes(); n != 2*segment {
		t.Fatalf("%d bytes of buffers before the first append, of segments of %d", n, segment)
	}
	ready := func() int {
		l.preallocator.mu.Lock()
		defer l.preallocator.mu.Unlock()
		return len(l.preallocator.ready)
	}
	for _, want := range []int{1, 2, 4, 6} {
		for deadline := time.Now().Add(30 * time.Second); ready() < want && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
			l.requestSegment()
		}
		l.requestSegment()
		time.Sleep(5 * time.Millisecond)
		if got := ready(); got != want {
			t.Fatalf("%d segments are ready, want %d", got, want)
		}
		for len(gate) > 0 { // none of those that are taken is replaced
			<-gate
		}
		var taken []*preallocated
		for range want + 1 { // one more than there are
			attempt := l.Prepare(0, false)
			if (attempt == nil) != (len(taken) < want) {
				t.Fatalf("segment %d of %d: ready %v", len(taken)+1, want, attempt == nil)
			}
			if attempt != nil {
				open()
				<-attempt.Done()
			}
			if b := l.preallocator.takeAssigned(); b != nil {
				taken = append(taken, b)
			}
		}
		for _, b := range taken {
			l.buffers.put(b.buffer, 0)
			if err := b.file.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// gatedFS is a file system on which each write needs a token.
type gatedFS struct {
	vfs.FS
	gate chan struct{}
}

type gatedFile struct {
	vfs.File
	gate chan struct{}
}

func (f gatedFS) Open(name string, mode vfs.Mode) (vfs.File, error) {
	file, err := f.FS.Open(name, mode)
	if err != nil {
		return nil, err
	}
	return gatedFile{file, f.gate}, nil
}

func (f gatedFile) WriteAt(p []byte, off int64) (int, error) {
	<-f.gate
	return f.File.WriteAt(p, off)
}

// TestReadySegmentIsTakenWhileAnotherIsMade: while a device delays the preparation of a segment, a rotation takes one that
// is ready.
func TestReadySegmentIsTakenWhileAnotherIsMade(t *testing.T) {
	const segment = 64 << 10
	gate := make(chan struct{}, 100)
	for range cap(gate) {
		gate <- struct{}{}
	}
	options := testOptions(gatedFS{vfs.NewMem(), gate}, 64<<10)
	options.Buffers = 8
	l := mustStart(t, options).log
	waitForPreallocated(t, l)
	for len(gate) > 0 {
		<-gate
	}
	defer close(gate)
	l.preallocator.mu.Lock()
	l.preallocator.target = 2
	l.preallocator.mu.Unlock()
	l.requestSegment() // its maker now waits for the device
	taken := make(chan bool, 1)
	go func() {
		for l.buffers.mappedBytes() < 3*segment { // until the maker has begun
			time.Sleep(time.Millisecond)
		}
		var err error
		ready := l.Prepare(0, false) == nil
		if ready {
			b := l.preallocator.takeAssigned()
			l.buffers.put(b.buffer, 0)
			err = b.file.Close()
		}
		taken <- ready && err == nil
	}()
	select {
	case ok := <-taken:
		if !ok {
			t.Error("the segment that was ready was not taken")
		}
	case <-time.After(30 * time.Second):
		t.Error("a rotation waits for the segment that is being made")
	}
}

// TestAWriterDoesNotWaitForZeros: a writer that asks for a segment while zeros are written to the file of the next one gets that file as it
// is then, and does not wait for one more. A log that is closed does not wait for them either.
func TestAWriterDoesNotWaitForZeros(t *testing.T) {
	for _, closes := range []bool{false, true} {
		faulty := vfs.NewFaulty(vfs.NewMem())
		until, later := make(chan struct{}), make(chan struct{})
		chunk := faulty.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: FileName(2), Nth: 1, Fault: vfs.Slow, Until: until})
		faulty.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: FileName(2), Nth: 2, Sticky: true, Fault: vfs.Slow, Until: later})
		faulty.Inject(vfs.Rule{Op: vfs.OpCreate, Name: FileName(3), Fault: vfs.Slow, Until: later})
		options := testOptions(faulty, 3<<20)
		options.Buffers = 4
		l := mustStart(t, options).log
		release := sync.OnceFunc(func() { close(later) })
		t.Cleanup(release)
		l.preparer.begun.Store(true)
		l.preallocator.mu.Lock()
		l.preallocator.target = 1
		l.preallocator.mu.Unlock()
		l.requestSegment()
		for chunk.Fired() == 0 {
			time.Sleep(time.Millisecond)
		}
		if closes {
			closed := make(chan struct{})
			go func() {
				defer close(closed)
				if err := l.Close(); err != nil {
					t.Error(err)
				}
			}()
			for !l.closed.Load() {
				time.Sleep(time.Millisecond)
			}
			close(until)
			within(t, closed, "the close")
			continue
		}
		attempt := l.Prepare(0, false)
		close(until)
		within(t, attempt.Done(), "the attempt")
		if l.Prepare(0, false) != nil || l.preallocator.assigned.number != 2 {
			t.Error("the writer did not get the segment that was being made")
		}
		release()
	}
}
