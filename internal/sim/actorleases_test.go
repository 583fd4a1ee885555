package sim

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/lease"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// expiring writes and reads keys with deadlines.
func (w *actor) expiring(ctx context.Context) {
	key := fmt.Sprintf("x%02d", w.rng.IntN(12))
	if w.s.FeatureLevel() < keys.FeatureLevelHistory || w.rng.IntN(3) == 0 {
		w.get(w.x, key, 0, w.ledger.floor())
		return
	}
	floor, d := w.ledger.floor(), w.durability()
	c, b := w.begun(d), &mvcc.Write{Durability: d}
	deadline := w.s.Clock().Now()/1000 + uint64(w.rng.IntN(60))
	if w.rng.IntN(3) == 0 {
		op := mvcc.Invoke{Kind: []mvcc.InvokeKind{mvcc.InvokeTouch, mvcc.InvokePersist}[w.rng.IntN(2)], Key: []byte(key)}
		if op.Kind == mvcc.InvokeTouch {
			op.ExpiresAt = deadline
		}
		out := make([]mvcc.Invoked, 1)
		epoch, err := w.x.InvokeAll(ctx, []mvcc.Invoke{op}, nil, d, out)
		if err == nil && epoch != 0 {
			c.writes[key] = written{value: string(out[0].New), deleted: !out[0].NewFound, expires: out[0].ExpiresAt}
		}
		w.revealed(ctx)
		if err != nil {
			w.refused("touch", err)
		} else if epoch != 0 {
			w.committed(ctx, c, epoch, floor, "touch")
		}
		return
	}
	v := w.value()
	f := mvcc.Metadata{ExpiresAt: deadline}
	if w.rng.IntN(4) == 0 {
		f.ExpiresAt = 0
	}
	b.SetWithMetadata([]byte(key), []byte(v), &f)
	c.writes[key] = written{value: v, expires: f.ExpiresAt}
	epoch, err := w.x.Commit(ctx, b)
	w.revealed(ctx)
	if err != nil {
		w.refused("put with deadline", err)
		return
	}
	w.committed(ctx, c, epoch, floor, "put with deadline")
}

// leased grants, prolongs and revokes a lease, and attaches keys to it.
func (w *actor) leased(ctx context.Context) {
	if w.s.FeatureLevel() < keys.FeatureLevelHistory {
		return
	}
	m := w.leases
	if w.lease == nil || w.lease.mayHaveEnded(w.elapsed()) {
		now := w.elapsed()
		info, epoch, err := m.Grant(ctx, 0, time.Second+time.Duration(w.rng.IntN(3000))*time.Millisecond, "")
		if err != nil {
			w.refused("grant", err)
			return
		}
		if err := w.s.Wait(ctx, epoch, mvcc.DurabilitySync); err != nil {
			w.refused("grant", err)
			return
		}
		w.total.add("grant")
		w.lease = &leaseModel{id: info.ID, until: now + info.TTL}
		w.ledger.acknowledge(epoch, true, "grant")
	}
	l := w.lease
	key := fmt.Sprintf("l%d-%d", w.n, w.rng.IntN(3))
	switch n := w.rng.IntN(10); {
	case n < 4:
		floor := w.ledger.floor()
		c, v := w.begun(mvcc.DurabilitySync), w.value()
		b := &mvcc.Write{Durability: mvcc.DurabilitySync}
		b.SetWithMetadata([]byte(key), []byte(v), &mvcc.Metadata{Lease: uint64(l.id)})
		c.writes[key] = written{value: v, lease: l}
		epoch, err := w.x.Commit(ctx, b)
		w.revealed(ctx)
		if err == nil {
			w.committed(ctx, c, epoch, floor, "attach")
		} else if !l.mayHaveEnded(w.elapsed()) && !errors.Is(err, mvcc.ErrLeaseFull) {
			w.refused("attach", err)
		}
	case n < 6:
		now := w.elapsed()
		ttl, err := m.KeepAlive(ctx, l.id)
		if err == nil {
			w.total.add("keep-alive")
			l.prolong(now + ttl)
		} else if !l.mayHaveEnded(w.elapsed()) {
			w.refused("keep-alive", err)
		}
	case n < 9:
		w.get(w.x, key, 0, w.ledger.floor())
	default:
		ctx, cancel := context.WithTimeout(ctx, 200*time.Millisecond)
		defer cancel()
		l.mu.Lock()
		l.asked = true
		l.mu.Unlock()
		if err := m.Revoke(ctx, l.id); err != nil && !errors.Is(err, lease.ErrNotFound) {
			w.refused("revoke", err)
			return
		}
		w.total.add("revoke")
		w.lease = nil
	}
}

// lock acquires a lock, writes with its token, and releases it.
func (w *actor) lock(ctx context.Context) {
	if w.lease == nil || w.s.FeatureLevel() < keys.FeatureLevelHistory {
		return
	}
	name := fmt.Sprint("lock", w.rng.IntN(2))
	number := lease.NewAttempt()
	ctx, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	held, err := w.leases.Acquire(ctx, number, []byte(name), w.lease.id, nil, w.rng.IntN(2) == 0)
	if err == nil {
		err = w.s.Wait(ctx, held.Await, mvcc.DurabilitySync)
	}
	if err != nil {
		if _, _, undone := w.leases.Undo(w.ctx, []byte(name), w.lease.id, []uint64{number}); undone != nil {
			w.refused("undo", undone)
		}
		if !errors.Is(err, lease.ErrHeld) && !w.lease.mayHaveEnded(w.elapsed()) {
			w.refused("acquire", err)
		}
		return
	}
	w.total.add("acquire")
	w.ledger.acknowledge(held.Token, true, "acquire")
	w.ledger.mu.Lock()
	id, known := w.ledger.tokens[held.Token]
	w.ledger.tokens[held.Token] = w.lease.id
	w.ledger.mu.Unlock()
	if known && id != w.lease.id {
		w.ledger.fail("lock %s: leases %d and %d have the token %d", name, id, w.lease.id, held.Token)
	}
	w.fenced(ctx, name, held.Token)
	if other, _, err := w.leases.Release(w.ctx, []byte(name), held.Token-1); other && err == nil {
		w.ledger.fail("lock %s of the token %d was released with that before it", name, held.Token)
	}
	released, epoch, err := w.leases.Release(w.ctx, []byte(name), held.Token)
	if err != nil {
		w.refused("release", err)
		return
	}
	if !released {
		w.total.add("lost lock")
		return
	}
	w.heldUntil(name, held.Token, epoch)
	w.ledger.mu.Lock()
	w.ledger.ended[name] = append(w.ledger.ended[name], epoch)
	w.ledger.mu.Unlock()
}

// fenced writes on the condition that the lock is held.
func (w *actor) fenced(ctx context.Context, name string, token keys.Epoch) {
	floor := w.ledger.floor()
	c, v, key := w.begun(mvcc.DurabilityAsync), w.value(), w.key()
	b := &mvcc.Write{Durability: mvcc.DurabilityAsync, Conditions: []mvcc.Condition{{Kind: mvcc.LockHeld, Key: []byte(name), Epoch: token}}}
	b.Set([]byte(key), []byte(v))
	c.writes[key] = written{value: v}
	epoch, err := w.x.Commit(ctx, b)
	w.revealed(ctx)
	switch {
	case err == nil:
		w.heldUntil(name, token, epoch)
		w.committed(ctx, c, epoch, floor, "fenced put")
	case !errors.As(err, new(*mvcc.PreconditionError)):
		w.refused("fenced put", err)
	}
}

// heldUntil checks that a lock has no other holder between a token and an epoch.
func (w *actor) heldUntil(name string, token, epoch keys.Epoch) {
	w.ledger.later(func(s *states) error {
		for _, e := range s.ended[name] {
			if e > token && e < epoch {
				return fmt.Errorf("%s was held from %d to %d, and released at %d", name, token, epoch, e)
			}
		}
		return nil
	})
}
