package backup

import (
	"context"
	"errors"
	"io"
	"path"
	"slices"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

func TestRestoredBackupsEqualTheModelWhileWritersRun(t *testing.T) {
	f := newFixture(t)
	f.write(2000)
	var all []*Manifest
	base := ""
	for i := range 6 {
		stop := f.writing()
		time.Sleep(5 * time.Millisecond)
		m := f.backUp(Options{Base: base})
		stop()
		if all = append(all, m); i != 2 { // 3 has the same base as 2
			base = m.ID
		}
		if (m.Kind == Full) != (i == 0) {
			t.Fatalf("backup %d is %s", i, m.Kind)
		}
		check(t, f.store.Checkpoint(context.Background()))
	}
	for _, m := range all {
		f.mustRestore(m)
		report, err := Verify(t.Context(), f.target, m, nil)
		check(t, err)
		if m.Kind == Full && report.Pages != m.LivePages {
			t.Fatalf("a full backup has %d of %d pages", report.Pages, m.LivePages)
		}
	}
}

func TestABackupOfAnEmptyStoreRestores(t *testing.T) {
	f := newFixture(t)
	m := f.backUp(Options{})
	f.mustRestore(m)
	f.write(100)
	check(t, f.store.Checkpoint(context.Background()))
	f.mustRestore(f.backUp(Options{Base: m.ID}))
}

// A reader of the newest root would miss commits of the last minutes, however young the root is.
func TestACopyHasWhatWasCommittedBefore(t *testing.T) {
	f := newFixture(t)
	f.write(50)
	state, err := f.store.PinCopy(t.Context(), time.Minute) // no checkpoint yet
	check(t, err)
	info, err := state.Info()
	check(t, err)
	state.Release()
	if info.Epoch < 50 {
		t.Fatalf("the state has epoch %d", info.Epoch)
	}
	f.write(1)
	state, err = f.store.PinCopy(t.Context(), time.Minute)
	check(t, err)
	defer state.Release()
	if later, _ := state.Info(); later.Epoch <= info.Epoch {
		t.Fatalf("the state lacks a commit: epoch %d after %d", later.Epoch, info.Epoch)
	}
}

func TestAnInterruptedBackupContinues(t *testing.T) {
	f := newFixture(t)
	f.write(3000)
	check(t, f.store.Checkpoint(context.Background()))
	f.target.Inject(objectstore.Fault{Op: objectstore.OpCreate, Prefix: f.dir + "/base/parts", Kind: objectstore.FailForGood, Nth: 4, Sticky: true})
	state, err := f.store.PinCopy(t.Context(), time.Minute)
	check(t, err)
	before := state.Pages.Checkpoint()
	state.Release()
	if _, err := f.tryBackUp(Options{}); err == nil {
		t.Fatal("a backup whose parts cannot be stored succeeded")
	}
	if names := f.objects("base/manifests"); len(names) != 0 {
		t.Fatalf("an interrupted backup left %v", names)
	}
	if left := f.objects("base/jobs"); len(left) != 0 {
		t.Fatalf("an interrupted backup left %v", left)
	}
	f.target.Heal()
	var last Progress
	m := f.backUp(Options{Progress: func(p Progress) { last = p }})
	if m.State.Checkpoint != before { // a checkpoint in the background came between
		before = 0
	}
	if before != 0 && last.PartsKept != 3 || last.PartsSent+last.PartsKept != uint64(len(m.Parts)+len(m.Table)) || last.PartsSent == 0 {
		t.Fatalf("3 parts of %d existed: %d were sent, %d were not", len(m.Parts), last.PartsSent, last.PartsKept)
	}
	f.mustRestore(m)
}

// A bandwidth holds back nothing but the backup, and the pin is renewed while it waits.
func TestABackupKeepsToItsBandwidth(t *testing.T) {
	f := newFixture(t)
	f.write(1000)
	check(t, f.store.Checkpoint(context.Background()))
	began := time.Now()
	m := f.backUp(Options{Bandwidth: 2 << 20})
	floor := time.Duration(float64(m.LivePages*512) / (2 << 20) * float64(time.Second) / 2)
	if took := time.Since(began); took < floor {
		t.Fatalf("%d pages were read in %v", m.LivePages, took)
	}
}

func TestCancelledBackupsEndAndReleaseTheirState(t *testing.T) {
	f := newFixture(t)
	f.write(1000)
	ctx, cancel := context.WithCancel(t.Context())
	f.target.Inject(objectstore.Fault{Op: objectstore.OpCreate, Prefix: f.dir + "/base/parts", Kind: objectstore.Slow, Nth: 2, Sticky: true, Until: ctx.Done()})
	time.AfterFunc(5*time.Millisecond, cancel)
	_, err := Create(ctx, f.store, f.target, Options{PartBytes: 16 << 10})
	wantError(t, err, context.Canceled)
	f.target.Heal()
	if left := append(f.objects("base/manifests"), f.objects("base/jobs")...); len(left) != 0 {
		t.Fatalf("a cancelled backup left %v", left)
	}
}

func TestBasesMustBeOfTheSameStoreAndHistory(t *testing.T) {
	f, other := newFixture(t), newFixture(t)
	f.write(100)
	other.write(100)
	m := f.backUp(Options{})
	for name, change := range map[string]func(*Manifest){
		"store":      func(b *Manifest) { b.State.StoreID = "00" },
		"history":    func(b *Manifest) { b.State.Lineage = "00" },
		"page size":  func(b *Manifest) { b.State.PageSize = 1024 },
		"checkpoint": func(b *Manifest) { b.State.Checkpoint = m.State.Checkpoint + 1 },
		"damage":     func(b *Manifest) { b.Damaged = []uint64{7} },
	} {
		base := *m
		change(&base)
		if m.unfitBase(&base) == "" {
			t.Errorf("a base with another %s is taken", name)
		}
	}
	if why := m.unfitBase(m); why != "" {
		t.Errorf("a base of the same state is refused: %s", why)
	}
	_, err := f.tryBackUp(Options{Base: "20200101T000000Z-00000000"})
	wantError(t, err, ErrNoBackup)
	other.target = f.target
	_, err = other.tryBackUp(Options{Base: m.ID}) // it is below the other lineage
	wantError(t, err, ErrNoBackup)
}

// The state that another process pinned must not be copied any more once its pin has ended.
func TestABackupWhosePinHasEndedFails(t *testing.T) {
	f := newFixture(t)
	f.write(1000)
	o := Options{pin: func(s *storage.CopyState) pin { return &endedPin{s} }}
	_, err := f.tryBackUp(o)
	wantError(t, err, storage.ErrPinEnded)
	if names := f.objects("base/manifests"); len(names) != 0 {
		t.Fatalf("left %v", names)
	}
}

type endedPin struct{ *storage.CopyState }

func (*endedPin) Renew() error { return storage.ErrPinEnded }

// The pin must be renewed wherever the backup may wait: otherwise it ends in the middle of a large backup. That each run of pages
// renews it is TestABackupWhosePinHasEndedFails.
func TestThePinIsRenewedWhereverABackupMayWait(t *testing.T) {
	renewed := 0
	part := &finishedPart{pieces: [][]byte{{1, 2}, {}, {3}}, info: Part{Bytes: 3}}
	r, err := (&partContent{part, func() { renewed++ }}).Open()
	check(t, err)
	p, err := io.ReadAll(iotest.OneByteReader(r))
	check(t, err)
	if len(p) != 3 || renewed != 3 {
		t.Fatalf("sending %d bytes one by one renewed the pin %d times", len(p), renewed)
	}
	counting := new(countingPin)
	j := &job{options: Options{Bandwidth: 1}, pin: counting, nextRun: time.Now().Add(5 * time.Millisecond)}
	check(t, j.throttle(t.Context(), 1))
	if counting.renewed == 0 {
		t.Fatal("waiting for the bandwidth did not renew the pin")
	}
}

// TestABackupKeepsItsStateWhileItWaitsForAPrune, which may take longer than a pin lasts that is not renewed: it is renewed again and again.
func TestABackupKeepsItsStateWhileItWaitsForAPrune(t *testing.T) {
	f := newFixture(t)
	f.write(100)
	prune := f.dir + "/base/jobs/prune-x-000000"
	check(t, f.target.Create(t.Context(), prune, objectstore.Bytes("x")))
	renewed := new(renewedPin)
	var m *Manifest
	ended := make(chan error, 1)
	go func() {
		var err error
		m, err = f.tryBackUp(Options{pin: func(s *storage.CopyState) pin { renewed.pin = s; return renewed }})
		ended <- err
	}()
	waits := func(what string, holds func() bool) {
		for deadline := time.Now().Add(time.Minute); !holds(); time.Sleep(time.Millisecond) {
			if len(ended) > 0 || time.Now().After(deadline) {
				t.Fatalf("%s: never; backups that have ended: %d", what, len(ended))
			}
		}
	}
	waits("it has its lease", func() bool { return len(f.objects("base/jobs")) == 2 }) // what comes now is the wait
	before := renewed.times.Load()
	waits("the pin is renewed", func() bool { return renewed.times.Load() >= before+10 })
	check(t, f.target.Delete(t.Context(), prune))
	check(t, <-ended)
	f.mustRestore(m)
}

// TestABackupKeepsItsStateWhileItLooksForItsBase: a target may have thousands of manifests, and answer slowly.
func TestABackupKeepsItsStateWhileItLooksForItsBase(t *testing.T) {
	f := newFixture(t)
	var all []*Manifest
	for range 3 {
		f.write(100)
		all = append(all, f.backUp(Options{Base: LatestBase}))
	}
	if all[2].Base == nil || all[2].Base.ID != all[1].ID {
		t.Fatalf("the base of the third backup is %+v", all[2].Base)
	}
	refused := objectstore.Fault{Op: objectstore.OpCreate, Prefix: f.dir + "/base/jobs", Kind: objectstore.FailForGood} // it ends before it reads
	f.target.Inject(refused)
	for base, want := range map[string]int64{LatestBase: 3 + 3, all[0].ID: 1 + 1, all[2].ID: 1 + 3} { // those that are looked at, and the chain
		renewed := new(renewedPin)
		_, err := f.tryBackUp(Options{Base: base, pin: func(s *storage.CopyState) pin { renewed.pin = s; return renewed }})
		if err == nil || renewed.times.Load() < 2*want { // for its bytes and its end
			t.Errorf("base %s: %v; renewed %d times, want %d or more", base, err, renewed.times.Load(), 2*want)
		}
	}
}

// renewedPin counts how often another pin was renewed.
type renewedPin struct {
	pin
	times atomic.Int64
}

func (p *renewedPin) Renew() error {
	p.times.Add(1)
	return p.pin.Renew()
}

type countingPin struct{ renewed int }

func (p *countingPin) Renew() error { p.renewed++; return nil }
func (*countingPin) Release()       {}

// Damage of each bit is TestEveryFlippedByteOfAPartOrManifestIsNamed.
func TestADamagedOrMissingPartIsNamedBeforeAByteIsWritten(t *testing.T) {
	f := newFixture(t)
	f.write(300)
	m := f.backUp(Options{})
	var err error
	f.target.Inject(objectstore.Fault{Op: objectstore.OpRead, Prefix: partName(f.dir, ""), Kind: objectstore.ReadFlipped, Bytes: 100})
	_, err = Verify(t.Context(), f.target, m, nil)
	wantError(t, err, ErrDamaged)
	f.target.Heal()
	check(t, f.target.Delete(t.Context(), partName(f.dir, m.Parts[0].SHA256)))
	disk := vfs.NewMem()
	check(t, disk.MkdirAll("db"))
	wantError(t, RestoreBase(t.Context(), f.target, m, disk, "db", RestoreOptions{}), ErrDamaged)
	if left, _ := disk.List("db"); len(left) > 0 {
		t.Fatalf("a restore whose plan fails wrote %v", left)
	}
}

func TestAPruneKeepsWhatIsNeeded(t *testing.T) {
	f := newFixture(t)
	f.write(500)
	old := f.backUp(Options{})
	f.write(500)
	check(t, f.store.Checkpoint(context.Background()))
	full := f.backUp(Options{})
	f.write(200)
	check(t, f.store.Checkpoint(context.Background()))
	last := f.backUp(Options{Base: full.ID})
	o := PruneOptions{KeepFull: 0, grace: time.Nanosecond, unfinished: time.Nanosecond, lease: quickLease}

	check(t, f.target.Create(t.Context(), f.dir+"/restores/r-0", objectstore.Bytes("x")))
	r, err := Prune(t.Context(), f.target, f.dir, o)
	check(t, err)
	if r.Postponed == "" || len(r.Backups)+int(r.Parts) != 0 {
		t.Fatalf("beside a restore: %+v", r)
	}
	check(t, f.target.Delete(t.Context(), f.dir+"/restores/r-0"))

	check(t, f.target.Create(t.Context(), f.dir+"/base/jobs/backup-x-000000", objectstore.Bytes("x")))
	r, err = Prune(t.Context(), f.target, f.dir, o)
	check(t, err)
	if r.Postponed == "" || r.Parts != 0 || len(r.Backups) != 1 || r.Backups[0] != old.ID {
		t.Fatalf("beside a backup: %+v", r)
	}
	check(t, f.target.Delete(t.Context(), f.dir+"/base/jobs/backup-x-000000"))

	r, err = Prune(t.Context(), f.target, f.dir, o)
	check(t, err)
	if len(r.Kept) != 2 || r.Parts == 0 {
		t.Fatalf("the base of the newest backup: %+v", r)
	}
	f.mustRestore(full)
	f.mustRestore(last)
	f.mustVerify(last) // which needs the page tables
}

// A crash ends no more than the backup: the state of the store is the same after it, so that its parts are not sent again.
func TestABackupContinuesAfterACrash(t *testing.T) {
	f := newFixture(t)
	f.write(3000)
	check(t, f.store.Checkpoint(context.Background()))
	f.target.Inject(objectstore.Fault{Op: objectstore.OpCreate, Prefix: f.dir + "/base/parts", Kind: objectstore.FailForGood, Nth: 4, Sticky: true})
	if _, err := f.tryBackUp(Options{}); err == nil {
		t.Fatal("a backup whose parts cannot be stored succeeded")
	}
	f.target.Heal()
	check(t, f.store.Close())
	f.open()
	had := map[string]bool{}
	for _, name := range f.objects("base/parts") {
		had[name] = true
	}
	var last Progress
	m := f.backUp(Options{Progress: func(p Progress) { last = p }})
	again := uint64(0)
	for i := range m.Parts {
		if had[m.Parts[i].SHA256] {
			again++
		}
	}
	if last.PartsKept != again || last.PartsSent+again != uint64(len(m.Parts)+len(m.Table)) || len(had) != 3 {
		t.Fatalf("%d parts existed, %d of %d were the same: %d were sent, %d were not", len(had), again, len(m.Parts), last.PartsSent, last.PartsKept)
	}
	f.mustRestore(m)
}

// Something before a target repeats each creation, and returns the answer to the second one: that the object exists.
func TestABackupBehindAProxyThatRepeatsRequestsSucceeds(t *testing.T) {
	f := newFixture(t)
	f.write(200)
	f.target.Inject(objectstore.Fault{Op: objectstore.OpCreate, Kind: objectstore.CreateTwice})
	f.mustRestore(f.backUp(Options{PartBytes: 8 << 10}))
	l, err := takeLease(t.Context(), f.target, f.dir, jobBackup, "renewed", leaseTimes{renew: time.Millisecond}.withDefaults())
	check(t, err)
	ctx, cancel := context.WithCancelCause(t.Context())
	first := l.name()
	l.keep(ctx, cancel)
	for ; slices.Contains(f.objects(jobsDir), path.Base(first)); time.Sleep(time.Millisecond) {
		check(t, context.Cause(ctx))
	}
	cancel(nil)
	l.release()
}

// What a target does wrong is never a backup that cannot be restored.
func TestFaultsOfATargetLeaveNoBackupThatDoesNotRestore(t *testing.T) {
	for name, fault := range map[string]objectstore.Fault{
		"says that a part exists": {Op: objectstore.OpCreate, Prefix: "base/parts", Kind: objectstore.FailExists, Nth: 2},
		"loses the answer":        {Op: objectstore.OpCreate, Prefix: "base/parts", Kind: objectstore.FailAfter, Nth: 2},
		"fails midway":            {Op: objectstore.OpCreate, Prefix: "base/parts", Kind: objectstore.FailForGood, Nth: 3},
		"refuses the manifest":    {Op: objectstore.OpCreate, Prefix: "base/manifests", Kind: objectstore.FailForGood},
		"lists bases late":        {Prefix: "base/manifests", Kind: objectstore.ListLate},
		"lists jobs late":         {Prefix: "base/jobs", Kind: objectstore.ListLate},
		"refuses a lease":         {Op: objectstore.OpCreate, Prefix: "base/jobs", Kind: objectstore.FailForGood},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.write(200)
			first := f.backUp(Options{PartBytes: 8 << 10})
			f.write(200)
			check(t, f.store.Checkpoint(context.Background()))
			fault.Prefix = f.dir + "/" + fault.Prefix
			f.target.Inject(fault)
			m, err := f.tryBackUp(Options{Base: LatestBase, PartBytes: 8 << 10})
			f.target.Heal()
			all, broken, listing := List(t.Context(), f.target, f.dir)
			check(t, listing)
			if len(broken) > 0 || (err == nil) != (len(all) == 2) {
				t.Fatalf("error %v, %d backups, %v", err, len(all), broken)
			}
			f.mustRestore(first)
			if err == nil {
				f.mustRestore(m)
			}
			f.mustRestore(f.backUp(Options{Base: LatestBase, PartBytes: 8 << 10}))
		})
	}
}

// A target that fails is the error of the backup, wherever the reader of pages is then, and not that something was cancelled: a cancelled
// backup is no failure that an operator has to look at.
func TestTargetThatFailsIsNamed(t *testing.T) {
	f := newFixture(t)
	f.write(600)
	check(t, f.store.Checkpoint(t.Context()))
	for n := range 30 {
		rule := f.target.Inject(objectstore.Fault{Op: objectstore.OpCreate, Prefix: f.dir + "/base/parts", Kind: objectstore.FailForGood, Nth: 1 + n%3, Sticky: true})
		_, err := f.tryBackUp(Options{PartBytes: 1 << 10})
		if err == nil || errors.Is(err, context.Canceled) || f.target.Fired(rule) == 0 {
			t.Fatalf("round %d: %v", n, err)
		}
		f.target.Heal()
	}
}

// asBucket is a target that is not in a directory.
type asBucket struct{ objectstore.Store }

func (asBucket) String() string { return "s3://bucket" }

// TestADamagedPartIsInNoLaterBackup: a part that the target has is read, and sent again if its bytes are not those of its name, as after a power cut
// of a machine that had not written them. Otherwise all later backups of the same pages would have it, and report success.
func TestADamagedPartIsInNoLaterBackup(t *testing.T) {
	f := newFixture(t)
	f.write(300)
	f.checkpoint()
	for _, c := range []struct {
		name   string
		target objectstore.Store
		all    bool
		mends  bool
	}{
		{"directory", f.target, false, true},
		{"bucket, everything is read", asBucket{f.target}, true, true},
		{"bucket", asBucket{f.target}, false, false},
	} {
		old, m := f.backUpOverDamage(c.target, Options{ReadAll: c.all, PartBytes: 16 << 10, lease: quickLease})
		for _, b := range []*Manifest{old, m} {
			_, err := Verify(t.Context(), f.target, b, nil)
			if (err == nil) != c.mends || err != nil && !errors.Is(err, ErrDamaged) {
				t.Fatalf("%s: %v", c.name, err)
			}
		}
		if c.mends {
			f.mustRestore(m)
		}
	}
}

// TestWhatTheDeviceCannotReadIsDamage: an object of a directory hides no other backup, and a part is sent again.
func TestWhatTheDeviceCannotReadIsDamage(t *testing.T) {
	f := newFixture(t)
	f.write(300)
	f.checkpoint()
	old := f.backUp(Options{})
	m := f.backUp(Options{})
	unreadable := func(name string) *objectstore.Fault {
		return f.target.Inject(objectstore.Fault{Op: objectstore.OpRead, Prefix: f.dir + "/" + name, Kind: objectstore.ReadUnreadable})
	}
	unreadable(m.name)
	all, broken, err := List(t.Context(), f.target, f.dir)
	check(t, err)
	if len(all) != 1 || all[0].ID != old.ID || len(broken) != 1 || !errors.Is(broken[0], ErrDamaged) {
		t.Fatalf("%d backups, %v", len(all), broken)
	}
	f.target.Heal()
	for _, part := range []string{m.Parts[0].SHA256, m.Table[0].SHA256} {
		rule := unreadable(partsDir + part)
		_, err = Verify(t.Context(), f.target, m, nil)
		wantError(t, err, ErrDamaged)
		before := f.target.Calls(objectstore.OpDelete)
		made := f.backUp(Options{})
		f.target.Heal()
		if f.target.Fired(rule) < 2 || made.State.Checkpoint == m.State.Checkpoint && f.target.Calls(objectstore.OpDelete) < before+2 { // with that of the lease
			t.Fatal("the part was not replaced")
		}
		f.mustRestore(made)
		f.mustRestore(m)
	}
	lost := *m
	lost.Quarantine = &Quarantine{SHA256: m.Parts[0].SHA256[1:] + "0", Bytes: 10}
	_, err = Verify(t.Context(), f.target, &lost, nil)
	wantError(t, err, ErrDamaged)
}

// backUpOverDamage makes a backup, damages it, and makes another one of the same state.
func (f *fixture) backUpOverDamage(target objectstore.Store, o Options) (old, m *Manifest) {
	f.t.Helper()
	for {
		whole := o
		whole.ReadAll = true // what the one before has left damaged
		old, err := Create(f.t.Context(), f.store, f.target, whole)
		check(f.t, err)
		for _, p := range []Part{old.Parts[0], old.Parts[len(old.Parts)-1], old.Table[0]} {
			name := partName(f.dir, p.SHA256)
			check(f.t, f.target.Delete(f.t.Context(), name))
			check(f.t, f.target.Create(f.t.Context(), name, objectstore.Bytes(make([]byte, p.Bytes))))
		}
		_, err = Verify(f.t.Context(), f.target, old, nil)
		wantError(f.t, err, ErrDamaged)
		m, err := Create(f.t.Context(), f.store, target, o)
		check(f.t, err)
		if m.State.Checkpoint == old.State.Checkpoint { // no checkpoint in the background came between
			return old, m
		}
	}
}
