package sim

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// running is a transaction of a client.
type running struct {
	at     keys.Epoch
	own    map[string]written
	saved  []map[string]written
	points map[string]bool
	ranges [][2]string
	level  mvcc.Isolation
}

// transaction reads and writes in a transaction, and commits it.
func (w *actor) transaction(ctx context.Context) {
	floor, d := w.ledger.floor(), w.durability()
	c := w.begun(d)
	r := &running{own: map[string]written{}, points: map[string]bool{}, level: []mvcc.Isolation{mvcc.IsolationSnapshot, mvcc.IsolationSerializable}[w.rng.IntN(2)]}
	t, err := w.x.Begin(mvcc.TxnOptions{Isolation: r.level, Durability: d})
	if err != nil {
		w.refused("begin", err)
		return
	}
	defer t.Rollback()
	if r.at = t.At(); r.at < floor {
		w.ledger.fail("a transaction begins at %d after %d was acknowledged", r.at, floor)
	}
	for range 1 + w.rng.IntN(12) {
		if err := w.stepIn(ctx, t, r); err != nil {
			w.refused("step of a transaction", err)
			return
		}
		if w.rng.IntN(6) == 0 {
			time.Sleep(time.Duration(w.rng.IntN(300)) * time.Microsecond)
		}
	}
	if w.rng.IntN(10) == 0 {
		return
	}
	await := t.Await()
	var request *mvcc.Request
	if w.rng.IntN(4) == 0 {
		request = w.newRequest()
		c.request = request.ID
	}
	epoch, err := t.CommitRequest(ctx, request)
	w.revealed(ctx)
	var conflict *mvcc.ConflictError
	switch {
	case errors.As(err, &conflict):
		w.total.add("conflict")
		w.shown("conflict", conflict.Epoch)
		return
	case err != nil && request != nil && w.answered(request, err):
		return
	case err != nil:
		w.refused("commit", err)
		return
	case len(r.own) == 0:
		if epoch != r.at {
			w.ledger.fail("a transaction that wrote nothing at %d has the epoch %d", r.at, epoch)
		}
		return
	}
	if await != 0 && w.s.AwaitDurable(ctx, await) == nil {
		w.ledger.promise(await, "transaction")
	}
	c.writes = r.own
	w.ledger.later(func(s *states) error { return r.check(s, epoch) })
	w.committed(ctx, c, epoch, floor, fmt.Sprint("transaction ", r.level))
}

// stepIn does one operation of a transaction.
func (w *actor) stepIn(ctx context.Context, t *mvcc.Txn, r *running) error {
	key := w.key()
	switch n := w.rng.IntN(100); {
	case n < 30:
		v, err := t.Get(nil, []byte(key))
		if err != nil {
			return err
		}
		if own, is := r.own[key]; is {
			if own.deleted == v.Found || v.Found && own.value != string(v.Data) {
				w.ledger.fail("transaction: %s is %v %.30q, want its own %+v", key, v.Found, v.Data, own)
			}
			return nil
		}
		r.points[key] = true
		w.sightedIn(sight{key: key, at: r.at, found: v.Found, value: string(v.Data), epoch: v.Epoch})
	case n < 60:
		v := w.value()
		r.own[key] = written{value: v}
		return t.Set([]byte(key), []byte(v))
	case n < 68:
		r.own[key] = written{deleted: true}
		return t.Delete([]byte(key))
	case n < 80:
		return w.scanIn(ctx, t, r)
	case n < 85:
		return w.deleteRangeIn(ctx, t, r)
	case n < 90:
		r.saved = append(r.saved, maps.Clone(r.own))
		_, err := t.Savepoint()
		return err
	case n < 95 && len(r.saved) > 0:
		i := w.rng.IntN(len(r.saved))
		r.own, r.saved = maps.Clone(r.saved[i]), r.saved[:i+1]
		return t.RollbackTo(i + 1)
	default:
		out, err := t.Invoke(&mvcc.Invoke{Kind: mvcc.InvokeGetAndSet, Key: []byte(key), Operand: []byte("own")})
		if err != nil {
			return err
		}
		if own, is := r.own[key]; !is {
			r.points[key] = true
			w.sightedIn(sight{key: key, at: r.at, found: out.OldFound, value: string(out.Old), epoch: out.OldEpoch})
		} else if own.deleted == out.OldFound || out.OldFound && own.value != string(out.Old) {
			w.ledger.fail("transaction: %s is %v %.30q, want its own %+v", key, out.OldFound, out.Old, own)
		}
		r.own[key] = written{value: "own"}
	}
	return nil
}

// scanIn scans a range, whole or up to a key.
func (w *actor) scanIn(ctx context.Context, t *mvcc.Txn, r *running) error {
	lower, upper := w.bounds()
	reverse := w.rng.IntN(3) == 0
	cur, err := t.Scan(mvcc.ScanOptions{Lower: []byte(lower), Upper: []byte(upper), Reverse: reverse, Context: ctx})
	if err != nil {
		return err
	}
	seen, limit := map[string]bool{}, 1+w.rng.IntN(80)
	for len(seen) < limit && cur.Next() {
		key := string(cur.Key())
		seen[key] = true
		if own, is := r.own[key]; is {
			if own.deleted || own.value != string(cur.Value()) || cur.Epoch() != 0 {
				w.ledger.fail("transaction: scan has %s %.30q, want its own %+v", key, cur.Value(), own)
			}
			continue
		}
		w.sightedIn(sight{key: key, at: r.at, found: true, value: string(cur.Value()), epoch: cur.Epoch()})
	}
	if len(seen) == limit { // it has read up to this key
		if last := string(cur.Key()); reverse {
			lower = last
		} else {
			upper = last + "\x00"
		}
	}
	err = cur.Err()
	cur.Close()
	if err != nil {
		return err
	}
	r.ranges = append(r.ranges, [2]string{lower, upper})
	own, at := maps.Clone(r.own), r.at
	w.ledger.later(func(s *states) error {
		want := map[string]bool{}
		for _, key := range s.live(lower, upper, at) {
			want[key] = true
		}
		for key, o := range own {
			if key >= lower && key < upper {
				if want[key] = !o.deleted; o.deleted {
					delete(want, key)
				}
			}
		}
		if !maps.Equal(want, seen) {
			return fmt.Errorf("scan of a transaction at %d of [%s, %s): %v, want %v", at, lower, upper, seen, want)
		}
		return nil
	})
	return nil
}

func (w *actor) deleteRangeIn(ctx context.Context, t *mvcc.Txn, r *running) error {
	lower, upper := w.bounds()
	n, err := t.DeleteRange(ctx, []byte(lower), []byte(upper))
	if err != nil {
		return err
	}
	// Which keys those are is read again: it is in the transaction's snapshot.
	own, at, until := r.own, r.at, upper
	r.ranges = append(r.ranges, [2]string{lower, upper})
	x, err := w.s.Session()
	if err != nil {
		return err
	}
	defer x.Close()
	if at == 0 {
		upper = lower // zero would be the newest epoch
	} else if _, err := x.OpenSnapshot(at); err != nil {
		return err
	}
	cur, err := x.Scan(mvcc.ScanOptions{Lower: []byte(lower), Upper: []byte(upper), KeysOnly: true})
	if err != nil {
		return err
	}
	defer cur.Close()
	deleted := map[string]bool{}
	for cur.Next() {
		if _, is := own[string(cur.Key())]; !is {
			deleted[string(cur.Key())] = true
		}
	}
	for key, o := range own {
		if key >= lower && key < until && !o.deleted {
			deleted[key] = true
		}
	}
	if cur.Err() != nil {
		return cur.Err()
	}
	if len(deleted) != n {
		w.ledger.fail("a transaction at %d deleted %d keys in [%s, %s), want %d", at, n, lower, upper, len(deleted))
	}
	for key := range deleted {
		own[key] = written{deleted: true}
	}
	return nil
}

// check checks that nothing has changed between the snapshot and the commit that must not.
func (r *running) check(s *states, epoch keys.Epoch) error {
	for key := range r.own {
		if e, is := s.changed(key, r.at, epoch); is {
			return fmt.Errorf("transaction of %d and %d wrote %s, which was written at %d", r.at, epoch, key, e)
		}
	}
	if r.level != mvcc.IsolationSerializable {
		return nil
	}
	for key := range r.points {
		if e, is := s.changed(key, r.at, epoch); is {
			return fmt.Errorf("serializable transaction of %d and %d read %s, which was written at %d", r.at, epoch, key, e)
		}
	}
	for _, b := range r.ranges {
		for _, key := range s.within(b[0], b[1]) {
			if e, is := s.changed(key, r.at, epoch); is {
				return fmt.Errorf("serializable transaction of %d and %d read [%s, %s), in which %s was written at %d", r.at, epoch, b[0], b[1], key, e)
			}
		}
	}
	return nil
}

// live are the keys in [lower, upper) that exist at an epoch. It is exact for keys without deadline and lease.
func (s *states) live(lower, upper string, at keys.Epoch) (list []string) {
	for _, key := range s.within(lower, upper) {
		if !s.at(key, at).deleted {
			list = append(list, key)
		}
	}
	return list
}
