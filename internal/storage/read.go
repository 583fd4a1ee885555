package storage

import (
	"bytes"
	"math"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/blob"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/memtable"
	"github.com/epochkv/epochkv/internal/storage/page"
)

func fromMemtable(r memtable.Ref) Version {
	return Version{Epoch: r.Epoch(), Kind: r.Kind(), Sync: r.Sync(), value: r.Value()}
}

// Get returns the newest version of key at or before a snapshot; a deletion is a version too. The caller is inside its slot's
// protection and holds the snapshot.
func (r *Reader) Get(key []byte, at keys.Epoch) (Version, bool, error) {
	p := r.engine.Pin()
	if v := p.Find(key, at); v.Found() {
		return fromMemtable(v), true, nil
	}
	return r.FindInTree(p, key, at)
}

// FindInTree is Get for what p.Find does not find. It may read pages.
func (r *Reader) FindInTree(p Pinned, key []byte, at keys.Epoch) (Version, bool, error) {
	if p.view.repairTree != nil {
		if v, ok, err := r.repairTreeGet(p, key, at); ok || err != nil {
			return v, ok, err
		}
	}
	found, ok, err := btree.Get(r.source(p.view), p.view.root, key, at)
	if err != nil {
		return Version{}, false, r.engine.damage(err, p.view.root, key)
	}
	return fromTree(&found), ok, nil
}

// repairTreeGet is FindInTree for keys in skipped ranges.
func (r *Reader) repairTreeGet(p Pinned, key []byte, at keys.Epoch) (Version, bool, error) {
	found, ok, err := p.view.repairTree.Get(r.pages, key, at)
	if err != nil {
		root, _ := p.view.repairTree.Roots()
		return Version{}, false, r.engine.damage(err, root, key)
	}
	v := fromTree(&found)
	if v.large {
		v.twice = &twice{p.view.repairTree, bytes.Clone(key)}
	}
	return v, ok, nil
}

// Pinned is the state that one read, or the first look of a validation, sees. It is valid inside the slot's protection under which it was taken.
type Pinned struct{ view *view }

// Pin takes the current state.
func (e *Engine) Pin() Pinned { return Pinned{e.view.Load()} }

// ActiveSince is the first epoch whose versions are in the active memtable.
func (p Pinned) ActiveSince() keys.Epoch { return p.view.active.first }

// FindActive is Get for the active memtable alone.
func (p Pinned) FindActive(key []byte, at keys.Epoch) memtable.Ref {
	if p.view.active.mem.Empty() {
		return memtable.Ref{}
	}
	return p.view.active.mem.Find(key, at)
}

// Find is Get for the memtables and the quarantine alone.
func (p Pinned) Find(key []byte, at keys.Epoch) memtable.Ref {
	if r := p.FindActive(key, at); r.Found() {
		return r
	}
	for _, g := range p.view.immutables {
		if r := g.mem.Find(key, at); r.Found() {
			return r
		}
	}
	if q := p.view.quarantine; q != nil {
		return q.mem.Find(key, at)
	}
	return memtable.Ref{}
}

func fromTree(v *btree.Version) Version {
	return Version{Epoch: v.Epoch, Kind: v.Kind, large: v.Large, value: v.Value}
}

// Newest returns the newest version of key whatever its epoch. It is stable while the caller holds the key's latch.
func (r *Reader) Newest(key []byte) (Version, bool, error) { return r.Get(key, keys.MaxEpoch) }

// NewestSince is the epoch of key's newest version if it is newer than since, and else zero. Inner nodes say how new each of their children
// is, so that a leaf is read only if something in it is newer.
func (r *Reader) NewestSince(key []byte, since keys.Epoch) (keys.Epoch, error) {
	p := r.engine.Pin()
	if v := p.Find(key, keys.MaxEpoch); v.Found() {
		return ifNewer(v.Epoch(), since), nil
	}
	if p.view.repairTree != nil {
		if v, ok, err := r.repairTreeGet(p, key, keys.MaxEpoch); ok || err != nil {
			return ifNewer(v.Epoch, since), err
		}
	}
	epoch, err := btree.NewestEpoch(r.source(p.view), p.view.root, key, since)
	if err != nil {
		return 0, r.engine.damage(err, p.view.root, key)
	}
	return epoch, nil
}

func ifNewer(epoch, since keys.Epoch) keys.Epoch {
	if epoch > since {
		return epoch
	}
	return 0
}

// AppendValue appends v's value to dst. It may read pages.
func (r *Reader) AppendValue(dst []byte, v Version) ([]byte, error) {
	return r.appendValue(dst, v, r.pages)
}

// AppendScanned is AppendValue for one of the values of a range: its pages leave those of point reads in the cache.
func (r *Reader) AppendScanned(dst []byte, v Version) ([]byte, error) {
	return r.appendValue(dst, v, r.pages.Scanner())
}

func (r *Reader) appendValue(dst []byte, v Version, pages blob.PageSource) ([]byte, error) {
	if !v.large {
		return append(dst, v.Inline()...), nil
	}
	if !r.pages.Waits() && r.engine.blobs.PastCache(page.RefOf(v.value)) {
		return dst, ErrWouldWait
	}
	ref := page.RefOf(v.value)
	dst, err := r.engine.blobs.Append(dst, ref, pages)
	if err != nil && v.twice != nil && IsDamage(err) {
		if other, ok := v.twice.tree.OtherBlob(r.pages, v.twice.key, v.Epoch, ref); ok {
			dst, err = r.engine.blobs.Append(dst, other, pages)
		}
	}
	if err != nil {
		return dst, r.engine.damage(err, btree.Root{}, nil)
	}
	return dst, nil
}

// Value is v's value: where it lies, or, if it has to be read from pages of its own, in buf, which grows.
func (r *Reader) Value(buf *[]byte, v Version) ([]byte, error) {
	if !v.large {
		return v.Inline(), nil
	}
	var err error
	*buf, err = r.AppendValue((*buf)[:0], v)
	return *buf, err
}

// ChangedSince reports whether some key in [lower, upper) got a version at an epoch in (after, before), and returns an epoch up to which that
// happened. It looks at memtables and tree. The tree does not tell the epoch: it is the newest that the tree may hold, which is visible, and
// may not be before the given one.
func (r *Reader) ChangedSince(p Pinned, lower, upper []byte, after, before keys.Epoch) (keys.Epoch, bool, error) {
	if epoch, changed := changedInMemory(p, lower, upper, after, before); changed {
		return epoch, true, nil
	}
	changed, err := p.view.repairTree.ChangedSince(r.pages, lower, upper, after)
	if err == nil && !changed {
		changed, err = btree.ChangedSince(r.source(p.view), p.view.root, lower, upper, after)
	}
	if err != nil {
		return 0, false, r.engine.damage(err, p.view.root, lower)
	}
	state := r.engine.pager.State()
	return newestEpoch(&state), changed, nil
}

// changedInMemory is ChangedSince for epochs in (after, before), over the pinned memtables and those that followed them.
func changedInMemory(p Pinned, lower, upper []byte, after, before keys.Epoch) (epoch keys.Epoch, changed bool) {
	found := func(_ []byte, e keys.Epoch) bool {
		epoch, changed = e, true
		return false
	}
	if p.changedAfter(lower, upper, after, before, found); !changed && p.view.quarantine != nil {
		var it memtable.Iter
		changedIn(&it, p.view.quarantine.mem, lower, upper, after, before, found)
	}
	return epoch, changed
}

// VisitChanged calls visit with each key that got a version at an epoch in (after, before), and with such an epoch, until it returns false. It reads
// no page: it reports false, and visits nothing, if the tree may have such versions.
func (p Pinned) VisitChanged(after, before keys.Epoch, visit func(key []byte, epoch keys.Epoch) bool) bool {
	if p.view.inTree > after {
		return false
	}
	p.changedAfter(nil, []byte{math.MaxUint8}, after, before, visit)
	return true
}

// changedAfter looks at the memtables that may have versions after an epoch.
func (p Pinned) changedAfter(lower, upper []byte, after, before keys.Epoch, visit func(key []byte, epoch keys.Epoch) bool) {
	var it memtable.Iter
	for g := p.view.active; g != nil; g = g.next.Load() {
		if !changedIn(&it, g.mem, lower, upper, after, before, visit) {
			return
		}
	}
	for _, g := range p.view.immutables {
		if g.end.Load() <= uint64(after)+1 || !changedIn(&it, g.mem, lower, upper, after, before, visit) {
			return // from here on every epoch is older
		}
	}
}

// changedIn visits the keys in [lower, upper) that have a version with an epoch in (after, before), until visit returns false. Both ends of a chain
// that matter are safe to read: what is newer than a live snapshot is never pruned.
func changedIn(it *memtable.Iter, t *memtable.Table, lower, upper []byte, after, before keys.Epoch, visit func(key []byte, epoch keys.Epoch) bool) (more bool) {
	it.Init(t)
	for ok := it.SeekGE(lower); ok && bytes.Compare(it.Key(), upper) < 0; ok = it.NextKey() {
		if r := it.VersionAt(before - 1); r.Found() && r.Epoch() > after && !visit(it.Key(), r.Epoch()) {
			return false
		}
	}
	return true
}
