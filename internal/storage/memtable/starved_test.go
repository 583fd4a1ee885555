package memtable

import (
	"errors"
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// TestApplyWithoutMemoryEndsWithAnError: what Secure took for a commit is gone, as if splits for others had used it up, and the system gives no
// more, after each number of words and so in every allocation of a commit, several times in a row. The error says so, and readers of earlier
// epochs find what they found before.
func TestApplyWithoutMemoryEndsWithAnError(t *testing.T) {
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
	held := map[string]string{}
	epoch, starved, whole := keys.Epoch(1), 0, 0
	apply := func(words int, key, value string) {
		t.Helper()
		b.Reset()
		b.Set('p', []byte(key), []byte(value))
		body, err := b.Finish()
		if err != nil {
			t.Fatal(err)
		}
		if err := tab.Secure(&in, MaxSize(body)); err != nil {
			t.Fatal(err)
		}
		mapped := tab.arena.mapped.Load()
		if words >= 0 {
			in.pos = in.end
			refusing = true
			tab.arena.mapped.Store(min(mapped, tab.arena.tail.Load()+uint64(words)))
		}
		err = tab.Apply(&in, body, epoch, false)
		refusing = false
		tab.arena.mapped.Store(mapped)
		switch {
		case err == nil:
			held["p"+key] = value
			epoch++
			whole++
		case words >= 0 && errors.Is(err, ErrStarved) && errors.Is(err, errNone):
			starved++ // the epoch is never visible: no reader looks at it
			for key, value := range held {
				if v, ok := tab.Get([]byte(key), epoch-1); !ok || string(v.Value) != value {
					t.Fatalf("with %d words left: %s is %q, %v, want %q", words, key, v.Value, ok, value)
				}
			}
		default:
			t.Fatalf("with %d words left: %v", words, err)
		}
	}
	for i := range 40 {
		apply(-1, fmt.Sprint(i%30), fmt.Sprint(i))
	}
	for round := range 3 {
		for words := range 200 {
			apply(words, fmt.Sprintf("%d-%d", words, round), "new key")
			apply(words, fmt.Sprint(words%30), fmt.Sprint("overwritten", words))
			apply(-1, fmt.Sprintf("%d+%d", words, round), "beside")
		}
	}
	if starved < 50 || whole < 700 {
		t.Errorf("%d commits found no memory and %d did: this tests too little", starved, whole)
	}
	for key, value := range held {
		if v, ok := tab.Get([]byte(key), epoch-1); !ok || string(v.Value) != value {
			t.Errorf("%s is %q, %v, want %q", key, v.Value, ok, value)
		}
	}
}
