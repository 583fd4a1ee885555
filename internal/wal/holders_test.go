package wal

import (
	"errors"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// heldLog is a log of several segments, and the epoch from which on the tree lacks it.
func heldLog(t *testing.T) *appender {
	t.Helper()
	a := mustStart(t, testOptions(vfs.NewMem(), SegmentBytesMin))
	if _, err := a.appendRun(1, 100); err != nil {
		t.Fatal(err)
	}
	return a
}

func (a *appender) mustTruncate(t *testing.T) int {
	t.Helper()
	if err := a.log.TruncateBefore(90); err != nil {
		t.Fatal(err)
	}
	return a.log.Stats().Segments
}

func TestHoldersKeepTheLog(t *testing.T) {
	a := heldLog(t)
	whole := a.log.Stats().Segments
	near := a.log.Hold(HolderOptions{Name: "near", Owner: "test", From: 50, Lifetime: time.Hour})
	far := a.log.Hold(HolderOptions{Name: "far", Owner: "test", From: 1, Lifetime: time.Hour})
	if n := a.mustTruncate(t); n != whole {
		t.Fatalf("%d of %d segments", n, whole)
	}
	far.Release()
	far.Release()
	kept := a.mustTruncate(t)
	list, _ := a.log.Holders()
	if kept >= whole || len(list) != 2 || list[0].Name != "checkpoint" || list[0].From != 90 || list[1].Bytes == 0 {
		t.Fatalf("%d of %d segments, %+v", kept, whole, list)
	}
	near.Advance(90)
	near.Advance(10)
	if n := a.mustTruncate(t); n >= kept || near.Renew() != nil {
		t.Fatalf("%d of %d segments", n, kept)
	}
}

// TestHolderComesBeforeOrAfterATruncation: one that sees the first epoch that it needs keeps it.
func TestHolderComesBeforeOrAfterATruncation(t *testing.T) {
	a := heldLog(t)
	seen := make(chan keys.Epoch, 1)
	a.log.takeUnneeded(90, func(before keys.Epoch) []completedSegment { // the truncation knows what it takes, and has not taken it
		go func() {
			a.log.Hold(HolderOptions{From: 1, Lifetime: time.Hour})
			seen <- a.log.OldestEpoch()
		}()
		select {
		case oldest := <-seen:
			seen <- oldest
		case <-time.After(20 * time.Millisecond):
		}
		return a.log.completed.takeBefore(before)
	})
	if oldest := <-seen; oldest == 1 {
		t.Fatal("a holder sees epoch 1, which is then truncated")
	}
}

func TestAbandonedHoldersEnd(t *testing.T) {
	for name, o := range map[string]HolderOptions{
		"expired": {From: 1, Lifetime: -time.Second}, "too_large": {From: 1, Lifetime: time.Hour, BytesMax: SegmentBytesMin},
	} {
		a := heldLog(t)
		o.Name, o.Owner = "feed", "client 7"
		h := a.log.Hold(o)
		inBound := a.log.Hold(HolderOptions{From: 80, Lifetime: time.Hour, BytesMax: 1 << 20})
		a.mustTruncate(t)
		list, ended := a.log.Holders()
		var gone *HolderEndedError
		if err := h.Renew(); !errors.As(err, &gone) || gone.Owner != "client 7" || inBound.Renew() != nil || len(list) != 2 {
			t.Fatalf("%s: %v, %+v", name, err, list)
		}
		for i, n := range ended {
			if want := HolderEnd(i).String() == name; (n == 1) != want {
				t.Fatalf("%s: %v", name, ended)
			}
		}
	}
}

// TestEndedHoldersAreToldOnce, with their owners and causes; of very many, the last ones.
func TestEndedHoldersAreToldOnce(t *testing.T) {
	a := heldLog(t)
	a.log.Hold(HolderOptions{Name: "released", From: 1, Lifetime: time.Hour}).Release()
	a.log.Hold(HolderOptions{Name: "feed", Owner: "client 7", From: 1, Lifetime: -time.Second})
	a.mustTruncate(t)
	list, total := a.log.EndedHolders(0)
	if total != 1 || len(list) != 1 || list[0].Owner != "client 7" || list[0].Why != HolderExpired || list[0].Why.Reason() == "" {
		t.Fatalf("%d: %+v", total, list)
	}
	if list, _ := a.log.EndedHolders(total); len(list) != 0 {
		t.Fatalf("told again: %+v", list)
	}
	for range 2 * endedHoldersMax {
		a.log.Hold(HolderOptions{Name: "many", From: 1, Lifetime: -time.Second})
	}
	a.mustTruncate(t)
	if list, all := a.log.EndedHolders(total); all != total+2*endedHoldersMax || len(list) != endedHoldersMax {
		t.Fatalf("%d of %d", len(list), all)
	}
}

// TestFullDiskEndsTheLargestHolder first, and only those that yield.
func TestFullDiskEndsTheLargestHolder(t *testing.T) {
	a := heldLog(t)
	for name, from := range map[string]HolderOptions{"small": {From: 60, Yields: true}, "large": {From: 20, Yields: true}, "firm": {From: 75}} {
		from.Name, from.Lifetime = name, time.Hour
		a.log.Hold(from)
	}
	before := a.mustTruncate(t)
	for _, want := range []string{"large", "small"} {
		dropped, ok, err := a.log.DropLargestHolder()
		if err != nil || !ok || dropped.Name != want {
			t.Fatalf("%+v, %v, %v; want %s", dropped, ok, err, want)
		}
		now := a.log.Stats().Segments
		if now >= before {
			t.Fatalf("%d of %d segments without %s", now, before, want)
		}
		before = now
	}
	if dropped, ok, err := a.log.DropLargestHolder(); ok || err != nil {
		t.Fatalf("%+v, %v", dropped, err)
	}
}
