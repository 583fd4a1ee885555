package storage

import (
	"bytes"
	"errors"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/memtable"
)

// keepAhead makes a generation after those of the log, with what the tree or the quarantine has of their keys at epochs
// after the log. It is needed when the log cannot be merged before the first read: reads take what a memtable has for
// newer. A later merge replaces each of these versions by itself. Versions on damaged pages stay where they are.
func (r *replayer) keepAhead() error {
	e := r.engine
	slot := e.checkpoints.slot
	slot.Enter()
	defer slot.Leave()
	ahead := aheadOfLog{reader: e.NewReader(), replayer: r, state: Pinned{&view{root: r.root, repairTree: e.checkpoints.skippedPages}}}
	oldestLast := make([]*generation, 0, len(r.filled))
	for i := len(r.filled) - 1; i >= 0; i-- {
		oldestLast = append(oldestLast, r.filled[i])
	}
	in, entry, last := newMemInput(oldestLast), btree.Entry{}, []byte(nil)
	for in.Next(&entry) {
		if bytes.Equal(entry.Key, last) {
			continue
		}
		last = entry.Key
		if err := ahead.keep(entry.Key); err != nil {
			if ahead.mem != nil {
				err = errors.Join(err, ahead.mem.Free())
			}
			return err
		}
	}
	if ahead.mem != nil { // the last generation reaches over epochs of which the log has no records: they become another one
		last, next := r.filled[len(r.filled)-1], &generation{mem: ahead.mem, first: r.newest + 1, term: r.term}
		next.commitTime.Store(uint64(time.Now().UnixMicro())) // theirs are not known
		next.end.Store(max(last.end.Load(), uint64(ahead.newest+1)))
		last.end.Store(uint64(next.first))
		r.filled = append(r.filled, next)
	}
	return nil
}

// aheadOfLog copies versions into a memtable.
type aheadOfLog struct {
	replayer *replayer
	reader   *Reader
	state    Pinned
	mem      *memtable.Table // nil before the first version
	inserter memtable.Inserter
	newest   keys.Epoch // in mem
	stored   []byte     // what is stored of a version: its metadata and its value
}

// keep copies the newest version of a key if it is newer than the log.
func (a *aheadOfLog) keep(key []byte) error {
	v, ok, err := a.find(key)
	if IsDamage(err) || errors.Is(err, ErrDamaged) || err == nil && (!ok || v.Epoch <= a.replayer.newest) {
		return nil
	}
	if err == nil {
		a.stored = append(a.stored[:0], v.Section()...)
		a.stored, err = a.reader.AppendValue(a.stored, v)
	}
	if errors.Is(err, ErrDamaged) {
		return nil
	}
	if err == nil && a.mem == nil {
		a.mem, err = a.replayer.engine.newTable()
	}
	if err != nil {
		return err
	}
	a.newest = max(a.newest, v.Epoch)
	return insertStored(a.mem, &a.inserter, key, keys.MakeTrailer(v.Epoch, v.Kind), a.stored, true)
}

// find returns the newest version of a key in the quarantine or in the tree.
func (a *aheadOfLog) find(key []byte) (Version, bool, error) {
	if q := a.replayer.engine.checkpoints.quarantine.now; q != nil {
		if found := q.mem.Find(key, keys.MaxEpoch); found.Found() {
			return fromMemtable(found), true, nil
		}
	}
	return a.reader.FindInTree(a.state, key, keys.MaxEpoch)
}
