package storage

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/blob"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

// verifier is one verification under way.
type verifier struct {
	ctx     context.Context // of the whole verification
	options VerifyOptions
	report  VerifyReport
	pace    pace
	told    time.Time // when progress was last reported
	total   uint64    // pages

	state *pager.Pager
	keys  keyCounter
}

func newVerifier(ctx context.Context, o VerifyOptions) *verifier {
	return &verifier{ctx: ctx, options: o, pace: pace{began: time.Now(), pagesPerSecond: o.PagesPerSecond}}
}

// run checks a state.
func (v *verifier) run(state *pager.Pager) (*VerifyReport, error) {
	v.state = state
	s := state.State()
	v.report.Epoch, v.report.Checkpoint, v.report.Height = s.Epoch, state.Checkpoint(), int(s.Height)
	v.total = state.Stats().PageCount
	err := state.ReadMap()
	if err == nil {
		v.total = state.Stats().Live
		err = v.accounts(state.Audit(v.reachable))
	} else if err = v.damageOr(err, DamageMap); err == nil {
		err = v.reachable(v.reachOnce())
	}
	if err != nil {
		return nil, err
	}
	for _, fault := range state.SuperblockFaults() {
		v.damage(Damage{Kind: DamageSuperblock, File: fault.File, Offset: fault.Offset, Page: fault.Page, Reason: fault.Reason})
	}
	v.finish()
	return &v.report, nil
}

func (v *verifier) finish() {
	v.report.Duration = time.Since(v.pace.began)
	v.tell()
}

// accounts compares the counters, if everything could be counted. err is what the audit of pages and rows said.
func (v *verifier) accounts(err error) error {
	if v.ctx.Err() != nil {
		return v.ctx.Err()
	}
	if !v.report.OK() {
		return nil // pages and rows that could not be reached are missing in the accounts, of course
	}
	v.report.Accounted = true
	if err != nil {
		return v.damageOr(err, DamageAccounts)
	}
	s := v.state.State()
	if v.report.Keys != s.Entries || v.keys.bytes != s.EntryBytes {
		v.damage(Damage{Kind: DamageAccounts, File: v.state.Name(), Reason: fmt.Sprintf(
			"the tree holds %d keys and %d bytes, the superblock says %d and %d", v.report.Keys, v.keys.bytes, s.Entries, s.EntryBytes)})
	}
	return nil
}

// reachable calls each for every page that tree and rows reach, and checks them on the way.
func (v *verifier) reachable(each func(page.ID) error) error {
	reach := func(id page.ID) error {
		v.report.Pages++
		if err := v.pause(); err != nil {
			return err
		}
		return each(id)
	}
	store, err := blob.Open(v.state)
	if err != nil {
		if err := v.damageOr(err, DamageRows); err != nil {
			return err
		}
		return v.walk(reach, func(page.Ref) error { return nil })
	}
	if err := v.noteLost(store); err != nil {
		return err
	}
	return store.Audit(func(value func(page.Ref) error) error { return v.walk(reach, value) }, reach)
}

// lostNotesMax bounds the notes about pages that checkpoints go round.
const lostNotesMax = 20

// noteLost says which pages checkpoints go round. Those that cannot be read are found as damage, too.
func (v *verifier) noteLost(store *blob.Store) error {
	s, err := readRepairTree(v.state, store)
	if err != nil || s == nil {
		return v.damageOr(err, DamagePage)
	}
	for i := range s.pages[:min(len(s.pages), lostNotesMax)] {
		p := &s.pages[i]
		v.note("page %d could not be read at checkpoint %d (%s): what was written to its keys since lies in the side tree", p.id, p.checkpoint, p.reason)
	}
	if more := len(s.pages) - lostNotesMax; more > 0 {
		v.note("and %d more such pages", more)
	}
	return nil
}

// reachOnce stands in for an allocation map that cannot be read.
func (v *verifier) reachOnce() func(page.ID) error {
	var reached bitset.Set
	return func(id page.ID) error {
		if uint64(id) >= v.state.Stats().PageCount || !reached.Add(int(id)) {
			return fmt.Errorf("page %d is reached twice, or lies behind the last page", id)
		}
		return nil
	}
}

// walk checks the tree, the side tree, and every value that they refer to.
func (v *verifier) walk(reach func(page.ID) error, value func(page.Ref) error) error {
	if err := v.walkTree(rootOf(v.state.State()), reach, value); err != nil {
		return err
	}
	root, mirror, err := repairTreeRoots(v.state)
	if err != nil {
		return v.damageOr(err, DamageSuperblock)
	}
	v.keys.interrupt()
	if err := v.walkTree(root, reach, value); err != nil {
		return err
	}
	v.keys.interrupt()
	counted, bytes := v.report, v.keys.bytes
	err = v.walkTree(mirror, reach, value)
	v.report.Keys, v.report.Versions, v.report.Values, v.report.ValueBytes = counted.Keys, counted.Versions, counted.Values, counted.ValueBytes
	v.keys.bytes = bytes
	return err
}

func (v *verifier) walkTree(root btree.Root, reach func(page.ID) error, value func(page.Ref) error) error {
	return btree.Walk(newDirect(v.state), root, &btree.Visitor{
		Page: func(id page.ID, level int, p []byte) error {
			if err := reach(id); err != nil {
				return err
			}
			if level > 0 {
				v.report.InnerPages++
				return nil
			}
			v.report.LeafPages++
			return v.leaf(p, value)
		},
		Damaged: func(id page.ID, _ int, lo, hi *page.Separator, err error) error {
			if stop := unlessDamage(v.ctx, err); stop != nil {
				return stop
			}
			v.damage(damageOfPage(v.state, id, lo, hi, err))
			v.keys.interrupt()
			return nil
		},
	})
}

// leaf counts the entries of a leaf and checks its large values.
func (v *verifier) leaf(p page.Leaf, value func(page.Ref) error) error {
	view := p.Layout()
	for i := range view.Count() {
		_, t, inline, large := view.At(i)
		if v.keys.add(&view, i) && t.Kind() != keys.KindDelete {
			v.report.Keys++
		}
		v.report.Versions++
		if !large {
			continue
		}
		v.report.Values++
		v.report.ValueBytes += uint64(blob.Length(page.Ref(inline)))
		if err := value(page.Ref(inline)); err != nil {
			if stop := unlessDamage(v.ctx, err); stop != nil {
				return stop
			}
			d := v.damageOf(err, DamageValue)
			d.KeyLower = bytes.Clone(keys.User(v.keys.key))
			d.KeyUpper = append(bytes.Clone(d.KeyLower), 0)
			v.damage(d)
		}
	}
	return nil
}

// keyCounter follows keys across leaves, so that a key whose versions fill several counts once.
type keyCounter struct {
	key   []byte // internal key of the last entry
	known bool
	bytes uint64 // keys and inline values of all versions
}

// add takes entry i of a leaf and reports whether it is its key's newest version.
func (k *keyCounter) add(v *page.LeafLayout, i int) bool {
	suffix, _, value, _ := v.At(i)
	newest := false
	if i == 0 || len(suffix) > 0 {
		n := len(v.Prefix())
		same := k.known && len(k.key) == n+len(suffix) && string(k.key[:n]) == string(v.Prefix()) && string(k.key[n:]) == string(suffix)
		k.key = append(append(k.key[:0], v.Prefix()...), suffix...)
		k.known, newest = true, !same
	}
	k.bytes += uint64(len(k.key) + len(value))
	return newest
}

// interrupt says that entries were left out.
func (k *keyCounter) interrupt() { k.known = false }

// skip says that newer versions of key were left out.
func (k *keyCounter) skip(key []byte) { k.key, k.known = append(k.key[:0], key...), true }

// isDamage tells what is wrong in the file from what kept it from being read.
func isDamage(err error) bool {
	for _, kind := range []error{pager.ErrCorrupt, pager.ErrBroken, pager.ErrTruncated, btree.ErrStructure, blob.ErrBadRef, blob.ErrAccounts} {
		if errors.Is(err, kind) {
			return true
		}
	}
	return false
}

// damageOr notes err if it is damage, and else returns it.
func (v *verifier) damageOr(err error, kind DamageKind) error {
	if err == nil {
		return nil
	}
	if stop := unlessDamage(v.ctx, err); stop != nil {
		return stop
	}
	v.damage(v.damageOf(err, kind))
	return nil
}

func (v *verifier) damageOf(err error, kind DamageKind) Damage { return damageOf(v.state, err, kind) }

func damageOf(state *pager.Pager, err error, kind DamageKind) Damage {
	d := Damage{Kind: kind, File: state.Name(), Reason: err.Error()}
	if found, ok := errors.AsType[*pager.CorruptError](err); ok {
		d.Page, d.Offset, d.Reason = found.Page, found.Offset, found.Reason
	}
	return d
}

// damageOfPage is what a walk has met at page id, which may hold keys from lo up to hi.
func damageOfPage(state *pager.Pager, id page.ID, lo, hi *page.Separator, err error) Damage {
	d := damageOf(state, err, DamagePage)
	if d.Page == 0 {
		d.Page, d.Offset = id, int64(id)*int64(state.PageSize())
	}
	d.KeyLower, d.KeyUpper = boundKey(lo), boundAbove(hi)
	return d
}

func (v *verifier) damage(d Damage) {
	if v.report.DamageTotal++; len(v.report.Damages) < damagesMax {
		v.report.Damages = append(v.report.Damages, d)
	}
}

func (v *verifier) note(format string, args ...any) {
	v.report.Notes = append(v.report.Notes, fmt.Sprintf(format, args...))
}

// progressEvery is how often progress is told.
const progressEvery = 200 * time.Millisecond

// pause keeps to the rate that was asked for, and tells progress.
func (v *verifier) pause() error {
	if v.report.Pages%64 == 0 && time.Since(v.told) >= progressEvery {
		v.tell()
	}
	return v.pace.wait(v.ctx, v.state.Stats().PagesRead)
}

func (v *verifier) tell() {
	v.told = time.Now()
	if v.options.Progress != nil {
		v.options.Progress(VerifyProgress{Pages: v.report.Pages, PagesTotal: max(v.total, v.report.Pages), Damages: v.report.DamageTotal})
	}
}

// boundKey is the client key at which a range ends, nil for none.
func boundKey(s *page.Separator) []byte {
	if s == nil {
		return nil
	}
	return userBound(s.Key)
}

// boundAbove is boundKey for an upper bound. Versions of one key may fill several pages: a page that ends between two of them holds some of the key.
func boundAbove(s *page.Separator) []byte {
	bound := boundKey(s)
	if bound != nil && s.Trailer != page.NoTrailer {
		bound = append(bound, 0)
	}
	return bound
}

// direct is a source of verified tree pages that reads past every cache.
type direct struct {
	pager *pager.Pager
	buf   []byte
}

func newDirect(p *pager.Pager) *direct {
	return &direct{pager: p, buf: vfs.AlignedBuffer(p.PageSize())}
}

// Page implements btree.Source; the bytes live until the next call.
func (d *direct) Page(id page.ID, _ int) ([]byte, error) {
	if err := readPage(d.pager, id, d.buf); err != nil {
		return nil, err
	}
	return d.buf, nil
}
