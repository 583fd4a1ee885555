package backup

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// noShare lets an incremental backup read no page that it need not read; firstShare the pages of the first MiB, which are all of a small store.
func noShare() uint64    { return readShares }
func firstShare() uint64 { return 0 }

func (f *fixture) checkpoint() {
	f.t.Helper()
	check(f.t, f.store.Checkpoint(context.Background()))
}

// readBy makes a backup, and returns how many pages it has read.
func (f *fixture) readBy(o Options) (*Manifest, uint64) {
	f.t.Helper()
	var last Progress
	o.Progress = func(p Progress) { last = p }
	m := f.backUp(o)
	if last.PagesTotal != last.Pages {
		f.t.Fatalf("%d pages were to be read, and %d were", last.PagesTotal, last.Pages)
	}
	return m, last.Pages
}

// TestIncrementalBackupsReadWhatHasChanged: a backup after few changes reads few pages, and has the same pages and the same table as one that
// reads all. After a restart nothing is known, and everything is read.
func TestIncrementalBackupsReadWhatHasChanged(t *testing.T) {
	f := newFixture(t)
	f.write(3000)
	f.checkpoint()
	base, n := f.readBy(Options{})
	if n != base.LivePages {
		t.Fatalf("a full backup has read %d of %d pages", n, base.LivePages)
	}
	f.write(2)
	f.checkpoint()
	for _, from := range []*Manifest{base, f.backUp(Options{Base: base.ID, share: noShare})} {
		few, some := f.readBy(Options{Base: from.ID, share: noShare})
		if some < few.Pages || some > base.LivePages/2 || from.Kind == Incremental && some != 0 {
			t.Fatalf("%d of %d pages were read, %d belong to the backup", some, few.LivePages, few.Pages)
		}
		all, n := f.readBy(Options{Base: from.ID, ReadAll: true})
		if n != all.LivePages {
			t.Fatalf("%d of %d pages were read", n, all.LivePages)
		}
		if few.State.Checkpoint != all.State.Checkpoint {
			continue // a checkpoint in the background came between
		}
		if few.Digest != all.Digest || few.Pages != all.Pages || !slices.Equal(few.Table, all.Table) {
			t.Fatalf("%+v\nthe one that reads all pages:\n%+v", few, all)
		}
		f.mustVerify(few)
		f.mustRestore(few)
	}
	check(t, f.store.Close())
	f.open()
	m, n := f.readBy(Options{Base: base.ID, share: noShare})
	if n != m.LivePages || m.Pages > base.LivePages/2 {
		t.Fatalf("after a restart %d of %d pages were read, %d belong to the backup", n, m.LivePages, m.Pages)
	}
	f.mustRestore(m)
}

func (f *fixture) mustVerify(m *Manifest) {
	f.t.Helper()
	_, err := Verify(context.Background(), f.target, m, nil)
	check(f.t, err)
}

// TestChainsRestoreWhateverHappensBetweenBackups: checkpoints that fail on a full disk, restarts, crashes, deletions that shrink the file, backups
// that fail. Each backup is that of the model.
func TestChainsRestoreWhateverHappensBetweenBackups(t *testing.T) {
	const seeds uint64 = max(4/exhaustiveStep, 1)
	unread := uint64(0)
	for seed := range seeds {
		f := newFixture(t)
		f.rng = rand.New(rand.NewPCG(seed, 14))
		f.write(1000)
		all := []*Manifest{f.backUp(Options{})}
		for range 14 {
			f.write(1 + f.rng.IntN(60))
			switch f.rng.IntN(6) {
			case 0:
				check(t, f.store.Close())
				f.open()
			case 1:
				f.deleteAll()
				f.checkpoint()
			case 2:
				f.fullDisk()
			case 3:
				f.target.Inject(objectstore.Fault{Op: objectstore.OpCreate, Prefix: f.dir + "/base/manifests", Kind: objectstore.FailForGood})
				if _, err := f.tryBackUp(Options{Base: LatestBase}); err == nil {
					t.Fatal("a backup without a manifest succeeded")
				}
				f.target.Heal()
			}
			f.checkpoint()
			base := all[len(all)-1]
			if f.rng.IntN(3) == 0 {
				base = all[f.rng.IntN(len(all))]
			}
			m, n := f.readBy(Options{Base: base.ID, share: noShare})
			all = append(all, m)
			unread += m.LivePages - n
		}
		for _, m := range all {
			f.mustVerify(m)
			f.mustRestore(m)
		}
	}
	if unread < 250*seeds {
		t.Fatalf("only %d pages were not read", unread)
	}
}

func (f *fixture) deleteAll() {
	f.t.Helper()
	x, err := f.store.Session()
	check(f.t, err)
	defer x.Close()
	for key := range f.model(^keys.Epoch(0)) {
		var w mvcc.Write
		w.Batch.Delete(keys.SpaceUser, []byte(key))
		epoch, err := x.Commit(context.Background(), &w)
		check(f.t, err)
		f.changes = append(f.changes, change{epoch: epoch, key: key})
	}
}

// fullDisk lets a checkpoint fail that has written a part of its pages.
func (f *fixture) fullDisk() {
	f.t.Helper()
	f.disk.LeaveFree(int64(f.rng.IntN(8 << 10)))
	_ = f.store.Checkpoint(context.Background()) // it may have fitted
	f.disk.SetCapacity(0)
}

// copyDisk is a directory of a store that is closed, on a disk of its own.
func copyDisk(t *testing.T, from, to *vfs.Mem, dir string) {
	t.Helper()
	check(t, to.MkdirAll(dir))
	names, err := from.List(dir)
	check(t, err)
	for _, name := range names {
		name = path.Join(dir, name)
		n, err := from.Size(name)
		if errors.Is(err, fs.ErrNotExist) { // a directory
			copyDisk(t, from, to, name)
			continue
		}
		check(t, err)
		content := make([]byte, n)
		in, err := from.Open(name, vfs.ReadOnly)
		check(t, err)
		_, err = in.ReadAt(content, 0)
		check(t, errors.Join(err, in.Close()))
		out, err := to.Open(name, vfs.Create)
		check(t, err)
		_, err = out.WriteAt(content, 0)
		check(t, errors.Join(err, out.Sync(), out.Close()))
	}
	check(t, to.SyncDir(dir))
}

// TestBaseOfARolledBackCheckpoint: the store loses the checkpoint of which a backup was made, and makes others with its number and those before.
// Pages of them have other contents and a header that says that the backup has them; the table of the backup says that it does not.
func TestBaseOfARolledBackCheckpoint(t *testing.T) {
	f := newFixture(t)
	f.write(1000)
	f.checkpoint()
	check(t, f.store.Close())
	before, known := vfs.NewMem(), len(f.changes)
	copyDisk(t, f.disk, before, "db")
	f.open()
	for range 8 {
		f.write(40)
		f.checkpoint()
	}
	base := f.backUp(Options{})
	check(t, f.store.Close())

	f.disk, f.options.Storage.FS, f.changes = before, before, f.changes[:known]
	f.open()
	f.write(300)
	f.checkpoint()
	again := f.pinned().Checkpoint
	for f.store.Visible() < keys.Epoch(base.State.Epoch) || f.pinned().Checkpoint < base.State.Checkpoint {
		f.write(20)
		f.checkpoint()
	}
	if again > base.State.Checkpoint {
		t.Fatalf("no checkpoint up to %d was made again, %d was", base.State.Checkpoint, again)
	}
	f.mustRestore(f.backUp(Options{Base: base.ID}))
}

func (f *fixture) pinned() State {
	f.t.Helper()
	s, err := f.store.PinCopy(context.Background(), time.Minute)
	check(f.t, err)
	defer s.Release()
	info, err := s.Info()
	check(f.t, err)
	return describe(&info)
}

// TestBackupsOfEarlierFormatsAreBases: a store goes on from a golden backup of each format, and its next backup is based on that.
func TestBackupsOfEarlierFormatsAreBases(t *testing.T) {
	for i, dir := range goldenDirs {
		dest := t.TempDir()
		check(t, os.CopyFS(dest, os.DirFS(dir)))
		target, base := goldenIn(t, dest)
		disk := vfs.NewMem()
		check(t, disk.MkdirAll("db"))
		check(t, RestoreBase(t.Context(), target, base, disk, "db", RestoreOptions{}))
		f := &fixture{t: t, disk: disk, options: tiny(disk), target: objectstore.NewFaulty(target)}
		f.open()
		x, err := f.store.Session()
		check(t, err)
		var w mvcc.Write
		w.Batch.Set(keys.SpaceUser, []byte("d"), []byte("later"))
		_, err = x.Commit(t.Context(), &w)
		check(t, err)
		x.Close()
		f.checkpoint()
		want := goldenContent()
		want["d"] = []byte("later")
		m := f.backUp(Options{Base: LatestBase})
		for range 2 { // the second one has a base with a table
			if base.Format != i+1 || m.Kind != Incremental || m.Format != manifestFormat || m.Pages == m.LivePages {
				t.Fatalf("base %+v\nbackup %+v", base, m)
			}
			f.mustVerify(m)
			s := f.restored(m, RestoreOptions{})
			compare(t, s, want)
			check(t, s.Close())
			m = f.backUp(Options{Base: m.ID, share: noShare})
		}
		check(t, f.store.Close())
	}
}

// tableOf reads the page table of a backup.
func tableOf(t *testing.T, store objectstore.Store, m *Manifest) (all []tableEntry) {
	t.Helper()
	r := newTableReader(t.Context(), store, m)
	for {
		e, ok, err := r.read()
		check(t, err)
		if !ok {
			return all
		}
		all = append(all, e)
	}
}

// forge stores the manifest of a backup with another page table, and a digest that fits.
func (f *fixture) forge(m *Manifest, table []tableEntry) *Manifest {
	f.t.Helper()
	forged := *m
	forged.ID, forged.Table, forged.LivePages = newID(time.Now()), nil, uint64(len(table))
	s := newSender(f.t.Context(), &job{store: f.target, manifest: &forged, dir: f.dir, pin: new(countingPin)})
	w := newTableWriter(s, m.State.PageSize, newCompressor(1))
	for _, e := range table {
		check(f.t, w.add(e))
	}
	check(f.t, w.finish())
	check(f.t, s.close())
	f.storeManifest(&forged)
	return &forged
}

func (f *fixture) storeManifest(m *Manifest) {
	f.t.Helper()
	p, err := m.encode()
	check(f.t, err)
	if err := f.target.Create(f.t.Context(), path.Join(f.dir, m.name), objectstore.Bytes(p)); !errors.Is(err, objectstore.ErrExists) {
		check(f.t, err)
	}
}

// TestVerifyFindsEveryMistakeOfAPageTable: whatever is wrong in the table of an incremental backup, whose hashes all fit, is found without a restore.
func TestVerifyFindsEveryMistakeOfAPageTable(t *testing.T) {
	f := newFixture(t)
	f.write(500)
	f.checkpoint()
	base := f.backUp(Options{})
	f.write(20)
	f.checkpoint()
	m := f.backUp(Options{Base: base.ID})
	own := map[uint64]bool{}
	for i := range m.Parts {
		var object bytes.Buffer
		check(t, readPartObject(t.Context(), f.target, m, &m.Parts[i], &object))
		check(t, readPages(m, &m.Parts[i], object.Bytes(), func(first page.ID, pages []byte) error {
			for n := range len(pages) / m.State.PageSize {
				own[uint64(first)+uint64(n)] = true
			}
			return nil
		}))
	}
	table := tableOf(t, f.target, m)
	f.mustVerify(f.forge(m, table))
	at := func(isOwn bool) int {
		return slices.IndexFunc(table, func(e tableEntry) bool { return own[uint64(e.id)] == isOwn })
	}
	without := func(i int) []tableEntry { return slices.Delete(slices.Clone(table), i, i+1) }
	wrong := func(i int) []tableEntry {
		t := slices.Clone(table)
		t[i].sum++
		return t
	}
	added := slices.Clone(table)
	for i := range added[1:] {
		if added[i].id+1 < added[i+1].id {
			added = slices.Insert(added, i+1, tableEntry{added[i].id + 1, 7})
			break
		}
	}
	if len(added) == len(table) {
		t.Fatal("every page is live: there is none to be added")
	}
	for name, table := range map[string][]tableEntry{
		"a page of the backup with another checksum": wrong(at(true)),
		"a page of the base with another checksum":   wrong(at(false)),
		"the last page with another checksum":        wrong(len(table) - 1),
		"without a page of the backup":               without(at(true)),
		"with a page that is nowhere":                added,
	} {
		_, err := Verify(t.Context(), f.target, f.forge(m, table), nil)
		if !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// Without a page of the base the table is that of a state without it: only the restored file knows better.
	disk := vfs.NewMem()
	check(t, disk.MkdirAll("db"))
	wantError(t, RestoreBase(t.Context(), f.target, f.forge(m, without(at(false))), disk, "db", RestoreOptions{}), ErrDamaged)
	short := *m
	short.LivePages++
	p, err := short.encode()
	check(t, err)
	_, err = decodeManifest(short.name, p)
	wantError(t, err, ErrDamaged)
	other := *m
	other.Digest = strings.Repeat("00", 32)
	f.storeManifest(&other)
	_, err = Verify(t.Context(), f.target, &other, nil)
	wantError(t, err, ErrDamaged)
}

// TestUnknownChangesAreNoticed: a page differs from the base, and is not known to have changed. If the backup reads it, it fails, and the next one
// reads everything.
func TestUnknownChangesAreNoticed(t *testing.T) {
	f := newFixture(t)
	f.write(300)
	f.checkpoint()
	m := f.backUp(Options{})
	table := tableOf(t, f.target, m)
	table[len(table)/2].sum++
	forged := f.forge(m, table)
	s, err := f.store.PinCopy(t.Context(), time.Minute)
	check(t, err)
	if s.Pages.Checkpoint() != m.State.Checkpoint {
		t.Skip("a checkpoint in the background came between")
	}
	s.Pages.SetCopyName(forged.SHA256())
	s.Release()
	_, err = f.tryBackUp(Options{Base: forged.ID, share: firstShare})
	unknown := (*UnknownChangeError)(nil)
	if !errors.As(err, &unknown) || unknown.Page != table[len(table)/2].id {
		t.Fatalf("a page that has changed was not noticed: %v", err)
	}
	for _, base := range []*Manifest{forged, m} {
		again, n := f.readBy(Options{Base: base.ID, share: noShare})
		if n != again.LivePages {
			t.Fatalf("after that %d of %d pages were read", n, again.LivePages)
		}
		f.mustRestore(again)
	}
}

// TestDamagedTableOfABaseIsNamed: nothing is based on what cannot be read.
func TestDamagedTableOfABaseIsNamed(t *testing.T) {
	f := newFixture(t)
	f.write(300)
	m := f.backUp(Options{})
	f.write(10)
	f.checkpoint()
	check(t, f.target.Delete(t.Context(), partName(f.dir, m.Table[0].SHA256)))
	_, err := f.tryBackUp(Options{Base: m.ID})
	wantError(t, err, ErrDamaged)
	if !strings.Contains(err.Error(), "make a full backup") || !strings.Contains(err.Error(), m.Table[0].SHA256) {
		t.Fatal(err)
	}
	f.mustRestore(m) // which needs no table
	f.mustRestore(f.backUp(Options{}))
}
