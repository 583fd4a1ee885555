package client

import (
	"container/heap"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// keepers keep the leases of a client alive: one keeper for each time to live.
type keepers struct {
	mu  sync.Mutex // before a keeper's
	all map[time.Duration]*keeper
}

// keeper keeps leases of one time to live alive. A lease is due when a third of that has passed; what is due soon after the
// first is sent along, so that leases of about the same age share their messages. A keeper has a goroutine while it has
// leases, and one for each round that is under way: a round that hangs holds up no lease but its own.
type keeper struct {
	client *Client
	ttl    time.Duration
	wake   chan struct{} // a token when the first lease may have changed

	mu     sync.Mutex // guards what follows, and the leases
	due    dueLeases
	leases int // due or in a round; the goroutine runs while there are any
}

const (
	// keepAliveIDsMax is how many leases a message has at most; the server takes 10,000.
	keepAliveIDsMax = 1000
	// keepAliveIDsSmall is how many have an answer of less than 4 KiB, which no server refuses: in overload it keeps the leases of a
	// larger message alive, refuses the answer, and ends the stream.
	keepAliveIDsSmall = 200
	// keepAliveEarly is the part of the time to live by which a lease is sent early, along with others.
	keepAliveEarly = 10
	// keepAliveRetry is the pause after a failure.
	keepAliveRetry = 100 * time.Millisecond
)

// keep begins to keep a lease alive.
func (k *keepers) keep(l *Lease) {
	k.mu.Lock()
	defer k.mu.Unlock()
	of, found := k.all[l.ttl]
	if !found {
		if k.all == nil {
			k.all = map[time.Duration]*keeper{}
		}
		of = &keeper{client: l.client, ttl: l.ttl, wake: make(chan struct{}, 1)}
		k.all[l.ttl] = of
	}
	l.keeper = of
	of.mu.Lock()
	of.leases++
	of.enterLocked(l, l.until.Add(-l.ttl*2/3))
	of.mu.Unlock()
	if !found {
		l.client.background.run(func(ctx context.Context) { of.run(ctx, k) })
	}
}

// end ends a keeper that has no more leases: the next lease finds another one.
func (k *keepers) end(of *keeper) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	of.mu.Lock()
	defer of.mu.Unlock()
	if of.leases > 0 {
		return false
	}
	delete(k.all, of.ttl)
	return true
}

// enterLocked makes a lease due, at the latest when it is lost.
func (k *keeper) enterLocked(l *Lease, due time.Time) {
	if l.due = due; l.until.Before(due) {
		l.due = l.until
	}
	if heap.Push(&k.due, l); l.index == 0 {
		k.wakeUp()
	}
}

func (k *keeper) wakeUp() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// run runs until there are no more leases. When the client ends, all leases are lost.
func (k *keeper) run(ctx context.Context, of *keepers) {
	for ended := ctx.Done(); ; {
		round, pause, left := k.next(time.Now(), ctx.Err() != nil)
		if len(round) > 0 {
			for _, part := range byLifeLeft(round, time.Now()) {
				k.client.background.run(func(ctx context.Context) { k.round(ctx, part) })
			}
			continue
		}
		if left == 0 && of.end(k) {
			return
		}
		timer := time.NewTimer(pause)
		select {
		case <-k.wake:
		case <-timer.C:
		case <-ended:
			ended = nil // next loses the leases, also those that come back from a round
		}
		timer.Stop()
	}
}

// next takes the leases to be sent if the first is due, and the time until then otherwise. Leases that were not kept alive in
// time are lost; all are, if the client has ended.
func (k *keeper) next(now time.Time, ended bool) (round []*Lease, pause time.Duration, left int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	pause = k.ttl
	for until := now; len(k.due) > 0; {
		if first := k.due[0]; !ended && first.due.After(until) {
			pause = first.due.Sub(now)
			break
		}
		l := heap.Pop(&k.due).(*Lease) //nolint:forcetypeassert // there are no others
		if ended || !now.Before(l.until) {
			k.loseLocked(l)
			continue
		}
		round = append(round, l)
		until = now.Add(k.ttl / keepAliveEarly)
	}
	return round, pause, k.leases
}

// loseLocked ends the life of a lease that is neither due nor in a round any more.
func (k *keeper) loseLocked(l *Lease) {
	k.dropLocked(l)
	close(l.lost)
}

func (k *keeper) dropLocked(l *Lease) {
	l.dropped = true
	if k.leases--; k.leases == 0 {
		k.wakeUp()
	}
}

// drop stops keeping a lease alive, unless it is lost already. A keep-alive of it that is under way does nothing more.
func (k *keeper) drop(l *Lease) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if l.dropped {
		return
	}
	if l.index != notDue {
		heap.Remove(&k.due, l.index)
	}
	k.dropLocked(l)
}

// byLifeLeft divides leases into rounds so that each lease of a round lives for at most twice as long as the first that is lost: that one
// bounds the round, and after an outage the others would have no time for an answer.
func byLifeLeft(all []*Lease, now time.Time) (rounds [][]*Lease) {
	slices.SortFunc(all, func(x, y *Lease) int { return x.until.Compare(y.until) })
	for from, i := 0, 1; i <= len(all); i++ {
		if i == len(all) || all[i].until.Sub(now) > 2*all[from].until.Sub(now) {
			rounds = append(rounds, all[from:i:i])
			from = i
		}
	}
	return rounds
}

// round keeps leases alive, with one stream unless a message fails. The first lease is the first that is lost.
func (k *keeper) round(ctx context.Context, all []*Lease) {
	ctx, cancel := context.WithDeadline(ctx, all[0].until) // of this round alone
	defer cancel()
	stream := keepAliveStream{client: k.client, ctx: ctx}
	defer func() { stream.close() }()
	for most, rest := keepAliveIDsMax, all; len(rest) > 0; {
		leases := rest[:min(most, len(rest))]
		// What an answer proves, it proves from the time at which the request was sent.
		sent := time.Now()
		left, err := stream.keepAlive(idsOf(leases))
		if err != nil { // the stream has ended
			stream = keepAliveStream{client: k.client, ctx: ctx}
		}
		if isOverloaded(err) && len(leases) > keepAliveIDsSmall {
			most = keepAliveIDsSmall
			continue
		}
		k.answered(leases, sent, left, err)
		rest = rest[len(leases):]
	}
}

func idsOf(leases []*Lease) []uint64 {
	ids := make([]uint64, len(leases))
	for i, l := range leases {
		ids[i] = l.id
	}
	return ids
}

func isOverloaded(err error) bool {
	e, ok := errors.AsType[*Error](err)
	return ok && e.Reason == kvpb.ErrorReason_ERROR_REASON_OVERLOADED
}

// answered makes leases due again.
func (k *keeper) answered(leases []*Lease, sent time.Time, left []time.Duration, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for i, l := range leases {
		switch {
		case l.dropped:
		case err != nil:
			k.enterLocked(l, time.Now().Add(keepAliveRetry))
		case left[i] == 0:
			k.loseLocked(l)
		default:
			l.until = sent.Add(left[i])
			k.enterLocked(l, sent.Add(k.ttl/3))
		}
	}
}

// dueLeases are leases by the time at which they are due, as a heap.
type dueLeases []*Lease

const notDue = -1

func (d dueLeases) Len() int           { return len(d) }
func (d dueLeases) Less(i, j int) bool { return d[i].due.Before(d[j].due) }
func (d dueLeases) Swap(i, j int) {
	d[i], d[j] = d[j], d[i]
	d[i].index, d[j].index = i, j
}

// Push implements heap.Interface.
func (d *dueLeases) Push(l any) {
	into := l.(*Lease) //nolint:forcetypeassert // by this file alone
	into.index = len(*d)
	*d = append(*d, into)
}

// Pop implements heap.Interface.
func (d *dueLeases) Pop() any {
	last := (*d)[len(*d)-1]
	(*d)[len(*d)-1] = nil
	*d = (*d)[:len(*d)-1]
	last.index = notDue
	return last
}

// keepAliveStream is a stream of keep-alives, which is opened for the first of them.
type keepAliveStream struct {
	client *Client
	ctx    context.Context
	stream kvpb.LeaseService_KeepAliveClient
	err    error // of the keep-alive that was the last one
}

// keepAlive sends a keep-alive of leases and returns what is left of each; zero for those that have ended. After an error the stream
// cannot be used any more.
func (s *keepAliveStream) keepAlive(ids []uint64) ([]time.Duration, error) {
	var left []time.Duration
	left, s.err = s.try(ids)
	return left, s.err
}

func (s *keepAliveStream) try(ids []uint64) (left []time.Duration, err error) {
	if s.stream == nil {
		if s.stream, err = s.client.leases.KeepAlive(s.ctx); err != nil {
			return nil, newError(err)
		}
	}
	_ = s.stream.Send(&kvpb.KeepAliveRequest{Ids: ids}) // Recv says why it failed
	response, err := s.stream.Recv()
	if err != nil {
		return nil, newError(err)
	}
	for i, l := range response.GetLeases() {
		if i < len(ids) && l.GetId() == ids[i] {
			left = append(left, time.Duration(l.GetTtlMs())*time.Millisecond)
		}
	}
	if len(left) != len(ids) {
		return nil, &Error{Code: codes.Internal, Message: "the answer to a keep-alive is not about its leases"}
	}
	return left, nil
}

// close ends the stream. The context must end afterwards.
func (s *keepAliveStream) close() {
	if s.stream != nil && s.err == nil {
		_ = s.stream.CloseSend()
		_, _ = s.stream.Recv() // the server ends the stream
	}
}
