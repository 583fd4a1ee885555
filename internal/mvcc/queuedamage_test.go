package mvcc

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// damageLeaves flips a bit in the leaves for which choose returns true, by their first and last key, and returns how many
// they are.
func damageLeaves(t *testing.T, fs *vfs.Mem, pageSize int, choose func(first, last []byte) bool) (n int) {
	t.Helper()
	f, err := fs.Open("db/data.ekv", vfs.ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	size, err := fs.Size("db/data.ekv")
	if err != nil {
		t.Fatal(err)
	}
	for at := int64(0); at+int64(pageSize) <= size; at += int64(pageSize) {
		b := make([]byte, pageSize)
		if _, err := f.ReadAt(b, at); err != nil {
			t.Fatal(err)
		}
		if !page.IsTree(b, 0) {
			continue
		}
		v := page.Leaf(b).Layout()
		if choose(slices.Concat(v.Prefix(), v.Suffix(0)), slices.Concat(v.Prefix(), v.Suffix(v.Count()-1))) {
			b[pageSize-1] ^= 1
			if _, err := f.WriteAt(b, at); err != nil {
				t.Fatal(err)
			}
			n++
		}
	}
	return n
}

// ofQueue reports whether a leaf has nothing but entries of the expiry queue.
func ofQueue(first, last []byte) bool {
	entry := []byte{byte(keys.SpaceSystem), keys.SystemExpiry}
	return bytes.HasPrefix(first, entry) && bytes.HasPrefix(last, entry)
}

// awaitExpiry waits until a condition of the expirer's work is met.
func awaitExpiry(t *testing.T, s *Store, what string, met func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !met(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited too long for %s: %+v", what, s.Stats().Expiry)
		}
	}
}

// TestDamagedQueueStopsNoOtherDeadline: of the expiry queue each leaf is damaged, or every second one. Keys whose entries are
// hidden stay. All others expire, those that are written into a hidden range included, before and after merges and starts.
func TestDamagedQueueStopsNoOtherDeadline(t *testing.T) {
	for _, every := range []int{1, 2} {
		t.Run(fmt.Sprint("every ", every), func(t *testing.T) {
			fs := vfs.NewMem()
			o := tiny(fs)
			o.Storage.PageSize = 512
			s, err := Open(o)
			if err != nil {
				t.Fatal(err)
			}
			x := mustSession(t, s)
			const old = 200
			due := in(s, time.Hour)
			for i := range 20 { // the leaf after the queue keeps its place
				mustPut(t, s, fmt.Sprint("! ", i), "v")
			}
			for i := range old {
				putWith(t, x, fmt.Sprintf("old %03d", i), "v", metadata.Fields{ExpiresAt: due + uint64(i)})
			}
			x.Close()
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			n := 0
			if damageLeaves(t, fs, 512, func(first, last []byte) bool {
				if !ofQueue(first, last) {
					return false
				}
				n++
				return n%every == 0
			}) < 3 {
				t.Fatal("too few leaves: the test tests too little")
			}
			// From now on the wall clock is two hours later, and an operator accepts it.
			o.WallClock = func() time.Time { return time.Now().Add(2 * time.Hour) }
			if s, err = Open(o); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = s.Close() }()
			if _, err := s.Clock().Accept(); err != nil {
				t.Fatal(err)
			}
			hidden := func() int { return len(dump(t, s)) - 20 }
			awaitExpiry(t, s, "the first pass", func() bool {
				return s.Stats().Expiry.Damage != nil && s.expirer.progress.Load() == noDeadline && s.Stats().Expiry.Lag == 0
			})
			left := hidden()
			if every == 1 && left < old*3/4 || every == 2 && (left == 0 || left > old*3/4) {
				t.Errorf("%d of %d keys are left", left, old)
			}
			x = mustSession(t, s)
			for i := range 60 { // between the hidden entries
				putWith(t, x, fmt.Sprintf("new %03d", i), "v", metadata.Fields{ExpiresAt: due + uint64(i)})
			}
			awaitExpiry(t, s, "new deadlines in the past", func() bool { return hidden() == left })
			for i := range 60 {
				putWith(t, x, fmt.Sprintf("new %03d", i), "v", metadata.Fields{ExpiresAt: in(s, 100*time.Millisecond)})
			}
			if err := s.Checkpoint(context.Background()); err != nil {
				t.Fatal(err)
			}
			awaitExpiry(t, s, "new deadlines", func() bool { return hidden() == left })
			if err := s.Checkpoint(context.Background()); err != nil {
				t.Fatal(err)
			}
			for key := range dump(t, s) { // what hides an entry does not keep its key from being used
				if key[0] != '!' {
					putWith(t, x, key, "v", metadata.Fields{ExpiresAt: in(s, 0)})
				}
			}
			x.Close()
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			if s, err = Open(o); err != nil {
				t.Fatal(err)
			}
			awaitExpiry(t, s, "the keys that were put again", func() bool { return hidden() == 0 })
			if st := s.Stats().Expiry; st.Err != nil {
				t.Error(st.Err)
			}
		})
	}
}
