package growth

import (
	"encoding/binary"
	"errors"

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
	if err := o.time(r, versioned{newest: session.Get, oldest: states[0].Get, put: session.Put}); err != nil {
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
