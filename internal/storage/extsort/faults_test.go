package extsort

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestFaultAtEveryOperationEndsTheSortOrChangesNothing: each operation on the files of a sort whose runs are merged and
// have an index of several levels fails once, in each way. The run is complete, or an error says that it is not: of the
// sorter, or of the cursor that reads the run. It is the error of the operation. No file is left, but for one whose removal failed: the
// next start of a store removes it.
func TestFaultAtEveryOperationEndsTheSortOrChangesNothing(t *testing.T) {
	faults := []vfs.Rule{
		{Op: vfs.OpWrite, Err: vfs.ErrNoSpace, Sticky: true},
		{Op: vfs.OpWrite, Fault: vfs.Short, Bytes: 100, Err: vfs.ErrNoSpace},
		{Op: vfs.OpWrite, Fault: vfs.Torn},
		{Op: vfs.OpWrite, Fault: vfs.LostSync},
		{Op: vfs.OpRead, Fault: vfs.FlipBit, Bytes: 1000},
		{Op: vfs.OpRead, Fault: vfs.Short, Bytes: 100},
	}
	others := len(faults)
	for _, errno := range vfs.Errnos() {
		faults = append(faults, vfs.Rule{Err: errno})
	}
	for i := range faults {
		failed, first, step := 0, 1, 5
		if i >= others { // every operation fails with one of the errors
			first, step = 1+i-others, len(faults)-others
		}
		for nth := first; ; nth += step {
			rule := faults[i]
			rule.Nth = nth
			fired, err := sortWithFault(t, rule)
			if !fired {
				break
			}
			if err != nil {
				failed++
			}
			if err != nil && rule.Err != nil && !errors.Is(err, rule.Err) {
				t.Errorf("%+v: %v", rule, err)
			}
		}
		if failed < 3 {
			t.Errorf("%+v: %d operations failed: the test tests little", faults[i], failed)
		}
	}
}

// sortWithFault sorts and reads while a rule is in force. It reports whether the rule fired.
func sortWithFault(t *testing.T, rule vfs.Rule) (fired bool, err error) {
	t.Helper()
	const count = 40 // ten blocks
	inner := vfs.NewMem()
	if err := inner.MkdirAll("db"); err != nil {
		t.Fatal(err)
	}
	fs := vfs.NewFaulty(inner)
	injected := fs.Inject(rule)
	s := newSorter(fs, 4*longKeyBytes)
	for i := range count {
		if err == nil {
			err = s.Add(longKey(i*7%count), fmt.Append(nil, i*7%count))
		}
	}
	var r *Run
	if err == nil {
		r, err = s.Finish(context.Background())
	}
	if err == nil {
		err = readRun(t, r, count, rule)
	}
	fired = injected.Fired() > 0
	injected.Remove()
	if closed := s.Close(); closed != nil && err == nil {
		t.Fatalf("%+v: close: %v", rule, closed)
	}
	names, listed := inner.List("db")
	if unremoved := len(names) == 1 && err != nil && rule.Op == 0; listed != nil || len(names) != 0 && !unremoved {
		t.Fatalf("%+v: left behind: %q, %v", rule, names, listed)
	}
	return fired, err
}

// readRun compares what a cursor returns before it fails.
func readRun(t *testing.T, r *Run, count int, rule vfs.Rule) error {
	t.Helper()
	if r.depth < 2 {
		t.Fatalf("the index has %d levels", r.depth)
	}
	c, n := r.Cursor(), 0
	for ; c.Next(); n++ {
		if !bytes.Equal(c.Key, longKey(n)) || string(c.Value) != fmt.Sprint(n) {
			t.Fatalf("%+v: entry %d is %.6q = %q", rule, n, c.Key, c.Value)
		}
	}
	if c.Err == nil && n != count {
		t.Fatalf("%+v: %d entries of %d and no error", rule, n, count)
	}
	return c.Err
}

// TestFileThatCouldNotBeRemovedIsReplaced: the next sort uses the same names.
func TestFileThatCouldNotBeRemovedIsReplaced(t *testing.T) {
	faulty := vfs.NewFaulty(vfs.NewMem())
	if err := faulty.MkdirAll("db"); err != nil {
		t.Fatal(err)
	}
	for round := range 2 {
		s := newSorter(faulty, 4<<10)
		rule := faulty.Inject(vfs.Rule{Op: vfs.OpRemove, Nth: 1, Sticky: round == 0})
		if round > 0 {
			rule.Remove()
		}
		want := filled(t, s, 300, func(i int) string { return fmt.Sprintf("%08d", i*7919%100_003) }, rand.New(rand.NewPCG(1, 1)))
		r, err := s.Finish(context.Background())
		if round > 0 && (err != nil || r.Count != uint64(len(want))) {
			t.Fatalf("%+v, %v", r, err)
		}
		_ = s.Close() // it cannot remove its files in the first round
		rule.Remove()
	}
	if left, err := faulty.List("db"); err != nil || len(left) > 0 {
		t.Errorf("%q are left, %v", left, err)
	}
}
