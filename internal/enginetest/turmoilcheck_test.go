package enginetest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/wal"
)

// check compares the store and its snapshots with what they must show.
func (u *uproar) check() {
	u.t.Helper()
	for _, p := range append(slices.Clone(u.pinned), &pinnedState{u.x, u.want}) {
		got, err := u.state(p.x, u.rng.IntN(2) == 0)
		if err == nil {
			err = equalMaps(p.want, got)
		}
		if err != nil && !(u.faults && asDamage(err)) {
			u.t.Fatalf("snapshot at %d: %v", p.x.at, err)
		}
		if u.faults && p.x != u.x {
			u.checkGets(p)
		}
	}
	if u.faults {
		if _, err := u.x.OpenSnapshot(0); err != nil {
			u.t.Fatal(err)
		}
		u.checkGets(&pinnedState{u.x, u.want})
		u.x.CloseSnapshot()
		return
	}
	if u.rng.IntN(3) > 0 {
		return
	}
	if u.rule != nil {
		return // its operation may be one of the verification
	}
	report, err := u.s.Verify(context.Background(), inspect.VerifyOptions{})
	if _, full := errors.AsType[*wal.HolderEndedError](err); full {
		return
	}
	if err != nil {
		u.t.Fatal(err)
	}
	mustBeSound(u.t, report)
}

// checkGets reads each key alone: other keys may be on pages that could not be read.
func (u *uproar) checkGets(p *pinnedState) {
	u.t.Helper()
	for i := range turmoilKeys {
		key := u.keyOf(i)
		want, is := p.want[key]
		err := p.x.ReadAll(context.Background(), [][]byte{[]byte(key)}, func(_ int, v mvcc.Value) error {
			if v.Found != is || string(v.Data) != want {
				return fmt.Errorf("%v %.30q, want %v %.30q", v.Found, v.Data, is, want)
			}
			return nil
		})
		if err != nil && !asDamage(err) {
			u.t.Fatalf("%s at %d: %v", key, p.x.at, err)
		}
	}
}

// state reads everything.
func (u *uproar) state(x *session, reverse bool) (map[string]string, error) {
	if x == u.x {
		if _, err := x.OpenSnapshot(0); err != nil {
			return nil, err
		}
		defer func() { x.CloseSnapshot(); x.at = 0 }()
	}
	c, err := x.Scan(mvcc.ScanOptions{Reverse: reverse})
	if err != nil {
		return nil, err
	}
	defer c.Close()
	all := map[string]string{}
	for c.Next() {
		if _, twice := all[string(c.Key())]; twice {
			return nil, fmt.Errorf("%q comes twice", c.Key())
		}
		all[string(c.Key())] = string(c.Value())
	}
	return all, c.Err()
}

// checkFiles checks what the closed store has left.
func (u *uproar) checkFiles() {
	u.t.Helper()
	if !u.faults {
		verifyFiles(u.t, u.o)
		return
	}
	got, report := mustSalvage(u.t, u.mem)
	if u.flips == 0 {
		if err := equalMaps(u.want, got); err != nil {
			u.t.Errorf("salvage: %v", err)
		}
		return
	}
	for k, v := range got {
		if w, ok := u.want[k]; ok && w != v || !ok && len(report.Notes) == 0 {
			u.t.Errorf("salvage: %s is %.40q, want %v %.40q; %v", k, v, ok, w, report.Notes)
		}
	}
	if lost := len(u.want) - len(got); lost > 0 && report.LostTotal == 0 {
		u.t.Errorf("salvage: %d of %d keys, and nothing is lost", len(got), len(u.want))
	}
}

// checkLog reads the log from its oldest epoch on: it has every commit from there on.
func (u *uproar) checkLog() {
	u.t.Helper()
	log := u.s.Changes()
	oldest, through := log.OldestInLog(), log.Stable()
	r := log.ReadLog(oldest, wal.TailMark{})
	defer func() { _ = r.Close() }() // it was only read
	found := map[keys.Epoch]bool{}
	for {
		rec, ok, err := r.Next(through)
		if truncated, is := errors.AsType[*wal.TruncatedError](err); is { // the crash has brought back a part of what was given up
			u.total["log with a hole"]++
			oldest = truncated.Oldest
			_ = r.Close()
			r = log.ReadLog(oldest, wal.TailMark{})
			continue
		}
		if err != nil && u.failing {
			return // the end of an old segment could not be written
		}
		if err != nil {
			u.t.Fatalf("the log from epoch %d on: %v", oldest, err)
		}
		if !ok {
			break
		}
		found[rec.Epoch] = !rec.Gap
	}
	for _, e := range u.acknowledged {
		if e >= oldest && !found[e] {
			u.t.Fatalf("the log from epoch %d to %d lacks epoch %d", oldest, through, e)
		}
	}
}

// goesOn puts until that succeeds: there is space, and no operation fails any more.
func (u *uproar) goesOn() {
	u.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
		_, err := put(u.x, u.keyOf(0), "last", mvcc.DurabilitySync)
		if err == nil {
			u.want = maps.Clone(u.want)
			u.want[u.keyOf(0)] = "last"
			return
		}
		if time.Now().After(deadline) {
			u.t.Fatalf("puts still fail: %v", err)
		}
	}
}

// happened reports whether a key that next changes has its new value. Keys that cannot be read do not tell.
func (u *uproar) happened(next map[string]string) bool {
	for i := range turmoilKeys {
		key := u.keyOf(i)
		before, was := u.want[key]
		after, is := next[key]
		if was == is && before == after {
			continue
		}
		if v, err := u.x.Get(nil, []byte(key), 0); err == nil {
			return v.Found == is && string(v.Data) == after
		}
	}
	return false
}
