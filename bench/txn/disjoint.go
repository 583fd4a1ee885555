package txn

import (
	"context"
	"encoding/binary"
	"errors"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/internal/ablation"
	"github.com/epochkv/epochkv/internal/mvcc"
)

const (
	disjointWrites = 10
	disjointKeys   = 1000 // of each goroutine
)

// owner is a goroutine with keys of its own.
type owner struct {
	session *mvcc.Session
	number  int
	commits int
}

// runDisjoint has r.Point goroutines write to keys of their own. Keys of several goroutines share latch stripes, which must
// not show as aborts.
func runDisjoint(r *harness.Run) (err error) {
	store, err := open(r.Dir, ablation.Baseline{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	owners := make([]*owner, r.Point)
	for i := range owners {
		session, err := store.Session()
		if err != nil {
			return err
		}
		defer session.Close()
		owners[i] = &owner{session: session, number: i, commits: max(r.Size/r.Point, disjointKeys/disjointWrites)}
	}
	total := owners[0].commits * len(owners)
	if err := r.Time(total, func() error { return together(owners, (*owner).work) }); err != nil {
		return err
	}
	s := store.Stats()
	if err := errors.Join(r.Prove("aborts", float64(s.Conflicts), 0, 0), r.Prove("commits", float64(s.Commits), float64(total), float64(total))); err != nil {
		return err
	}
	right := 0
	for _, o := range owners {
		n, err := o.check()
		if err != nil {
			return err
		}
		right += n
	}
	return r.Verified(right, disjointKeys*len(owners))
}

// key of number i of the owner: neighbours of the other goroutines' keys.
func (o *owner) key(dst []byte, i int) []byte {
	return append(binary.BigEndian.AppendUint64(dst, uint64(i)), byte(o.number))
}

func (o *owner) work() error {
	var name, value []byte
	for n := range o.commits {
		t, err := o.session.Begin(mvcc.TxnOptions{Durability: mvcc.DurabilityAsync})
		if err != nil {
			return err
		}
		value = binary.LittleEndian.AppendUint64(value[:0], uint64(n))
		for i := range disjointWrites {
			name = o.key(name[:0], (n*disjointWrites+i)%disjointKeys)
			if err := t.Set(name, value); err != nil {
				return err
			}
		}
		if _, err := t.Commit(context.Background()); err != nil {
			return err
		}
	}
	return nil
}

// check counts the keys that hold what the last transaction on them wrote.
func (o *owner) check() (right int, err error) {
	const commitsPerLap = disjointKeys / disjointWrites
	for i := range disjointKeys {
		v, err := o.session.Get(nil, o.key(nil, i), 0)
		if err != nil {
			return right, err
		}
		place := i / disjointWrites
		last := place + (o.commits-1-place)/commitsPerLap*commitsPerLap
		if v.Found && binary.LittleEndian.Uint64(v.Data) == uint64(last) {
			right++
		}
	}
	return right, nil
}
