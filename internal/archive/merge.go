package archive

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
)

// A file of four seconds is small, and a year has eight million of them: lists, plans and prunes become slow. So files that follow each other
// are merged into larger ones, again and again until they have mergeBytes:
//
//	1-9  10-17  18-24  ──►  1-24  ──►  1-600        the parts are deleted an hour after they were merged
//
// A merge is worth its reads and writes if the new file is several times as large as each part, so each byte is written a few times only. Between
// its creation and the deletion of the parts, a plan takes the merged file, as it always takes the one that leads farthest. A restore that began
// before has a lease, which keeps the parts. Nothing depends on a merge: it may end anywhere.
//
// Only the owner of the archive merges. A process that has lost the archive and does not know it yet does no harm: it makes and deletes files
// only of which another one has the same records.

// MergeOptions configure merges of small files. Zero fields take the default named beside them.
type MergeOptions struct {
	Off   bool
	Every time.Duration // between two passes, if enough files were created meanwhile; 1 min
	Grace time.Duration // from the merge to the deletion of the parts; 1 h
	Files int           // least number of files that are merged; 16
	Bytes int64         // largest size of a merged file; 64 MiB. Files of a quarter of it are not merged
}

const (
	mergeEvery = time.Minute
	mergeGrace = time.Hour
	mergeFiles = 16
	mergeBytes = 64 << 20

	// mergeGrowth is how many times as large as its parts a merged file is.
	mergeGrowth = 4
	// mergePartsMax bounds the files of a merge. A target may take some 20 ms to open each of them, and gives an upload a minute and more.
	mergePartsMax = 1000
	// mergeWindow bounds the files that a pass looks at, the oldest first. A list of more has older ones to merge first.
	mergeWindow = 50_000
)

func (o *MergeOptions) setDefaults() {
	o.Every, o.Grace = cmp.Or(o.Every, mergeEvery), cmp.Or(o.Grace, mergeGrace)
	o.Files, o.Bytes = cmp.Or(o.Files, mergeFiles), cmp.Or(o.Bytes, mergeBytes)
}

// MergeStats count what merges did since the start.
type MergeStats struct {
	Merged, Created, Bytes uint64 // files that were merged, those that were made of them, and bytes of these
	Deleted                uint64 // parts
	Failures               uint64
	Err                    error // of the last pass; nil if it was successful
}

// merger makes passes of merges.
type merger struct {
	place   *place // constant, like all but the last two
	options MergeOptions
	owner   func(context.Context) error // returns nil if this process is surely the owner
	count   func(func(*MergeStats))

	skip    map[string]bool     // files that cannot be merged, or cover others with other records; each is an error once
	breaks  map[keys.Epoch]bool // first epochs of files that do not follow the one before
	waiting bool                // the last pass has left something for a later one
}

func newMerger(p *place, owner func(context.Context) error, count func(func(*MergeStats))) *merger {
	return &merger{place: p, owner: owner, count: count, skip: map[string]bool{}, breaks: map[keys.Epoch]bool{}}
}

// errForeign means that two files have the same epochs and not the same records.
var errForeign = errors.New("archive: two histories")

// errEnough ends a list.
var errEnough = errors.New("archive: enough files for a pass")

// pass merges what is worth it, and deletes the parts of what was merged before.
func (m *merger) pass(ctx context.Context) error {
	all, now, err := m.list(ctx)
	if err != nil {
		return err
	}
	m.waiting = false
	list := covers(all)
	var damages error
	for _, group := range m.groups(list) {
		if err := m.merge(ctx, group); err != nil && !ofFile(err) {
			return err
		} else if err != nil {
			damages = errors.Join(damages, err)
		}
	}
	return errors.Join(damages, m.deleteParts(ctx, list, now))
}

// list lists the oldest files. now is not later than the time of the target.
func (m *merger) list(ctx context.Context) (all []file, now time.Time, err error) {
	err = m.place.eachFile(ctx, func(f file) error {
		now = newer(now, f.created)
		all = append(all, f)
		if len(all) == mergeWindow {
			return errEnough
		}
		return nil
	})
	if errors.Is(err, errEnough) {
		err = nil
	}
	return all, now, err
}

// groups chooses the files that are merged.
func (m *merger) groups(list []cover) (groups [][]file) {
	small := func(i int) bool {
		return i < len(list) && list[i].size < m.options.Bytes/mergeGrowth && !m.skip[list[i].name]
	}
	adjacent := func(i int) bool {
		return i+1 < len(list) && list[i].last+1 == list[i+1].first && !m.breaks[list[i+1].first]
	}
	for i := 0; i < len(list); {
		end, sum, largest := i, int64(0), int64(0) // files from i to end, not included, may be merged
		for end-i < mergePartsMax && small(end) && sum+list[end].size <= m.options.Bytes && (end == i || adjacent(end-1)) {
			sum, largest, end = sum+list[end].size, max(largest, list[end].size), end+1
		}
		full := end < len(list) && small(end) && adjacent(end-1) // the next one does not fit
		last := end == len(list)
		worth := end-i >= m.options.Files && sum >= mergeGrowth*largest || full && 2*sum >= m.options.Bytes || !full && !last
		if worth && end-i > 1 {
			group := make([]file, 0, end-i)
			for _, c := range list[i:end] {
				group = append(group, c.file)
			}
			groups, i = append(groups, group), end
			continue
		}
		i++
	}
	return groups
}

// merge makes one file of files, if they follow each other.
func (m *merger) merge(ctx context.Context, group []file) error {
	infos, errs, err := m.place.infos(ctx, group)
	if err != nil {
		return err
	}
	for n := range group {
		if errs[n] != nil {
			m.skip[group[n].name] = true
			return errs[n]
		}
		if !follow(infos[:n+1]) || infos[n].Level != infos[0].Level {
			m.breaks[group[n].first], m.waiting = true, true // the next pass takes what is on one side of it
			return nil
		}
	}
	if err := m.owner(ctx); err != nil {
		return err
	}
	content := newMergedFile(ctx, m.place, group, infos)
	f := file{name: m.place.name(logDir, FileName(content.info.First, content.info.Last.Epoch)), first: content.info.First, last: content.info.Last.Epoch, size: content.Size()}
	if err := m.place.store.Create(ctx, f.name, content); err != nil && !errors.Is(err, objectstore.ErrExists) {
		if damage := new(DamageError); errors.As(err, &damage) {
			m.skip[damage.File] = true
		}
		return fmt.Errorf("archive: merge %d files into %s: %w", len(group), f.base(), err)
	}
	if err := m.check(ctx, &f, content); err != nil {
		return err
	}
	m.count(func(s *MergeStats) {
		s.Merged, s.Created, s.Bytes = s.Merged+uint64(len(group)), s.Created+1, s.Bytes+uint64(f.size)
	})
	return nil
}

// check returns nil if the file that exists has the records of its parts. One that is damaged is deleted, and a later pass makes it again.
func (m *merger) check(ctx context.Context, f *file, content *mergedFile) error {
	found, err := m.place.info(ctx, f)
	if errors.Is(err, ErrDamaged) || errors.Is(err, objectstore.ErrShort) {
		return errors.Join(err, m.place.store.Delete(ctx, f.name))
	}
	if err == nil && found.withoutSize() != content.info.withoutSize() {
		err = fmt.Errorf("archive: %s exists and has other records than the files of its epochs", f.name)
	}
	return err
}

// deleteParts deletes the parts of files that were merged long enough ago, while nothing restores. The merged file is read once more before,
// to its end.
func (m *merger) deleteParts(ctx context.Context, list []cover, now time.Time) error {
	for i := range list {
		c := &list[i]
		if len(c.inside) == 0 || m.skip[c.name] {
			continue
		}
		if m.waiting = true; now.Sub(c.created) < m.options.Grace {
			continue
		}
		busy, err := m.place.restoring(ctx, now)
		if err != nil || busy {
			return err
		}
		if err := m.deletePartsOf(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

func (m *merger) deletePartsOf(ctx context.Context, c *cover) error {
	infos, errs, err := m.place.infos(ctx, c.inside)
	if err != nil {
		return err
	}
	known := map[string]*Info{}
	for i := range c.inside {
		if errs[i] == nil {
			known[c.inside[i].name] = &infos[i]
		}
	}
	rest, err := m.place.others(ctx, c, known)
	if errors.Is(err, ErrDamaged) && whole(c, known) {
		return errors.Join(err, m.place.store.Delete(ctx, c.name)) // its parts are all there, and are merged again
	}
	if err != nil {
		m.skip[c.name] = m.skip[c.name] || ofFile(err)
		return err
	}
	if err := m.owner(ctx); err != nil {
		return err
	}
	stays := map[string]bool{}
	for _, f := range rest {
		stays[f.name] = true
		m.skip[c.name] = true // it is not read again and again
		err = errors.Join(err, fmt.Errorf("%w: %s and %s have the same epochs and other records", errForeign, f.base(), c.base()))
	}
	for _, f := range c.inside {
		if stays[f.name] {
			continue
		}
		if err := m.place.store.Delete(ctx, f.name); err != nil {
			return err
		}
		m.count(func(s *MergeStats) { s.Deleted++ })
	}
	return err
}

// whole reports whether files inside of a cover have all of its epochs.
func whole(c *cover, known map[string]*Info) bool {
	parts := covers(c.inside)
	list := make([]Info, 0, len(parts))
	for i := range parts {
		if known[parts[i].name] == nil {
			return false
		}
		list = append(list, *known[parts[i].name])
	}
	return follow(list) && parts[0].first == c.first && parts[len(parts)-1].last == c.last
}

// restoreDead is the age of the newest object of a lease at which its restore has died.
const restoreDead = 5 * leaseEvery

// restoring reports whether a restore reads the archive. now is not later than the time of the target.
func (p *place) restoring(ctx context.Context, now time.Time) (busy bool, err error) {
	err = p.store.List(ctx, p.name(restoresDir)+"/", func(o objectstore.Object) error {
		busy = busy || o.YoungerThan(restoreDead, now)
		return nil
	})
	return busy, err
}

// mergeFiles makes passes until ctx ends, while this process is the owner.
func (a *Archiver) mergeFiles(ctx context.Context) {
	o := a.options.Merge
	o.setDefaults()
	passed, again := uint64(0), true // files that were created before the last pass; whether one more is enough for another one
	for !o.Off && ctx.Err() == nil {
		sleep(ctx, o.Every)
		m, files := a.merger()
		if m == nil || files == passed || !again && files-passed < uint64(o.Files) {
			continue
		}
		m.options = o
		err := m.pass(ctx)
		if ctx.Err() != nil {
			return
		}
		passed, again = files, err != nil || m.waiting
		m.count(func(s *MergeStats) {
			if s.Err = err; err != nil {
				s.Failures++
			}
		})
	}
}

// merger is what makes passes, nil while this process is not the owner, and how many files were created.
func (a *Archiver) merger() (m *merger, files uint64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.status.Owner == nil || !a.status.Owner.Self || !a.status.Connected {
		return nil, 0
	}
	return a.merging, a.status.Files
}

// countMerges changes the counts.
func (a *Archiver) countMerges(change func(*MergeStats)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	change(&a.status.Merges)
}
