package storage

import (
	"errors"
	"fmt"

	"epochkv/internal/storage/batch"
	"epochkv/internal/storage/keys"
	"epochkv/internal/storage/memtable"
	"epochkv/internal/wal"
)

// recover replays the log behind what the tree holds into memtables, and opens a new segment behind it.
//
// Replay installs in log order, which is epoch order, so that two writers of one key end as they did before the crash.
func (e *Engine) recover() (Recovery, error) {
	r := replayer{engine: e}
	found, err := wal.Replay(e.fs, e.options.Dir, 0, r.apply)
	if err != nil {
		return Recovery{}, errors.Join(translate(err), r.free())
	}
	recovery := Recovery{Records: found.Records, Bytes: found.Bytes, Epoch: found.Last}
	if torn := found.Torn; torn != nil {
		recovery.TornFile, recovery.TornAt, recovery.TornSize = torn.File, torn.Offset, torn.Bytes
	}
	e.log, err = wal.Open(wal.Options{
		FS: e.fs, Dir: e.options.Dir, SegmentBytes: int(e.options.SegmentBytes),
	}, found)
	if err != nil {
		return recovery, errors.Join(err, r.free())
	}
	r.seal(found.Last + 1)
	active, err := e.newGenerationLocked(found.Last+1, 0)
	if err != nil {
		return recovery, errors.Join(err, e.log.Close(), r.free())
	}
	v := &view{active: active}
	for i := len(r.filled) - 1; i >= 0; i-- {
		v.frozen = append(v.frozen, r.filled[i])
	}
	e.view.Store(v)
	return recovery, nil
}

// translate turns the log's errors into the engine's.
func translate(err error) error {
	if damage, ok := errors.AsType[*wal.CorruptionError](err); ok {
		return &CorruptionError{File: damage.File, Offset: damage.Offset, Reason: damage.Reason, Remedy: damage.Remedy}
	}
	if errors.Is(err, wal.ErrVersion) {
		return fmt.Errorf("%w: %w", ErrNewerFormat, err)
	}
	return err
}

// replayer fills generations with what the log holds.
type replayer struct {
	engine   *Engine
	inserter memtable.Inserter
	filled   []*generation // oldest first; the last one is being filled
}

func (r *replayer) apply(epoch keys.Epoch, body []byte) error {
	if len(body) == 0 {
		return nil // an abandoned epoch
	}
	if err := batch.Validate(body); err != nil {
		return fmt.Errorf("replay of epoch %d: %w", epoch, err)
	}
	mem, err := r.table(epoch)
	if err != nil {
		return err
	}
	if err := mem.Secure(&r.inserter, memtable.MaxSize(body)); err != nil {
		return err
	}
	return mem.Apply(&r.inserter, body, epoch, true)
}

// table is the memtable to fill, a new one when the last is full.
func (r *replayer) table(epoch keys.Epoch) (*memtable.Table, error) {
	if n := len(r.filled); n > 0 && int64(r.filled[n-1].mem.Bytes()) < r.engine.memtableBytes {
		return r.filled[n-1].mem, nil
	}
	mem, err := r.engine.newTable()
	if err != nil {
		return nil, err
	}
	r.seal(epoch)
	r.filled = append(r.filled, &generation{mem: mem, first: epoch})
	return mem, nil
}

// seal ends the last generation before epoch.
func (r *replayer) seal(epoch keys.Epoch) {
	if n := len(r.filled); n > 0 && !r.filled[n-1].sealed() {
		r.filled[n-1].end.Store(uint64(epoch))
	}
}

func (r *replayer) free() (err error) {
	for _, g := range r.filled {
		err = errors.Join(err, g.mem.Free())
	}
	return err
}
