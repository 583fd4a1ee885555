package backup

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
)

// pruneAtOnce is a prune that deletes parts without waiting.
var pruneAtOnce = PruneOptions{grace: time.Nanosecond, unfinished: time.Nanosecond, lease: quickLease}

// held begins a backup that waits before it creates an object below a directory, and returns when it waits. resume lets it go on to its end.
func (f *fixture) held(dir string, o Options) (resume func() (*Manifest, error)) {
	f.t.Helper()
	release := make(chan struct{})
	rule := f.target.Inject(objectstore.Fault{Op: objectstore.OpCreate, Prefix: f.dir + "/" + dir, Kind: objectstore.Slow, Nth: 1, Until: release})
	var m *Manifest
	ended := make(chan error, 1)
	go func() {
		var err error
		m, err = f.tryBackUp(o)
		ended <- err
	}()
	for f.target.Fired(rule) == 0 {
		select {
		case err := <-ended:
			f.t.Fatalf("the backup has ended before it has created an object below %s: %v", dir, err)
		case <-time.After(time.Millisecond):
		}
	}
	return func() (*Manifest, error) {
		close(release)
		err := <-ended
		return m, err
	}
}

// twoBackups makes two full backups of which the rules of pruneAtOnce keep the second one.
func (f *fixture) twoBackups() (first, second *Manifest) {
	f.t.Helper()
	f.write(500)
	first = f.backUp(Options{})
	f.write(500)
	check(f.t, f.store.Checkpoint(context.Background()))
	second = f.backUp(Options{})
	f.write(200)
	check(f.t, f.store.Checkpoint(context.Background()))
	return first, second
}

func TestAPruneKeepsTheBaseOfABackupThatIsBeingMade(t *testing.T) {
	f := newFixture(t)
	base, _ := f.twoBackups()
	resume := f.held("base/parts", Options{Base: base.ID})
	r, err := Prune(t.Context(), f.target, f.dir, pruneAtOnce)
	check(t, err)
	if len(r.Backups) != 0 || !slices.Contains(r.Kept, base.ID) {
		t.Fatalf("the base was removed: %+v", r)
	}
	m, err := resume()
	check(t, err)
	f.mustRestore(m)
	f.mustRestore(base)
}

// Between the plan of a backup and its lease, a prune does not see it.
func TestABaseThatIsRemovedBeforeTheLeaseIsAnError(t *testing.T) {
	f := newFixture(t)
	base, _ := f.twoBackups()
	resume := f.held("base/jobs/backup-", Options{Base: base.ID})
	r, err := Prune(t.Context(), f.target, f.dir, pruneAtOnce)
	check(t, err)
	if !slices.Contains(r.Backups, base.ID) {
		t.Fatalf("%+v", r)
	}
	parts := f.objects("base/parts")
	_, err = resume()
	wantError(t, err, ErrNoBackup)
	if names := f.objects("base/manifests"); len(names) != 1 || !slices.Equal(f.objects("base/parts"), parts) {
		t.Fatalf("the target has %v, and the backup has sent parts: %v", names, f.objects("base/parts"))
	}
}

// The base may disappear although the backup has a lease: the prune is of another version, or does not see the lease.
func TestABaseThatIsRemovedDuringTheBackupIsAnError(t *testing.T) {
	f := newFixture(t)
	base, _ := f.twoBackups()
	resume := f.held("base/parts", Options{Base: base.ID})
	check(t, f.target.Delete(t.Context(), f.dir+"/"+base.name))
	_, err := resume()
	wantError(t, err, ErrNoBackup)
	if names := f.objects("base/manifests"); len(names) != 1 {
		t.Fatalf("the target has %v", names)
	}
}

// A target executes a deletion whose connection has broken, of a part that was sent since. The backup sees it at its end.
func TestAPartThatIsDeletedAfterItWasSentIsAnError(t *testing.T) {
	f := newFixture(t)
	f.write(100)
	resume := f.held("base/manifests", Options{})
	parts := f.objects("base/parts")
	check(t, f.target.Delete(t.Context(), f.dir+"/base/parts/"+parts[len(parts)-1]))
	if _, err := resume(); err == nil || !strings.Contains(err.Error(), "disappeared") {
		t.Fatalf("got %v", err)
	}
	if names := f.objects("base/manifests"); len(names) > 0 {
		t.Fatalf("the target has %v", names)
	}
	m := f.backUp(Options{})
	f.mustVerify(m)
}

// A backup takes parts that an interrupted one has sent, and those of a removed one. It ends after the prune has listed the backups, and before
// it looks for one that is being made.
func TestAPruneDeletesNoPartOfABackupThatEndsMeanwhile(t *testing.T) {
	f := newFixture(t)
	f.twoBackups()
	f.target.Inject(objectstore.Fault{Op: objectstore.OpCreate, Prefix: f.dir + "/base/parts", Kind: objectstore.FailForGood, Nth: 4, Sticky: true})
	if _, err := f.tryBackUp(Options{}); err == nil {
		t.Fatal("a backup whose parts cannot be stored succeeded")
	}
	f.target.Heal()
	resume := f.held("base/manifests", Options{})
	check(t, f.target.Create(t.Context(), partName(f.dir, strings.Repeat("0", 64)), objectstore.Bytes("no backup names this")))
	var m *Manifest
	o := pruneAtOnce
	o.Log = func(context.Context, keys.Epoch) (err error) {
		m, err = resume()
		return err
	}
	r, err := Prune(t.Context(), f.target, f.dir, o)
	check(t, err)
	if m == nil || r.Postponed != "" || r.Parts != 1 {
		t.Fatalf("%d parts were deleted, want the one that no backup names: %+v", r.Parts, r)
	}
	f.mustVerify(m)
	f.mustRestore(m)
}

// A prune that was ended between its two steps for a backup has left a copy of the manifest, long ago. The parts stay for a while nevertheless:
// a restore may have read the manifest just now.
func TestPartsStayForAWhileAfterAPruneThatWasEnded(t *testing.T) {
	f := newFixture(t)
	old, _ := f.twoBackups()
	f.target.Inject(objectstore.Fault{Op: objectstore.OpDelete, Prefix: f.dir + "/base/manifests", Kind: objectstore.FailForGood})
	if _, err := Prune(t.Context(), f.target, f.dir, pruneAtOnce); err == nil {
		t.Fatal("a prune that cannot delete a manifest succeeded")
	}
	f.target.Heal()
	grace := 300 * time.Millisecond
	time.Sleep(2 * grace)
	o := pruneAtOnce
	o.grace = grace
	r, err := Prune(t.Context(), f.target, f.dir, o)
	check(t, err)
	if !slices.Contains(r.Backups, old.ID) || r.Parts != 0 {
		t.Fatalf("%+v", r)
	}
}

// TestAPruneThatIsEndedLeavesOnlyBackupsWithTheirBases: an incremental backup whose base is gone is in the list and cannot be restored.
func TestAPruneThatIsEndedLeavesOnlyBackupsWithTheirBases(t *testing.T) {
	f := newFixture(t)
	f.write(500)
	base := f.backUp(Options{})
	for range 2 {
		f.write(200)
		check(t, f.store.Checkpoint(context.Background()))
		base = f.backUp(Options{Base: base.ID})
	}
	f.write(200)
	check(t, f.store.Checkpoint(context.Background()))
	last := f.backUp(Options{})
	for left := 3; left > 0; left-- {
		f.target.Inject(objectstore.Fault{Op: objectstore.OpDelete, Prefix: f.dir + "/base/manifests", Nth: 2, Kind: objectstore.FailForGood})
		_, err := Prune(t.Context(), f.target, f.dir, pruneAtOnce)
		if (err == nil) != (left == 1) {
			t.Fatalf("prune of %d: %v", left, err)
		}
		f.target.Heal()
		all, _, err := List(t.Context(), f.target, f.dir)
		check(t, err)
		if len(all) != left || all[left-1].ID != last.ID {
			t.Fatalf("%d backups are left, want %d", len(all), left)
		}
		for _, m := range all {
			if _, err := Chain(t.Context(), f.target, m); err != nil {
				t.Errorf("after a prune that was ended, %v", err)
			}
		}
	}
}

// TestAPruneKeepsABackupThatCanBeRestored: if the base of the newest one was deleted by hand, that is the one before.
func TestAPruneKeepsABackupThatCanBeRestored(t *testing.T) {
	f := newFixture(t)
	f.write(300)
	f.checkpoint()
	whole := f.backUp(Options{})
	f.write(100)
	f.checkpoint()
	base := f.backUp(Options{})
	f.write(100)
	f.checkpoint()
	f.backUp(Options{Base: base.ID})
	check(t, f.target.Delete(t.Context(), f.dir+"/"+base.name))
	_, err := Prune(t.Context(), f.target, f.dir, pruneAtOnce)
	check(t, err)
	left, err := Find(t.Context(), f.target, f.dir, whole.ID)
	check(t, err)
	f.mustRestore(left)
}

// TestADamagedCopyOfARemovedManifestEndsNoPrune: of it, a prune needs to know nothing but that its parts have waited.
func TestADamagedCopyOfARemovedManifestEndsNoPrune(t *testing.T) {
	f := newFixture(t)
	_, left := f.twoBackups()
	_, err := Prune(t.Context(), f.target, f.dir, pruneAtOnce)
	check(t, err)
	copies := f.objects("base/deleted")
	if len(copies) != 1 {
		t.Fatalf("%v", copies)
	}
	name := f.dir + "/base/deleted/" + copies[0]
	check(t, f.target.Delete(t.Context(), name))
	check(t, f.target.Create(t.Context(), name, objectstore.Bytes("{}")))
	young := pruneAtOnce
	young.grace = time.Hour
	_, err = Prune(t.Context(), f.target, f.dir, young)
	wantError(t, err, ErrDamaged)
	r, err := Prune(t.Context(), f.target, f.dir, pruneAtOnce)
	check(t, err)
	if r.Parts == 0 || len(f.objects("base/deleted")) != 0 {
		t.Fatalf("%+v, %v", r, f.objects("base/deleted"))
	}
	f.mustVerify(left)
	f.mustRestore(left)
}

// TestAnObjectOfUnknownAgeIsNotOld: of a lease or a part without an inode, a prune does not know whether its backup is being made.
func TestAnObjectOfUnknownAgeIsNotOld(t *testing.T) {
	f := newFixture(t)
	f.twoBackups()
	check(t, f.target.Create(t.Context(), f.dir+"/"+partsDir+"unnamed", objectstore.Bytes("x")))
	check(t, f.target.Create(t.Context(), f.dir+"/"+backupJobs+"dead", objectstore.Bytes("x")))
	o := pruneAtOnce
	o.lease.dead = 10 * time.Millisecond
	time.Sleep(2 * o.lease.dead)
	for _, c := range []struct {
		unreadable string
		postponed  bool
		stays      bool
	}{{backupJobs + "dead", true, true}, {partsDir + "unnamed", false, true}, {"none", false, false}} {
		f.target.Inject(objectstore.Fault{Prefix: f.dir + "/" + c.unreadable, Kind: objectstore.InodeUnreadable})
		r, err := Prune(t.Context(), f.target, f.dir, o)
		f.target.Heal()
		check(t, err)
		if (r.Postponed != "") != c.postponed || slices.Contains(f.objects(strings.TrimSuffix(partsDir, "/")), "unnamed") != c.stays {
			t.Errorf("without the inode of %s: %+v", c.unreadable, r)
		}
	}
}
