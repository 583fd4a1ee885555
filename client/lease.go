package client

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// ErrLeaseLost means that a lease has ended, or may have ended: the server says so, or has not answered a keep-alive for the
// whole time to live.
var ErrLeaseLost = errors.New("client: the lease is lost")

// Lease is a lease that is kept alive in the background, until Close or until it is lost.
type Lease struct {
	client *Client
	id     uint64
	ttl    time.Duration
	stop   context.CancelFunc
	done   chan struct{} // closed when nothing keeps the lease alive any more
	lost   chan struct{}

	mu    sync.Mutex
	until time.Time // the lease lives until then, by this process's monotonic clock
}

// GrantLease makes a lease and keeps it alive. The owner is what operators see. The context bounds the call, not the lease.
func (c *Client) GrantLease(ctx context.Context, ttl time.Duration, owner string) (*Lease, error) {
	sent := time.Now()
	id, ttl, err := c.grant(ctx, ttl, owner)
	if err != nil {
		return nil, err
	}
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	l := &Lease{
		client: c, id: id, ttl: ttl, stop: stop, until: sent.Add(ttl),
		done: make(chan struct{}), lost: make(chan struct{}),
	}
	go l.run(running)
	return l, nil
}

// GrantLeaseOnce makes a lease, returns its id, and does not keep it alive.
func (c *Client) GrantLeaseOnce(ctx context.Context, ttl time.Duration, owner string) (id uint64, err error) {
	id, _, err = c.grant(ctx, ttl, owner)
	return id, err
}

func (c *Client) grant(ctx context.Context, ttl time.Duration, owner string) (uint64, time.Duration, error) {
	request := &kvpb.GrantLeaseRequest{Id: rand.Uint64()>>1 | 1, Ttl: durationpb.New(ttl), Owner: owner}
	response, lost, e := repeat(ctx, c, safe, c.leases.GrantLease, request, func(*Error) bool { return false })
	if e != nil && (!lost || e.Reason != kvpb.ErrorReason_ERROR_REASON_LEASE_EXISTS) { // else an attempt before has made it
		return 0, 0, e
	}
	if e == nil {
		ttl = response.GetTtl().AsDuration()
	}
	return request.GetId(), ttl, nil
}

// ID is the id of the lease.
func (l *Lease) ID() uint64 { return l.id }

// Lost is closed when the lease has ended, or may have ended. Close does not close it.
func (l *Lease) Lost() <-chan struct{} { return l.lost }

// Close ends the lease, and with it deletes its keys and releases its locks. If the server cannot be reached, that happens
// when the time to live has passed.
func (l *Lease) Close(ctx context.Context) error {
	l.stop()
	<-l.done
	_, err := call(ctx, l.client, safe, l.client.leases.RevokeLease, &kvpb.RevokeLeaseRequest{Id: l.id})
	if e := new(Error); errors.As(err, &e) && e.Reason == kvpb.ErrorReason_ERROR_REASON_LEASE_NOT_FOUND {
		return nil // an attempt before has ended it, or its deadline
	}
	return err
}

// run keeps the lease alive: every third of the time to live, and after a failure soon again.
func (l *Lease) run(ctx context.Context) {
	defer close(l.done)
	const retryPause = 100 * time.Millisecond
	for pause := l.ttl / 3; ; {
		select {
		case <-ctx.Done():
			return
		case <-time.After(min(pause, time.Until(l.deadline()))):
		}
		if !time.Now().Before(l.deadline()) {
			close(l.lost)
			return
		}
		err := l.keepAlive(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, ErrLeaseLost):
			close(l.lost)
			return
		case err != nil:
			pause = retryPause
		default:
			pause = l.ttl / 3
		}
	}
}

func (l *Lease) deadline() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.until
}

// keepAlive sends one keep-alive. What it proves, it proves from the time at which it was sent.
func (l *Lease) keepAlive(ctx context.Context) error {
	ctx, cancel := context.WithDeadline(ctx, l.deadline())
	defer cancel()
	sent := time.Now()
	left, err := l.client.keepAliveOnce(ctx, l.id)
	if err != nil {
		return err
	}
	if left == 0 {
		return ErrLeaseLost
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.until = sent.Add(left)
	return nil
}

// keepAliveOnce sends one keep-alive and returns the time to live, which has begun anew; zero if the lease has ended.
func (c *Client) keepAliveOnce(ctx context.Context, id uint64) (time.Duration, error) {
	ctx, cancel := context.WithCancel(ctx) // ends the stream
	defer cancel()
	stream, err := c.leases.KeepAlive(ctx)
	if err != nil {
		return 0, newError(err)
	}
	if err := stream.Send(&kvpb.KeepAliveRequest{Ids: []uint64{id}}); err != nil {
		_, err = stream.Recv() // says why
		return 0, newError(err)
	}
	response, err := stream.Recv()
	if err != nil {
		return 0, newError(err)
	}
	if len(response.GetLeases()) != 1 {
		return 0, &Error{Code: codes.Internal, Message: "the answer to a keep-alive is not about one lease"}
	}
	_ = stream.CloseSend()
	_, _ = stream.Recv() // the server ends the stream
	return time.Duration(response.GetLeases()[0].GetTtlMs()) * time.Millisecond, nil
}

// KeepAlive begins the time to live of a lease anew, and returns it; ErrLeaseLost if the lease has ended. A Lease of
// GrantLease does it by itself.
func (c *Client) KeepAlive(ctx context.Context, id uint64) (time.Duration, error) {
	ctx, cancel := c.bound(ctx)
	defer cancel()
	left, err := c.keepAliveOnce(ctx, id)
	if err == nil && left == 0 {
		err = ErrLeaseLost
	}
	return left, err
}

// RevokeLease ends a lease.
func (c *Client) RevokeLease(ctx context.Context, id uint64) error {
	_, err := call(ctx, c, safe, c.leases.RevokeLease, &kvpb.RevokeLeaseRequest{Id: id})
	return err
}

// LeaseInfo describes a lease and up to so many of its keys.
func (c *Client) LeaseInfo(ctx context.Context, id uint64, keys uint32) (*kvpb.GetLeaseResponse, error) {
	return call(ctx, c, safe, c.leases.GetLease, &kvpb.GetLeaseRequest{Id: id, Keys: keys})
}

// Leases describes all leases, in the order of their ids.
func (c *Client) Leases(ctx context.Context) (all []*kvpb.Lease, err error) {
	for more, request := true, new(kvpb.ListLeasesRequest); more; {
		response, err := call(ctx, c, safe, c.leases.ListLeases, request)
		if err != nil {
			return nil, err
		}
		all = append(all, response.GetLeases()...)
		if more = response.GetMore() && len(all) > 0; more {
			request = &kvpb.ListLeasesRequest{After: all[len(all)-1].GetId()}
		}
	}
	return all, nil
}

// Attach makes the puts of a write belong to a lease: their keys are deleted when it ends.
func Attach(l *Lease) WriteOption { return AttachTo(l.id) }

// AttachTo is Attach for the id of a lease.
func AttachTo(id uint64) WriteOption { return func(o *writeOptions) { o.lease = id } }
