package sim

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

func (w *actor) newRequest() *mvcc.Request {
	var id mvcc.RequestID
	binary.BigEndian.PutUint64(id[:], w.s.Clock().Now()/1000<<16)
	id[6], id[8] = 7<<4|byte(w.rng.IntN(16)), 2<<6|byte(w.rng.IntN(64))
	binary.BigEndian.PutUint32(id[10:], w.rng.Uint32())
	r := &mvcc.Request{ID: id, Hash: w.rng.Uint32()}
	w.ledger.mu.Lock()
	defer w.ledger.mu.Unlock()
	w.ledger.requests[id] = &mvcc.Request{ID: id, Hash: r.Hash}
	return r
}

// answered judges the answer to a request with an id that did not commit.
func (w *actor) answered(r *mvcc.Request, err error) bool {
	var applied *mvcc.AppliedError
	switch {
	case errors.As(err, &applied):
		w.total.add("applied before")
		w.shown("applied before", applied.Outcome.Epoch)
		w.wasApplied(r.ID, applied.Outcome.Epoch)
	case errors.Is(err, mvcc.ErrRequestCancelled):
		w.total.add("cancelled before")
	case errors.As(err, new(*mvcc.RequestExpiredError)):
		w.total.add("expired")
	default:
		return false
	}
	return true
}

func (w *actor) wasApplied(id mvcc.RequestID, epoch keys.Epoch) {
	w.ledger.later(func(s *states) error {
		if c := s.commits[epoch]; c == nil || c.request != id {
			return fmt.Errorf("request %x was to be applied at %d: %+v", id, epoch, c)
		}
		return nil
	})
}

// outcome asks what became of a request.
func (w *actor) outcome(r *mvcc.Request) {
	floor := w.ledger.floor()
	out, err := w.x.Outcome(w.ctx, r)
	w.revealed(w.ctx)
	if err != nil {
		w.refused("outcome", err)
		return
	}
	w.total.add(fmt.Sprint("outcome ", out.State))
	w.shown("outcome", out.Epoch)
	switch out.State {
	case mvcc.OutcomeApplied, mvcc.OutcomeResultDropped:
		w.wasApplied(r.ID, out.Epoch)
	case mvcc.OutcomeNotApplied, mvcc.OutcomeCancelled:
		w.ledger.later(func(s *states) error {
			for e, c := range s.commits {
				if c.request == r.ID && (e <= floor || out.State == mvcc.OutcomeCancelled) {
					return fmt.Errorf("request %x was applied at %d, and its outcome after %d was acknowledged is %d", r.ID, e, floor, out.State)
				}
			}
			return nil
		})
	}
}

// repeat sends a request several times, at once and later, and asks for its outcome or cancels it.
func (w *actor) repeat(ctx context.Context) {
	r := w.newRequest()
	other := &actor{commotion: w.commotion, rng: rand.New(rand.NewPCG(w.rng.Uint64(), 1)), ctx: w.ctx, n: w.n + 10, seq: w.seq * 100}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer other.endSessions()
		if other.open(); other.x == nil {
			return
		}
		again := *r
		switch other.rng.IntN(3) {
		case 0:
			other.put(ctx, &again)
		case 1:
			other.fence(ctx, &again)
		default:
			other.outcome(&again)
		}
	}()
	once := *r
	w.put(ctx, &once)
	<-done
	if w.rng.IntN(2) == 0 && !w.over() {
		twice := *r
		w.put(w.ctx, &twice)
	}
	if !w.over() {
		w.outcome(r)
	}
}

// fence cancels a request.
func (w *actor) fence(ctx context.Context, r *mvcc.Request) {
	d := w.durability()
	out, epoch, err := w.x.Fence(ctx, r, d)
	w.revealed(ctx)
	if err != nil {
		w.refused("fence", err)
		return
	}
	w.total.add(fmt.Sprint("fence ", out.State))
	switch {
	case out.State == mvcc.OutcomeApplied:
		w.wasApplied(r.ID, out.Epoch)
	case out.State == mvcc.OutcomeCancelled && epoch != 0:
		w.ledger.add(&commit{epoch: epoch, sync: d == mvcc.DurabilitySync})
		w.ledger.mu.Lock()
		w.ledger.fences[r.ID] = epoch
		w.ledger.mu.Unlock()
		if w.s.Wait(ctx, epoch, d) == nil {
			w.ledger.acknowledge(epoch, d == mvcc.DurabilitySync, "fence")
		}
	}
}
