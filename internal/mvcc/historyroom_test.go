package mvcc

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestALargeCommitCountsBeforeItIsReadFromTheLog: the record of a commit is in memory as a whole while the log is asked when the commit was. It counts
// before, as a large value does, and may be refused: in a history, and when a time is named.
func TestALargeCommitCountsBeforeItIsReadFromTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const size = 700 << 10
		s, x := sparselyMarked(t)
		defer x.Close()
		var w Write
		w.Set([]byte("k"), []byte("beside"))
		w.Set([]byte("large"), make([]byte, size))
		if _, err := x.Commit(t.Context(), &w); err != nil {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Millisecond)
		at := s.Clock().Now()
		time.Sleep(20 * time.Millisecond)
		mustPut(t, s, "k", "small")
		reads := map[string]func() error{
			"a history": func() error {
				_, err := x.History(t.Context(), &HistoryOptions{Lower: []byte("k"), Upper: []byte("l"), Values: true, Count: 10, Bytes: 1000})
				return err
			},
			"a time": func() error {
				_, err := x.EpochAt(t.Context(), at)
				return err
			},
		}
		for name, read := range reads {
			most := 0
			x.AdmitLarge(func(bytes int) error { most = max(most, bytes); return nil })
			if err := read(); err != nil || most < size {
				t.Errorf("%s: %v, and %d bytes were counted", name, err, most)
			}
			full := errors.New("full")
			x.AdmitLarge(func(int) error { return full })
			if err := read(); !errors.Is(err, full) {
				t.Errorf("%s that is refused: %v", name, err)
			}
		}
	})
}

// TestRecordsOfTheLogCountOneAtATime: many large commits between two marks of the log are read one after the other, and count as the largest.
func TestRecordsOfTheLogCountOneAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const size = 700 << 10
		s, x := sparselyMarked(t)
		defer x.Close()
		for i := range 10 {
			var w Write
			w.Set([]byte("large"), make([]byte, size+i<<10))
			if _, err := x.Commit(t.Context(), &w); err != nil {
				t.Fatal(err)
			}
			time.Sleep(10 * time.Millisecond)
		}
		at := s.Clock().Now()
		time.Sleep(10 * time.Millisecond)
		mustPut(t, s, "k", "small")
		counted, read := 0, s.timeline.logRead.Load()
		x.AdmitLarge(func(bytes int) error { counted += bytes; return nil })
		if _, err := x.EpochAt(t.Context(), at); err != nil {
			t.Fatal(err)
		}
		if read = s.timeline.logRead.Load() - read; read < 3*size || counted < size || counted > 2*size {
			t.Errorf("%d bytes were read, and %d counted", read, counted)
		}
	})
}

// sparselyMarked is a store with a past, of whose log only the beginning has a mark: from later ones a record need not be read.
func sparselyMarked(t *testing.T) (*Store, *Session) {
	t.Helper()
	o := tiny(vfs.NewMem())
	o.Retention = time.Hour
	o.Storage.ChangeLog = storage.ChangeLog{Age: time.Hour, Bytes: 64 << 20}
	s := mustOpen(t, o)
	x := mustSession(t, s)
	mustPut(t, s, "k", "small")
	time.Sleep(1010 * time.Millisecond) // a sample and a mark of the log were taken
	s.timeline.marks.mu.Lock()
	s.timeline.marks.every = 1 << 40
	s.timeline.marks.mu.Unlock()
	return s, x
}
