package storage

import (
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
)

// TestNewestSinceReadsNoLeafWithoutNewerVersions: inner nodes tell how new what is below them is.
func TestNewestSinceReadsNoLeafWithoutNewerVersions(t *testing.T) {
	b := newBench(t)
	defer func() {
		if err := b.engine.Close(); err != nil {
			t.Fatal(err)
		}
	}()
	b.put(0, 500, 20)
	b.checkpoint()
	since := keys.Epoch(b.visible.Load())
	b.put(0, 1, 20)
	b.checkpoint()
	r := b.engine.NewReader()
	level := b.engine.view.Load().root.Level
	if level == 0 {
		t.Fatal("the tree has no inner nodes")
	}
	pagesOf := func(key string, want keys.Epoch) uint64 {
		t.Helper()
		before := r.pages.Hits() + b.engine.pages.Stats().Misses
		b.slot.Enter()
		epoch, err := r.NewestSince(keys.Append(nil, keys.SpaceUser, []byte(key)), since)
		b.slot.Leave()
		if err != nil || epoch != want {
			t.Fatalf("%s: epoch %d, %v, want %d", key, epoch, err, want)
		}
		return r.pages.Hits() + b.engine.pages.Stats().Misses - before
	}
	if n := pagesOf("key-00000", since+1); n != uint64(level+1) {
		t.Errorf("%d pages for a key that is newer, want the %d of the path", n, level+1)
	}
	for i := 100; i < 500; i += 100 {
		if n := pagesOf(fmt.Sprintf("key-%05d", i), 0); n > uint64(level) {
			t.Errorf("%d pages for a key that nothing newer is near of, in a tree of %d levels", n, level+1)
		}
	}
}
