package server

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/epochkv/epochkv/internal/feed"
	"github.com/epochkv/epochkv/internal/keys"
)

// watchAheadTimeout is how long a watch waits for the epoch at which it begins: for an ASYNC write to become durable, or for
// a server that lags, if another one has returned the token.
const watchAheadTimeout = 5 * time.Second

// aheadWatches are the watches of a stream that begin after an epoch which is not stable yet. One goroutine at a time waits
// for the least of their epochs. The sender owns the fields and goes on meanwhile.
type aheadWatches struct {
	list    []aheadWatch       // in the order in which they came, which is that of their deadlines
	need    keys.Epoch         // for which the goroutine waits
	stop    context.CancelFunc // ends the goroutine; nil without one
	arrived chan error         // from the goroutine: look at the list, or why the epoch cannot come
}

// aheadWatch is a watch that waits for an epoch.
type aheadWatch struct {
	watch    *streamWatch
	start    watchStart
	need     keys.Epoch
	deadline time.Time
}

// needs is the epoch that has to be stable before a watch can begin here.
func (s *watchStart) needs() keys.Epoch {
	need := s.after.Epoch
	if s.after.Operations > 0 {
		need++
	}
	return max(need, s.at)
}

// beginLaterAhead lets a watch wait for its epoch.
func (w *watchStream) beginLaterAhead(ctx context.Context, sw *streamWatch, start watchStart) {
	one := aheadWatch{watch: sw, start: start, need: start.needs(), deadline: time.Now().Add(w.server.feed.aheadTimeout)}
	w.ahead.list = append(w.ahead.list, one)
	w.awaitAhead(ctx)
}

// awaitAhead starts the goroutine that waits, if there is something to wait for.
func (w *watchStream) awaitAhead(ctx context.Context) {
	a := &w.ahead
	if len(a.list) == 0 {
		return
	}
	need := slices.MinFunc(a.list, func(x, y aheadWatch) int { return cmp.Compare(x.need, y.need) }).need
	if a.stop != nil {
		if need >= a.need {
			return
		}
		a.stop()
	}
	waiting, stop := context.WithDeadline(ctx, a.list[0].deadline)
	a.need, a.stop = need, stop
	w.server.drain.receivers.Go(func() {
		err := w.server.feed.feed.Await(waiting, need)
		switch waiting.Err() {
		case context.Canceled:
			return
		case context.DeadlineExceeded:
			err = nil
		}
		select {
		case a.arrived <- err:
		case <-ctx.Done():
		}
	})
}

// beginArrived begins the watches whose epochs have come, and ends those for which it is too late.
func (w *watchStream) beginArrived(ctx context.Context, failure error) error {
	a := &w.ahead
	a.close()
	list, stable, now := a.list, w.server.feed.feed.Stable(), time.Now()
	a.list = nil
	for i := range list {
		one := &list[i]
		if w.watches[one.watch.id] != one.watch {
			continue // it has ended while one before it waited for room, or was sent
		}
		err := failure
		switch {
		case one.need <= stable:
			err = w.begin(ctx, one.watch, one.start)
		case failure == nil && now.Before(one.deadline):
			a.list = append(a.list, *one)
		case failure == nil:
			err = &feed.AheadError{After: feed.Position{Epoch: one.need}, Stable: stable}
		}
		if err != nil {
			if err := w.end(ctx, one.watch, err); err != nil {
				return err
			}
		}
	}
	w.awaitAhead(ctx)
	return nil
}

// forget removes a watch that was cancelled.
func (a *aheadWatches) forget(sw *streamWatch) {
	a.list = slices.DeleteFunc(a.list, func(one aheadWatch) bool { return one.watch == sw })
}

// close ends the goroutine.
func (a *aheadWatches) close() {
	if a.stop != nil {
		a.stop()
		a.stop = nil
	}
}
