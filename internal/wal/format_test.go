package wal

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	iofs "io/fs"
	"os"
	"testing"
	"unsafe"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

var update = flag.Bool("update", false, "rewrite golden files; goes with docs/formats.md and a decision about the version")

const golden = "testdata/segment-v1.golden"

// goldenSkip is the first segment of a run after an unclean end.
const goldenSkip = "testdata/segment-v1-skip.golden"

// goldenLog writes the log that the golden file holds.
func goldenLog(t *testing.T) *vfs.Mem {
	t.Helper()
	fs := vfs.NewMem()
	opts := testOptions(fs, SegmentBytesMin)
	opts.Identity = func() uint64 { return 0x1122334455667788 }
	a := mustStart(t, opts)
	for _, body := range []string{"first", "", "third record"} {
		if _, err := a.put([]byte(body)); err != nil {
			t.Fatal(err)
		}
	}
	s := a.cur.Load()
	c, _ := s.Reserve(20)
	s.PublishNoOp(c)
	mustClose(t, a.log)
	return fs
}

// goldenSkipLog writes a log of which only the second segment is left, which follows an unclean end at epoch 2.
func goldenSkipLog(t *testing.T) *vfs.Mem {
	t.Helper()
	fs := vfs.NewMem()
	opts := testOptions(fs, SegmentBytesMin)
	opts.Identity = func() uint64 { return 0x1122334455667788 }
	a := mustStart(t, opts)
	for range 2 {
		if _, err := a.put([]byte("lost")); err != nil {
			t.Fatal(err)
		}
	}
	fs = fs.Crash(1, vfs.SurviveNone)
	if err := fs.Remove(Dir(testDir) + "/" + FileName(2)); err != nil && !errors.Is(err, iofs.ErrNotExist) { // preallocated, if there was time
		t.Fatal(err)
	}
	opts.FS = fs
	a = mustStart(t, opts)
	if _, err := a.put([]byte("behind a skip")); err != nil {
		t.Fatal(err)
	}
	mustClose(t, a.log)
	return fs
}

func TestSegmentBytesAreTheGoldenOnes(t *testing.T) {
	t.Run("plain", func(t *testing.T) { wantGolden(t, goldenLog(t), 1, golden) })
	t.Run("skip", func(t *testing.T) {
		fs := goldenSkipLog(t)
		segments, err := Segments(fs, testDir)
		if err != nil || len(segments) != 2 {
			t.Fatalf("%v, %v", segments, err)
		}
		wantGolden(t, fs, segments[1].number, goldenSkip)
	})
}

// wantGolden compares the first bytes of a segment with a golden file.
func wantGolden(t *testing.T, fs vfs.FS, number uint64, name string) {
	t.Helper()
	got := make([]byte, SegmentBytesMin)
	readAt(t, fs, Dir(testDir)+"/"+FileName(number), 0, got)
	if *update {
		if err := os.WriteFile(name, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Fatal("the format has changed")
	}
}

func TestGoldenSkipReplays(t *testing.T) {
	b, err := os.ReadFile(goldenSkip)
	if err != nil {
		t.Fatal(err)
	}
	const epoch = 2 + EpochWindow + 1
	rec, err := Replay(logOf(t, b), testDir, 2, Proof{}, func(e keys.Epoch, body []byte) error {
		if e != epoch || string(body) != "behind a skip" {
			t.Errorf("epoch %d: %q", e, body)
		}
		return nil
	})
	if err != nil || rec.Last != epoch || rec.Records != 1 || rec.Torn != nil || rec.Unclean {
		t.Fatalf("%+v, %v", rec, err)
	}
}

func TestGoldenSegmentReplays(t *testing.T) {
	b, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	fs := logOf(t, b)
	rec, got := mustReplay(t, fs, 0)
	want := [][]byte{[]byte("first"), {}, []byte("third record"), {}}
	if rec.Last != 4 || rec.Torn != nil || len(got.bodies) != len(want) {
		t.Fatalf("%+v", rec)
	}
	for i, body := range got.bodies {
		if !bytes.Equal(body, want[i]) {
			t.Fatalf("epoch %d: %q", i+1, body)
		}
	}
}

// logOf is a log whose only file holds b, under the number that its header has.
func logOf(t *testing.T, b []byte) *vfs.Mem {
	t.Helper()
	fs := vfs.NewMem()
	if err := fs.MkdirAll(Dir(testDir)); err != nil {
		t.Fatal(err)
	}
	f, err := fs.Open(Dir(testDir)+"/"+FileName(binary.LittleEndian.Uint64(b[24:])), vfs.Create)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(b, 0); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return fs
}

func TestFileNamesAreTheLogsOwn(t *testing.T) {
	for name, want := range map[string]bool{
		"0000000000000001.log": true, "00000000000000ff.log": true, "00000000000000FF.log": false, "1.log": false,
		"0000000000000001.tmp": false, "000000000000000g.log": false, "+000000000000001.log": false,
	} {
		if n, ok := parseFileName(name); ok != want || ok && FileName(n) != name {
			t.Errorf("%s: %v", name, ok)
		}
	}
}

// TestHotWordsHaveTheirOwnCacheLines guards the layout: a shared or straddled line costs 1.7 times.
func TestHotWordsHaveTheirOwnCacheLines(t *testing.T) {
	var s Segment
	var h paddedEpoch
	tail := unsafe.Offsetof(s.tail)
	if tail%8 != 0 || tail-unsafe.Offsetof(s.pooled) < cacheLinePair || unsafe.Offsetof(s.refused)-tail < cacheLinePair {
		t.Errorf("tail at %d shares its lines", tail)
	}
	if unsafe.Offsetof(h.epoch) < cacheLinePair || unsafe.Sizeof(h) < 2*cacheLinePair {
		t.Error("the durable epoch shares its lines")
	}
}

func TestAppendingAndWaitingAllocateNothing(t *testing.T) {
	a := mustStart(t, testOptions(vfs.NewOS(), 1<<20).at(t.TempDir()))
	waitForPreallocated(t, a.log)
	body := bodyOf(1, 116)
	if n := testing.AllocsPerRun(500, func() {
		if _, err := a.put(body); err != nil {
			t.Fatal(err)
		}
	}); n > 0 {
		t.Errorf("%v allocations per durable record", n)
	}
	queued := make(chan struct{})
	defer close(queued)
	go func() {
		for range queued {
			a.awaitQueued(1)
			a.log.releaseFlusher() // to the background goroutine
		}
	}()
	if n := testing.AllocsPerRun(500, func() {
		a.log.acquireFlusher()
		e, err := a.append(body)
		if err != nil {
			t.Fatal(err)
		}
		queued <- struct{}{}
		if err := a.log.WaitDurable(context.Background(), e); err != nil {
			t.Fatal(err)
		}
	}); n > 0 {
		t.Errorf("%v allocations per record that waits in the queue", n)
	}
}

func (o Options) at(dir string) Options {
	o.Dir = dir
	return o
}

func FuzzDecodeRecord(f *testing.F) {
	rec := make([]byte, 64)
	sealRecord(rec, 5, 60, 9, 0, 8)
	f.Add(rec, uint32(5))
	f.Add([]byte{}, uint32(0))
	f.Fuzz(func(t *testing.T, b []byte, seed uint32) {
		r, ok := decodeRecord(b, seed)
		if !ok {
			return
		}
		if int(r.space) > len(b) || len(r.body) > len(b)-recordHeaderSize || r.durable >= r.epoch {
			t.Fatalf("%+v from %d bytes", r, len(b))
		}
		again := make([]byte, r.space)
		copy(again, b[:r.space])
		sealRecord(again, seed, uint32(recordHeaderSize+len(r.body)), r.epoch, r.flags, r.durable)
		if !bytes.Equal(again, b[:r.space]) {
			t.Fatal("decoded and encoded again it differs")
		}
	})
}

// FuzzReplay replays arbitrary bytes after an intact header: it never panics, and the epochs are consecutive.
func FuzzReplay(f *testing.F) {
	if b, err := os.ReadFile(golden); err == nil {
		f.Add(b[headerPage:])
	}
	f.Fuzz(func(t *testing.T, records []byte) {
		b := make([]byte, headerPage, headerPage+len(records))
		putHeader(b, header{version: version1, identity: 0x1122334455667788, number: 1, first: 1})
		fs := logOf(t, append(b, records...))
		last := keys.Epoch(0)
		rec, err := Replay(fs, testDir, 0, Proof{}, func(e keys.Epoch, _ []byte) error {
			if e != last+1 {
				t.Fatalf("epoch %d after %d", e, last)
			}
			last = e
			return nil
		})
		if err == nil && rec.Last != last {
			t.Fatalf("last %d, passed on %d", rec.Last, last)
		}
	})
}

func FuzzDecodeHeader(f *testing.F) {
	page := make([]byte, headerPage)
	putHeader(page, header{version: version2, identity: 1, number: 2, first: 3, history: history{term: 5, previousTerm: 4, lineage: lineagePrefix{1, 2, 3, 4}}})
	f.Add(page[:headerSize])
	f.Fuzz(func(t *testing.T, b []byte) {
		page := make([]byte, headerSize)
		copy(page, b)
		h, started, err := decodeHeader("f", page)
		if started == (err != nil) && started {
			t.Fatal("a header and an error")
		}
		if started {
			again := make([]byte, headerSize)
			putHeader(again, h)
			if !bytes.Equal(again, page) {
				t.Fatal("decoded and encoded again it differs")
			}
		}
	})
}
