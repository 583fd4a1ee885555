package mvcc

import (
	"bytes"
	"errors"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestWriteOfSharedValuesIsCommittedOnce: a commit gives its shared values back to their owner, however it ends. The same
// write once more is refused: its record would lack them, and no later start could read the log.
func TestWriteOfSharedValuesIsCommittedOnce(t *testing.T) {
	o := tiny(vfs.NewMem())
	s := mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	w := Write{Conditions: []Condition{{Kind: KeyPresent, Key: []byte("missing")}}}
	w.SetShared([]byte("a"), bytes.Repeat([]byte("v"), 2000))
	w.Set([]byte("b"), []byte("short"))
	if _, err := x.Commit(t.Context(), &w); !errors.As(err, new(*PreconditionError)) {
		t.Fatal(err)
	}
	w.Conditions = nil
	if e, err := x.Commit(t.Context(), &w); !errors.Is(err, batch.ErrReleased) {
		t.Errorf("epoch %d, %v, and the value is %.10q", e, err, get(t, s, "a", 0))
	}
}
