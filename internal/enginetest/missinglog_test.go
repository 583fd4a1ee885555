package enginetest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestARemovedLogFileIsMissed: one log file of a store is removed, or all, after a clean end or a
// kill, before or after a checkpoint. The store opens with everything, if no record in the file is
// needed any more, or it is refused, names a file of the log and a remedy. After the remedy it
// opens, with what was committed up to some epoch and nothing else.
func TestARemovedLogFileIsMissed(t *testing.T) {
	testseed.SkipUnderRace(t)
	for _, clean := range []bool{true, false} {
		for _, puts := range []int{0, 1, 40, 300} {
			for _, checkpoint := range []int{-1, 0, 30, 290} {
				if checkpoint > puts {
					continue
				}
				t.Run(fmt.Sprintf("clean %v, %d puts, checkpoint at %d", clean, puts, checkpoint), func(t *testing.T) {
					files, all := storeWithLog(t, clean, puts, checkpoint)
					logs := slices.Sorted(maps.Keys(files))
					logs = slices.DeleteFunc(logs, func(name string) bool { return !strings.HasSuffix(name, ".log") })
					refused := 0
					for _, name := range logs {
						refused += openWithout(t, files, all, name)
					}
					if n := openWithout(t, files, all, logs...); n == 0 {
						t.Error("all log files are missing, and no error was returned")
					}
					if refused == 0 && puts > 0 {
						t.Errorf("none of %d missing files was detected", len(logs))
					}
				})
			}
		}
	}
}

// storeWithLog is the files of a store with as many puts, each durable, and what the store holds
// after each.
func storeWithLog(t *testing.T, clean bool, puts, checkpoint int) (image, []map[string]string) {
	t.Helper()
	fs := vfs.NewMem()
	o := tiny(fs)
	o.Storage.CheckpointBytes = 1 << 40
	s := mustOpen(t, o)
	state := map[string]string{}
	all := []map[string]string{maps.Clone(state)}
	for i := range puts + 1 {
		if i == checkpoint {
			if err := s.Checkpoint(context.Background()); err != nil {
				t.Fatal(err)
			}
		}
		if i < puts {
			key, value := fmt.Sprintf("key-%02d", i%50), fmt.Sprintf("%d-%s", i, strings.Repeat("x", 1000))
			mustPut(t, s, key, value)
			state[key] = value
			all = append(all, maps.Clone(state))
		}
	}
	if !clean {
		left := fs.Crash(1, vfs.SurviveAll)
		_ = s.Close()
		return mustRead(t, left), all
	}
	mustClose(t, s)
	return mustRead(t, fs), all
}

// openWithout removes files, opens, repairs if that is refused, and returns 1 then.
func openWithout(t *testing.T, files image, all []map[string]string, names ...string) (refused int) {
	t.Helper()
	left := maps.Clone(files)
	for _, name := range names {
		delete(left, name)
	}
	fs := left.files(t)
	o := tiny(fs)
	s, err := mvcc.Open(o)
	if err == nil {
		if err := equalMaps(all[len(all)-1], dump(t, s)); err != nil {
			t.Errorf("without %s: opened without an error, but %v", names, err)
		}
		mustClose(t, s)
		return 0
	}
	damage, ok := errors.AsType[*storage.CorruptionError](err)
	if !ok || !strings.HasSuffix(damage.File, ".log") || damage.Remedy == "" {
		t.Fatalf("without %s: %v", names, err)
	}
	dropped, err := inspect.RepairLog(fs, o.Storage.Dir)
	if err != nil || dropped.Cause == nil || dropped.Cause.File != damage.File {
		t.Fatalf("without %s: repaired %+v, %v", names, dropped, err)
	}
	if s, err = mvcc.Open(o); err != nil {
		t.Fatalf("without %s, after the repair: %v", names, err)
	}
	got := dump(t, s)
	if !slices.ContainsFunc(all, func(state map[string]string) bool { return maps.Equal(state, got) }) {
		t.Errorf("without %s, after the repair: %d keys, which were never the whole content", names, len(got))
	}
	if e := mustPut(t, s, "after", "repair"); int(e) <= len(all)-1 {
		t.Errorf("without %s: epoch %d was assigned again", names, e)
	}
	mustClose(t, s)
	s = mustOpen(t, o)
	if v := get(t, s, "after", 0); v != "repair" {
		t.Errorf("after the repair: %s", v)
	}
	mustClose(t, s)
	return 1
}
