package restore

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/testseed"
)

// copyOf is a copy of the data directory of a store, which is open before and after. It sees the same objects, with faults of its own.
func (b *bench) copyOf() *bench {
	b.t.Helper()
	b.close()
	dir := filepath.Join(b.t.TempDir(), "copy")
	check(b.t, os.CopyFS(dir, os.DirFS(b.dir)))
	b.open()
	b.connected()
	other := &bench{t: b.t, dir: dir, target: objectstore.NewFaulty(b.target.Store), rng: b.rng, now: map[string]string{}, states: map[keys.Epoch]uint64{}, age: b.age, fileBytes: b.fileBytes, answerWithin: b.answerWithin}
	for key, value := range b.now {
		other.now[key] = value
	}
	b.t.Cleanup(other.close)
	return other
}

// connected waits until the archiver is the owner of the archive.
func (b *bench) connected() {
	b.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !b.arch.Status().Connected; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			b.t.Fatalf("not connected: %+v", b.arch.Status())
		}
	}
}

// notOwner waits until the archiver stops because another process is the owner.
func (b *bench) notOwner(lost bool) {
	b.t.Helper()
	inUse := new(archive.InUseError)
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		s := b.arch.Status()
		if errors.As(s.Err, &inUse) && s.Refused() && inUse.Lost == lost && inUse.Process == os.Getpid() && !inUse.Since.IsZero() {
			return
		}
		if time.Now().After(deadline) {
			b.t.Fatalf("not stopped: %+v", s)
		}
	}
}

// TestSecondOfTwoCopiesThatRunIsRefused: while a store is archived, a copy of it that starts beside it archives nothing, also if both have
// the same records at first. The archive stays that of the first.
func TestSecondOfTwoCopiesThatRunIsRefused(t *testing.T) {
	b := newBench(t)
	b.answerWithin = 2 * time.Second
	b.commits(20)
	b.archived()
	other := b.copyOf()
	other.open()
	other.commits(30)
	b.commits(5)
	other.notOwner(false)
	reason := other.arch.Status().Err.Error()
	other.commits(30)
	b.commits(5)
	b.whole()
	if now := other.arch.Status(); now.Err.Error() != reason || now.Files != 0 || !now.Refused() {
		t.Fatalf("the reason was %q: %+v", reason, now)
	}
	other.close()
	b.commits(5)
	b.whole() // the end of the other one changes nothing
}

// TestOwnerThatDoesNotAnswerStopsWhenItIsBack: a copy takes over from a process whose target does not answer. When it does again, the
// first process archives nothing more, and the archive is that of the copy.
func TestOwnerThatDoesNotAnswerStopsWhenItIsBack(t *testing.T) {
	b := newBench(t)
	b.commits(20)
	b.archived()
	other := b.copyOf()
	back := make(chan struct{})
	b.target.Inject(objectstore.Fault{Kind: objectstore.Slow, Until: back})
	b.commits(5)
	other.open()
	other.commits(20)
	other.archived()
	b.target.Heal()
	close(back)
	b.notOwner(true)
	b.commits(20)
	other.commits(20)
	other.whole()
	_, got, err := other.restore(archive.Target{})
	check(t, err)
	if got != hash(other.now) {
		t.Fatal("the archive is not that of the copy")
	}
}

// TestUploadEndsWithTheOwnership: a file that is being uploaded while its process cannot answer does not arrive after another process has
// become the owner, and its commits do not count as archived.
func TestUploadEndsWithTheOwnership(t *testing.T) {
	b := newBench(t)
	b.commits(20)
	b.archived()
	other := b.copyOf()
	before, back := b.arch.Status().Archived, make(chan struct{})
	uploads := b.target.Inject(objectstore.Fault{Op: objectstore.OpCreate, Prefix: b.lineage().String() + "/log/", Kind: objectstore.Slow, Until: back})
	b.commits(5)
	for b.target.Fired(uploads) == 0 {
		time.Sleep(time.Millisecond)
	}
	b.target.Inject(objectstore.Fault{Kind: objectstore.Slow, Until: back})
	other.open()
	other.commits(20)
	other.archived()
	b.target.Heal()
	close(back)
	b.notOwner(true)
	if now := b.arch.Status().Archived; now != before {
		t.Errorf("archived up to epoch %d instead of %d", now, before)
	}
	other.whole()
	_, got, err := other.restore(archive.Target{})
	check(t, err)
	if got != hash(other.now) {
		t.Fatal("the archive is not that of the copy")
	}
}

// TestRestartAndMoveGoOnAtOnce: a store that was closed is archived again without waiting, also from another directory.
func TestRestartAndMoveGoOnAtOnce(t *testing.T) {
	b := newBench(t)
	b.close()
	b.answerWithin = time.Hour
	b.open()
	for range 3 {
		b.commits(10)
		b.archived()
		b.close()
		moved := filepath.Join(t.TempDir(), "moved")
		check(t, os.Rename(b.dir, moved))
		b.dir = moved
		b.open()
	}
	b.commits(10)
	b.whole()
}

// TestKilledStoreIsArchivedAgain: a process that could not say that it ends is replaced after the time that it had for an answer.
func TestKilledStoreIsArchivedAgain(t *testing.T) {
	b := newBench(t)
	for range 3 {
		b.commits(10)
		b.archived()
		rule := b.target.Inject(objectstore.Fault{Op: objectstore.OpCreate, Prefix: b.lineage().String() + "/owners/"})
		b.close()
		if b.target.Fired(rule) == 0 {
			t.Fatal("nothing says that the process ends")
		}
		b.target.Heal()
		b.open()
	}
	b.commits(10)
	b.whole()
}

// forked makes an archive with the files of two copies, as they were archived before there were owners, and returns the copies and the
// last epoch that they have in common.
func forked(t *testing.T) (b, other *bench, common keys.Epoch) {
	b = newBench(t)
	b.close()
	b.fileBytes = 1 << 20 // a file has all commits that there are when the archiver starts
	b.open()
	b.commits(20)
	b.archived()
	apart, err := objectstore.Open("file://"+t.TempDir(), objectstore.Options{})
	check(t, err)
	other = b.copyOf()
	common = b.arch.Status().Archived
	check(t, b.target.List(t.Context(), b.lineage().String()+"/log/", func(o objectstore.Object) error { return copyObject(b.target, apart, o.Name, t) }))
	other.target = objectstore.NewFaulty(apart)
	other.open()
	for range 4 {
		for n, one := range map[int]*bench{7: b, 5: other} { // so that their files have other epochs
			one.stop()
			one.commits(n)
			one.archive()
			one.archived()
		}
	}
	other.stop()
	for _, name := range other.objects() {
		if err := copyObject(apart, b.target, name, t); err != nil && (!errors.Is(err, objectstore.ErrExists) || path.Base(name) > archive.FileName(common+1, 0)) {
			t.Fatal(err)
		}
	}
	return b, other, common
}

func copyObject(from, to objectstore.Store, name string, t *testing.T) error {
	r, err := from.Read(t.Context(), name, 0, -1)
	check(t, err)
	data, err := io.ReadAll(r)
	check(t, errors.Join(err, r.Close()))
	return to.Create(t.Context(), name, objectstore.Bytes(data))
}

// ends is the newest file of a store.
func (b *bench) ends(last keys.Epoch) string {
	names := b.objects()
	return path.Base(names[slices.IndexFunc(names, func(n string) bool { return strings.HasSuffix(n, fmt.Sprintf("-%016x.elog", last)) })])
}

// TestForkedArchiveIsRestoredByNameOnly: of an archive with the commits of two copies, states before they parted are restored as usual. A
// later one is refused, and the message names both histories; with the name of one, its state is restored, and never a mixture.
func TestForkedArchiveIsRestoredByNameOnly(t *testing.T) {
	testseed.SkipUnderRace(t)
	b, other, common := forked(t)
	if _, got, err := b.restore(archive.Target{Epoch: common}); err != nil || got != b.state(common) {
		t.Fatalf("before the fork: %v", err)
	}
	ends := [2]string{b.ends(b.arch.Status().Archived), b.ends(other.arch.Status().Archived)}
	for _, target := range []archive.Target{{}, {Epoch: common + 1}, {Epoch: common + 15}, {Time: time.Now()}} {
		fork := new(archive.ForkError)
		_, _, err := b.restore(target)
		if !errors.As(err, &fork) || !Unreachable(err) || fork.Epoch != common+1 {
			t.Fatalf("%v: %v", &target, err)
		}
		for _, way := range fork.Ways {
			if !slices.Contains(ends[:], way.File) {
				t.Fatalf("%v: %s is no end of %v", &target, way.File, ends)
			}
		}
	}
	for i, one := range []*bench{b, other} {
		for _, target := range []archive.Target{{}, {Epoch: common + 1}, {Epoch: common + 15}} {
			want := hash(one.now)
			if target.Epoch != 0 {
				want = one.state(target.Epoch)
			}
			if got, err := b.restoreHistory(target, ends[i]); err != nil || got != want {
				t.Fatalf("history %d, %v: %v", i, &target, err)
			}
		}
	}
	unknown := new(archive.UnknownFileError)
	if _, err := b.restoreHistory(archive.Target{}, "x.elog"); !errors.As(err, &unknown) {
		t.Fatal(err)
	}
	early := b.times()[3]
	if _, _, err := b.restore(archive.Target{Time: early.at}); err != nil {
		t.Fatalf("a time before the fork: %v", err)
	}
}

// TestBackupOfAnotherCopyIsNoBase: a backup of a copy is not taken for a state of the store that was archived.
func TestBackupOfAnotherCopyIsNoBase(t *testing.T) {
	b := newBench(t)
	b.commits(20)
	b.archived()
	other := b.copyOf()
	other.open()
	other.commits(10)
	m, err := backup.Create(t.Context(), other.store, b.target, backup.Options{})
	check(t, err)
	b.commits(30)
	b.archived()
	last := b.arch.Status().Archived
	wrong := new(archive.BaseError)
	for _, target := range []archive.Target{{}, {Epoch: m.Epoch() + 1}, {Epoch: m.Epoch()}} { // the last one needs no file of the archive
		if _, _, err := b.restore(target); !errors.As(err, &wrong) || !Unreachable(err) {
			t.Fatalf("%v: %v", &target, err)
		}
		want := hash(b.now)
		if target.Epoch != 0 {
			want = b.state(target.Epoch)
		}
		if got, err := b.restoreHistory(target, b.ends(last)); err != nil || got != want {
			t.Fatalf("%v of the history: %v", &target, err)
		}
	}
	_, err = backup.Create(t.Context(), b.store, b.target, backup.Options{})
	check(t, err)
	b.commits(5)
	b.archived()
	if _, got, err := b.restore(archive.Target{}); err != nil || got != hash(b.now) {
		t.Fatalf("from a backup of the archived store: %v", err)
	}
}

// TestBackupOfAnotherCopyAfterTheArchiveIsNoBase: the archive has no record to compare it with, but later commits before it.
func TestBackupOfAnotherCopyAfterTheArchiveIsNoBase(t *testing.T) {
	b := newBench(t)
	b.commits(20)
	b.archived()
	other := b.copyOf()
	other.answerWithin = time.Hour
	other.open()
	other.commits(30)
	m, err := backup.Create(t.Context(), other.store, b.target, backup.Options{})
	check(t, err)
	b.commits(5)
	b.archived()
	last, wrong := b.arch.Status().Archived, new(archive.BaseError)
	if last >= m.Epoch() {
		t.Fatalf("the archive has epoch %d, and the backup is of epoch %d", last, m.Epoch())
	}
	for _, target := range []archive.Target{{}, {Epoch: m.Epoch()}} {
		if _, _, err := b.restore(target); !errors.As(err, &wrong) || !Unreachable(err) {
			t.Fatalf("%v: %v", &target, err)
		}
	}
	if got, err := b.restoreHistory(archive.Target{}, b.ends(last)); err != nil || got != hash(b.now) {
		t.Fatal(err)
	}
}

// restoreHistory restores a state of the history that ends with a file.
func (b *bench) restoreHistory(target archive.Target, file string) (uint64, error) {
	b.t.Helper()
	b.named = file
	defer func() { b.named = "" }()
	_, got, err := b.restore(target)
	return got, err
}

// TestOwnerThatIsIdleNoticesThatItHasLostTheArchive: without a file to upload, too.
func TestOwnerThatIsIdleNoticesThatItHasLostTheArchive(t *testing.T) {
	b := newBench(t)
	b.commits(3)
	b.archived()
	b.connected()
	another := fmt.Sprintf(`{"format":1,"session":"another","host":"elsewhere","process":%d,"since":"2026-01-02T03:04:05Z"}`, os.Getpid())
	for _, name := range []string{"0000000000000002", "0000000000000002-asked"} {
		check(t, b.target.Create(t.Context(), b.lineage().String()+"/owners/"+name, objectstore.Bytes(another)))
	}
	b.notOwner(true)
	if o := b.arch.Status().Owner; o == nil || o.Self || o.Host != "elsewhere" {
		t.Fatalf("the owner is %+v", o)
	}
}
