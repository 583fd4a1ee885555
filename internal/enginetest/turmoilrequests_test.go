package enginetest

import (
	"encoding/binary"
	"errors"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// madeRequest is an acknowledged request.
type madeRequest struct {
	id    mvcc.RequestID
	epoch keys.Epoch
}

// identify gives some writes an id.
func (u *uproar) identify(w *mvcc.Write) *mvcc.RequestID {
	if u.rng.IntN(3) > 0 {
		return nil
	}
	var id mvcc.RequestID
	binary.BigEndian.PutUint64(id[:], uint64(time.Now().UnixMilli())<<16|7<<12|u.rng.Uint64N(1<<12))
	binary.BigEndian.PutUint64(id[8:], 0b10<<62|u.rng.Uint64N(1<<62))
	w.Identify(&mvcc.Request{ID: id, Hash: 1})
	return &id
}

// repeat sends an acknowledged request again. It is known, or it is older than the cut-off.
func (u *uproar) repeat() {
	u.t.Helper()
	if len(u.requests) == 0 || u.mem.Crashed() || u.s.Err() != nil {
		return
	}
	n := len(u.requests)
	made := u.requests[n-1-u.rng.IntN(1+u.rng.IntN(n))]
	w := mvcc.Write{Durability: mvcc.DurabilitySync}
	w.Set([]byte(u.keyOf(0)), []byte("applied twice"))
	w.Identify(&mvcc.Request{ID: made.id, Hash: 1})
	_, err := commitAndWait(u.x, &w)
	applied, known := errors.AsType[*mvcc.AppliedError](err)
	_, expired := errors.AsType[*mvcc.RequestExpiredError](err)
	switch {
	case known && applied.Outcome.Epoch == made.epoch:
		u.total["repeated"]++
	case expired && made.id.Time() <= u.s.RequestCutoff():
		u.total["expired"]++
	case err == nil, known, expired:
		u.t.Fatalf("request %x of epoch %d is sent again: %v", made.id, made.epoch, err)
	case u.mem.Crashed(), u.s.Err() != nil, u.rule != nil && u.rule.Fired() > 0, u.faults && asDamage(err):
	case errors.Is(err, vfs.ErrNoSpace), errors.Is(err, storage.ErrMemoryFull), errors.Is(err, storage.ErrNoSegment), errors.Is(err, storage.ErrReserveUnchecked):
	default:
		u.t.Fatalf("repeat: %v", err)
	}
}
