package lease

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
)

// TestALeaseThatExistsCanBeUsed: the commit of a grant waits, because there is too much to write, and the lease is not in memory yet. A grant that is
// repeated says that the lease exists when it can be used.
func TestALeaseThatExistsCanBeUsed(t *testing.T) {
	h, ctx := openAlone(t, Options{}), context.Background()
	e := &entry{id: 7, index: notScheduled, record: record{ttl: time.Hour}}
	epoch, err := h.commitGrant(ctx, e)
	if err == nil {
		err = h.store.Wait(ctx, epoch, mvcc.DurabilitySync)
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := h.Grant(timeout(10*time.Millisecond), 7, time.Hour, ""); err == nil || errors.Is(err, ErrExists) {
		t.Errorf("a grant that is repeated while the first one has not ended: %v", err)
	}
	repeated := make(chan error, 1)
	go func() { repeated <- h.grant(7, time.Hour) }()
	h.add(e)
	if err := <-repeated; !errors.Is(err, ErrExists) {
		t.Errorf("afterwards: %v", err)
	}
	if _, err := h.KeepAlive(ctx, 7); err != nil {
		t.Error(err)
	}
	if len(h.granting) != 0 {
		t.Errorf("%d grants are under way", len(h.granting))
	}
}

// TestAGrantThatFailsIsNotUnderWay: its commit is refused when it has an epoch.
func TestAGrantThatFailsIsNotUnderWay(t *testing.T) {
	h, noted := openAlone(t, Options{}), false
	ctx := mvcc.WithPermit(context.Background(), func() error {
		if noted = h.knows(7); noted {
			return errors.New("not permitted")
		}
		return nil
	})
	if _, _, err := h.Grant(ctx, 7, time.Hour, ""); err == nil || !noted {
		t.Fatalf("%v, and the grant was noted: %v", err, noted)
	}
	if len(h.granting) != 0 {
		t.Errorf("%d grants are under way", len(h.granting))
	}
	h.mustGrant(7, time.Hour)
}

// TestARecordOfALeaseThatIsBeingGrantedIsReadLater: otherwise it would be in memory twice, and those that wait for the end of the first entry would wait for ever.
func TestARecordOfALeaseThatIsBeingGrantedIsReadLater(t *testing.T) {
	h := openAlone(t, Options{})
	e := &entry{id: 7, index: notScheduled, record: record{ttl: time.Hour}}
	if _, err := h.commitGrant(t.Context(), e); err != nil {
		t.Fatal(err)
	}
	if err := h.enterUnread(t.Context(), h.sessions.reader, 7); !errors.Is(err, errGranting) || h.leases[7] != nil {
		t.Errorf("%v; it is entered: %v", err, h.leases[7] != nil)
	}
	h.add(e)
	if err := h.enterUnread(t.Context(), h.sessions.reader, 7); err != nil || h.leases[7] != e {
		t.Errorf("%v; it is another one: %v", err, h.leases[7] != e)
	}
}

// noticed is a context that tells when its end is first waited for.
type noticed struct {
	context.Context
	once    *sync.Once
	waiting chan struct{}
}

func (c noticed) Done() <-chan struct{} {
	c.once.Do(func() { close(c.waiting) })
	return c.Context.Done()
}

// TestARevocationBesideAGrantEnds, and with it the lease: its record could not be read, and it is granted anew.
func TestARevocationBesideAGrantEnds(t *testing.T) {
	h := openAlone(t, Options{})
	h.unread.ranges = []unreadRange{{from: 7, to: 8}}
	e := &entry{id: 7, index: notScheduled, record: record{ttl: time.Hour}}
	if _, err := h.commitGrant(t.Context(), e); err != nil {
		t.Fatal(err)
	}
	ctx := noticed{Context: timeout(10 * time.Second), once: new(sync.Once), waiting: make(chan struct{})}
	revoked := make(chan error, 1)
	go func() { revoked <- h.Revoke(ctx, 7) }()
	<-ctx.waiting
	h.revokeDue(t.Context())
	h.add(e)
	h.checkRevoked(revoked)
}

// TestAGrantBesideARevocationEndsWithIt: the record could be read again, and was not there.
func TestAGrantBesideARevocationEndsWithIt(t *testing.T) {
	h := openAlone(t, Options{})
	h.unread.ranges = []unreadRange{{from: 7, to: 8}}
	ctx := noticed{Context: timeout(10 * time.Second), once: new(sync.Once), waiting: make(chan struct{})}
	revoked := make(chan error, 1)
	go func() { revoked <- h.Revoke(ctx, 7) }()
	<-ctx.waiting
	h.mustGrant(7, time.Hour)
	h.checkRevoked(revoked)
}

// checkRevoked checks that a revocation of lease 7 ends, and that nothing is left.
func (h *harness) checkRevoked(revoked chan error) {
	h.t.Helper()
	for {
		h.revokeDue(context.Background())
		select {
		case err := <-revoked:
			if err != nil {
				h.t.Error(err)
			}
			h.checkNothingLeft()
			h.checkRecords()
			return
		case <-time.After(time.Millisecond):
		}
	}
}
