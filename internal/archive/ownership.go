package archive

import (
	"context"
	"errors"
	"sync"
	"time"
)

// A process that is stopped for a while, or does not reach the target, may lose the archive while it creates a file. Another process goes on
// after the files that it finds, so a file that arrives later would be a second history: the next start of the other process would refuse the
// archive, and a restore would need the name of a history. So a file is created only while its process is surely the owner. A target may
// still do what it was asked for before that.

// errNotSure means that it is not known whether this process still is the owner.
var errNotSure = errors.New("archive: an upload was given up, because it is not known whether this process still is the one that archives the store")

// surely notes that owner n had not been asked at a time.
func (o *owners) surely(n uint64, at time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.number == n && at.After(o.sureAt) {
		o.sureAt = at
	}
}

// held returns why this process is not the owner any more, if it has noticed that: answer looks every few seconds.
func (o *owners) held() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.lost != nil:
		return o.lost
	case o.number == 0:
		return errNotOwner
	}
	return nil
}

// confirmSurely returns nil if this process is the owner, and no other process can be for a while. A question that it has answered is
// followed by another look.
func (o *owners) confirmSurely(ctx context.Context) error {
	for range 2 {
		if err := o.confirm(ctx); err != nil {
			return err
		}
		if o.sure() == nil {
			return nil
		}
	}
	return errNotSure
}

// sure returns nil if no other process can be the owner.
func (o *owners) sure() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	// The wall clock counts, too: the other one stops with a machine that sleeps.
	since := max(time.Since(o.sureAt), time.Now().Round(0).Sub(o.sureAt.Round(0)))
	switch {
	case o.lost != nil:
		return o.lost
	case o.number == 0:
		return errNotOwner
	case since >= time.Duration(sureShare*float64(o.within)):
		return errNotSure
	}
	return nil
}

// whileSure is a context that ends when this process may not be the owner any more. stop returns why, or nil.
func (o *owners) whileSure(ctx context.Context) (_ context.Context, stop func() error) {
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() {
		for ctx.Err() == nil {
			if o.sure() != nil {
				cancel()
				return
			}
			sleep(ctx, o.within/(4*answerLooks))
		}
	})
	return ctx, func() error {
		cancel()
		watching.Wait()
		return o.sure()
	}
}

// late adds a file to the reason why this process is not the owner any more, if that is one: it was being created then.
func (o *owners) late(name string, err error) error {
	inUse := new(InUseError)
	if !errors.As(err, &inUse) {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	with := *inUse // the one before may be read
	with.Late = name
	o.refused, o.lost = &with, &with
	return &with
}
