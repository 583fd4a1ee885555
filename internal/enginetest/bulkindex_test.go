package enginetest

import (
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// longKeyOptions are those of a store with the longest keys: few entries give the run of a bulk load an index of several levels.
func longKeyOptions(fs vfs.FS) mvcc.Options {
	o := tiny(fs)
	o.Storage.PageSize, o.SyncInterval = 64<<10, time.Hour
	return o
}

// longKeyLoad is a bulk load of 40 keys of 16 KiB, ten blocks of the run; every fourth value is large.
func longKeyLoad() map[string]string {
	entries := map[string]string{}
	for i := range 40 {
		entries[fmt.Sprintf("%06d%s", i*7%40, strings.Repeat("k", 16<<10-10))] = strings.Repeat("v", 1+i%4/3*20_000)
	}
	return entries
}

// longKeyStore has the files of a closed store with one of these keys and another key.
func longKeyStore(t *testing.T) (files image, before map[string]string) {
	t.Helper()
	o := longKeyOptions(vfs.NewMem())
	s := mustReopen(t, o)
	before = map[string]string{"other": "before"}
	for key := range longKeyLoad() {
		if strings.HasPrefix(key, "000003") {
			before[key] = "before"
		}
	}
	for key, value := range before {
		mustPut(t, s, key, value)
	}
	mustClose(t, s)
	return mustRead(t, o.Storage.FS), before
}

// temporary lists the files of a bulk load's sort that are in the directory of the store.
func temporary(t *testing.T, fs vfs.FS) (found []string) {
	t.Helper()
	names, err := fs.List("db")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if strings.HasSuffix(name, ".tmp") {
			found = append(found, name)
		}
	}
	return found
}

// mustBeOneOf checks that a store has all of the bulk load or nothing, and reports which.
func mustBeOneOf(t *testing.T, s *mvcc.Store, before, after map[string]string, what string) (loaded bool) {
	t.Helper()
	got := dump(t, s)
	if loaded = maps.Equal(got, after); !loaded && !maps.Equal(got, before) {
		t.Fatalf("%s: the store has %d keys, neither the %d before the bulk load nor the %d after it", what, len(got), len(before), len(after))
	}
	return loaded
}

// TestBulkLoadWithAnIndexSurvivesACrashAtEveryOperation cuts the power at each operation of a bulk load whose run has an index of
// several levels. The load is there as a whole or not at all, it is there if it was acknowledged, and no temporary file stays.
func TestBulkLoadWithAnIndexSurvivesACrashAtEveryOperation(t *testing.T) {
	files, before := longKeyStore(t)
	entries := longKeyLoad()
	after := maps.Clone(before)
	maps.Copy(after, entries)
	none, all, left := 0, 0, 0
	for k := int64(1); ; k += thinned {
		fs := files.files(t)
		s := mustReopen(t, longKeyOptions(fs))
		fs.CrashAt(fs.Mutations() + k)
		_, err := load(s, entries)
		crashed := fs.Crashed()
		if err != nil && !crashed {
			t.Fatalf("operation %d: %v", k, err)
		}
		disk := fs.Crash(uint64(k), []vfs.Survival{vfs.SurviveNone, vfs.SurviveSome, vfs.SurviveAll}[k%3])
		_ = s.Close() // on a disk that is gone
		left += len(temporary(t, disk))
		again := mustReopen(t, longKeyOptions(disk))
		what := fmt.Sprintf("crash at operation %d", k)
		loaded := mustBeOneOf(t, again, before, after, what)
		if err == nil && !loaded {
			t.Fatalf("%s: the bulk load was acknowledged, and is lost", what)
		}
		if files := temporary(t, disk); len(files) > 0 {
			t.Fatalf("%s: after the start there are still %v", what, files)
		}
		mustClose(t, again)
		if all++; !loaded {
			none++
		}
		if !crashed {
			break
		}
	}
	if none < 10/thinned || none == all || left == 0 {
		t.Errorf("%d of %d crashes before the commit, %d temporary files left: this tests too little", none, all, left)
	}
}

// TestBulkLoadWithAnIndexOnAFullDisk fills the disk at each write of a bulk load whose run has an index of several levels. The load
// is refused and changes nothing, its temporary files are removed, and with space again the same load succeeds.
func TestBulkLoadWithAnIndexOnAFullDisk(t *testing.T) {
	testseed.SkipUnderRace(t)
	files, before := longKeyStore(t)
	entries := longKeyLoad()
	after := maps.Clone(before)
	maps.Copy(after, entries)
	refused := 0
	for nth := 1; ; nth++ {
		disk := files.files(t)
		faulty := vfs.NewFaulty(disk)
		s := mustReopen(t, longKeyOptions(faulty))
		rule := faulty.Inject(vfs.Rule{Op: vfs.OpWrite | vfs.OpPreallocate, Nth: nth, Err: vfs.ErrNoSpace})
		_, err := load(s, entries)
		fired := rule.Fired() > 0
		rule.Remove()
		what := fmt.Sprintf("full at write %d", nth)
		if names := temporary(t, disk); len(names) > 0 {
			t.Fatalf("%s: %v stay", what, names)
		}
		switch {
		case err == nil:
			mustBeOneOf(t, s, after, after, what)
		case errors.Is(err, pager.ErrFailed) || s.Err() != nil: // of the superblock: the outcome is known after the next start
			_ = s.Close()
			s = mustReopen(t, longKeyOptions(disk))
			mustBeOneOf(t, s, before, after, what)
		case !errors.Is(err, vfs.ErrNoSpace):
			t.Fatalf("%s: %v", what, err)
		default:
			refused++
			mustBeOneOf(t, s, before, before, what)
			mustLoad(t, s, entries)
			mustBeOneOf(t, s, after, after, what)
		}
		mustClose(t, s)
		if !fired {
			break
		}
	}
	if refused < 5 {
		t.Errorf("%d bulk loads were refused: this tests too little", refused)
	}
}
