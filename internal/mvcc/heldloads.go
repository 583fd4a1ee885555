package mvcc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage"
)

// A bulk load has no record in the log. So that the log archive can have it nevertheless, a hold keeps its versions until the archive has
// read them, also over a restart. The owner of the hold says which bulk load that is. From before the commit pause until there is the hold,
// the session of the bulk load keeps all versions.

// heldLoads is the store's part of bulk loads that are held for the log archive.
type heldLoads struct {
	on        atomic.Bool   // further ones are held
	finishing atomic.Uint64 // epoch of the one that is published and has no hold yet; zero if there is none
	keeping   bool          // the session of the bulk load keeps all versions; owned by the one that commits

	once    sync.Once // guards session
	session *Session  // of the archiver
}

// ArchiveOwner begins the owners of the log archive's holds. What clients take must not begin with it.
const ArchiveOwner = "log archive: "

const (
	// heldLoadTTL is how long a hold outlives the archiver.
	heldLoadTTL = 24 * time.Hour
	// heldLoadRenewal is how old a hold is when it is renewed.
	heldLoadRenewal = heldLoadTTL / 4
	// heldLoadWithin bounds the commits that change holds.
	heldLoadWithin = 10 * time.Second

	heldLoadOwner = ArchiveOwner + "bulk load after epoch %d, %s"
	heldLoadTime  = "2006-01-02T15:04:05.000000Z"
)

// HoldBulkLoads says whether the store keeps the versions of further bulk loads for the log archive.
func (s *Store) HoldBulkLoads(on bool) { s.bulk.held.on.Store(on) }

// ownerOf is the owner of the hold of a bulk load.
func ownerOf(l keys.HeldLoad) string {
	return fmt.Sprintf(heldLoadOwner, l.After, time.UnixMicro(int64(l.Time)).UTC().Format(heldLoadTime))
}

// heldLoad is the bulk load that a hold keeps; false for any other hold.
func (h *Hold) heldLoad() (l keys.HeldLoad, ok bool) {
	l.Epoch = h.Epoch
	var at string
	if _, err := fmt.Sscanf(h.Owner, heldLoadOwner, &l.After, &at); err != nil {
		return l, false
	}
	t, err := time.Parse(heldLoadTime, at)
	l.Time = uint64(t.UnixMicro())
	return l, err == nil && ownerOf(l) == h.Owner
}

// beginHoldingLoad keeps all versions until end is called, so that the versions of the bulk load that is about to be published can be held.
func (s *Store) beginHoldingLoad() (end func()) {
	if !s.bulk.held.on.Load() {
		return func() {}
	}
	x := s.bulk.session
	if _, err := x.keepVersions(0); err != nil {
		return func() {}
	}
	s.bulk.held.keeping = true
	return func() {
		s.bulk.held.keeping = false
		s.bulk.held.finishing.Store(0)
		x.endKeeping()
	}
}

// published notes that a bulk load is about to become visible. One whose versions were not kept when its commit pause began is not
// held: the archive may have begun since.
func (h *heldLoads) published(e keys.Epoch) {
	if h.keeping && h.on.Load() {
		h.finishing.Store(uint64(e))
	}
}

// holdLoad takes the hold of a published bulk load. Without it, the archive begins anew after the bulk load.
func (s *Store) holdLoad(ctx context.Context, load *storage.BulkLoad) {
	if s.bulk.held.finishing.Load() == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), heldLoadWithin)
	defer cancel()
	owner := ownerOf(keys.HeldLoad{After: load.After(), Epoch: load.Epoch(), Time: load.CommitTime()})
	_, _ = s.bulk.session.TakeHold(ctx, owner, load.Epoch(), heldLoadTTL)
}

// sessionOfArchiver is for the archiver's goroutine alone.
func (s *Store) sessionOfArchiver() *Session {
	h := &s.bulk.held
	h.once.Do(func() { h.session = s.OwnSession() })
	return h.session
}

// HeldLoad is the bulk load with the epochs after one and up to another, if its versions are kept for the archive. If it is not known yet
// whether they will be, it is pending.
func (c *Changes) HeldLoad(after, through keys.Epoch) (load keys.HeldLoad, held, pending bool) {
	s := c.store
	pending = s.bulk.held.finishing.Load() != 0 // before the holds are listed
	for _, h := range s.Holds() {
		if load, held = h.heldLoad(); held && load.After == after && load.Epoch == through {
			load.Term = s.engine.TermOf(through)
			return load, true, false
		}
	}
	return keys.HeldLoad{}, false, pending
}

// ReadLoad passes the keys that a bulk load has written and their values, from a key on and in order. Its versions must be kept. Neither
// slice may be used after each has returned. An error of each ends it. It is for the archiver's goroutine, like the methods below.
func (c *Changes) ReadLoad(ctx context.Context, at keys.Epoch, from []byte, each func(key, value []byte) error) error {
	x := c.store.sessionOfArchiver()
	if _, err := x.OpenSnapshot(at); err != nil {
		return err
	}
	defer x.CloseSnapshot()
	walk, err := x.Difference(DifferenceOptions{Lower: from, Since: at - 1, SetsOnly: true, Context: ctx})
	if err != nil {
		return err
	}
	defer walk.Close()
	for walk.Next() {
		if v := walk.Version(); v.Epoch != at || v.Metadata != (metadata.Fields{}) {
			return fmt.Errorf("mvcc: key %q has a version of epoch %d where only the bulk load of epoch %d should have written", bytes.Clone(walk.Key()), v.Epoch, at)
		}
		if err := each(walk.Key(), walk.Value()); err != nil {
			return err
		}
	}
	return walk.Err()
}

// ReleaseLoads ends the holds of the bulk loads up to an epoch.
func (c *Changes) ReleaseLoads(ctx context.Context, through keys.Epoch) error {
	return c.eachHeldLoad(ctx, func(ctx context.Context, x *Session, h *Hold) error {
		if h.Epoch > through {
			return nil
		}
		_, err := x.EndHold(ctx, h.ID)
		return err
	})
}

// RenewLoads moves the deadlines of the holds of bulk loads, if that is worth a commit.
func (c *Changes) RenewLoads(ctx context.Context) error {
	worth := c.store.clock.Now()/1000 + uint64((heldLoadTTL - heldLoadRenewal).Milliseconds())
	return c.eachHeldLoad(ctx, func(ctx context.Context, x *Session, h *Hold) error {
		if h.Deadline >= worth {
			return nil
		}
		if _, err := x.RenewHold(ctx, h.ID, heldLoadTTL); !errors.Is(err, ErrNoHold) { // one that has ended prevents no other renewal
			return err
		}
		return nil
	})
}

func (c *Changes) eachHeldLoad(ctx context.Context, do func(context.Context, *Session, *Hold) error) error {
	ctx, cancel := context.WithTimeout(ctx, heldLoadWithin)
	defer cancel()
	for _, h := range c.store.Holds() {
		if _, is := h.heldLoad(); !is {
			continue
		}
		if err := do(ctx, c.store.sessionOfArchiver(), &h); err != nil {
			return err
		}
	}
	return nil
}
