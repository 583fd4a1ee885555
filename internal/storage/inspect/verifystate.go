package inspect

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/blob"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// verifier is one verification.
type verifier struct {
	ctx          context.Context // of the whole verification
	options      VerifyOptions
	report       VerifyReport
	limiter      readLimiter
	lastReported time.Time // when progress was last reported
	total        uint64    // pages

	state *storage.DurableState
	keys  keyCounter

	systemKeys uint64 // live keys that are not the clients'
}

func newVerifier(ctx context.Context, o VerifyOptions) *verifier {
	return &verifier{ctx: ctx, options: o, limiter: readLimiter{began: time.Now(), pagesPerSecond: o.PagesPerSecond}}
}

// run checks a state.
func (v *verifier) run(state *storage.DurableState) (*VerifyReport, error) {
	v.state = state
	pages := state.Pages
	s := pages.State()
	v.report.Epoch, v.report.Checkpoint, v.report.Height = s.Epoch, pages.Checkpoint(), int(s.Height)
	v.total = uint64(pages.PageCount())
	err := pages.ReadMap()
	if err == nil {
		v.total = uint64(pages.LivePages())
		err = v.accounts(pages.Audit(v.reachable))
	} else if err = v.damageOr(err, DamageAllocationMap); err == nil {
		err = v.accounts(v.reachable(v.reachOnce()))
	}
	if err != nil {
		return nil, err
	}
	for _, fault := range pages.SuperblockFaults() {
		v.damage(Damage{Kind: DamageSuperblock, File: fault.File, Offset: fault.Offset, Page: fault.Page, Reason: fault.Reason})
	}
	v.finish()
	return &v.report, nil
}

func (v *verifier) finish() {
	v.report.Duration = time.Since(v.limiter.began)
	v.reportProgress()
}

// accounts compares the counters, if everything could be counted. err is the result of the audit of
// pages and blobs.
func (v *verifier) accounts(err error) error {
	if v.ctx.Err() != nil {
		return v.ctx.Err()
	}
	if !v.report.OK() {
		return nil // pages and blobs that could not be reached are missing in the accounts
	}
	v.report.Accounted = true
	if errors.Is(err, blob.ErrUnreferenced) {
		d := v.damageOf(err, DamageAccounts)
		d.OnlySpace = true
		v.damage(d)
	} else if err != nil {
		return v.damageOr(err, DamageAccounts)
	}
	s := v.state.Pages.State()
	if v.report.Keys != s.Entries || v.keys.bytes != s.EntryBytes {
		v.damage(Damage{Kind: DamageAccounts, File: v.state.Pages.Name(), Reason: fmt.Sprintf(
			"the tree has %d keys and %d bytes, the superblock says %d and %d", v.report.Keys, v.keys.bytes, s.Entries, s.EntryBytes)})
	}
	if n, known := v.state.SystemKeys(); known && n != v.systemKeys {
		v.damage(Damage{Kind: DamageAccounts, File: v.state.Pages.Name(), Reason: fmt.Sprintf(
			"the tree has %d records of the store, the superblock says %d", v.systemKeys, n)})
	}
	return nil
}

// reachable calls each for every page that tree and blobs reach, and checks the pages.
func (v *verifier) reachable(each func(page.ID) error) error {
	reach := func(id page.ID) error {
		v.report.Pages++
		if err := v.pause(); err != nil {
			return err
		}
		return each(id)
	}
	store, err := blob.Open(&v.state.Pages.Reader)
	if err != nil {
		if err := v.damageOr(err, DamageBlobs); err != nil {
			return err
		}
		return v.walk(reach, func(page.Ref) error { return nil })
	}
	if err := v.noteSkipped(store); err != nil {
		return err
	}
	return store.Audit(func(value func(page.Ref) error) error { return v.walk(reach, value) }, reach)
}

// skippedNotesMax bounds the notes about skipped pages.
const skippedNotesMax = 20

// noteSkipped notes which pages checkpoints skip. Those that still cannot be read are also reported
// as damage.
func (v *verifier) noteSkipped(store *blob.Store) error {
	tree, err := v.state.RepairTree(store)
	if err != nil {
		return v.damageOr(err, DamagePage)
	}
	skipped := tree.Pages()
	for i := range skipped[:min(len(skipped), skippedNotesMax)] {
		p := &skipped[i]
		v.note("page %d could not be read at checkpoint %d (%s): checkpoints skip it, and later writes to its keys are in the repair tree%s", p.ID, p.Checkpoint, p.Reason, v.rebuildNote(p.Level))
	}
	if more := len(skipped) - skippedNotesMax; more > 0 {
		v.note("and %d more such pages", more)
	}
	return nil
}

// rebuildNote says what becomes of a skipped inner node.
func (v *verifier) rebuildNote(level int) string {
	switch {
	case level == 0:
		return ""
	case v.state.MapIsExact():
		return "; it is an inner node, which the server rebuilds from the pages below it if they prove to be complete"
	default:
		return "; it is an inner node, which cannot be rebuilt because the allocation map is not exact"
	}
}

// reachOnce replaces an allocation map that cannot be read.
func (v *verifier) reachOnce() func(page.ID) error {
	var reached bitset.Set
	return func(id page.ID) error {
		if id >= v.state.Pages.PageCount() || !reached.Add(int(id)) {
			return fmt.Errorf("page %d is reached twice, or is after the last page", id)
		}
		return nil
	}
}

// walk checks the tree, the repair tree, its mirror, and every blob that they refer to.
func (v *verifier) walk(reach func(page.ID) error, value func(page.Ref) error) error {
	if err := v.walkTree(v.state.Tree(), reach, value); err != nil {
		return err
	}
	root, mirror, err := v.state.RepairTreeRoots()
	if err != nil {
		return v.damageOr(err, DamageSuperblock)
	}
	v.keys.interrupt()
	if err := v.walkTree(root, reach, value); err != nil {
		return err
	}
	v.keys.interrupt()
	counted, bytes, systemKeys := v.report, v.keys.bytes, v.systemKeys
	err = v.walkTree(mirror, reach, value)
	v.systemKeys = systemKeys
	v.report.Keys, v.report.Versions, v.report.Values, v.report.ValueBytes = counted.Keys, counted.Versions, counted.Values, counted.ValueBytes
	v.keys.bytes = bytes
	return err
}

func (v *verifier) walkTree(root btree.Root, reach func(page.ID) error, value func(page.Ref) error) error {
	return btree.Walk(v.state.Source(), root, &btree.Visitor{
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

// leaf counts the entries of a leaf and checks its blobs.
func (v *verifier) leaf(p page.Leaf, value func(page.Ref) error) error {
	view := p.Layout()
	for i := range view.Count() {
		_, t, inline, large := view.At(i)
		if v.keys.add(&view, i) && t.Kind() != keys.KindDelete {
			v.report.Keys++
			if keys.SpaceOf(v.keys.key) != keys.SpaceUser {
				v.systemKeys++
			}
		}
		v.report.Versions++
		if !large {
			continue
		}
		v.report.Values++
		v.report.ValueBytes += uint64(blob.Length(page.RefOf(inline)))
		if err := value(page.RefOf(inline)); err != nil {
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

// damageOr reports err if it is damage, and otherwise returns it.
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

func (v *verifier) damage(d Damage) {
	if v.report.DamageTotal++; len(v.report.Damages) < damagesMax {
		v.report.Damages = append(v.report.Damages, d)
	}
}

func (v *verifier) note(format string, args ...any) {
	v.report.Notes = append(v.report.Notes, fmt.Sprintf(format, args...))
}

// progressEvery is the time between two progress reports.
const progressEvery = 200 * time.Millisecond

// pause keeps to the configured rate, and reports progress.
func (v *verifier) pause() error {
	if v.report.Pages%64 == 0 && time.Since(v.lastReported) >= progressEvery {
		v.reportProgress()
	}
	return v.limiter.wait(v.ctx, v.state.Pages.PagesRead())
}

func (v *verifier) reportProgress() {
	v.lastReported = time.Now()
	if v.options.Progress != nil {
		v.options.Progress(VerifyProgress{Pages: v.report.Pages, PagesTotal: max(v.total, v.report.Pages), Damages: v.report.DamageTotal})
	}
}
