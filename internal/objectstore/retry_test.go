package objectstore

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"
)

// faulty is a store with faults below the retries.
func faulty(t *testing.T) (Store, *Faulty) {
	inner, err := open(t.TempDir(), Options{})
	check(t, err)
	f := NewFaulty(inner)
	return WithRetries(f, QuickRetry), f
}

func TestTemporaryFailuresAreOvercome(t *testing.T) {
	s, f := faulty(t)
	for _, op := range []Operation{OpCreate, OpRead, OpList, OpDelete} {
		f.Inject(Fault{Op: op, Kind: FailForNow, Nth: 1})
		f.Inject(Fault{Op: op, Kind: FailForNow, Nth: 2})
	}
	check(t, s.Create(t.Context(), "a", Bytes("content")))
	if got := read(t, s, "a", 0, -1); string(got) != "content" {
		t.Fatalf("read %q", got)
	}
	if all := names(t, s, ""); len(all) != 1 {
		t.Fatalf("listed %v", all)
	}
	check(t, s.Delete(t.Context(), "a"))
	for _, op := range []Operation{OpCreate, OpRead, OpList, OpDelete} {
		if f.Calls(op) != 3 {
			t.Errorf("%d calls of %s, want 3", f.Calls(op), op)
		}
	}
}

func TestAttemptsEnd(t *testing.T) {
	s, f := faulty(t)
	f.Inject(Fault{Kind: FailForNow})
	wantError(t, s.Create(t.Context(), "a", Bytes("content")), errTemporary)
	_, err := s.Read(t.Context(), "a", 0, -1)
	wantError(t, err, errTemporary)
	if f.Calls(OpCreate) != defaultAttempts || f.Calls(OpRead) != defaultAttempts {
		t.Fatalf("%d and %d attempts", f.Calls(OpCreate), f.Calls(OpRead))
	}
}

func TestPermanentFailuresAreNotRepeated(t *testing.T) {
	s, f := faulty(t)
	f.Inject(Fault{Kind: FailForGood})
	if err := s.Create(t.Context(), "a", Bytes("content")); err == nil || f.Calls(OpCreate) != 1 {
		t.Fatalf("error %v after %d attempts", err, f.Calls(OpCreate))
	}
}

// An answer that is lost must not turn into ErrExists, and another object must not pass for ours.
func TestLostAnswersOfACreationAreFoundOut(t *testing.T) {
	s, f := faulty(t)
	f.Inject(Fault{Op: OpCreate, Kind: FailAfter, Nth: 1})
	check(t, s.Create(t.Context(), "a", Bytes("content")))

	f.Heal()
	f.Inject(Fault{Op: OpCreate, Prefix: "c", Kind: FailAfter, Nth: 1})
	f.Inject(Fault{Op: OpRead, Prefix: "c", Kind: ReadShort, Nth: 1, Bytes: 3})
	check(t, s.Create(t.Context(), "c", Bytes("content")))

	f.Inject(Fault{Op: OpCreate, Prefix: "b", Kind: FailForNow, Nth: 2})
	for _, other := range []string{"other", "contents", "conten", ""} {
		check(t, s.Delete(t.Context(), "b"))
		f.Heal()
		check(t, s.Create(t.Context(), "b", Bytes(other)))
		f.Inject(Fault{Op: OpCreate, Prefix: "b", Kind: FailForNow, Nth: 1})
		wantError(t, s.Create(t.Context(), "b", Bytes("content")), ErrExists)
	}
}

func TestReadsContinueWhereTheConnectionBroke(t *testing.T) {
	s, f := faulty(t)
	whole := bytes.Repeat([]byte("0123456789"), 100000)
	check(t, s.Create(t.Context(), "a", Bytes(whole)))
	for i, at := range []int64{0, 1, 333333, 333334, 999999} {
		f.Inject(Fault{Op: OpRead, Kind: ReadShort, Nth: i + 1, Bytes: at})
	}
	if !bytes.Equal(read(t, s, "a", 0, -1), whole) {
		t.Fatal("a read with broken connections differs")
	}
	if f.Calls(OpRead) < 5 {
		t.Fatalf("%d connections", f.Calls(OpRead))
	}
	f.Heal()
	f.Inject(Fault{Op: OpRead, Kind: ReadShort, Nth: 1, Bytes: 500})
	if !bytes.Equal(read(t, s, "a", 400, 1000), whole[400:1400]) {
		t.Fatal("a range with a broken connection differs")
	}
}

func TestListsContinueWhereTheyBroke(t *testing.T) {
	s, f := faulty(t)
	for _, name := range []string{"a", "b", "c"} {
		check(t, s.Create(t.Context(), name, Bytes(name)))
	}
	broken := false
	flaky := &brokenList{Store: f, broken: &broken}
	var all []string
	check(t, WithRetries(flaky, QuickRetry).List(t.Context(), "", func(o Object) error { all = append(all, o.Name); return nil }))
	if !broken || len(all) != 3 {
		t.Fatalf("listed %v", all)
	}
	own := errors.New("stop")
	wantError(t, s.List(t.Context(), "", func(Object) error { return own }), own)
	calls := f.Calls(OpList)
	wantError(t, s.List(t.Context(), "", func(Object) error { return errTemporary }), errTemporary)
	if f.Calls(OpList) != calls+1 {
		t.Fatal("an error of the caller was repeated")
	}
}

// brokenList breaks the first list after two objects.
type brokenList struct {
	Store
	broken *bool
}

func (s *brokenList) List(ctx context.Context, prefix string, each func(Object) error) error {
	n := 0
	return s.Store.List(ctx, prefix, func(o Object) error {
		if n++; n == 3 && !*s.broken {
			*s.broken = true
			return errTemporary
		}
		return each(o)
	})
}

func TestATargetThatHangsIsATemporaryFailure(t *testing.T) {
	inner, err := open(t.TempDir(), Options{})
	check(t, err)
	f := NewFaulty(inner)
	f.Inject(Fault{Op: OpCreate, Kind: Slow, Nth: 1, Until: make(chan struct{})})
	policy := QuickRetry
	policy.Patience = 10 * time.Millisecond
	check(t, WithRetries(f, policy).Create(t.Context(), "a", Bytes("content")))

	ctx, cancel := context.WithCancel(t.Context())
	f.Inject(Fault{Op: OpCreate, Kind: Slow, Until: make(chan struct{})})
	time.AfterFunc(5*time.Millisecond, cancel)
	wantError(t, WithRetries(f, Retry{}).Create(ctx, "b", Bytes("content")), context.Canceled)
}
