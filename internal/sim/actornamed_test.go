package sim

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// seenEpoch is the epoch of a commit that was acknowledged, zero without one, and whether a crash has lost it since.
func (w *actor) seenEpoch() (e keys.Epoch, lost bool) {
	w.ledger.mu.Lock()
	defer w.ledger.mu.Unlock()
	n := w.rng.IntN(1 + min(40, len(w.ledger.seen)))
	for e, lost = range w.ledger.seen {
		if n--; n < 0 {
			break
		}
	}
	return e, lost
}

// readNamed reads the state of an epoch that a client has seen, perhaps before a crash.
func (w *actor) readNamed(ctx context.Context) {
	e, lost := w.seenEpoch()
	x, err := w.s.Session()
	if err != nil || e == 0 {
		return
	}
	defer x.Close()
	t, err := x.Begin(mvcc.TxnOptions{ReadOnly: true, At: e})
	if !w.mayBeGone(e, lost, err) {
		return
	}
	v, err := t.Get(nil, []byte(w.key()))
	if err != nil || v.At != e {
		w.ledger.fail("transaction at %d reads at %d: %v", e, v.At, err)
	}
	if w.rng.IntN(2) == 0 { // as a scan that will be resumed
		w.s.LeaseSnapshot(e, "", 10*time.Second)
		t.Rollback()
		time.Sleep(time.Duration(w.rng.IntN(2000)) * time.Microsecond)
		if _, err := x.OpenSnapshot(e); err != nil {
			w.ledger.fail("epoch %d has a snapshot lease: %v", e, err)
			return
		}
	}
	w.total.add("named epoch")
	w.scan(ctx, x, e)
}

// mayBeGone judges the answer to a request that names an epoch, and reports whether it was granted.
func (w *actor) mayBeGone(e keys.Epoch, lost bool, err error) bool {
	switch gone := errors.As(err, new(*mvcc.SnapshotGoneError)); {
	case gone && lost:
		w.total.add("lost epoch")
	case gone && e >= w.s.LowWatermark():
		w.ledger.fail("epoch %d, low watermark %d: %v", e, w.s.LowWatermark(), err)
	case gone:
	case err != nil:
		w.refused("named epoch", err)
	case lost:
		w.ledger.fail("the state of epoch %d is read, which a crash has lost", e)
	default:
		return true
	}
	return false
}

// execute writes what depends on a range: whether it has changed since an epoch, or whether it is empty.
func (w *actor) execute(ctx context.Context) {
	floor, d := w.ledger.floor(), w.durability()
	c, key := w.begun(d), w.key()
	lower, upper := w.bounds()
	q, lost := mvcc.RangeCondition{Lower: []byte(lower), Upper: []byte(upper)}, false
	if w.rng.IntN(3) > 0 {
		q.UnchangedSince, lost = w.seenEpoch()
	}
	q.Empty = q.UnchangedSince == 0 && w.rng.IntN(2) == 0
	values := map[bool]string{true: w.value(), false: w.value()}
	out, err := w.x.Execute(ctx, &mvcc.Execution{
		Write: &mvcc.Write{Durability: d}, Ranges: []mvcc.RangeCondition{q}, Otherwise: true,
		Operate: func(_ context.Context, t *mvcc.Txn, holds bool) error {
			return t.Set([]byte(key), []byte(values[holds]))
		},
	})
	w.revealed(ctx)
	var conflict *mvcc.ConflictError
	switch {
	case errors.As(err, &conflict):
		w.total.add("execute conflict")
		w.shown("execute conflict", conflict.Epoch)
		return
	case !w.mayBeGone(q.UnchangedSince, lost, err):
		return
	}
	c.writes[key] = written{value: values[out.Holds]}
	w.ledger.later(func(s *states) error {
		holds := (len(s.live(lower, upper, out.Epoch-1)) == 0) == q.Empty
		if q.UnchangedSince != 0 {
			holds = true
			for _, k := range s.within(lower, upper) {
				_, changed := s.changed(k, q.UnchangedSince, out.Epoch)
				holds = holds && !changed
			}
		}
		if holds != out.Holds {
			return fmt.Errorf("at %d the condition %+v on [%s, %s) was %v, want %v", out.Epoch, q, lower, upper, out.Holds, holds)
		}
		return nil
	})
	w.committed(ctx, c, out.Epoch, floor, "execute")
}
