package mvcc

import (
	"context"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestAConditionOnARangeTakesNoOtherSession: the session of its transaction is the only one that there may be.
func TestAConditionOnARangeTakesNoOtherSession(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Limits.Sessions = 1
	s := mustOpen(t, o)
	since := mustPut(t, s, "a", "1")
	x := mustSession(t, s)
	defer x.Close()
	for _, c := range []struct {
		at    string
		holds bool
	}{{"a", true}, {"b", false}} { // "b" is written by the first one
		out, err := x.Execute(t.Context(), &Execution{
			Write: &Write{Durability: DurabilityAsync}, Ranges: []RangeCondition{{Lower: []byte(c.at), UnchangedSince: since}}, Otherwise: true,
			Operate: func(_ context.Context, tx *Txn, _ bool) error { return tx.Set([]byte("b"), nil) },
		})
		if err != nil || out.Holds != c.holds {
			t.Errorf("from %s on: holds %t, %v", c.at, out.Holds, err)
		}
	}
}
