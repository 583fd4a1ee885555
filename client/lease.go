package client

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// ErrLeaseLost means that a lease has ended, or may have ended: the server says so, or has not answered a keep-alive for the
// whole time to live.
var ErrLeaseLost = errors.New("client: the lease is lost")

// Lease is a lease that is kept alive in the background, until Close or until it is lost. Leases of one client that have the
// same time to live share their keep-alives.
type Lease struct {
	client *Client
	id     uint64
	ttl    time.Duration
	keeper *keeper
	lost   chan struct{}

	close  sync.Once
	closed chan struct{} // closed by Close

	// Guarded by the keeper's mutex; until may also be read by the round that the lease is in.
	until   time.Time // the lease lives until then, by this process's monotonic clock
	due     time.Time // when it is to be kept alive
	index   int       // among those that are due; notDue in a round
	dropped bool      // it is lost or closed
}

// GrantLease makes a lease and keeps it alive. The owner is what operators see. The context bounds the call, not the lease.
func (c *Client) GrantLease(ctx context.Context, ttl time.Duration, owner string) (*Lease, error) {
	sent := time.Now()
	id, ttl, err := c.grant(ctx, ttl, owner)
	if err != nil {
		return nil, err
	}
	l := &Lease{client: c, id: id, ttl: ttl, until: sent.Add(ttl), lost: make(chan struct{}), closed: make(chan struct{})}
	c.keepers.keep(l)
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
	l.close.Do(func() { close(l.closed) })
	l.keeper.drop(l)
	_, err := call(ctx, l.client, safe, l.client.leases.RevokeLease, &kvpb.RevokeLeaseRequest{Id: l.id})
	if e := new(Error); errors.As(err, &e) && e.Reason == kvpb.ErrorReason_ERROR_REASON_LEASE_NOT_FOUND {
		return nil // an attempt before has ended it, or its deadline
	}
	return err
}

// KeepAlive begins the time to live of a lease anew, and returns it; ErrLeaseLost if the lease has ended. A Lease of
// GrantLease does it by itself.
func (c *Client) KeepAlive(ctx context.Context, id uint64) (time.Duration, error) {
	ctx, cancel := c.bound(ctx)
	defer cancel()
	ctx, end := context.WithCancel(ctx) // ends the stream
	defer end()
	stream := keepAliveStream{client: c, ctx: ctx}
	defer stream.close()
	left, err := stream.keepAlive([]uint64{id})
	switch {
	case err != nil:
		return 0, err
	case left[0] == 0:
		return 0, ErrLeaseLost
	}
	return left[0], nil
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

// Locks describes the locks with names that have a prefix, in the order of their names.
func (c *Client) Locks(ctx context.Context, prefix []byte) (all []*kvpb.Lock, err error) {
	request := &kvpb.ListLocksRequest{Start: prefix, End: successor(prefix)}
	for more := true; more; {
		response, err := call(ctx, c, safe, c.locks.ListLocks, request)
		if err != nil {
			return nil, err
		}
		all = append(all, response.GetLocks()...)
		if more = response.GetMore() && len(response.GetLocks()) > 0; more {
			request.After = all[len(all)-1].GetName()
		}
	}
	return all, nil
}

// Attach makes the puts of a write belong to a lease: their keys are deleted when it ends.
func Attach(l *Lease) WriteOption { return AttachTo(l.id) }

// AttachTo is Attach for the id of a lease.
func AttachTo(id uint64) WriteOption { return func(o *writeOptions) { o.lease = id } }
