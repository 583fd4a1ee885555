package growth

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/epochkv/epochkv/bench/engines"
	"github.com/epochkv/epochkv/bench/harness"
)

// runPebble is run with Pebble.
func (o snapshotted) runPebble(r *harness.Run) (err error) {
	e, err := engines.Pebble(engines.Options{Dir: r.Dir, CacheBytes: 64 << 20, BufferBytes: 256 << 20})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.Close()) }()
	session, err := e.Session()
	if err != nil {
		return err
	}
	states := make([]engines.Snapshot, r.Point)
	for i := range states {
		for k := range snapshotKeys {
			if err := session.Put(key(nil, k), binary.LittleEndian.AppendUint64(nil, uint64(i))); err != nil {
				return err
			}
		}
		states[i] = e.(engines.Snapshots).Snapshot()
		defer func() { err = errors.Join(err, states[i].Close()) }()
	}
	if err := r.Time(r.Size, func() error { return o.workPebble(session, states, r) }); err != nil {
		return err
	}
	right := 0
	for i, state := range states {
		v, found, err := state.Get(nil, key(nil, i%snapshotKeys))
		if err != nil {
			return err
		}
		if found && binary.LittleEndian.Uint64(v) == uint64(i) {
			right++
		}
	}
	return r.Verified(right, len(states))
}

func (o snapshotted) workPebble(session engines.Session, states []engines.Snapshot, r *harness.Run) (err error) {
	choice := rand.New(rand.NewPCG(r.Seed, 1))
	var name, buffer []byte
	for n := range r.Size {
		name = key(name[:0], choice.IntN(snapshotKeys))
		found, want := false, uint64(0)
		switch o.do {
		case getNewest:
			want = uint64(len(states) - 1)
			buffer, found, err = session.Get(buffer[:0], name)
		case getOldest:
			buffer, found, err = states[0].Get(buffer[:0], name)
		case putNewest:
			want, found = uint64(len(states)+n), true
			buffer = binary.LittleEndian.AppendUint64(buffer[:0], want)
			err = session.Put(name, buffer)
		}
		if err != nil {
			return err
		}
		if !found || binary.LittleEndian.Uint64(buffer) != want {
			return fmt.Errorf("key %x reads %x, want number %d", name, buffer, want)
		}
	}
	return nil
}
