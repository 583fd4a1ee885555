package blob

import (
	"errors"
	"slices"

	"github.com/epochkv/epochkv/internal/storage/page"
)

const (
	unfreedMax      = 1 << 16 // values that are remembered
	unfreedAtOnce   = 32      // values that are read together
	unfreedTries    = 4096    // values that one batch tries
	unfreedPauseMax = 64      // checkpoints without a try
)

// unfreed is the values that batches have dropped and could not free, because a page with a fragment of theirs could not be read. No leaf refers to them,
// and they are in the table still, so their ids stay in use. A device may fail for a moment only, so batches try again: at their end,
// and later ones after ever more checkpoints; not those of bulk loads and of steps (see KeepSparse). A page that can be read decides at once, as in any drop: if it has something else, the value is given up.
// The process forgets them when it ends. Then an audit reports them, and a rebuild of the table frees them.
type unfreed struct {
	refs  []page.Ref // the last ones are tried first
	next  uint64     // the checkpoint that tries again
	pause uint64     // between the last try and that one
}

// keepUnfreed remembers a value that could not be freed.
func (b *Batch) keepUnfreed(r page.Ref) {
	if u := &b.unfreed; len(u.refs) < unfreedMax {
		u.refs, u.next = append(u.refs, r), 0
	}
}

// freeUnfreed tries to free values that could not be freed before. It ends early when some cannot be freed now: each try may take the device seconds.
func (b *Batch) freeUnfreed() error {
	u := b.unfreed
	if len(u.refs) == 0 || b.ck.Number() < u.next {
		return nil
	}
	left := u.refs
	b.unfreed = unfreed{} // collects those that fail again
	for tried := 0; len(left) > 0 && len(b.unfreed.refs) == 0 && tried < unfreedTries; tried += unfreedAtOnce {
		now := left[max(0, len(left)-unfreedAtOnce):]
		left = left[:len(left)-len(now)]
		b.ReadAhead(now)
		for _, r := range now {
			if err := b.Drop(r); err != nil && !errors.Is(err, ErrBadRef) {
				return err
			}
		}
	}
	failed := b.unfreed.refs
	switch {
	case len(failed) == 0:
		u.pause = 0
	case len(failed)+len(left) < len(u.refs): // others were freed
		u.pause = 1
	default:
		u.pause = min(max(2*u.pause, 1), unfreedPauseMax)
	}
	b.unfreed = unfreed{slices.Concat(failed, left), b.ck.Number() + u.pause, u.pause}
	return nil
}
