package uring

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const testDepth = 32

func mustNew(t testing.TB) *Ring {
	t.Helper()
	r, err := New(testDepth)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

const testBlock = 4096

// blockFile holds count blocks; each is filled with its number.
func blockFile(t testing.TB, count int) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	for i := range count {
		if _, err := f.Write(bytes.Repeat([]byte{byte(i)}, testBlock)); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

// readBlocks reads blocks 0 to count-1 in one window and returns the completions by tag, and the buffers.
func readBlocks(t testing.TB, r *Ring, f *os.File, count int) (map[int]Completion, [][]byte) {
	t.Helper()
	buffers := make([][]byte, count)
	for i := range buffers {
		buffers[i] = make([]byte, testBlock)
		r.Prepare(Read, int(f.Fd()), buffers[i], int64(i*testBlock), i)
	}
	if err := r.Submit(); err != nil {
		t.Fatal(err)
	}
	got := map[int]Completion{}
	for r.InFlight() > 0 {
		for _, c := range r.Wait(nil) {
			if _, twice := got[c.Tag]; twice {
				t.Errorf("request %d completed twice", c.Tag)
			}
			got[c.Tag] = c
		}
	}
	if len(got) != count {
		t.Errorf("%d of %d requests completed", len(got), count)
	}
	return got, buffers
}

func checkBlocks(t testing.TB, got map[int]Completion, buffers [][]byte) {
	t.Helper()
	for i, buf := range buffers {
		c := got[i]
		if c.Err != nil || c.N != testBlock || !bytes.Equal(buf, bytes.Repeat([]byte{byte(i)}, testBlock)) {
			t.Errorf("request %d: %d bytes, %v, or the wrong bytes", i, c.N, c.Err)
		}
	}
}

func TestEveryCompletionFindsItsRequest(t *testing.T) {
	r, f := mustNew(t), blockFile(t, testDepth)
	for round := range 200 {
		got, buffers := readBlocks(t, r, f, 1+round%testDepth)
		checkBlocks(t, got, buffers)
	}
	if s := r.Stats(); s.UnexpectedCompletions != 0 || s.LostCompletions != 0 || s.InFlight != 0 || s.Submissions == 0 {
		t.Errorf("stats: %+v", s)
	}
}

func TestReorderedCompletionsFindTheirRequests(t *testing.T) {
	r, f := mustNew(t), blockFile(t, testDepth)
	rng := rand.New(rand.NewPCG(1, 1))
	// Holds completions back and returns them in random order, some of them only at the next call.
	var held []cqe
	r.tap = func(in []cqe) []cqe {
		held = append(held, in...)
		rng.Shuffle(len(held), func(i, j int) { held[i], held[j] = held[j], held[i] })
		n := (len(held) + 1) / 2
		out := slices.Clone(held[:n])
		held = held[n:]
		if len(held) > 0 {
			_, _ = r.wake.Write([]byte{1, 0, 0, 0, 0, 0, 0, 0}) // so that there is a next call
		}
		return out
	}
	for range 50 {
		got, buffers := readBlocks(t, r, f, testDepth)
		checkBlocks(t, got, buffers)
	}
	if s := r.Stats(); s.UnexpectedCompletions != 0 || s.LostCompletions != 0 {
		t.Errorf("stats: %+v", s)
	}
}

func TestDroppedCompletionIsReportedLost(t *testing.T) {
	r, f := mustNew(t), blockFile(t, testDepth)
	r.stall = 20 * time.Millisecond
	seen := 0
	r.tap = func(in []cqe) []cqe {
		return slices.DeleteFunc(in, func(c cqe) bool {
			if c.userData == barrierTag {
				return false
			}
			seen++
			return seen%5 == 0
		})
	}
	for range 3 {
		got, _ := readBlocks(t, r, f, testDepth)
		lost := 0
		for _, c := range got {
			if errors.Is(c.Err, ErrLost) {
				lost++
			} else if c.Err != nil {
				t.Error(c.Err)
			}
		}
		if lost != 6 && lost != 7 {
			t.Errorf("%d of 32 lost, not every fifth", lost)
		}
	}
	r.tap = nil
	got, buffers := readBlocks(t, r, f, testDepth)
	checkBlocks(t, got, buffers)
}

// A slow device does not lose requests: the barrier does not end a request that is only late.
func TestSlowCompletionIsNotLost(t *testing.T) {
	r := mustNew(t)
	r.stall = 5 * time.Millisecond
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = errors.Join(unix.Close(pipe[0]), unix.Close(pipe[1])) }()
	slow := make([]byte, 4)
	r.Prepare(Read, pipe[0], slow, 0, 1)
	if err := r.Submit(); err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(60*time.Millisecond, func() { _, _ = unix.Write(pipe[1], []byte("late")) })
	got := r.Wait(nil) // several stalls pass
	f := blockFile(t, 1)
	buf := make([]byte, testBlock)
	r.Prepare(Read, int(f.Fd()), buf, 0, 2)
	if err := r.Submit(); err != nil {
		t.Fatal(err)
	}
	for r.InFlight() > 0 {
		got = r.Wait(got)
	}
	if len(got) != 2 || got[0] != (Completion{Tag: 1, N: 4}) || got[1] != (Completion{Tag: 2, N: testBlock}) {
		t.Errorf("completions: %+v", got)
	}
	if string(slow) != "late" || r.Stats().LostCompletions != 0 {
		t.Errorf("read %q, stats %+v", slow, r.Stats())
	}
}

func TestForeignAndRepeatedCompletionsAreIgnored(t *testing.T) {
	r, f := mustNew(t), blockFile(t, testDepth)
	r.tap = func(in []cqe) []cqe {
		var out []cqe
		for _, c := range in {
			// The request of the slot's earlier generation, no slot at all, then the real request, twice.
			out = append(out, cqe{userData: c.userData - 1<<32, result: 1}, cqe{userData: c.userData | 0xffff, result: 1}, c, c)
		}
		return append(out, cqe{userData: barrierTag})
	}
	for range 20 {
		got, buffers := readBlocks(t, r, f, testDepth)
		checkBlocks(t, got, buffers)
	}
	if r.Stats().UnexpectedCompletions < 20*3*testDepth {
		t.Errorf("unexpected completions: %d", r.Stats().UnexpectedCompletions)
	}
}

func TestShortAndFailedCompletionsAreReportedAsTheyAre(t *testing.T) {
	r, f := mustNew(t), blockFile(t, 2)
	buffers := [][]byte{make([]byte, testBlock), make([]byte, 2*testBlock), make([]byte, testBlock), make([]byte, testBlock)}
	r.Prepare(Read, int(f.Fd()), buffers[0], 0, 0)
	r.Prepare(Read, int(f.Fd()), buffers[1], testBlock, 1)   // over the end
	r.Prepare(Read, int(f.Fd()), buffers[2], 2*testBlock, 2) // at the end
	r.Prepare(Read, -1, buffers[3], 0, 3)
	if err := r.Submit(); err != nil {
		t.Fatal(err)
	}
	var got []Completion
	for r.InFlight() > 0 {
		got = r.Wait(got)
	}
	slices.SortFunc(got, func(a, b Completion) int { return a.Tag - b.Tag })
	want := []Completion{{Tag: 0, N: testBlock}, {Tag: 1, N: testBlock}, {Tag: 2}, {Tag: 3, Err: unix.EBADF}}
	if !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}

func TestWithdrawReturnsWhatTheKernelHasNotTaken(t *testing.T) {
	r, f := mustNew(t), blockFile(t, testDepth)
	for i := range 5 {
		r.Prepare(Read, int(f.Fd()), make([]byte, testBlock), 0, i)
	}
	if tags := r.Withdraw(nil); !slices.Equal(tags, []int{4, 3, 2, 1, 0}) || r.InFlight() != 0 {
		t.Errorf("withdrawn %v, %d in flight", tags, r.InFlight())
	}
	got, buffers := readBlocks(t, r, f, testDepth)
	checkBlocks(t, got, buffers)
}

func TestCloseRefusesWhileRequestsAreInFlight(t *testing.T) {
	r, f := mustNew(t), blockFile(t, 1)
	r.Prepare(Read, int(f.Fd()), make([]byte, testBlock), 0, 0)
	if r.Close() == nil {
		t.Error("closed with a request in flight")
	}
	r.Withdraw(nil)
}

func TestCompletionBeforeParkingWakesTheGoroutine(t *testing.T) {
	r, f := mustNew(t), blockFile(t, 1)
	r.Prepare(Read, int(f.Fd()), make([]byte, testBlock), 0, 0)
	if err := r.Submit(); err != nil {
		t.Fatal(err)
	}
	for !r.pending() {
		time.Sleep(time.Millisecond)
	}
	if err := r.wake.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
		t.Fatal(err)
	}
	if err := r.park(); err != nil {
		t.Errorf("parked with a completion waiting: %v", err)
	}
	r.Wait(nil)
}

func TestQueuesHoldEveryRequestAndABarrier(t *testing.T) {
	r := mustNew(t)
	if int(r.sqMask)+1 < testDepth+1 || int(r.cqMask)+1 < 2*(testDepth+1) {
		t.Errorf("queues of %d and %d entries for %d requests and a barrier", r.sqMask+1, r.cqMask+1, testDepth)
	}
}

func TestRefusedSubmissionLeavesEverythingToWithdraw(t *testing.T) {
	r, f := mustNew(t), blockFile(t, testDepth)
	r.Prepare(Read, int(f.Fd()), make([]byte, testBlock), 0, 7)
	fd := r.fd
	r.fd = -1
	if err := r.Submit(); !errors.Is(err, unix.EBADF) {
		t.Errorf("submit to a bad ring: %v", err)
	}
	r.fd = fd
	if tags := r.Withdraw(nil); !slices.Equal(tags, []int{7}) {
		t.Errorf("withdrawn %v", tags)
	}
	got, buffers := readBlocks(t, r, f, testDepth)
	checkBlocks(t, got, buffers)
}

// A barrier does not affect requests that were prepared after it, however late it completes.
func TestBarrierEndsOnlyEarlierRequests(t *testing.T) {
	r, f := mustNew(t), blockFile(t, 1)
	buf := make([]byte, testBlock)
	r.Prepare(Read, int(f.Fd()), buf, 0, 1)
	r.requestBarrier() // submits both
	var barrier []cqe
	r.tap = func(in []cqe) []cqe {
		return slices.DeleteFunc(in, func(c cqe) bool {
			if c.userData == barrierTag {
				barrier = append(barrier, c)
			}
			return c.userData == barrierTag
		})
	}
	got := r.Wait(nil)
	for len(barrier) == 0 {
		got = r.collect(got)
	}
	r.Prepare(Read, int(f.Fd()), buf, 0, 2)
	r.tap = func(in []cqe) []cqe {
		in = append(barrier, in...)
		barrier = nil
		return in
	}
	got = r.collect(got) // the barrier arrives, and the second request is not even submitted
	if err := r.Submit(); err != nil {
		t.Fatal(err)
	}
	for r.InFlight() > 0 {
		got = r.Wait(got)
	}
	want := []Completion{{Tag: 1, N: testBlock}, {Tag: 2, N: testBlock}}
	if !slices.Equal(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
}
