package mvcc

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
)

// batchRead is what ReadAll keeps from call to call.
type batchRead struct {
	buf          []byte // the internal keys, one after the other
	keys         [][]byte
	finder       storage.Finder
	value        []byte
	guardEntries int // times that the last ReadAll entered its guard
}

// forget drops the keys of the last call, which refer to memory of its caller, and buffers that are too large to be kept: a commit would have them
// until its end.
func (b *batchRead) forget() {
	if b.memoryBytes() > pooledBytesMax {
		*b = batchRead{guardEntries: b.guardEntries}
		return
	}
	clear(b.keys)
	b.finder.Forget()
}

// memoryBytes is about how much memory it takes.
func (b *batchRead) memoryBytes() int { return cap(b.buf) + keyReadBytes*cap(b.keys) + cap(b.value) }

// ErrNotCopied is what the function of AdmitLarge returns for a value that ReadAll is to leave out: visit gets it without its data.
var ErrNotCopied = errors.New("mvcc: the value is not copied")

// ReadAll reads many keys in the session's snapshot, and calls visit once for each, in no certain
// order. Pages that are not in memory are read together. The value's data is valid until visit
// returns. After every few keys the guard is left and entered again, and ctx is checked, so that a
// long list does not keep memory from reclamation. For keys that a damaged page hides, the error
// names the range.
func (x *Session) ReadAll(ctx context.Context, list [][]byte, visit func(i int, v Value) error) error {
	b := &x.buffers.batch
	if invariants.Enabled {
		x.assertReads(list)
	}
	if err := x.arrange(b, list); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	b.guardEntries = 1
	x.slot.Enter()
	defer x.slot.Leave()
	each := func(i int, v storage.Version, ok bool) error {
		out := Value{At: x.at}
		x.section = x.section[:0]
		if ok {
			out.Await = x.store.mustAwait(v.Sync, v.Epoch)
			if v.Kind.HasValue() {
				out.Found, out.Epoch = true, v.Epoch
				x.keepSection(v.Section())
				err := x.admitted(v.Size())
				if err == nil {
					if out.Data, err = x.reader.Value(&b.value, v); err != nil {
						return ofKey(err, b.keys[i])
					}
				} else if !errors.Is(err, ErrNotCopied) {
					return err
				}
			}
		}
		return visit(i, out)
	}
	pause := x.pauseIn(ctx)
	return x.reader.GetAll(&b.finder, b.keys, x.at, storage.Visits{Each: each, Pause: func() error {
		b.guardEntries++
		return pause()
	}})
}

// arrange builds the internal keys.
func (x *Session) arrange(b *batchRead, list [][]byte) error {
	size := 0
	for i, key := range list {
		if err := x.store.checkKey(key); err != nil && !x.hasBeyondLimit(key) {
			return fmt.Errorf("keys[%d]: %w", i, err)
		}
		size += len(key) + 1
	}
	b.buf = slices.Grow(b.buf[:0], size)
	b.keys = b.keys[:0]
	for _, key := range list {
		from := len(b.buf)
		b.buf = keys.Append(b.buf, keys.SpaceUser, key)
		b.keys = append(b.keys, b.buf[from:])
	}
	return nil
}
