package mvcc

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// expiryBatch is the entries of one commit of the expirer, in the order of the queue, and what became of them.
type expiryBatch struct {
	buf      []byte // the internal keys of the entries, one after the other
	ends     []int
	owners   [][]byte // the keys that the entries belong to
	deadline []uint64 // of the newest version of each owner; zero if there is none
	read     []bool   // whether that version could be read
	finder   storage.Finder
	write    Write

	expired, stale, skipped int
	held, took              time.Duration // how long the latches were held, and the commit took
	err                     error
	damage                  error // why the first of the skipped entries was skipped
}

const deadlineBytes = 8

func (b *expiryBatch) reset() {
	b.buf, b.ends, b.owners = b.buf[:0], b.ends[:0], b.owners[:0]
	b.expired, b.stale, b.skipped, b.err, b.damage = 0, 0, 0, nil, nil
}

// add appends an entry with its key in SpaceSystem.
func (b *expiryBatch) add(user []byte) {
	b.buf = keys.Append(b.buf, keys.SpaceSystem, user)
	b.ends = append(b.ends, len(b.buf))
}

// entry is the internal key of an entry.
func (b *expiryBatch) entry(i int) []byte {
	from := 0
	if i > 0 {
		from = b.ends[i-1]
	}
	return b.buf[from:b.ends[i]:b.ends[i]]
}

// first is the earliest deadline.
func (b *expiryBatch) first() uint64 { return entryDeadline(b.entry(0)) }

func entryDeadline(internal []byte) uint64 { return binary.BigEndian.Uint64(internal[2:]) }

// commit deletes the entries, and the keys whose newest version has the deadline of its entry. Readers that have seen that a
// key is gone wait for the durability that the store gives to writes; the expirer does not.
func (b *expiryBatch) commit(ctx context.Context, x *Session) {
	w, start := &b.write, time.Now()
	w.Reset()
	w.SetOwn()
	w.Origin = batch.OriginExpiry
	for i := range b.ends {
		owner, _ := keys.Owner(b.entry(i)) // the rest of an entry that names no key is empty
		b.owners = append(b.owners, owner)
		w.Latch(owner)
	}
	var latched time.Time
	w.Under(func(*Latched) error {
		latched = time.Now()
		return b.decide(ctx, x)
	})
	if _, b.err = x.Commit(ctx, w); b.err == nil {
		b.held, b.took = w.derived.released.Sub(latched), w.derived.released.Sub(start)
	}
	x.Trim()
}

// decide fills the batch of the commit, whose latches are held.
func (b *expiryBatch) decide(ctx context.Context, x *Session) error {
	if err := b.readDeadlines(ctx, x); err != nil {
		return err
	}
	for i := range b.ends {
		switch {
		case !b.read[i]:
			b.skipped++
			continue
		case b.deadline[i] == entryDeadline(b.entry(i)):
			b.write.Batch.Delete(keys.SpaceOf(b.owners[i]), keys.User(b.owners[i]))
			b.expired++
		default:
			b.stale++
		}
		b.write.Batch.DeleteRecord(keys.SpaceSystem, keys.User(b.entry(i)))
	}
	return nil
}

// readDeadlines reads the deadlines of the newest versions. If a damaged page hides some of them, the others are read one by
// one.
func (b *expiryBatch) readDeadlines(ctx context.Context, x *Session) error {
	n := len(b.ends)
	b.deadline, b.read = append(b.deadline[:0], make([]uint64, n)...), append(b.read[:0], make([]bool, n)...)
	note := func(i int, v storage.Version, ok bool) error {
		b.deadline[i], b.read[i] = 0, true
		if !ok || !v.Kind.HasValue() {
			return nil
		}
		f, err := v.Metadata()
		b.deadline[i] = f.ExpiresAt
		return err
	}
	x.slot.Enter()
	err := x.reader.GetAll(&b.finder, b.owners, keys.MaxEpoch, storage.Visits{Each: note})
	x.slot.Leave()
	if err == nil {
		return nil
	}
	for i, owner := range b.owners {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		x.slot.Enter()
		v, ok, err := x.reader.Newest(owner)
		if err != nil && !errors.Is(err, storage.ErrDamaged) {
			x.slot.Leave()
			return err
		}
		if err == nil {
			err = note(i, v, ok)
		}
		b.read[i], b.damage = err == nil, cmp.Or(b.damage, err)
		x.slot.Leave()
	}
	return nil
}
