package mvcc

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
)

// modelTxn is a transaction, and what it has read and written.
type modelTxn struct {
	x          *Session
	txn        *Txn
	o          TxnOptions
	at         keys.Epoch
	own        map[string]modelVersion
	savepoints []map[string]modelVersion
	reads      map[string]bool
	ranges     [][2]string
}

// see is a key as the transaction sees it, which counts as read if it is not its own write.
func (x *modelTxn) see(m *modelState, key string) modelVersion {
	if v, ok := x.own[key]; ok {
		return v
	}
	x.reads[key] = true
	return m.version(key, x.at)
}

// found are the keys of a range as the transaction sees them, and their versions.
func (x *modelTxn) found(m *modelState, lower, upper string) (list []string, all map[string]modelVersion) {
	all = map[string]modelVersion{}
	for _, k := range m.found(lower, upper, x.at) {
		all[k] = m.version(k, x.at)
	}
	for k, v := range x.own {
		if k < lower || upper != "" && k >= upper {
			continue
		}
		if all[k] = v; !v.found {
			delete(all, k)
		}
	}
	return slices.Sorted(maps.Keys(all)), all
}

// conflicts reports whether something that the commit depends on has changed since the snapshot.
func (x *modelTxn) conflicts(m *modelState) bool {
	for k := range x.own {
		if m.newest(k).epoch > x.at {
			return true
		}
	}
	if x.o.Isolation == IsolationSnapshot {
		return false
	}
	for k := range x.reads {
		if m.newest(k).epoch > x.at {
			return true
		}
	}
	return slices.ContainsFunc(x.ranges, func(r [2]string) bool { return m.changed(r[0], r[1], x.at, keys.MaxEpoch) })
}

// inTxn begins a transaction, or does something in one of those that are open.
func (r *modelDriver) inTxn() {
	if len(r.txns) < 2 || len(r.txns) < 5 && r.one(8) {
		r.begin()
		return
	}
	x := r.txns[r.rng.IntN(len(r.txns))]
	for range 1 + r.rng.IntN(4) {
		r.operate(x)
	}
	if r.one(3) {
		r.endTxn(x)
	}
}

func (r *modelDriver) operate(x *modelTxn) {
	switch n := r.rng.IntN(20); {
	case n < 5:
		k := r.key()
		r.recent = append(r.recent, k)
		v, err := x.txn.Get(nil, []byte(k))
		r.compareValue(k, v, x.see(&r.m, k), x.txn.Metadata, err)
	case n < 9:
		r.setIn(x)
	case n < 11:
		r.scanIn(x)
	case n < 14:
		r.invokeIn(x)
	case n < 19:
		r.savepointIn(x)
	default:
		r.unchangedIn(x)
	}
}

func (r *modelDriver) begin() {
	x := &modelTxn{x: mustSession(r.t, r.s), own: map[string]modelVersion{}, reads: map[string]bool{}}
	x.x.Permit(r.underLatches)
	x.o = TxnOptions{Isolation: Isolation(r.rng.IntN(3)), ReadOnly: r.one(8), Durability: r.durability()}
	if x.o.ReadOnly {
		x.o.At = r.past()
	}
	var err error
	if x.txn, err = x.x.Begin(x.o); r.isGone(x.o.At, err) {
		x.x.Close()
		return
	}
	if x.at = x.o.At; x.at == 0 {
		x.at = r.m.visible
	}
	if err != nil || x.txn.At() != x.at {
		r.t.Fatalf("a transaction at %d is at %d: %v", x.at, x.txn.At(), err)
	}
	r.note("begin", "%+v", x.o)
	r.txns = append(r.txns, x)
}

// mayWrite compares the error of a write.
func (r *modelDriver) mayWrite(x *modelTxn, err error) bool {
	if x.o.ReadOnly != errors.Is(err, ErrReadOnly) || !x.o.ReadOnly && err != nil {
		r.t.Errorf("a write in %+v: %v", x.o, err)
	}
	return err == nil
}

func (r *modelDriver) setIn(x *modelTxn) {
	n := 1 + r.rng.IntN(3)
	if r.one(8) {
		n = r.size()
	}
	for _, k := range r.keys(n) {
		if written := slices.Sorted(maps.Keys(x.own)); len(written) > 0 && r.one(2) {
			k = written[r.rng.IntN(len(written))] // again, for savepoints
		}
		var err error
		v := modelVersion{found: true, value: r.value(), deadline: r.deadline()}
		if r.one(4) {
			v, err = modelVersion{}, x.txn.Delete([]byte(k))
		} else {
			err = x.txn.SetWithMetadata([]byte(k), []byte(v.value), &metadata.Fields{ExpiresAt: v.deadline})
		}
		if r.mayWrite(x, err) {
			x.own[k] = v
		}
	}
}

// scanIn walks a range, perhaps not to its end, or deletes it.
func (r *modelDriver) scanIn(x *modelTxn) {
	lower, upper := r.bounds()
	if n := r.rng.IntN(modelKeys); !r.one(4) { // few keys, so that not each commit of others is a conflict
		lower, upper = fmt.Sprintf("k%03d", n), fmt.Sprintf("k%03d", n+r.rng.IntN(8))
	}
	list, all := x.found(&r.m, lower, upper)
	if r.one(5) {
		n, err := x.txn.DeleteRange(r.t.Context(), bound(lower), bound(upper))
		if r.mayWrite(x, err) {
			x.ranges = append(x.ranges, [2]string{lower, upper})
			if n != len(list) {
				r.t.Errorf("%d keys deleted, want %d", n, len(list))
			}
			for _, k := range list {
				x.own[k] = modelVersion{}
			}
		}
		return
	}
	o := ScanOptions{Lower: bound(lower), Upper: bound(upper), Reverse: r.one(2)}
	c, err := x.txn.Scan(o)
	if err != nil {
		r.t.Fatal(err)
	}
	most := math.MaxInt
	if r.one(2) {
		most = r.rng.IntN(5)
	}
	last, ended := r.compareScan(c, c.Metadata, list, o.Reverse, func(k string) modelVersion { return all[k] }, most, nil)
	c.Close()
	switch {
	case ended:
	case last == "":
		return
	case o.Reverse:
		lower, r.recent = last, append(r.recent, last)
	default:
		upper, r.recent = last+"\x00", append(r.recent, last)
	}
	x.ranges = append(x.ranges, [2]string{lower, upper})
}

func (r *modelDriver) invokeIn(x *modelTxn) {
	k := r.key()
	own, isOwn := x.own[k]
	before := r.m.version(k, x.at)
	if isOwn {
		before = own
	}
	op := r.operation(k, before)
	out, err := x.txn.Invoke(&op)
	if x.o.ReadOnly {
		r.mayWrite(x, err)
		return
	}
	x.see(&r.m, k)
	now, applied, reason := before.invoke(&op)
	if reason != "" {
		if !errors.As(err, new(*TypeError)) {
			r.t.Errorf("%+v: %v, want %s", op, err, reason)
		}
		return
	}
	if err != nil {
		r.t.Errorf("%+v: %v", op, err)
		return
	}
	if isOwn {
		before.epoch = 0
	}
	if r.compareInvoked(&op, &out, before, now, applied); applied {
		now.epoch = 0
		x.own[k] = now
	}
}

// savepointIn sets savepoints, writes, and rolls back, so that keys are written several times between two savepoints.
func (r *modelDriver) savepointIn(x *modelTxn) {
	for range 1 + r.rng.IntN(8) {
		switch r.rng.IntN(3) {
		case 0:
			x.savepoints = append(x.savepoints, maps.Clone(x.own))
			if n, err := x.txn.Savepoint(); n != len(x.savepoints) || err != nil {
				r.t.Errorf("savepoint %d, want %d: %v", n, len(x.savepoints), err)
			}
		case 1:
			r.rollbackTo(x, r.rng.IntN(len(x.savepoints)+2))
		default:
			r.setIn(x)
		}
	}
}

func (r *modelDriver) rollbackTo(x *modelTxn, n int) {
	err := x.txn.RollbackTo(n)
	if n == 0 || n > len(x.savepoints) {
		if !errors.Is(err, ErrNoSavepoint) {
			r.t.Errorf("savepoint %d of %d: %v", n, len(x.savepoints), err)
		}
		return
	}
	if err != nil {
		r.t.Error(err)
	}
	x.own, x.savepoints = maps.Clone(x.savepoints[n-1]), x.savepoints[:n]
}

func (r *modelDriver) unchangedIn(x *modelTxn) {
	lower, upper := r.bounds()
	since := r.past()
	if since == 0 {
		since = x.at
	}
	is, err := x.txn.UnchangedSince(bound(lower), bound(upper), since)
	if r.isGone(since, err) {
		return
	}
	x.ranges = append(x.ranges, [2]string{lower, upper})
	if errors.As(err, new(*ConflictError)) && r.s.engine.TreeEpoch() > x.at && r.m.changed(lower, upper, since, keys.MaxEpoch) {
		return // the tree does not tell whether that was before the snapshot
	}
	if want := !r.m.changed(lower, upper, since, x.at); is != want || err != nil {
		r.t.Errorf("[%q, %q) unchanged from %d to %d: %v, want %v: %v", lower, upper, since, x.at, is, want, err)
	}
}

func (r *modelDriver) endTxn(x *modelTxn) {
	r.txns = slices.DeleteFunc(r.txns, func(other *modelTxn) bool { return other == x })
	defer x.x.Close()
	if r.one(8) {
		x.txn.Rollback()
		if _, err := x.txn.Get(nil, []byte("k")); !errors.Is(err, ErrNoTransaction) {
			r.t.Errorf("a read after the end: %v", err)
		}
		return
	}
	request := r.request()
	var list []string
	for _, k := range slices.Concat(slices.Sorted(maps.Keys(x.own)), slices.Sorted(maps.Keys(x.reads))) {
		if len(x.own) >= readBeforeMin || r.one(2) {
			list = append(list, k)
		}
	}
	r.note("commit", "begun at %d, %d writes, %d reads, ranges %q, request %v", x.at, len(x.own), len(x.reads), x.ranges, request != nil)
	ctx := r.t.Context()
	if r.one(4) {
		ctx = r.disturbed(list, request)
	} else if invariants.Enabled {
		r.disturbLatched(x)
	}
	epoch, err := x.txn.CommitRequest(ctx, request)
	x.x.committing.atStep = nil
	if r.refused(err, request, nil) {
		return
	}
	if len(x.own) > 0 && x.conflicts(&r.m) {
		r.compareConflict(x, err)
		return
	}
	if len(x.own) > 0 {
		changes := map[string]modelChange{}
		for k, v := range x.own {
			changes[k] = modelChange{modelVersion: v}
		}
		r.committed(epoch, err, changes, request, x.o.Durability)
	} else if epoch != x.at || err != nil {
		r.t.Errorf("a transaction at %d that wrote nothing is at %d: %v", x.at, epoch, err)
	}
}

// disturbLatched lets another session commit to something that the transaction has read while its latches are held: the look at the last
// commits before its own finds that.
func (r *modelDriver) disturbLatched(x *modelTxn) {
	list := slices.Sorted(maps.Keys(x.reads))
	for _, bounds := range x.ranges {
		list = append(list, r.m.within(bounds[0], bounds[1])...)
	}
	held := map[int]bool{}
	stripe := func(k string) int { return r.s.latches.stripe(keys.Append(nil, keys.SpaceUser, []byte(k))) }
	for k := range x.own {
		held[stripe(k)] = true
	}
	list = slices.DeleteFunc(list, func(k string) bool { return held[stripe(k)] })
	if len(list) == 0 || !r.one(3) {
		return
	}
	k, v := list[r.rng.IntN(len(list))], r.value()
	x.x.committing.atStep = func(at commitStep) {
		if at != stepLatched {
			return
		}
		x.x.committing.atStep = nil
		r.note("disturbed", "under latches: %s", k)
		w := &modelWrite{changes: map[string]modelChange{k: {modelVersion: modelVersion{found: true, value: v}}}}
		w.Durability = DurabilityAsync
		w.Set([]byte(k), []byte(v))
		r.put(r.t.Context(), r.other, w)
	}
}

// compareConflict compares a conflict, which may have taken an epoch if it was found after the validation.
func (r *modelDriver) compareConflict(x *modelTxn, err error) {
	r.note("conflict", "%v", err)
	var conflict *ConflictError
	if !errors.As(err, &conflict) {
		r.t.Errorf("begun at %d, wrote %v, read %v and %q: %v, want a conflict", x.at, slices.Sorted(maps.Keys(x.own)), slices.Sorted(maps.Keys(x.reads)), x.ranges, err)
		return
	}
	k := string(conflict.Key)
	_, wrote := x.own[k]
	inRange := slices.ContainsFunc(x.ranges, func(b [2]string) bool { return k >= b[0] && (b[1] == "" || k < b[1]) })
	if !wrote && !x.reads[k] && !inRange || conflict.Epoch <= x.at || conflict.Epoch > r.m.visible {
		r.t.Errorf("begun at %d: %v at %d", x.at, err, conflict.Epoch)
	}
	if at := r.s.Visible(); x.o.Isolation != IsolationSnapshot && at == r.m.visible+1 {
		r.m.visible = at
	}
}
