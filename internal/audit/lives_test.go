package audit

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/epochkv/epochkv/internal/testseed"
)

// TestWholeLivesOfLogs: runs with other sizes each, with failing writes, syncs and truncations, and ends that are clean, or leave a part of a
// line, or lose the last lines. After each run the files are a log: no line is missing between the first and the last, each event
// is there once, and those that are not are counted.
func TestWholeLivesOfLogs(t *testing.T) {
	seed := testseed.Base(t)
	for i := range uint64(logLives) {
		if !t.Run(fmt.Sprint(seed+i), func(t *testing.T) { logLife(t, seed+i) }) {
			return
		}
	}
}

const logLives = 4

func logLife(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 65))
	o := options(t)
	o.Files, o.retry = 1000, 1
	last := 0
	for range 6 {
		o.FileBytes = 300 + rng.Int64N(3000)
		o.Full = []Full{FullDrop, FullBlock}[rng.IntN(2)]
		b := new(flaky)
		o.openFile = func(path string) (f file, err error) {
			b.file, err = openFile(path)
			return b, err
		}
		l, err := Open(o)
		if err != nil {
			t.Fatal(err)
		}
		for range rng.IntN(20) {
			if rng.IntN(4) == 0 {
				b.fail.Store(rng.Int32N(5))
			}
			last++
			l.Write(event(last), 0)
			if rng.IntN(4) == 0 {
				eventually(t, "the queue is not empty", func() bool { return l.Stats().QueueBytes == 0 })
			}
		}
		eventually(t, "the queue is not empty", func() bool { return l.Stats().QueueBytes == 0 })
		b.fail.Store(0)
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		checkLife(t, files(t, o), last)
		if rng.IntN(2) == 0 {
			cutEnd(t, rng, o.Path)
		}
	}
}

// flaky is a file of which so many operations fail; writes then leave a part.
type flaky struct {
	file
	fail atomic.Int32
}

func (f *flaky) fails() bool { return f.fail.Add(-1) >= 0 }

func (f *flaky) Write(p []byte) (int, error) {
	if f.fails() {
		n, _ := f.file.Write(p[:len(p)/2])
		return n, syscall.EIO
	}
	return f.file.Write(p)
}

func (f *flaky) Truncate(size int64) error {
	if f.fails() {
		return syscall.EIO
	}
	return f.file.Truncate(size)
}

func (f *flaky) Sync() error {
	if f.fails() {
		return syscall.EIO
	}
	return f.file.Sync()
}

// cutEnd makes of a clean end that of a process that was killed: the line of the end is not there, or a part of it.
func cutEnd(t *testing.T, rng *rand.Rand, path string) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil || len(text) == 0 {
		return
	}
	from := bytes.LastIndexByte(text[:len(text)-1], '\n') + 1
	if err := os.WriteFile(path, text[:from+rng.IntN(len(text)-from)], 0o600); err != nil {
		t.Fatal(err)
	}
}

func checkLife(t *testing.T, paths []string, last int) {
	t.Helper()
	r, err := Verify(paths)
	if err != nil || uint64(r.Lines) != r.Last || r.First != 1 {
		for _, path := range paths {
			text, _ := os.ReadFile(path)
			t.Logf("%s:\n%s", filepath.Base(path), text)
		}
		t.Fatalf("%+v, %v", r, err)
	}
	seen := map[string]int{}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for line := range bytes.Lines(text) {
			if _, epoch, found := bytes.Cut(line, []byte(`"epoch":`)); found {
				epoch, _, _ = bytes.Cut(epoch, []byte(","))
				seen[string(epoch)]++
			}
		}
	}
	for i := range last {
		if seen[fmt.Sprint(i+1)] != 1 {
			t.Fatalf("event %d of %d has %d lines", i+1, last, seen[fmt.Sprint(i+1)])
		}
	}
}

// TestAPartOfALineIsRemovedFromAFullFile: the log of a process that was killed is full for the next one.
func TestAPartOfALineIsRemovedFromAFullFile(t *testing.T) {
	o := options(t)
	write(t, o, 9)
	text, err := os.ReadFile(o.Path)
	if err == nil {
		err = os.WriteFile(o.Path, text[:len(text)-3], 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	o.FileBytes = 300
	write(t, o, 1)
	if r, err := Verify(files(t, o)); err != nil || r.Lines != 10+3 || r.Unclean != 1 {
		t.Errorf("%+v, %v", r, err)
	}
}

// TestALogGoesOnWhenItsFileCouldNotBeOpened: for the moment, because of a file system that is not mounted, or of too many open files.
func TestALogGoesOnWhenItsFileCouldNotBeOpened(t *testing.T) {
	for _, way := range []Full{FullDrop, FullBlock} {
		o := options(t)
		dir := filepath.Join(t.TempDir(), "log")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		o.Path, o.FileBytes, o.Files, o.Full = filepath.Join(dir, "audit.log"), 600, 10, way
		l := mustOpen(t, o)
		if err := os.Rename(dir, dir+".away"); err != nil {
			t.Fatal(err)
		}
		for i := range 6 {
			l.Write(event(i+1), 0)
		}
		eventually(t, "the file could be opened", func() bool { return l.Stats().Errors > 3 })
		if err := os.Rename(dir+".away", dir); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the log does not go on", func() bool { return l.Stats().Written >= 6 })
		if err := errors.Join(l.Admit(t.Context(), nil, 10), l.Close()); err != nil {
			t.Fatal(err)
		}
		if r, err := Verify(files(t, o)); err != nil || r.Last != 8 {
			t.Errorf("%+v, %v", r, err)
		}
	}
}

// TestALogIsWrittenByOneProcess: by the first, whose lines stay a chain.
func TestALogIsWrittenByOneProcess(t *testing.T) {
	o := options(t)
	o.FileBytes, o.Files = 600, 10
	l := mustOpen(t, o)
	for i := range 6 {
		if other, err := Open(o); err == nil {
			t.Errorf("another log is opened")
			_ = other.Close()
		} else if !strings.Contains(err.Error(), "another process") {
			t.Errorf("%v", err)
		}
		l.Write(event(i+1), 0)
		eventually(t, "the line is not written", func() bool { return l.Stats().Written > uint64(i) })
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if r, err := Verify(files(t, o)); err != nil || r.Lines != 8 {
		t.Errorf("%+v, %v", r, err)
	}
}

// TestAFileThatCannotBeRemovedHoldsUpNothing: neither lines nor requests, nor the removal of others.
func TestAFileThatCannotBeRemovedHoldsUpNothing(t *testing.T) {
	o := options(t)
	o.FileBytes, o.Files, o.Full = 300, 2, FullBlock
	write(t, o, 6)
	if err := os.MkdirAll(filepath.Join(fmt.Sprintf("%s.%020d", o.Path, 0), "kept"), 0o700); err != nil {
		t.Fatal(err)
	}
	l := mustOpen(t, o)
	for i := range 6 {
		l.Write(event(i+1), 0)
	}
	if err := l.Close(); err != nil || l.Stats().Errors != 0 || len(files(t, o)) != o.Files+1 {
		t.Errorf("%v, %+v, %v", err, l.Stats(), files(t, o))
	}
}
