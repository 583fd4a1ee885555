package vfs

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/epochkv/epochkv/internal/vfs/uring"
)

// mustRingFile is a direct file of count pages, each filled with its number, on an OS with a ring.
func mustRingFile(t testing.TB, count int) (*OS, File) {
	t.Helper()
	o := mustOpenOS(t, IOUring).Direct()
	f, err := o.Open(filepath.Join(t.TempDir(), "f"), Create)
	if err != nil {
		t.Skip("no direct I/O here: ", err)
	}
	t.Cleanup(func() { mustClose(t, f) })
	if err := f.WriteBatch(pageRequests(0, count, 1)); err != nil {
		t.Fatal(err)
	}
	return o, f
}

// pageRequests is a batch for pages 0, step, 2*step ..., each buffer filled with the page's number plus salt.
func pageRequests(salt, count, step int) []Request {
	reqs := make([]Request, count)
	for i := range reqs {
		reqs[i] = Request{Buf: AlignedBuffer(DirectAlignment), Offset: int64(i*step) * DirectAlignment}
		for j := range reqs[i].Buf {
			reqs[i].Buf[j] = byte(i*step + salt)
		}
	}
	return reqs
}

func mustBePages(t testing.TB, reqs []Request, salt, step int) {
	t.Helper()
	for i := range reqs {
		want := bytes.Repeat([]byte{byte(i*step + salt)}, DirectAlignment)
		if reqs[i].Err != nil || !bytes.Equal(reqs[i].Buf, want) {
			t.Fatalf("request %d: %v, or the wrong bytes (%d, not %d)", i, reqs[i].Err, reqs[i].Buf[0], want[0])
		}
	}
}

func clearBuffers(reqs []Request) {
	for i := range reqs {
		clear(reqs[i].Buf)
	}
}

func TestBatchTakesTheFastestPath(t *testing.T) {
	o, f := mustRingFile(t, 128)
	neighbours := pageRequests(0, 40, 1)
	clearBuffers(neighbours)
	if err := f.ReadBatch(neighbours); err != nil {
		t.Fatal(err)
	}
	mustBePages(t, neighbours, 0, 1)
	if s := o.Stats(); s.VectorWrites != 128 || s.VectorReads != 40 {
		t.Errorf("neighbours did not go in place: %+v", s)
	}
	if err := errors.Join(f.WriteBatch(pageRequests(0, 32, 2)), f.ReadBatch(pageRequests(0, 40, 2))); err != nil {
		t.Fatal(err)
	}
	if _, err := f.ReadAt(AlignedBuffer(DirectAlignment), 0); err != nil {
		t.Fatal(err)
	}
	s := o.Stats()
	if s.RingWrites != 32 || s.RingReads != 40 || s.SingleReads != 1 || s.Submissions < 3 || s.Rings != 1 {
		t.Errorf("scattered writes and reads did not go over the ring: %+v", s)
	}
	if s.PoolReads+s.PoolWrites+s.Repeated+s.UnexpectedCompletions+s.LostCompletions != 0 || s.InFlight != 0 {
		t.Errorf("unexpected counts: %+v", s)
	}
}

// Whatever the ring reports, a request ends with all its bytes or with an error.
func TestRingRequestEndsWithAllItsBytesOrAnError(t *testing.T) {
	const count = 50
	for _, c := range []struct {
		name     string
		change   func(uring.Completion) uring.Completion
		repeated bool
	}{
		{name: "short", change: func(c uring.Completion) uring.Completion { c.N = min(c.N, 512*(1+c.Tag%8)); return c }},
		{name: "lost", repeated: true, change: func(c uring.Completion) uring.Completion {
			if c.Tag%3 == 0 {
				return uring.Completion{Tag: c.Tag, Err: uring.ErrLost}
			}
			return c
		}},
		{name: "interrupted", repeated: true, change: func(c uring.Completion) uring.Completion {
			return uring.Completion{Tag: c.Tag, Err: [...]error{unix.EINTR, unix.EAGAIN, unix.ECANCELED}[c.Tag%3]}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			// Not direct: a transfer that is short inside a block cannot be continued there.
			o := mustOpenOS(t, IOUring)
			f := mustCreate(t, o, filepath.Join(t.TempDir(), "f"), "")
			defer mustClose(t, f)
			if err := f.WriteBatch(pageRequests(0, 2*count, 1)); err != nil {
				t.Fatal(err)
			}
			driver := o.batches.rings.all[0]
			driver.tap = c.change
			for salt := range 3 {
				// Directly with the driver, because buffered writes do not use the ring.
				writes := pageRequests(salt, count, 2)
				driver.run(f.(*osFile), OpWrite, writes)
				mustBePages(t, writes, salt, 2)
				clearBuffers(writes)
				if err := f.ReadBatch(writes); err != nil {
					t.Fatal(err)
				}
				mustBePages(t, writes, salt, 2)
			}
			if got := o.Stats().Repeated > 0; got != c.repeated {
				t.Errorf("repeated by plain calls: %v", got)
			}
		})
	}
}

func TestRingReportsFailuresToTheirRequests(t *testing.T) {
	o, f := mustRingFile(t, 40)
	o.batches.rings.all[0].tap = func(c uring.Completion) uring.Completion {
		switch c.Tag {
		case 7:
			c = uring.Completion{Tag: 7, Err: unix.EIO}
		case 8:
			c.N = 0
		case 9:
			c.N += 512
		}
		return c
	}
	for _, op := range []Op{OpRead, OpWrite} {
		reqs := pageRequests(0, 20, 2)
		err := benchBatch(f, op, reqs)
		for i := range reqs {
			if (reqs[i].Err != nil) != (i >= 7 && i <= 9) {
				t.Errorf("%v %d: %v", op, i, reqs[i].Err)
			}
		}
		if !errors.Is(err, unix.EIO) || !strings.Contains(err.Error(), f.Name()) {
			t.Errorf("%v: %v", op, err)
		}
	}
}

// To io_uring, offset -1 is the file's current position; and an empty transfer is not the end of the file.
func TestRingGetsNoNegativeOffsetOrEmptyRequest(t *testing.T) {
	o, f := mustRingFile(t, 64)
	writes := pageRequests(100, 8, 2)
	writes[3].Offset = -1
	for i := range writes {
		if i != 3 {
			writes[i].Buf = nil
		}
	}
	wantError(t, "write at -1", f.WriteBatch(writes), syscall.EINVAL)
	for i := range writes {
		if i != 3 && writes[i].Err != nil {
			t.Errorf("write of nothing: %v", writes[i].Err)
		}
	}
	if s := o.Stats(); s.RingWrites != 8 {
		t.Fatalf("the batch did not go over the ring: %+v", s)
	}
	reads := pageRequests(0, 64, 1)
	if err := f.ReadBatch(reads); err != nil {
		t.Fatal(err)
	}
	mustBePages(t, reads, 0, 1)
}

// If the kernel takes no requests, only the speed suffers.
func TestRefusedSubmissionsAreDoneByPlainCalls(t *testing.T) {
	before := ringDescriptors(t)
	o, f := mustRingFile(t, 64)
	null, err := unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(null) }()
	for fd := range ringDescriptors(t) {
		if !before[fd] {
			if err := unix.Dup3(null, fd, unix.O_CLOEXEC); err != nil {
				t.Fatal(err)
			}
		}
	}
	writes, reads := pageRequests(9, 32, 2), pageRequests(0, 32, 2)
	if err := errors.Join(f.WriteBatch(writes), f.ReadBatch(reads)); err != nil {
		t.Fatal(err)
	}
	mustBePages(t, reads, 9, 2)
	if s := o.Stats(); s.Repeated != 64 || s.InFlight != 0 {
		t.Errorf("stats: %+v", s)
	}
}

// ringDescriptors is the descriptors of this process that are rings.
func ringDescriptors(t *testing.T) map[int]bool {
	t.Helper()
	found := map[int]bool{}
	for fd := range 1024 {
		var buf [64]byte
		n, err := unix.Readlink("/proc/self/fd/"+strconv.Itoa(fd), buf[:])
		if err == nil && strings.Contains(string(buf[:n]), "io_uring") {
			found[fd] = true
		}
	}
	return found
}

func TestManyBatchesAtOnceShareTheRings(t *testing.T) {
	o, f := mustRingFile(t, 256)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	const goroutines, rounds, count = 3 * ringsMax, 20, 33
	var wg sync.WaitGroup
	for g := range goroutines {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(g)))
			reqs := make([]Request, count)
			for i := range reqs {
				reqs[i].Buf = AlignedBuffer(DirectAlignment)
			}
			for range rounds {
				for i := range reqs {
					reqs[i].Offset = rng.Int64N(256) * DirectAlignment
				}
				if err := f.ReadBatch(reqs); err != nil {
					t.Error(err)
					return
				}
				for i := range reqs {
					if want := byte(reqs[i].Offset / DirectAlignment); reqs[i].Buf[0] != want || reqs[i].Buf[4095] != want {
						t.Errorf("page %d holds %d", want, reqs[i].Buf[0])
						return
					}
				}
			}
		})
	}
	wg.Wait()
	s := o.Stats()
	if s.RingReads == 0 || s.RingReads+s.PoolReads != goroutines*rounds*count || s.Rings > ringsMax || s.InFlight != 0 {
		t.Errorf("stats: %+v", s)
	}
	if n := o.batches.pool.helpers.Load(); n != 0 {
		t.Errorf("%d helpers are left", n)
	}
}

func TestCloseWaitsForBatchesAndLeavesFilesUsable(t *testing.T) {
	o, f := mustRingFile(t, 128)
	var wg sync.WaitGroup
	started := make(chan struct{}, 4)
	for range 4 {
		wg.Go(func() {
			for round := range 20 {
				reqs := pageRequests(0, 64, 2)
				clearBuffers(reqs)
				if err := f.ReadBatch(reqs); err != nil {
					t.Error(err)
				}
				mustBePages(t, reqs, 0, 2)
				if round == 5 {
					started <- struct{}{}
				}
			}
		})
	}
	<-started
	if err := errors.Join(o.Close(), o.Close()); err != nil {
		t.Error(err)
	}
	wg.Wait()
	if s := o.Stats(); s.InFlight != 0 || s.PoolReads == 0 {
		t.Errorf("stats: %+v", s)
	}
}

func TestRingBatchesDoNotAllocate(t *testing.T) {
	_, f := mustRingFile(t, 128)
	reqs := pageRequests(0, 64, 2)
	if n := testing.AllocsPerRun(20, func() {
		if err := f.ReadBatch(reqs); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations a batch", n)
	}
}

func TestEveryIOMethodHasAName(t *testing.T) {
	for _, method := range []IO{IOAuto, IOUring, IOPread} {
		if got, err := ParseIO(method.String()); got != method || err != nil {
			t.Errorf("ParseIO(%q) = %v, %v", method, got, err)
		}
	}
	if _, err := ParseIO("aio"); err == nil {
		t.Error("ParseIO took aio")
	}
	if o := mustOpenOS(t, IOPread); o.IO() != IOPread {
		t.Errorf("IO() = %v", o.IO())
	}
	if o := mustOpenOS(t, IOAuto); o.IO() == IOAuto {
		t.Error("IO() does not say what runs")
	}
}

func TestFullDeviceIsErrNoSpaceWithEveryMethod(t *testing.T) {
	for _, method := range []IO{IOUring, IOPread} {
		f, err := mustOpenOS(t, method).Open("/dev/full", ReadWrite)
		if err != nil {
			t.Skip(err)
		}
		_, single := f.WriteAt([]byte("x"), 0)
		wantError(t, "write", single, ErrNoSpace)
		reqs := pageRequests(0, 4, 1)
		wantError(t, "contiguous batch", f.WriteBatch(reqs), ErrNoSpace)
		wantError(t, "last of the batch", reqs[3].Err, syscall.ENOSPC)
		reqs = pageRequests(0, 4, 2)
		wantError(t, "scattered batch", f.WriteBatch(reqs), ErrNoSpace)
		mustClose(t, f)
	}
}

// A run that the kernel wrote in part is continued at the byte where it stopped.
func TestPartOfARunIsContinued(t *testing.T) {
	f := mustCreate(t, NewOS(), filepath.Join(t.TempDir(), "f"), "")
	defer mustClose(t, f)
	reqs := []Request{
		{Buf: []byte("aaaa"), Err: io.EOF}, {Buf: []byte("bbbb"), Offset: 4, Err: io.EOF}, {Buf: []byte("cccc"), Offset: 8, Err: io.EOF},
	}
	if n := countRuns(reqs); n != 1 {
		t.Fatalf("%d runs", n)
	}
	completeRun(f.(*osFile), OpWrite, reqs, 6)
	buf := make([]byte, 12)
	if _, err := f.ReadAt(buf, 0); err != nil || firstError(reqs) != nil || string(buf) != "\x00\x00\x00\x00\x00\x00bbcccc" {
		t.Errorf("%q, %v, %v", buf, err, firstError(reqs))
	}
}

// In a run that ends after the end of the file, each request has its own result.
func TestRunPastTheEndOfTheFileIsReadToTheEnd(t *testing.T) {
	for _, method := range []IO{IOUring, IOPread} {
		f := mustCreate(t, mustOpenOS(t, method), filepath.Join(t.TempDir(), "f"), "aaaabb")
		reqs := []Request{{Buf: make([]byte, 4)}, {Buf: make([]byte, 4), Offset: 4}, {Buf: make([]byte, 4), Offset: 8}}
		if err := f.ReadBatch(reqs); err != io.EOF {
			t.Errorf("%v", err)
		}
		if reqs[0].Err != nil || string(reqs[0].Buf) != "aaaa" || reqs[1].Err != io.EOF || reqs[2].Err != io.EOF {
			t.Errorf("%q %v, %v, %v", reqs[0].Buf, reqs[0].Err, reqs[1].Err, reqs[2].Err)
		}
		mustClose(t, f)
	}
}
