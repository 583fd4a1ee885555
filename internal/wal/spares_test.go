package wal

import (
	"testing"
	"time"

	"epochkv/internal/vfs"
)

// TestSparesComeAsTheyAreNeeded: a log that nobody writes to has a segment and a spare. More are made when somebody has found none.
func TestSparesComeAsTheyAreNeeded(t *testing.T) {
	const segment = 64 << 10
	options := testOptions(vfs.NewMem(), segment)
	options.Images = 8
	l := mustStart(t, options).log
	waitForSpare(t, l)
	time.Sleep(20 * time.Millisecond) // for whatever a background goroutine might do
	if n := l.images.mappedBytes(); n != 2*segment {
		t.Fatalf("%d bytes of images before the first append, of segments of %d", n, segment)
	}
	ready := func() int {
		l.spares.mu.Lock()
		defer l.spares.mu.Unlock()
		return len(l.spares.ready)
	}
	for _, want := range []int{1, 2, 4, 6} {
		for deadline := time.Now().Add(5 * time.Second); ready() < want && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
			l.wantSpare()
		}
		l.wantSpare()
		time.Sleep(5 * time.Millisecond)
		if got := ready(); got != want {
			t.Fatalf("%d spares are ready, want %d", got, want)
		}
		var taken []*blank
		for range want + 1 { // one more than there are
			b, ok, err := l.spares.take()
			if err != nil || ok != (len(taken) < want) {
				t.Fatalf("spare %d of %d: ready %v, %v", len(taken)+1, want, ok, err)
			}
			taken = append(taken, b)
		}
		for _, b := range taken {
			l.images.give(b.image, 0)
			if err := b.file.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
}
