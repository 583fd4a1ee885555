package mvcc

import (
	"context"
	"errors"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestExecuteChoosesTheCase: the conditions select the operations that are done, as a plain write where that is enough,
// and in a transaction that is tried again after a conflict.
func TestExecuteChoosesTheCase(t *testing.T) {
	for name, c := range map[string]struct {
		condition  ConditionKind // on the key "a", which exists
		ranges     []RangeCondition
		direct     bool
		twice      bool // the write names its key twice
		otherwise  bool
		conflict   bool // another commit is faster, once
		want       string
		wantDirect bool
	}{
		"plain write":                     {condition: KeyPresent, direct: true, want: "then", wantDirect: true},
		"plain write is refused":          {condition: KeyAbsent, direct: true, want: "-"},
		"plain write names a key twice":   {condition: KeyPresent, direct: true, twice: true, want: "operated"},
		"other case":                      {condition: KeyAbsent, direct: true, otherwise: true, want: "otherwise"},
		"range holds":                     {condition: KeyPresent, ranges: []RangeCondition{{Lower: []byte("x"), Empty: true}}, want: "operated"},
		"range does not hold":             {condition: KeyPresent, ranges: []RangeCondition{{Lower: []byte("a"), Empty: true}}, otherwise: true, want: "otherwise"},
		"transaction conflicts once":      {condition: KeyPresent, conflict: true, want: "operated"},
		"range that changed in the epoch": {condition: KeyPresent, ranges: []RangeCondition{{Lower: []byte("a"), UnchangedSince: 1}}, otherwise: true, want: "operated"},
	} {
		t.Run(name, func(t *testing.T) {
			s := mustOpen(t, tiny(vfs.NewMem()))
			mustPut(t, s, "a", "1")
			x := mustSession(t, s)
			defer x.Close()
			w := Write{Durability: DurabilityAsync, Conditions: []Condition{{Kind: c.condition, Key: []byte("a")}}}
			if c.direct {
				w.Set([]byte("out"), []byte("then"))
			}
			if c.twice {
				w.Set([]byte("out"), []byte("again"))
			}
			attempts := 0
			out, err := x.Execute(t.Context(), &Execution{
				Write: &w, Ranges: c.ranges, Direct: c.direct, Otherwise: c.otherwise,
				Operate: func(_ context.Context, tx *Txn, holds bool) error {
					if attempts++; c.conflict && attempts == 1 {
						mustPut(t, s, "a", "2")
					}
					if !holds {
						return tx.Set([]byte("out"), []byte("otherwise"))
					}
					return tx.Set([]byte("out"), []byte("operated"))
				},
			})
			if err != nil {
				t.Fatal(err)
			}
			if got := get(t, s, "out", 0); got != c.want {
				t.Errorf("the operations wrote %q, want %q", got, c.want)
			}
			if out.Direct != c.wantDirect || out.Holds != (c.want == "then" || c.want == "operated") {
				t.Errorf("the outcome is %+v", out)
			}
			if c.conflict && attempts != 2 {
				t.Errorf("%d attempts, want 2", attempts)
			}
		})
	}
}

// TestAnExecutionEndsBetweenItsConditions: there may be very many of them, and each may walk over all keys in memory.
func TestAnExecutionEndsBetweenItsConditions(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	since := mustPut(t, s, "k", "v")
	x := mustSession(t, s)
	defer x.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for name, e := range map[string]*Execution{
		"on keys":   {Write: &Write{Conditions: []Condition{{Kind: KeyPresent, Key: []byte("k")}}}},
		"on ranges": {Write: &Write{}, Ranges: []RangeCondition{{UnchangedSince: since}}},
	} {
		e.Operate = func(context.Context, *Txn, bool) error { return errors.New("all conditions were evaluated") }
		if _, err := x.Execute(ctx, e); !errors.Is(err, context.Canceled) {
			t.Errorf("conditions %s: %v", name, err)
		}
	}
}

// TestConditionsOfAnExecutionReadNoOtherValue than one that may be equal: nothing has room for them, and there may be very many.
func TestConditionsOfAnExecutionReadNoOtherValue(t *testing.T) {
	const size = 2 * largeValueMin
	s := mustOpen(t, tiny(vfs.NewMem()))
	at := mustPut(t, s, "k", string(make([]byte, size)))
	x := mustSession(t, s)
	defer x.Close()
	x.AdmitLarge(func(int) error { return errors.New("a value is read") })
	for name, c := range map[string]struct {
		condition Condition
		holds     bool
	}{
		"present":        {Condition{Kind: KeyPresent}, true},
		"absent":         {Condition{Kind: KeyAbsent}, false},
		"written at":     {Condition{Kind: EpochEquals, Epoch: at}, true},
		"written before": {Condition{Kind: EpochEquals, Epoch: at - 1}, false},
		"another value":  {Condition{Kind: ValueEquals, Value: []byte("v")}, false},
		"the value":      {Condition{Kind: ValueEquals, Value: make([]byte, size)}, true},
		"a lock":         {Condition{Kind: LockHeld, Epoch: at}, false},
	} {
		c.condition.Key = []byte("k")
		out, err := x.Execute(t.Context(), &Execution{
			Write: &Write{Conditions: []Condition{c.condition}}, Operate: func(context.Context, *Txn, bool) error { return nil },
		})
		if err != nil || out.Holds != c.holds || !out.Transaction {
			t.Errorf("%s: %+v, %v", name, out, err)
		}
	}
}
