package feed

import (
	"fmt"
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/batch"
)

func TestLiveWatchDeliversCommitsInOrder(t *testing.T) {
	s := newStore(t, 1<<16)
	s.commit(batch.Header{}, set("before", "x"))
	f := New(s, Options{})
	defer f.Close()
	c := f.NewConsumer("client")
	w := mustWatch(t, c, WatchOptions{Now: true, Ranges: []Range{{[]byte("k"), []byte("l")}}})
	go func() {
		for i := range 2000 {
			s.commit(batch.Header{Time: uint64(i)}, set("j", "other"), set(fmt.Sprintf("k%d", i%7), fmt.Sprint(i)), del("l"))
		}
	}()
	var got []event
	for len(got) < 2000 {
		d := take(t, c)
		got = append(got, eventsOf(&d)...)
	}
	if want := s.wanted(&w.filter, w.Start()); !slices.Equal(got, want) {
		t.Fatalf("%d events, want %d", len(got), len(want))
	}
}
