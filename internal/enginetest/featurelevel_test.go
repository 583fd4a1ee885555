package enginetest

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"os"
	"path"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/vfs"
)

// level1PageSize is the page size of the store in testdata/feature-level-1.tar.gz, which commit 46f30c2 has written and a
// kill -9 has ended: 201 keys in a checkpoint, one of them a blob, and afterwards seven commits that only the log has.
const level1PageSize = 4096

// level1Store is that store.
func level1Store(t *testing.T) (*vfs.Mem, map[string]string) {
	t.Helper()
	f, err := os.Open("testdata/feature-level-1.tar.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	unzipped, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	fs := vfs.NewMem()
	files := tar.NewReader(unzipped)
	for {
		header, err := files.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		name := path.Join("db", header.Name)
		if header.Typeflag == tar.TypeDir {
			err = fs.MkdirAll(name)
		} else {
			err = copyInto(fs, name, files)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	want := map[string]string{"tree/blob": strings.Repeat("B", 20000)}
	for i := range 200 {
		want[fmt.Sprintf("tree/%03d", i)] = fmt.Sprintf("value %d", i)
	}
	for i := range 5 {
		want[fmt.Sprintf("log/%d", i+1)] = fmt.Sprintf("late %d", i+1)
	}
	delete(want, "tree/007")
	want["tree/008"] = "changed"
	return fs, want
}

func copyInto(fs vfs.FS, name string, from io.Reader) error {
	contents, err := io.ReadAll(from)
	if err != nil {
		return err
	}
	_ = fs.Remove(name)
	to, err := fs.Open(name, vfs.Create)
	if err != nil {
		return err
	}
	_, err = to.WriteAt(contents, 0)
	return errors.Join(err, to.Sync(), to.Close(), fs.SyncDir(path.Dir(name)))
}

func level1Options(fs vfs.FS) mvcc.Options {
	o := tiny(fs)
	o.Storage.PageSize = level1PageSize
	return o
}

// use writes through every path: commits of all sizes, rotations, checkpoints, deletions, a bulk load.
func use(t *testing.T, s *mvcc.Store, tag string, want map[string]string) {
	t.Helper()
	for i := range 300 {
		key, value := fmt.Sprintf("%s/%03d", tag, i), strings.Repeat(tag, 1+i%200)
		mustPut(t, s, key, value)
		want[key] = value
	}
	x := mustSession(t, s)
	defer x.Close()
	w := mvcc.Write{Durability: mvcc.DurabilitySync}
	w.Delete([]byte("tree/001"))
	if _, err := commitAndWait(x, &w); err != nil {
		t.Fatal(err)
	}
	delete(want, "tree/001")
	loaded := map[string]string{tag + "/bulk": "loaded", tag + "/bulk2": strings.Repeat("L", 9000)}
	mustLoad(t, s, loaded)
	maps.Copy(want, loaded)
	if err := s.Checkpoint(context.Background()); err != nil {
		t.Fatal(err)
	}
	mustPut(t, s, tag+"/last", "in the log only")
	want[tag+"/last"] = "in the log only"
}

// TestStoreOfLevel1StaysInItsFormats: a store of an earlier version keeps its formats, so that the earlier version can open
// it again, until the upgrade is finalized.
func TestStoreOfLevel1StaysInItsFormats(t *testing.T) {
	fs, want := level1Store(t)
	for run := range 3 {
		s := mustOpen(t, level1Options(fs))
		mustHold(t, s, want)
		if s.FeatureLevel() != keys.FeatureLevelOldest || s.History() != (storage.History{}) {
			t.Fatalf("level %d, %+v", s.FeatureLevel(), s.History())
		}
		use(t, s, fmt.Sprintf("run-%d", run), want)
		mustHold(t, s, want)
		if run == 1 {
			fs = fs.Crash(7, vfs.SurviveSome)
			_ = s.Close()
		} else {
			mustClose(t, s)
		}
		wantLevel1Formats(t, fs)
	}

	s := mustOpen(t, level1Options(fs))
	if before, err := s.FinalizeUpgrade(context.Background()); err != nil || before != keys.FeatureLevelOldest {
		t.Fatal(before, err)
	}
	named := s.History()
	if s.FeatureLevel() != keys.FeatureLevelNewest || named.Lineage == (keys.Lineage{}) {
		t.Fatalf("level %d, %+v", s.FeatureLevel(), named)
	}
	if before, err := s.FinalizeUpgrade(context.Background()); err != nil || before != keys.FeatureLevelNewest {
		t.Fatal("finalized twice: ", before, err)
	}
	use(t, s, "finalized", want)
	if s.History().CommitTime.IsZero() {
		t.Fatal("the checkpoint has no commit time")
	}
	fs = fs.Crash(7, vfs.SurviveSome)
	_ = s.Close()
	s = mustOpen(t, level1Options(fs))
	mustHold(t, s, want)
	if s.FeatureLevel() != keys.FeatureLevelNewest || s.History().Lineage != named.Lineage {
		t.Fatalf("level %d, %+v after a crash", s.FeatureLevel(), s.History())
	}
	mustClose(t, s)
	for id := range 2 {
		if v := binary.LittleEndian.Uint32(readFile(t, fs, "db/data.ekv")[id*level1PageSize+40:]); v != 5 {
			t.Fatalf("superblock %d has format %d", id, v)
		}
	}
}

// wantLevel1Formats reads the files by the rules of docs/formats.md at commit 46f30c2, which refuse everything newer.
func wantLevel1Formats(t *testing.T, fs vfs.FS) {
	t.Helper()
	le, castagnoli := binary.LittleEndian, crc32.MakeTable(crc32.Castagnoli)
	data := readFile(t, fs, "db/data.ekv")
	for id := range 2 {
		sb := data[id*level1PageSize : (id+1)*level1PageSize]
		if le.Uint32(sb) != crc32.Checksum(sb[4:], castagnoli) {
			continue // torn by the crash
		}
		if v := le.Uint32(sb[40:]); v != 4 {
			t.Errorf("superblock %d has format %d", id, v)
		}
		if area := sb[168:296]; !allZeros(area[25:64]) || !allZeros(area[80:]) || !allZeros(sb[312:]) {
			t.Errorf("superblock %d: reserved bytes are set", id)
		}
	}
	names, err := fs.List("db/wal")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if !strings.HasSuffix(name, ".log") {
			continue
		}
		log := readFile(t, fs, "db/wal/"+name)
		if len(log) < 64 || allZeros(log[:64]) {
			continue
		}
		if le.Uint32(log[60:]) != crc32.Checksum(log[:60], castagnoli) || le.Uint32(log[8:]) != 1 || !allZeros(log[40:60]) {
			t.Errorf("%s: header % x", name, log[:64])
		}
		seed := le.Uint32(log[16:]) ^ le.Uint32(log[20:])
		for at := 4096; at+24 <= len(log); {
			length := int(le.Uint32(log[at+4:]))
			space := (length + 7) &^ 7
			if length < 24 || at+space > len(log) || crc32.Update(seed^uint32(length)*0x9E3779B1, castagnoli, log[at+8:at+space]) != le.Uint32(log[at:]) {
				break
			}
			if flags := log[at+15]; flags != 0 && flags != 1 && flags != 2 && flags != 32 {
				t.Errorf("%s at %d: flags %d", name, at, flags)
			} else if body := log[at+24 : at+length]; flags == 0 && (len(body) < 8 || le.Uint32(body[4:]) != 0) {
				t.Errorf("%s at %d: the body has flags", name, at)
			}
			at += space
		}
	}
}

func allZeros(b []byte) bool { return len(bytes.Trim(b, "\x00")) == 0 }

// TestFinalizeIsAtomic crashes at each operation of FinalizeUpgrade: the store opens at one of the two levels, with
// everything, and can be raised.
func TestFinalizeIsAtomic(t *testing.T) {
	build := func() (*vfs.Mem, *mvcc.Store) {
		fs := vfs.NewMem()
		o := tiny(fs)
		o.Storage.FeatureLevel = keys.FeatureLevelOldest
		s, err := mvcc.Open(o)
		if err != nil {
			t.Fatal(err)
		}
		mustPut(t, s, "a", "1")
		return fs, s
	}
	fs, s := build()
	before := fs.Mutations()
	if _, err := s.FinalizeUpgrade(context.Background()); err != nil {
		t.Fatal(err)
	}
	operations := fs.Mutations() - before + 2
	mustClose(t, s)
	levels := map[keys.FeatureLevel]int{}
	for k := range operations {
		fs, s := build()
		fs.CrashAt(fs.Mutations() + 1 + k)
		_, err := s.FinalizeUpgrade(context.Background())
		crashed := fs.Crash(uint64(k), vfs.Survival(k%3))
		_ = s.Close()
		s = mustOpen(t, tiny(crashed))
		levels[s.FeatureLevel()]++
		if err == nil && s.FeatureLevel() != keys.FeatureLevelNewest {
			t.Fatalf("operation %d: finalized, and at level %d after a crash", k, s.FeatureLevel())
		}
		if _, err := s.FinalizeUpgrade(context.Background()); err != nil {
			t.Fatal(err)
		}
		mustPut(t, s, "b", "2")
		mustHold(t, s, map[string]string{"a": "1", "b": "2"})
		mustClose(t, s)
		reopened := mustOpen(t, tiny(crashed))
		mustHold(t, reopened, map[string]string{"a": "1", "b": "2"})
		mustClose(t, reopened)
	}
	if len(levels) != 2 {
		t.Fatalf("levels after crashes: %v", levels)
	}
}

// TestFinalizeWhoseSyncFailedSurvivesACrash: a sync of the upgrade fails, the next process finds the new level in the kernel's memory, and
// acknowledges a write, and then the machine crashes. The log must not have a lineage that the data file has lost.
func TestFinalizeWhoseSyncFailedSurvivesACrash(t *testing.T) {
	for nth := 1; ; nth++ {
		mem := vfs.NewMem()
		faulty := vfs.NewFaulty(mem)
		o := tiny(faulty)
		o.Storage.FeatureLevel = keys.FeatureLevelOldest
		s, err := mvcc.Open(o)
		if err != nil {
			t.Fatal(err)
		}
		mustPut(t, s, "a", "1")
		rule := faulty.Inject(vfs.Rule{Op: vfs.OpSync | vfs.OpSyncData, Name: "data.ekv", Nth: nth, Fault: vfs.DiscardDirty})
		_, _ = s.FinalizeUpgrade(context.Background())
		again := mem.Crash(0, vfs.SurviveProcess)
		met := rule.Fired() > 0
		_ = s.Close() // it may have failed
		if s, err = mvcc.Open(tiny(again)); err != nil {
			t.Fatalf("sync %d: %v", nth, err)
		}
		level := s.FeatureLevel()
		mustPut(t, s, "b", "2")
		crashed := again.Crash(1, vfs.SurviveNone)
		_ = s.Close() // it has crashed
		s = mustOpen(t, tiny(crashed))
		mustHold(t, s, map[string]string{"a": "1", "b": "2"})
		if s.FeatureLevel() != level {
			t.Errorf("sync %d: level %d, and before the crash %d", nth, s.FeatureLevel(), level)
		}
		mustClose(t, s)
		if !met {
			if nth < 4 {
				t.Errorf("%d syncs: this tests nothing", nth-1)
			}
			return
		}
	}
}

// TestEitherSuperblockKnowsTheLineage: after a finalized upgrade the log is readable although the newest superblock and its copy
// are damaged.
func TestEitherSuperblockKnowsTheLineage(t *testing.T) {
	fs := vfs.NewMem()
	o := tiny(fs)
	o.Storage.FeatureLevel, o.Storage.CheckpointBytes = keys.FeatureLevelOldest, 64<<20 // no checkpoint truncates the log
	s := mustOpen(t, o)
	mustPut(t, s, "a", "1")
	if _, err := s.FinalizeUpgrade(context.Background()); err != nil {
		t.Fatal(err)
	}
	x := mustSession(t, s) // the next segment has the lineage
	putMany(t, x, 3000, func(w *mvcc.Write, key []byte) { w.Set(key, bytes.Repeat([]byte("v"), 20)) })
	x.Close()
	fs = fs.Crash(1, vfs.SurviveAll)
	_ = s.Close()
	data := readFile(t, fs, "db/data.ekv")
	slot := int64(0)
	if binary.LittleEndian.Uint64(data[8192+16:]) > binary.LittleEndian.Uint64(data[16:]) {
		slot = 8192
	}
	own := int64(binary.LittleEndian.Uint64(data[slot+296:])) * 8192
	flip(t, fs, slot+100)
	flip(t, fs, own+100)
	s = mustOpen(t, tiny(fs))
	if got := get(t, s, "a", 0); got != "1" {
		t.Fatal(got)
	}
}

// TestLogOfAnotherStoreIsRefusedByName: a new store is at the newest level, and no two stores have one lineage.
func TestLogOfAnotherStoreIsRefusedByName(t *testing.T) {
	var stores [2]*vfs.Mem
	var lineages [2]keys.Lineage
	for i := range stores {
		stores[i] = vfs.NewMem()
		s := mustOpenUnchecked(t, tiny(stores[i]))
		mustPut(t, s, "a", fmt.Sprint(i))
		if lineages[i] = s.History().Lineage; s.FeatureLevel() != keys.FeatureLevelNewest {
			t.Fatalf("level %d", s.FeatureLevel())
		}
		mustClose(t, s)
	}
	if lineages[0] == lineages[1] {
		t.Fatal("two stores have one lineage")
	}
	const name = "db/wal/0000000000000001.log"
	log := readFile(t, stores[1], name)
	if err := stores[0].Remove(name); err != nil {
		t.Fatal(err)
	}
	const foreign = "db/wal/0000000000000099.log"
	binary.LittleEndian.PutUint64(log[24:], 0x99)
	binary.LittleEndian.PutUint32(log[60:], crc32.Checksum(log[:60], crc32.MakeTable(crc32.Castagnoli)))
	if err := copyInto(stores[0], foreign, bytes.NewReader(log)); err != nil {
		t.Fatal(err)
	}
	var refused *storage.CorruptionError
	if _, err := mvcc.Open(tiny(stores[0])); !errors.As(err, &refused) || refused.File != foreign || !strings.Contains(refused.Reason, "another store") {
		t.Fatalf("%v", err)
	}
	report, err := inspect.VerifyDir(context.Background(), stores[0], "db", inspect.VerifyOptions{})
	if err != nil || report.OK() || report.Damages[0].File != foreign {
		t.Fatalf("%+v, %v", report, err)
	}
}

// TestNewerLevelIsRefused: wherever the level is read.
func TestNewerLevelIsRefused(t *testing.T) {
	t.Run("superblock", func(t *testing.T) {
		fs := vfs.NewMem()
		s := mustOpenUnchecked(t, tiny(fs))
		mustPut(t, s, "a", "1")
		mustClose(t, s)
		data := readFile(t, fs, "db/data.ekv")
		for id := range 2 {
			sb := data[id*8192 : (id+1)*8192]
			sb[168+26] = byte(keys.FeatureLevelNewest + 1)
			sb[168+127] = 1 // what only that level knows
			binary.LittleEndian.PutUint32(sb, crc32.Checksum(sb[4:], crc32.MakeTable(crc32.Castagnoli)))
		}
		if err := copyInto(fs, "db/data.ekv", bytes.NewReader(data)); err != nil {
			t.Fatal(err)
		}
		wantNewer(t, fs)
		if _, err := inspect.VerifyDir(context.Background(), fs, "db", inspect.VerifyOptions{}); !errors.Is(err, storage.ErrNewerFormat) {
			t.Fatalf("verify: %v", err)
		}
	})
	t.Run("record", func(t *testing.T) {
		for _, value := range [][]byte{{3, 0, 0, 0}, {2, 1, 0, 0}, {2}} {
			fs := vfs.NewMem()
			s := mustOpenUnchecked(t, tiny(fs))
			putLevel(t, s, value)
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
			wantNewer(t, fs)
		}
	})
}

// mustOpenUnchecked is mustOpen without a verification at the end: the test makes the files such that it fails.
func mustOpenUnchecked(t *testing.T, o mvcc.Options) *mvcc.Store {
	t.Helper()
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func wantNewer(t *testing.T, fs vfs.FS) {
	t.Helper()
	if _, err := mvcc.Open(tiny(fs)); !errors.Is(err, storage.ErrNewerFormat) {
		t.Fatalf("opened: %v", err)
	}
}

// putLevel writes the record of a level without raising the store.
func putLevel(t *testing.T, s *mvcc.Store, value []byte) {
	t.Helper()
	x := mustSession(t, s)
	defer x.Close()
	w := mvcc.Write{Durability: mvcc.DurabilitySync}
	w.Batch.Set(keys.SpaceSystem, []byte(keys.SystemFeatureLevel), value)
	if _, err := commitAndWait(x, &w); err != nil {
		t.Fatal(err)
	}
}

// TestInterruptedFinalizeIsCompleted: the record is durable, and the data file did not get the level.
func TestInterruptedFinalizeIsCompleted(t *testing.T) {
	fs := vfs.NewMem()
	o := tiny(fs)
	o.Storage.FeatureLevel = keys.FeatureLevelOldest
	s := mustOpen(t, o)
	putLevel(t, s, keys.AppendFeatureLevel(nil, keys.FeatureLevelNewest))
	mustClose(t, s)
	s = mustOpen(t, tiny(fs))
	if s.FeatureLevel() != keys.FeatureLevelNewest || s.History().Lineage == (keys.Lineage{}) {
		t.Fatalf("level %d, %+v", s.FeatureLevel(), s.History())
	}
	if all := dump(t, s); len(all) != 0 {
		t.Fatalf("clients see system records: %v", all)
	}
}
