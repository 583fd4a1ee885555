package restore

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
)

// manifest is the object of a manifest.
func (b *bench) manifest(m *backup.Manifest) string {
	return b.lineage().String() + "/base/manifests/" + m.ID + "." + m.SHA256()
}

// newBackup makes a backup after some commits.
func (b *bench) newBackup(commits int, o backup.Options) *backup.Manifest {
	b.t.Helper()
	b.commits(commits)
	m, err := backup.Create(b.t.Context(), b.store, b.target, o)
	check(b.t, err)
	return m
}

// unreadable makes a manifest that cannot be read of a backup that was begun at a time, and returns its id.
func (b *bench) unreadable(begun time.Time) (id string) {
	b.t.Helper()
	id = begun.UTC().Format("20060102T150405Z") + "-00000000"
	name := b.lineage().String() + "/base/manifests/" + id + "." + strings.Repeat("0", 2*sha256.Size)
	check(b.t, b.target.Create(b.t.Context(), name, objectstore.Bytes("damage")))
	return id
}

// flipped is a manifest with one byte changed that is in no value that anything reads.
func flipped(manifest []byte) []byte {
	return bytes.Replace(manifest, []byte(`"program"`), []byte(`"prOgram"`), 1)
}

// latestIsRefused checks that the latest state is refused because of a backup, also by a drill and in a plan, and that what is named in its place can be restored.
func (b *bench) latestIsRefused(what, id string, latest *backup.Manifest) {
	b.t.Helper()
	_, _, err := b.restore(archive.Target{})
	left := new(LeftOutError)
	if !errors.As(err, &left) || !Unreachable(err) || left.Backup != id || !strings.Contains(err.Error(), fmt.Sprintf("--to-epoch %d", latest.Epoch())) {
		b.t.Fatalf("%s: the latest state: %v", what, err)
	}
	if _, err := b.drill(nil); err == nil {
		b.t.Errorf("%s: a drill succeeds", what)
	}
	if r, got, err := b.restore(archive.Target{Epoch: left.Latest.Epoch}); err != nil || got != b.state(latest.Epoch()) || r.Base.ID != latest.ID {
		b.t.Fatalf("%s: the state that was named: %+v, %v", what, r, err)
	}
}

// TestTheLatestStateIsNeverTakenFromAnOlderBackupSilently: the newest backup is damaged, and there is no log archive.
func TestTheLatestStateIsNeverTakenFromAnOlderBackupSilently(t *testing.T) {
	b := newBench(t)
	b.stop()
	older := b.newBackup(10, backup.Options{})
	base := b.newBackup(10, backup.Options{})
	newest := b.newBackup(10, backup.Options{Base: base.ID})
	for _, name := range b.objects() {
		check(t, b.target.Delete(t.Context(), name))
	}
	manifest := b.object(b.manifest(newest))
	for what, damaged := range map[string][]byte{
		"one byte of the manifest is damaged": flipped(manifest), "the manifest is lost": []byte("damage"), "it ends early": manifest[:len(manifest)/2],
		"its superblock is damaged": bytes.Replace(manifest, []byte(`"superblock": "`), []byte(`"superblock": "AAAA`), 1),
	} {
		b.replace(b.manifest(newest), damaged)
		b.latestIsRefused(what, newest.ID, base)
	}
	b.replace(b.manifest(newest), manifest)

	part := b.lineage().String() + "/base/parts/" + newest.Parts[0].SHA256
	content := b.object(part)
	check(t, b.target.Delete(t.Context(), part))
	b.latestIsRefused("a part is missing", newest.ID, base)
	check(t, b.target.Create(t.Context(), part, objectstore.Bytes(content)))

	check(t, b.target.Delete(t.Context(), b.manifest(base)))
	b.latestIsRefused("the manifest of its base is missing", newest.ID, older)
	check(t, b.target.Delete(t.Context(), b.manifest(newest)))

	newer := bytes.Replace(manifest, []byte(`"format": 3`), []byte(`"format": 9`), 1)
	sum := sha256.Sum256(newer)
	name := b.lineage().String() + "/base/manifests/" + newest.ID + "." + hex.EncodeToString(sum[:])
	check(t, b.target.Create(t.Context(), name, objectstore.Bytes(newer)))
	b.latestIsRefused("a newer program has made it", newest.ID, older)
	if _, err := b.drill(nil); !errors.Is(err, backup.ErrNewerFormat) {
		t.Error(err)
	}
}

// TestTheLatestStateIsTakenIfTheArchiveReachesADamagedBackup: then that has nothing that is not restored. Whether it does is known by its epoch or, if that
// cannot be read, by its time.
func TestTheLatestStateIsTakenIfTheArchiveReachesADamagedBackup(t *testing.T) {
	b := newBench(t)
	older := b.newBackup(10, backup.Options{})
	b.archived()
	b.stop() // the archive ends here
	newest := b.newBackup(10, backup.Options{})
	manifest := b.object(b.manifest(newest))
	b.replace(b.manifest(newest), flipped(manifest))
	left, missing := new(LeftOutError), new(archive.MissingError)
	if _, _, err := b.restore(archive.Target{}); !errors.As(err, &left) || left.Epoch != newest.Epoch() || left.Latest.Epoch < older.Epoch() {
		t.Fatalf("the archive ends before the backup: %v", err)
	}
	for _, target := range []archive.Target{{Time: newest.CommitTime()}, {Epoch: newest.Epoch()}} { // nothing proves that a time has no later commit
		if _, _, err := b.restore(target); !errors.As(err, &missing) || !errors.Is(err, backup.ErrDamaged) {
			t.Fatalf("%v: %v", &target, err)
		}
	}
	b.archive()
	b.archived()
	latest := b.arch.Status().Archived
	progress := ""
	o := Options{Store: b.target, Lineage: b.lineage(), PlanOnly: true, Progress: func(p Progress) { progress += p.Step }}
	if r, err := Run(t.Context(), o); err != nil || r.Base.ID != older.ID || r.Reached.Epoch != latest || !strings.Contains(progress, newest.ID) {
		t.Fatalf("the archive reaches the backup: %+v, %v; %s", r, err, progress)
	}
	if _, err := b.drill(nil); !errors.Is(err, backup.ErrDamaged) || !strings.Contains(err.Error(), newest.ID) {
		t.Fatalf("a drill without the newest backup: %v", err)
	}
	b.replace(b.manifest(newest), manifest)
	b.unreadable(time.Now().Add(-time.Hour))
	if _, err := Run(t.Context(), o); err != nil {
		t.Fatalf("an old backup cannot be read: %v", err)
	}
	if _, err := b.drill(nil); err != nil {
		t.Fatalf("an old backup cannot be read: a drill: %v", err)
	}
	id := b.unreadable(time.Now().Add(time.Hour))
	if _, err := Run(t.Context(), o); !errors.As(err, &left) || left.Backup != id || left.Epoch != 0 {
		t.Fatalf("a backup after all commits cannot be read: %v", err)
	}
	if r, got, err := b.restore(archive.Target{Epoch: latest}); err != nil || r.Base.ID != newest.ID || got != hash(b.now) {
		t.Fatalf("the last epoch: %+v, %v", r, err)
	}
}

// TestWhatIsReachedIsLaterThanABackupThatCannotBeRead: by the commit that is reached.
func TestWhatIsReachedIsLaterThanABackupThatCannotBeRead(t *testing.T) {
	const at = "20261122T205800Z-0a1b2c3d"
	begun, ok := backup.Begun(at)
	if !ok || begun.Format(time.RFC3339) != "2026-11-22T20:58:00Z" {
		t.Fatal(begun, ok)
	}
	for _, round := range []struct {
		id      string
		reached time.Duration // time of the last commit, after the backup was begun
		want    bool
	}{
		{at, time.Second, true},
		{at, 999 * time.Millisecond, false}, // the id has only the second
		{at, -time.Hour, false},
		{"name", time.Hour, false},
	} {
		c := choice{plan: &archive.Plan{Last: archive.Point{Epoch: 10, Time: begun.Add(round.reached)}}}
		if got := c.reaches(&leftOut{id: round.id, broken: &backup.ManifestError{ID: round.id}}); got != round.want {
			t.Errorf("%+v: %v", round, got)
		}
	}
	c := choice{plan: &archive.Plan{Last: archive.Point{Epoch: 10}}}
	for epoch, want := range map[keys.Epoch]bool{10: true, 11: false} {
		if got := c.reaches(&leftOut{epoch: epoch}); got != want {
			t.Errorf("epoch %d: %v", epoch, got)
		}
	}
}

// TestAManifestThatCannotBeReadPreventsNoRestore: the archive has everything.
func TestAManifestThatCannotBeReadPreventsNoRestore(t *testing.T) {
	b := newBench(t)
	m := b.newBackup(10, backup.Options{})
	b.commits(10)
	b.archived()
	b.close()
	b.replace(b.manifest(m), flipped(b.object(b.manifest(m))))
	for _, target := range []archive.Target{{}, {Epoch: m.Epoch()}, {Epoch: m.Epoch() - 3}} {
		if r, got, err := b.restore(target); err != nil || r.Base.ID != "" || target.Epoch != 0 && got != b.state(target.Epoch) {
			t.Fatalf("%v: %+v, %v", &target, r, err)
		}
	}
	check(t, b.target.Delete(t.Context(), b.objects()[0]))
	_, err := Run(t.Context(), Options{Store: b.target, Lineage: b.lineage(), Dir: filepath.Join(t.TempDir(), "restored"), Target: archive.Target{Epoch: m.Epoch()}})
	if !errors.Is(err, backup.ErrDamaged) || !strings.Contains(err.Error(), m.ID) {
		t.Fatalf("nothing else leads there: %v", err)
	}
}
