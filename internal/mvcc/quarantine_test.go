package mvcc

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// quarantinedStore has keys beyond the limit, as a log of another page size brings them, merged or not.
func quarantinedStore(t *testing.T, merged bool) (*Store, *Session, []string) {
	t.Helper()
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	t.Cleanup(x.Close)
	limit := s.options.Limits.KeyBytes
	s.options.Limits.KeyBytes = 16 << 10
	var long []string
	for _, first := range []string{"a", "k05", "z"} {
		key := first + strings.Repeat("x", limit)
		long = append(long, key)
		mustPut(t, s, key, "long")
	}
	s.options.Limits.KeyBytes = limit
	for i := range 10 {
		mustPut(t, s, fmt.Sprintf("k%02d", i), "short")
	}
	if merged {
		mustCheckpoint(t, s)
	}
	return s, x, long
}

func mustBeLimited(t *testing.T, err error) {
	t.Helper()
	var limit *LimitError
	if !errors.As(err, &limit) {
		t.Fatalf("%v, want a LimitError", err)
	}
}

// TestKeysBeyondTheLimitAreReadAndDeletedOnly: keys that no client could have set, but the store has, are read and deleted in every way, before and after
// a checkpoint has put them into quarantine. They are not set, and other keys of that length are refused as ever.
func TestKeysBeyondTheLimitAreReadAndDeletedOnly(t *testing.T) {
	for _, merged := range []bool{false, true} {
		t.Run(fmt.Sprintf("merged %v", merged), func(t *testing.T) {
			s, x, long := quarantinedStore(t, merged)
			readLongKeys(t, x, long)
			deleteLongKeys(t, x, long)
			if all := dump(t, s); len(all) != 0 {
				t.Fatalf("%d keys are left", len(all))
			}
			eventually(t, "the quarantine is empty", func() bool {
				mustPut(t, s, "k", "v") // a snapshot of the store's own may be of before the deletions, but not for ever
				mustCheckpoint(t, s)
				return s.Stats().Storage.Quarantine.Versions == 0
			})
			_, err := x.Get(nil, []byte(long[0]), 0)
			mustBeLimited(t, err)
		})
	}
}

func readLongKeys(t *testing.T, x *Session, long []string) {
	t.Helper()
	for _, key := range long {
		if v, err := x.Get(nil, []byte(key), 0); err != nil || !v.Found || string(v.Data) != "long" {
			t.Fatalf("get: %+v, %v", v, err)
		}
		_, err := put(x, key, "longer", DurabilityAsync)
		mustBeLimited(t, err)
	}
	_, err := x.Get(nil, []byte(long[0]+"x"), 0)
	mustBeLimited(t, err)
	if _, err := x.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
	defer x.CloseSnapshot()
	count := 0
	err = x.ReadAll(context.Background(), [][]byte{[]byte(long[0]), []byte(long[1]), []byte("k00")}, func(_ int, v Value) error {
		if v.Found {
			count++
		}
		return nil
	})
	if err != nil || count != 3 {
		t.Fatalf("batch read: %d keys, %v", count, err)
	}
	c, err := x.Scan(ScanOptions{Lower: []byte(long[0] + "\x00"), Upper: []byte(long[2])})
	if err != nil {
		t.Fatal(err)
	}
	for count = 0; c.Next(); count++ {
	}
	if c.Err() != nil || count != 11 {
		t.Fatalf("scan between two of them: %d keys, %v", count, c.Err())
	}
	c.Close()
	_, err = x.Scan(ScanOptions{Lower: []byte(long[0] + "xx")})
	mustBeLimited(t, err)
}

func deleteLongKeys(t *testing.T, x *Session, long []string) {
	t.Helper()
	w := Write{}
	w.Delete([]byte(long[0] + "x"))
	_, err := x.Commit(context.Background(), &w)
	mustBeLimited(t, err)
	w.Reset()
	w.Delete([]byte(long[0]))
	if _, err := commitAndWait(x, &w); err != nil {
		t.Fatal(err)
	}
	tx, err := x.Begin(TxnOptions{})
	if err == nil {
		err = tx.Delete([]byte(long[2]))
	}
	if err == nil {
		_, err = tx.Commit(context.Background())
	}
	if err != nil {
		t.Fatal(err)
	}
	if out, err := x.DeleteRange(context.Background(), RangeDelete{Lower: []byte("k")}); err != nil || out.Count != 11 {
		t.Fatalf("range delete: %+v, %v", out, err)
	}
}
