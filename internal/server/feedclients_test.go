package server

import (
	"errors"
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/feed"
)

// TestAClientLeavesWatchesToOthers: whatever it has, as much is free for others, and what has ended is counted no more.
func TestAClientLeavesWatchesToOthers(t *testing.T) {
	const most = 100
	var u watchUnits
	counts := map[string]int64{}
	fill := func(client string) int64 {
		for u.reserve(client, 1, most) == nil {
			counts[client]++
		}
		return counts[client]
	}
	if n := fill("first"); n != most/2 {
		t.Errorf("a client alone has %d of %d", n, most)
	}
	if err := u.reserve("second", most/4+1, most); err == nil {
		t.Error("a large watch takes more than it leaves")
	}
	if n := fill("second"); n != most/4 {
		t.Errorf("a second one has %d of %d", n, most)
	}
	for i := range most - most/2 - most/4 {
		fill(fmt.Sprint(i))
	}
	if used := u.used.Load(); used != most {
		t.Errorf("many clients have %d of %d", used, most)
	}
	for client, n := range counts {
		u.release(client, n)
	}
	if u.used.Load() != 0 || u.clients() != 0 {
		t.Errorf("%d are used by %d clients in the end", u.used.Load(), u.clients())
	}
}

// TestManyStreamsOfWatchesCountAsWatches: the response of each has 16 KiB, which the bound of memory has for the first 1,024 only.
func TestManyStreamsOfWatchesCountAsWatches(t *testing.T) {
	var f feedState
	limits := config.Feed{StreamsPerClient: 10_000, Watches: 100}
	var all []func()
	enter := func(client string) error {
		leave, err := f.enterStream(client, &limits)
		if err == nil {
			all = append(all, leave)
		}
		return err
	}
	for range watchStreamsShared {
		if err := enter("first"); err != nil {
			t.Fatal(err)
		}
	}
	if used := f.units.used.Load(); used != 0 {
		t.Errorf("those of which the responses have their share count as %d watches", used)
	}
	for i := range int64(3) {
		if err, used := enter("first"), f.units.used.Load(); err != nil || used != (i+1)*16 {
			t.Errorf("%v; %d more count as %d watches", err, i+1, used)
		}
	}
	limit := new(feed.LimitError)
	if err := enter("first"); !errors.As(err, &limit) {
		t.Errorf("a client that leaves others less than it has: %v", err)
	}
	if err := enter("second"); err != nil {
		t.Error(err)
	}
	if err := enter("third"); err != nil {
		t.Error(err)
	}
	if err := enter("fourth"); !errors.As(err, &limit) {
		t.Errorf("one that leaves others less than it has: %v", err)
	}
	for _, leave := range all {
		leave()
	}
	if streams, used, clients := f.streams.Load(), f.units.used.Load(), len(f.clients.open)+len(f.units.open); streams != 0 || used != 0 || clients != 0 {
		t.Errorf("%d streams, %d watches and %d clients are left", streams, used, clients)
	}
}
