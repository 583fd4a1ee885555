package extsort

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// inlineMax is the length of the longest value that is not large.
const inlineMax = 128

func newSorter(fs vfs.FS, chunkBytes int) *Sorter {
	name := func(n int) string { return fmt.Sprintf("db/%06d.tmp", n) }
	return New(Options{FS: fs, FileName: name, ChunkBytes: chunkBytes, InlineMax: inlineMax})
}

// filled adds n entries, whose keys come from key, and returns what the sorter must give back.
func filled(t *testing.T, s *Sorter, n int, key func(i int) string, rng *rand.Rand) map[string]string {
	t.Helper()
	want := map[string]string{}
	for i := range n {
		k, v := key(i), fmt.Sprintf("%d-%s", i, strings.Repeat("v", rng.IntN(40)))
		if rng.IntN(50) == 0 {
			v += strings.Repeat("L", 400) // a large value
		}
		want[k] = v
		if err := s.Add([]byte(k), []byte(v)); err != nil {
			t.Fatal(err)
		}
	}
	return want
}

func keyOrders(rng *rand.Rand) map[string]func(i int) string {
	return map[string]func(i int) string{
		"ascending":  func(i int) string { return fmt.Sprintf("key%08d", i) },
		"descending": func(i int) string { return fmt.Sprintf("key%08d", 1<<20-i) },
		"random":     func(int) string { return fmt.Sprintf("%d", rng.IntN(2500)) },
		"one key":    func(int) string { return "k" },
		"nearly":     func(i int) string { return fmt.Sprintf("key%08d", i^rng.IntN(8)) },
		"prefixes":   func(int) string { return strings.Repeat("a", 1+rng.IntN(20)) },
	}
}

// TestSorterKeepsTheLastValueOfEachKeyInOrder: input in any order comes out in key order, and Close removes all files.
func TestSorterKeepsTheLastValueOfEachKeyInOrder(t *testing.T) {
	const seed = 11
	for name, key := range keyOrders(rand.New(rand.NewPCG(seed, 0))) {
		t.Run(name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			fs := vfs.NewMem()
			s := newSorter(fs, 600)
			if err := fs.MkdirAll("db"); err != nil {
				t.Fatal(err)
			}
			want := filled(t, s, 6000, key, rng)
			r, err := s.Finish(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			if r.Count != uint64(len(want)) {
				t.Fatalf("%d entries, want %d", r.Count, len(want))
			}
			var replaced [][]byte
			r, err = s.ReplaceLarge(context.Background(), func(dst, _, v []byte) ([]byte, error) {
				replaced = append(replaced, bytes.Clone(v))
				return append(dst, byte(len(replaced)), byte(len(replaced)>>8)), nil
			})
			if err != nil {
				t.Fatal(err)
			}
			checkRun(t, r, want, replaced)
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			if left, err := fs.List("db"); err != nil || len(left) > 0 {
				t.Fatalf("left: %v, %v", left, err)
			}
		})
	}
}

func checkRun(t *testing.T, r *Run, want map[string]string, replaced [][]byte) {
	t.Helper()
	order := slices.Sorted(maps.Keys(want))
	c := r.Cursor()
	for i, k := range order {
		if !c.Next() || string(c.Key) != k {
			t.Fatalf("entry %d is %q, want %q, %v", i, c.Key, k, c.Err)
		}
		value := string(c.Value)
		if c.Replaced {
			n := int(c.Value[0]) | int(c.Value[1])<<8
			value = string(replaced[n-1])
		} else if len(value) > inlineMax {
			t.Fatalf("the value of %q was not replaced", k)
		}
		if value != want[k] {
			t.Fatalf("%q = %.40q, want %.40q", k, value, want[k])
		}
	}
	if c.Next() || c.Err != nil {
		t.Fatalf("one more: %q, %v", c.Key, c.Err)
	}
	// Seeking finds the same, in any order.
	rng := rand.New(rand.NewPCG(5, 5))
	for range 300 {
		k := order[rng.IntN(len(order))]
		target := k[:len(k)-rng.IntN(2)]
		if target == "" {
			target = k
		}
		i, _ := slices.BinarySearch(order, target)
		if c.SeekGE([]byte(target)); !c.Valid || string(c.Key) != order[i] {
			t.Fatalf("seek %q found %q (valid %v), want %q", target, c.Key, c.Valid, order[i])
		}
	}
	if c.SeekGE([]byte("\xff")); c.Valid || c.Err != nil {
		t.Fatalf("after the end: %q, %v", c.Key, c.Err)
	}
}

// TestLongValuesAreMergedAFewAtATime: what a merge holds in memory does not grow with the length of values.
func TestLongValuesAreMergedAFewAtATime(t *testing.T) {
	fs := vfs.NewMem()
	if err := fs.MkdirAll("db"); err != nil {
		t.Fatal(err)
	}
	s := newSorter(fs, 1<<20)
	value := make([]byte, 1<<20)
	const count = 12
	for i := range count {
		if err := s.Add(fmt.Appendf(nil, "%03d", 100-i), value); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.wait(); err != nil {
		t.Fatal(err)
	}
	if n := s.fanIn(); n != 2 {
		t.Errorf("%d runs with blocks of a chunk's size are merged at once", n)
	}
	r, err := s.Finish(context.Background())
	if err != nil || r.Count != count {
		t.Fatalf("%+v, %v", r, err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// watchedFS calls wrote with the length of each write.
type watchedFS struct {
	vfs.FS
	wrote func(n int)
}

type watchedFile struct {
	vfs.File
	wrote func(n int)
}

func (w watchedFS) Open(name string, mode vfs.Mode) (vfs.File, error) {
	f, err := w.FS.Open(name, mode)
	return watchedFile{f, w.wrote}, err
}

func (f watchedFile) WriteAt(p []byte, at int64) (int, error) {
	f.wrote(len(p))
	return f.File.WriteAt(p, at)
}

// TestSmallRunsAreMergedBeforeLargeOnes: the runs before the first long value are as many as are merged at once without it. With it, two are
// merged at once: if the newest were the first, everything after them would be written again for each of them. The merge of long values ends
// with its context.
func TestSmallRunsAreMergedBeforeLargeOnes(t *testing.T) {
	const small, large = fanInMax - 1, 4
	inner := vfs.NewMem()
	if err := inner.MkdirAll("db"); err != nil {
		t.Fatal(err)
	}
	for _, canceled := range []bool{false, true} {
		ctx, cancel := context.WithCancel(context.Background())
		written, after, merging := 0, 0, false
		s := newSorter(watchedFS{inner, func(n int) {
			if written += n; ctx.Err() != nil {
				after += n
			} else if canceled && merging && written > large<<18 {
				cancel()
			}
		}}, 1000)
		for i := range small + large {
			value := make([]byte, 900)
			if i >= small {
				value = make([]byte, 1<<20)
			}
			if err := errors.Join(s.Add(fmt.Appendf(nil, "%03d", 900-i), value), s.wait()); err != nil {
				t.Fatal(err)
			}
		}
		written, merging = 0, true
		r, err := s.Finish(ctx)
		cancel()
		if canceled && (!errors.Is(err, context.Canceled) || after > 1<<19) {
			t.Errorf("after the context %d bytes were written, %v", after, err)
		} else if !canceled && (err != nil || r.Count != small+large || written > 4*large<<20) {
			t.Errorf("%d bytes were written to merge %d, %v", written, large<<20, err)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestFailedSpillIsReportedByALaterCall: chunks are written aside, so Add returns before a write fails.
func TestFailedSpillIsReportedByALaterCall(t *testing.T) {
	inner := vfs.NewMem()
	if err := inner.MkdirAll("db"); err != nil {
		t.Fatal(err)
	}
	fs := vfs.NewFaulty(inner)
	fs.Inject(vfs.Rule{Op: vfs.OpWrite, Nth: 3, Err: vfs.ErrNoSpace})
	s := newSorter(fs, 4096)
	var failed error
	for i := 0; i < 500 && failed == nil; i++ {
		failed = s.Add(fmt.Appendf(nil, "%06d", i), make([]byte, 100))
	}
	if !errors.Is(failed, vfs.ErrNoSpace) {
		t.Fatalf("of 14 chunks the third was not written: %v", failed)
	}
	if r, err := s.Finish(context.Background()); !errors.Is(err, vfs.ErrNoSpace) {
		t.Fatalf("the sorter returned a run with a gap: %+v, %v", r, err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if names, err := fs.List("db"); err != nil || len(names) != 0 {
		t.Fatalf("left behind: %q, %v", names, err)
	}
}

// TestDamagedRunIsAnError flips bits in a run: the cursor never returns other entries than those that were written.
func TestDamagedRunIsAnError(t *testing.T) {
	fs := vfs.NewMem()
	if err := fs.MkdirAll("db"); err != nil {
		t.Fatal(err)
	}
	s := newSorter(fs, 4096)
	filled(t, s, 500, func(i int) string { return fmt.Sprintf("%06d", i) }, rand.New(rand.NewPCG(1, 1)))
	r, err := s.Finish(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	size, err := r.file.Size()
	if err != nil {
		t.Fatal(err)
	}
	var b [1]byte
	for at := int64(0); at < size; at += 7 {
		if _, err := r.file.ReadAt(b[:], at); err != nil {
			t.Fatal(err)
		}
		flipped := [1]byte{b[0] ^ 0x10}
		if _, err := r.file.WriteAt(flipped[:], at); err != nil {
			t.Fatal(err)
		}
		c, n := r.Cursor(), 0
		for c.Next() {
			n++
		}
		if !errors.Is(c.Err, ErrDamaged) {
			t.Fatalf("byte %d flipped: %d entries and %v", at, n, c.Err)
		}
		if _, err := r.file.WriteAt(b[:], at); err != nil {
			t.Fatal(err)
		}
	}
}

// TestMergesEndWithTheSorter: the merge of runs, which may take minutes, ends when the owner of the sorter
// cancels it, ends the context of Finish, or closes the sorter. Nothing is left.
func TestMergesEndWithTheSorter(t *testing.T) {
	const runs = fanInMax - 1 // the next one begins a merge
	for name, end := range map[string]func(*Sorter) error{
		"cancel": func(s *Sorter) error {
			s.Cancel()
			var err error
			for i := 0; err == nil && i < 1000; i++ {
				err = s.Add(fmt.Appendf(nil, "%05d", 5000-i), make([]byte, 100))
			}
			return err
		},
		"context": func(s *Sorter) error {
			ctx, cancel := context.WithCancel(context.Background())
			cancel()
			_, err := s.Finish(ctx)
			return err
		},
		"close": func(s *Sorter) error {
			err := s.Close()
			return cmp.Or(err, s.ctx.Err())
		},
	} {
		fs := vfs.NewMem()
		if err := fs.MkdirAll("db"); err != nil {
			t.Fatal(err)
		}
		s := newSorter(fs, 1000)
		for i := 0; len(s.runs) < runs-1; i++ {
			if err := s.Add(fmt.Appendf(nil, "%05d", 9999-i), make([]byte, 100)); err != nil {
				t.Fatal(err)
			}
			if err := s.wait(); err != nil { // the goroutine has the runs
				t.Fatal(err)
			}
		}
		if err := end(s); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if files, err := fs.List("db"); err == nil && len(files) > 0 {
			t.Errorf("%s: %v is left", name, files)
		}
	}
}

// TestFinishSaysWhyItsContextEnded: the deadline of Finish passes while the goroutine of an earlier Add merges, which has another context.
func TestFinishSaysWhyItsContextEnded(t *testing.T) {
	inner := vfs.NewMem()
	if err := inner.MkdirAll("db"); err != nil {
		t.Fatal(err)
	}
	var s *Sorter
	last := false
	s = newSorter(watchedFS{inner, func(int) {
		if last {
			<-s.ctx.Done()
		}
	}}, 1000)
	add := func(i int) {
		t.Helper()
		if err := s.Add(fmt.Appendf(nil, "%05d", 9999-i), make([]byte, 100)); err != nil {
			t.Fatal(err)
		}
	}
	n := 0
	for ; len(s.runs) < fanInMax-1; n++ {
		add(n)
		if err := s.wait(); err != nil { // the goroutine has the runs
			t.Fatal(err)
		}
	}
	for last = true; s.spilled == nil; n++ { // the goroutine ends the last run that a merge needs, and waits
		add(n)
	}
	passed, cancel := context.WithDeadline(context.Background(), time.Now().Add(-time.Second))
	defer cancel()
	if _, err := s.Finish(passed); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
