package memtable

import (
	"errors"
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// TestApplyNeedsNoMemoryFromTheSystem: what Secure has let through is installed although the system then has nothing to give, with blocks split that
// the writer did not cause; and a Secure that is refused has taken nothing.
func TestApplyNeedsNoMemoryFromTheSystem(t *testing.T) {
	errNone := errors.New("no memory")
	refusing := false
	c := tiny()
	c.Obtain = func(uint64) error {
		if refusing {
			return errNone
		}
		return nil
	}
	tab := mustNew(t, c)
	var in Inserter
	var b batch.Builder
	applied := 0
	for i := range 20_000 {
		b.Reset()
		b.Set('p', fmt.Appendf(nil, "%06d", (i*7919)%1_000_000), make([]byte, i%100))
		body, err := b.Finish()
		if err != nil {
			t.Fatal(err)
		}
		refusing = i%3 == 0 // the system is short of memory from time to time
		switch err := tab.Secure(&in, MaxSize(body)); {
		case errors.Is(err, errNone):
			if taken, mapped := tab.arena.tail.Load(), tab.arena.mapped.Load(); taken > mapped {
				t.Fatalf("%d words are taken, and %d mapped", taken, mapped)
			}
			continue
		case err != nil:
			t.Fatal(err)
		}
		refusing = true
		if i%5 == 0 { // as if splits for others had used up what was secured
			in.pos = in.end
		}
		if err := tab.Apply(&in, body, keys.Epoch(i+1), false); err != nil {
			t.Fatal(err)
		}
		applied++
	}
	if applied < 10_000 || tab.Count() != applied {
		t.Errorf("%d versions were applied, %d keys are there", applied, tab.Count())
	}
	checkTable(t, tab)
}
