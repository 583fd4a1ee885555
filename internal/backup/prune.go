package backup

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
)

// PruneOptions say what Prune keeps. A backup stays if one of the rules keeps it, or if a backup that stays needs it as its base.
// The newest backup that has no damage, and all of its bases, stays in any case.
type PruneOptions struct {
	KeepFull int           // the newest full backups, and the incremental ones that were made from them
	KeepFor  time.Duration // since a backup was made
	DryRun   bool
	// Log is told the epoch of the oldest backup without damage that stays: what the log archive has of before is not needed any more. It
	// is called while no restore runs, after the manifests are gone. It may be nil.
	Log func(ctx context.Context, oldest keys.Epoch) error

	grace      time.Duration // before parts of a removed backup are deleted; 1 h
	unfinished time.Duration // before parts that no backup has named are deleted; 24 h
	lease      leaseTimes
}

// PruneReport says what Prune has removed, or would remove.
type PruneReport struct {
	Backups   []string // ids
	Kept      []string
	Parts     uint64
	PartBytes int64
	Waiting   uint64     // parts that a later prune may delete
	Oldest    keys.Epoch // of the backups that stay and have no damage
	Postponed string     // why no part was deleted: what runs now; empty if parts were deleted
}

const (
	graceDefault      = time.Hour
	unfinishedDefault = 24 * time.Hour
)

// Prune removes old backups of a lineage: their manifests first, and their parts an hour later, with the next prune after it. It
// removes nothing while a restore runs, and while a backup does, no part and not its base.
func Prune(ctx context.Context, store objectstore.Store, dir string, o PruneOptions) (r *PruneReport, err error) {
	o.grace, o.unfinished = cmp.Or(o.grace, graceDefault), cmp.Or(o.unfinished, unfinishedDefault)
	l, err := takeLease(ctx, store, dir, jobPrune, newID(time.Now().UTC()), o.lease)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer func() {
		cancel(nil)
		l.release()
	}()
	l.keep(ctx, cancel)
	p := &pruner{store: store, dir: dir, options: o, lease: l}
	if err := p.run(ctx); err != nil {
		return nil, because(ctx, err)
	}
	return &p.report, nil
}

type pruner struct {
	store   objectstore.Store
	dir     string
	options PruneOptions
	lease   *lease
	now     time.Time // of the target
	report  PruneReport
}

func (p *pruner) run(ctx context.Context) (err error) {
	if p.now, err = p.lease.now(ctx); err != nil {
		return err
	}
	busy, err := p.lease.running(ctx, restoresDir)
	if err != nil {
		return err
	}
	if busy != "" {
		p.report.Postponed = busy
		return nil
	}
	bases, err := p.lease.basesInUse(ctx) // before the list: a backup that ends in between is in it
	if err != nil {
		return err
	}
	all, err := p.list(ctx)
	if err != nil {
		return err
	}
	kept := p.keep(all, bases)
	var old []*Manifest
	for _, m := range all {
		if kept[m.ID] {
			p.report.Kept = append(p.report.Kept, m.ID)
		} else {
			p.report.Backups = append(p.report.Backups, m.ID)
			old = append(old, m)
		}
	}
	for _, m := range basesLast(old) {
		if err := p.remove(ctx, m); err != nil {
			return err
		}
	}
	if err := p.pruneLog(ctx, all, kept); err != nil {
		return err
	}
	return p.deleteParts(ctx, all, kept)
}

// list lists the backups.
func (p *pruner) list(ctx context.Context) ([]*Manifest, error) {
	all, broken, err := List(ctx, p.store, p.dir)
	if err == nil && len(broken) > 0 {
		err = fmt.Errorf("backup: nothing is pruned, because a manifest cannot be read, and its parts are not known: %w", broken[0])
	}
	return all, err
}

// pruneLog lets the log archive delete what no backup that stays needs. Without a backup that can be restored, it is all that there is.
func (p *pruner) pruneLog(ctx context.Context, all []*Manifest, kept map[string]bool) error {
	if p.options.Log == nil {
		return nil
	}
	for _, m := range all {
		if kept[m.ID] && len(m.Damaged) == 0 && (p.report.Oldest == 0 || m.Epoch() < p.report.Oldest) {
			p.report.Oldest = m.Epoch()
		}
	}
	busy, err := p.lease.running(ctx, restoresDir) // one may have begun while manifests were removed
	if err != nil || p.report.Oldest == 0 {
		return err
	}
	if p.report.Postponed = busy; busy != "" {
		return nil
	}
	return p.options.Log(ctx, p.report.Oldest)
}

// keep returns the ids of the backups that stay. bases are those of backups that are being made.
func (p *pruner) keep(all []*Manifest, bases map[string]bool) map[string]bool {
	byID, kept := map[string]*Manifest{}, map[string]bool{}
	for _, m := range all {
		byID[m.ID] = m
	}
	full, usable := map[string]bool{}, false
	for i := len(all) - 1; i >= 0; i-- {
		m := all[i]
		if len(m.Damaged) == 0 && !usable { // one that lacks a base, which was deleted otherwise, is no state
			usable, kept[m.ID] = byID[rootOf(m, byID)].Kind == Full, true
		}
		if m.Kind == Full && len(m.Damaged) == 0 && len(full) < p.options.KeepFull {
			full[m.ID] = true
		}
	}
	for _, m := range all {
		if bases[m.ID] || p.now.Sub(m.Created) < p.options.KeepFor || full[rootOf(m, byID)] {
			kept[m.ID] = true
		}
	}
	for i := len(all) - 1; i >= 0; i-- { // bases are older
		for m := all[i]; kept[m.ID] && m.Base != nil && byID[m.Base.ID] != nil; m = byID[m.Base.ID] {
			kept[m.Base.ID] = true
		}
	}
	return kept
}

// rootOf is the id of the full backup of a chain.
func rootOf(m *Manifest, byID map[string]*Manifest) string {
	for m.Base != nil && byID[m.Base.ID] != nil {
		m = byID[m.Base.ID]
	}
	return m.ID
}

// basesLast orders backups so that each comes before its base: a prune that is ended leaves none without its base, which the list would
// show and nothing could restore. Epochs and times do not tell: they may be equal, and clocks go back.
func basesLast(all []*Manifest) []*Manifest {
	byID := map[string]*Manifest{}
	for _, m := range all {
		byID[m.ID] = m
	}
	bases := func(m *Manifest) (n int) {
		for m.Base != nil && byID[m.Base.ID] != nil {
			m, n = byID[m.Base.ID], n+1
		}
		return n
	}
	return slices.SortedStableFunc(slices.Values(all), func(a, b *Manifest) int { return cmp.Compare(bases(b), bases(a)) })
}

// remove ends the existence of a backup. A copy of its manifest keeps its parts for a while.
func (p *pruner) remove(ctx context.Context, m *Manifest) error {
	if p.options.DryRun {
		return nil
	}
	encoded, err := readObject(ctx, p.store, path.Join(p.dir, m.name))
	if err != nil {
		return err
	}
	copied := path.Join(p.dir, deletedDir, path.Base(m.name))
	err = p.store.Create(ctx, copied, objectstore.Bytes(encoded))
	if isExists(err) { // a prune that was ended here has left it: the parts stay for a while from now on
		if err = p.store.Delete(ctx, copied); err == nil {
			err = p.store.Create(ctx, copied, objectstore.Bytes(encoded))
		}
	}
	if err != nil {
		return err
	}
	return p.store.Delete(ctx, path.Join(p.dir, m.name))
}

// deleteParts deletes the parts that no backup names any more, unless a backup runs, which may use any part that exists.
func (p *pruner) deleteParts(ctx context.Context, all []*Manifest, kept map[string]bool) error {
	busy, err := p.lease.running(ctx, backupJobs)
	if err != nil {
		return err
	}
	if p.report.Postponed = busy; busy != "" {
		return nil
	}
	named, err := p.named(ctx, all, kept)
	if err != nil {
		return err
	}
	gone, waiting, old, err := p.deleted(ctx)
	if err != nil {
		return err
	}
	prefix := path.Join(p.dir, partsDir) + "/"
	parts, err := list(ctx, p.store, prefix)
	if err != nil {
		return err
	}
	for _, o := range parts {
		sum := strings.TrimPrefix(o.Name, prefix)
		switch {
		case named[sum]:
		case waiting[sum], !gone[sum] && o.YoungerThan(p.options.unfinished, p.now):
			p.report.Waiting++
		default:
			if err := p.deletePart(ctx, o); err != nil {
				return err
			}
		}
	}
	for _, name := range old {
		if err := p.store.Delete(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// named are the parts of the backups that stay, and of those that were made while the prune ran. No backup is being made.
func (p *pruner) named(ctx context.Context, all []*Manifest, kept map[string]bool) (map[string]bool, error) {
	now, err := p.list(ctx)
	if err != nil {
		return nil, err
	}
	named, goes := map[string]bool{}, map[string]bool{}
	for _, m := range all {
		if kept[m.ID] {
			m.addParts(named)
		} else {
			goes[m.ID] = true
		}
	}
	for _, m := range now {
		if !goes[m.ID] {
			m.addParts(named)
		}
	}
	return named, nil
}

func (p *pruner) deletePart(ctx context.Context, o objectstore.Object) error {
	p.report.Parts++
	p.report.PartBytes += o.Size
	if p.options.DryRun {
		return nil
	}
	return p.store.Delete(ctx, o.Name)
}

// deleted reads the copies of removed manifests. It returns the parts of those that were removed long ago, the parts of the others,
// and the names of the old copies. Parts of an old copy that is damaged are like those that no backup has named.
func (p *pruner) deleted(ctx context.Context) (gone, waiting map[string]bool, old []string, err error) {
	gone, waiting = map[string]bool{}, map[string]bool{}
	copies, err := list(ctx, p.store, path.Join(p.dir, deletedDir)+"/")
	if err != nil {
		return nil, nil, nil, err
	}
	for _, o := range copies {
		m, err := readManifest(ctx, p.store, p.dir, strings.TrimPrefix(o.Name, p.dir+"/"))
		young := o.YoungerThan(p.options.grace, p.now)
		switch {
		case err != nil && (young || !errors.Is(err, ErrDamaged)):
			return nil, nil, nil, err
		case young:
			m.addParts(waiting)
			continue
		case err == nil:
			m.addParts(gone)
		}
		if !p.options.DryRun {
			old = append(old, o.Name)
		}
	}
	return gone, waiting, old, nil
}

// addParts adds the hashes of the parts of a backup to a set.
func (m *Manifest) addParts(set map[string]bool) {
	for _, object := range m.objects() {
		set[object.SHA256] = true
	}
}

func isExists(err error) bool { return errors.Is(err, objectstore.ErrExists) }
