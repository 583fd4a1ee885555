package backup

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/objectstore"
)

// TestTheNewestBackupIsNotTheOneBeforeAManifestThatCannotBeRead: a verification of the newest one, for instance, would take it for that. An older
// manifest that cannot be read hides nothing.
func TestTheNewestBackupIsNotTheOneBeforeAManifestThatCannotBeRead(t *testing.T) {
	f := newFixture(t)
	f.write(100)
	old := f.backUp(Options{})
	f.write(10)
	m := f.backUp(Options{})
	name := f.dir + "/" + m.name
	whole, err := readObject(t.Context(), f.target, name)
	check(t, err)
	replace := func(content []byte) {
		t.Helper()
		check(t, f.target.Delete(t.Context(), name))
		check(t, f.target.Create(t.Context(), name, objectstore.Bytes(content)))
	}
	replace(bytes.Replace(whole, []byte(`"program"`), []byte(`"prOgram"`), 1))
	if _, err := Newest(t.Context(), f.target, f.dir); !errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), m.ID+" is newer than "+old.ID) {
		t.Errorf("the newest manifest is damaged: %v", err)
	}
	if _, broken, err := List(t.Context(), f.target, f.dir); err != nil || len(broken) != 1 || broken[0].ID != m.ID || !broken[0].Known || broken[0].Epoch != m.Epoch() {
		t.Errorf("the list has %+v, %v", broken, err)
	}
	replace(whole)
	for id, newer := range map[string]bool{"20200101T000000Z-00000000": false, "21000101T000000Z-00000000": true} {
		check(t, f.target.Create(t.Context(), f.dir+"/"+manifestsDir+id+"."+strings.Repeat("0", 64), objectstore.Bytes("damage")))
		newest, err := Newest(t.Context(), f.target, f.dir)
		if newer && (!errors.Is(err, ErrDamaged) || !strings.Contains(err.Error(), id)) || !newer && (err != nil || newest.ID != m.ID) {
			t.Errorf("%s cannot be read: the newest is %+v, %v", id, newest, err)
		}
		check(t, f.target.Delete(t.Context(), f.dir+"/"+manifestsDir+id+"."+strings.Repeat("0", 64)))
	}
}

// TestNoCommitOfABackupIsAfterItsID, also if the wall clock was set back since.
func TestNoCommitOfABackupIsAfterItsID(t *testing.T) {
	wall := time.Date(2026, 12, 1, 6, 0, 0, 0, time.UTC)
	for _, newest := range []time.Time{{}, wall.Add(-time.Hour), wall.Add(time.Hour)} {
		begun, ok := Begun(newID(begunAt(wall, newest)))
		if !ok || begun.Add(time.Second).Before(newest) || begun.Before(wall) {
			t.Errorf("a commit at %v: %v, %v", newest, begun, ok)
		}
	}
}
