package mvcc

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestAValueThatIsNotAdmittedIsNotRead by ReadAll, which leaves it out, nor by scans and differences, which end. Values in memtables
// and in the tree.
func TestAValueThatIsNotAdmittedIsNotRead(t *testing.T) {
	const size = 1 << 20
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	for i := range 3 {
		value := "small"
		if i == 1 {
			value = strings.Repeat("x", size)
		}
		if _, err := put(x, fmt.Sprint("k", i), value, DurabilityAsync); err != nil {
			t.Fatal(err)
		}
	}
	refuse := errors.New("there is no room")
	admit := func(bytes int) error {
		if bytes >= size {
			return refuse
		}
		return nil
	}
	for _, where := range []string{"memtable", "tree"} {
		x := mustSession(t, s)
		if _, err := x.OpenSnapshot(0); err != nil {
			t.Fatal(err)
		}
		asked := 0
		x.AdmitLarge(func(bytes int) error { asked += bytes; return ErrNotCopied })
		err := x.ReadAll(t.Context(), [][]byte{[]byte("k0"), []byte("k1"), []byte("k2")}, func(i int, v Value) error {
			if want := map[bool]string{true: "", false: "small"}[i == 1]; !v.Found || string(v.Data) != want {
				return fmt.Errorf("key %d: %d bytes, found %v", i, len(v.Data), v.Found)
			}
			return nil
		})
		if err != nil || asked != size || cap(x.buffers.batch.value) >= size {
			t.Errorf("%s: %v; asked for %d bytes, and has read %d", where, err, asked, cap(x.buffers.batch.value))
		}
		c, err := x.Scan(ScanOptions{Admit: admit})
		if err != nil {
			t.Fatal(err)
		}
		if !c.Next() || c.Next() || !errors.Is(c.Err(), refuse) || cap(c.long) >= size {
			t.Errorf("%s: a scan: %v; has read %d bytes", where, c.Err(), cap(c.long))
		}
		c.Close()
		d, err := x.Difference(DifferenceOptions{SetsOnly: true, Admit: admit})
		if err != nil {
			t.Fatal(err)
		}
		if !d.Next() || d.Next() || !errors.Is(d.Err(), refuse) || cap(d.value) >= size {
			t.Errorf("%s: a difference: %v; has read %d bytes", where, d.Err(), cap(d.value))
		}
		d.Close()
		x.Close()
		if err := s.Checkpoint(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}
