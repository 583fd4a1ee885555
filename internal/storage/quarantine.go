package storage

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/memtable"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/quarantine"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Versions that the tree refuses go into quarantine (ADR 0028, package quarantine), and the
// checkpoint continues without them.
//
//	view:   active ─► immutable, newest first ─► quarantine ─► repair tree ─► tree
//
// Reads find them in a memtable that the view names after the immutable ones. A merge that brings
// new versions of a quarantined key adds them there, and drops what no snapshot sees, as it would
// in the tree. When no snapshot sees anything that was in quarantine before, the key leaves it, and
// the new versions are offered to the tree.

// quarantined is the quarantine of one durable state. It is immutable; nil stands for an empty one.
type quarantined struct {
	mem      *memtable.Table
	versions []quarantine.Version // by key, newest first; keys and values are in mem
	count    int                  // of versions
	bytes    int                  // of keys and values
	first    string               // the first key, and why the tree refused it
}

// quarantineState is the engine's part of it. All of it is used under the checkpoints' mutex, or
// before the engine is open.
type quarantineState struct {
	now     *quarantined
	files   *quarantine.Files // constant after Open
	used    int               // the number of the file that holds now; zero for none
	newer   bool              // that file has versions that are newer than the state, too
	refused map[string]string // internal keys that the running merge keeps out of the tree, with the reasons
}

// newQuarantined returns nil for no versions. It copies them.
func newQuarantined(versions []quarantine.Version) (*quarantined, error) {
	if len(versions) == 0 {
		return nil, nil
	}
	mem, err := memtable.New(memtable.Config{Bytes: quarantineTableBytes, Prefix: []byte{byte(keys.SpaceUser)}})
	if err != nil {
		return nil, err
	}
	q := &quarantined{mem: mem, first: fmt.Sprintf("%.40q: %s", keys.User(versions[0].Key), versions[0].Reason)}
	if err := q.fill(versions); err != nil {
		return nil, errors.Join(err, mem.Free())
	}
	return q, nil
}

// ErrQuarantineFull means that the tree has refused more than the quarantine takes.
var ErrQuarantineFull = quarantine.ErrFull

// quarantineTableBytes is the size for which the memtable is laid out. It grows if it has to.
const quarantineTableBytes = 256 << 10

// insertStored puts what is stored of one version into a memtable that no other goroutine uses.
func insertStored(t *memtable.Table, in *memtable.Inserter, key []byte, trailer keys.Trailer, stored []byte, sync bool) error {
	var b batch.Builder
	b.SetStored(trailer.Kind(), keys.SpaceOf(key), keys.User(key), stored)
	body, err := b.Finish()
	if err != nil {
		return err
	}
	if err := t.Secure(in, memtable.MaxSize(body)); err != nil {
		return err
	}
	return t.Apply(in, body, trailer.Epoch(), sync)
}

func (q *quarantined) fill(versions []quarantine.Version) error {
	var in memtable.Inserter
	for i := range versions {
		v := &versions[i]
		if err := insertStored(q.mem, &in, v.Key, v.Trailer, v.Value, false); err != nil {
			return fmt.Errorf("quarantine: %w", err)
		}
	}
	var it memtable.Iter
	it.Init(q.mem)
	for ok, i := it.First(), 0; ok; ok, i = it.Next(), i+1 {
		q.versions = append(q.versions, quarantine.Version{Key: it.Key(), Trailer: it.Trailer(), Value: it.Value(), Reason: versions[i].Reason})
		q.bytes += len(it.Key()) + len(it.Value())
	}
	q.count = len(q.versions)
	return nil
}

// all is the versions in q, which may be nil.
func (q *quarantined) all() []quarantine.Version {
	if q == nil {
		return nil
	}
	return q.versions
}

// of returns the versions of a key in q.
func (q *quarantined) of(key []byte) []quarantine.Version {
	all := q.all()
	from, _ := slices.BinarySearchFunc(all, key, func(v quarantine.Version, k []byte) int { return bytes.Compare(v.Key, k) })
	to := from
	for to < len(all) && bytes.Equal(all[to].Key, key) {
		to++
	}
	return all[from:to]
}

// setAside notes the keys that the tree has refused, and reports whether another attempt of the
// merge can succeed.
func (e *Engine) setAside(err error) (changed bool) {
	found, ok := errors.AsType[*btree.RefusedError](err)
	if !ok {
		return false
	}
	if e.checkpoints.quarantine.refused == nil {
		e.checkpoints.quarantine.refused = map[string]string{}
	}
	for i := range found.Entries {
		r := &found.Entries[i]
		if _, known := e.checkpoints.quarantine.refused[string(r.Key)]; !known {
			reason := r.Err.Error()
			e.checkpoints.quarantine.refused[string(r.Key)], changed = reason[:min(len(reason), quarantine.ReasonMax)], true
		}
	}
	return changed
}

// quarantinePlan is what a merge does about the quarantine.
type quarantinePlan struct {
	next     []quarantine.Version
	changed  bool // next differs from what is in quarantine
	excluded map[string]struct{}
}

// planQuarantine divides the versions of a merge between tree and quarantine, and keeps those of
// the quarantine out of the tree's input. A step of a merge (see steps.go) decides about the keys
// of its span alone: the tree takes a key that leaves the quarantine in no other step.
func (e *Engine) planQuarantine(in *btree.MergeInput, job *mergeJob) (plan quarantinePlan, err error) {
	q := &e.checkpoints.quarantine
	if q.now == nil && len(q.refused) == 0 {
		return plan, nil
	}
	plan.excluded = map[string]struct{}{}
	input := newMemInput(job.immutables)
	for _, key := range q.keys() {
		if key := []byte(key); job.span.has(key) {
			plan.add(e, in, input, key)
		} else {
			plan.next = append(plan.next, q.now.of(key)...)
		}
	}
	all := in.Input
	in.Input = func() btree.Input { return &excluding{all(), plan.excluded} }
	in.Lookahead = in.Input
	return plan, quarantine.Check(plan.next)
}

// keys are the quarantined keys and those that were refused, in order.
func (q *quarantineState) keys() []string {
	all := maps.Clone(q.refused)
	if all == nil {
		all = map[string]string{}
	}
	for i := range q.now.all() {
		all[string(q.now.versions[i].Key)] = ""
	}
	return slices.Sorted(maps.Keys(all))
}

// add decides about one key.
func (p *quarantinePlan) add(e *Engine, in *btree.MergeInput, input btree.Input, key []byte) {
	before := e.checkpoints.quarantine.now.of(key)
	if in.Policy.Expired.Has(key) { // neither the tree nor the quarantine needs it
		p.excluded[string(key)] = struct{}{}
		p.changed = p.changed || len(before) > 0
		return
	}
	reason, refused := e.checkpoints.quarantine.refused[string(key)]
	if !refused {
		reason = before[0].Reason
	}
	news := inputVersions(input, key, reason)
	all := union(before, news)
	kept, older := visible(&in.Policy, key, all, news)
	if older == 0 && !refused && len(key) <= page.KeySizeMax(in.PageSize) {
		p.changed = true // all that is left is new: the tree may take it
		return
	}
	p.excluded[string(key)] = struct{}{}
	if len(kept) == 1 && kept[0].Trailer.Kind() == keys.KindDelete && kept[0].Trailer.Epoch() <= in.Policy.MinVisible && !e.treeMayHave(in, key) {
		kept = nil
	}
	p.next = append(p.next, kept...)
	p.changed = p.changed || len(kept) != len(before) || len(all) != len(before)
}

// union is the versions of old and news, newest first. After a step of a merge (see steps.go) the same input comes
// again, and the quarantine may have newer versions than this input.
func union(old, news []quarantine.Version) []quarantine.Version {
	all := slices.Clone(news)
	for i := range old {
		if !has(news, old[i].Trailer) {
			all = append(all, old[i])
		}
	}
	slices.SortFunc(all, func(a, b quarantine.Version) int { return cmp.Compare(b.Trailer, a.Trailer) })
	return all
}

// has reports whether one of the versions of a key has this trailer.
func has(versions []quarantine.Version, t keys.Trailer) bool {
	return slices.ContainsFunc(versions, func(v quarantine.Version) bool { return v.Trailer == t })
}

// inputVersions is what an input has of a key.
func inputVersions(input btree.Input, key []byte, reason string) (versions []quarantine.Version) {
	var e btree.Entry
	for input.SeekGE(key); input.Next(&e) && bytes.Equal(e.Key, key); {
		versions = append(versions, quarantine.Version{Key: key, Trailer: e.Trailer, Value: e.Value, Reason: reason})
	}
	return versions
}

// visible is the versions that a snapshot can see, and how many of those are not new.
func visible(policy *btree.Policy, key []byte, all, news []quarantine.Version) (kept []quarantine.Version, older int) {
	epochs := make([]keys.Epoch, len(all))
	for i := range all {
		epochs[i] = all[i].Trailer.Epoch()
	}
	for i, keep := range policy.Retained(key, epochs) {
		if !keep {
			continue
		}
		kept = append(kept, all[i])
		if !has(news, all[i].Trailer) {
			older++
		}
	}
	return kept, older
}

// treeMayHave reports whether the tree may have versions of a key, which a deletion in quarantine
// hides.
func (e *Engine) treeMayHave(in *btree.MergeInput, key []byte) bool {
	if len(key) > page.KeySizeMax(in.PageSize) {
		return false
	}
	if e.checkpoints.skippedPages.Covers(key, keys.MakeTrailer(keys.MaxEpoch, 0xff)) {
		return true
	}
	_, found, err := btree.Get(in.Source(), in.Base, key, keys.MaxEpoch)
	return found || err != nil
}

// disturbed is in as merges into the tree see it.
func (o *Options) disturbed(in btree.Input) btree.Input {
	if o.disturb == nil {
		return in
	}
	return o.disturb(in)
}

// excluding is an input without some keys.
type excluding struct {
	btree.Input
	keys map[string]struct{}
}

// Next implements btree.Input.
func (x *excluding) Next(e *btree.Entry) bool {
	for x.Input.Next(e) {
		if _, out := x.keys[string(e.Key)]; !out {
			return true
		}
	}
	return false
}

// keepQuarantine makes the quarantine that a merge leaves durable, and returns the number of its
// file. It comes before the superblock.
func (e *Engine) keepQuarantine(plan *quarantinePlan) (next *quarantined, file int, err error) {
	q := &e.checkpoints.quarantine
	if !plan.changed && !q.newer {
		return q.now, q.used, nil
	}
	next = q.now
	if plan.changed {
		if next, err = newQuarantined(plan.next); err != nil {
			return nil, 0, err
		}
	}
	if next == nil {
		return nil, 0, nil
	}
	if file, err = q.files.Write(next.versions); err != nil {
		e.dropQuarantine(next)
		return nil, 0, fmt.Errorf("quarantine: %w", err)
	}
	return next, file, nil
}

// dropQuarantine frees a quarantine that was not published.
func (e *Engine) dropQuarantine(next *quarantined) {
	if next != e.checkpoints.quarantine.now {
		e.freeQuarantine(next)
	}
}

// freeQuarantine frees a quarantine that no reader reaches; nil is none.
func (e *Engine) freeQuarantine(q *quarantined) {
	if q != nil {
		e.freed(q.mem.Free())
	}
}

// completeQuarantine runs after the superblock is durable: next is the quarantine of the durable
// state, in the numbered file. Files that no superblock needs are removed; if that fails the next
// checkpoint tries again, and an open ignores the files.
func (e *Engine) completeQuarantine(next *quarantined, file int) {
	q := &e.checkpoints.quarantine
	q.now, q.used, q.newer, q.refused = next, file, false, nil
	q.files.Use(file, next.all())
	_ = q.files.Clean(e.reserve.enabled)
}

// replacedIn is the quarantine that readers of an older view may still use, or nil if it is the one
// that is used now.
func (e *Engine) replacedIn(v *view) *quarantined {
	if v.quarantine == e.checkpoints.quarantine.now {
		return nil
	}
	return v.quarantine
}

// openQuarantine reads the quarantine of the state that was opened.
func (e *Engine) openQuarantine() error {
	q, state, paths := &e.checkpoints.quarantine, e.pager.State(), quarantinePaths(e.options.Dir)
	versions, newer, fault, err := Files{e.fs, e.options.Dir}.readQuarantine(&state)
	if err != nil {
		return err
	}
	q.used, q.newer = quarantineFile(&state), newer
	q.files = quarantine.NewFiles(e.fs, e.options.Dir, paths, q.used, versions)
	if fault != nil {
		e.repairs.made = append(e.repairs.made, fmt.Sprintf("a copy of the quarantine was written anew from the other one: %v", fault))
		damaged := q.used
		e.repairs.unwritten = append(e.repairs.unwritten, func() error {
			if q.used != damaged { // by a merge of the replay
				return nil
			}
			if err := quarantine.Restore(e.fs, paths[damaged-1]); !errors.Is(err, vfs.ErrNoSpace) {
				return err
			}
			return nil
		})
	}
	q.now, err = newQuarantined(versions)
	return err
}

const quarantineRemedy = "restore a backup, or extract what is readable with kvctl salvage"
