package enginetest

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	iofs "io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/vfs"
)

var damageEvery = flag.Int("damage.every", 97, "distance of the bytes that the damage test changes; 1 for every byte")

// image is the files of a store.
type image map[string][]byte

// mustRead reads until two readings agree: the timeline and the request window write in the
// background, and a log that changes between two files is no state that a crash leaves.
func mustRead(t testing.TB, fs vfs.FS) image {
	t.Helper()
	before, _ := readAll(t, fs)
	for {
		now, ok := readAll(t, fs)
		if ok && maps.EqualFunc(before, now, bytes.Equal) {
			return now
		}
		before = now
	}
}

// readAll reports false if a file was renamed meanwhile: the log prepares segments in the background.
func readAll(t testing.TB, fs vfs.FS) (all image, ok bool) {
	t.Helper()
	all = image{}
	for _, dir := range []string{"db", "db/wal"} {
		names, err := fs.List(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			if name == "wal" || name == "LOCK" {
				continue
			}
			f, err := fs.Open(path.Join(dir, name), vfs.ReadOnly)
			if errors.Is(err, iofs.ErrNotExist) {
				return nil, false
			}
			if err != nil {
				t.Fatal(err)
			}
			all[path.Join(dir, name)] = readOpen(t, f)
		}
	}
	return all, true
}

func readFile(t testing.TB, fs vfs.FS, name string) []byte {
	t.Helper()
	f, err := fs.Open(name, vfs.ReadOnly)
	if err != nil {
		t.Fatal(err)
	}
	return readOpen(t, f)
}

// readOpen reads a file and closes it.
func readOpen(t testing.TB, f vfs.File) []byte {
	t.Helper()
	size, err := f.Size()
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, size)
	if _, err := f.ReadAt(buf, 0); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	return buf
}

// files makes a file system that holds the image.
func (m image) files(t testing.TB) *vfs.Mem {
	t.Helper()
	fs := vfs.NewMem()
	if err := fs.MkdirAll("db/wal"); err != nil {
		t.Fatal(err)
	}
	for name, bytes := range m {
		f, err := fs.Open(name, vfs.Create)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteAt(bytes, 0); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(f.Sync(), f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(fs.SyncDir("db"), fs.SyncDir("db/wal")); err != nil {
		t.Fatal(err)
	}
	return fs
}

const dataFile = "db/data.ekv"

// damageable is a small store of several levels, with deleted keys, large values, older copies of
// pages and a log, and what it holds.
func damageable(t testing.TB) (image, map[string]string) {
	t.Helper()
	o := modelOptions(vfs.NewMem())
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{}
	x := mustSession(t, s)
	set := func(k, v string) {
		if _, err := put(x, k, v, mvcc.DurabilitySync); err != nil {
			t.Fatal(err)
		}
		want[k] = v
	}
	for round := range 3 {
		for i := range 60 {
			set(fmt.Sprintf("key-%03d", i), fmt.Sprintf("%d-%s", round, strings.Repeat("v", i%90)))
		}
		for i := range 6 {
			set(fmt.Sprintf("large-%d", i), fmt.Sprintf("%d-%s", round, strings.Repeat("L", 100+300*i)))
		}
		for i := round; i < 60; i += 7 {
			k := fmt.Sprintf("key-%03d", i)
			w := mvcc.Write{Durability: mvcc.DurabilitySync}
			w.Delete([]byte(k))
			if _, err := commitAndWait(x, &w); err != nil {
				t.Fatal(err)
			}
			delete(want, k)
		}
		if err := s.Checkpoint(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	set("key-010", "only in the log")
	set("zlog", "only in the log")
	x.Close()
	files := mustRead(t, o.Storage.FS) // as a crash would leave them: Close would merge the log
	mustClose(t, s)
	return files, want
}

func asDamage(err error) bool {
	var damage *storage.CorruptionError
	return errors.As(err, &damage)
}

// TestDamageOfAnyByteIsFoundOrHarmless changes bytes of the data file all over, and never gets a
// wrong answer: a key is read as it was, or the error says damage; what a verification finds sound
// reads as before; and what salvage brings out is right.
func TestDamageOfAnyByteIsFoundOrHarmless(t *testing.T) {
	files, want := damageable(t)
	clean := files[dataFile]
	found := 0
	for at := 0; at < len(clean); at += *damageEvery * exhaustiveStep {
		damaged := slices.Clone(clean)
		damaged[at] ^= 0x41
		files[dataFile] = damaged
		if damageOnce(t, files, want, at) {
			found++
		}
		if t.Failed() {
			return
		}
	}
	if found == 0 {
		t.Fatal("no damage was found")
	}
}

// damageOnce reports whether verification found the damage.
func damageOnce(t *testing.T, files image, want map[string]string, at int) bool {
	t.Helper()
	report, err := inspect.VerifyDir(context.Background(), files.files(t), "db", inspect.VerifyOptions{})
	if errors.Is(err, storage.ErrNewerFormat) { // a version number is what changed: refused, too
		return true
	}
	if err != nil {
		t.Fatalf("byte %d: verify: %v", at, err)
	}
	checkSalvage(t, files, want, at, report)
	o := modelOptions(files.files(t))
	s, err := mvcc.Open(o)
	if err != nil {
		if !asDamage(err) && !errors.Is(err, storage.ErrNewerFormat) && !strings.Contains(err.Error(), "superblock") {
			t.Fatalf("byte %d: open: %v", at, err)
		}
		if report.OK() {
			t.Fatalf("byte %d: open: %v, and the verification found nothing", at, err)
		}
		return true
	}
	defer func() { _ = s.Close() }() // its last checkpoint may meet the damage
	x := mustSession(t, s)
	defer x.Close()
	for k, v := range want {
		got, err := x.Get(nil, []byte(k), 0)
		switch {
		case err != nil && !asDamage(err):
			t.Fatalf("byte %d: get %q: %v", at, k, err)
		case err != nil && report.OK():
			t.Fatalf("byte %d: get %q: %v, and the verification found nothing", at, k, err)
		case err == nil && (!got.Found || string(got.Data) != v):
			t.Fatalf("byte %d: get %q: %v %.20q, want %.20q", at, k, got.Found, got.Data, v)
		}
	}
	checkDamagedScan(t, x, want, at, report)
	return !report.OK()
}

func checkDamagedScan(t *testing.T, x *session, want map[string]string, at int, report *inspect.VerifyReport) {
	t.Helper()
	if _, err := x.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
	c, err := x.Scan(mvcc.ScanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	order, n := slices.Sorted(maps.Keys(want)), 0
	for c.Next() {
		if n == len(order) || string(c.Key()) != order[n] || string(c.Value()) != want[order[n]] {
			t.Fatalf("byte %d: scan: entry %d is %q = %.20q", at, n, c.Key(), c.Value())
		}
		n++
	}
	switch err := c.Err(); {
	case err != nil && (!asDamage(err) || report.OK()):
		t.Fatalf("byte %d: scan: %v, damages %d", at, err, report.DamageTotal)
	case err == nil && n != len(order):
		t.Fatalf("byte %d: scan ended after %d of %d", at, n, len(order))
	}
}

// checkSalvage: what comes out is right; nothing is missing if nothing is damaged; and if something
// is missing it is said to be lost.
func checkSalvage(t *testing.T, files image, want map[string]string, at int, verified *inspect.VerifyReport) {
	t.Helper()
	got := map[string]string{}
	report, err := inspect.Salvage(context.Background(), files.files(t), "db", func(e *inspect.Salvaged) error {
		if _, twice := got[string(e.Key)]; twice {
			return fmt.Errorf("%q comes out twice", e.Key)
		}
		got[string(e.Key)] = string(e.Value)
		return nil
	})
	if err != nil {
		t.Fatalf("byte %d: salvage: %v", at, err)
	}
	if len(report.Notes) > 0 && report.Epoch == 0 || report.LostTotal > 0 && hasLog(report) {
		return // without a superblock, or with a log that does not fit the older one, deleted keys may come back
	}
	for k, v := range got {
		if want[k] != v {
			t.Fatalf("byte %d: salvaged %q = %.20q, want %.20q; %+v", at, k, v, want[k], report)
		}
	}
	if missing := len(want) - len(got); missing > 0 && (report.LostTotal == 0 || verified.OK()) {
		t.Fatalf("byte %d: %d keys are missing, and the report names no lost keys: %+v", at, missing, report)
	}
}

func hasLog(r *inspect.SalvageReport) bool {
	return slices.ContainsFunc(r.Lost, func(d inspect.Damage) bool { return d.Kind == inspect.DamageLog })
}

// TestSalvageRestoresWhatItCan wipes the superblocks, then all inner pages, then the indirection
// table.
func TestSalvageRestoresWhatItCan(t *testing.T) {
	files, want := damageable(t)
	clean := files[dataFile]
	for name, wipe := range map[string]func(id int, p []byte) bool{
		"nothing":     func(int, []byte) bool { return false },
		"superblocks": func(id int, _ []byte) bool { return id < 2 },
		"inner pages": func(_ int, p []byte) bool { return p[4] == 2 },
		"map and row table": func(_ int, p []byte) bool {
			return p[4] == 4
		},
	} {
		t.Run(name, func(t *testing.T) {
			damaged := slices.Clone(clean)
			for id := 0; id*512 < len(damaged); id++ {
				if p := damaged[id*512 : (id+1)*512]; wipe(id, p) {
					clear(p)
				}
			}
			files[dataFile] = damaged
			got := map[string]string{}
			report, err := inspect.Salvage(context.Background(), files.files(t), "db", func(e *inspect.Salvaged) error {
				got[string(e.Key)] = string(e.Value)
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			for k, v := range want {
				if got[k] != v {
					t.Errorf("%q = %.20q, want %.20q", k, got[k], v)
				}
			}
			if name != "superblocks" && len(got) != len(want) {
				t.Errorf("%d keys, want %d", len(got), len(want))
			}
			if (name == "nothing") != (report.LostTotal == 0 && len(report.Notes) == 0) {
				t.Errorf("%+v", report)
			}
		})
	}
}

// TestSuperblockOlderThanTheTruncatedLogIsRefused damages the newest superblock after the log
// before its epoch was removed. The older one alone would open, and silently lack everything since.
func TestSuperblockOlderThanTheTruncatedLogIsRefused(t *testing.T) {
	for puts := 1; puts <= 8; puts++ {
		o := modelOptions(vfs.NewMem())
		s, err := mvcc.Open(o)
		if err != nil {
			t.Fatal(err)
		}
		mustPut(t, s, "a", "1")
		if err := s.Checkpoint(context.Background()); err != nil {
			t.Fatal(err)
		}
		x := mustSession(t, s)
		for i := range puts { // not synced before the segment is sealed, so the log leaves it at once
			if _, err := put(x, fmt.Sprintf("b%d", i), strings.Repeat("2", 40<<10), mvcc.DurabilityAsync); err != nil {
				t.Fatal(err)
			}
		}
		x.Close()
		want := dump(t, s)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		files := mustRead(t, o.Storage.FS)
		for slot := range 2 {
			damaged := maps.Clone(files)
			page := slices.Clone(damaged[dataFile])
			page[slot*o.Storage.PageSize+20] ^= 1
			damaged[dataFile] = page
			o.Storage.FS = damaged.files(t)
			s, err := mvcc.Open(o)
			if err != nil {
				continue // refused
			}
			if err := equalMaps(want, dump(t, s)); err != nil {
				t.Errorf("%d puts, superblock %d damaged: opened without an error, but %v", puts, slot, err)
			}
			if err := s.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
}
